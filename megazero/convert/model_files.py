"""Files that a run keeps in its checkpoints: of the model that it started from (config.json, generation_config.json),
and the tokenizer's.

With them a checkpoint generates text on any machine and from any folder, and a fine-tuned model can be converted back
to its original format with all its files. The files are read when the run starts, because they may be gone when a
checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from megazero.checkpoint.manager import FoundCheckpoint
from megazero.config.schema import Run
from megazero.convert.companions import companions, read_contents, write_companions
from megazero.convert.registry import open_source
from megazero.convert.tokenizers import TOKENIZERS, tokenizer_files
from megazero.data.progress import to_stderr
from megazero.data.tokenizer import carried_files

OF_THE_MODEL = ("config.json", "generation_config.json")
"""The files that are kept if the run uses another tokenizer than the model's."""


def model_files(run: Run, found: FoundCheckpoint | None) -> Callable[[Path], None] | None:
    """A function that writes these files into the folder of a checkpoint; one rank calls it. None where there are no
    files.

    They come from the checkpoint that the run resumes from, or else from that of --init-from. A tokenizer that these do
    not have is the run's.
    """
    files = dict(companions(found.path) if found is not None else _of_start(run))
    if run.data.tokenizer is not None and not any(name in files for name, _ in TOKENIZERS):
        files |= carried_files(run.data.tokenizer, run.data.tokenizer_path)
    contents = read_contents(files, to_stderr)
    return partial(write_companions, contents) if contents else None


def _of_start(run: Run) -> Mapping[str, Path]:
    if run.checkpoint.init_from is None:
        return {}
    with open_source(Path(run.checkpoint.init_from).expanduser()) as source:
        own, (kind, path) = tokenizer_files(source), (run.data.tokenizer, run.data.tokenizer_path)
        # The same files may have another name: that of the Hub, or that of their folder.
        if own is None or (own[0] == kind and carried_files(*own) == carried_files(kind, path)):
            return source.companions
        return {name: path for name, path in source.companions.items() if name in OF_THE_MODEL}
