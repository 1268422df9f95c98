"""The last layer: final normalisation, logits, loss.

s sequence, b micro-batch, h hidden, v vocabulary, t = tp size.
"""

from __future__ import annotations

from torch import Tensor, nn

from fused_ops.linear import linear
from fused_ops.soft_cap import soft_capped
from megazero.config.derive import padded_vocab
from megazero.config.inventory import FINAL_NORM, HEAD, WORDS
from megazero.model.batch import MicroBatch
from megazero.model.layout import ModelLayout
from megazero.mpu.cross_entropy import VocabularyLoss
from megazero.mpu.functional import copy_to_tp, gather_last, gather_sequence
from megazero.mpu.head_loss import LogitsMemory, head_loss
from megazero.mpu.parameter import Parameter, ParameterKind, StateGroup, shard


class Head(nn.Module):
    """Normalisation and an output weight without bias, whose vocabulary is split over tp.

    shared     the word embedding's parameter, if the embedding is tied and on this pipeline rank
    tied_copy  the embedding is tied and on another pipeline rank. The weight is a copy of the same global parameter
    """

    def __init__(self, layout: ModelLayout, *, shared: Parameter | None, tied_copy: bool) -> None:
        super().__init__()
        self.layout = layout
        self.norm = layout.norm(FINAL_NORM)
        self._logits = LogitsMemory()
        self.weight = shared if shared is not None else self._own_weight(tied_copy)

    def _own_weight(self, tied_copy: bool) -> Parameter:
        model, tp = self.layout.model, self.layout.tp
        assert model.vocab_size is not None
        spec = shard(
            WORDS if tied_copy else HEAD,
            (model.vocab_size, model.hidden_size),
            ParameterKind.EMBEDDING,
            dim=0,
            rank=tp.index,
            size=tp.size,
            padded=padded_vocab(model, tp.size),
            std=self.layout.std,
            state_group=StateGroup.TIED if tied_copy else StateGroup.REPLICAS,
        )
        return Parameter(spec, self.layout.dtype, self.layout.device)

    def forward(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        """[s(/t), b, h] -> sum of the counted token losses, 0-dim, float32 for 16-bit models, else the model's dtype.

        Communicates over tp what `head_loss` does, and under sp an all-gather of the normalised input along s.
        """
        layout = self.layout
        enter = gather_sequence if layout.sequence_parallel else copy_to_tp
        x = enter(self.norm(hidden), layout.tp)
        smoothing, z_loss = (layout.label_smoothing, layout.z_loss) if self.training else (0.0, 0.0)
        counted = None if batch.loss_mask is None else batch.loss_mask.t().reshape(-1)
        return head_loss(
            x.view(-1, x.shape[-1]),
            self.weight,
            batch.labels.t().reshape(-1),
            counted,
            self.loss_of_logits(smoothing, z_loss),
            batch.loss_factor,
            self._logits,
        )

    def logits(self, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        """[s(/t), b, h] -> logits [s, b, v] of the real vocabulary, on every tp rank.

        positions: int64 [b], one position in each row, for logits [1, b, v]. Communicates an all-gather of the logits
        over tp, and under sp one of the normalised input along s.
        """
        layout = self.layout
        enter = gather_sequence if layout.sequence_parallel else copy_to_tp
        whole = enter(self.norm(hidden), layout.tp)
        if positions is not None:
            whole = whole.gather(0, positions.view(1, -1, 1).expand(1, -1, whole.shape[2]))
        logits = soft_capped(linear(whole, self.weight, None), *self._of_logits)
        return gather_last(logits, layout.tp)[..., : self.vocabulary]

    def loss_of_logits(self, label_smoothing: float = 0.0, z_loss: float = 0.0) -> VocabularyLoss:
        """The loss of logits [N, v/t] of this head's product, ahead of their multiplier and soft cap."""
        return VocabularyLoss(self.layout.tp, self.vocabulary, label_smoothing, z_loss, *self._of_logits)

    @property
    def _of_logits(self) -> tuple[float, float | None]:
        """The multiplier and the soft cap of the logits."""
        return self.layout.model.logits_multiplier, self.layout.model.logits_cap

    @property
    def vocabulary(self) -> int:
        assert self.layout.model.vocab_size is not None
        return self.layout.model.vocab_size
