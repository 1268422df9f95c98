"""The place of `swiglu` before `fused_ops.gated`, for `megazero.model.mlp`."""

from fused_ops.gated import swiglu as swiglu
