"""tools/inspect_checkpoint.py: what it says of whole, damaged and different checkpoints, and with
which status it ends.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.checkpoint import statistics as numbers
from megazero.checkpoint.format import MANIFEST
from megazero.checkpoint.reader import read_manifest
from megazero.checkpoint.verify import verify
from megazero.checkpoint.window import StoredTensors, TensorInfo
from megazero.cli.inspect import main
from megazero.config.dump import run_dict
from megazero.config.schema import DataConfig, ModelConfig, OptimizerConfig, Run
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.registry import format_table, open_source
from megazero.data.progress import silent
from tests.checkpoint import fakes
from tests.checkpoint.fakes import Layout, Values, global_values, write_tensors

ADAM = "weight", "exp_avg", "exp_avg_sq"
"""The columns of a checkpoint without an average of the weights."""
RUN = Run(
    model=ModelConfig(num_layers=4, hidden_size=12, num_attention_heads=3, vocab_size=37),
    optimizer=OptimizerConfig(precision="fp32"),
)
ONE, MANY = Layout(), Layout(tp=3, dp=2, pp=2, bucket=50)


def save(
    root: Path, iteration: int, values: Values, layout: Layout, run: Run = RUN, columns: Sequence[str] = ADAM
) -> Path:
    """A checkpoint with these values, as the ranks of a layout write it; blocks are so small that tensors have many."""
    folder = root / f"iter_{iteration:07d}"
    progress = {"iteration": iteration, "consumed_samples": 24 * iteration, "consumed_tokens": 24 * 12 * iteration}
    fakes.save(folder, layout, values, torch.float32, columns, progress=progress)
    manifest = read_manifest(folder)
    manifest.run = run_dict(run)
    (folder / MANIFEST).write_bytes(manifest.encode())
    (root / "latest").write_text(f"{folder.name}\n")
    return folder


@pytest.fixture
def values() -> Values:
    return global_values(ONE, torch.float32, seed=3)


@pytest.fixture
def root(tmp_path: Path, values: Values) -> Path:
    save(tmp_path / "run", 5, values, ONE)
    save(tmp_path / "run", 7, values, MANY)
    return tmp_path / "run"


def inspect(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    try:
        status = main([str(word) for word in words])
    except SystemExit as left:  # argparse
        status = left.code if isinstance(left.code, int) else 1
    out, err = capsys.readouterr()
    return status, out, err


def as_json(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    status, out, _ = inspect(capsys, *words, "--json")
    return status, json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_a_folder_of_checkpoints(root: Path, values: Values, capsys: pytest.CaptureFixture[str]) -> None:
    status, record = as_json(capsys, root, "--verify")
    assert status == 0 and record["problems"] == []
    assert [(c["name"], c["latest"], c["problem"]) for c in record["checkpoints"]] == [
        ("iter_0000005", False, None),
        ("iter_0000007", True, None),
    ]
    assert record["path"] == str(root / "iter_0000007") and record["format"] == "megazero"
    assert record["position"]["iteration"] == 7 and record["layout"] == {"pp": 2, "dp": 2, "cp": 1, "tp": 3}
    assert record["config"]["model"]["hidden_size"] == 12 and record["config"] == json.loads(json.dumps(run_dict(RUN)))
    names = {name for name, _ in values}
    assert set(record["tensors"]) == names
    for name, tensor in record["tensors"].items():
        assert tensor["shape"] == list(values[name, "weight"].shape)
        assert tensor["columns"] == dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), "float32")
        assert tensor["bytes"] == 12 * tensor["elements"] == 12 * values[name, "weight"].numel()
    on_disk = {file.name: file.stat().st_size for file in (root / "iter_0000007").glob("fragments-*")}
    assert record["files"] == on_disk and record["totals"]["file_bytes"] == sum(on_disk.values())
    assert record["totals"]["parameters"] == sum(values[name, "weight"].numel() for name in names)
    assert record["verified"] == {"bytes": record["totals"]["bytes"], "hashes": True, "problems": []}


def test_the_text(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = inspect(capsys, root, "--verify", "--tensor", "blocks.*.up.bias")
    assert status == 0 and "damaged" not in err
    for expected in (
        r"iter_0000007 +latest",
        r"iteration +7",
        r"written by +12 ranks, tp 3 x pp 2 x dp 2\n",
        r"model.hidden_size +12",
        r"embedding.word.weight +37x12 +float32 weight exp_avg exp_avg_sq +444 ",
        r"every hash fits",
        r"blocks.3.up.bias exp_avg_sq +\S",
    ):
        assert re.search(expected, out), expected
    assert "model.rotary_base" not in out, "a default is shown with --all only"
    assert "model.rotary_base" in inspect(capsys, root, "--all")[1]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_of_every_file_counts(root: Path, threads: int) -> None:
    """Wherever a bit of a payload or a header is turned, verification finds it, and names the file;
    and every file's.
    """
    folder = root / "iter_0000007"
    manifest = read_manifest(folder)
    seen: list[int] = []
    assert verify(folder, manifest, threads, seen.append) == []
    assert sum(seen) == 12 * sum(math.prod(tensor.shape) for tensor in manifest.tensors.values())
    for stored in manifest.files[:2] + manifest.files[-1:]:
        path = folder / stored.name
        whole = path.read_bytes()
        header = int.from_bytes(whole[:8], "little")
        for at in (3, 9, 8 + header // 2, 8 + header, (8 + header + len(whole)) // 2, len(whole) - 1):
            flip(path, at)
            problems = verify(folder, manifest, threads, lambda _: None)
            assert problems and all(stored.name in problem for problem in problems), (at, problems)
            path.write_bytes(whole)
    for stored in manifest.files:
        flip(folder / stored.name, stored.size - 1)
    assert len(verify(folder, manifest, threads, lambda _: None)) == len(manifest.files), (
        "all are named, not the first alone"
    )


def test_damage_has_status_1(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = root / "iter_0000007"
    file = next(newest.glob("fragments-00003-*"))
    flip(file, file.stat().st_size - 1)
    assert inspect(capsys, root)[0] == 0, "payloads are looked at by --verify only"
    status, out, err = inspect(capsys, root, "--verify")
    assert status == 1 and file.name in err and "sha256 of block" in err and "verified: 1 problem\n" in out
    file.unlink()
    status, out, err = inspect(capsys, root)
    assert status == 1 and f"{file.name} is missing" in err
    status, told, err = inspect(capsys, root, "--verify")
    assert status == 1 and "verified: 1 problem\n" in told and err.count("damaged: ") == 1, err
    assert re.search(r"iter_0000007 +latest +\S+ \S+ +damaged", out)
    flip(newest / MANIFEST, 50)
    status, out, err = inspect(capsys, root)
    assert status == 1 and "its sha256 does not fit" in err and f"--load {root / 'iter_0000005'}" in err
    assert "iter_0000005" in out and as_json(capsys, root)[0] == 1
    (newest / MANIFEST).unlink()
    for path in (newest, root):
        status, _, err = inspect(capsys, path)
        assert status == 1 and "manifest.json is missing" in err
    shutil.rmtree(newest)
    status, _, err = inspect(capsys, root)
    assert status == 1 and "names the checkpoint 'iter_0000007', which is not there" in err


def test_a_node_has_its_own_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a checkpoint that was saved on local disks the others' files are no damage; what is here is checked all the
    same.
    """
    folder = root / "iter_0000007"
    manifest = read_manifest(folder)
    manifest.layout["places"] = 2
    (folder / MANIFEST).write_bytes(manifest.encode())
    gone, kept = folder / manifest.files[1].name, folder / manifest.files[2].name
    gone.unlink()
    status, record = as_json(capsys, root, "--verify")
    assert status == 0 and record["elsewhere"] == [gone.name] and record["checkpoints"][1]["problem"] is None
    assert 0 < record["verified"]["bytes"] < record["totals"]["bytes"]
    assert "1 of these files are not here" in inspect(capsys, root)[1]
    flip(kept, kept.stat().st_size - 1)
    status, record = as_json(capsys, root, "--verify")
    assert status == 1 and len(record["problems"]) == 1 and kept.name in record["problems"][0]


def test_files_that_hold_other_fragments(root: Path) -> None:
    folder = root / "iter_0000005"
    manifest = read_manifest(folder)
    moved = manifest.tensors["head.norm.weight"].fragments.pop()
    problems = verify(folder, manifest, 1, lambda _: None)
    assert any("head.norm.weight: 12 elements are in no fragment" in problem for problem in problems)
    assert sum("which the manifest does not list" in problem for problem in problems) == 3
    manifest.tensors["head.norm.weight"].fragments += [moved, moved]
    assert any("in two fragments" in problem for problem in verify(folder, manifest, 1, lambda _: None))


def test_home_folders(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOME", str(root.parent))
    assert as_json(capsys, f"~/{root.name}")[0] == 0
    assert inspect(capsys, f"~/{root.name}", f"~/{root.name}", "--exit-code")[0] == 0


def test_mistakes_have_status_2(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    (tmp_path / "text.txt").write_text("no checkpoint\n")
    for words, told in (
        ((tmp_path / "nowhere",), "nowhere: there is no such checkpoint"),
        ((tmp_path / "empty",), "is empty"),
        ((root, "--tensor", "blocks.9.*"), "--tensor blocks.9.*: none of the 23 tensors is called so"),
        ((root, "--tensor", "blocks.1.dwon.weight"), "is called so; did you mean blocks.1.down.weight or blocks."),
        ((tmp_path / "text.txt",), "text.txt holds no checkpoint of a known format"),
        ((tmp_path / "text.txt", root), "text.txt holds no checkpoint of a known format"),
        ((root, tmp_path / "folder"), "folder holds no checkpoint of a known format"),
        ((root, "--exit-code"), "give OTHER too"),
        ((root, root, "--verify"), "leave OTHER out"),
        ((root, "--threads", "0"), "at least 1"),
        ((root, "--from", "nonsense"), "'nonsense' is not one of megatron"),
    ):
        status, _, err = inspect(capsys, *words)
        assert status == 2 and told in err, words


class Given:
    """`WindowedTensors` of values that are at hand."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.shapes = {name: TensorInfo(tuple(t.shape), {"weight": t.dtype}) for name, t in tensors.items()}

    def window(self, name: str, column: str, start: int, stop: int) -> torch.Tensor:
        return self.tensors[name].reshape(-1)[start:stop]


@pytest.mark.parametrize("elements", [1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_statistics_are_those_of_the_whole(elements: int, dtype: torch.dtype) -> None:
    x = (torch.randn(13, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1e4).to(dtype)
    x[3, 4], x[5, 5], x[0, 0], x[12, 10] = math.nan, math.inf, -math.inf, 0.0
    found = numbers.statistics(Given(x=x), "x", "weight", elements).record()
    finite = x[x.isfinite()].double()
    wanted = {"min": finite.min(), "max": finite.max(), "mean": finite.mean(), "norm": finite.norm()}
    wanted["std"] = finite.std(correction=0)
    for key, value in wanted.items():
        assert found[key] == pytest.approx(float(value), rel=1e-12)
    assert (found["elements"], found["nan"], found["inf"], found["zeros"]) == (143, 1, 2, 1)


def test_statistics_of_nothing_finite() -> None:
    found = numbers.statistics(Given(x=torch.full((3,), math.nan)), "x", "weight").record()
    assert found["nan"] == 3 and all(found[key] is None for key in ("min", "max", "mean", "std", "norm"))


def test_differences_count_bits() -> None:
    a = torch.tensor([1.0, math.nan, math.inf, 0.0, 4.0])
    b = torch.tensor([1.0, math.nan, math.inf, -0.0, 4.5])
    found = numbers.difference(Given(x=a), Given(x=b), "x", "weight", 2)
    assert (found.count, found.equal, found.largest, found.relative) == (5, 3, 0.5, 0.125) and not found.same
    assert numbers.difference(Given(x=a), Given(x=a.clone()), "x", "weight", 2).same
    lost = numbers.difference(Given(x=a), Given(x=torch.tensor([1.0, 2.0, math.inf, 0.0, 4.0])), "x", "weight")
    assert lost.largest == math.inf and lost.record()["largest"] is None
    wide = torch.tensor([1.0, 0.1])
    narrow = numbers.difference(Given(x=wide), Given(x=wide.bfloat16()), "x", "weight")
    assert narrow.equal == 1 and narrow.largest == abs(float(wide[1]) - float(wide[1].bfloat16()))


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("elements", [1, 5, 37, 1000])
def test_windows_of_any_layout(root: Path, values: Values, elements: int) -> None:
    folder = root / "iter_0000007"
    with StoredTensors(folder, read_manifest(folder)) as tensors:
        for name in ("blocks.2.down.weight", "embedding.word.weight", "blocks.1.up.bias"):
            for column in ("weight", "exp_avg_sq"):
                count = tensors.shapes[name].numel
                pieces = [tensors.window(name, column, i, min(i + elements, count)) for i in range(0, count, elements)]
                assert torch.equal(torch.cat(pieces), values[name, column].reshape(-1))


def test_the_difference_of_two_layouts(
    root: Path, tmp_path: Path, values: Values, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = root / "iter_0000005", root / "iter_0000007"
    status, record = as_json(capsys, first, second, "--exit-code")
    assert status == 0 and record["identical"] is True
    assert [layout["tp"] for layout in record["layout"]] == [1, 3]
    assert record["position"]["iteration"] == [5, 7] and record["config"] == {}
    assert all(c["bit_equal"] == c["elements"] for columns in record["tensors"].values() for c in columns.values())

    changed = {key: value.clone() for key, value in values.items()}
    changed["blocks.1.down.weight", "exp_avg"][3, 40] += 0.5
    longer = replace(RUN, model=replace(RUN.model, num_attention_heads=4))
    third = save(tmp_path / "third", 9, changed, Layout(tp=2), longer)
    status, record = as_json(capsys, second, third, "--exit-code")
    assert status == 1 and record["identical"] is False
    assert record["config"] == {"model": {"num_attention_heads": [3, 4]}}
    differing = {
        (n, c): f
        for n, columns in record["tensors"].items()
        for c, f in columns.items()
        if f["bit_equal"] != f["elements"]
    }
    (((name, column), found),) = differing.items()
    before = values["blocks.1.down.weight", "exp_avg"]
    largest = float((changed["blocks.1.down.weight", "exp_avg"].double() - before.double()).abs().max())
    assert (name, column) == ("blocks.1.down.weight", "exp_avg") and found["elements"] - found["bit_equal"] == 1
    assert found["largest"] == largest and found["relative"] == largest / float(before.double().abs().max())
    status, out, _ = inspect(capsys, second, third)
    assert status == 0 and "model.num_attention_heads  3 -> 4" in out and "blocks.1.down.weight exp_avg  " in out
    assert "the models differ" in out and "blocks.0" not in out


def test_weights_that_are_equal_where_one_has_moments(
    root: Path, tmp_path: Path, values: Values, capsys: pytest.CaptureFixture[str]
) -> None:
    """All columns that are compared are equal, and the last line says why the models differ."""
    weights = save(tmp_path / "weights", 5, values, ONE, columns=["weight"])
    status, out, _ = inspect(capsys, root / "iter_0000005", weights)
    assert status == 0 and "columns of tensors that both have are equal to the bit" in out
    end = "the models differ: what both have is the same to the bit, and only one has exp_avg, exp_avg_sq\n"
    assert out.endswith(end)


def test_a_value_that_is_derived_is_no_difference(
    root: Path, tmp_path: Path, values: Values, capsys: pytest.CaptureFixture[str]
) -> None:
    same = replace(RUN.model, ffn_hidden_size=48, num_query_groups=3, kv_channels=4, max_position_embeddings=1024)
    given = save(tmp_path / "given", 5, values, ONE, replace(RUN, model=same))
    assert as_json(capsys, root / "iter_0000005", given)[1]["config"] == {}
    wider = save(tmp_path / "wider", 5, values, ONE, replace(RUN, model=replace(same, ffn_hidden_size=64)))
    status, out, _ = inspect(capsys, root / "iter_0000005", wider)
    assert status == 0 and "differs\nmodel.ffn_hidden_size  48 -> 64\n" in out


@pytest.mark.parametrize(
    ("data", "plans", "told"),
    [
        ({"instruction_data": ("chats.jsonl",)}, [[2, 0x1F]], "2 samples an epoch, checksum 0000001f"),
        ({"data_path": ("pair",)}, [[1, 209]], "1 epoch, shuffled together up to sample 209"),
        ({}, [[3, 7]], "numbers 3 and 7 of the program's or the default data"),
    ],
)
def test_the_order_of_data_is_told_in_words(
    data: dict[str, Any], plans: list[list[int]], told: str, tmp_path: Path, values: Values, capsys: Any
) -> None:
    folder = save(tmp_path / "run", 5, values, ONE, replace(RUN, data=DataConfig(**data)))
    manifest = read_manifest(folder)
    manifest.progress = {**manifest.progress, "data_plans": plans, "optimizer_steps": 4.0}
    (folder / MANIFEST).write_bytes(manifest.encode())
    out = inspect(capsys, folder)[1]
    assert re.search(rf"\ndata order +{re.escape(told)}\n", out) and re.search(r"\noptimizer steps +4\n", out), out


def test_tensors_that_only_one_has(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    untied = Layout(tied=False)
    other = save(tmp_path / "untied", 5, global_values(untied, torch.float32, seed=3), untied)
    status, record = as_json(capsys, root / "iter_0000005", other, "--exit-code")
    assert status == 1 and record["only_in_first"] == [] and record["only_in_second"] == ["head.weight"]
    status, out, _ = inspect(capsys, other, root / "iter_0000005")
    assert "only in the first (1)\n  head.weight" in out


def test_a_header_that_was_written_anew(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is whole in itself, but not the one that the manifest knows."""
    file = root / "iter_0000005" / "fragments-00001-of-00001.safetensors"
    file.unlink()
    write_tensors(file, [("x", torch.zeros(3))])
    status, _, err = inspect(capsys, root / "iter_0000005", root / "iter_0000007")
    assert status == 1 and file.name in err and ("the sha256 of its header" in err or "bytes instead of" in err)


def test_other_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Hugging Face folder, and what it was converted to: the same weights in two formats."""
    pytest.importorskip("transformers")
    from tests.convert.hf_models import CASES, saved

    theirs = saved(CASES["bloom, 12 heads"], tmp_path / "theirs")
    with open_source(theirs) as source:
        convert(source, format_table()["megazero"], tmp_path / "ours", TargetOptions(), silent)
    capsys.readouterr()  # what other libraries say when they are imported
    status, record = as_json(capsys, theirs, "--verify")
    assert status == 0 and record["format"] == "hf" and record["layout"] is None and record["checkpoints"] == []
    assert record["verified"] == {"bytes": record["totals"]["bytes"], "hashes": False, "problems": []}
    assert record["config"]["model"]["num_attention_heads"] == 12
    assert record["tensors"]["embedding.word.weight"]["columns"] == {"weight": "float32"}
    assert record["files"]["model.safetensors"] == (theirs / "model.safetensors").stat().st_size
    status, out, _ = inspect(capsys, theirs, "--verify")
    assert "every tensor was read (this format records no hashes)" in out and "keys mapped" in out
    status, record = as_json(capsys, theirs, tmp_path / "ours", "--exit-code")
    assert status == 0 and record["identical"] is True and record["formats"] == ["hf", "megazero"]
    status, out, _ = inspect(capsys, theirs, tmp_path / "ours")
    assert status == 0 and "the models are the same to the bit" in out
    weights = theirs / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    status, _, err = inspect(capsys, theirs, "--verify")
    assert status == 1 and "model.safetensors" in err
