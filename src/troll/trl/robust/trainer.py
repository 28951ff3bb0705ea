"""``RobustTrainer``: everything that keeps a long run alive, one mixin per concern.

======================  =================================================================================
``checkpoints``         Checkpoints are staged, checksummed and renamed: complete or absent (``store``).
``resume``              Resume continues bit for bit, also inside a rollout; ``fingerprint`` refuses
                        changed settings, ``lock`` a second writer.
``guards``              An update with a non-finite loss or gradient is skipped and its batches saved.
``oom_retry``           An update that runs out of memory is repeated on smaller parts.
``reward_validation``   Invalid rewards raise, or are masked and counted.
======================  =================================================================================

It knows the method only through the trust region's state, the old policies in a rollout, and ``_on_failed_check``.
"""

from __future__ import annotations

from typing import Any

from troll.trl.robust.checkpoints import SafeCheckpoints
from troll.trl.robust.guards import GuardState, SkipInvalidUpdates
from troll.trl.robust.oom_retry import OOMRetry
from troll.trl.robust.resume import ExactResume
from troll.trl.robust.reward_validation import RewardValidation


class RobustTrainer(SafeCheckpoints, ExactResume, SkipInvalidUpdates, OOMRetry, RewardValidation):
    """Mixin for a subclass of ``GRPOTrainer`` with the five above; it comes before that class among the bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.guards = GuardState()
        self._reported_faults = set()
        super().__init__(*args, **kwargs)
