"""megazero's checkpoints: named global tensors on disk, independent of the layout that wrote them.

For programs, on one process:

    from megazero.checkpoint.api import Checkpoint

    there = Checkpoint("runs/a")                    # the newest complete one
    there.progress["iteration"], there.run["model"]["hidden_size"], there.tensors
    there.read("blocks.0.mlp.up.weight")            # the whole tensor, checked against its hashes
    there.read("embedding.word.weight", "exp_avg", box=((0, 100), (0, 16)))

`megazero.load(path)` returns the model instead and also reads other formats. `manager.Checkpoints` saves and loads the
state of all ranks of a run, `verify` checks every byte, `window` streams tensors, and `format` describes the files.
"""
