"""TROLL in verl, without a fork: verl's ``main_ppo``, trainer, workers and rollouts run unmodified.

Importing this module checks that the installed verl has what is used of it (``contract``) and registers an engine
(``engine``, for Megatron ``megatron``) and a policy loss (``loss``). The engine records the sparse old policy when verl
scores a rollout (``transport`` stores it) and projects onto the trust region when verl updates the policy. Aggregation,
reference KL, entropy bonus, advantages, logging and checkpoints are verl's.

``actor_rollout_ref.model.external_lib`` names this module. The config group ``trust_region`` sets that and the rest:

    python -m verl.trainer.main_ppo 'hydra.searchpath=[pkg://troll.verl.configs]' +trust_region=troll …
"""

try:
    import verl as _verl  # noqa: F401
except ImportError as error:
    raise ImportError("troll.verl needs verl. In a clone of troll, run: pip install -e '.[verl]'") from error

from troll.verl import contract as _contract

_contract.check(_contract.CONFIG, _contract.LOSS, _contract.ENGINE, _contract.TRL_COMPAT)

from verl.workers import engine as _engines  # noqa: E402

from troll.verl.config import TrollFSDPEngineConfig, TrollMcoreEngineConfig, TrollPolicyLossConfig  # noqa: E402
from troll.verl.engine import TrollFSDPEngine  # noqa: E402

if _engines.MegatronEngine is not None:  # None where Megatron is not installed
    _contract.check(_contract.MEGATRON)
    from troll.verl import megatron as _megatron  # noqa: F401

__all__ = ["TrollFSDPEngine", "TrollFSDPEngineConfig", "TrollMcoreEngineConfig", "TrollPolicyLossConfig"]
