"""TRL with a trust region: ``GRPOConfig`` → ``TROLLConfig``, ``GRPOTrainer`` → ``TROLLTrainer``, and nothing else.

Four methods of TRL's trainer are wrapped, none is copied (``trainer``): scoring a rollout also records the sparse old
policy (``rollout``), scoring an update returns projected log-probabilities (``scoring``), the loss gets the regression
term, and advantages may come from another estimator (``estimators``). TRL's forward, masks, aggregation, reference KL
and logging are its own. Around it stand checkpoints that survive and are exact (``checkpoints``), and guards for what
goes wrong in a long run (``guards``).
"""

try:
    import trl as _trl  # noqa: F401
except ImportError as error:
    raise ImportError("troll.adapters.trl needs TRL: pip install 'troll-rl[trl]'") from error

from troll.adapters.trl.config import TROLLConfig
from troll.adapters.trl.interrupt import StopOnSignal
from troll.adapters.trl.trainer import TROLLTrainer

__all__ = ["StopOnSignal", "TROLLConfig", "TROLLTrainer"]
