"""Short names of the moves between tiers, of what is freed and of updates, for tests of lists."""

from __future__ import annotations

from megazero.config.tiers import Tier
from megazero.program.instruction import Free, Piece, TierMove, Update

UPDATE, UPDATE_HOST = Update(Tier.DEVICE), Update(Tier.HOST)

READ_STATE = TierMove(Piece.STATE, Tier.DISK, Tier.HOST)
WRITE_STATE = TierMove(Piece.STATE, Tier.HOST, Tier.DISK)

READ_PARAMETERS = TierMove(Piece.PARAMETERS, Tier.DISK, Tier.HOST)
LOAD = TierMove(Piece.PARAMETERS, Tier.HOST, Tier.DEVICE)
RELEASE = Free(Piece.PARAMETERS, Tier.DEVICE)
STORE = TierMove(Piece.UPDATED, Tier.DEVICE, Tier.HOST)
COPY_PARAMETERS = TierMove(Piece.UPDATED, Tier.HOST, Tier.DEVICE)
WRITE_PARAMETERS = TierMove(Piece.UPDATED, Tier.HOST, Tier.DISK)

COPY_REDUCED = TierMove(Piece.REDUCED, Tier.DEVICE, Tier.HOST)
STORE_GRADIENT = TierMove(Piece.SUMS, Tier.DEVICE, Tier.HOST)
READ_SUM = TierMove(Piece.SUMS, Tier.DISK, Tier.HOST)
WRITE_SUM = TierMove(Piece.SUMS, Tier.HOST, Tier.DISK)
COPY_GRADIENT = TierMove(Piece.GRADIENTS, Tier.DEVICE, Tier.HOST)
READ_GRADIENT = TierMove(Piece.GRADIENTS, Tier.DISK, Tier.HOST)
FETCH_GRADIENT = TierMove(Piece.GRADIENTS, Tier.HOST, Tier.DEVICE)

LEAVE = TierMove(Piece.ACTIVATIONS, Tier.DEVICE, Tier.HOST)
RETURN = TierMove(Piece.ACTIVATIONS, Tier.HOST, Tier.DEVICE)
WRITE_ACTIVATIONS = TierMove(Piece.ACTIVATIONS, Tier.HOST, Tier.DISK)
READ_ACTIVATIONS = TierMove(Piece.ACTIVATIONS, Tier.DISK, Tier.HOST)
FREE = Free(Piece.ACTIVATIONS, Tier.DEVICE)
FREE_HOST = Free(Piece.ACTIVATIONS, Tier.HOST)
