"""Files of the model that a run started from (config.json, generation_config.json, a tokenizer), kept in its
checkpoints.

With them a fine-tuned model can be converted back to its original format with all its files. The files are read when
the run starts, because they may be gone when a checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from megazero.checkpoint.manager import FoundCheckpoint
from megazero.config.schema import Run
from megazero.convert.companions import companions, read_contents, write_companions
from megazero.convert.registry import open_source
from megazero.convert.tokenizers import tokenizer_files
from megazero.data.progress import to_stderr

OF_THE_MODEL = ("config.json", "generation_config.json")
"""The files that are kept if the run uses another tokenizer than the model's."""


def model_files(run: Run, found: FoundCheckpoint | None) -> Callable[[Path], None] | None:
    """A function that writes these files into the folder of a checkpoint; one rank calls it. None where there are no
    files.

    They come from the checkpoint that the run resumes from, or else from that of --init-from.
    """
    files = companions(found.path) if found is not None else _of_start(run)
    contents = read_contents(files, to_stderr)
    return partial(write_companions, contents) if contents else None


def _of_start(run: Run) -> Mapping[str, Path]:
    if run.checkpoint.init_from is None:
        return {}
    with open_source(Path(run.checkpoint.init_from).expanduser()) as source:
        if tokenizer_files(source) in (None, (run.data.tokenizer, run.data.tokenizer_path)):
            return source.companions
        return {name: path for name, path in source.companions.items() if name in OF_THE_MODEL}
