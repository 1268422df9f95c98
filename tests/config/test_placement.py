"""Files of --placement and --placement-rates: what they set, what is wrong with them, and what flags beside them do."""

from __future__ import annotations

from pathlib import Path
from shlex import split

import pytest

from megazero.config.dump import dump
from megazero.config.parse import ConfigError, parse_arguments, parse_run
from megazero.config.placement import as_flags
from megazero.config.schema import Run
from megazero.config.tiers import Tier, TierShare
from megazero.plan.step_times import MachineRates, read_rates


def written(folder: Path, text: str) -> str:
    path = folder / "table.yaml"
    path.write_text(text)
    return str(path)


TABLE = "optimizer: {tier: cpu, share: 0.5}\nactivations: cpu:0.25\nlate-update: true\nmicro_batch_order: vertical\n"
FLAGS = "--offload-optimizer cpu:0.5 --offload-activations cpu:0.25 --late-update --micro-batch-order vertical"


def test_a_table_is_what_its_flags_are(tmp_path: Path) -> None:
    path = written(tmp_path, TABLE)
    parsed = parse_arguments(["--placement", path], 1)
    assert parsed.run == parse_run(FLAGS.split(), 1)
    assert any(note.startswith(f"--placement {path}: offload_optimizer cpu:0.5, ") for note in parsed.notes)
    assert parsed.changed_settings()["offload"] == {"offload_optimizer": "cpu:0.5", "offload_activations": "cpu:0.25"}


def test_a_resolved_run_names_no_table(tmp_path: Path) -> None:
    """It has what the table said, so the table may change or go."""
    run = parse_run(["--placement", written(tmp_path, TABLE)], 1)
    kept = tmp_path / "run.yaml"
    kept.write_text(dump(run))
    (tmp_path / "table.yaml").unlink()
    assert parse_run(["--config", str(kept)], 1) == run and run.offload.placement == "flags"


def test_a_table_stands_over_files_and_beside_flags(tmp_path: Path) -> None:
    path, config = written(tmp_path, "optimizer: cpu:0.5\n"), tmp_path / "run.yaml"
    config.write_text("offload: {offload_optimizer: cpu:0.1}\nparallel: {late_update: true}\n")
    run = parse_run(["--config", str(config), "--placement", path], 1)
    half = TierShare(Tier.HOST, 0.5)
    assert run.offload.offload_optimizer == half and run.parallel.late_update
    same = parse_run(["--placement", path, "--offload-optimizer", "cpu:0.5", "--offload-activations", "cpu"], 1)
    assert (same.offload.offload_optimizer, same.offload.offload_activations) == (half, TierShare(Tier.HOST))
    config.write_text(f"offload: {{placement: {path}}}\n")
    assert parse_run(["--config", str(config)], 1).offload.offload_optimizer == half


def bare(text: str) -> str:
    """Without quotes, which differ with what is quoted."""
    return text.replace("'", "").replace('"', "")


def problems(*words: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        parse_run(list(words), 1)
    return refused.value.problems


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optimizer: gpu\n", "optimizer: 'gpu' is not one of none, cpu, nvme"),
        ("optimizer: cpu:1.5\n", "optimizer: the share 1.5 is not above 0 and at most 1"),
        ("optimizer: {tier: cpu, share: half}\n", "optimizer: the share half is not a number"),
        ("optimizer: {share: 0.5}\n", "optimizer: {'share': 0.5}: the tier is missing; the keys are tier, and"),
        ("optimizer: {tier: cpu, part: 1}\n", "there is no part; the keys are tier, and share or units"),
        ("optimizer: {tier: cpu, units: head, share: 1}\n", "units leave as a whole: give share or units"),
        ("optimizer: {tier: cpu, units: [1]}\n", "the units [1] are no names; such as [embedding, blocks 0-5]"),
        ("optimizer: {tier: cpu, units: []}\n", "the units [] are no names; such as [embedding, blocks 0-5]"),
        ("optimizer: {tier: none, units: head}\n", "none has no share"),
        ("late_update: 3\n", "late_update: 3 is not true or false"),
        ("micro_batch_order: diagonal\n", "micro_batch_order: diagonal is not one of horizontal, vertical"),
        ("late-update: true\nlate_update: false\n", "late_update stands twice, once with - and once with _"),
        ("optimiser: cpu\n", "there is no optimiser; did you mean optimizer?"),
        ("weights: cpu\n", "there is no weights: optimizer, params, gradients, activations, "),
        ("[1, 2]\n", "holds no table, but list"),
        ("", "holds no table, but nothing"),
        ("optimizer: [\n", "is no YAML"),
    ],
)
def test_a_mistake_names_the_file_the_key_and_the_value(text: str, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    (problem,) = problems("--placement", path)
    assert problem.startswith(f"--placement {path}: ") and bare(says) in bare(problem)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    assert problems("--placement", f"{tmp_path}/no.yaml") == (f"--placement {tmp_path}/no.yaml is missing",)


def test_what_a_table_sets_is_checked_like_flags(tmp_path: Path) -> None:
    (problem,) = problems("--placement", written(tmp_path, "optimizer: nvme\n"))
    assert problem.startswith("--offload-optimizer nvme needs --nvme-path DIR")


UNITS = "optimizer: {tier: cpu, units: [the embedding, 'blocks 0-1']}\nactivations: {tier: cpu, units: block 1}\n"


def test_units_by_name(tmp_path: Path) -> None:
    """As flags they are the same, and a file of the run has them."""
    run = parse_run(["--num-layers", "4", "--placement", written(tmp_path, UNITS)], 1)
    words = "cpu:embedding,blocks 0-1"
    assert run.offload.offload_optimizer == TierShare(Tier.HOST, units=("embedding", "blocks 0-1"))
    assert str(run.offload.offload_optimizer) == words and str(run.offload.offload_activations) == "cpu:block 1"
    flags = as_flags({"offload_optimizer": words, "offload_activations": "cpu:block 1"})
    assert run == parse_run(["--num-layers", "4", *split(flags)], 1) and f"'{words}'" in flags
    config = tmp_path / "run.yaml"
    config.write_text(dump(run))
    assert parse_run(["--config", str(config)], 1) == run


@pytest.mark.parametrize("name", ["block 4", "blocks 2-9", "blocks 3-1", "blocks 0-99999999999", "embeddings", "norm"])
@pytest.mark.parametrize("column", ["optimizer", "params", "gradients", "activations"])
def test_units_that_are_not_there_are_refused_with_those_that_are(column: str, name: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"{column}: {{tier: cpu, units: [block 0, {name}]}}\n")
    (problem,) = problems("--num-layers", "4", "--placement", path)
    assert problem.startswith(
        f"--offload-{column} cpu:block 0,{name}: there is no {name}; the units of this model are "
    )
    assert "are embedding, blocks 0-3, head, and a share is a number, such as cpu:0.5" in problem


def test_flags_that_say_otherwise_are_refused_with_both_names(tmp_path: Path) -> None:
    path = written(tmp_path, TABLE)
    assert problems("--placement", path, "--offload-optimizer", "cpu", "--no-late-update") == (
        f"--offload-optimizer cpu and --placement {path}, where {path}: optimizer is cpu:0.5, say different things: "
        "give one of them",
        f"--no-late-update and --placement {path}, where {path}: late-update is True, say different things: give one "
        "of them",
    )


def test_nothing_that_it_chooses_stands_beside_auto(tmp_path: Path) -> None:
    found = problems("--placement", "auto", "--offload-optimizer", "cpu", "--late-update")
    assert found == (
        "--offload-optimizer cpu and --placement auto, which chooses it: give one of them",
        "--late-update and --placement auto, which chooses it: give one of them",
    )
    config = tmp_path / "run.yaml"
    config.write_text("offload: {placement: auto}\n")
    (problem,) = problems("--config", str(config), "--offload-activations", "cpu")
    assert problem.startswith(f"--offload-activations cpu and {config}: offload.placement auto, which chooses it")


def test_auto_takes_back_what_a_saved_run_had_chosen(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(dump(parse_run(FLAGS.split(), 1)))
    run = parse_run(["--config", str(config), "--placement", "auto"], 1)
    assert run.offload.placement == "auto" and run.offload.offload_optimizer == Run().offload.offload_optimizer
    assert run.parallel == Run().parallel


RATES = "flops: 1e12\nto_host: 10GB\nto_device: 12GB\nupdate: 40 GB\nupdate_host: 2e9\n"


def test_rates_of_a_file(tmp_path: Path) -> None:
    assert read_rates(written(tmp_path, RATES)) == MachineRates(1e12, 10e9, 12e9, 40e9, 2e9)
    found = read_rates(written(tmp_path, f"{RATES}read: 3GB\nwrite: 1.5GB\nmessages: 9e9\n"))
    assert found.has_disks and (found.read, found.write, found.messages) == (3e9, 1.5e9, 9e9)
    assert [read_rates(written(tmp_path, f"{RATES}workspace: {of}\n")).workspace for of in ("0", "3MB")] == [0, 3e6]
    assert (
        found.beside is None
        and found.workspace is None
        and read_rates(written(tmp_path, f"{RATES}beside: 0\n")).beside == 0
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{RATES}copy: 3\n", "there is no copy"),
        (RATES.replace("2e9", "fast"), "update_host: fast is not a number above 0 in a second"),
        (RATES.replace("2e9", "0"), "update_host: 0 is not a number above 0 in a second"),
        (RATES.replace("2e9", ".inf"), "update_host: inf is not a number above 0"),
        (RATES.replace("2e9", "true"), "update_host: True is not a number above 0"),
        (RATES.replace("update: 40 GB\n", ""), "update: missing"),
        (f"{RATES}beside: 1.5\n", "beside: 1.5 is not a number from 0 to 1"),
        (f"{RATES}workspace: -3\n", "workspace: -3 is not a number of bytes, such as 32MB"),
        (f"{RATES}workspace: false\n", "workspace: False is not a number of bytes"),
        (f"{RATES}beside: true\n", "beside: True is not a number from 0 to 1"),
        (f"{RATES}read: 3GB\n", "read and write go together"),
        ("3\n", "holds no table"),
    ],
)
def test_rates_that_cannot_be_used(text: str, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        read_rates(path)
    (problem,) = refused.value.problems
    assert problem.startswith(f"--placement-rates {path}: ") and bare(says) in bare(problem)
