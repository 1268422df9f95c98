"""How texts fill what a model reads: conversations that share a sample, and the windows that score a document."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from docs.extension.svg import COLOURS, Picture, shade
from megazero.data.packing import pack
from megazero.evaluation.windows import document_windows

_LEFT, _ROW = 84, 26


def packing(conversations: int = 14, length: int = 64, seed: int = 1) -> str:
    """Conversations of drawn lengths in samples of `length` tokens."""
    lengths = np.random.RandomState(seed).randint(6, 40, size=conversations)
    packs = pack(lengths, length, seed)
    bounds = packs.bounds.tolist()
    members = packs.members[:].tolist()
    scale = (720 - _LEFT) / length
    picture = Picture(
        720, (len(bounds) - 1) * _ROW + 24, f"{conversations} conversations in samples of {length} tokens"
    )
    for sample, (first, last) in enumerate(pairwise(bounds)):
        y = sample * _ROW + 2
        picture.text(0, y + 15, f"sample {sample}", at="start", size=11)
        picture.box(_LEFT, y, length * scale, _ROW - 5, "none", line=COLOURS[7])
        x = float(_LEFT)
        for member in members[first:last]:
            width = int(lengths[member]) * scale
            picture.box(x, y, width - 1, _ROW - 5, shade(COLOURS[member % 7], 0.1))
            picture.text(x + width / 2, y + 14.5, str(member), size=11, fill="#fff")
            x += width
    picture.text(
        0, picture.height - 6, "A box: one conversation. Empty: padding, which does not count.", at="start", size=11
    )
    return picture.svg()


def windows(tokens: int = 24, context: int = 10, stride: int = 5) -> str:
    """The windows of a document: what each reads, and which of its predictions count."""
    box = 23
    made = list(document_windows(list(range(tokens)), context, stride))
    picture = Picture(
        _LEFT + tokens * (box + 2), len(made) * (_ROW + 4) + 30, f"Windows of a document of {tokens} tokens"
    )
    for row, window in enumerate(made):
        y = row * (_ROW + 4) + 2
        picture.text(0, y + 16, f"window {row}", at="start", size=11)
        for place, token in enumerate(window.ids):
            counts = place >= len(window.ids) - window.scored
            x = _LEFT + int(token) * (box + 2)
            picture.box(x, y, box, _ROW - 3, COLOURS[0] if counts else shade(COLOURS[0], 0.6))
            picture.text(x + box / 2, y + 15.5, str(token), size=10.5, fill="#fff")
    bottom = picture.height - 14
    picture.box(_LEFT, bottom, 14, 12, COLOURS[0])
    picture.text(_LEFT + 20, bottom + 10, "counts", at="start", size=11)
    picture.box(_LEFT + 90, bottom, 14, 12, shade(COLOURS[0], 0.6))
    picture.text(_LEFT + 110, bottom + 10, "is read only", at="start", size=11)
    return picture.svg()
