"""A row of a table of measured or published runs as the flags of a run and of a cluster.

Tables name the same things differently, and leave out what their authors took for granted. `COLUMNS` has the names;
`run_of_row` says what stands for a cell that is missing or empty:

- precision fp16, a vocabulary of 50,257 (GPT-2's) and every block recomputed: of a table with none of these columns. A
  table with a column of recompute means none by an empty cell;
- attention as products and a softmax, whose scores are stored: where blocks are recomputed as a whole or in their
  core, as in programs from before flash attention; else whatever the run chooses;
- as many layers on every stage, the embedding and the head in addition, where that divides;
- gradients reduced behind the last backward and in the precision of parameters, as one bucket: without ZeRO. bf16 that
  is accumulated in fp32 is reduced in fp32;
- a vocabulary padded to a multiple of 128 x tp, with tp 1 as it is: `--make-vocab-size-divisible-by`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.config.source import ConfigError

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
SAMPLES = (1, 2, 4, 8, 16)
"""Samples of a micro-batch that are tried where a row does not say it."""
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

    flags         of the run, without its micro-batch
    samples       of the micro-batch; those to try, where the row does not say it
    gpu, gpus, nodes_of, interconnect  the cluster, as `Hardware.cluster` takes it
    """

    flags: tuple[str, ...]
    samples: tuple[int, ...]
    gpu: str
    gpus: int
    nodes_of: int | None
    interconnect: str | None

    def words(self, samples: int) -> list[str]:
        """The command line of a run with this micro-batch."""
        return [*self.flags, "--micro-batch-size", str(samples)]


def run_of_row(row: Mapping[str, str]) -> RowRun:
    """The run of a row. Raises ConfigError for one without what `NEEDED` names."""
    said = {name: value for name, columns in COLUMNS.items() if (value := _cell(row, columns))}
    if any(column in row for column in COLUMNS["again"]):
        said.setdefault("again", "none")
    missing = [" or ".join(COLUMNS[name]) for name in NEEDED if name not in said]
    if missing:
        raise ConfigError([f"a row has no {', no '.join(missing)}"])
    tp, pp, gpus = (int(said.get(name, 1)) for name in ("tp", "pp", "gpus"))
    dp = int(said.get("dp", gpus // (tp * pp)))
    flags = [*_model(said, tp), *_layout(said, tp, pp), *_numbers(said)]
    share = int(said["batch"]) // max(1, dp)
    samples = [int(said["samples"])] if "samples" in said else [each for each in SAMPLES if share % each == 0]
    nodes_of = int(said["nodes_of"]) if "nodes_of" in said else None
    links = said.get("interconnect") or _links(row)
    return RowRun(tuple(flags), tuple(samples), _gpu(row, said.get("gpu", GPU)), gpus, nodes_of, links)


def _cell(row: Mapping[str, str], columns: tuple[str, ...]) -> str:
    return next((value for column in columns if (value := (row.get(column) or "").strip())), "")


def _gpu(row: Mapping[str, str], name: str) -> str:
    """The key of a GPU in the file of hardware."""
    plain = name.lower()
    if _cell(row, ("source",)).startswith("bigscience"):
        return f"{plain}-nv4"
    return plain.removesuffix("-80gb") if plain.startswith("h100") else plain


def _links(row: Mapping[str, str]) -> str | None:
    """The links of a row that names none: those of the machines whose tables these are."""
    if _cell(row, ("source",)).startswith("bigscience"):
        return "4xopa"  # Jean Zay
    return None if row.get("source") else MEASURED_LINKS


def _model(said: Mapping[str, str], tp: int) -> list[str]:
    vocabulary = said.get("vocab", "50257")
    unpadded = "vocab" not in said and tp == 1
    words = [
        *("--num-layers", said["layers"], "--hidden-size", said["hidden"], "--num-attention-heads", said["heads"]),
        *("--seq-length", said["length"], "--vocab-size", vocabulary, "--eod-id", "0", "--data-path", "x"),
        *("--make-vocab-size-divisible-by", "1" if unpadded else str(PADDED)),
    ]
    if said.get("ffn"):
        words += ["--ffn-hidden-size", said["ffn"]]
    if said.get("groups", said["heads"]) != said["heads"]:
        words += ["--num-query-groups", said["groups"]]
    return words


def _layout(said: Mapping[str, str], tp: int, pp: int) -> list[str]:
    again, virtual = said.get("again", "full"), int(said.get("virtual", 1))
    words = ["--tp", str(tp), "--pp", str(pp), "--virtual-stages", str(virtual), "--recompute-granularity", again]
    words += ["--sequence-parallel"] * (said.get("sequence", "0") not in ("0", "") and tp > 1)
    chunks = pp * virtual
    if int(said["layers"]) % chunks == 0:
        words += ["--partition", *[str(int(said["layers"]) // chunks)] * chunks]
    if again != "none":
        words += ["--attention", "softmax"]
    if again != "none" and not said.get("precision", "").startswith("bf16"):
        words += ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    return words


def _numbers(said: Mapping[str, str]) -> list[str]:
    precision, zero = said.get("precision", "fp16"), said.get("zero", "0")
    words = ["--device", "cuda", "--train-iters", "1", "--global-batch-size", said["batch"], "--zero-stage", zero]
    words.append("--bf16" if precision.startswith("bf16") else f"--{precision.split()[0]}")
    if said.get("again", "full") != "none":
        reduced = "fp32" if "fp32" in precision.split(maxsplit=1)[-1] else precision.split()[0]
        words += ["--grad-reduce-dtype", reduced, "--bucket-size", str(WHOLE)]
    return words
