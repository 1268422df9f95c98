"""--deepspeed-config: what maps, what is refused by name, what contradicts, and what DeepSpeed does about keys that are
missing.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.config.derive import micro_batch_order
from megazero.config.lengths import Length, Measure
from megazero.config.parse import ConfigError, parse_arguments, parse_run
from megazero.config.schema import Run
from megazero.config.tiers import Tier, TierShare
from tests.lengths import iterations


def parse(folder: Path, content: Any, *words: str, world_size: int | None = 4) -> Run:
    path = folder / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return parse_run(["--deepspeed-config", str(path), *words], world_size)


def refusals(folder: Path, content: Any, *words: str, world_size: int | None = 4) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(folder, content, *words, world_size=world_size)
    return caught.value.problems


def test_a_whole_file(tmp_path: Path) -> None:
    adam = {"lr": 2e-4, "betas": [0.8, 0.98], "eps": 1e-7, "weight_decay": 0.02}
    decay = {"warmup_num_steps": 10, "total_num_steps": 200, "warmup_max_lr": 2e-4, "warmup_type": "linear"}
    fp16 = {"loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2}
    run = parse(
        tmp_path,
        {
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 5,
            "gradient_clipping": 0.7,
            "steps_per_print": 20,
            "optimizer": {"type": "Adam", "params": adam},
            "scheduler": {"type": "WarmupDecayLR", "params": decay},
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, **fp16},
            "bf16": {"enabled": False},
            "communication_data_type": "fp16",
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {
                "stage": 2,
                "reduce_bucket_size": 5e5,
                "allgather_bucket_size": 5e5,
                "overlap_comm": False,
                "reduce_scatter": True,
                "contiguous_gradients": True,
                "offload_optimizer": {"device": "none", "pin_memory": True},
            },
            "activation_checkpointing": {"partition_activations": False},
            "tensorboard": {"enabled": True, "output_path": "boards", "job_name": "mine"},
            "wandb": {"enabled": True, "project": "poems", "team": "us", "group": "small"},
            "wall_clock_breakdown": False,
        },
        "--tp",
        "2",
    )
    s, o, p = run.schedule, run.optimizer, run.parallel
    assert (s.micro_batch_size, s.global_batch_size, s.lr, s.min_lr) == (3, 3 * 5 * 2, 2e-4, 0.0)
    assert (s.lr_decay_style, s.lr_warmup, s.lr_decay) == ("linear", iterations(10), iterations(200))
    assert (o.clip_grad, o.optimizer, o.adam_beta1, o.adam_beta2) == (0.7, "adamw", 0.8, 0.98)
    assert (o.adam_eps, o.weight_decay, o.precision, o.loss_scale) == (1e-7, 0.02, "fp16", None)
    assert (o.initial_loss_scale, o.loss_scale_window, o.hysteresis, o.min_loss_scale) == (4096, 500, 3, 2)
    assert (p.zero_stage, p.bucket_size, p.overlap, p.grad_reduce_dtype) == (2, 500_000, False, "fp16")
    assert (run.trainer.log_interval, run.trainer.tensorboard_dir) == (20, "boards/mine")
    assert (run.trainer.wandb, run.trainer.wandb_group) == ("us/poems", "small")


@pytest.mark.parametrize(
    ("content", "offload", "folders"),
    [
        ({"device": "none", "nvme_path": "a"}, "none", ()),
        ({"device": None, "ratio": 0.3}, "none", ()),
        ({"device": "cpu", "pin_memory": False, "ratio": 1.0, "fast_init": True}, "cpu", ()),
        ({"device": "cpu", "nvme_path": "/local_nvme", "buffer_count": 4}, "cpu", ()),
        ({"device": "cpu", "ratio": 0.0}, "none", ()),
        ({"device": "cpu", "ratio": 0.3}, "cpu:0.3", ()),
        (
            {"device": "nvme", "nvme_path": "/a folder", "pipeline_read": True, "pipeline_write": False},
            "nvme",
            ("/a folder",),
        ),
        ({"device": "auto", "ratio": 0.3}, "none", ()),
        ({"ratio": 0.3}, "none", ()),
        (None, "none", ()),
    ],
)
def test_offload(content: dict[str, Any] | None, offload: str, folders: tuple[str, ...], tmp_path: Path) -> None:
    aio = {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}
    zero = {"stage": 2, "offload_optimizer": content}
    run = parse(tmp_path, {"zero_optimization": zero, "aio": aio}, "--zero-stage", "2")
    assert (str(run.offload.offload_optimizer), run.offload.nvme_path) == (offload, folders)


@pytest.mark.parametrize(("path", "folders"), [("a", ("a", "b")), ("b", ("b",))])
def test_parameters_have_a_group_of_their_own(path: str, folders: tuple[str, ...], tmp_path: Path) -> None:
    """And the two groups share their folders."""
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": path},
        "offload_param": {"device": "nvme", "nvme_path": "b", "pin_memory": True},
    }
    run = parse(tmp_path, {"zero_optimization": zero}, "--zero-stage", "3")
    assert run.offload.offload_params == run.offload.offload_optimizer == TierShare(Tier.DISK)
    assert run.parallel.micro_batch_order is None and micro_batch_order(run) == "vertical"
    assert run.offload.nvme_path == folders


def test_a_flag_that_contradicts_its_offload(tmp_path: Path) -> None:
    content = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    with pytest.raises(ConfigError, match=r"--offload-optimizer none contradicts .*offload_optimizer.device cpu"):
        parse(tmp_path, content, "--offload-optimizer", "none")


def test_auto_is_taken_from_the_flags(tmp_path: Path) -> None:
    run = parse(
        tmp_path,
        {"train_batch_size": "auto", "zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}},
        "--zero-stage",
        "1",
    )
    assert (run.parallel.zero_stage, run.schedule.global_batch_size, run.optimizer.precision) == (1, 24, "bf16")


@pytest.mark.parametrize(
    ("content", "precision"),
    [
        ({}, "fp32"),
        ({"fp16": {"enabled": False}}, "fp32"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}}, "fp16"),
    ],
)
def test_precision(content: dict[str, Any], precision: str, tmp_path: Path) -> None:
    assert parse(tmp_path, content).optimizer.precision == precision


@pytest.mark.parametrize(
    ("content", "part"),
    [
        *(
            ({"zero_optimization": {"offload_optimizer": content}}, message)
            for content, message in (
                ({"device": "gpu"}, "offload_optimizer.device 'gpu' is not one of none, cpu, nvme"),
                ({"device": "cpu", "ratio": 1.5}, "offload_optimizer.ratio: the share 1.5 is not above 0"),
                ({"device": "cpu", "ratio": "x"}, "offload_optimizer.ratio: the share 'x' is not a number"),
                ({"device": "nvme"}, "--offload-optimizer nvme needs --nvme-path DIR"),
                ({"device": "nvme", "nvme_path": True}, "offload_optimizer.nvme_path: True is not a word"),
                ({"device": "nvme", "nvme_path": ["/a"]}, "offload_optimizer.nvme_path: ['/a'] is not a word"),
                ({"device": "nvme", "nvme_path": 3}, "offload_optimizer.nvme_path: 3 is not a word"),
                ("cpu", "zero_optimization.offload_optimizer: 'cpu' is not a group of settings"),
                ({"device": "cpu", "super_offload": True}, "nearest: --late-update"),
                ({"device": "cpu", "cpuadam_cores_perc": 0.5}, "use OMP_NUM_THREADS"),
                ({"device": "cpu", "pin_memry": True}, "did you mean zero_optimization.offload_optimizer.pin_memory?"),
            )
        ),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "--offload-params nvme needs --nvme-path DIR"),
        (
            {"zero_optimization": {"offload_param": {"device": "disk"}}},
            "offload_param.device 'disk' is not one of none",
        ),
        ({"zero_optimization": {"stage": 4}}, "--zero-stage 4 does not exist; valid: 0, 1, 2, 3; nearest: 3"),
        ({"zero_optimization": {"stage3_max_live_parameters": 1}}, "use --zero3-gathered-bytes, in bytes"),
        ({"zero_optimization": {"sub_group_size": 1e9}}, "sub_group_size"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "--zero-shard-size shards all state"),
        ({"zero_optimization": {"reduce_scatter": False}}, "sharded gradients always travel by reduce-scatter"),
        ({"zero_optimization": {"reduce_bucket_size": 1, "allgather_bucket_size": 2}}, "one size serves"),
        ({"aio": {"use_gds": True}}, "files are read and written through host memory"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "accumulate in fp32"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "use --offload-activations cpu"),
        ({"csv_monitor": {"enabled": True}}, "--metrics-file"),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown true is refused"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type 'OneBitAdam' is not built"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, "not a list of two numbers"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type 'OneCycle' is not built"),
        ({"scheduler": {"type": "WarmupLR"}}, 'write "warmup_type": "linear"'),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_min_lr": 1e-6}}},
            "warm-up starts at 0",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "contradict each other"),
        ({"gradient_cliping": 1.0}, "there is no gradient_cliping; did you mean gradient_clipping?"),
        ({"zero_optimization": {"stages": 1}}, "did you mean zero_optimization.stage?"),
        ({"train_batch_size": "many"}, "train_batch_size: 'many' is not a whole number"),
        ({"gradient_accumulation_steps": 0}, "is not a whole number of at least 1"),
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5},
            "= 40 is not train_batch_size 24; nearest: gradient_accumulation_steps 3 or train_batch_size 40",
        ),
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 0, "gradient_accumulation_steps": 5},
            "--micro-batch-size 0: must be at least 1",
        ),
        ({"train_micro_batch_size_per_gpu": 0}, "--micro-batch-size 0: must be at least 1"),
        ("{", "is no JSON"),
        ([], "holds no settings, but a list"),
    ],
)
def test_refused_by_name(content: Any, part: str, tmp_path: Path) -> None:
    found = refusals(tmp_path, content)
    assert len(found) == 1 and part in found[0], found


def test_a_flag_may_agree_but_not_contradict(tmp_path: Path) -> None:
    content = {
        "optimizer": {"params": {"lr": 2e-4}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}},
    }
    assert parse(tmp_path, content, "--lr", "2e-4").schedule.lr_decay_style == "constant"
    found = refusals(tmp_path, content, "--lr", "3e-4", "--lr-warmup-fraction", "0.1")
    assert len(found) == 2 and "--lr 0.0003 contradicts" in found[0] and "optimizer.params.lr 0.0002" in found[0]
    assert "--lr-warmup-fraction 0.1 contradicts" in found[1]


def test_cosine_ends_at_its_ratio(tmp_path: Path) -> None:
    params = {"warmup_num_steps": 5, "total_num_steps": 50, "warmup_type": "linear", "cos_min_ratio": 0.25}
    content = {"optimizer": {"params": {"lr": 2e-4}}, "scheduler": {"type": "WarmupCosineLR", "params": params}}
    schedule = parse(tmp_path, content).schedule
    assert (schedule.lr_decay_style, schedule.min_lr, schedule.lr_decay) == ("cosine", 5e-5, iterations(50))


def test_accumulation_without_a_batch_gives_the_batch(tmp_path: Path) -> None:
    assert parse(tmp_path, {"gradient_accumulation_steps": 4}, world_size=8).schedule.global_batch_size == 2 * 8 * 4


def test_no_accumulation_is_assumed_beside_a_batch_of_the_users(tmp_path: Path) -> None:
    """What DeepSpeed takes for a key that is left out lies beneath all that a user says; and nobody is told to leave
    out what is not there.
    """
    content = {"train_micro_batch_size_per_gpu": 3}
    assert parse(tmp_path, content, "--global-batch-size", "36").schedule.global_batch_size == 36
    assert refusals(tmp_path, content, "--global-batch-size", "20") == (
        "--global-batch-size 20 is not a multiple of --micro-batch-size 3 x dp 4 = 12; nearest: 12 or 24",
    )


@pytest.mark.parametrize(
    ("content", "batch"), [({"train_batch_size": 24}, []), ({"train_batch_size": 20}, []), ({}, [24]), ({}, [20])]
)
def test_what_a_wrong_accumulation_is_told_to_become_works(
    content: dict[str, Any], batch: list[int], tmp_path: Path
) -> None:
    content |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5}
    (found,) = refusals(tmp_path, content, *[word for size in batch for word in ("--global-batch-size", str(size))])
    advised = [advice.split() for advice in found.split("nearest: ")[1].split(" or ")]
    assert len(advised) == (1 if 20 in (*content.values(), *batch) else 2), found
    for name, value in advised:
        flags = ["--global-batch-size", value if name.startswith("--") else str(batch[0])] if batch else []
        parse(tmp_path, content if name.startswith("--") else content | {name: int(value)}, *flags)


def defaults_of(function: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


DEFAULTS: dict[str, Any] = {
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "warmup_num_steps": 1000,
    "warmup_max_lr": 0.001,
    "clip_grad": 1.0,
    "loss_scale": {"loss_scale": 0, "initial_scale_power": 16, "window": 1000, "hysteresis": 2, "min": 1},
}
"""What DeepSpeed 0.19.8 takes for missing keys: its own code says so in `test_the_defaults_are_deepspeeds`."""


@pytest.mark.exhaustive
def test_the_defaults_are_deepspeeds() -> None:
    """Read from its own code."""
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.ops.adam.fused_adam import FusedAdam
    from deepspeed.runtime import constants, lr_schedules
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    adam, scale = defaults_of(FusedAdam.__init__), DeepSpeedFP16Config(enabled=True)
    assert {
        "adam": {name: adam[name] for name in ("lr", "betas", "eps", "weight_decay")},
        "warmup_num_steps": defaults_of(lr_schedules.WarmupLR.__init__)["warmup_num_steps"],
        "warmup_max_lr": defaults_of(lr_schedules.WarmupDecayLR.__init__)["warmup_max_lr"],
        "clip_grad": constants.GRADIENT_CLIPPING_DEFAULT,
        "loss_scale": {
            "loss_scale": scale.loss_scale,
            "initial_scale_power": scale.initial_scale_power,
            "window": scale.loss_scale_window,
            "hysteresis": scale.hysteresis,
            "min": scale.min_loss_scale,
        },
    } == DEFAULTS, deepspeed.__version__


def test_missing_keys_mean_what_deepspeed_takes(tmp_path: Path) -> None:
    """Compared with what DeepSpeed's own code has, not with our table."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_type": "linear"}}
    content = {"optimizer": {"type": "Adam"}, "scheduler": scheduler, "fp16": {"enabled": True}}
    run = parse(tmp_path, content, "--train-iters", "5000")
    o, s, scale = run.optimizer, run.schedule, DEFAULTS["loss_scale"]
    adam = {"lr": s.lr, "betas": (o.adam_beta1, o.adam_beta2), "eps": o.adam_eps, "weight_decay": o.weight_decay}
    assert adam == DEFAULTS["adam"]
    assert s.lr_warmup == iterations(DEFAULTS["warmup_num_steps"]) == iterations(1000)
    assert o.clip_grad == DEFAULTS["clip_grad"]
    assert o.loss_scale is None and scale["loss_scale"] == 0
    assert (o.initial_loss_scale, o.loss_scale_window) == (2 ** scale["initial_scale_power"], scale["window"])
    assert (o.hysteresis, o.min_loss_scale) == (scale["hysteresis"], scale["min"])
    sgd = parse(tmp_path, {"optimizer": {"type": "SGD"}})
    theirs = defaults_of(torch.optim.SGD.__init__)
    ours = sgd.schedule.lr, sgd.optimizer.sgd_momentum, sgd.optimizer.weight_decay
    assert ours == (theirs["lr"], theirs["momentum"], theirs["weight_decay"])
    assert sgd.schedule.lr_decay_style == "constant", "no scheduler changes the rate"
    decays = {"scheduler": {"type": "WarmupDecayLR", "params": scheduler["params"]}}
    decay = parse(tmp_path, decays, "--train-iters", "5000")
    assert decay.schedule.lr == DEFAULTS["warmup_max_lr"]


def test_what_the_user_says_lies_over_deepspeeds_defaults(tmp_path: Path) -> None:
    content = {"optimizer": {"type": "AdamW", "params": {"lr": 2e-4}}}
    run = parse(tmp_path, content, "--adam-beta2", "0.98", "--bf16", "--lr-decay-style", "cosine", "--clip-grad", "0.5")
    o = run.optimizer
    assert (o.adam_beta1, o.adam_beta2, o.precision, o.clip_grad) == (0.9, 0.98, "bf16", 0.5)
    assert run.schedule.lr_decay_style == "cosine" and run.optimizer.weight_decay == 0.0
    preset = parse(tmp_path, content, "--preset", "bloom-3b").optimizer
    assert (preset.adam_beta2, preset.weight_decay, preset.precision) == (0.95, 0.1, "fp16")
    scheduler = {"type": "WarmupLR", "params": {"warmup_type": "linear"}}
    words = ["--train-samples", "48000", "--lr-warmup-samples", "480"]
    samples = parse(tmp_path, {"scheduler": scheduler}, *words).schedule
    assert samples.lr_warmup == Length(480, Measure.SAMPLES)
    auto = parse(tmp_path, {"optimizer": {"type": "AdamW", "params": {"betas": "auto"}}, "gradient_clipping": "auto"})
    assert (auto.optimizer.adam_beta2, auto.optimizer.weight_decay) == (0.95, 0.0), '"auto" is ours to fill in'


def test_a_file_without_an_optimizer_leaves_it_to_the_flags(tmp_path: Path) -> None:
    run = parse(tmp_path, {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}})
    plain = parse_run([], 4)
    assert (run.schedule, run.optimizer) == (plain.schedule, plain.optimizer)


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 2e-4}}, "bf16": {"enabled": True}}))
    (told,) = parse_arguments(["--deepspeed-config", str(path), "--adam-beta1", "0.8"], 1).notes
    parts = "gradient_clipping: --clip-grad 1 (versions before", "--weight-decay 0;", "--adam-beta2 0.999"
    assert all(part in told for part in (*parts, "--lr-decay-style constant")), told
    assert "--adam-beta1" not in told and "--lr 0.001" not in told and "--precision" not in told
    assert parse_arguments([], 1).notes == ()


def test_a_missing_key_that_breaks_a_run_is_told_with_what_it_breaks(tmp_path: Path) -> None:
    content = {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}}
    assert parse(tmp_path, content).schedule.lr_warmup == iterations(1000), "a constant rate may warm up to the end"
    content["scheduler"]["type"] = "WarmupDecayLR"
    long = r"--lr-warmup 1000 iterations is longer than --train-iters 100(.|\n)*warmup_num_steps"
    with pytest.raises(ConfigError, match=long):
        parse(tmp_path, content)
    content["optimizer"] = {"params": {"lr": 2e-4}}
    with pytest.raises(ConfigError, match=r"then warms up to 0\.001, not to optimizer\.params\.lr 0\.0002"):
        parse(tmp_path, content, "--train-iters", "2000")


@pytest.mark.parametrize(
    ("content", "micro", "batch"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, 4, 16),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, 4, 48),
        ({"train_batch_size": 48, "gradient_accumulation_steps": 3}, 4, 48),
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 6}, 6, 48),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}, 4, 32),
    ],
)
def test_the_third_of_batch_micro_batch_and_accumulation_follows(
    content: dict[str, Any], micro: int, batch: int, tmp_path: Path
) -> None:
    """As DeepSpeed computes it, but for what is "auto": that is the default batch of 24, rounded up to whole
    micro-batches on 4 ranks.
    """
    schedule = parse(tmp_path, content).schedule
    assert (schedule.micro_batch_size, schedule.global_batch_size) == (micro, batch)
