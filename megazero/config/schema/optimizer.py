"""The optimizer, the precision and the loss."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.fields import option


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, the precision and the loss."""

    precision: str = option("bf16", choices=("fp64", "fp32", "bf16", "fp16"), common=True)
    "Dtype of parameters and activations. With a 16-bit one, master weights and gradients are fp32."
    fp8: str = option("off", choices=("off", "current", "delayed"), alone="current")
    """Compute the blocks' linear layers in 8 bits, scaled per tensor by the largest value now (current, also the flag
    alone) or over the last steps (delayed). A GPU needs compute capability 8.9. A CPU computes the same, slowly."""
    fp8_amax_history: int = option(16, needs="--fp8 delayed", expert=True)
    "With --fp8 delayed: number of steps whose largest values give the scale."
    optimizer: str = option("adamw", choices=("adamw", "adam", "sgd"))
    "adamw has decoupled weight decay. adam adds the decay to the gradient. sgd has momentum."
    optimizer_impl: str = option("megazero", choices=("megazero", "apex"), expert=True)
    "Implementation of adam and adamw. apex needs NVIDIA apex with its CUDA extensions."
    weight_decay: float = option(0.1)
    "Weight decay of matrices and embeddings. Norms and biases have none."
    adam_beta1: float = option(0.9, needs="--optimizer adam or adamw")
    "Decay of Adam's first moment."
    adam_beta2: float = option(0.95, needs="--optimizer adam or adamw")
    "Decay of Adam's second moment."
    adam_eps: float = option(1e-8, needs="--optimizer adam or adamw")
    "Epsilon that Adam adds to the root of the second moment."
    sgd_momentum: float = option(0.9, needs="--optimizer sgd", expert=True)
    "Momentum of sgd."
    ema_decay: float | None = option(
        None, metavar="D", derived="no average", needs="--save DIR: checkpoints alone hold it"
    )
    """Keep an exponential moving average of the weights, in the dtype of the optimizer's state: after each step
    average = D x average + (1 - D) x weight. It begins as the weights, and checkpoints have it as column ema."""
    clip_grad: float = option(1.0)
    "Largest global gradient norm; 0 turns clipping off."
    label_smoothing: float = option(0.0)
    "Fraction of the target that is spread evenly over the vocabulary."
    z_loss: float = option(0.0)
    "Weight of the squared logarithm of the softmax's normaliser in the loss."
    loss_scale: float | None = option(None, derived="dynamic", needs="--precision fp16", expert=True)
    "Fixed loss scale for fp16."
    initial_loss_scale: float = option(65536.0)
    "First dynamic loss scale (fp16)."
    loss_scale_window: int = option(1000)
    "Steps without overflow after which the loss scale doubles."
    hysteresis: int = option(2)
    "Number of overflows at which the loss scale halves."
    min_loss_scale: float = option(1.0)
    "Lowest dynamic loss scale."
    max_skipped_steps: int = option(20, expert=True)
    """Steps in a row that may be skipped at the lowest loss scale, because their loss or gradients are not finite. Then
    the run ends with an error that says what is not finite. 0: any number."""

    @property
    def moments(self) -> tuple[str, ...]:
        """The columns without which the optimizer cannot go on, by their names in checkpoints. sgd has its momentum."""
        return ("exp_avg",) if self.optimizer == "sgd" else ("exp_avg", "exp_avg_sq")

    @property
    def has_several_dtypes(self) -> bool:
        """Whether parameters have dtypes of their own beside that of the precision, as a user's modules may."""
        return False

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are kept beside the weights and updated with them, by their names in checkpoints."""
        return (*self.moments, *(("ema",) if self.ema_decay is not None else ()))
