"""Places: who holds what, padding included."""

import pytest
import torch

from megazero.mpu.parameter import Parameter, ParameterKind, shard, spec_of


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_tile_the_whole(dim, size):
    whole = torch.arange(12 * 24).view(12, 24)
    specs = [shard("w", (12, 24), ParameterKind.MATRIX, dim=dim, rank=rank, size=size) for rank in range(size)]
    pieces = [whole[spec.box[0][0] : spec.box[0][1], spec.box[1][0] : spec.box[1][1]] for spec in specs]
    assert torch.equal(torch.cat(pieces, dim), whole)
    assert all(spec.local_shape == piece.shape for spec, piece in zip(specs, pieces, strict=True))
    assert all(spec.tp_sharded == (size > 1) and spec.stored_numel == spec.local_numel for spec in specs)


def test_foreign_flags_padding_comes_last_and_may_fill_a_rank():
    specs = [shard("e", (5, 3), ParameterKind.EMBEDDING, dim=0, rank=rank, size=4, padded=16) for rank in range(4)]
    assert [spec.box[0] for spec in specs] == [(0, 4), (4, 5), (5, 5), (5, 5)]
    assert {spec.local_shape for spec in specs} == {(4, 3)}
    assert [spec.stored_numel for spec in specs] == [12, 3, 0, 0]
    assert shard("e", (5, 3), ParameterKind.EMBEDDING, dim=0, padded=8).local_shape == (8, 3)


def test_what_decays_and_what_does_not():
    assert [kind for kind in ParameterKind if kind.decays] == [ParameterKind.MATRIX, ParameterKind.EMBEDDING]


def test_indivisible_dimensions_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"w: .*10.*tp=4"):
        shard("w", (10, 8), ParameterKind.MATRIX, dim=0, rank=0, size=4)


def test_a_parameter_keeps_its_place():
    spec = shard("w", (4, 6), ParameterKind.MATRIX, dim=1, rank=1, size=2)
    parameter = Parameter(spec, torch.float64, "meta")
    assert spec_of(parameter) is spec and parameter.shape == (4, 3) and parameter.requires_grad
    with pytest.raises(AssertionError):
        spec_of(torch.nn.Parameter(torch.zeros(1)))
