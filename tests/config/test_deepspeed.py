"""--deepspeed-config: what maps, what is refused by name, what contradicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megazero.config.parse import ConfigError, parse_run
from megazero.config.schema import Run


def parse(folder: Path, content: Any, *words: str, world_size: int | None = 4) -> Run:
    path = folder / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return parse_run(["--deepspeed-config", str(path), *words], world_size)


def refusals(folder: Path, content: Any, *words: str, world_size: int | None = 4) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(folder, content, *words, world_size=world_size)
    return caught.value.problems


def test_a_whole_file(tmp_path: Path) -> None:
    run = parse(
        tmp_path,
        {
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 5,
            "gradient_clipping": 0.7,
            "steps_per_print": 20,
            "optimizer": {"type": "Adam", "params": {"lr": 2e-4, "betas": [0.8, 0.98], "eps": 1e-7, "weight_decay": 0.02}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 200, "warmup_type": "linear"}},
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "initial_scale_power": 12,
                "loss_scale_window": 500,
                "hysteresis": 3,
                "min_loss_scale": 2,
            },
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
            "wandb": {"enabled": False},
            "wall_clock_breakdown": False,
        },
        "--tp",
        "2",
    )
    s, o, p = run.schedule, run.optimizer, run.parallel
    assert (s.micro_batch_size, s.global_batch_size, s.lr, s.min_lr) == (3, 3 * 5 * 2, 2e-4, 0.0)
    assert (s.lr_decay_style, s.lr_warmup_iters, s.lr_decay_iters) == ("linear", 10, 200)
    assert (o.clip_grad, o.optimizer, o.adam_beta1, o.adam_beta2, o.adam_eps, o.weight_decay) == (0.7, "adamw", 0.8, 0.98, 1e-7, 0.02)
    assert (o.precision, o.loss_scale, o.initial_loss_scale, o.loss_scale_window, o.hysteresis, o.min_loss_scale) == (
        "fp16",
        None,
        4096,
        500,
        3,
        2,
    )
    assert (p.zero_stage, p.bucket_size, p.overlap, p.grad_reduce_dtype) == (2, 500_000, False, "fp16")
    assert (run.trainer.log_interval, run.trainer.tensorboard_dir) == (20, "boards/mine")


def test_auto_is_taken_from_the_flags(tmp_path: Path) -> None:
    run = parse(
        tmp_path, {"train_batch_size": "auto", "zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}}, "--zero-stage", "1"
    )
    assert (run.parallel.zero_stage, run.schedule.global_batch_size, run.optimizer.precision) == (1, 24, "bf16")


@pytest.mark.parametrize(
    ("content", "precision"),
    [({}, "bf16"), ({"fp16": {"enabled": False}}, "fp32"), ({"bf16": {"enabled": True}}, "bf16"), ({"fp16": {"enabled": True}}, "fp16")],
)
def test_precision(content: dict[str, Any], precision: str, tmp_path: Path) -> None:
    assert parse(tmp_path, content).optimizer.precision == precision


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            'offload_optimizer.device "cpu" is refused: offload is not built',
        ),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.device"),
        ({"zero_optimization": {"stage": 3}}, "--zero-stage 3 is not built yet"),
        ({"zero_optimization": {"stage3_max_live_parameters": 1}}, "ZeRO stage 3 is not built yet"),
        ({"zero_optimization": {"sub_group_size": 1e9}}, "sub_group_size"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "quantised communication is not built yet"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "hierarchical partitioning"),
        ({"zero_optimization": {"reduce_scatter": False}}, "sharded gradients always travel by reduce-scatter"),
        ({"zero_optimization": {"reduce_bucket_size": 1, "allgather_bucket_size": 2}}, "one size serves"),
        ({"aio": {"block_size": 1}}, "NVMe offload is not built yet"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "accumulate in fp32"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation offload"),
        ({"wandb": {"enabled": True}}, "wandb is not built yet"),
        ({"csv_monitor": {"enabled": True}}, "--metrics-file"),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown true is refused"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type 'OneBitAdam' is not built"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, "not a list of two numbers"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type 'OneCycle' is not built"),
        ({"scheduler": {"type": "WarmupLR"}}, 'write "warmup_type": "linear"'),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_min_lr": 1e-6}}}, "warm-up starts at 0"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "contradict each other"),
        ({"gradient_cliping": 1.0}, "there is no gradient_cliping; did you mean gradient_clipping?"),
        ({"zero_optimization": {"stages": 1}}, "did you mean zero_optimization.stage?"),
        ({"train_batch_size": "many"}, "train_batch_size: 'many' is not a whole number"),
        ({"gradient_accumulation_steps": 0}, "is not a whole number of at least 1"),
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5},
            "= 40 is not --global-batch-size 24",
        ),
        ("{", "cannot be read as JSON"),
        ([], "holds no settings, but list"),
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
    assert (schedule.lr_decay_style, schedule.min_lr, schedule.lr_decay_iters) == ("cosine", 5e-5, 50)


def test_accumulation_without_a_batch_gives_the_batch(tmp_path: Path) -> None:
    assert parse(tmp_path, {"gradient_accumulation_steps": 4}, world_size=8).schedule.global_batch_size == 2 * 8 * 4
