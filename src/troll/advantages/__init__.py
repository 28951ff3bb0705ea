"""Rewards in, advantages out: pure functions, no state; every result is a detached constant of the loss.

============================  ================================  ================  =====================================
estimator                     A                                 from              use it when
============================  ================================  ================  =====================================
:func:`grpo`                  (r − mean_G r)/(std_G r + eps)    arXiv 2402.03300  several samples per prompt; the usual
                                                                                  choice
:func:`dr_grpo`               r − mean_G r                      arXiv 2503.20783  as grpo, without weighing prompts by
                                                                                  their difficulty
:func:`rloo`                  r − mean of the others in G       arXiv 2402.14740  an unbiased baseline; matters for
                                                                                  small groups
:func:`reinforce_pp`          whiten(Σ_{s≥t} γ^{s−t} r_s)       arXiv 2501.03262  one sample per prompt, or rewards per
                                                                                  token, and no critic
:func:`reinforce_pp_baseline` whiten(r − mean_G r)              arXiv 2501.03262  groups too small or too uniform for
                                                                                  their own standard deviation
:func:`gae`                   Σ_{s≥t} (γλ)^{s−t} δ_s            arXiv 1506.02438  there is a critic (PPO);
                                                                                  δ_t = r_t + γ·V_{t+1} − V_t
============================  ================================  ================  =====================================

The first three return [B], one advantage per sample; the others [B, T], 0 outside ``loss_mask``. :func:`whiten` brings
what ``gae`` returns to mean 0 and variance 1. Bad input raises :class:`troll.errors.InputError`.

Files: ``inputs`` checks, ``outcome`` groups and one reward per sample, ``returns`` rewards per token and whitening.
"""

from __future__ import annotations

from troll.advantages.outcome import dr_grpo, grpo, reinforce_pp_baseline, rloo
from troll.advantages.returns import gae, reinforce_pp, whiten

__all__ = ["dr_grpo", "gae", "grpo", "reinforce_pp", "reinforce_pp_baseline", "rloo", "whiten"]
