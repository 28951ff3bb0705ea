"""Bytes and floating-point operations, counted by formula; b is the size of an element of hidden states and weight.

selection   bytes  N V b + 12 N K           every logit read once; ids and log-probabilities written
            flops  3 N V                    subtract, exponential, add
scoring     bytes  (N + V) H b + 2 N V b    hidden states and weight read; a tile of logits is written and read once
            flops  2 N V H
loss        bytes  3 products: 2 V H b + 3 N H b + 6 N V b    logits written, read; gradient written, read twice, and
                                                              the logits read once more where it is made
                   4 products: 3 V H b + 4 N H b + 8 N V b    the same with the logits made twice
            flops  2 N V H each
projection  bytes  32 N K                   proposal and old read, projected written; in the backward gradient,
                                            projected, proposal and old read, gradient written; fp32
            flops  60 N K                   five steps of eight operations, and as much again around them

These are what the work needs with tiles that pass through memory, not what a way happens to do: the share of the roof
says how much of its time a way could save.
"""

from __future__ import annotations

from typing import Any

RECOMPUTING = ("TRL", "Liger", "troll, composed")


def work(part: str, way: str, N: int, V: int, H: int, K: int, b: int) -> dict[str, float]:
    """Bytes and flops of one part."""
    if part == "selection":
        return {"bytes": N * V * b + 12 * N * K, "flops": 3 * N * V}
    if part == "scoring":
        return {"bytes": (N + V) * H * b + 2 * N * V * b, "flops": 2 * N * V * H}
    if part == "loss":
        products = 4 if way.startswith(RECOMPUTING) else 3
        moved = (products - 1) * V * H * b + products * N * H * b + 2 * products * N * V * b
        return {"bytes": moved, "flops": 2 * products * N * V * H}
    if part == "projection":
        return {"bytes": 32 * N * K, "flops": 60 * N * K}
    raise ValueError(part)


def roof(row: dict[str, Any], peaks: dict[str, float], part: str) -> dict[str, float]:
    """Achieved TB/s and TFLOP/s, and the share of the time that the measured peaks would allow.

    The peak of operations is that of matrix products; a selection and a projection have none, and their roof is memory.
    """
    seconds = row["ms"] / 1e3
    memory = row["bytes"] / (1e12 * peaks["copy TB/s"])
    arithmetic = row["flops"] / (1e12 * peaks["product TFLOP/s"]) if part in ("scoring", "loss") else 0.0
    return {
        "TB/s": row["bytes"] / seconds / 1e12,
        "TFLOP/s": row["flops"] / seconds / 1e12,
        "roof ms": 1e3 * max(memory, arithmetic),
        "share": max(memory, arithmetic) / seconds,
    }
