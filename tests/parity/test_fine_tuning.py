"""A model of `transformers` is fine-tuned on instructions: the loss is theirs, conversation by conversation, whatever
the layout and packing.

Their side knows nothing of samples: each conversation goes through the model alone, written by their chat template,
from position 0, and the losses of its learned tokens are added up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megazero.config.source import ConfigError
from tests.data.chats import chat, write_lines, write_tokenizer
from tests.parity.float64 import in_float64
from tests.parity.test_transformers import bloom, gpt2, llama, opt, shake, their_model
from tests.parity.training import Outcome, job_on_rank, train, unequal, worst

VOCABULARY, SEQUENCE = 300, 96
MODELS = {
    "gpt2": gpt2(vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE),
    "llama": llama(4, 2, vocab_size=VOCABULARY),
    "opt": opt(vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE),
    "bloom": bloom(6, vocab_size=VOCABULARY),
}
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp2-pp2": (4, ["--tp", "2", "--pp", "2"]),
    "tp2-sp-dp2-z2": (4, ["--tp", "2", "--sequence-parallel", "--zero-stage", "2", "--micro-batch-size", "1"]),
    "pp2-dp2-z1": (4, ["--pp", "2", "--zero-stage", "1", "--micro-batch-size", "1", "--recompute-granularity", "full"]),
}
ON = {"gpt2": "tp2-pp2", "llama": "tp2-sp-dp2-z2", "opt": "pp2-dp2-z1", "bloom": "tp2-sp-dp2-z2"}
"""The layout that a family is trained on here."""
WORDS = "the quick brown fox asked a lazy dog what two and two make it said four naturally"
BATCH = 8


def conversations(count: int, seed: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)

    def words(most: int) -> str:
        return " ".join(random.choice(WORDS.split(), random.integers(1, most)))

    return [chat(*(words(7) for _ in range(2 * int(random.integers(1, 3))))) for _ in range(count)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("chats")
    return [
        write_lines(folder / f"{name}.jsonl", conversations(20, seed)) for name, seed in (("train", 1), ("valid", 2))
    ]


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model as `save_pretrained` leaves it, with a tokenizer beside it."""
    place = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(3)
    model = their_model(request.param, MODELS[request.param])
    model.config.eos_token_id = 0
    shake(model)
    model.save_pretrained(place)
    return write_tokenizer(place)


def flags_for(folder: Path, data: list[Path], cache: Path, *more: str) -> list[str]:
    files = ["--instruction-data", str(data[0]), "--valid-instruction-data", str(data[1])]
    files += ["--data-cache-path", str(cache), "--init-from", str(folder)]
    numbers = f"--precision fp64 --seq-length {SEQUENCE} --global-batch-size {BATCH} --train-iters 3 --lr 1e-3"
    return [*files, *numbers.split(), "--eval-iters", "1", "--sample-tokens", "1", *more]


def theirs(folder: Path, records: list[dict[str, Any]]) -> tuple[float, float]:
    """The mean loss of the learned tokens, and the norm of its gradient."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with in_float64():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        total, count = torch.zeros(()), 0
        for record in records:
            written = tokenizer.apply_chat_template(
                record["messages"], return_dict=True, return_assistant_tokens_mask=True
            )
            ids, learned = (
                torch.tensor(written["input_ids"]),
                torch.tensor(written["assistant_masks"], dtype=torch.bool),
            )
            losses = F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
            total = total + losses[learned[1:]].sum()
            count += int(learned[1:].sum())
        mean = total / count
        mean.backward()
        return float(mean.detach()), float(torch.nn.utils.get_total_norm(p.grad for p in model.parameters()))


@pytest.mark.slow
def test_a_step_is_that_of_every_conversation_alone(folder: Path, data: list[Path], tmp_path: Path) -> None:
    """One epoch is one step: its loss and gradient are the means over the learned tokens of all conversations."""
    records = conversations(20, 1)
    flags = flags_for(folder, data, tmp_path, "--train-iters", "1", "--eval-iters", "0")
    samples = samples_in(flags)
    assert 4 < samples < 20, "several conversations share a sample"
    words = [*flags, "--global-batch-size", str(samples), "--micro-batch-size", "1"]
    loss, norm = theirs(folder, records)
    (record,) = train(1, words).records
    assert record.loss == pytest.approx(loss, rel=1e-9) and record.grad_norm == pytest.approx(norm, rel=1e-9)


def samples_in(flags: list[str]) -> int:
    """Samples of one epoch, by building the data set."""
    from megazero.config.parse import parse_run
    from megazero.data.packing import PackedDataset
    from megazero.data.progress import silent
    from megazero.train.init_from import model_source
    from megazero.train.prepare import prepare

    dataset = prepare(parse_run(flags, 1, model_source), 1, silent).datasets.train
    assert isinstance(dataset, PackedDataset)
    return dataset.epoch_samples


@pytest.mark.slow
def test_every_layout_is_one_process(folder: Path, data: list[Path], tmp_path: Path) -> None:
    """Numbers of learned tokens differ from rank to rank and from micro-batch to micro-batch; the mean is over all of
    them.
    """
    flags = flags_for(folder, data, tmp_path)
    one = train(1, flags)
    assert len(one.records) == 3 and "valid_loss" in one.losses
    ranks, layout = LAYOUTS[next(name for family, name in ON.items() if folder.name.startswith(family))]
    differences = worst(train(ranks, [*flags, *layout]), one)
    assert all(value < 1e-9 for value in differences.values()), differences


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["gpt2"], indirect=True, scope="module")
def test_a_resume_is_bitwise(folder: Path, data: list[Path], tmp_path: Path) -> None:
    flags = ["bf16" if word == "fp64" else word for word in flags_for(folder, data, tmp_path, "--train-iters", "4")]
    flags += ["--zero-stage", "1", "--micro-batch-size", "1"]
    saves = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    whole = train(2, flags)
    first = train(2, [*flags, *saves, "--exit-interval", "2"])
    second = train(2, [*flags, *saves])
    assert [record.iteration for record in second.records] == [3, 4]
    assert not unequal(Outcome([*first.records, *second.records], second.losses, second.weights), whole)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["gpt2"], indirect=True, scope="module")
def test_a_resume_on_other_conversations_is_refused(folder: Path, data: list[Path], tmp_path: Path) -> None:
    """A line more, and every sample after the checkpoint would be another."""
    files = [write_lines(tmp_path / "some.jsonl", conversations(20, 1)), data[1]]
    saves = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    flags = [*flags_for(folder, files, tmp_path), "--eval-iters", "0", *saves]
    job_on_rank(0, 1, [*flags, "--exit-interval", "1"])[0].fit()
    job, _ = job_on_rank(0, 1, [*flags, "--train-iters", "9", "--override-opt-param-scheduler"])
    assert job.trainer.position.iteration == 1, "more epochs of the same are no others"
    write_lines(files[0], conversations(21, 1))
    with pytest.raises(ConfigError, match="holds other conversations than when the checkpoint was written"):
        job_on_rank(0, 1, flags)
    job, _ = job_on_rank(0, 1, [*flags, "--override-data"])
    assert job.trainer.position.iteration == 1
