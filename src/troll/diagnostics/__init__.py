"""Questions about one batch or two policies, as pure functions of tensors; every answer is a constant.

==============================  ==================================================================  ================
question                        function                                                            file
==============================  ==================================================================  ================
which tokens move?              :func:`kl_per_token`, then :func:`by_position`, :func:`by_class`,   ``spectrum``
                                :func:`by_advantage`
of which class is a token?      :func:`token_classes`                                               ``spectrum``
how far do completions move?    :func:`estimate_sequence_kl`, with intervals                        ``sequences``
what is lost of the gradient?   :func:`compare_gradients`: clip and TROLL on the same batch         ``gradients``
how hard is the projection?     :func:`solver_conditioning`                                         ``gradients``
do sampler and trainer agree?   :func:`sampler_mismatch`                                            ``sequences``
==============================  ==================================================================  ================

Policies are pairs of :class:`troll.SparsePolicy` [B, T] with a ``loss_mask``, as the losses take them; numbers are
computed in double precision. Bad input raises :class:`troll.errors.InputError`. ``docs/diagnostics.md`` has examples.
"""

from __future__ import annotations

from troll.diagnostics.gradients import (
    Conditioning,
    GradientComparison,
    GradientKept,
    compare_gradients,
    logit_gradient,
    solver_conditioning,
)
from troll.diagnostics.sequences import (
    Estimate,
    Mismatch,
    SequenceKL,
    SequenceTerms,
    estimate_mean,
    estimate_sequence_kl,
    sampler_mismatch,
    sequence_terms,
)
from troll.diagnostics.spectrum import (
    CLASSES,
    Spectrum,
    TokenClasses,
    by_advantage,
    by_class,
    by_position,
    kl_per_token,
    token_classes,
)

__all__ = [
    "CLASSES",
    "Conditioning",
    "Estimate",
    "GradientComparison",
    "GradientKept",
    "Mismatch",
    "SequenceKL",
    "SequenceTerms",
    "Spectrum",
    "TokenClasses",
    "by_advantage",
    "by_class",
    "by_position",
    "compare_gradients",
    "estimate_mean",
    "estimate_sequence_kl",
    "kl_per_token",
    "logit_gradient",
    "sampler_mismatch",
    "sequence_terms",
    "solver_conditioning",
    "token_classes",
]
