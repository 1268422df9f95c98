"""A row of a table of measured or published runs as the flags of a run and of a cluster.

Tables name the same things differently, and leave out what their authors took for granted. `COLUMNS` has the names;
`run_of_row` says what stands for a cell that is missing or empty:

- precision fp16, a vocabulary of 50,257 (GPT-2's) and every block recomputed: of a table without these columns;
- attention as products and a softmax, whose scores are stored, and dropout of 0.1 in fp16, as in programs from before
  flash attention: on an A100 or a V100, and where blocks are recomputed as a whole or in their core. An empty cell in a
  column of recompute means the core on an A100, and on newer kinds a program with flash attention, which computes
  nothing again. Virtual stages are open then too, and an empty cell in a column of sequence parallelism means that
  there is some, which is of the same age as recomputing the core;
- as many layers in every model chunk, the embedding and the head in addition, where that divides;
- gradients reduced behind the last backward, as one bucket, in the precision of parameters, without ZeRO; bf16 that is
  accumulated in fp32 is reduced in fp32;
- a vocabulary padded to a multiple of 128 x tp. vTrain's with tp 1 is not: there the measured head takes 2.7 times as
  long for an operation as with tp 2 to 8, as products with an odd dimension do;
- micro-batches of 1 to 16 samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.config.source import ConfigError
from megazero.plan.cluster.programs import DEEPSPEED_BF16, MEGATRON, Program

COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "layers": ("layers", "num_layers"),
        "hidden": ("hidden", "hidden_size"),
        "heads": ("heads", "attention_heads", "num_attention_heads"),
        "groups": ("kv_heads", "num_query_groups"),
        "ffn": ("ffn", "ffn_hidden_size"),
        "vocab": ("vocab", "vocab_size"),
        "length": ("seq", "sequence_length", "seq_length"),
        "gpu": ("gpu",),
        "gpus": ("gpus",),
        "tp": ("tp", "tensor_parallelism"),
        "pp": ("pp", "pipeline_parallelism", "stages"),
        "dp": ("dp", "data_parallelism"),
        "cp": ("cp",),
        "virtual": ("virtual_stages",),
        "samples": ("micro_batch", "micro_batch_size"),
        "batch": ("global_batch", "global_batch_size"),
        "precision": ("precision",),
        "zero": ("zero_stage",),
        "again": ("recompute",),
        "sequence": ("sequence_parallel",),
        "interconnect": ("interconnect",),
        "nodes_of": ("nodes_of",),
    }
)
"""What a row says -> the columns that say it."""
NEEDED = ("layers", "hidden", "heads", "length", "gpus", "batch")
COUNTS = (*NEEDED, *"groups ffn vocab tp pp dp cp virtual samples nodes_of".split())
"""What is a number from 1."""
WHOLE_NUMBER = re.compile(r"([0-9]{1,18})(?:\.0+)?")
"""A number as people write it, and as programs do in a column where some cells are empty: 8, 8.0."""
AXES = ("tp", "pp", "dp", "cp")
SWITCH: Mapping[str, bool] = MappingProxyType(
    dict.fromkeys(("0", "false", "no", "none"), False) | dict.fromkeys(("1", "true", "yes"), True)
)
"""Words for a setting that a row's run has, or has not."""
PRECISIONS = ("fp16", "bf16", "fp32")
"""What precision a cell may begin with. Words behind it say in what gradients are summed."""
SAMPLES = (1, 2, 4, 8, 16)
"""Samples of a micro-batch that are tried where a row does not say it."""
MOST_VIRTUAL = 8
"""Virtual stages that are tried at most, where a row leaves them and recompute open."""
DROPOUT = "0.1"
"""Of hidden states and attention: Megatron-LM's default."""
GPU = "a100-80gb"
MEASURED_LINKS = "8xedr"
"""Between the nodes of vTrain's measurements: 8 x 100 Gbit/s (arXiv 2312.12391)."""
WHOLE = 10**12
"""Elements of a bucket that holds all of a stage."""
PADDED = 128
"""A vocabulary is padded to a multiple of this x tp, as Megatron-LM does."""


@dataclass(frozen=True)
class RowRun:
    """What a row says.

    choices       the command lines of runs that a row may be of: one, where it says all. Else the fastest of those that
                  fit stands for the row
    gpu, gpus, nodes_of, interconnect  the cluster, as `Hardware.cluster` takes it
    program       whose run it is, which decides what it holds beside what ours does
    """

    choices: tuple[tuple[str, ...], ...]
    gpu: str
    gpus: int
    nodes_of: int | None
    interconnect: str | None
    program: Program


def missing_columns(columns: Collection[str]) -> list[str]:
    """Of what each row needs the names, where none of these columns says it."""
    return [" or ".join(COLUMNS[name]) for name in NEEDED if not {*COLUMNS[name]} & {*columns}]


def run_of_row(row: Mapping[str, str]) -> RowRun:
    """The run of a row. Raises ConfigError for one without what `NEEDED` names."""
    if more := [cell for cell in (row.get(None) or []) if cell.strip()]:  # type: ignore[call-overload]
        raise ConfigError([f"a row has {len(more)} cells more than there are names: {', '.join(more)}"])
    said, named = _said(row)
    if missing := [named[name] for name in NEEDED if name not in said]:
        raise ConfigError([f"a row has no {', no '.join(missing)}"])
    wrong = [*_wrong_words(said, named)]
    if said.get("cp", "1").isdecimal() and int(said.get("cp", "1")) > 1:
        wrong.append(f"{named['cp']} {said['cp']}: a row's run does not split samples over ranks")
    elif (
        not wrong
        and "dp" in said
        and (ranks := math.prod(int(said.get(name, 1)) for name in AXES)) != int(said["gpus"])
    ):
        sizes = " x ".join(f"{named[name]} {said[name]}" for name in AXES if name in said)
        wrong.append(f"{named['gpus']} {said['gpus']}: {sizes} are {ranks} ranks")
    if wrong:
        raise ConfigError(wrong)
    is_open = "again" not in said and any(column in row for column in COLUMNS["again"])
    tp, pp, gpus = (int(said.get(name, 1)) for name in ("tp", "pp", "gpus"))
    share = int(said["batch"]) // max(1, int(said.get("dp", gpus // (tp * pp))))
    samples = [int(said["samples"])] if "samples" in said else [each for each in SAMPLES if share % each == 0]
    virtual = [int(said.get("virtual", 1))]
    if is_open and "virtual" not in said and pp > 1:
        virtual = [each for each in range(1, MOST_VIRTUAL + 1) if int(said["layers"]) % (pp * each) == 0]
    if is_open:
        said.setdefault("sequence", "1")
    said.setdefault("again", ("selective" if _before_hopper(said) else "none") if is_open else "full")
    is_bloom = _is_bloom(row)
    flags = [*_model(said, tp, is_bloom=is_bloom), *_layout(said, tp, pp), *_numbers(said)]
    choices = tuple(
        (*flags, *_chunks(said, pp, chunks), "--micro-batch-size", str(size)) for chunks in virtual for size in samples
    )
    if not choices:
        each = f"{said['layers']} layers, {gpus} GPUs, tp {tp}, pp {pp} and a batch of {said['batch']}"
        raise ConfigError([f"no virtual stages and no micro-batch divide {each}"])
    nodes_of = int(said["nodes_of"]) if "nodes_of" in said else None
    links, program = said.get("interconnect") or _links(row), DEEPSPEED_BF16 if is_bloom else MEGATRON
    return RowRun(choices, _gpu(row, said.get("gpu", GPU)), gpus, nodes_of, links, program)


def _said(row: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(what a row says, the column that says it or would), both by the names of `COLUMNS`. Raises ConfigError for
    columns that contradict each other.
    """
    said, named, contradictions = dict[str, str](), dict[str, str](), list[str]()
    for name, columns in COLUMNS.items():
        cells = {column: cell for column in columns if (cell := _cell(row, column))}
        named[name] = " or ".join([*cells][:1] or [column for column in columns if column in row] or columns)
        if cells:
            said[name] = next(iter(cells.values()))
        if len({*cells.values()}) > 1:
            contradictions.append(f"columns {' and '.join(cells)} say different things")
    if contradictions:
        raise ConfigError(contradictions)
    return said, named


def _cell(row: Mapping[str, str], column: str) -> str:
    """What a column says, in small letters; of a whole number its digits."""
    value = (row.get(column) or "").strip().lower()
    number = WHOLE_NUMBER.fullmatch(value)
    return number[1] if number else value


def _wrong_words(said: Mapping[str, str], named: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with single cells."""
    for name in COUNTS:
        if name in said and not (WHOLE_NUMBER.fullmatch(said[name]) and int(said[name])):
            yield f"{named[name]} {said[name]}: is not a whole number above 0"
    if (shares := said.get("sequence", "0")) not in SWITCH:
        yield f"{named['sequence']} {shares}: is not one of {', '.join(SWITCH)}"
    if (precision := said.get("precision", "fp16")).split()[0] not in PRECISIONS:
        yield f"{named['precision']} {precision}: begins with none of {', '.join(PRECISIONS)}"


def _is_bloom(row: Mapping[str, str]) -> bool:
    """Whether a row is of BigScience's trials: BLOOM's program on Jean Zay."""
    return _cell(row, "source").startswith("bigscience")


def _is_old(said: Mapping[str, str]) -> bool:
    """Whether a row is of a program from before flash attention."""
    return said["again"] != "none" or _before_hopper(said)


def _before_hopper(said: Mapping[str, str]) -> bool:
    return said.get("gpu", GPU).startswith(("a100", "v100"))


def _gpu(row: Mapping[str, str], name: str) -> str:
    """The key of a GPU in the file of hardware."""
    if _is_bloom(row):
        return f"{name}-nv4"
    return name.removesuffix("-80gb") if name.startswith("h100") else name


def _links(row: Mapping[str, str]) -> str | None:
    """The links of a row that names none: those of the machines whose tables these are."""
    if _is_bloom(row):
        return "4xopa"  # Jean Zay
    return None if row.get("source") else MEASURED_LINKS


def _model(said: Mapping[str, str], tp: int, *, is_bloom: bool) -> list[str]:
    vocabulary = said.get("vocab", "50257")
    unpadded = "vocab" not in said and tp == 1
    words = [
        *("--num-layers", said["layers"], "--hidden-size", said["hidden"], "--num-attention-heads", said["heads"]),
        *("--seq-length", said["length"], "--vocab-size", vocabulary, "--eod-id", "0", "--data-path", "x"),
        *("--make-vocab-size-divisible-by", "1" if unpadded else str(PADDED)),
    ]
    words += ["--position-embedding", "alibi" if is_bloom else "learned"]
    if said.get("ffn"):
        words += ["--ffn-hidden-size", said["ffn"]]
    if said.get("groups", said["heads"]) != said["heads"]:
        words += ["--num-query-groups", said["groups"]]
    return words


def _layout(said: Mapping[str, str], tp: int, pp: int) -> list[str]:
    words = ["--tp", str(tp), "--pp", str(pp), "--recompute-granularity", said["again"]]
    words += ["--sequence-parallel"] * (SWITCH[said.get("sequence", "0")] and tp > 1)
    if _is_old(said):
        words += ["--attention", "softmax"]
        if not said.get("precision", "").startswith("bf16"):
            words += ["--hidden-dropout", DROPOUT, "--attention-dropout", DROPOUT]
    return words


def _chunks(said: Mapping[str, str], pp: int, virtual: int) -> list[str]:
    chunks = pp * virtual
    words = ["--virtual-stages", str(virtual)]
    if int(said["layers"]) % chunks == 0:
        words += ["--partition", *[str(int(said["layers"]) // chunks)] * chunks]
    return words


def _numbers(said: Mapping[str, str]) -> list[str]:
    precision, zero = said.get("precision", "fp16"), said.get("zero", "0")
    words = ["--device", "cuda", "--train-iters", "1", "--global-batch-size", said["batch"], "--zero-stage", zero]
    words.append("--bf16" if precision.startswith("bf16") else f"--{precision.split()[0]}")
    if _is_old(said):
        reduced = "fp32" if "fp32" in precision.split(maxsplit=1)[-1] else precision.split()[0]
        words += ["--grad-reduce-dtype", reduced, "--bucket-size", str(WHOLE)]
    return words
