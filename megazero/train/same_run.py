"""Whether all ranks begin the same run: its settings, its data, and the versions that train it.

Every rank reads the command line and the files of its own host. A node with an old file of --config would train with
another learning rate or seed, and no collective would fail: the gradients would be a mixture of two runs. So the ranks
compare what they have resolved before they make process groups, whose number depends on the settings, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from megazero import __version__
from megazero.config.dump import plain_value
from megazero.config.options import Option, run_options
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.convert.registry import open_source
from megazero.data.build import parse_data_path
from megazero.data.contents import cached_validation_contents, checksum_of
from megazero.data.dataset import Samples
from megazero.data.indexed import DataError
from megazero.data.own import OwnSamples
from megazero.data.packing import PackedDataset
from megazero.data.progress import silent
from megazero.data.tokenizer import carried_files
from megazero.system.words import counted, value_words
from megazero.train.embedded import Rendezvous, result_on_all_ranks
from megazero.train.init_from import of_that_name
from megazero.train.prepare import Prepared

_KEY = "run of rank 0"
END_BYTES = 1 << 16
"""Bytes at the end of a file of weights that are compared: few, for a checkpoint may have thousands of files."""
NAMED = 5
"""Settings of which a message gives both values."""
_OLD_FILE = "all ranks need the same, and a file or an installation on this rank's host may be an old one"
_OWN_ROWS = "every rank has to hand in the same rows"
_ORDERS = {OwnSamples: ("rows", "checksum"), PackedDataset: ("samples of an epoch", "checksum")}
"""What the numbers are that decide an order of samples (`Samples.plans`), by the class of the dataset."""
_OF_TEXT = "epochs", "first sample that is shuffled apart"
"""The same of running text."""


def require_same_run(prepared: Prepared, meeting: Rendezvous) -> None:
    """Raise ConfigError on all ranks if one of them has another run than rank 0.

    Compared are all settings, the contents and the order of the data, and the versions of megazero and torch. A place
    may have another name on each host: of a place the ranks compare whether it is named at all, and of those that a run
    reads what is cheap to know: checksums of small files, and names, lengths and ends of files of weights.

    Called by all ranks, before they make process groups. Rank 0 puts a few kilobytes into the store; every other rank
    reads these, and adds to one key, at any world size.
    """
    store, rank = meeting.store, meeting.environment.rank
    if store is None:
        return
    patience = timedelta(minutes=prepared.run.parallel.distributed_timeout_minutes)

    def tell() -> None:
        told = json.dumps(None)
        try:
            told = json.dumps(_identity(prepared) | _weights(prepared))
        finally:
            store.set(_KEY, told)  # also where files cannot be read, because the others wait for it

    def compare() -> None:
        identity = _identity(prepared)
        store.wait([_KEY], patience)
        first = json.loads(store.get(_KEY))
        if first is None:
            return  # rank 0 says why
        mine = identity | _weights(prepared, first["checkpoint"])
        # as JSON has it: a tuple of this rank is a list of rank 0
        difference = _difference(json.loads(json.dumps(mine)), first)
        if difference is not None:
            raise ConfigError([f"another run than that of rank 0: {difference}"])

    result_on_all_ranks(compare if rank else tell, meeting, "same run", patience)


def _identity(prepared: Prepared) -> dict[str, Any]:
    """What must be equal on all ranks, as JSON has it."""
    run, datasets = prepared.run, prepared.datasets
    validation = cached_validation_contents(run.data, silent)
    orders = {"training data": datasets.train, "validation data": datasets.valid}
    orders |= {f"validation set {name}": samples for name, samples in datasets.named_valid.items()}
    own = {name: samples for name, samples in orders.items() if isinstance(samples, OwnSamples)}
    named = {name: samples for name, samples in orders.items() if name not in own}
    return {
        "versions": {"megazero": __version__, "torch": torch.__version__},
        "settings": {option.name: _value(run, option) for option in run_options().values()},
        "files": {
            **_numbers("training data", prepared.contents, _contents_words(run.data.instruction_data)),
            **_numbers("validation data", validation, _contents_words(run.data.valid_instruction_data)),
            **_orders(named, "the order of {}"),
            **_small_files(run),
        },
        "rows": _orders(own, "the program's own {}"),
    }


def _contents_words(conversations: Sequence[str]) -> tuple[str, ...]:
    """What the numbers of `data.contents.Contents` are."""
    return ("files", "bytes", "checksum") if conversations else ("documents", "tokens", "checksum")


def _orders(orders: Mapping[str, Samples], named: str) -> dict[str, str]:
    numbers: dict[str, str] = {}
    for name, samples in orders.items():
        numbers |= _numbers(named.format(name), samples.plans, _ORDERS.get(type(samples), _OF_TEXT))
    return numbers


def _numbers(what: str, parts: Sequence[Sequence[int]], words: Sequence[str]) -> dict[str, str]:
    """The numbers of something, or of each of its parts, as a person reads them. words: what each number is."""
    return {
        f"{word} of {what}" + f", part {part} of {len(parts)}" * (len(parts) > 1): (
            f"{number:08x}" if word == "checksum" else f"{number:,}"
        )
        for part, numbers in enumerate(parts, 1)
        for word, number in zip(words, numbers, strict=True)
    }


def _small_files(run: Run) -> dict[str, str]:
    """Checksums of the files of the tokenizer, and of the table of rates."""
    files, rates = dict[str, Path](), run.offload.placement_rates
    if run.data.tokenizer is not None:
        with suppress(DataError):  # a tokenizer of a program beside it, which needs no files
            carried = carried_files(run.data.tokenizer, run.data.tokenizer_path)
            files = {f"--tokenizer-path: checksum of {name}": file for name, file in carried.items()}
    if rates is not None:
        files["--placement-rates: checksum of the file"] = Path(rates).expanduser()
    return {name: f"{checksum_of([file]):08x}" for name, file in files.items()}


def _weights(prepared: Prepared, first: str | None = None) -> dict[str, Any]:
    """The checkpoint of --init-from whose weights the run takes, and of each of its files how long it is and a checksum
    of its end.

    first: the path of rank 0's. A newer one may appear before the last rank looks, and rank 0's counts.
    """
    run, files, folder = prepared.run, dict[str, str](), None
    takes = prepared.resumed is None or run.lora.lora_rank is not None  # a run that resumes has weights of its own
    named = run.checkpoint.init_from
    if named is not None and takes:
        with open_source(Path(named).expanduser()) as source:
            folder = source.path if first is None else of_that_name(named, source.path, Path(first).name)
        files = {f"--init-from: {what}": number for what, number in ends_of(folder).items()}
    return {"checkpoint": None if folder is None else str(folder), "weights": files}


def ends_of(checkpoint: Path) -> dict[str, str]:
    """Of each file of a checkpoint how long it is, and a checksum of its end. checkpoint: a folder, or one file."""
    ends = dict[str, str]()
    for file in [checkpoint] if checkpoint.is_file() else sorted(checkpoint.rglob("*")):
        inside = file.relative_to(checkpoint) if file != checkpoint else Path(file.name)
        # Hidden files are of programs that fetched the checkpoint: they differ, and nothing reads them.
        if file.is_file() and not any(part.startswith(".") for part in inside.parts):
            ends |= {f"{what} of {inside}": number for what, number in _length_and_end(file).items()}
    return ends


def _length_and_end(file: Path) -> dict[str, str]:
    """What tells two files of weights apart without reading them: two checkpoints of one run have files of one length,
    and their headers are equal.
    """
    size = file.stat().st_size
    length_and_end = {"bytes": f"{size:,}"}
    with suppress(OSError), open(file, "rb") as content:  # it may be none of those that the run reads
        content.seek(max(0, size - END_BYTES))
        length_and_end[f"checksum of the last {END_BYTES:,} bytes"] = f"{crc32(content.read()):08x}"
    return length_and_end


def _value(run: Run, option: Option) -> Any:
    """The value of a field as JSON has it. Of a place, whether it is named, and the weights in a blend of data."""
    value = option.value_in(run)
    if not option.is_place:
        return plain_value(value)
    shares = None
    if option.name == "data_path":
        with suppress(DataError):  # without data
            shares = parse_data_path(value).shares
    return ["a place" if value else "none", *([] if shares is None else shares.tolist())]


def _difference(mine: Mapping[str, Any], first: Mapping[str, Any]) -> str | None:
    """In what this rank's run differs from that of rank 0, with both values; None if they are equal.

    Another version may have other settings, and from other settings follow other data: only the cause is told.
    """
    for name, version in first["versions"].items():
        if mine["versions"][name] != version:
            return f"{name} {mine['versions'][name]}, where rank 0 has {version}; {_OLD_FILE}"
    options, settings = run_options(), (mine["settings"], first["settings"])
    differing = [name for name in options if settings[0][name] != settings[1][name]]
    if differing:
        values = [(options[name].flag, *(value_words(each[name]) for each in settings)) for name in differing[:NAMED]]
        text = ", ".join(f"{flag} {value}, where rank 0 has {first_value}" for flag, value, first_value in values)
        others = differing[NAMED:]
        text += f"; and {counted(len(others), 'other setting')}: {', '.join(others)}" * bool(others)
        return f"{text}; {_OLD_FILE}"
    checkpoints = f"{mine['checkpoint']}, where rank 0 has {first['checkpoint']}; {_OLD_FILE}"
    for kind, reason in (("files", _OLD_FILE), ("weights", checkpoints), ("rows", _OWN_ROWS)):
        for name in {**first[kind], **mine[kind]}:  # one rank may have more parts, or files, than the other
            here, there = (each[kind].get(name, "none") for each in (mine, first))
            if here != there:
                return f"{name}: {here}, where rank 0 has {there}; {reason}"
    return None
