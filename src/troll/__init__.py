"""TROLL: trust regions instead of clipping for reinforcement learning of language models.

    old = troll.sparsify(old_logits, sampled)                                # once per rollout
    proposal = troll.restrict(logits, old)                                    # every update
    loss, metrics = troll.troll_loss(proposal, old, advantages, loss_mask)
    loss.backward()

The data flows through the folders in this order: policy → projection → objective; ``advantages`` stand beside them,
``diagnostics`` answer questions about a batch.
"""

from troll import advantages, diagnostics
from troll.errors import InputError
from troll.objective import (
    Constrained,
    aggregate,
    clip_loss,
    constrain,
    fused_troll_loss,
    regression_loss,
    troll_loss,
    unconstrained_loss,
)
from troll.policy import Head, PackedPolicy, SparsePolicy, restrict, sparsify, token_kl
from troll.projection import Projection, project

__version__ = "0.1.0"

__all__ = [
    "Constrained",
    "Head",
    "InputError",
    "PackedPolicy",
    "Projection",
    "SparsePolicy",
    "advantages",
    "aggregate",
    "clip_loss",
    "constrain",
    "diagnostics",
    "fused_troll_loss",
    "project",
    "regression_loss",
    "restrict",
    "sparsify",
    "token_kl",
    "troll_loss",
    "unconstrained_loss",
]
