"""The seam inside TRL's forward: who turns hidden states into log-probabilities.

TRL's models never return logits. Their forward ends in a fused head, which finds the backbone's hidden states, the
weight (gathered from wherever it is sharded), bias, logit scale and soft cap, and hands them to one function,
``trl.trainer.utils._ChunkedLogProbFunction``. For the time of one forward, ``Scorer`` puts a pass of ours in that
function's place. All that TRL knows about models stays TRL's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor

from troll.policy import Head

_IGNORED = -100


class Scores(NamedTuple):
    """What TRL reads of a forward, one number per completion token."""

    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True, eq=False)
class Forward:
    """What one forward of TRL's scores: N completion tokens, those with a label among B sequences of T."""

    hidden: Tensor
    """[N, H]."""
    sampled: Tensor
    """[N]."""
    head: Head
    temperature: float
    labelled: Tensor
    """[B, T] bool, with N times True."""
    sequences: slice
    """Which sequences of the batch these are."""

    @cached_property
    def places(self) -> Tensor:
        """[N] where each token is in the flattened grid [B, T]."""
        return self.labelled.flatten().nonzero()[:, 0]

    def on_grid(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[N, ...] → [B, T, ...], with ``fill`` where there is no label."""
        grid = values.new_full((self.labelled.numel(), *values.shape[1:]), fill).index_copy(0, self.places, values)
        return grid.reshape(*self.labelled.shape, *values.shape[1:])


class Pass(Protocol):
    """One use of the head, over all sequences of a batch in one or more forwards."""

    def wants(self, model: Any) -> bool:
        """Whether a forward of this model belongs to the pass."""

    def score(self, forward: Forward) -> Scores:
        """The scores of the completion tokens of one forward, [N]."""

    def finish(self, log_probs: Tensor) -> None:
        """TRL has the log-probabilities of all sequences together, [B, T]."""


class Scorer:
    """Stands in for the model where TRL only calls it, and lets a pass score the hidden states."""

    def __init__(self, model: Callable[..., Any], scoring: Pass, length: int) -> None:
        self.model, self.scoring, self.length = model, scoring, length
        self.done = 0

    def __call__(self, *, labels: Tensor, fused_lm_head: bool, **inputs: Any) -> Any:
        """Run the model's forward on the next sequences of the batch."""
        labelled = labels[:, -self.length :] != _IGNORED
        sequences = slice(self.done, self.done + len(labels))
        self.done = sequences.stop
        results: list[Scores] = []

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def score(
            hidden: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            targets: Tensor,
            temperature: float,
            chunk_size: int,
            final_logit_softcapping: float | None,
            logit_scale: float,
            outputs: tuple[str, ...],
        ) -> tuple[Tensor, Tensor, None, None, None]:
            if set(outputs) != {"log_probs", "entropy"}:
                raise RuntimeError(f"TRL asks its fused head for {outputs} instead of log_probs and entropy")
            head = Head(weight, bias, logit_scale, final_logit_softcapping, trl_utils.maybe_gather_lm_head_ctx)
            total = len(hidden)
            rows = _rows(labelled, total)
            if rows is not None:
                hidden, targets = hidden[rows.to(hidden.device)], targets[rows.to(hidden.device)]
            forward = Forward(hidden, targets, head, temperature, labelled.to(hidden.device), sequences)
            scores = self.scoring.score(forward)
            results.append(Scores(*(forward.on_grid(x) for x in scores)))
            if rows is not None:
                scores = Scores(*(x.new_zeros(total).index_copy(0, rows.to(x.device), x) for x in scores))
            return *scores, None, None, None

        with _fused_head(score):
            output = self.model(**inputs, labels=labels, fused_lm_head=fused_lm_head)
        if len(results) != 1:
            raise RuntimeError(f"TRL's forward used its fused head {len(results)} times instead of once")
        for name, exact in results[0]._asdict().items():
            setattr(output, name, _exact(output[name][:, -self.length :], exact))
        return output


@contextmanager
def _fused_head(score: Callable[..., Any]) -> Iterator[None]:
    stock = trl_utils._ChunkedLogProbFunction
    trl_utils._ChunkedLogProbFunction = SimpleNamespace(apply=score)
    try:
        yield
    finally:
        trl_utils._ChunkedLogProbFunction = stock


def _rows(labelled: Tensor, total: int) -> Tensor | None:
    """Row of each labelled token [B, T], in order, among the ``total`` rows that TRL hands to its head.

    On accelerators TRL hands over the labelled tokens alone (None: all rows, in order), elsewhere all positions; prompt
    tuning puts virtual tokens in front, so that completions are found from the end.
    """
    B, T = labelled.shape
    if total == int(labelled.sum()):
        return None
    if total % B or total // B < T:
        raise RuntimeError(f"TRL's fused head was given {total} rows for {B} sequences of {T} completion tokens")
    return torch.arange(total, device=labelled.device).reshape(B, total // B)[:, -T:][labelled]


def _exact(returned: Tensor, exact: Tensor) -> Tensor:
    """What the wrapped model returned, with the value it had inside: FSDP2 rounds the outputs of a forward to bf16."""
    returned = returned.to(exact.dtype)
    return exact.detach().to(returned.device) + (returned - returned.detach())
