"""From a run as the user asks for it to the run that is trained: `resolve`, a pure function of the run and of facts.

What a user leaves open follows from facts, which are asked beforehand (`checked`). So the command, --validate-only,
--print-config and `megazero.pretrain` make the same decisions, and a start that learns more (the data are read, a card
has tried its kernels) resolves the same request again. Nothing else changes a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megazero.config.lengths import Length, Measure
from megazero.config.options import run_options
from megazero.config.placement import AUTO, FLAGS, applied
from megazero.config.schema import Run
from megazero.config.source import Decision
from megazero.config.validate import problems_of
from megazero.data.corpus import Corpus
from megazero.mpu.axes import Axes, axes_of
from megazero.plan.budgets import leaves_order_to_budgets, order_within_budgets
from megazero.plan.rank_state import has_nccl
from megazero.plan.step_times import MachineRates
from megazero.train.epochs import Epoch, samples_of
from megazero.train.init_from import AdapterBase
from megazero.train.placed import Room, chosen

DEFAULT_TOKENIZER = "gpt2"
DEFAULT_PROMPT = "import os\n\n\ndef "
"""The prompt of the final sample with the default corpus, which is Python source."""


@dataclass(frozen=True)
class Vocabulary:
    """Number of tokens of a tokenizer, and the id that ends a document; None: no token does, or it is not known yet."""

    size: int
    eod_id: int | None


@dataclass(frozen=True)
class Facts:
    """What a run depends on besides its settings. None stands for what was not asked, or cannot be known here.

    world_size     number of ranks
    device         kind of device that --device auto is: cpu or cuda; None: the ranks are on other machines
    kind           kind of device that plans are made for
    corpus         the default corpus, for a run that names no data
    vocabulary     of the tokenizer
    epoch          how much one pass over the data is
    base           the model that adapters belong to
    tries_kernels  whether the body of attention, and so what it keeps, can be known: on a CPU, or with a card at hand
    rates          how fast the ranks compute, copy, read and write, for --placement auto
    room           memory and disks of a rank on this host, for --placement auto
    nccl           whether ranks communicate through NCCL; None: as the settings say
    """

    world_size: int
    kind: str
    device: str | None = None
    corpus: Corpus | None = None
    vocabulary: Vocabulary | None = None
    epoch: Epoch | None = None
    base: AdapterBase | None = None
    tries_kernels: bool = False
    rates: MachineRates | None = None
    room: Room | None = None
    nccl: bool | None = None


@dataclass(frozen=True)
class ResolvedRun:
    """A run with all that its user left open, as far as the facts reach.

    asked      the run as the user asks for it
    run        the run to train
    decisions  every field that the user did not set, and why it has its value
    placement  sentences about a placement that was searched for
    """

    asked: Run
    facts: Facts
    run: Run
    decisions: tuple[Decision, ...] = ()
    placement: tuple[str, ...] = ()

    @cached_property
    def axes(self) -> Axes:
        return axes_of(self.run, self.facts.world_size)

    @property
    def left_open(self) -> tuple[str, ...]:
        """The fields that these facts do not decide, by name."""
        still_open = {
            "vocab_size": self.run.model.vocab_size is None,
            "train_length": self.run.schedule.epochs is not None,
            "micro_batch_order": leaves_order_to_budgets(self.run) and not self.facts.tries_kernels,
            "placement": self.run.offload.placement == AUTO,
        }
        return tuple(field for field, is_open in still_open.items() if is_open)


def resolve(asked: Run, facts: Facts) -> ResolvedRun:
    """The run with every decision that the facts allow. Pure: equal arguments give equal results, on every rank.

    Raises ConfigError where no decision is possible: epochs that fill no batch, budgets that no placement keeps.
    """
    decisions = [*_from_facts(asked, facts)]
    run = _decided(asked, decisions)
    axes = axes_of(run, facts.world_size)
    if facts.tries_kernels:  # budgets decide the order by bytes, and so by the vocabulary
        why = "the largest groups that the budgets have room for"
        order = order_within_budgets(run, axes, facts.kind)
        decisions += [Decision(field, value, why) for field, value in order.items()]
        run = _decided(asked, decisions)
    if run.offload.placement != AUTO or facts.rates is None or run.model.vocab_size is None:
        return ResolvedRun(asked, facts, run, tuple(decisions))  # without a vocabulary there are no bytes to search by
    nccl = has_nccl(run.parallel, axes) if facts.nccl is None else facts.nccl
    choice = chosen(run, axes, facts.kind, facts.rates, facts.room, nccl=nccl)
    # What was found are flags of the run now: a run that reads them from run.yaml must not search, and find others.
    settings: dict[str, Any] = {**dict(choice.settings), "placement": FLAGS, "placement_rates": None}
    why = "the fastest that a search finds under the budgets"
    decisions += [Decision(field, value, why) for field, value in settings.items()]
    return decided(asked, facts, tuple(decisions), choice.told)


def contradictions(resolved: ResolvedRun) -> list[str]:
    """Which decided values contradict the user's settings: the samples of --epochs a warm-up that is longer, the number
    of the tokenizer's tokens an --eod-id that is no token. Each sentence ends with why the value was decided, and
    advises to change what the user says.

    The kind of device is left out: `requirements.machine_problems` says what a machine cannot do.
    """
    asked, world_size = resolved.asked, resolved.facts.world_size
    decisions = [decision for decision in resolved.decisions if decision.field != "device"]
    known = {*problems_of(asked, world_size, own_data=True)}
    fields = frozenset(decision.field for decision in decisions)
    reasons = {flag: decision.why for decision in decisions for flag in run_options()[decision.field].flags}
    problems = list[str]()
    for problem in problems_of(_decided(asked, decisions), world_size, own_data=True, decided=fields):
        if problem not in known:
            # A flag may be the beginning of another one's name, as --lr of --lr-warmup.
            named = [f"{flag}: {why}" for flag, why in reasons.items() if re.search(rf"{flag}(?![\w-])", problem)]
            problems.append(f"{problem} ({'; '.join(named)})")
    return problems


def _decided(asked: Run, decisions: Iterable[Decision]) -> Run:
    return applied(asked, {decision.field: decision.value for decision in decisions})


def decided(asked: Run, facts: Facts, decisions: tuple[Decision, ...], placement: tuple[str, ...]) -> ResolvedRun:
    """The run with decisions that another rank has made."""
    return ResolvedRun(asked, facts, _decided(asked, decisions), decisions, placement)


def _from_facts(asked: Run, facts: Facts) -> Iterator[Decision]:
    """What files, a program and the machine say."""
    if asked.parallel.device == "auto" and facts.device is not None:
        yield Decision("device", facts.device, "a GPU is here" if facts.device == "cuda" else "no GPU is here")
    if facts.corpus is not None and not (asked.data.data_path or asked.data.instruction_data):
        why = "the default corpus, for want of --data-path"
        yield Decision("data_path", (facts.corpus.prefix,), why)
        yield Decision("tokenizer", DEFAULT_TOKENIZER, why)
        yield Decision("tokenizer_path", facts.corpus.tokenizer_path, why)
        if asked.trainer.sample_prompt is None:
            yield Decision("sample_prompt", DEFAULT_PROMPT, why)
    if facts.vocabulary is not None:
        if asked.model.vocab_size is None:
            yield Decision("vocab_size", facts.vocabulary.size, "the tokenizer has as many tokens")
        if asked.data.eod_id is None and facts.vocabulary.eod_id is not None:
            yield Decision("eod_id", facts.vocabulary.eod_id, "the tokenizer's token that ends a document")
    if facts.base is not None and asked.lora.lora_rank is not None:
        if asked.checkpoint.init_from != facts.base.path:
            yield Decision("init_from", facts.base.path, "the model that the adapters belong to")
        if asked.lora.lora_base_bits is not None and asked.lora.lora_base_qkv is None:
            yield Decision("lora_base_qkv", facts.base.qkv, "as the base has its matrices")
    if asked.schedule.epochs is not None and facts.epoch is not None:
        samples = samples_of(asked, facts.epoch, axes_of(asked, facts.world_size).dp)
        length = Length(samples, Measure.SAMPLES, by_name=True)  # a step counts samples, and no epochs
        yield Decision("train_length", length, f"--epochs {asked.schedule.epochs:g} of the data")
