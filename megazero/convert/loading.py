"""A trained model in memory from a checkpoint of any format: whole in this process, or one rank's part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megazero.config.options import run_options
from megazero.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, Run
from megazero.convert.hf.config import ends_of_generation, generation_file
from megazero.convert.layout import layout_problems
from megazero.convert.names import FORMATS
from megazero.convert.registry import open_source
from megazero.convert.report import ConversionReport
from megazero.convert.source import ConversionError, Source
from megazero.convert.stages import fill_stages
from megazero.convert.tokenizers import no_tokenizer, tokenizer_of
from megazero.data.indexed import DataError
from megazero.data.tokenizer import ListedTokenizer, Tokenizer
from megazero.inference.chat_tokens import ChatTokens
from megazero.inference.generate import generate
from megazero.inference.given import batch_of_ids, token_ids
from megazero.inference.pipeline import Pipeline
from megazero.inference.prompts import check_ids
from megazero.inference.sampling import Sampling
from megazero.model.batch import MicroBatch
from megazero.model.stage import Stage
from megazero.mpu.chunks import ChunkMap
from megazero.mpu.grid import ProcessGrid, single_process_grid
from megazero.pipeline.build import build_stages
from megazero.pipeline.stage_specs import chunks_of
from megazero.system import device as devices
from megazero.system.given import given_path
from megazero.system.reading import shown

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class LoadedModel:
    """This rank's part of a model, in evaluation mode.

    run         the run that wrote it, with the layout of this grid
    stages      the model chunks that this rank holds
    chunk_map   which chunk is on which stage
    tokenizer   the model's own; None if the checkpoint has none that can be opened
    report      what became of the checkpoint's keys
    ends        tokens at which a generated text ends: the run's end of document, and those that generation_config.json
                or config.json of the model names
    generation  the name and the content of the file that says how the model generates: generation_config.json, else
                config.json; the content is empty without both
    trained     whether the checkpoint is one of a training, whose documents have no begin token
    """

    run: Run
    stages: list[Stage]
    chunk_map: ChunkMap
    tokenizer: ListedTokenizer | None
    report: ConversionReport
    ends: frozenset[int]
    generation: tuple[str, Mapping[str, Any]]
    trained: bool

    def end_of_document(self, tokenizer: Tokenizer | None) -> int | None:
        """The token that ends a document: the run's, or else the tokenizer's. None if neither has one."""
        known = self.run.data.eod_id
        return known if known is not None or tokenizer is None else tokenizer.eod_id


def open_model(
    path: str | Path,
    grid: ProcessGrid,
    *,
    precision: str | None = None,
    format: str | None = None,
) -> LoadedModel:
    """Load this rank's part of the model of a checkpoint of any known format. All dp replicas load the same part.

    precision: that of the weights and the computation; None: that of the training. Communicates nothing: every rank
    reads what it needs. Raises ConversionError if the checkpoint cannot be opened or cannot be split over the grid.
    """
    with open_source(Path(path).expanduser(), format) as source:
        return open_on_grid(source, grid, precision)


def open_on_grid(source: Source, grid: ProcessGrid, precision: str | None = None) -> LoadedModel:
    """As `open_model`, for a source that is open."""
    run = for_inference(source.run, grid, precision)
    stages = build_stages(run, grid)
    fill_stages(stages, source)
    for stage in stages:
        stage.eval().requires_grad_(False)
    assert run.model.vocab_size is not None
    known = () if run.data.eod_id is None else (run.data.eod_id,)
    ends = ends_of_generation(source.companions, run.model.vocab_size).union(known)
    return LoadedModel(
        run,
        stages,
        chunks_of(run),
        tokenizer_of(source),
        source.report,
        ends,
        generation_file(source.companions),
        source.position.iteration > 0,
    )


def model_of(source: Source, *, precision: str | None = None, device: str | torch.device = "cpu") -> TrainedModel:
    """As `load`, for a source that is open."""
    return TrainedModel(open_on_grid(source, single_process_grid(device), precision))


def for_inference(run: Run, grid: ProcessGrid, precision: str | None = None) -> Run:
    """The run without the layout of its training, split over this grid instead.

    Raises ConversionError where it cannot be split.
    """
    parallel = ParallelConfig(tp=grid.axes.tp, pp=grid.axes.pp, device=grid.device.type)
    optimizer = OptimizerConfig(precision=precision or run.optimizer.precision)
    model = replace(run.model, hidden_dropout=0.0, attention_dropout=0.0)
    problems = layout_problems(model, tp=grid.axes.tp, pp=grid.axes.pp, dp=grid.axes.dp)
    if problems:
        raise ConversionError("the model cannot be opened like this: " + "; ".join(problems))
    return replace(run, model=model, parallel=parallel, optimizer=optimizer)


class TrainedModel(nn.Module):
    """A whole model in one process, as `load` returns it. Parameters have megazero's global names.

    config     the model's shape and settings
    run        the configuration of the run that wrote it; what is not known has its default
    tokenizer  the model's tokenizer, or None
    report     what became of the checkpoint's keys
    ends       tokens at which `generate` ends
    """

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        (self.stage,) = loaded.stages
        self.run, self.tokenizer, self.report, self.ends = loaded.run, loaded.tokenizer, loaded.report, loaded.ends
        self.eval()

    @property
    def config(self) -> ModelConfig:
        return self.run.model

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [b, s] -> logits [b, s, v] in the model's dtype. The logits at position i predict the token after
        it.
        """
        assert self.config.vocab_size is not None
        ids = batch_of_ids(ids, self.config.vocab_size)
        batch = MicroBatch(ids, ids, None, torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device))
        return self.stage.logits(None, batch).transpose(0, 1)

    def generate(
        self, ids: Sequence[int] | Tensor | NDArray[Any], max_new_tokens: int, sampling: Sampling = GREEDY
    ) -> list[int]:
        """The ids of a prompt and up to `max_new_tokens` generated ids; generation ends with a token of `ends`.

        ids: a list, a tensor or an array of one prompt. `megazero.inference.generate` also serves batches, streams and
        grids. Raises TypeError for anything else, such as text, ValueError for a prompt that the model cannot take.
        """
        assert self.config.vocab_size is not None
        text = (
            f"the checkpoint {no_tokenizer(self.report)}, so encode it with the one that the model was trained with"
            if self.tokenizer is None
            else "model.tokenizer.encode(text) makes them, and model.tokenizer.decode(ids) a text of ids"
        )
        ids = token_ids("ids", ids, self.config.vocab_size, text=text)
        model = Pipeline.of([self.stage])
        vocabulary = None if self.tokenizer is None else self.tokenizer.vocab_size
        (new,) = generate(
            model, [ids], max_new_tokens, sampling, ends=lambda row, token: token in self.ends, vocabulary=vocabulary
        )
        return [*ids, *new]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], max_new_tokens: int = 512, sampling: Sampling = GREEDY
    ) -> str:
        """The model's answer to a conversation, by the tokenizer's chat template.

        messages: the turns, {"role": ..., "content": ...} each. The answer ends as in `generate`, or with the
        template's token for the end of a turn. It has no special tokens. Text in a turn that spells a special token
        stays text. Raises TypeError for what is no list of turns, DataError for a model without a chat template, and
        for turns that the template refuses.
        """
        if isinstance(messages, str | Mapping) or not all(isinstance(turn, Mapping) for turn in messages):
            raise TypeError(
                'messages is a list of turns, such as [{"role": "user", "content": "Hello"}], and not '
                f"{type(messages).__name__} {shown(messages)}"
            )
        tokens = self._chat_tokens
        ends = self.ends | tokens.ends
        ids = check_ids("the conversation", tokens.question(messages), self.config)
        model = Pipeline.of([self.stage])
        (new,) = generate(
            model, [ids], max_new_tokens, sampling, ends=lambda row, token: token in ends, vocabulary=tokens.vocab_size
        )
        return tokens.decode(new[:-1] if new and new[-1] in ends else new)

    @cached_property
    def _chat_tokens(self) -> ChatTokens:
        """Raises DataError."""
        if self.tokenizer is None:
            raise DataError(f"the checkpoint {no_tokenizer(self.report)}, and a chat needs one with a chat template")
        return ChatTokens(self.tokenizer)


def load(
    path: str | Path, *, precision: str | None = None, device: str | torch.device = "cpu", format: str | None = None
) -> TrainedModel:
    """The whole model of a checkpoint in this process, in evaluation mode: `megazero.load`.

    path       a checkpoint of megazero, Hugging Face (BLOOM, GPT-2, LLaMA, OPT; also ORG/NAME of its Hub), PEFT,
               Megatron-DeepSpeed or Megatron-LM, a universal checkpoint, or consolidated weights
    precision  fp64, fp32, bf16 or fp16; None: the precision of the training
    device     the device of the parameters
    format     the name of the format, if the folder could be taken for several

    Raises ConversionError if the checkpoint cannot be read, ValueError or TypeError for another argument that cannot be
    used.
    """
    path = given_path("path", path)
    for name, value, known in (
        ("precision", precision, run_options()["precision"].choices or ()),
        ("format", format, FORMATS),
    ):
        if value is not None and value not in known:
            raise ValueError(f"{name} is {value!r}: known are {', '.join(known)}")
    try:
        torch.zeros(0, device=device)
    except (RuntimeError, AssertionError) as error:
        near = "cpu or cuda" if devices.cuda_available() else "cpu; torch finds no CUDA device here"
        raise ValueError(f"device is {str(device)!r}: nearest: {near}") from error
    return TrainedModel(open_model(path, single_process_grid(device), precision=precision, format=format))
