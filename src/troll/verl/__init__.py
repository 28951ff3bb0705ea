"""verl with a trust region, without a fork: verl's own ``main_ppo``, trainer, workers and rollouts, unmodified.

Importing this module registers an engine (``engine``, for Megatron ``megatron``) and a policy loss (``objective``) with
verl. The engine records the sparse old policy when verl scores a rollout (``transport`` says how it travels) and brings
the policy into the trust region when verl updates it. verl's aggregation, reference KL, entropy bonus, advantages,
logging and checkpoints are its own.

It is what ``actor_rollout_ref.model.external_lib`` names; ``configs/trust_region/troll.yaml`` sets everything:

    python -m verl.trainer.main_ppo 'hydra.searchpath=[pkg://troll.verl.configs]' +trust_region=troll …
"""

try:
    from verl.workers import engine as _engines
except ImportError as error:
    raise ImportError("troll.verl needs verl: pip install 'troll-rl[verl]'") from error

from troll.verl import trl_compat as _beside_trl  # noqa: F401
from troll.verl.config import TrollFSDPEngineConfig, TrollMcoreEngineConfig, TrollPolicyLossConfig
from troll.verl.engine import TrollFSDPEngine

if _engines.MegatronEngine is not None:  # where verl found Megatron
    from troll.verl import megatron as _megatron  # noqa: F401

__all__ = ["TrollFSDPEngine", "TrollFSDPEngineConfig", "TrollMcoreEngineConfig", "TrollPolicyLossConfig"]
