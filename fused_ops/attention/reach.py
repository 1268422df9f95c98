"""Which earlier keys a query sees: all of them, a window, or those of its chunk.

q is a query's position and k a key's, both counted from the begin of the sample. Under every reach k <= q. Document
boundaries narrow what is seen further.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reach:
    """The reach of a layer's queries. At most one of the two is set; with neither a query sees all keys up to its own.

    window  a query sees keys with q - window < k: that many, its own included (Mistral 7B: arXiv:2310.06825)
    chunk   a query sees keys with k // chunk == q // chunk (Llama 4)

    Raises ValueError for both at once and for a number below 1.
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.chunk is not None:
            raise ValueError(
                f"a layer has a window or chunks, not both: window={self.window}, chunk={self.chunk}; set one of them"
            )
        for name, width in (("window", self.window), ("chunk", self.chunk)):
            if width is not None and width < 1:
                raise ValueError(f"{name}={width}: a query sees at least its own key, so {name} has to be 1 or more")

    @property
    def width(self) -> int | None:
        """Most keys that a query sees, which is also the number of positions that a cache has to hold; None: all."""
        return self.chunk if self.window is None else self.window

    def seen(self, length: int) -> float:
        """The share of the pairs of a query and a key, in a sequence of that many positions, that are in reach."""
        pairs = length * (length + 1) / 2
        if self.window is not None and self.window < length:
            beyond = length - self.window
            pairs -= beyond * (beyond + 1) / 2
        elif self.chunk is not None and self.chunk < length:
            whole, rest = divmod(length, self.chunk)
            pairs = (whole * self.chunk * (self.chunk + 1) + rest * (rest + 1)) / 2
        return pairs / length**2

    def over(self, length: int) -> Reach:
        """What this reach is in sequences of that many positions: everything where all keys are in reach."""
        return EVERYTHING if self.width is None or self.width >= length else self

    @property
    def words(self) -> str:
        """As in "attention with ..."; empty for everything."""
        if self.window is not None:
            return f"a window of {self.window}"
        return "" if self.chunk is None else f"chunks of {self.chunk}"

    @property
    def numbers(self) -> tuple[int, int]:
        """(window, chunk) as kernels take them: 0 for what is not set."""
        return self.window or 0, self.chunk or 0


EVERYTHING = Reach()


def with_chunks(documents: Tensor | None, chunk: int | None, like: Tensor) -> Tensor | None:
    """Documents int64 [b, s] that end at the ends of chunks too, so that chunks need no code where documents have some.

    like  a tensor [s, b, ...] on the device
    """
    if chunk is None:
        return documents
    length, samples = like.shape[:2]
    chunks = torch.arange(length, device=like.device) // chunk
    if documents is None:
        return chunks.expand(samples, length)
    return documents * (length // chunk + 1) + chunks
