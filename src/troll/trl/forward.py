"""The hook inside TRL's forward: from hidden states to log-probabilities.

TRL's models never return logits. Their forward ends in a fused LM head. It collects the backbone's hidden states, the
weight (gathered if it is sharded), bias, logit scale and soft cap, and calls one function with them,
``trl.trainer.utils._ChunkedLogProbFunction``. ``Scorer`` replaces that function with one of our passes during one
forward. Everything TRL knows about models (vision, tools, MoE, LoRA, sharding) stays in TRL.
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


class TokenScores(NamedTuple):
    """The two outputs of a forward that TRL reads, one number per completion token."""

    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True, eq=False)
class Forward:
    """Input of TRL's fused head in one forward: N completion tokens, those with a label among B sequences of T."""

    hidden: Tensor
    """[N, H]."""
    sampled: Tensor
    """[N]."""
    head: Head
    temperature: float
    labelled: Tensor
    """[B, T] bool, with N times True."""
    sequences: slice
    """The rows of the batch in this forward."""

    @cached_property
    def places(self) -> Tensor:
        """[N] index of each token in the flattened grid [B, T]."""
        return self.labelled.flatten().nonzero()[:, 0]

    def on_grid(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[N, ...] → [B, T, ...], with ``fill`` where there is no label."""
        grid = values.new_full((self.labelled.numel(), *values.shape[1:]), fill).index_copy(0, self.places, values)
        return grid.reshape(*self.labelled.shape, *values.shape[1:])


class Pass(Protocol):
    """Scores all sequences of a batch, in one or more forwards."""

    def wants(self, model: Any) -> bool:
        """Return whether a forward of this model belongs to the pass."""

    def begin(self) -> None:
        """Start with the first sequence; again if an earlier attempt ran out of memory."""

    def score(self, forward: Forward) -> TokenScores:
        """Return the scores of the completion tokens of one forward, [N]."""

    def finish(self, log_probs: Tensor) -> None:
        """Take TRL's log-probabilities of all sequences, [B, T]."""


class Scorer:
    """Callable that replaces the model in TRL's scoring function and scores the hidden states with a ``Pass``."""

    def __init__(self, model: Callable[..., Any], scoring: Pass, length: int) -> None:
        self.model, self.scoring, self.length = model, scoring, length
        self.done = 0
        scoring.begin()

    def __call__(self, *, labels: Tensor, fused_lm_head: bool, **inputs: Any) -> Any:
        """Run the model's forward on the next sequences of the batch."""
        labelled = labels[:, -self.length :] != _IGNORED
        sequences = slice(self.done, self.done + len(labels))
        self.done = sequences.stop
        results: list[TokenScores] = []

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
                raise RuntimeError(f"TRL asked its fused head for {outputs} instead of log_probs and entropy")
            head = Head(weight, bias, logit_scale, final_logit_softcapping, trl_utils.maybe_gather_lm_head_ctx)
            total = len(hidden)
            rows = _rows(labelled, total)
            if rows is not None:
                hidden, targets = hidden[rows.to(hidden.device)], targets[rows.to(hidden.device)]
            forward = Forward(hidden, targets, head, temperature, labelled.to(hidden.device), sequences)
            scores = self.scoring.score(forward)
            results.append(TokenScores(*(forward.on_grid(x) for x in scores)))
            if rows is not None:
                scores = TokenScores(*(x.new_zeros(total).index_copy(0, rows.to(x.device), x) for x in scores))
            return *scores, None, None, None

        with _fused_head(score):
            output = self.model(**inputs, labels=labels, fused_lm_head=fused_lm_head)
        if len(results) != 1:
            raise RuntimeError(f"TRL's forward called its fused head {len(results)} times instead of once")
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
    """Row of each labelled token [B, T], in order, among the ``total`` rows TRL passes to its head; None for all rows.

    On accelerators TRL passes only the labelled tokens, elsewhere all positions. Prompt tuning prepends virtual tokens,
    so completions are counted from the end.
    """
    B, T = labelled.shape
    if total == int(labelled.sum()):
        return None
    if total % B or total // B < T:
        raise RuntimeError(f"TRL's fused head received {total} rows for {B} sequences of {T} completion tokens")
    return torch.arange(total, device=labelled.device).reshape(B, total // B)[:, -T:][labelled]


def _exact(returned: Tensor, exact: Tensor) -> Tensor:
    """``returned`` with the value of ``exact`` and its own gradient: FSDP2 rounds the outputs of a forward to bf16."""
    returned = returned.to(exact.dtype)
    return exact.detach().to(returned.device) + (returned - returned.detach())
