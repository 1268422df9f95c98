"""Written on one layout, read on another: every element arrives, bit for bit."""

from pathlib import Path

import pytest
import torch

from megazero.checkpoint.format import CheckpointError, Damaged
from megazero.checkpoint.open_files import OpenFiles
from megazero.checkpoint.reader import check_inventory, read_fragments, read_manifest
from megazero.checkpoint.reshard import FlatRange
from tests.checkpoint.fakes import Layout, expect, fragments_of, global_values, load, save

LAYOUTS = (
    Layout(),
    Layout(tp=2, dp=1, bucket=400, divisor=8),
    Layout(tp=1, dp=3, bucket=150),
    Layout(tp=3, dp=2, bucket=1, divisor=4),
    Layout(tp=4, dp=3, bucket=700, divisor=16),
    Layout(tp=2, dp=2, pp=2, bucket=333, divisor=128),
    Layout(tp=1, dp=2, pp=4, bucket=90),
    Layout(tp=4, dp=1, pp=2, divisor=2),
    Layout(tp=1, dp=6, pp=3, bucket=333, shard_size=2),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One fp32 checkpoint per layout, all of the same values. A block ends within a row."""
    values = global_values(LAYOUTS[0], torch.float32)
    folders = []
    for number, layout in enumerate(LAYOUTS):
        folders.append(tmp_path_factory.mktemp("saved") / f"iter_{number:07d}")
        save(folders[-1], layout, values, torch.float32, block_bytes=256)
    return folders


@pytest.mark.few(cases=2)
@pytest.mark.sampled
@pytest.mark.parametrize("read", range(len(LAYOUTS)))
@pytest.mark.parametrize("written", range(len(LAYOUTS)))
def test_every_pair_of_layouts(saved, written, read):
    expect(saved[written], LAYOUTS[read], global_values(LAYOUTS[0], torch.float32), torch.float32)


@pytest.mark.few(cases=3)
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float64, torch.float32])
def test_any_precision_into_any_other(tmp_path, stored, wanted):
    values = global_values(LAYOUTS[0], stored)
    save(tmp_path / "c", LAYOUTS[3], values, stored)
    expect(tmp_path / "c", LAYOUTS[5], values, wanted)


def test_untied_head(tmp_path):
    one, other = Layout(tp=2, dp=2, tied=False, bucket=500), Layout(tp=3, pp=2, tied=False, divisor=8)
    values = global_values(one, torch.float64)
    assert ("head.weight", "weight") in values
    save(tmp_path / "c", one, values, torch.float64)
    expect(tmp_path / "c", other, values, torch.float64)


def test_every_element_is_stored_once_and_padding_never(saved):
    for folder in saved:
        manifest = read_manifest(folder)
        assert manifest.tensors["embedding.word.weight"].shape == (37, 12)
        assert manifest.missing_elements() == {}


def test_sgd_has_one_moment(tmp_path):
    columns = ("weight", "exp_avg")
    values = global_values(LAYOUTS[0], torch.float32, columns)
    save(tmp_path / "c", LAYOUTS[1], values, torch.float32, columns)
    manifest = read_manifest(tmp_path / "c")
    assert set(manifest.tensors["blocks.0.up.bias"].columns) == set(columns)
    for rank, found in enumerate(load(tmp_path / "c", LAYOUTS[2], torch.float32, columns)):
        for got, wanted in zip(found, fragments_of(LAYOUTS[2], rank, values, torch.float32, columns), strict=True):
            assert torch.equal(got.weight, wanted.weight)
            assert torch.equal(got.columns["exp_avg"], wanted.columns["exp_avg"])
    with pytest.raises(ValueError, match=r"exp_avg_sq.*embedding\.word\.weight"):
        list(load(tmp_path / "c", LAYOUTS[2], torch.float32))


def test_adams_first_moment_is_not_read_as_momentum(saved):
    """It was: adamw resumed as sgd went on from a tenth of the momentum it should have had, and said nothing."""
    with pytest.raises(
        ValueError, match=r"with exp_avg_sq.*which this optimizer has not.*--no-load-optim.*embedding\.word\.weight"
    ):
        list(load(saved[0], LAYOUTS[2], torch.float32, ("weight", "exp_avg")))


def test_weights_alone(saved):
    for found in load(saved[4], LAYOUTS[5], torch.float32, ("weight",)):
        for fragment in found:
            assert fragment.weight.isfinite().all()
            assert fragment.columns["exp_avg"].isnan().all()


def test_one_error_names_every_tensor_that_does_not_fit(saved):
    manifest = read_manifest(saved[0])
    model = [
        piece
        for pieces in Layout(tied=False).all_fragments()
        for piece in pieces
        if piece.spec.name != "blocks.2.up.bias"
    ]
    stored = manifest.tensors["blocks.1.down.weight"]
    stored.shape = (12, 49)
    with pytest.raises(ValueError) as error:
        check_inventory(manifest, model, ("weight",))
    text = str(error.value)
    assert "1 missing from the checkpoint: head.weight" in text
    assert "1 in the checkpoint, not in the model: blocks.2.up.bias" in text
    assert "blocks.1.down.weight [12, 49] -> [12, 48]" in text


def test_a_manifest_with_a_hole_is_damage(saved):
    manifest = read_manifest(saved[1])
    tensor = manifest.tensors["blocks.3.up.weight"]
    tensor.fragments.pop()
    with pytest.raises(Damaged, match=r"lists .* of the .* elements of blocks\.3\.up\.weight"):
        for rank in range(3):
            read_fragments(
                OpenFiles(saved[1], manifest), fragments_of(LAYOUTS[2], rank, None, torch.float32), ("weight",)
            )


def test_files_that_disagree_with_the_layout_are_refused(tmp_path, monkeypatch):
    values = global_values(LAYOUTS[0], torch.float32)
    shifted = Layout(tp=2, dp=2, bucket=500)
    monkeypatch.setattr(
        Layout, "all_fragments", lambda self: [shifted.fragments(0), *([[]] * (self.axes.world_size - 1))]
    )
    with pytest.raises(CheckpointError, match=r"lacks|do not make up whole|does not know"):
        save(tmp_path / "c", Layout(tp=2, dp=2, bucket=100), values, torch.float32)
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_only_blocks_that_intersect_are_read(tmp_path, monkeypatch):
    """A rank that needs a twelfth of the state reads little more than that, and in small pieces."""
    from megazero.checkpoint.blocks import BlockFile

    values = global_values(LAYOUTS[0], torch.float32)
    save(tmp_path / "c", LAYOUTS[0], values, torch.float32, block_bytes=64)
    sizes: list[int] = []
    original = BlockFile.read

    def counted(self, key, block):
        found = original(self, key, block)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(BlockFile, "read", counted)
    small = Layout(tp=1, dp=12)
    targets = fragments_of(small, 5, None, torch.float32)
    read_fragments(
        OpenFiles(tmp_path / "c", read_manifest(tmp_path / "c")), targets, ("weight", "exp_avg", "exp_avg_sq")
    )
    needed = 3 * sum(fragment.weight.nbytes for fragment in targets)
    assert max(sizes) <= 64
    assert needed <= sum(sizes) <= needed + 3 * 2 * 64 * len(targets)


def test_keys_tell_where_a_fragment_lies(saved):
    from megazero.checkpoint.blocks import BlockFile

    manifest = read_manifest(saved[1])
    number, flat = manifest.tensors["blocks.0.down.weight"].fragments[0]
    assert flat == FlatRange(((0, 12), (0, 24)), 0, 288)
    with BlockFile(saved[1] / manifest.files[number].name) as file:
        assert "blocks.0.down.weight|exp_avg|0:12,0:24|0:288" in file.keys()  # noqa: SIM118
