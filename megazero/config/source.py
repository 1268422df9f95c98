"""Sources of settings (command line, YAML file, DeepSpeed file, preset) and their precedence, and the decisions about
settings that no source gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megazero.config.lengths import Length, Measure
from megazero.system.status import FAILED, MISTAKEN
from megazero.system.words import counted


class Damage(str):
    """A problem of a checkpoint that was whole once, among those of a configuration, in which it is no mistake."""


def problem_of(error: Exception, text: str) -> str:
    """What an error says, as a problem of a configuration. It is damage if the error's `status` says so."""
    return Damage(text) if getattr(error, "status", MISTAKEN) == FAILED else text


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, in one message. notes: where values in it come from.

    status: that of the program. With damage among the problems it is 1: what the checkpoint would have said is not
    known, and other problems may be for want of it. of_all_ranks: whether every rank raises it, in one agreement.
    """

    def __init__(self, problems: Sequence[str], notes: Sequence[str] = (), *, of_all_ranks: bool = False) -> None:
        self.problems, self.notes, self.of_all_ranks = tuple(problems), tuple(notes), of_all_ranks
        damaged = [isinstance(problem, Damage) for problem in problems]
        self.status = FAILED if any(damaged) else MISTAKEN
        wrong = f"{counted(len(problems), 'problem')} in the configuration"
        head = "a checkpoint cannot be read" if problems and all(damaged) else wrong
        lines = [f"  {i}. {p}" for i, p in enumerate(problems, 1)] + [f"  ({note})" for note in notes]
        super().__init__(f"{head}:\n" + "\n".join(lines))


@dataclass
class ConfigSource:
    """The settings of one source.

    name      its name in messages: "the command line", "run.yaml"
    settings  field name -> value; None in a file asks for the derived default
    written   field name -> its spelling in the source: "--tensor-model-parallel-size", "optimizer.params.lr"
    bad       fields whose value could not be read; checks that need them are left out
    problems  a sentence for each mistake
    disputed  field -> sentence, for fields to which the source gives two values: a problem unless a higher source sets
              the field
    unread    whether the source could not be read at all, so that its settings are not known
    resolved  whether the source is a resolved run, which may give lengths in several units
    spelled   length of the run or of its learning rate -> its spellings in the source, with the value of each
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    disputed: dict[str, str] = field(default_factory=dict)
    unread: bool = False
    resolved: bool = False
    spelled: dict[str, dict[str, Length | None]] = field(default_factory=dict)

    def put(self, name: str, value: Any, written: str) -> None:
        """Set a field. Of a length that has several spellings one may be given; none in the others resets nothing."""
        if isinstance(value, Length) or name in self.spelled:
            spelled = self.spelled.setdefault(name, {})
            spelled[written] = value
            written, value = next(((word, length) for word, length in spelled.items() if length), (written, None))
        self.settings[name], self.written[name] = value, written

    def refuse(self, sentence: str, *fields: str) -> None:
        """Note a mistake behind the source's name. fields: those whose value could not be read for it."""
        self.problems.append(f"{self.name}: {sentence}")
        self.bad.update(fields)

    def length_problems(self) -> list[str]:
        """What is wrong with the source's lengths: one of them in two ways, or both iterations and samples.

        Such lengths become `bad`, so that no check compares them and reports the same mistake once more.
        """
        problems = []
        for name, spelled in self.spelled.items():
            both = [written for written, length in spelled.items() if length]
            if len(both) > 1:
                problems.append(f"{' and '.join(both)} say the same thing in two ways: give one of them")
                self.bad.add(name)
        in_order = sorted(self.spelled, key=lambda name: name != "train_length")
        iterations, samples = (
            [name for name in in_order if self._counts(name, measure)]
            for measure in (Measure.ITERATIONS, Measure.SAMPLES)
        )
        if iterations and samples and not problems and not self.resolved:
            problems.append(
                f"{self._that_count(iterations)} iterations, and {self._that_count(samples)} samples: give all lengths "
                f"of {self.name} in one unit"
            )
            self.bad.update({*iterations, *samples} - {"train_length"})  # alone the length of the run can be checked
        return problems

    def _that_count(self, names: Sequence[str]) -> str:
        """The spellings of some lengths, and the verb behind them: "--lr-warmup counts"."""
        return f"{' and '.join(self.written[name] for name in names)} {'counts' if len(names) == 1 else 'count'}"

    def _counts(self, name: str, measure: Measure) -> bool:
        value = self.settings.get(name)
        return isinstance(value, Length) and value.measure is measure


def merge(sources: Sequence[ConfigSource]) -> dict[str, Any]:
    """The settings of all sources; later ones have precedence."""
    merged: dict[str, Any] = {}
    for source in sources:
        merged.update(source.settings)
    return merged


@dataclass(frozen=True)
class Decision:
    """What was decided about one field of a run.

    field  name of the field
    value  its value, of the field's type
    why    a few words: what the value follows from
    """

    field: str
    value: Any
    why: str
