"""What is trained is what PEFT loads: the adapters of a run, on the model of `transformers` that they were trained on,
and trained by PEFT.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megazero
from megazero.cli import inspect
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.lora.merged import AdaptedSource
from megazero.convert.native import open_native
from megazero.convert.registry import format_table, open_source
from megazero.convert.source import ConversionError
from megazero.convert.verification import verify
from tests.convert.transformers_tensors import from_transformers
from tests.lora.families import CONFIGS, saved_base, their_base, with_adapters
from tests.parity.float64 import in_float64
from tests.parity.training import data_flags, job_on_rank, train

NUMBERS = (
    "--precision fp64 --lora-rank 3 --seq-length 12 --global-batch-size 4 --lr 1e-2 --weight-decay 0.1 "
    "--clip-grad 0.002"
)
TOLERANCE = {"bloom": 1e-6}
"""The constant inside BLOOM's GELU is rounded to eight digits over there."""


def flags_for(base: Path, corpus: Path, folder: Path, steps: int) -> list[str]:
    words = f"{NUMBERS} --init-from {base} --train-iters {steps} --save {folder / 'saved'}"
    return [*words.split(), *data_flags(corpus, folder / "cache")]


@pytest.fixture(scope="module", params=CONFIGS)
def trained(
    request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path]:
    """(family, base, checkpoint of the adapters trained on it with tp 2)."""
    folder = tmp_path_factory.mktemp(request.param)
    base = saved_base(request.param, folder)
    train(2, [*flags_for(base, corpus, folder, 3), "--tp", "2"])
    return request.param, base, folder / "saved"


def beside(checkpoint: Path) -> Path:
    """What the run itself has written for PEFT."""
    with open_native(checkpoint) as found:
        return found.path / "peft"


def tokens() -> Tensor:
    return torch.randint(1003, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
def test_peft_gives_the_same_logits(trained: tuple[str, Path, Path]) -> None:
    family, base, checkpoint = trained
    plain = their_base(base)
    with in_float64(), torch.no_grad():
        before = plain(tokens()).logits
        theirs = with_adapters(plain, beside(checkpoint))(tokens()).logits
    ours = megazero.load(checkpoint)(tokens())
    assert theirs.dtype == ours.dtype == torch.float64
    scale = theirs.abs().max()
    assert (theirs - before).abs().max() > 1e-2 * scale, "the adapters change nothing"
    assert (ours - theirs).abs().max() < TOLERANCE.get(family, 1e-10) * scale


@pytest.mark.few(cases=1)
def test_merged_is_what_peft_merges(trained: tuple[str, Path, Path]) -> None:
    family, base, checkpoint = trained
    with in_float64():
        state = with_adapters(their_base(base), beside(checkpoint)).merge_and_unload().state_dict()
    with open_source(checkpoint) as source:
        assert isinstance(source, AdaptedSource)
        assert source.run.lora.lora_rank is None and source.columns == ("weight",)
        for name in source.entries:
            theirs = from_transformers(family, source.model, name, state)
            torch.testing.assert_close(source.read(name), theirs, rtol=1e-12, atol=1e-14)


def test_checkpoint_holds_adapters_and_nothing_else(trained: tuple[str, Path, Path]) -> None:
    _, base, checkpoint = trained
    with open_native(checkpoint) as adapters, open_source(base) as model:
        weights = {
            name
            for name in model.entries
            if name.startswith("blocks.") and name.endswith("weight") and "norm" not in name
        }
        expected = {name.replace("weight", factor) for name in weights for factor in ("lora_a", "lora_b")}
        assert adapters.entries.keys() == expected
        assert adapters.columns == ("weight", "exp_avg", "exp_avg_sq")
        assert all(adapters.read(name, "exp_avg_sq").max() > 0 for name in expected)
        assert adapters.run.checkpoint.init_from == str(base)


def test_written_by_the_tool_they_are_the_same_files(trained: tuple[str, Path, Path], tmp_path: Path) -> None:
    _, base, checkpoint = trained
    lines: list[str] = []
    with open_source(checkpoint) as source:
        convert(source, format_table()["peft"], tmp_path / "adapter", TargetOptions(), lines.append)
        assert verify(source, tmp_path / "adapter", "peft", lines.append).holds
        assert isinstance(source, AdaptedSource)
        size = sum(entry.nbytes() for entry in source.adapters.entries.values())
    assert any(f"megazero -> peft: {size / 1e6:,.1f} MB in" in line for line in lines), (
        "what is told is the adapters' size"
    )
    for path in beside(checkpoint).iterdir():
        assert path.read_bytes() == (tmp_path / "adapter" / path.name).read_bytes()
    with open_source(base) as source, pytest.raises(ConversionError, match="holds no adapters"):
        convert(source, format_table()["peft"], tmp_path / "none", TargetOptions(), lines.append)


def test_the_merged_model_is_exported(trained: tuple[str, Path, Path], tmp_path: Path) -> None:
    """As a Hugging Face folder, which is what PEFT's own merge is."""
    _, base, checkpoint = trained
    with open_source(checkpoint) as source:
        convert(source, format_table()["hf"], tmp_path / "merged", TargetOptions(), lambda _: None)
    with in_float64(), torch.no_grad():
        theirs = with_adapters(their_base(base), beside(checkpoint)).merge_and_unload()(tokens()).logits
        ours = their_base(tmp_path / "merged")(tokens()).logits
    assert (ours - theirs).abs().max() < 1e-12 * theirs.abs().max()


def test_adapters_are_compared_with_a_model_as_the_model_that_they_make(
    trained: tuple[str, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, base, checkpoint = trained
    with open_source(checkpoint) as source:
        convert(source, format_table()["hf"], tmp_path / "merged", TargetOptions(), lambda _: None)
    capsys.readouterr()

    def compared(*paths: Path) -> tuple[int, dict[str, Any]]:
        status = inspect.main([*map(str, paths), "--json", "--exit-code"])
        return status, json.loads(capsys.readouterr().out)

    for paths in ((checkpoint, tmp_path / "merged"), (tmp_path / "merged", checkpoint)):
        status, record = compared(*paths)
        assert status == 0 and record["identical"] and "megazero, adapters merged with their base" in record["formats"]
    status, record = compared(checkpoint, base)
    assert status == 1 and not (record["only_in_first"] or record["only_in_second"])
    status, record = compared(checkpoint, checkpoint)
    assert status == 0 and all(name.endswith(("lora_a", "lora_b")) for name in record["tensors"]), (
        "two of adapters as they are"
    )


def peft_steps(model: Any, batches_of: Any, steps: int) -> list[tuple[float, float]]:
    """Loss and norm of each step of a loop of torch's own parts over PEFT's model."""
    parameters = [parameter for parameter in dict.fromkeys(model.parameters()) if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    seen = []
    for step in range(steps):
        batches = batches_of(step)
        logits = model(torch.cat([batch.tokens for batch in batches])).logits
        labels = torch.cat([batch.labels for batch in batches])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.002)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen


def share_one_a(model: Any) -> None:
    """Query, key and value of one block get one A: they are one layer here."""
    for module in model.modules():
        if hasattr(module, "q_proj"):
            one = module.q_proj.lora_A["default"].weight
            module.k_proj.lora_A["default"].weight = module.v_proj.lora_A["default"].weight = one


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_steps_equal_those_of_peft(family: str, corpus: Path, tmp_path: Path) -> None:
    """The same start, the same batches: losses, norms and adapters after four steps."""
    base = saved_base(family, tmp_path)
    start = flags_for(base, corpus, tmp_path / "start", 1)
    train(1, [*start, "--lr", "0", "--weight-decay", "0"])
    flags = [*flags_for(base, corpus, tmp_path, 4), "--micro-batch-size", "2", "--lr-decay-style", "constant"]
    job, recorder = job_on_rank(0, 1, flags)
    with in_float64():
        model = with_adapters(their_base(base), beside(tmp_path / "start" / "saved"), trained=True)
        share_one_a(model)
        expected = peft_steps(model, lambda step: job.trainer.batches.train.micro_batches(step * 4, 4), 4)
    job.fit()
    found = [(record.loss, record.grad_norm) for record in recorder.records]
    assert any(norm > 0.002 for _, norm in found), "clipping is to bind"
    torch.testing.assert_close(found, expected, rtol=TOLERANCE.get(family, 1e-9), atol=0.0)
    with in_float64():
        ours = with_adapters(their_base(base), beside(tmp_path / "saved")).state_dict()
    for name, theirs in model.state_dict().items():
        if "lora_" in name:
            assert (ours[name] - theirs).abs().max() < TOLERANCE.get(family, 1e-9) * theirs.abs().max(), name
