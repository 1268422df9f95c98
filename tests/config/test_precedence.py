"""Defaults, presets, files and flags over each other; a dumped run reproduces itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from megazero.config.dump import dump, read_yaml
from megazero.config.layers.pattern import LayerPattern, PatternItem
from megazero.config.options import sections
from megazero.config.parse import ConfigError, parse_run
from megazero.config.presets import presets
from megazero.config.schema import Run
from tests.lengths import iterations, samples, share


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


def test_flags_over_yaml_over_deepspeed_over_preset_over_defaults(tmp_path: Path) -> None:
    config = write(tmp_path, "optimizer: {clip_grad: 3.0, adam_eps: 3.0e-8}\nschedule: {lr: 4e-4}\n")
    deepspeed = tmp_path / "ds.json"
    deepspeed.write_text('{"gradient_clipping": 2.0, "optimizer": {"params": {"eps": 2e-8, "weight_decay": 0.2}}}')
    words = ["--adam-eps", "4e-8", "--config", config, "--preset", "bloom-3b"]
    run = parse_run(words, 1)
    o = run.optimizer
    assert (o.adam_eps, o.clip_grad, o.weight_decay, run.schedule.lr) == (4e-8, 3.0, 0.1, 4e-4)
    assert (run.model.hidden_size, run.schedule.min_lr, run.trainer.log_interval) == (2560, 1e-5, 1)
    run = parse_run([*words[2:], "--deepspeed-config", str(deepspeed)], 1)
    assert (run.optimizer.adam_eps, run.optimizer.clip_grad, run.optimizer.weight_decay) == (3e-8, 3.0, 0.2)


def test_a_flag_replaces_its_siblings_of_lower_levels(tmp_path: Path) -> None:
    run = parse_run(["--preset", "bloom-560m", "--train-iters", "10", "--lr-warmup-iters", "4"], 1)
    s = run.schedule
    assert (s.train_iters, s.train_samples, s.lr_decay) == (10, None, samples(200_000_000))
    assert s.lr_warmup == iterations(4)
    assert run.trainer.exit_duration_in_mins is None
    config = write(tmp_path, "schedule: {train_samples: 1000, lr_warmup_fraction: 0.1}\n")
    s = parse_run(["--preset", "gpt2-124m", "--config", config], 1).schedule
    assert (s.train_iters, s.train_samples, s.lr_warmup) == (None, 1000, share(0.1))


def test_units_are_not_mixed_within_a_level_of_the_users_own(tmp_path: Path) -> None:
    config = write(tmp_path, "schedule: {train_samples: 1000, lr_warmup_iters: 10}\n")
    with pytest.raises(ConfigError, match=r"lr_warmup_iters counts iterations, and .*train_samples counts samples"):
        parse_run(["--config", config], 1)


@pytest.mark.parametrize(
    ("words", "iterations", "minutes"),
    [
        ([], 100, 10.0),
        (["--exit-duration-in-mins", "3"], 100, 3.0),
        (["--train-iters", "7"], 7, None),
        (["--train-samples", "700"], None, None),
        (["--preset", "bloom-560m"], None, None),
    ],
)
def test_a_run_without_a_length_has_the_default_one(
    words: list[str], iterations: int | None, minutes: float | None
) -> None:
    run = parse_run(words, 1)
    assert (run.schedule.train_iters, run.trainer.exit_duration_in_mins) == (iterations, minutes)


@pytest.mark.parametrize("position", ["learned", "alibi", "rotary", "none"])
def test_embedding_layernorm_comes_with_alibi(position: str) -> None:
    assert parse_run(["--position-embedding", position], 1).model.embedding_layernorm == (position == "alibi")
    assert parse_run(["--position-embedding", position, "--embedding-layernorm"], 1).model.embedding_layernorm
    assert not parse_run(["--position-embedding", position, "--no-embedding-layernorm"], 1).model.embedding_layernorm


def again(run: Run, folder: Path, *words: str, world_size: int | None = None) -> Run:
    return parse_run(["--config", write(folder, dump(run)), *words], world_size)


@pytest.mark.few(cases=5)
@pytest.mark.parametrize("name", [*presets(), None])
def test_a_dumped_preset_reproduces_itself(name: str | None, tmp_path: Path) -> None:
    run = parse_run(["--preset", name] if name else [], None)
    assert again(run, tmp_path) == run
    assert again(run, tmp_path, "--preset", "bloom-1b7") == run, "a dumped run leaves nothing to a preset beneath it"
    assert again(run, tmp_path, "--train-iters", "3").schedule.train_samples is None


def test_dumped_random_runs_reproduce_themselves(tmp_path: Path) -> None:
    dice = random.Random(7)
    pool = [
        ["--preset", "bloom-560m"],
        ["--train-iters", "12"],
        ["--lr-warmup-iters", "3"],
        ["--lr", "1e-5", "--min-lr", "1e-7"],
        ["--no-overlap"],
        ["--untie-embeddings-and-output-weights"],
        ["--valid-data-path", "a", "x y", "b", "ü: #"],
        ["--split", "100"],
        ["--load", "yes", "--save", "null"],
        ["--precision", "fp64"],
        ["--num-layers", "9", "--pp", "3", "--partition", "2", "4", "3"],
        ["--rampup-batch-size", "none"],
        ["--exit-duration-in-mins", "1e-3"],
        ["--metrics-file", "1e5"],
        ["--recompute-granularity", "none", "--position-embedding", "none"],
    ]
    for _ in range(25):
        words = [word for group in dice.sample(pool, dice.randint(1, 8)) for word in group]
        run = parse_run(words, None)
        assert again(run, tmp_path) == run, words


def test_units_mixed_by_precedence_survive_the_dump(tmp_path: Path) -> None:
    run = parse_run(["--preset", "bloom-560m", "--train-iters", "10"], 1)
    assert run.schedule.lr_warmup == samples(183_105) and run.schedule.train_iters
    assert again(run, tmp_path) == run


def test_a_dump_is_nested_by_section_and_complete() -> None:
    plain = yaml.safe_load(dump(parse_run([], 1)))
    assert plain["parallel"]["tp"] == 1 and plain["schedule"]["train_length"] == "100 iterations"
    assert plain["model"]["embedding_layernorm"] is True


def test_a_file_of_an_earlier_version_has_tiers_and_budgets_in_another_section(tmp_path: Path) -> None:
    """They stood in `parallel`, beside others that still do."""
    moved = {"offload_params": "cpu:0.5", "offload_gradients": "cpu", "offload_activations": "cpu:block 1"}
    moved |= {"device_memory_budget": "4000000000", "host_memory_budget": "7000000000"}
    file = write(tmp_path, yaml.safe_dump({"resolved": True, "parallel": {"zero_stage": 1, **moved}}))
    run = parse_run(["--config", file], 1)
    assert {name: str(getattr(run.offload, name)) for name in moved} == {
        name: str(word) for name, word in moved.items()
    }
    assert run.parallel.zero_stage == 1 and "offload_params" not in yaml.safe_load(dump(run))["parallel"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("offload: {zero_stage: 3}", "there is no offload.zero_stage; zero_stage belongs to parallel"),
        ("model: {num_layer: 3}", "there is no model.num_layer; did you mean num_layers?"),
        ("modle: 3", "there is no modle; did you mean model?"),
        ("parallel: {num_layers: 3}", "there is no parallel.num_layers; num_layers belongs to model"),
        ("schedule: {lr: fast}", "schedule.lr: 'fast' is not a number"),
        ("parallel: {tp: 1.5}", "parallel.tp: '1.5' is not a whole number"),
        ("parallel: {tp: true}", "parallel.tp: True is not a whole number"),
        ("parallel: {overlap: 1}", "parallel.overlap: '1' is not true or false"),
        ("model: {activation: gelu_tanh}", "did you mean gelu-tanh?"),
        ("parallel: {tp: null}", "parallel.tp: None is not a whole number"),
        ("schedule: {rampup_batch_size: {a: 1}}", "is not a list"),
        ("parallel: {tp: 1, tp: 2}", "the key 'tp' stands twice"),
        ("parallel: {pp: 1}\npp: 1", "gives pp a second time"),
        ("parallel: 3", "parallel holds no fields, but '3'; fields of it are tp, pp, zero_stage, ..."),
        ("optimizer: adam", "; optimizer is a key of the section optimizer: {optimizer: {optimizer: ...}}"),
        ("lora: 8", "lora holds no fields, but '8'; fields of it are lora_rank, lora_alpha, lora_targets, ..."),
        ("learning: {lr: 1, tp: 2, x: 3}", "there is no learning; lr belongs to schedule, tp belongs to parallel"),
        ("modle: {num-layers: 3}", "there is no modle; did you mean model?; num_layers belongs to model"),
        ("optim: {lr: 1}", "there is no optim; did you mean optimizer?; lr belongs to schedule"),
        ("runs: {a: {b: 1}}", "there is no runs"),
        ("schedule: {lr_warmp: {b: 1}}", "there is no schedule.lr_warmp; did you mean lr_warmup?"),
        ("model: {more: {lr: 1}}", "there is no model.more; lr belongs to schedule"),
        ("- 1", "holds no settings (key: value), but a list"),
        ("a: [", "is no YAML: line 1, column 5: expected the node content"),
        ("model: {num_layers: 3}\n  lr: 3", "is no YAML: line 2, column 3: "),
    ],
)
def test_mistakes_in_yaml_are_named(text: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(["--config", write(tmp_path, text), "--micro-batch-sise", "1"], 1)
    assert len(caught.value.problems) == 2
    assert part in str(caught.value) and "--micro-batch-size" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is missing"):
        parse_run(["--config", str(tmp_path / "none.yaml")], 1)


def test_none_in_yaml_is_none(tmp_path: Path) -> None:
    """As behind a flag. Where any word is a value, none is one: names of files, and layers without positions."""
    known = {name: hint for section in sections().values() for name, hint in get_type_hints(section).items()}
    words = {name for name, hint in known.items() if "None" in str(hint) and hint != str | None}
    words -= {"layer_pattern"}
    assert {"attention_scale", "partition", "lr_warmup", "rotary_scaling", "num_query_groups"} <= words
    source = read_yaml(write(tmp_path, yaml.safe_dump({**dict.fromkeys(words, "none"), "rotary_sets": "none"})))
    assert source.problems == [] and source.settings == dict.fromkeys(words) | {"rotary_sets": ()}
    source = read_yaml(write(tmp_path, "save: none\nlayer_pattern: none\ndata_path: none\n"))
    assert source.settings["save"] == "none" and source.settings["data_path"] == ("none",)
    assert source.settings["layer_pattern"] == LayerPattern((PatternItem(positions="none"),))


def test_yaml_takes_short_numbers_aliases_and_flat_keys(tmp_path: Path) -> None:
    text = "schedule: {lr: 1e-4, train_samples: 2e8}\ntensor-model-parallel-size: 2\nsplit: 100\n"
    run = parse_run(["--config", write(tmp_path, text)], 2)
    assert (run.schedule.lr, run.schedule.train_samples) == (1e-4, 200_000_000)
    assert (run.parallel.tp, run.data.split) == (2, "100")


def test_words_of_a_file_stay_as_they_are_written(tmp_path: Path) -> None:
    """YAML 1.1 would read octal numbers, times to the base of 60, and fractions without their last zeros."""
    text = "save: 0042\nmetrics_file: 1.10\ndata_path: [0.30, 007, 1e0, 12:30:45]\nnum_layers: 010\nlr: 1e-4\n"
    run = parse_run(["--config", write(tmp_path, text), "--vocab-size", "1_000"], 1)
    assert (run.checkpoint.save, run.trainer.metrics_file) == ("0042", "1.10")
    assert run.data.data_path == ("0.30", "007", "1e0", "12:30:45")
    assert (run.model.num_layers, run.schedule.lr, run.model.vocab_size) == (10, 1e-4, 1000)
    for wrong in ("num_layers: 1:30", "split: 90:10:0"):
        with pytest.raises(ConfigError, match=wrong.replace(": ", ".*")):
            parse_run(["--config", write(tmp_path, wrong)], 1)


def test_an_unreadable_value_is_reported_once(tmp_path: Path) -> None:
    """What depends on it is not guessed at: --tp x would otherwise also be a tp of 1 on the wrong number of ranks."""
    with pytest.raises(ConfigError) as caught:
        parse_run(["--tp", "x", "--hidden-size", "0", "--num-attention-heads", "7"], 3)
    assert len(caught.value.problems) == 2
    config = write(tmp_path, "parallel: {tp: x}")
    with pytest.raises(ConfigError) as caught:
        parse_run(["--config", config, "--tp", "5"], 5)
    assert len(caught.value.problems) == 2, "the flag above it is known, and checked"
