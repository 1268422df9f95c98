"""`megazero` as a model of the LM Evaluation Harness (lm_eval): log-likelihoods of continuations and texts, generation.

Every rank of the grid has an object, makes the same calls and gets the same answers. Each tells the harness that it is
rank 0 of 1, because the harness expects this of a model that is split over processes. `megazero.harness` is where
programs find it.

The conventions are those of the harness's own `HFLM`, so that numbers can be compared. A text begins with the
tokenizer's begin token if the tokenizer adds one. Special tokens that a text spells are special tokens; generated ones
are left out of the text. A context that is too long loses its left end. Windows of a document overlap by one token.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megazero.config.schema import ParallelConfig, Run
from megazero.convert.hf.config import read_json
from megazero.convert.loading import open_on_grid
from megazero.convert.registry import open_source
from megazero.convert.source import Source
from megazero.convert.tokenizers import no_tokenizer
from megazero.data.chat import ChatTemplate, template_of
from megazero.data.indexed import DataError
from megazero.data.libraries import HuggingFaceTokenizer
from megazero.data.special import named_tokens
from megazero.data.tokenizer import Tokenizer, build_tokenizer
from megazero.data.tokenizer_differences import begins_of
from megazero.evaluation.perplexity import Windowing
from megazero.evaluation.scorer import Scorer, longest_context
from megazero.evaluation.windows import Window, continuation_window
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.sampling import Sampling
from megazero.launch import launch
from megazero.mpu.collectives import all_reduce
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.meeting import Environment

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError(
        "the adapter for the LM Evaluation Harness needs the package lm_eval: pip install 'lm_eval>=0.4.9'"
    ) from error
if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

PORTION = 2048
"""Requests that are sorted by length and scored together, so that a micro-batch has requests of similar length."""
MOST_NEW_TOKENS = 256
"""The most new tokens if a task sets no limit, as in HFLM."""
_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class Tokens:
    """A tokenizer and its tokens with a special role.

    eot     the token that ends a text
    prefix  the token before a text without context
    begins  tokens before every text; empty if the tokenizer adds none
    ends    further tokens that end a generated text; they are part of the text unless they are special
    """

    tokenizer: Tokenizer
    eot: int
    prefix: int
    begins: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()


@dataclass(frozen=True)
class GenerationSettings:
    """How one text is generated: stop strings, the most new tokens, and sampling."""

    until: tuple[str, ...]
    most: int
    sampling: Sampling

    @classmethod
    def of(cls, arguments: Mapping[str, Any], end: str) -> GenerationSettings:
        """The settings from the harness's generation arguments. end: the text of the end token, always a stop string.

        Raises ValueError for arguments that this model does not have.
        """
        rest = dict(arguments)
        until = rest.pop("until", None) or []
        lengths = [int(rest.pop(name)) for name in _LENGTHS if rest.get(name) is not None]
        sampled = rest.pop("do_sample", None)
        sampling = Sampling(temperature=0.0, seed=int(rest.pop("seed", 1234)))
        sampling = replace(sampling, **{name: rest.pop(name) for name in _SAMPLING if rest.get(name) is not None})
        if sampled and arguments.get("temperature") is None:
            raise ValueError(
                "do_sample without temperature: the likeliest tokens would be taken all the same; 1.0 draws from the "
                "model as it is"
            )
        if sampled is False:
            sampling = replace(sampling, temperature=0.0)
        unknown = {name: value for name, value in rest.items() if value is not None}
        if unknown:
            raise ValueError(
                f"generation arguments that this model does not have: {unknown}; it has until, do_sample, seed, "
                f"{_SAMPLING + _LENGTHS}"
            )
        stops = [until] if isinstance(until, str) else list(until)
        return cls(
            tuple(stop for stop in dict.fromkeys([*stops, end]) if stop),
            lengths[0] if lengths else MOST_NEW_TOKENS,
            sampling,
        )


@register_model("megazero")
class MegazeroLM(TemplateLM):
    """A checkpoint, opened for the harness.

    path             a checkpoint of any format that `megazero.load` reads
    tp, pp           ranks that share the model by tensor and pipeline parallelism. With more than tp x pp processes,
                     replicas of the model divide the requests
    precision        that of the computation: fp64, fp32, bf16 or fp16; None: the checkpoint's
    batch_size       rows of one forward pass
    device           auto, cpu or cuda; with cuda a rank takes the GPU of its local rank. cuda:0, the default of
                     lm_eval's command line, means auto
    max_length       the most tokens that the model reads at once; None: its sequence length or position table
    tokenizer, tokenizer_path    kind and path of a tokenizer; None: the checkpoint's own
    prefix_token_id  the token before texts without context; None: the tokenizer's begin token if it has one, else its
                     end token
    add_bos_token    whether texts begin with the begin token; None: as the tokenizer does by default
    format           the checkpoint's format, if it could be taken for several
    grid             the caller's grid; None: one of this process, or of those that torchrun started

    Every rank makes an object and makes the same calls in the same order. Raises ConversionError, DataError or
    ValueError.
    """

    backend = "causal"

    def __init__(
        self,
        path: str | Path,
        *,
        tp: int = 1,
        pp: int = 1,
        precision: str | None = None,
        batch_size: int | str = 8,
        max_length: int | None = None,
        device: str = "auto",
        tokenizer: str | None = None,
        tokenizer_path: str | None = None,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        format: str | None = None,
        grid: ProcessGrid | None = None,
    ) -> None:
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size {batch_size}: must be a whole number from 1 on")
        device = "auto" if device == "cuda:0" else device
        environment = Environment.read()
        if grid is None and (min(tp, pp) < 1 or environment.world_size % (tp * pp)):
            raise ValueError(
                f"tp {tp} x pp {pp} does not divide the {environment.world_size} processes that were started"
            )
        self._closing = ExitStack()
        if grid is None:
            grid = self._closing.enter_context(
                launch(Run(parallel=ParallelConfig(tp=tp, pp=pp, device=device)), environment)
            )
        with open_source(Path(path).expanduser(), format) as source:
            loaded = open_on_grid(source, grid, precision)
            built = build_tokenizer(tokenizer, tokenizer_path) if tokenizer else loaded.tokenizer
            if built is None:
                raise DataError(f"{path} {no_tokenizer(loaded.report)}; name one: tokenizer=hf, tokenizer_path=...")
            begin = begin_token(source, built)
        end = loaded.end_of_document(built)
        if end is None:
            raise DataError(f"neither {path} nor its tokenizer says which token ends a text")
        prefix = prefix_token_id if prefix_token_id is not None else begin if begin is not None else end
        tokens = Tokens(built, end, prefix, _begins(built, begin, add_bos_token), loaded.ends)
        super().__init__()
        model = loaded.run.model
        self.scorer, self.tokens = Scorer(loaded.run, loaded.stages, grid, int(batch_size)), tokens
        self.max_length = max_length or longest_context(model) or model.seq_length
        self._device = grid.device
        self._told = False
        self._pipeline = Pipeline.of(loaded.stages, grid, self.scorer.chunk_map)

    def close(self) -> None:
        """Destroy the process groups of this model. All ranks call it; at the program's end it is optional."""
        self._closing.close()

    @cached_property
    def _template(self) -> ChatTemplate:
        """The tokenizer's chat template. Raises DataError if it has none."""
        return template_of(self.tokens.tokenizer)

    @property
    def eot_token_id(self) -> int:
        return self.tokens.eot

    @property
    def prefix_token_id(self) -> int:
        return self.tokens.prefix

    @property
    def max_gen_toks(self) -> int:
        return MOST_NEW_TOKENS

    @property
    def batch_size(self) -> int:
        """The number of rows of a forward pass."""
        return self.scorer.micro_batch_size

    @property
    def tokenizer_name(self) -> str:
        """The key under which the harness caches requests that a chat template has made: a hash of the template."""
        template = self._template
        return hashlib.sha256(f"{template.source}{sorted(template.variables.items())}".encode()).hexdigest()[:16]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template that `apply_chat_template` uses: the one called default, if there are several.

        Raises ValueError for the name of another template.
        """
        if chat_template not in (None, False, True, "default"):
            raise ValueError(f"apply_chat_template {chat_template}: only the default chat template is used")
        return self._template.source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The turns as one text. If the template refuses turns of the system, they are left out, as in HFLM, with one
        warning.
        """
        try:
            return self._template.prompt(chat_history, answer=add_generation_prompt)
        except DataError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history) or not others:
                raise
            if not self._told:
                logging.getLogger(__name__).warning("turns of a system are left out: %s", error)
                self._told = True
            return self._template.prompt(others, answer=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        tokenizer, begins = self.tokens.tokenizer, list(self.tokens.begins)
        ids = (
            tokenizer.encode_with_specials(string)
            if isinstance(tokenizer, HuggingFaceTokenizer)
            else tokenizer.encode(string)
        )
        there = ids[: len(begins)] == begins  # a chat template may have added them
        return ids if there or add_special_tokens is False else [*begins, *ids]

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        tokenizer = self.tokens.tokenizer
        if skip_special_tokens and isinstance(tokenizer, HuggingFaceTokenizer):
            return tokenizer.decode_without_specials(list(tokens))
        return tokenizer.decode(list(tokens))

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **unused: Any,
    ) -> list[tuple[float, bool]]:
        """(log-probability of the continuation in nats, whether greedy decoding generates it) for each request.

        A request is (texts, context ids, continuation ids). A collective of all ranks.
        """
        found: list[tuple[float, bool]] = []
        for start in range(0, len(requests), PORTION):
            portion = requests[start : start + PORTION]
            windows = [continuation_window(before, after, self.max_length) for _, before, after in portion]
            scores = self.scorer.score(windows, greedy=True)
            for (texts, _, _), score in zip(portion, scores, strict=True):
                found.append((-score.loss, bool(score.greedy)))
                self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, in nats. Each token is scored once, after at most max_length tokens.

        A collective of all ranks.
        """
        windowing = Windowing(self.max_length, self.max_length, self.prefix_token_id)
        texts = [request.args[0] for request in requests]
        found: list[float] = []
        for start in range(0, len(texts), PORTION):
            portion = texts[start : start + PORTION]
            windows: list[list[Window]] = [windowing.windows(self.tok_encode(text)) for text in portion]
            scores = iter(self.scorer.score([window for own in windows for window in own]))
            for text, own in zip(portion, windows, strict=True):
                found.append(-sum(next(scores).loss for _ in own))
                self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop string, the end token or the request's length.

        A collective of all ranks. Raises ValueError for arguments of a request that this model does not have.
        """
        end = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        asked = [(request.args[0], request.args[1]) for request in requests]
        all_settings = [GenerationSettings.of(arguments, end) for _, arguments in asked]
        prompts = [self._prompt(context, settings) for (context, _), settings in zip(asked, all_settings, strict=True)]
        ids = self._shared(prompts, all_settings)
        texts = [self._cut(tokens, settings) for tokens, settings in zip(ids, all_settings, strict=True)]
        for request, text in zip(asked, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request, text)
        return texts

    def _prompt(self, context: str, settings: GenerationSettings) -> list[int]:
        """The last tokens of the context that fit into max_length together with the new tokens."""
        room = self.max_length - settings.most
        if room < 1:
            raise ValueError(
                f"{settings.most} new tokens leave no room for a context: the model reads {self.max_length}"
            )
        return self.tok_encode(context)[-room:] or [self.prefix_token_id]

    def _shared(self, prompts: Sequence[list[int]], all_settings: Sequence[GenerationSettings]) -> list[list[int]]:
        """The new tokens of every prompt. The dp replicas take batches in turn. An all-reduce over the world of an
        int64 table [prompts, most new tokens] gives all ranks the result.
        """
        grid = self.scorer.grid
        batches = list(_batches(prompts, all_settings, self.batch_size))
        longest = max((settings.most for settings in all_settings), default=0)
        table = torch.full((len(prompts), longest), -1, dtype=torch.int64, device=grid.device)
        for batch in batches[grid.dp.index :: grid.dp.size]:
            for number, new in zip(
                batch, self._generated([prompts[i] for i in batch], all_settings[batch[0]], batch), strict=True
            ):
                table[number, : len(new)] = torch.tensor(new, dtype=torch.int64)
        all_reduce(table, grid.world, "max").wait()
        return [[token for token in row if token >= 0] for row in table.tolist()]

    def _generated(
        self, prompts: Sequence[list[int]], settings: GenerationSettings, numbers: Sequence[int]
    ) -> list[list[int]]:
        new: list[list[int]] = [[] for _ in prompts]

        def ends(row: int, token: int) -> bool:
            new[row].append(token)
            # A character may take several tokens, and the first token of a stop string may have other text before it.
            recent = (
                self.tok_decode(new[row][-4 * len(stop) - 4 :], skip_special_tokens=False) for stop in settings.until
            )
            return (
                token == self.eot_token_id
                or token in self.tokens.ends
                or any(stop in text for stop, text in zip(settings.until, recent, strict=True))
            )

        vocabulary = self.tokens.tokenizer.vocab_size
        return generate(
            self._pipeline, prompts, settings.most, settings.sampling, ends=ends, vocabulary=vocabulary, numbers=numbers
        )

    def _cut(self, tokens: Sequence[int], settings: GenerationSettings) -> str:
        """The text before the end token and the first stop string, without special tokens."""
        kept = tokens[: tokens.index(self.eot_token_id)] if self.eot_token_id in tokens else tokens
        text = self.tok_decode(kept)
        for stop in settings.until:
            text = text.split(stop)[0]
        return text


def _batches(
    prompts: Sequence[Sequence[int]], all_settings: Sequence[GenerationSettings], size: int
) -> Iterator[list[int]]:
    """Indices of prompts that are generated together: those with the same settings, the longest first, so that a lack
    of memory shows at once.
    """
    by_settings: dict[GenerationSettings, list[int]] = {}
    for number, settings in enumerate(all_settings):
        by_settings.setdefault(settings, []).append(number)
    for numbers in by_settings.values():
        order = sorted(numbers, key=lambda number: (-len(prompts[number]), number))
        yield from (order[start : start + size] for start in range(0, len(order), size))


def begin_token(source: Source, tokenizer: Tokenizer) -> int | None:
    """The begin token (`bos_token`) that Hugging Face's files of a model name; None if they name none."""
    files = [source.companions.get(name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
    token = named_tokens(*({} if file is None else read_json(file) for file in files)).get("bos_token")
    return tokenizer.id_of(token) if token is not None and isinstance(tokenizer, HuggingFaceTokenizer) else None


def _begins(tokenizer: Tokenizer, begin: int | None, wanted: bool | None) -> tuple[int, ...]:
    """The tokens before every text."""
    if wanted is None:
        return begins_of(tokenizer)
    if wanted and begin is None:
        raise ValueError("add_bos_token: this tokenizer has no begin token")
    return (begin,) if wanted and begin is not None else ()
