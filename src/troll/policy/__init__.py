"""Logits or hidden states → sparse policies, and the divergences between them.

``sparsify`` keeps the most probable tokens; ``restrict`` scores the tokens another policy kept; ``Head`` does both from
hidden states; ``align`` brings two policies onto one support; ``pack`` and ``unpack`` store them.
"""

from troll.policy.align import LOG_FLOOR, TAIL, Aligned, Tail, align, proposal_tail
from troll.policy.divergence import entropy, kl_terms, sequence_kl, token_kl, total_variation
from troll.policy.head import Head, Scored
from troll.policy.packed import PackedPolicy
from troll.policy.sparse import SparsePolicy
from troll.policy.sparsify import MAX_SUPPORT, TAIL_MASS, OnInvalid, check_support, restrict, sparsify

__all__ = [
    "LOG_FLOOR",
    "MAX_SUPPORT",
    "TAIL",
    "TAIL_MASS",
    "Aligned",
    "Head",
    "OnInvalid",
    "PackedPolicy",
    "Scored",
    "SparsePolicy",
    "Tail",
    "align",
    "check_support",
    "entropy",
    "kl_terms",
    "proposal_tail",
    "restrict",
    "sequence_kl",
    "sparsify",
    "token_kl",
    "total_variation",
]
