"""Checkpoints: what is saved, and what a run starts from."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.fields import option


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved and when, and what a run starts from."""

    save: str | None = option(None, metavar="DIR", common=True, derived="nothing is saved")
    "Folder for checkpoints."
    load: str | None = option(None, metavar="DIR", common=True, derived="from scratch")
    "Resume from this folder's newest complete checkpoint, if any."
    save_interval: int | None = option(None, common=True, derived="the end of the run only", needs="--save DIR")
    "Iterations between checkpoints. The end of the run is always saved."
    keep_last: int = option(3, "--keep-last-k", needs="--save DIR")
    "Number of complete checkpoints kept; 0 keeps all."
    save_retain_interval: int | None = option(None, derived="none are exempt", needs="--save DIR", expert=True)
    "Never delete checkpoints of iterations that are multiples of this."
    async_save: bool = option(False, needs="--save DIR")
    "Write checkpoints in the background. A step waits only for a copy of the state in host memory."
    no_save_optim: bool = option(False, expert=True, needs="--save DIR")
    """Save weights only, in the precision of the parameters: in bf16 2 bytes of a parameter, not 12. Such a checkpoint
    is to be used, converted or started from with --init-from, --finetune or --no-load-optim, not to be resumed from."""
    init_from: str | None = option(None, metavar="DIR", derived="random weights", common=True)
    """Start with a checkpoint's weights, of any format or ORG/NAME of the Hub. Its model shape and tokenizer are used
    unless flags set others. A complete checkpoint in --load has precedence."""
    extend_vocabulary: bool = option(False, needs="--init-from DIR", expert=True)
    """With --init-from: let --vocab-size be larger than the checkpoint's. The new rows start as the mean of the
    others."""
    finetune: bool = option(False, needs="--load DIR")
    "Load weights only. Iteration, samples and optimizer start from zero."
    no_load_optim: bool = option(False, needs="--load DIR")
    "Load weights and position, but not the optimizer's state."
    override_opt_param_scheduler: bool = option(False)
    "Resume with the learning-rate schedule of this command line."
    override_batch: bool = option(False, expert=True)
    "Resume with the batch sizes and ramp of this command line."
    override_data: bool = option(False, expert=True)
    "Resume with the data, split and seed of this command line."
    ckpt_probe: bool = option(True, idle_without="--save DIR or --load DIR", expert=True)
    "Store the loss of a fixed batch with a checkpoint and compare it on load."
