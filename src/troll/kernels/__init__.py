"""The same numbers, faster: Triton kernels for GPUs, and the one place that decides what computes.

Nothing here defines anything. What a kernel computes is defined by the plain PyTorch beside which it is tested, in
``troll.policy`` and ``troll.projection``.
"""

from troll.kernels.choice import Choice, Impl, choose

__all__ = ["Choice", "Impl", "choose"]
