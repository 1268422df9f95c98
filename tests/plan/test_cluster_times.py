"""Seconds of products, messages and steps on a cluster beside arithmetic by hand, and what more of anything does."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from itertools import pairwise
from types import MappingProxyType

import pytest

from fused_ops.products import LEAST
from megazero.config.source import ConfigError
from megazero.mpu.axes import Axes, Coordinates, axes_of
from megazero.pipeline.recorded import PassWork, Product, Sent
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.cluster_times import ClusterRates
from megazero.plan.cluster.hardware import Cluster, Device, Link, known_hardware
from megazero.plan.cluster.kernels import Constants, Kernels, constants_of, tiled_flops
from megazero.plan.cluster.messages import Messages, place_of
from megazero.plan.cluster.programs import DEEPSPEED_BF16, MEGATRON, OURS, Program
from megazero.program.instruction import Lane
from megazero.program.times import ChunkTimes
from tests.plan.test_activations import parsed

PLAIN = Constants(
    products=0.5, bandwidth=0.5, misaligned=3.0, launch=1e-5, hiding=2.0, straggling=0.1, latency=1e-5, inside=0.5,
    between=0.5, strided=0.25, blocking=0.25, update=28.0,
)  # fmt: skip
DEVICE = Device(
    "desk", "cuda", 80e9, MappingProxyType({"bf16": 100e12, "fp32": 10e12}), 1e12, 100, 200e9, 25e9, 64e9, 300,
    "4xlink", MappingProxyType({}),
)  # fmt: skip


def kernels(**changed: float) -> Kernels:
    return Kernels(DEVICE, replace(PLAIN, **changed))


def product(rows: int, columns: int, depth: int, *, batch: int = 1, dtype: str = "bfloat16") -> Product:
    moved = 2 * batch * (rows * depth + depth * columns), 2 * batch * rows * columns
    return Product(batch, rows, columns, depth, 1.0, dtype, *moved)


def cluster(gpus: int, nodes_of: int = 8) -> Cluster:
    return replace(known_hardware().cluster("a100-80gb", gpus, nodes_of, "8xhdr"))


def test_the_last_wave_of_tiles_leaves_processors_idle() -> None:
    # 100 processors: tiles of 256 x 128 fill them once, and one tile more takes as long again with this tile
    full, more = product(2560, 1280, 1024), product(2560, 1281 + 127, 1024)
    assert tiled_flops(full, 100) == full.flops
    assert tiled_flops(more, 100) > 1.2 * more.flops
    assert kernels().product(full) == full.flops / 50e12
    # a single row of tiles is no faster than a full one
    assert tiled_flops(product(64, 64, 1024), 100) == tiled_flops(product(64, 6400, 1024), 100)


def test_a_product_is_as_slow_as_its_bytes_and_its_alignment() -> None:
    thin = product(2560, 1280, 8)
    assert kernels().product(thin) == (thin.read + thin.made) / 0.5e12
    odd = product(2560, 1279, 1024)
    assert kernels().product(odd) == pytest.approx(3 * kernels().product(product(2560, 1280, 1024)))
    assert kernels().product(product(2560, 1280, 1024, dtype="float32")) == product(2560, 1280, 1024).flops / 5e12


def test_the_host_and_the_device_hide_each_other_in_part() -> None:
    k = kernels()
    assert k.together(3.0, 4.0) == 5.0 and k.together(0.0, 4.0) == 4.0 == k.together(4.0, 0.0) and k.together(0, 0) == 0
    work = PassWork(MappingProxyType({}), 0, 90, MappingProxyType({Sent("all_reduce", 1): 10}))
    assert k.launching(work, 1) == pytest.approx(1e-3) and k.launching(work, 8) == pytest.approx(1.3e-3)


@pytest.mark.parametrize(
    ("tp", "dp", "pp", "nodes_of"), [(2, 8, 2, 8), (1, 16, 2, 8), (4, 4, 2, 4), (16, 2, 1, 8), (8, 4, 1, 8)]
)
def test_places_are_those_of_the_grid(tp: int, dp: int, pp: int, nodes_of: int) -> None:
    """Ranks of a group on a node, and groups that share the node's border, counted rank by rank."""
    axes, at = Axes(pp, dp, 1, tp), Coordinates(0, 0, 0, 0)
    for ranks, stride in ((axes.data_ranks(at), tp), (axes.tensor_ranks(at), 1)):
        place = place_of(len(ranks), stride, nodes_of)
        assert place.on_node == sum(rank // nodes_of == 0 for rank in ranks)
        assert place.inside == (ranks[-1] < nodes_of)
    groups = {axes.data_ranks(axes.coordinates(rank)) for rank in range(nodes_of)}
    if not place_of(dp, tp, nodes_of).inside:
        assert place_of(dp, tp, nodes_of).sharing == len(groups)


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    messages = Messages(replace(cluster(64), device=replace(DEVICE, constants=MappingProxyType({}))), PLAIN)
    assert messages.rate(place_of(8, 1, 8)) == 100e9
    # eight groups with a rank each share 8 x 25 GB/s, of which half is reached
    assert messages.rate(place_of(8, 8, 8)) == 12.5e9
    # a group of whole nodes has all of it; groups of every other rank reach a quarter together
    assert messages.rate(place_of(16, 1, 8)) == 100e9 and messages.rate(place_of(32, 2, 8)) == 12.5e9
    assert messages.per_byte(place_of(8, 1, 8)) == 7 / 8 / 100e9
    assert messages.collective(place_of(1, 1, 8), 1e9) == 0.0
    assert messages.latency(place_of(8, 1, 8)) == pytest.approx(3e-5)


def test_parts_of_a_ring_pass_all_ranks_one_after_the_other() -> None:
    many = Messages(cluster(64), PLAIN)
    # 16 ranks of a node: 8 of each of 2 nodes, and 14 steps stay on a node
    added = many.ring_latency(place_of(16, 1, 8)) - many.latency(place_of(16, 1, 8))
    assert added == pytest.approx(14 * 3.4e-6 + 14e-6)
    # each rank on a node of its own
    added = many.ring_latency(place_of(8, 8, 8)) - many.latency(place_of(8, 8, 8))
    assert added == pytest.approx(7 * 14e-6)
    whole, sharded = (times(f"--zero-stage {stage}", 64).latency for stage in (0, 1))
    assert sharded - whole == pytest.approx(56 * 3.4e-6 + 7 * 14e-6), "an all-reduce has trees, a reduce-scatter none"


def test_messages_between_stages_share_the_links_of_a_node() -> None:
    one, many = Messages(cluster(8), PLAIN), Messages(cluster(64), PLAIN)
    assert one.between_stages(4, 1e9) == pytest.approx(1e9 / 150e9, rel=1e-2)
    assert many.between_stages(8, 1e9) == pytest.approx(8e9 / 100e9, rel=1e-3)
    assert many.between_stages(2, 1e9) == pytest.approx(2e9 / 100e9, rel=1e-3)
    assert many.between_stages(8, 0) == PLAIN.latency + many.cluster.link.latency


def test_groups_on_several_boards_share_what_is_between_these() -> None:
    boards = replace(DEVICE, constants=MappingProxyType({}), board=4, across=40e9)
    one, many = (Messages(replace(cluster(gpus), device=boards), PLAIN) for gpus in (8, 64))
    whole = Messages(replace(cluster(8), device=DEVICE), PLAIN)
    # neighbours of a board have its links; the eight of a node have what is between its two boards
    assert one.rate(place_of(4, 1, 8)) == 100e9 == whole.rate(place_of(8, 1, 8)) and one.rate(place_of(8, 1, 8)) == 40e9
    # four pairs, each with a rank on both boards; two pairs of neighbours but one stay on their boards
    assert one.rate(place_of(2, 4, 8)) == 10e9 and one.rate(place_of(2, 2, 8)) == 100e9
    # a ring of whole nodes is as slow as its boards; groups with a rank on a node never see them
    assert many.rate(place_of(16, 1, 8)) == 40e9 and many.rate(place_of(8, 8, 8)) == 12.5e9
    assert one.between_stages(2, 4e9) == pytest.approx(4e9 / 100e9, rel=1e-2)
    assert one.between_stages(4, 4e9) == pytest.approx(4 * 4e9 / 40e9, rel=1e-2)


MODEL = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --bf16 --global-batch-size 256"


def times(words: str, ranks: int, cluster_of: Cluster | None = None) -> ChunkTimes:
    run = parsed(f"{MODEL} {words} --device cuda", ranks)
    return ClusterRates(cluster_of or cluster(ranks)).times(run, axes_of(run, ranks), "cuda")


def test_a_step_takes_the_sum_of_its_units_and_its_messages() -> None:
    alone, staged = times("--micro-batch-size 4", 8), times("--micro-batch-size 4 --pp 2 --partition 2 2", 8)
    constants = constants_of(cluster(8).device)
    nbytes = 256 * 4 * 512 * 2
    message = Messages(cluster(8), constants).between_stages(4, nbytes)
    assert staged.message == pytest.approx((1 - constants.blocking) * message)
    computed = sum(staged.forward) - 2 * constants.blocking * message
    assert computed == pytest.approx(alone.forward[0])
    assert alone.per_byte[Lane.SHARDS] == 7 / 8 / (300e9 * constants.inside)
    assert not alone.waits and times("--micro-batch-size 4 --no-overlap", 8).waits


def test_what_two_stages_share_takes_time_between_them() -> None:
    """The sums of a tied embedding go from the first stage to the last, also where no other state leaves its set."""
    constants = constants_of(cluster(64).device)
    share = 200e9 * constants.between / 8  # of a rank, in what a node sends
    assert times("--tp 2 --pp 4 --zero-stage 1", 64).per_byte[Lane.ACROSS] == pytest.approx(1 / 2 / share)
    assert times("--tp 2 --pp 1 --zero-stage 1", 64).per_byte[Lane.ACROSS] == 0.0
    apart = times("--tp 2 --pp 4 --zero-stage 1 --zero-shard-size 2", 64).per_byte[Lane.ACROSS]
    assert apart == pytest.approx(3 / 4 / (2 * share * constants.strided))


@pytest.mark.parametrize(
    ("program", "words", "parts", "waited"),
    [
        (OURS, "", (1, 1), 0.25),
        (MEGATRON, "", (4, 4), 1.0),
        (DEEPSPEED_BF16, "", (4, 1), 1.0),
        (MEGATRON, "--sequence-parallel", (1, 1), 1.0),  # each rank has a part of its own
    ],
)
def test_stages_send_as_their_program_does(program: Program, words: str, parts: tuple[int, int], waited: float) -> None:
    """parts: of forward and of backward, in which hidden states travel; waited: share for which stages wait."""
    run, many, nbytes = parsed(f"{MODEL} --tp 4 --pp 2 --partition 2 2 --device cuda {words}", 64), cluster(64), 2**24
    many = replace(many, device=replace(many.device, constants=MappingProxyType(asdict(PLAIN))))
    messages, rates = Messages(many, PLAIN), ClusterRates(many, program)
    gathers = {1: 0.0, 4: messages.collective(place_of(4, 1, 8), nbytes)}
    each = [messages.between_stages(32, nbytes // number) + gathers[number] for number in parts]
    assert rates.message(run, axes_of(run, 64), nbytes) == pytest.approx(sum(each) / 2)
    assert rates.blocked(3.0) == 3.0 * waited


def test_another_program_launches_as_fast_as_it_does() -> None:
    run = parsed(f"{MODEL} --micro-batch-size 1 --device cuda", 8)
    fast, slow, ours = Program("fast", launch=1e-9), Program("slow", launch=1e-3), cluster(8)
    seconds = {
        program.name: ClusterRates(ours, program).times(run, axes_of(run, 8), "cuda").forward[0]
        for program in (fast, OURS, slow)
    }
    launched = replace(ours.device, constants=MappingProxyType({**ours.device.constants, "launch": 1e-3}))
    assert seconds["fast"] < seconds["megazero"] < seconds["slow"]
    assert seconds["slow"] == times("--micro-batch-size 1", 8, replace(ours, device=launched)).forward[0]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 1)])
def test_another_programs_loss_moves_more_for_each_logit(tp: int, pp: int) -> None:
    run = parsed(f"{MODEL} --tp {tp} --pp {pp} --vocab-size 50048 --micro-batch-size 4 --device cuda", 8)
    device = replace(cluster(8).device, constants=MappingProxyType(asdict(PLAIN)))
    loud = Program("loud", logits=(30.0, 10.0))
    ours, theirs = (
        ClusterRates(replace(cluster(8), device=device), program).times(run, axes_of(run, 8), "cuda")
        for program in (OURS, loud)
    )
    second = 4 * 256 * (50048 // tp) / (2039e9 / 2)  # for each byte of a logit
    assert theirs.forward[-1] - ours.forward[-1] == pytest.approx(30 * second)
    assert theirs.backward[-1] - ours.backward[-1] == pytest.approx(10 * second)
    assert theirs.forward[:-1] == ours.forward[:-1] and ours.units is not None and theirs.units is not None
    assert theirs.units[-1][-1] - ours.units[-1][-1] == pytest.approx(40 * second)
    assert theirs.units[:-1] == ours.units[:-1]


def test_more_work_takes_longer() -> None:
    base = times("--micro-batch-size 4", 8)
    for words in (
        "--micro-batch-size 8",
        "--micro-batch-size 4 --hidden-size 640",
        "--micro-batch-size 4 --num-layers 5",
    ):
        more = times(words, 8)
        assert more.forward[0] > base.forward[0] and more.backward[0] > base.backward[0]
    again = times("--micro-batch-size 4 --recompute-granularity full", 8)
    assert again.forward == base.forward
    assert base.backward[0] < again.backward[0] < base.backward[0] + base.forward[0]
    assert times("--micro-batch-size 4 --recompute-granularity selective", 8).backward[0] < again.backward[0]


def test_more_ranks_of_a_layer_divide_its_products_and_add_messages() -> None:
    words = "--micro-batch-size 16 --hidden-size 2048 --seq-length 1024"
    seconds = [times(f"{words} --tp {tp}", 16).forward[0] for tp in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    assert all(2 * after > before for before, after in pairwise(seconds)), seconds
    across = times(f"{words} --tp 8", 16, known_hardware().cluster("a100-80gb", 16, 4, "1xhdr")).forward[0]
    assert across > 1.2 * seconds[3], "a group over two nodes"


DESK = replace(
    DEVICE,
    kind="cpu",
    processors=2,
    bandwidth=2e10,
    inside=2e9,
    host=5e9,
    flops=MappingProxyType({"bf16": 2e11}),
    update_host=1e9,
    read=2e9,
    write=1e9,
    carried=4e9,
    beside=0.1,
    constants=MappingProxyType(asdict(replace(PLAIN, hiding=1.0, blocking=1.0, stages=0.25, attention=0.5))),
)


def desk(ranks: int) -> Cluster:
    return Cluster(DESK, ranks, ranks, 1, Link("link", 1e9, 1e-5))


def cpu_times(words: str, ranks: int) -> ChunkTimes:
    run = parsed(f"{MODEL} {words} --device cpu", ranks)
    return ClusterRates(desk(ranks)).times(run, axes_of(run, ranks), "cpu")


def test_a_processor_takes_operations_and_bytes_one_after_the_other() -> None:
    k = Kernels(DESK, constants_of(DESK))
    odd = product(2559, 1279, 8)
    assert k.product(odd) == pytest.approx(odd.flops / 1e11), "neither tiles, nor alignment, nor bytes"
    writes = Kernels(DESK, replace(constants_of(DESK), written=1.0))
    assert writes.product(odd) == pytest.approx(odd.flops / 1e11 + odd.made / 1e10)
    both = Kernels(DESK, replace(constants_of(DESK), written=1.0, factors=1.0))
    assert both.product(odd) == pytest.approx(odd.flops / 1e11 + (odd.read + odd.made) / 1e10)
    assert writes.product(odd._replace(made=0)) == odd.flops / 0.5e11, "of attention"
    inside = Product(4, 256, 256, 64, 0.5, "bfloat16", 0, 0)
    assert k.product(inside) == pytest.approx(inside.flops / 0.5e11)
    assert k.together(3.0, 4.0) == 7.0


@pytest.mark.parametrize("shape", [(LEAST - 1, 512, 512), (512, LEAST - 1, 512), (512, 512, LEAST - 1)])
def test_a_processor_multiplies_thin_matrices_of_fp32_at_a_rate_of_their_own(shape: tuple[int, int, int]) -> None:
    flops = MappingProxyType({"bf16": 2e11, "fp32": 1e11})
    desk = replace(DESK, flops=flops, constants=MappingProxyType({**DESK.constants, "thin": 0.5}))
    for device, thin in ((desk, 0.5), (replace(desk, constants=DESK.constants), 1.0)):
        k = Kernels(device, constants_of(device))
        narrow, half = product(*shape, dtype="float32"), product(*shape)
        wide = product(LEAST, LEAST, LEAST, dtype="float32")
        assert k.product(narrow) == pytest.approx(narrow.flops / (thin * 0.5e11))
        assert k.product(wide) == pytest.approx(wide.flops / 0.5e11), "fused_ops computes it"
        assert k.product(half) == pytest.approx(half.flops / 1e11), "one library for all 16 bits"


def test_ranks_of_a_processor_carry_their_messages_and_share_its_cores() -> None:
    alone, staged = cpu_times("--micro-batch-size 4", 1), cpu_times("--micro-batch-size 4 --pp 2", 2)
    assert alone.waits and alone.beside == 0.1 and alone.at_once is None is staged.at_once
    assert (alone.per_byte[Lane.HOST], alone.per_byte[Lane.FROM_DISK]) == (1e-9, 0.5e-9)
    assert alone.per_byte[Lane.TO_DISK] == 1e-9 and alone.carrying == 0.25e-9
    # a message of 1 MiB by its own rate, which both stages carry and nothing hides
    message = 1e-5 + 256 * 4 * 512 * 2 / 0.5e9
    assert staged.message == 0.0
    assert sum(staged.forward) == pytest.approx(sum(alone.forward) + 2 * message)
    assert cpu_times("--micro-batch-size 4 --pp 4", 4).at_once == 2
    assert cpu_times("--micro-batch-size 4 --pp 2", 4).at_once == 1
    assert ClusterRates(desk(1)).has_disks and not ClusterRates(cluster(1)).has_disks


@pytest.mark.parametrize(
    ("more", "wakes"), [("", False), ("--offload-optimizer cpu", True), ("--offload-activations cpu", True)]
)
def test_kernels_of_a_processor_wake_their_threads_beside_lanes_of_the_host(more: str, wakes: bool) -> None:
    words = f"--micro-batch-size 4 {more}"
    run = parsed(f"{MODEL} {words} --device cpu", 1)
    waking = replace(DESK, constants=MappingProxyType({**DESK.constants, "waking": 1e-3}))
    other = ClusterRates(replace(desk(1), device=waking)).times(run, axes_of(run, 1), "cpu")
    slower = sum(other.forward) - sum(cpu_times(words, 1).forward)
    assert slower > 20e-3 if wakes else slower == 0.0, "a block alone launches some ten kernels"


def test_memory_of_one_kind_counts_once() -> None:
    """What has left the device of a CPU for host memory is where it was."""
    run = "--micro-batch-size 4 --device cpu"
    here, left = (
        ClusterStep(parsed(f"{MODEL} {run} {more}", 1), desk(1)).tensors for more in ("", "--offload-optimizer cpu")
    )
    assert here == pytest.approx(left, rel=1e-3)


def test_a_device_without_constants_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--gpu desk: its entry has no constants products, bandwidth"):
        constants_of(DEVICE)
    assert math.isfinite(constants_of(known_hardware().device("h100")).launch)
