"""The report at the end of a run: a text that the model generates, and the paths of the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megazero.config.schema import Run
from megazero.data.tokenizer import Tokenizer
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.sampling import Sampling
from megazero.inference.terminal import escape_control
from megazero.model.stage import Stage
from megazero.mpu.grid import ProcessGrid
from megazero.pipeline.stage_specs import chunks_of
from megazero.telemetry.sinks import named_places
from megazero.train.text_blocks import pairs
from megazero.zero.state import ModelState


def sample_text(
    run: Run, stages: Sequence[Stage], model: ModelState, grid: ProcessGrid, tokenizer: Tokenizer | None
) -> str | None:
    """The prompt of --sample-prompt and the model's continuation; None without a tokenizer or a prompt.

    A collective of all ranks. Sharded parameters are gathered unit by unit.
    """
    prompt = run.trainer.sample_prompt
    if prompt is None or tokenizer is None:
        return None
    model.wait_parameters()
    ids = tokenizer.encode(prompt)
    if not ids:
        return None
    eod_id = run.data.eod_id
    (new,) = generate(
        replace(Pipeline.of(stages, grid, chunks_of(run)), reading=model.reading),
        [ids],
        run.trainer.sample_tokens,
        Sampling(temperature=0.7, top_k=20),
        ends=lambda _, token: token == eod_id,
        vocabulary=tokenizer.vocab_size,
    )
    return tokenizer.decode([*ids, *new])


def report(run: Run, text: str | None, disks: str | None = None) -> None:
    """Print the sample, if there is one, what went to disks, and the paths of the outputs. Called by rank 0."""
    if text is not None:
        print(f"\nThe model continues {run.trainer.sample_prompt!r}:\n\n{escape_control(text)}\n", flush=True)
    sinks = {flag[2:].removesuffix("-file").removesuffix("-dir"): place for flag, place in named_places(run).items()}
    places = {
        "checkpoints": run.checkpoint.save,
        **sinks,
        "tokenizer": run.data.tokenizer_path,
        "data": " ".join(run.data.data_path or run.data.instruction_data),
    }
    print(pairs([(name, text or "") for name, text in ({"offloaded": disks} | places).items()]), flush=True)
