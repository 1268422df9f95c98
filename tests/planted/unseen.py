"""Faults that a proof of a layout cannot see: they are not in what it runs, or it runs them on both sides alike."""

from __future__ import annotations

UNSEEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "another function: one process computes the same, and its gradients are those of its loss",
        (
            "a window has one key more",
            "a step in the scaled frequencies",
            "YaRN without its factor",
            "slopes of 112 heads",
            "a tied head multiplied twice",
            "all layers drop alike",
            "neighbours turn, not halves",
            "documents see each other",
            "gate and up change places",
            "evaluation smooths labels",
            "norms decay",
            "AdamW decays as Adam",
            "decay without the rate",
            "no correction of the second moment",
            "an average of the newest weights",
            "bias corrections begin at step 2",
            "a skipped step counts",
            "small gradients grow",
            "the scale is alpha",
            "an evaluation is a mean of means",
            "each evaluation on other samples",
            "labels are the inputs",
            "a separator begins a document",
            "the mask of the labels",
        ),
    ),
    (
        "a rounding to fewer bits, or a scale against it: a proof is in float64",
        (
            "embedding gradients in 16 bits",
            "an offset rounded with its weight",
            "bias gradients in 16 bits",
            "angles in 16 bits",
            "reduction in bf16",
            "unused elements in a block",
            "what quantisation loses is not rescaled",
            "what a skipped step loses is kept",
            "what quantisation adds",
            "master weights of 16 bits",
            "bf16 travels by default",
            "bf16 scaled as fp16",
            "loss scale quartered",
            "good steps survive an overflow",
            "the scale's window begins anew",
            "the loss scale begins anew",
            "no clipping in bf16",
        ),
    ),
    (
        "the rate of a step or the size of its batch: the small run has its own, the same on one process",
        (
            "batches grow a step early",
            "warm-up is a step ahead",
            "decay begins with the run",
            "the rate counts a step twice",
            "warm-up by full batches",
        ),
    ),
    (
        "data: a proof makes samples of its own",
        (
            "positions go on",
            "the mask is a token early",
            "every epoch in one order",
            "padding is learned",
            "the last epoch is not shuffled",
            "a blend begins with dataset 0",
            "a blend leaves out first items",
            "the last label is missing",
            "samples begin with their document",
            "the end is not learned",
            "sample rows overflow",
            "a first token is a label",
            "packed conversations are one document",
            "padding is told by its token",
            "the mask of another conversation",
            "a blend runs out of samples",
        ),
    ),
    (
        "files that a proof neither writes nor reads",
        (
            "a save takes views",
            "checkpoints in the order of text",
            "infinities for large numbers",
            "gate and up of several ranks",
            "tp ranks in the order of text",
            "replicas of tp rank 0",
            "queries, keys and values one behind the other",
            "adapters are merged without their scale",
            "the weights of another start",
        ),
    ),
    (
        "a number that is reported and not computed with",
        (
            "recompute counts as the model's work",
            "a lookup counts as a product",
            "tokens per second of a rank",
            "recompute counts in MFU",
            "operations of all ranks as one's",
        ),
    ),
    ("large sizes: a small run has its logits in one block", ("blocks of rows overwrite",)),
    ("messages between processes: the ranks of a proof are threads", ("a receive is not waited for",)),
    (
        "no step shows it: the sum over a batch, or what is written, is the same",
        ("samples depend on the accumulation", "an element is written twice"),
    ),
    (
        "no step shows it: its forward has waited for the same update",
        ("a sum over one that is read",),
    ),
)
"""(why, names of faults). Without a row here a proof is expected to see a fault."""
MISSED = ("a slot is used twice",)
"""In what a proof runs, and seen in none of the layouts: their parts leave the slots in the order in which they take
them.
"""
