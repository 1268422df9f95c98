"""What may change on resume: every field of a run is in exactly one group, and each group acts as it says."""

import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest

from megazero.checkpoint import resume_changes as changes
from megazero.checkpoint.format import Damaged
from megazero.checkpoint.resume_changes import compare, record_of, run_from
from megazero.config.flags import read_command_line
from megazero.config.layers.pattern import LayerPattern
from megazero.config.options import run_options
from megazero.config.parse import parse_run
from megazero.config.rotary import RotaryScaling
from megazero.config.schema import Run, ScheduleConfig
from megazero.config.tiers import Tier, TierShare
from megazero.system.words import value_words
from tests.lengths import iterations, samples, share

BASE = Run(schedule=ScheduleConfig(train_length=iterations(100), lr_warmup=iterations(5)))


def changed(run: Run, **values: object) -> Run:
    """A copy with fields replaced: section__field=value."""
    for path, value in values.items():
        section, _, name = path.partition("__")
        run = replace(run, **{section: replace(getattr(run, section), **{name: value})})
    return run


def test_every_field_is_in_one_group():
    tables = (changes._SHAPE, changes._ADAPTERS, changes._RATES, changes._BATCH, changes._DATA, changes._FREE)
    listed = [path for table in tables for path in table] + list(changes._SILENT)
    assert len(listed) == len(set(listed))
    every = {
        f"{section}.{f.name}"
        for section in ("model", "parallel", "optimizer", "schedule", "data", "lora", "offload")
        for f in fields(getattr(Run(), section))
    }
    assert set(listed) == every


def test_an_order_that_follows_from_the_disks_is_no_change():
    """Checkpoints of before have horizontal order for what is now left open."""
    on_disks = changed(BASE, offload__offload_params=TierShare(Tier.DISK))
    for run, order, other in ((BASE, "horizontal", "vertical"), (on_disks, "vertical", "horizontal")):
        assert compare(changed(run, parallel__micro_batch_order=order), run) == changes.Comparison((), ())
        found = compare(changed(run, parallel__micro_batch_order=other), run)
        assert found == changes.Comparison((), (changes.Change("micro-batch-order", other, order),))


def test_a_record_survives_json():
    run = changed(
        BASE,
        schedule__rampup_batch_size=(8, 8, 100),
        data__data_path=("a", "b"),
        parallel__partition=(6, 6),
        optimizer__adam_eps=1e-17,
    )
    record = json.loads(json.dumps(record_of(run)))
    assert run_from(record) == run
    assert compare(run_from(record), run) == changes.Comparison((), ())


def test_a_record_of_another_version():
    record = record_of(BASE)
    del record["model"]["rotary_base"], record["trainer"], record["offload"]
    record["model"]["of_the_future"] = 1
    assert run_from(record) == BASE


def test_a_record_of_an_earlier_version_has_a_field_for_each_measure_of_a_length() -> None:
    """One of these holds a number, the others None, in any order."""
    record = record_of(BASE)
    for warmup, names in (
        (iterations(5), {"iters": 5, "samples": None, "fraction": None}),
        (samples(50), {"iters": None, "samples": 50, "fraction": None}),
        (share(0.07), {"iters": None, "samples": None, "fraction": 0.07}),
        (None, {"iters": None, "samples": None, "fraction": None}),
    ):
        run = changed(BASE, schedule__lr_warmup=warmup, schedule__lr_decay=iterations(90))
        earlier = {name: value for name, value in record["schedule"].items() if not name.endswith(("warmup", "decay"))}
        earlier |= {f"lr_warmup_{name}": value for name, value in names.items()}
        earlier |= {"lr_decay_iters": 90, "lr_decay_samples": None}
        assert run_from(record | {"schedule": earlier}) == run == run_from(json.loads(json.dumps(record_of(run))))
    with pytest.raises(Damaged, match=r"lr_warmup_fraction .*1\.5.*: must be at least 0 and at most 1"):
        run_from(record | {"schedule": earlier | {"lr_warmup_fraction": 1.5}})


def test_a_record_of_an_earlier_version_has_tiers_and_budgets_in_another_section() -> None:
    run = parse_run(
        "--zero-stage 2 --offload-params cpu:0.25 --offload-gradients cpu --host-memory-budget 9GB".split(), 1
    )
    record = record_of(run)
    moved = [name for name, known in run_options().items() if known.earlier == "parallel"]
    record["parallel"] |= {name: record["offload"].pop(name) for name in moved}
    assert len(moved) == 5 and run_from(record) == run != Run()
    record["parallel"]["offload_params"] = "tape"
    with pytest.raises(Damaged, match="offload_params: 'tape'"):
        run_from(record)


@pytest.mark.parametrize(
    "change",
    [
        {"parallel__tp": 4},
        {"parallel__zero_stage": 2},
        {"parallel__recompute_granularity": "full"},
        {"optimizer__precision": "fp64"},
        {"schedule__micro_batch_size": 1},
        {"model__make_vocab_size_divisible_by": 1},
    ],
)
def test_the_layout_is_free_and_reported(change):
    found = compare(BASE, changed(BASE, **change))
    assert found.problems == ()
    (line,) = map(str, found.changes)
    ((path, value),) = change.items()
    section, name = path.split("__")
    before = getattr(getattr(BASE, section), name)
    assert line == f"{name.replace('_', '-')} {'none' if before is None else before} -> {value}"


def test_a_bucket_size_is_compared_where_both_runs_name_one():
    """An older run names the size that gloo has without a flag; without one it follows from the layout."""
    old, new = (changed(BASE, parallel__bucket_size=size) for size in (8_388_608, 1000))
    assert compare(old, BASE).changes == () and compare(BASE, old).changes == ()
    assert [str(change) for change in compare(old, new).changes] == ["bucket-size 8388608 -> 1000"]


def test_dp_is_reported():
    found = compare(BASE, BASE, {"dp": 2, "tp": 1}, {"dp": 3, "tp": 1})
    assert [str(change) for change in found.changes] == ["dp 2 -> 3"]


@pytest.mark.few(cases=4)
@pytest.mark.parametrize(
    "change, override",
    [
        ({"schedule__lr": 2e-3}, "override_opt_param_scheduler"),
        ({"schedule__lr_decay_style": "linear"}, "override_opt_param_scheduler"),
        ({"schedule__lr_warmup": iterations(6)}, "override_opt_param_scheduler"),
        ({"optimizer__weight_decay": 0.0}, "override_opt_param_scheduler"),
        ({"optimizer__clip_grad": 0.0}, "override_opt_param_scheduler"),
        ({"model__hidden_dropout": 0.1}, "override_opt_param_scheduler"),
        ({"schedule__global_batch_size": 48}, "override_batch"),
        ({"schedule__rampup_batch_size": (8, 8, 100)}, "override_batch"),
        ({"data__seed": 1}, "override_data"),
        ({"data__split": "1,0,0"}, "override_data"),
        ({"data__data_path": ("x",)}, "override_data"),
        ({"model__seq_length": 128}, "override_data"),
    ],
)
def test_what_decides_training_needs_its_override(change, override):
    now = changed(BASE, **change)
    found = compare(BASE, now)
    ((path, new),) = change.items()
    section, name = path.split("__")
    flag = "--" + override.replace("_", "-")
    assert len(found.problems) == 1 and found.problems[0].endswith(f"to change it on resume: {flag}")
    if not name.startswith("lr_warmup"):
        old = getattr(getattr(BASE, section), name)
        assert found.problems[0].startswith(
            f"--{name.replace('_', '-')}: {value_words(old)} in the checkpoint, {value_words(new)} now"
        )
    allowed = compare(BASE, changed(now, **{f"checkpoint__{override}": True}))
    assert allowed.problems == () and [change.allowed_by for change in allowed.changes] == [flag]
    others = {"override_opt_param_scheduler", "override_batch", "override_data"} - {override}
    assert compare(BASE, changed(now, **{f"checkpoint__{other}": True for other in others})).problems == found.problems


@pytest.mark.parametrize(
    "change",
    [
        {"model__rotary_scaling": RotaryScaling.parsed("linear factor=4")},
        {"model__rotary_base": 500_000.0},
        {"model__layer_pattern": LayerPattern.parsed("window:8, full")},
        {"model__attention_cap": 50.0},
        {"model__residual_multiplier": 0.5},
        {"model__norm_plus_one": True},
    ],
)
def test_what_layers_compute_never_changes(change):
    """Weights of the same shapes would go on in another model; no override allows that."""
    overrides = {f"checkpoint__override_{name}": True for name in ("opt_param_scheduler", "batch", "data")}
    (path,) = change
    before = changed(BASE, model__position_embedding="rotary")
    problems = compare(before, changed(before, **change, **overrides)).problems
    assert len(problems) == 1 and problems[0].startswith(f"--{path.split('__')[1].replace('_', '-')}: "), problems
    assert problems[0].endswith("the model's shape cannot change on resume")


KINDS = parse_run(
    [
        *(
            "--num-layers",
            "4",
            "--position-embedding",
            "rotary",
            "--layer-pattern",
            "window:8 near, full, chunk:6 ffn:48",
        ),
        *("--rotary-sets", "near base=700 scaling=linear factor=2"),
    ],
    1,
)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--layer-pattern", "window:9 near, full, chunk:6 ffn:48"),
        ("--layer-pattern", "window:8 near, full, chunk:7 ffn:48"),
        ("--layer-pattern", "window:8 near, full, chunk:6 ffn:47"),
        ("--layer-pattern", "window:8, full near, chunk:6 ffn:48"),
        ("--layer-pattern", "window:8 near, full none, chunk:6 ffn:48"),
        ("--layer-pattern", "window:8 near, full, chunk:6 ffn:48, full"),
        ("--rotary-sets", "near base=701 scaling=linear factor=2"),
        ("--rotary-sets", "near base=700 scaling=linear factor=3"),
        ("--rotary-sets", "near base=700"),
    ],
)
def test_layers_of_several_kinds_never_change(flag: str, words: str) -> None:
    """A window, a chunk, a width, positions or a set of rotary settings of one layer."""
    name = flag.removeprefix("--").replace("-", "_")
    value = run_options()[name].from_words([words])
    before = value_words(getattr(KINDS.model, name))
    problems = compare(KINDS, changed(KINDS, **{f"model__{name}": value})).problems
    assert problems == (f"{flag}: {before} in the checkpoint, {words} now; {changes.SHAPE_STAYS}",)


@pytest.mark.parametrize(
    "pattern",
    [
        "window:8 near, full rotary ffn:960, chunk:6 ffn:48, window:8 near",
        "window:8 near, full, chunk:6 rotary ffn:48, window:8 near, full",
    ],
)
def test_another_pattern_of_the_same_layers_is_no_change(pattern: str) -> None:
    now = changed(KINDS, model__layer_pattern=LayerPattern.parsed(pattern))
    assert now != KINDS and compare(KINDS, now) == changes.Comparison((), ())


def test_the_shape_never_changes_and_every_field_is_named():
    now = changed(
        BASE, model__hidden_size=256, model__num_layers=2, checkpoint__override_data=True, checkpoint__finetune=True
    )
    problems = compare(BASE, now).problems
    assert sorted(problem.split(":")[0] for problem in problems) == [
        "--ffn-hidden-size",
        "--hidden-size",
        "--num-layers",
    ]
    assert "--hidden-size: 240 in the checkpoint, 256 now; the model's shape cannot change on resume" in problems


def test_a_number_given_or_derived_is_the_same():
    now = changed(
        BASE,
        model__ffn_hidden_size=960,
        model__num_query_groups=12,
        parallel__pipeline_schedule="1f1b",
        model__max_position_embeddings=7,
    )
    assert compare(BASE, now) == changes.Comparison((), ())
    learned = changed(BASE, model__position_embedding="learned")
    assert compare(learned, changed(learned, model__max_position_embeddings=384)).problems == ()
    assert len(compare(learned, changed(learned, model__max_position_embeddings=385)).problems) == 1


def test_a_longer_run_changes_a_decay_that_is_as_long_as_the_run():
    longer = changed(BASE, schedule__train_length=iterations(200))
    (problem,) = compare(BASE, longer).problems
    assert problem == (
        "--train-length: 100 iterations in the checkpoint, 200 iterations now, and with it the learning rate's decay "
        "(100 iterations there, 200 iterations now); to go on with the new schedule: --override-opt-param-scheduler; "
        "to keep the old schedule, whose rate is --min-lr 0 after its end: --lr-decay 100 iterations"
    )
    assert "train-length 100 iterations -> 200 iterations" in map(str, compare(BASE, longer).changes)
    named = changed(BASE, schedule__lr_decay=iterations(100))
    assert compare(BASE, changed(named, schedule__train_length=iterations(200))).problems == ()
    constant = changed(BASE, schedule__lr_decay_style="constant")
    assert compare(constant, changed(constant, schedule__train_length=iterations(200))).problems == ()
    fraction = changed(BASE, schedule__lr_warmup=share(0.05))
    assert compare(BASE, fraction).problems == ()
    (problem,) = compare(fraction, changed(fraction, schedule__train_length=iterations(200))).problems
    assert "warm-up (5 iterations there, 10 iterations now) and decay (100 iterations there, 200 " in problem


@pytest.mark.parametrize(
    ("percent", "run", "shown"),
    [(5, 104, "5.2 iterations"), (7, 100, "7 iterations"), (0.1, 10**9, "1000000 iterations")],
)
def test_a_share_of_a_run_is_told_as_people_write_it(percent: float, run: int, shown: str) -> None:
    """5% of 104 iterations are 5.2, and not 5.2000000000000002; 7% of 100 are not another warm-up than 7 iterations."""
    base = changed(BASE, schedule__train_length=iterations(run), schedule__lr_warmup=share(percent / 100))
    (problem,) = compare(base, changed(base, schedule__train_length=iterations(2 * run))).problems
    assert f"warm-up ({shown} there, " in problem
    if percent == 7:
        assert compare(base, changed(base, schedule__lr_warmup=iterations(7))).problems == ()


@pytest.mark.parametrize("style", ["cosine", "wsd"])
def test_both_ways_of_a_longer_run_are_accepted_as_they_are_told(style: str) -> None:
    """Also where the warm-up and the fall follow from the decay, each way is one flag."""
    base = changed(BASE, schedule__lr_decay_style=style, schedule__lr_warmup=share(0.1))
    longer = changed(base, schedule__train_length=iterations(200))
    (problem,) = compare(base, longer).problems
    for flags in re.findall(r": (--(?:override|lr-decay)[^;]*)", problem):
        settings = read_command_line(flags.split()).source.settings
        named = {f"{run_options()[name].section}__{name}": value for name, value in settings.items()}
        assert compare(base, changed(longer, **named)).problems == ()
    assert problem.count("; to ") == 2


@pytest.mark.parametrize(
    ("then", "now", "flags"),
    [
        (
            {"train_length": iterations(100)},
            {"train_length": iterations(200), "lr_warmup": share(0.1)},
            ["--lr-warmup", "--train-length"],
        ),
        (
            {"train_length": iterations(100), "lr_warmup": share(0.1), "lr_decay_style": "wsd"},
            {"train_length": iterations(200), "lr_warmup": share(0.1), "lr_decay_style": "wsd"},
            ["--train-length"],
        ),
        (
            {"train_length": iterations(100), "lr_decay": iterations(90)},
            {"train_length": iterations(200), "lr_decay": iterations(80)},
            ["--lr-decay"],
        ),
        ({"train_length": samples(960)}, {"train_length": samples(1920)}, ["--train-length"]),
        (
            {"train_length": iterations(100), "lr_warmup": samples(5)},
            {"train_length": iterations(100), "lr_warmup": samples(6)},
            ["--lr-warmup"],
        ),
    ],
)
def test_a_length_that_changed_names_the_flag_that_changed_it(
    then: dict[str, Any], now: dict[str, Any], flags: list[str]
) -> None:
    """Such a flag is there: what is not one of its own (--lr-decay) is told by what it follows from."""
    found = compare(Run(schedule=ScheduleConfig(**then)), Run(schedule=ScheduleConfig(**now))).problems
    assert [problem.partition(":")[0] for problem in found] == flags
    assert not [flag for flag in flags if read_command_line([flag, "1"]).source.problems]


def test_an_average_begins_and_ends_at_any_step_and_keeps_its_decay():
    keeps, other = (changed(BASE, optimizer__ema_decay=decay) for decay in (0.9, 0.99))
    for old, new, line in ((BASE, keeps, "none -> 0.9"), (keeps, BASE, "0.9 -> none")):
        found = compare(old, new)
        assert found.problems == () and [str(change) for change in found.changes] == [f"ema-decay {line}"]
    (problem,) = compare(keeps, other).problems
    assert problem.startswith("--ema-decay: 0.9 in the checkpoint, 0.99 now; to change it on resume: --override-opt")
    assert compare(keeps, changed(other, checkpoint__override_opt_param_scheduler=True)).problems == ()


def test_numbers_that_the_optimizer_does_not_use_may_differ():
    sgd = changed(BASE, optimizer__optimizer="sgd")
    assert compare(sgd, changed(sgd, optimizer__adam_beta2=0.5)).problems == ()
    assert len(compare(sgd, changed(sgd, optimizer__sgd_momentum=0.5)).problems) == 1
    assert compare(BASE, changed(BASE, optimizer__sgd_momentum=0.5)).problems == ()
    assert len(compare(BASE, changed(BASE, optimizer__adam_beta2=0.5)).problems) == 1


def test_finetuning_starts_anew():
    now = changed(BASE, schedule__lr=1.0, data__seed=9, schedule__global_batch_size=2, checkpoint__finetune=True)
    assert compare(BASE, now) == changes.Comparison((), ())


def test_a_vocabulary_left_to_the_tokenizer_is_not_a_difference():
    assert compare(changed(BASE, model__vocab_size=1003), BASE).problems == ()
    assert len(compare(changed(BASE, model__vocab_size=1003), changed(BASE, model__vocab_size=1004)).problems) == 1


def test_the_banner_shows_words_and_no_python() -> None:
    assert changes.Change("data-path", ("data/a",), ("0.5", "data/a", "0.5", "data/b")).words() == (
        "data-path",
        "data/a",
        "0.5 data/a 0.5 data/b",
    )
    assert changes.Change("partition", None, (1, 3)).words() == ("partition", "none", "1 3")
