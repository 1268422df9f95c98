"""The faults that are planted: one changed line each. docs/testing.md says how to add one."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault of one line, and the test that catches it.

    number   of the row in the list of faults that other trainers have shipped
    name     short, unique
    text     what goes wrong, and in whose trainer that happened
    path     the file that is changed
    line     text of one line, which occurs once in the file
    planted  the text that takes its place
    test     path and function of the test; where its grid is sampled, one of the cases of `make test` catches it
    """

    number: int
    name: str
    text: str
    path: str
    line: str
    planted: str
    test: str


IN_THE_STATE = "tests/zero/test_faults.py::"
IN_A_STEP = "tests/zero/test_parity.py::"
IN_A_RUN = "tests/parity/test_faults.py::"
LAYOUTS = "tests/parity/test_layouts.py::test_layout_equals_one_process"
COUNTED_ONCE = IN_THE_STATE + "test_fault_04_05_06_each_element_counts_once_in_the_norm"
ONE_OVERFLOW = IN_A_RUN + "test_fault_15_one_ranks_overflow_skips_the_step_on_all"
VALID_TOKENS = IN_A_RUN + "test_fault_16_17_of_any_degree_and_unequal_numbers_of_valid_tokens"
CROSS_ENTROPY = "tests/mpu/test_cross_entropy.py::test_fault_28_equals_the_dense_formula"
HEAD_LOSS = "tests/mpu/test_head_loss.py::test_one_rank_equals_the_dense_formula"

FAULTS = (
    Fault(
        1,
        "tied embedding, one stage",
        "The gradient of a tied embedding is reduced over its own stage only (Megatron-LM).",
        "megazero/mpu/axes.py",
        "StateGroup.TIED: self.tied_ranks}",
        "StateGroup.TIED: self.replica_ranks}",
        IN_A_STEP + "test_fault_01_tied_embedding_is_summed_over_both_stages",
    ),
    Fault(
        2,
        "tied copies start apart",
        "The head's copy of a tied embedding starts with other values and stays another weight (Megatron-LM).",
        "megazero/model/head.py",
        "std=self.layout.std,",
        "std=self.layout.output_std,",
        "tests/model/test_stage.py::test_fault_24_initial_values_do_not_depend_on_the_layout",
    ),
    Fault(
        3,
        "clipping on tp rank 0",
        "Gradients are clipped on the first tp rank only, and replicas drift apart (BLOOM).",
        "megazero/train/step_end.py",
        "clip_coefficient(self.grad_norm, self.clip_grad)",
        "clip_coefficient(self.grad_norm, self.clip_grad) ** (self.optimizer.grid.at.tp == 0)",
        LAYOUTS,
    ),
    Fault(
        4,
        "tied weight twice in the norm",
        "A tied embedding counts twice in the gradient norm (Megatron-LM).",
        "megazero/zero/optimizer.py",
        "for views, there in zip(self._counted, elsewhere, strict=True):",
        "for views, there in zip([v * (1 + self.state.buckets[n].layout.group.spans_stages)"
        " for n, v in enumerate(self._counted)], elsewhere, strict=True):",
        COUNTED_ONCE,
    ),
    Fault(
        4,
        "tied gradient doubled",
        "The gradient of a tied embedding is doubled (torchtitan).",
        "megazero/mpu/layers.py",
        "return None, route_gradient(weight, ctx.target, partial(embedding_gradient, ids, grads[0]))",
        "return None, route_gradient(weight, ctx.target, partial(embedding_gradient, ids, grads[0] * 2))",
        "tests/parity/test_transformers_training.py::test_five_steps_equal_transformers",
    ),
    Fault(
        5,
        "replicas counted tp times",
        "Parameters that are replicated over tp count once for each tp rank in the norm (Megatron-LM).",
        "megazero/zero/counted.py",
        "if counted == (fragment.spec.tp_sharded or tp == 0):",
        "if counted:",
        COUNTED_ONCE,
    ),
    Fault(
        6,
        "norm of the own rank",
        "Each rank clips by the norm of what it has itself (torchtitan).",
        "megazero/train/step_end.py",
        "self.grad_norm = squares.sqrt() * unscale",
        "self.grad_norm = self.optimizer.sum_of_squares().sqrt() * unscale",
        LAYOUTS,
    ),
    Fault(
        8,
        "norms not summed over tp",
        "Under sequence parallelism gradients of normalisations stay partial sums (Megatron-LM).",
        "megazero/mpu/norm.py",
        "tp_partial=sequence_parallel and group.size > 1",
        "tp_partial=False",
        "tests/model/test_layouts.py::test_faults_08_and_28_layout_equals_one_process",
    ),
    Fault(
        8,
        "row biases not summed over tp",
        "Under sequence parallelism gradients of row-parallel biases stay partial sums (Megatron-LM).",
        "megazero/mpu/layers.py",
        "partial = sequence_parallel and group.size > 1",
        "partial = False",
        "tests/mpu/test_layers.py::test_fault_08_equal_to_torchs_own_layers",
    ),
    Fault(
        9,
        "each stage divides",
        "Each stage divides the gradient by the number of micro-batches again (DeepSpeed).",
        "megazero/pipeline/schedule_run.py",
        "torch.autograd.backward([edge], [gradient])",
        "torch.autograd.backward([edge], [gradient / len(self.micro_batches)])",
        "tests/pipeline/test_engine.py::test_fault_09_gradients_do_not_depend_on_stages_or_accumulation",
    ),
    Fault(
        9,
        "nobody divides",
        "Gradients are sums over the micro-batches: they are divided by the tokens of the first one (DeepSpeed).",
        "megazero/train/trainer.py",
        "tokens=self.count(batches),",
        "tokens=self.count(batches[:1]),",
        LAYOUTS,
    ),
    Fault(
        11,
        "offload keeps one micro-batch",
        "A gradient that is summed in host memory takes the place of the sum (DeepSpeed).",
        "megazero/zero/host_gradients.py",
        "total.add_(gradient)",
        "total.copy_(gradient)",
        "tests/parity/test_tiers.py::test_every_tier_with_everything",
    ),
    Fault(
        11,
        "offload updates unclipped",
        "An update in host memory takes the gradients without their clip coefficient and scale (DeepSpeed).",
        "megazero/zero/owed.py",
        "return UpdateValues(self.lr, self.multiplier.cpu(), self.skip.cpu(), self.number.cpu())",
        "return UpdateValues(self.lr, self.multiplier.cpu() * 0 + 1, self.skip.cpu(), self.number.cpu())",
        "tests/parity/test_tiers.py::test_every_tier_with_everything",
    ),
    Fault(
        12,
        "bf16 scaled as fp16",
        "bf16 gets the loss scale of fp16 (DeepSpeed).",
        "megazero/optim/loss_scale.py",
        "start = 1.0 if not fp16 else cfg.initial_loss_scale",
        "start = cfg.initial_loss_scale",
        "tests/optim/test_loss_scale.py::test_fault_12_there_is_none_outside_fp16",
    ),
    Fault(
        14,
        "no clipping in bf16",
        "Clipping is off in bf16 runs (DeepSpeed).",
        "megazero/train/trainer.py",
        "clip_grad=self.run.optimizer.clip_grad,",
        'clip_grad=self.run.optimizer.clip_grad * (self.run.optimizer.precision != "bf16"),',
        IN_A_RUN + "test_fault_14_every_precision_clips",
    ),
    Fault(
        14,
        "infinite norm is applied",
        "A step whose norm is not finite is made all the same (DeepSpeed).",
        "megazero/train/step_end.py",
        "self.bad = ~(torch.isfinite(self.grad_norm) & torch.isfinite(self.loss_sum))",
        "self.bad = ~torch.isfinite(self.loss_sum)",
        ONE_OVERFLOW,
    ),
    Fault(
        15,
        "overflow of one rank",
        "Each rank decides by its own gradients whether it skips the step (DeepSpeed).",
        "megazero/train/step_end.py",
        "self.values = UpdateValues(self.lr, multiplier, self.bad, self.optimizer.step_count + 1.0)",
        "self.values = UpdateValues(self.lr, multiplier, ~torch.isfinite(self.optimizer.sum_of_squares()),"
        " self.optimizer.step_count + 1.0)",
        ONE_OVERFLOW,
    ),
    Fault(
        15,
        "loss scale quartered",
        "The loss scale falls twice at one overflow (DeepSpeed).",
        "megazero/optim/loss_scale.py",
        "halved = torch.clamp(self.scale * 0.5, min=self.minimum).minimum(self.scale)",
        "halved = torch.clamp(self.scale * 0.25, min=self.minimum).minimum(self.scale)",
        "tests/optim/test_loss_scale.py::test_fault_15_with_hysteresis_1_every_overflow_halves_once",
    ),
    Fault(
        16,
        "tokens counted tp times",
        "The loss is divided by the tokens of all tp ranks, which have the same ones (DeepSpeed).",
        "megazero/train/trainer.py",
        "return self.engine.has_loss and self.grid.at.tp == 0",
        "return self.engine.has_loss",
        VALID_TOKENS,
    ),
    Fault(
        17,
        "masked tokens in the gradient",
        "A mask is applied to the loss and not to its gradient (torchtitan).",
        "megazero/mpu/head_loss.py",
        "shares = share.expand_as(rows.losses) if counted is None else torch.where(counted[row], share, 0.0)",
        "shares = share.expand_as(rows.losses)",
        HEAD_LOSS,
    ),
    Fault(
        20,
        "labels of another micro-batch",
        "The last stage meets the labels of another micro-batch (DeepSpeed).",
        "megazero/pipeline/schedule_run.py",
        "(hidden, self.micro_batches[i.micro_batch], i.units)",
        "(hidden, self.micro_batches[i.micro_batch if hidden is None else -1 - i.micro_batch], i.units)",
        "tests/pipeline/test_engine.py::test_fault_20_every_output_meets_its_own_labels_and_every_rank_knows_the_loss",
    ),
    Fault(
        20,
        "loss of the last micro-batch",
        "The loss is that of the last micro-batch only (DeepSpeed).",
        "megazero/pipeline/schedule_run.py",
        "self.loss_sum += output.detach()",
        "self.loss_sum = output.detach().double()",
        "tests/pipeline/test_engine.py::test_fault_20_every_output_meets_its_own_labels_and_every_rank_knows_the_loss",
    ),
    Fault(
        22,
        "adjoint divided by tp",
        "The backward of a collective divides by the number of ranks (BLOOM).",
        "megazero/mpu/functional.py",
        "result: Tensor = _Adjoined.apply(grads[0], *ctx.arguments)",
        "result: Tensor = _Adjoined.apply(grads[0] / ctx.arguments[0].size, *ctx.arguments)",
        "tests/mpu/test_functional.py::test_fault_22_gradients_equal_finite_differences",
    ),
    Fault(
        22,
        "gradient summed twice",
        "The backward of a sum over tp is a sum again, which multiplies by the number of ranks (BLOOM).",
        "megazero/mpu/functional.py",
        "return _adjoined(x, group, _sum, _identity)",
        "return _adjoined(x, group, _sum, _sum)",
        "tests/mpu/test_functional.py::test_fault_22_gradients_equal_finite_differences",
    ),
    Fault(
        23,
        "slopes of local heads",
        "ALiBi's slopes are those of a model with as many heads as the tp rank has (Megatron-DeepSpeed).",
        "megazero/model/position.py",
        "self.mine = alibi_slopes(heads)[rank * part : (rank + 1) * part]",
        "self.mine = alibi_slopes(part)",
        "tests/model/test_attention.py::test_fault_23_slopes_are_those_of_the_global_number_of_heads",
    ),
    Fault(
        23,
        "slopes of 112 heads",
        "Where the number of heads is no power of two, the further slopes are the wrong ones.",
        "fused_ops/softmax.py",
        "for i in range(0, 2 * (heads - c), 2)]",
        "for i in range(heads - c)]",
        "tests/fused_ops/test_softmax.py::test_fault_23_slopes_of_any_count",
    ),
    Fault(
        24,
        "columns start alike on tp",
        "Each tp rank draws the same initial columns (Megatron-LM).",
        "megazero/mpu/random.py",
        "drawn = _normals(keys, column0, column1)",
        "drawn = _normals(keys, 0, columns)",
        "tests/mpu/test_random.py::test_fault_24_weights_of_every_layout_are_the_same_bits",
    ),
    Fault(
        24,
        "layer number of the stage",
        "A layer is numbered within its stage, so that stages start alike (Megatron-LM).",
        "megazero/model/stage.py",
        "made(Block(number, layout))",
        "made(Block(number - spec.blocks.start, layout))",
        "tests/model/test_stage.py::test_fault_24_initial_values_do_not_depend_on_the_layout",
    ),
    Fault(
        25,
        "recompute draws again",
        "The second forward draws another dropout mask than the first (torchtitan).",
        "megazero/mpu/random.py",
        'return mix(keys.add_(_key("dropout", self.seed, self.layer, self.site)))',
        'return mix(keys.add_(_key("dropout", torch.rand(()).item(), self.layer, self.site)))',
        "tests/model/test_layouts.py::test_fault_25_recompute_is_bitwise_the_same",
    ),
    Fault(
        26,
        "resharding shifts a box",
        "A box of a saved tensor is read one element further where its layout has changed (BLOOM).",
        "megazero/checkpoint/reshard.py",
        "yield ((first, last), *((0, n) for n in extents[1:]))",
        "yield ((first - 1, last - 1), *((0, n) for n in extents[1:]))",
        "tests/checkpoint/test_reshard.py::test_sub_boxes_are_the_flat_range_in_order",
    ),
    Fault(
        28,
        "padding in the softmax",
        "Columns of vocabulary padding take part in the softmax (Megatron-LM).",
        "megazero/mpu/cross_entropy.py",
        "return min(max(self.vocab - start, 0), width), start",
        "return width, start",
        CROSS_ENTROPY,
    ),
    Fault(
        28,
        "smoothing by the shard",
        "Label smoothing is divided by the vocabulary of the tp rank (Megatron-LM).",
        "megazero/mpu/cross_entropy.py",
        "losses -= (self.label_smoothing / self.vocab) * sums[2]",
        "losses -= (self.label_smoothing / logits.shape[1]) * sums[2]",
        CROSS_ENTROPY,
    ),
    Fault(
        28,
        "smoothing's gradient by the shard",
        "The gradient of label smoothing is divided by the vocabulary of the tp rank (Megatron-LM).",
        "megazero/mpu/cross_entropy.py",
        "smooth = (self.label_smoothing / self.vocab) * grad if self.label_smoothing else None",
        "smooth = (self.label_smoothing / logits.shape[1]) * grad if self.label_smoothing else None",
        CROSS_ENTROPY,
    ),
    Fault(
        28,
        "blocks of rows overwrite",
        "With the loss in blocks of rows the weight's gradient is that of the last block (torchtitan).",
        "megazero/mpu/head_loss.py",
        "write(buffer, row.start > 0)",
        "write(buffer, False)",
        HEAD_LOSS,
    ),
)
