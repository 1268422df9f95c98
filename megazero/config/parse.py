"""From a command line to a frozen, validated run.

The order of precedence: flags, --config, --deepspeed-config, --preset, DeepSpeed's defaults for keys that its file
leaves out, the model of --init-from, this program's defaults. All mistakes in all of them are raised as one
ConfigError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megazero.config.checks import CheckContext
from megazero.config.checks_layout import world_problem
from megazero.config.checks_training import warnings
from megazero.config.deepspeed import DeepSpeedSource, read_deepspeed
from megazero.config.dump import changed_settings, dump, read_yaml
from megazero.config.flags import CommandOptions, read_command_line
from megazero.config.help import requested_help
from megazero.config.idle_flags import without_effect
from megazero.config.lengths import Length, Measure
from megazero.config.model_shape import contradictions, settled
from megazero.config.options import build_run, run_options
from megazero.config.placement import AUTO, with_placement
from megazero.config.presets import preset
from megazero.config.schema import Run, ScheduleConfig
from megazero.config.source import ConfigError, ConfigSource, merge
from megazero.config.validate import problems_of
from megazero.system import hub
from megazero.system.given import given_words, is_whole, kind

__all__ = [
    "DEFAULT_ITERATIONS",
    "DEFAULT_MINUTES",
    "ConfigError",
    "ParsedArguments",
    "command",
    "dump",
    "parse_arguments",
    "parse_run",
]

DEFAULT_ITERATIONS, DEFAULT_MINUTES = 100, 10.0
"""Length of a run for which none is given: whichever is reached first."""


def command(argv: Sequence[str]) -> CommandOptions:
    """--validate-only, --world-size, --help and the files of a command line. Its mistakes are left to `parse_run`."""
    return read_command_line(argv).command


@dataclass(frozen=True)
class ParsedArguments:
    """The result of a command line.

    run       the validated run
    command   what to do with it
    notes     sentences for the user before it starts, which one rank should print
    explicit  fields that flags, files or a preset set; not those that follow from others or from --init-from
    """

    run: Run
    command: CommandOptions
    notes: tuple[str, ...]
    explicit: frozenset[str]

    def changed_settings(self) -> dict[str, dict[str, Any]]:
        """The explicit settings that differ from the defaults: section -> field -> plain value."""
        return changed_settings(self.run, self.explicit)


@dataclass(frozen=True)
class ProgramSettings:
    """The settings that a calling program gives for its run.

    settings  its settings, which flags override
    has_data  whether it passes the training data itself
    defaults  what it has in place of the defaults of this package, which files override too
    whole_batches  whether it is for steps of the whole global batch alone, so that a ramp to it is not checked
    """

    settings: ConfigSource
    has_data: bool
    defaults: ConfigSource | None = None
    whole_batches: bool = False


def parse_run(
    argv: Sequence[str], world_size: int | None, model_of: Callable[[str], ConfigSource] | None = None
) -> Run:
    """The run only. Arguments and errors are those of `parse_arguments`."""
    return parse_arguments(argv, world_size, model_of).run


def parse_arguments(
    argv: Sequence[str],
    world_size: int | None,
    model_of: Callable[[str], ConfigSource] | None = None,
    missing_files: Callable[[Run], Sequence[str]] | None = None,
    program: ProgramSettings | None = None,
) -> ParsedArguments:
    """Parse and validate a command line.

    world_size     number of ranks. None (tools that start no ranks) leaves out the checks that need it. With
                   --validate-only or --print-config, --world-size and --ranks override it
    model_of       the settings of the checkpoint at a path (`config.model_shape.shape_settings`) and its tokenizer, for
                   --init-from; None in programs that cannot start from a checkpoint
    missing_files  what is wrong with the files that a run names. It is called only if something else is wrong, so that
                   all is reported at once; for a valid run the caller checks the files
    program        the settings of a calling program, which flags override

    `--help` and `--help-all` print and raise SystemExit(0). Raises ConfigError with everything that is wrong, and
    TypeError for arguments of another type.
    """
    argv = given_words("argv", argv)
    if world_size is not None and not is_whole(world_size):
        raise TypeError(f"world_size is {kind(world_size)}: a number of ranks is needed, or None")
    line = read_command_line(argv)
    help_text = requested_help(argv)
    if help_text is not None:  # before any check: a person who asks for help may have typed anything else
        sys.stdout.write(help_text)
        raise SystemExit(0)
    problems = list(line.source.problems)
    if line.command.skip_files and not line.command.validate_only:
        problems.append("--skip-files goes with --validate-only: a run needs what it names")
    problems += _wrong_ranks(line.command, world_size)
    if line.command.starts_nothing:
        world_size = line.command.ranks_to_check(world_size)
    named = [*_sources_by_name(line.command), *([program.settings] if program else []), line.source]
    sources, contradicted, placed = with_placement(named)
    problems += contradicted
    own_data, whole_batches = (program.has_data, program.whole_batches) if program is not None else (False, False)
    explicit = frozenset(name for source in sources for name in source.settings)  # before defaults join the sources
    notes = [*placed, *_deepspeed_defaults(sources)]
    for source in sources:
        problems += [*(source.problems if source is not line.source else ()), *source.length_problems()]
    model = _init_from_source(sources, model_of)
    if model is not None:
        problems += model.problems
        sources.insert(0, model)
    settings = merge([program.defaults, *sources] if program and program.defaults else sources)
    settings |= _with_commits(settings, model, line.command)
    for source in sources:
        if isinstance(source, DeepSpeedSource):
            unequal = source.accumulate(settings, world_size)
            problems += source.contradictions(line.source) + unequal
            if unequal:  # is reported: the other checks of the batch are left out
                line.source.bad.add("global_batch_size")
    bad, given = _unknown(sources), frozenset(line.source.settings)
    # From here on a setting is a field of the run, which nothing renames: search for the field to find its effect.
    run = build_run(_with_defaults(settings, world_size))
    wrong = problems_of(run, world_size, bad=bad, given=given, own_data=own_data, whole_batches=whole_batches)
    problems += _with_ways_to_start(wrong, run, world_size, line.command) if program is None else wrong
    problems += contradictions(model, run, bad) if model is not None and not model.unread else ()
    if problems and missing_files is not None and line.command.looks_at_files:
        problems += missing_files(build_run({name: value for name, value in settings.items() if name not in bad}))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), notes)
    return ParsedArguments(
        run,
        line.command,
        (*notes, *without_effect(CheckContext(run, world_size, given)), *warnings(run)),
        explicit,
    )


def _wrong_ranks(given: CommandOptions, world_size: int | None) -> Iterator[str]:
    """What is wrong with --ranks and --world-size. world_size: the ranks that a launcher has started, if any."""
    if given.ranks is not None and given.ranks < 1:
        yield f"--ranks {given.ranks}: must be at least 1"
    elif given.ranks is not None and not given.starts_nothing and world_size is not None:
        started = "1 rank" if world_size == 1 else f"{world_size} ranks"
        yield f"--ranks {given.ranks} starts ranks where there is no launcher; one has started {started} already"
    if given.world_size is not None and not given.starts_nothing:
        yield f"--world-size {given.world_size} goes with --validate-only; to start ranks: --ranks {given.world_size}"
    if None not in (given.ranks, given.world_size) and given.ranks != given.world_size:
        yield f"--ranks {given.ranks} and --world-size {given.world_size} say different numbers of ranks"


def _with_ways_to_start(problems: Sequence[str], run: Run, world_size: int | None, given: CommandOptions) -> list[str]:
    """The problems, where that of a wrong number of ranks also says what to type. A program has no flags to type."""
    ranks = run.parallel.tp * run.parallel.pp
    if world_size is None or world_size < 1 or ranks < 1 or (wrong := world_problem(run, world_size)) is None:
        return [*problems]
    enough = -(-world_size // ranks) * ranks
    ways = (
        f"--world-size {enough} checks it"
        if given.starts_nothing
        else f"to start {enough} ranks on this host: --ranks {enough}, or torchrun --nproc-per-node {enough} "
        "pretrain_gpt.py and the flags"
    )
    return [f"{problem}; {ways}" if problem == wrong else problem for problem in problems]


def _deepspeed_defaults(sources: list[ConfigSource]) -> list[str]:
    """Insert DeepSpeed's defaults below all sources; return a note on those that apply."""
    for source in [source for source in sources if isinstance(source, DeepSpeedSource) and not source.unread]:
        notes = source.notes_on_defaults(sources)  # of those that no source sets: before they are one themselves
        sources.insert(0, source.defaults)
        return notes
    return []


def _sources_by_name(given: CommandOptions) -> list[ConfigSource]:
    """The sources that a command line names (preset and files), the lowest first."""
    sources = []
    if given.preset is not None:
        source = ConfigSource(f"--preset {given.preset}")
        try:
            for name, value in preset(given.preset).items():
                source.put(name, value, name)
        except ValueError as reason:
            source.problems.append(f"--preset {given.preset}: {reason}")
            source.unread = True
        sources.append(source)
    if given.deepspeed_config is not None:
        sources.append(read_deepspeed(given.deepspeed_config))
    if given.config is not None:
        sources.append(read_yaml(given.config))
    return sources


def _init_from_source(
    sources: Sequence[ConfigSource], model_of: Callable[[str], ConfigSource] | None
) -> ConfigSource | None:
    """The settings of the checkpoint of --init-from, the lowest source; None without the flag."""
    above = merge(sources)
    path = above.get("init_from")
    if path is None:
        return None
    if model_of is None:
        return ConfigSource(
            f"--init-from {path}", problems=[f"--init-from {path}: this program starts from no checkpoint"], unread=True
        )
    return settled(model_of(path), above)


def _with_commits(settings: Mapping[str, Any], model: ConfigSource | None, command: CommandOptions) -> dict[str, str]:
    """The names of the Hub among settings, with the commits that they stand for: a run that resumes has the same."""
    files: dict[str, Sequence[str]] = {} if command.skip_files else {"tokenizer_path": hub.TOKENIZER}
    if model is not None and not model.unread:
        files["init_from"] = hub.MODEL
    names = dict[str, str]()
    for field, patterns in files.items():
        with suppress(hub.HubError):  # whoever opens the files reports it
            if isinstance(settings.get(field), str):
                names[field] = hub.pinned(settings[field], patterns)
    return names


def _unknown(sources: Sequence[ConfigSource]) -> set[str]:
    """Fields whose value is not known: the highest source that sets them has a bad value, or could not be read."""
    unknown: set[str] = set()
    for source in sources:
        unknown |= set(run_options()) if source.unread else source.bad
        unknown -= set(source.settings) - source.bad
    return unknown


def _with_defaults(settings: dict[str, Any], world_size: int | None) -> dict[str, Any]:
    """The settings, with the defaults that depend on other settings filled in."""
    settings = dict(settings)
    if settings.get("train_length") is None:
        settings["train_length"] = Length(DEFAULT_ITERATIONS, Measure.ITERATIONS, by_name=True)
        settings.setdefault("exit_duration_in_mins", DEFAULT_MINUTES)
    positions = settings.get("position_embedding", run_options()["position_embedding"].default)
    settings.setdefault("embedding_layernorm", positions == "alibi")
    if settings.get("instruction_data"):
        settings.setdefault("document_mask", True)  # conversations of one sample must not attend to each other
    if "global_batch_size" not in settings:
        settings["global_batch_size"] = _default_batch(settings, world_size)
    if settings.get("placement") == AUTO and settings.get("pp", 1) > 1:
        settings.setdefault("zero_shard_size", _replicas(settings, world_size))  # of a stage: parameters may be sharded
    return settings


def _replicas(settings: dict[str, Any], world_size: int | None) -> int | None:
    """dp; None where it is not known, or the layout is wrong."""
    ranks = settings.get("tp", 1) * settings.get("pp", 1)
    return world_size // ranks if world_size is not None and ranks > 0 and world_size % ranks == 0 else None


def _default_batch(settings: dict[str, Any], world_size: int | None) -> int:
    """The default global batch, rounded up to a multiple of micro-batch x dp: it must fit any layout."""
    defaults = ScheduleConfig()
    step = settings.get("micro_batch_size", defaults.micro_batch_size) * (_replicas(settings, world_size) or 1)
    return -(-defaults.global_batch_size // step) * step if step > 0 else defaults.global_batch_size
