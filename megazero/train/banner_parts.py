"""The parts of the banner, as text of at most 100 columns. The text is ASCII, so that it prints under any locale.

The functions take plain numbers, strings and tables, so they need none of the modules that they describe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from megazero.mpu.axes import Axes
from megazero.plan.bytes import StageBytes
from megazero.plan.traffic import Traffic
from megazero.telemetry.units import count, size
from megazero.train.text_blocks import WIDTH, pairs, table

_MOST_ROWS = 8


def ranks(tp: int, pp: int, dp: int) -> str:
    """`4 ranks, tp 2 x pp 2 x dp 1`."""
    number = tp * pp * dp
    return f"{number} rank{'' if number == 1 else 's'}, tp {tp} x pp {pp} x dp {dp}"


def draw_grid(pp: int, dp: int, tp: int, *, cp: int = 1, width: int = WIDTH - 2) -> str:
    """The process grid: one column for each stage, one row for each replica; a cell lists its tensor-parallel ranks.

    Ranks are numbered as in `mpu.grid`: ((pp_i*DP + dp_i)*CP + cp_i)*TP + tp_i. If the drawing exceeds `width`, cells
    show ranges; if it still does, columns in the middle are left out. Of many rows, those in the middle are left out.
    """
    cells = [
        [[((p * dp + d) * cp + c) * tp + t for t in range(tp)] for p in range(pp)] for d in range(dp) for c in range(cp)
    ]
    names = [f"dp {d}" + (f" cp {c}" if cp > 1 else "") for d in range(dp) for c in range(cp)]
    kept_rows = _kept(len(cells), _MOST_ROWS)
    left = max(5, *(len(name) for name in names)) + 2
    for words, padding in ((_listed, 4), (_listed, 2), (_range, 2), (_range, 1)):
        texts = [[words(cell) for cell in row] for row in cells]
        cell = max(len(text) for row in texts for text in row) + padding
        if left + pp * (cell + 1) + 1 <= width:
            return _frame(texts, names, cell, left, kept_rows, list(range(pp)))
    cell += 1
    fitting = max(3, (width - left - 7) // (cell + 1))
    return _frame(texts, names, cell, left, kept_rows, _kept(pp, fitting))


def _listed(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks)) if len(ranks) <= 8 else _range(ranks)


def _range(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _kept(number: int, most: int) -> list[int | None]:
    """Indices to show of `number` rows or columns; None stands for those that are left out."""
    if number <= most:
        return list(range(number))
    return [*range(most - 1), None, number - 1]


def _frame(
    texts: Sequence[Sequence[str]],
    names: Sequence[str],
    cell: int,
    left: int,
    rows: Sequence[int | None],
    cols: Sequence[int | None],
) -> str:
    """Draw the given rows and columns with their headings; None draws dots."""

    def across(parts: Sequence[str], gap: str, edge: str) -> str:
        return (
            edge
            + edge.join(
                gap if col is None else parts[col].center(cell, parts[col][:1] if edge == "+" else " ") for col in cols
            )
            + edge
        )

    rule = " " * left + across(["-"] * len(texts[0]), " ... ", "+")
    lines = ["stage".ljust(left) + across([str(i) for i in range(len(texts[0]))], " ... ", " ").rstrip(), rule]
    for row in rows:
        name, parts = ("...", ["..."] * len(texts[0])) if row is None else (names[row], texts[row])
        lines.append(name.ljust(left) + across(parts, " ... ", "|"))
    return "\n".join([*lines, rule])


def stage_table(stages: Sequence[StageBytes]) -> str:
    """Parameters and bytes of one rank of each stage; consecutive equal stages share a line. Where something leaves the
    device, the first table tells of the device and a second one of the rest.
    """
    rows, elsewhere = [], []
    for entry, members in groupby(enumerate(stages), key=lambda pair: pair[1]):
        numbers = [number for number, _ in members]
        name = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        amounts = (entry.weights, entry.gradients, entry.optimizer, entry.total)
        words = stage_contents(entry.blocks, embedding=entry.embedding, head=entry.head, chunks=entry.chunks)
        rows.append([name, words, count(entry.parameters), *map(size, amounts)])
        off = entry.elsewhere
        columns = off.parameters[0], off.gradients[0], off.optimizer[0]
        in_memory = *columns, off.slots + off.buffers, off.memory, off.files
        elsewhere.append([name, *map(size, in_memory)])
    leaves = any(entry.elsewhere for entry in stages)
    headings = ["stage", "holds", "parameters", "weights", "gradients", "optimizer", "device" if leaves else "total"]
    tables = [table(headings, rows, left=2)]
    if leaves:
        headings = ["stage", "host: weights", "gradients", "optimizer", "on its way", "host memory", "disks"]
        tables.append(table(headings, elsewhere))
    return "\n\n".join(tables)


def stage_contents(blocks: int, *, embedding: bool, head: bool, chunks: int = 1) -> str:
    """The parts of a stage as text: `embedding + 5 blocks`, `6 blocks in 2 chunks`."""
    words = f"{blocks} block{'' if blocks == 1 else 's'}" + (f" in {chunks} chunks" if chunks > 1 else "")
    return " + ".join(["embedding"] * embedding + [words] + ["head"] * head)


def schedule_sentence(name: str, stages: int, micro_batches: int, virtual_stages: int, bubble: float, live: int) -> str:
    """The schedule in a sentence. bubble: a fraction of the step. live: the most micro-batch activations on a rank."""
    if stages == 1:
        work = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches one after the other"
        return f"one stage: {work}, no bubble"
    chunks = f", {virtual_stages} model chunks per rank" if virtual_stages > 1 else ""
    return (
        f"{name}{chunks}: {micro_batches} micro-batches over {stages} stages, bubble {100 * bubble:.1f}% of the step, "
        f"at most {live} micro-batch activations alive on a rank"
    )


def vertical_sentence(words: str, groups: Sequence[int], stages: int) -> str:
    """The sentence on a schedule (`words`) whose micro-batches pass layers in groups of these sizes."""
    together = f"all {groups[0]} micro-batches" if len(groups) == 1 else f"{len(groups)} groups of {groups[0]} at most"
    advice = "; --vertical-group-size makes the bubble smaller" if len(groups) == 1 else ""
    pipeline = "one stage, no bubble" if stages == 1 else words + advice
    return f"{pipeline}. Vertical order: {together} pass a layer before the next one, forward and backward"


def zero(zero_stage: int, axes: Axes) -> str:
    """`ZeRO-1`, or `ZeRO-1 in sets of 2 of 4 replicas`."""
    sets = f" in sets of {axes.shard_size} of {axes.dp * axes.cp} replicas" if axes.is_hybrid else ""
    return f"ZeRO-{zero_stage}{sets}"


def sets_sentence(zero_stage: int, traffic: Traffic) -> str:
    """The traffic of hybrid shards in a sentence."""
    if not traffic.inside:
        return (
            "none: in a set of one rank each keeps the whole state, as with --zero-stage 0; a rank sends "
            f"{traffic.across:.3g} bytes per parameter across the sets in a step"
        )
    most = "at most " if zero_stage == 3 else ""
    return (
        f"a rank sends {most}{traffic.inside:.3g} bytes per parameter inside its set in a step, and "
        f"{traffic.across:.3g} across the sets"
    )


def budget_sentence(budget: int, blocks: Mapping[str, int], cost: str, peaks: Sequence[int]) -> str:
    """What a budget of activations chose, in a sentence.

    blocks: number of blocks by what is computed again. cost: in words. peaks: bytes of activations on each stage.
    """
    again = [f"{blocks[kind]} {words}" for kind, words in _AGAIN.items() if blocks.get(kind)]
    chosen = " and ".join(again) + f" of {sum(blocks.values())} blocks, {cost}" if again else "nothing"
    stages = f"the activations of the fullest of {len(peaks)} stages take" if len(peaks) > 1 else "the activations take"
    return f"{chosen}; {stages} {size(max(peaks))} of --activation-memory-budget {size(budget)}"


def inputs_sentence(tp: int, gathered: int) -> str:
    """Shared inputs of recomputed blocks in a sentence. gathered: bytes that a rank gathers in a step."""
    return f"each of the {tp} tp ranks keeps a part of their inputs, and gathers {size(gathered)} of them in a step"


def buffers_sentence(most: int, stage: int, stages: int) -> str:
    """The pool of buffers for whole gradients in a sentence. most: its bytes, on a rank of this stage."""
    where = f" on a rank of stage {stage}" if stages > 1 else ""
    return f"whole gradients on their way take {size(most)}{where} from the second step on, beside the model state"


_AGAIN = {"full": "whole", "selective": "attention cores"}


def traffic_sentence(
    zero_stage: int,
    micro_batches: int,
    factor: float,
    *,
    breadth_first: bool,
    what: str = "micro-batches",
    leaves: bool = False,
) -> str:
    """The extra traffic of ZeRO-2 in a sentence, and of gradients that leave the device; empty if there is none.

    micro_batches: of a step, or groups of them that are reduced together; what: which of the two. factor: its
    data-parallel bytes over those of ZeRO-1. breadth_first: gpipe with virtual stages runs the micro-batches of a chunk
    one after the other, so the chunk is reduced once, unless its gradients leave the device (leaves).
    """
    if micro_batches == 1 or not (zero_stage == 2 or (leaves and zero_stage < 2)):
        return ""
    if breadth_first and not leaves:
        return (
            "each chunk's gradients are reduced once, after its last micro-batch; at most two chunks' full "
            "gradients are held"
        )
    if factor == 1:
        return ""
    once = "--micro-batch-order vertical reduces" if what == "micro-batches" else "one group is reduced"
    return (
        f"gradients are reduced at each of the {micro_batches} {what}, "
        f"so that {'they can leave the device' if leaves else 'only the own shard is kept'}: "
        f"{factor:.2f} times "
        f"the data-parallel traffic of --zero-stage 1 ({once} once)"
    )


def messages_sentence(weights: tuple[float, int] | None, gradients: tuple[float, int] | None, *, kept: bool) -> str:
    """What data-parallel ranks send each other in blocks of small integers, in a sentence; empty if nothing.

    weights, gradients: (bytes of an element in blocks, bytes as it is); None: it travels as it is. kept: whether what
    blocks lose of gradients is added to the next ones.
    """
    words = []
    if weights is not None:
        words.append("parameters are gathered in blocks of int8: {:.3f} bytes each, not {}".format(*weights))
    if gradients is not None:
        feedback = ", with error feedback" * kept
        words.append("gradients are sent in blocks: {:.3f} bytes each, not {}".format(*gradients) + feedback)
    return "; ".join(words)


def gathers_sentence(stage: int, stages: int, regather: str, budget: int, step: int, least: int) -> str:
    """What a rank of a stage gathers under ZeRO-3, in bytes, in a sentence.

    regather: --zero3-regather. budget: most at any time. step: in a step. least: the least possible under the budget.
    """
    where = "a rank" if stages == 1 else f"a rank of stage {stage}"
    when = "for each use" if regather == "micro-batch" else "where they do not fit from use to use"
    beside = f" (with --zero3-regather step at least {size(least)})"
    if step <= least:
        beside = ", the least possible under this budget"
    elif regather == "step":
        beside = f", {step / least:.2f} times the least possible under this budget"
    return f"gathered {when}: {where} gathers {size(step)} a step{beside}, and holds {size(budget)} at most"


def late_sentence(stages: int) -> str:
    """When weights are updated with --late-update, in a sentence."""
    when = "late: a unit is updated in the next step, just before its first forward"
    meanwhile = "; a stage that waits for its first hidden states updates meanwhile" * (stages > 1)
    return f"{when}{meanwhile}. Evaluations and saves update first"


def base_sentence(bits: int, each: float, budget: int) -> str:
    """How the frozen matrices of adapters are stored, in a sentence. each: bytes of an element. budget: see above."""
    return (
        f"matrices of the blocks are codes of {bits} bits, {each:.3f} bytes an element with their scales, and are "
        f"decoded for each use: a rank holds {size(budget)} of gathered and decoded parameters at most"
    )


def graphs_sentence(replayed: int, micro_batches: int) -> str:
    """The effect of --cuda-graphs in a sentence: how many of a rank's micro-batches are replayed in a step."""
    if replayed == 0:
        return (
            "change nothing: with dp the first and the last of a rank's micro-batches, which gather and reduce, are "
            f"never replayed, and there are {micro_batches}"
        )
    return f"replay {replayed} of a rank's {micro_batches} micro-batches a step"


def fused_ops_table(chosen: Mapping[str, str]) -> str:
    """The body that each fused op uses; ops of one body share a line."""
    bodies: dict[str, list[str]] = {}
    for op, body in chosen.items():
        bodies.setdefault(body, []).append(op)
    return pairs([(body, ", ".join(ops)) for body, ops in bodies.items()])


def changes_table(changes: Sequence[tuple[str, object, object]]) -> str:
    """What differs between the run that saved and the one that resumes: flag, old value, new value."""
    return (
        table(["changed", "saved", "now"], [[name, str(old), str(new)] for name, old, new in changes], left=3)
        if changes
        else ""
    )
