"""Devices and clusters that plans know: every number has a source, and a mistake is told with the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megazero.config.source import ConfigError
from megazero.plan.cluster.hardware import OUR_FILE, FoundDevice, entry_of, known_hardware

ENTRY = """
sources: {me: "measured on my desk"}
gpus:
  desk:
    kind: cuda
    memory: [16e9, me]
    flops: {bf16: [100e12, me]}
    bandwidth: [900e9, me]
    processors: [60, me]
    inside: [25e9, me]
    host: [12e9, me]
    host_memory: [64e9, me]
    watts: [250, me]
    interconnect: [1xeth25, me]
"""


def test_every_number_names_a_source_that_says_something() -> None:
    content = yaml.safe_load(OUR_FILE.read_text())
    entries = [content["defaults"], *content["gpus"].values(), *content["links"].values()]
    assert len(content["gpus"]) >= 8
    assert all(len(text) > 20 for text in content["sources"].values())
    used = set()
    for entry in entries:
        pairs = [value for value in entry.values() if isinstance(value, list)]
        pairs += [pair for value in entry.values() if isinstance(value, dict) for pair in value.values()]
        assert pairs
        used |= {source for _, source in pairs}
    assert used == {*content["sources"]}


def test_constants_of_another_kind_are_said() -> None:
    devices = known_hardware().devices
    borrowed = {name: device.borrowed for name, device in devices.items() if device.borrowed}
    assert borrowed == {"b200": "h100", "gh200": "h100", "v100": "a100-80gb", "mi300x": "h100"}
    assert all(devices[name].constants == devices[of].constants for name, of in borrowed.items())


def test_a_cluster_of_nodes() -> None:
    cluster = known_hardware().cluster("A100-80GB", 384, None, "4xopa")
    assert (cluster.nodes, cluster.nodes_of, cluster.node_rate) == (48, 8, 50e9)
    assert cluster.device.flops["bf16"] == 312e12 and 84e9 < cluster.device.memory < 86e9
    assert str(cluster) == "384 x a100-80gb, 48 nodes of 8, 4 x opa between them"
    assert known_hardware().cluster("h100", 4, None, None).nodes_of == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("a100", 8, None, None),
            r"--gpu a100: there is no such GPU; did you mean a100-40gb or a100-80gb or a100-80gb-nv4\?",
        ),
        (("h100", 0, None, None), r"--gpus 0: must be at least 1"),
        (("h100", 16, 0, None), r"--nodes-of 0: must be at least 1"),
        (
            ("h100", 12, 8, None),
            r"--gpus 12 on nodes of 8 \(--nodes-of\): the last node would not be full; "
            r"nearest: --gpus 8, --gpus 16, or --nodes-of 6",
        ),
        (("h100", 16, 8, "hdr"), r"--interconnect hdr: give links of a node x their kind, as 8xhdr"),
        (("h100", 16, 8, "0xhdr"), r"--interconnect 0xhdr: the number of links, 0, must be at least 1"),
        (("h100", 16, 8, "8xhdd"), r"--interconnect 8xhdd: there is no such link; did you mean hdr\?"),
    ],
)
def test_a_mistake_is_told(arguments: tuple[str, int, int | None, str | None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        known_hardware().cluster(*arguments)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as told:
        known_hardware().cluster("hal9000", -1, -2, "x")
    assert len(told.value.problems) == 4


def test_a_file_adds_a_device(tmp_path: Path) -> None:
    file = tmp_path / "desk.yaml"
    file.write_text(ENTRY)
    device = known_hardware(str(file)).cluster("desk", 2, None, None).device
    assert (device.memory, device.host, device.flops["bf16"]) == (16e9, 12e9, 100e12)
    assert device.update_host is None, "a default is of our file alone"
    assert known_hardware(str(file)).device("h100") == known_hardware().device("h100")


def test_a_default_is_of_entries_of_its_file_that_do_not_say_it(tmp_path: Path) -> None:
    file = tmp_path / "desk.yaml"
    file.write_text(ENTRY.replace("gpus:", "defaults: {update_host: [3e9, me], watts: [90, me]}\ngpus:"))
    hardware, ours = known_hardware(str(file)), known_hardware()
    assert (hardware.device("desk").update_host, hardware.device("desk").watts) == (3e9, 250)
    assert hardware.devices.items() >= ours.devices.items()
    assert {device.update_host for device in ours.devices.values()} == {7.5e9}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpus:", "defaults: {update_host: 3e9}\ngpus:", r"desk: update_host: '3e9' is no pair of a value and its"),
        ("gpus:", "defaults: 3\ngpus:", r"defaults: '?3'? is no table"),
        ("[16e9, me]", "16e9", r"desk: memory: '16e9' is no pair of a value and its source"),
        ("[16e9, me]", "[16 GB, me]", r"desk: memory: '16 GB' is not a number above 0"),
        ("[16e9, me]", "[-1, me]", r"desk: memory: '-1' is not a number above 0"),
        ("[250, me]", "[250, you]", r"desk: watts: there is no source 'you'"),
        ("kind: cuda", "kind: tpu", r"desk: kind: 'tpu' is neither cuda nor cpu"),
        ("{bf16: [100e12, me]}", "[100e12, me]", r"desk: flops: .* is no table of precisions"),
        ("    watts", "    wats", r"desk: there is no wats"),
        ("gpus:", "cards:", r"is no table of sources, defaults, gpus and links"),
        ("gpus:", "links: 3\ngpus:", r"links: '?3'? is no table"),
        ("[250, me]", "[250, [me]]", r"desk: watts: there is no source"),
        ("    watts", "    named: card\n    watts", r"desk: named: 'card' is no pair of a list of names"),
        ("    watts", "    named: [[3, [4]], me]\n    watts", r"desk: named: .* is no pair of a list of names"),
        ("    watts", "    named: [[card], you]\n    watts", r"desk: named: there is no source 'you'"),
        ("    watts", "    board: [4, me]\n    watts", r"desk: board and across go together"),
        ("    watts", "    across: [4e9, me]\n    watts", r"desk: board and across go together"),
        ("gpus:", "gpus:\n  Desk: {}", r"gpus: desk is there 2 times"),
        (
            "    watts",
            "    constants: {launch: [-1, me]}\n    watts",
            r"constants: launch: '-1' is not a number from 0",
        ),
    ],
)
def test_a_files_mistake_is_told(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "desk.yaml"
    assert old in ENTRY
    file.write_text(ENTRY.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        known_hardware(str(file))


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--hardware .*nowhere\.yaml"):
        known_hardware(str(tmp_path / "nowhere.yaml"))


SHARED = (
    ENTRY.replace("kind: cuda", "kind: cpu")
    + """    beside: [0, me]
    read: [2e9, me]
    ranks:
      2:
        kind: cpu
        memory: [8e9, me]
        flops: {bf16: [60e12, me]}
        bandwidth: [500e9, me]
        processors: [60, me]
        inside: [25e9, me]
        host: [9e9, me]
        host_memory: [32e9, me]
        watts: [125, me]
        interconnect: [1xeth25, me]
        constants: {launch: [1e-5, me]}
"""
)


def test_ranks_that_share_a_processor_have_what_was_measured_or_a_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "desk.yaml"
    file.write_text(SHARED)
    alone, two, four = (known_hardware(str(file)).cluster("desk", ranks, 8, None).device for ranks in (1, 2, 4))
    assert (alone.memory, alone.flops["bf16"], alone.beside, alone.read, alone.write) == (16e9, 100e12, 0.0, 2e9, None)
    assert (two.memory, two.flops["bf16"], two.constants["launch"], two.read) == (8e9, 60e12, 1e-5, None)
    assert (four.memory, four.flops["bf16"], four.host) == (4e9, 30e12, 4.5e9)
    assert (four.processors, four.constants["launch"]) == (60, 1e-5)
    # of a node, which is what is shared
    assert known_hardware(str(file)).cluster("desk", 4, 2, None).device == two
    for number, (old, new, told) in enumerate(
        (
            ("      2:", "      1:", r"desk: ranks: .* is no table of numbers of ranks from 2"),
            ("[9e9, me]", "[0, me]", r"desk: ranks: 2: host: '0' is not a number above 0"),
        )
    ):
        wrong = tmp_path / f"{number}.yaml"
        wrong.write_text(SHARED.replace(old, new))
        with pytest.raises(ConfigError, match=told):
            known_hardware(str(wrong))


CARDS = {
    ("NVIDIA A100-SXM4-40GB", 42_505_273_344): "a100-40gb",
    ("A100-SXM4-40GB", 42_505_273_344): "a100-40gb",
    ("NVIDIA A100-SXM4-80GB", 85_094_825_984): "a100-80gb",
    ("A100-SXM4-80GB", 85_198_045_184): "a100-80gb",
    ("NVIDIA H100 80GB HBM3", 84_929_347_584): "h100",
    ("NVIDIA H200", 150_109_880_320): "h200",
    ("NVIDIA B200", 191_514_214_400): "b200",
    ("NVIDIA GH200 480GB", 102_005_473_280): "gh200",
    ("NVIDIA GH200 120GB", 101_468_602_368): "gh200",
    ("Tesla V100-SXM2-32GB", 34_079_899_648): "v100",
    ("AMD Instinct MI300X", 206_141_652_992): "mi300x",
    ("AMD Instinct MI300X OAM", 206_141_652_992): "mi300x",
}
"""Name and memory of cards, and their entries."""


def test_a_card_is_known_by_its_name() -> None:
    for (name, memory), entry in CARDS.items():
        found = entry_of(FoundDevice("cuda", name, memory))
        assert found is not None and found.name == entry, name
    names = [name for device in known_hardware().devices.values() for name in device.named]
    assert sorted(names) == sorted(name for name, _ in CARDS), "each name is of one entry, and tried here"
    unnamed = {name for name, device in known_hardware().devices.items() if not device.named}
    assert unnamed == {"a100-80gb-nv4"}, "the same cards in a machine with other links"


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("NVIDIA A100-PCIE-40GB", 42_505_273_344),
        ("NVIDIA A100 80GB PCIe", 85_094_825_984),
        ("NVIDIA A100-SXM-64GB", 68_000_000_000),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42_000_000_000),
        ("NVIDIA A100-SXM4-80GB", 42_505_273_344),
        ("NVIDIA A800-SXM4-80GB", 85_094_825_984),
        ("NVIDIA H100 PCIe", 84_929_347_584),
        ("NVIDIA H100 NVL", 100_000_000_000),
        ("NVIDIA H800", 84_929_347_584),
        ("NVIDIA H20", 102_000_000_000),
        ("NVIDIA H200 NVL", 150_109_880_320),
        ("NVIDIA GH200 144G HBM3e", 150_000_000_000),
        ("NVIDIA GB200", 191_514_214_400),
        ("Tesla V100-SXM2-16GB", 16_900_000_000),
        ("Tesla V100-PCIE-32GB", 34_079_899_648),
        ("AMD Instinct MI300A", 137_000_000_000),
        ("AMD Instinct MI325X", 274_000_000_000),
        ("NVIDIA GeForce RTX 4090", 25_393_692_672),
        ("h100", 84_929_347_584),
        ("", 84_929_347_584),
    ],
)
def test_a_card_of_another_name_or_memory_is_not_known(name: str, memory: int) -> None:
    assert entry_of(FoundDevice("cuda", name, memory)) is None


NAMED = ENTRY.replace("kind: cuda", "kind: cuda\n    named: [[Desk Card 16GB], me]")


def test_of_a_users_file_the_name_decides_or_the_kind(tmp_path: Path) -> None:
    """Entries without names may be of any device of their kind."""
    card, other = FoundDevice("cuda", "Desk Card 16GB", 16_500_000_000), FoundDevice("cuda", "Card", 16_500_000_000)
    of_cpu = ENTRY.partition("gpus:\n")[2].replace("  desk:", "  here:").replace("kind: cuda", "kind: cpu")
    two = NAMED + of_cpu
    for number, (text, found, entry) in enumerate(
        (
            (ENTRY, other, "desk"),
            (NAMED, card, "desk"),
            (two, card, "desk"),
            (two, FoundDevice("cpu", "Processor"), "here"),
            (two + of_cpu.replace("  here:", "  any:").replace("kind: cpu", "kind: cuda"), card, "desk"),
            (two + of_cpu.replace("  here:", "  any:").replace("kind: cpu", "kind: cuda"), other, "any"),
        )
    ):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        device = entry_of(found, str(file))
        assert device is not None and device.name == entry, number
    with pytest.raises(ConfigError, match=r"0\.yaml: has no entry for Processor, .* kind cpu; it has: desk \("):
        entry_of(FoundDevice("cpu", "Processor"), str(tmp_path / "0.yaml"))
    with pytest.raises(ConfigError, match=r"1\.yaml: has no entry for Card, which is of kind cuda"):
        entry_of(other, str(tmp_path / "1.yaml"))
