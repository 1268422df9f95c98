"""Loss and perplexity of documents. They are scored in portions, so memory does not grow with the text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from megazero.data.indexed import DataError
from megazero.evaluation.documents import Document
from megazero.evaluation.scorer import Scorer
from megazero.evaluation.windows import Ids, Window, document_windows

PORTION = 1 << 20
"""Tokens that are read before they are sorted by length and scored."""


@dataclass(frozen=True)
class Windowing:
    """How documents become windows: see `document_windows`.

    prefix: a token before each document, so that the document's first token is scored as well; None: the first token is
    context only
    """

    context: int
    stride: int
    prefix: int | None = None

    def windows(self, ids: Ids) -> list[Window]:
        whole = ids if self.prefix is None else np.concatenate([[self.prefix], np.asarray(ids, dtype=np.int64)])
        return list(document_windows(whole, self.context, self.stride))


def _exp(value: float) -> float:
    """e to the power of `value`; infinity if that is too large for float64."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class DocumentScore:
    """The score of a document: the number of scored tokens, and the sum of their losses in nats."""

    document: Document
    tokens: int
    loss: float

    @property
    def mean(self) -> float:
        return self.loss / self.tokens if self.tokens else math.nan

    def record(self) -> dict[str, str | int | float | None]:
        """The score as JSON values; a number that is not finite is None. loss: the mean per token in nats."""
        numbers = {"loss": self.mean, "total_loss": self.loss, "perplexity": _exp(self.mean)}
        record: dict[str, str | int | float | None] = {
            "source": self.document.source,
            "document": self.document.number,
            "tokens": self.tokens,
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        }
        return record if self.document.nbytes is None else record | {"bytes": self.document.nbytes}


@dataclass
class Totals:
    """The sums over all documents. Losses are added by math.fsum, which rounds once for 65,536 documents.

    nbytes: bytes of their text in UTF-8; None if it is not known for all
    """

    documents: int = 0
    tokens: int = 0
    nbytes: int | None = 0
    losses: list[float] = field(default_factory=list)

    def add(self, score: DocumentScore) -> None:
        self.documents += 1
        self.tokens += score.tokens
        self.losses.append(score.loss)
        if len(self.losses) >= 1 << 16:
            self.losses = [math.fsum(self.losses)]
        known = self.nbytes is not None and score.document.nbytes is not None
        self.nbytes = (self.nbytes or 0) + (score.document.nbytes or 0) if known else None

    @property
    def loss(self) -> float:
        return math.fsum(self.losses)

    def record(self, every_token: bool) -> dict[str, int | float | None]:
        """The totals as JSON values; a number that is not finite is None.

        every_token: whether first tokens were scored too. Otherwise there are no bits per byte, because the loss of the
        first tokens would be missing.
        """
        mean = self.loss / self.tokens if self.tokens else math.nan
        per_byte = self.loss / math.log(2) / self.nbytes if self.nbytes and every_token else math.nan
        numbers = {"loss": mean, "total_loss": self.loss, "perplexity": _exp(mean), "bits_per_byte": per_byte}
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.nbytes or None,
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        }


def score_documents(
    scorer: Scorer, documents: Iterable[Document], windowing: Windowing, portion: int = PORTION
) -> Iterator[DocumentScore]:
    """Yield the scores in the order of the documents. A collective: every rank calls it with the same documents.

    portion: tokens that are scored together. Raises DataError that names a document that cannot be scored.
    """
    waiting: list[Document] = []
    tokens = 0
    for document in documents:
        waiting.append(document)
        tokens += len(document.ids)
        if tokens >= portion:
            yield from _scored(scorer, waiting, windowing)
            waiting, tokens = [], 0
    yield from _scored(scorer, waiting, windowing)


def _scored(scorer: Scorer, documents: list[Document], windowing: Windowing) -> Iterator[DocumentScore]:
    windows = [windowing.windows(document.ids) for document in documents]
    for document, own in zip(documents, windows, strict=True):
        try:
            scorer.check(own)
        except DataError as error:
            raise DataError(f"{document.source}, document {document.number}: {error}") from error
    scores = iter(scorer.score([window for own in windows for window in own]))
    for document, own in zip(documents, windows, strict=True):
        loss = math.fsum(next(scores).loss for _ in own)
        yield DocumentScore(document, sum(window.scored for window in own), loss)
