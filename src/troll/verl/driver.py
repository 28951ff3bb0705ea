"""In the process of verl's trainer: a watchdog for its agent loop workers, and metrics of the rewards of a rollout.

verl sends prompts to its agent loop workers and polls TransferQueue for the completions. Nothing monitors the workers,
so the trainer of verl 0.9 polls forever when one dies. ``WatchedAgentLoopManager`` ends the run with an error.

verl logs mean, minimum and maximum of the scores of a rollout. Whether the completions of a prompt have different
scores at all, which advantages relative to a group need, is not logged. Importing this module adds the two metrics that
TRL has for it (``reward_spread``).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from statistics import stdev
from typing import Any

import ray
import transfer_queue
from ray.exceptions import RayActorError

from troll.verl.contract import DRIVER, check

check(DRIVER)

from verl.trainer.ppo.v1 import AgentLoopManagerTQ, PPOTrainer  # noqa: E402

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------- the watchdog

_PAUSE = 5.0  # seconds between two checks


class AgentLoopError(RuntimeError):
    """Raised in the thread of the trainer, whose polling loop nothing else ends."""

    def __str__(self) -> str:
        return "an agent loop worker died, so the rollouts it was generating will never arrive (see the log above)"


class WatchedAgentLoopManager(AgentLoopManagerTQ):
    """``actor_rollout_ref.rollout.agent.agent_loop_manager_class``: verl's manager with a watchdog thread."""

    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        pending = {worker.__ray_ready__.remote(): worker for worker in self.agent_loop_workers}
        while True:
            time.sleep(_PAUSE)
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
            for answer in ready:
                worker = pending.pop(answer)
                try:
                    ray.get(answer)
                except RayActorError as error:
                    logger.error(f"An agent loop worker died: {error}")
                    trainer = ctypes.c_ulong(threading.main_thread().ident or 0)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(trainer, ctypes.py_object(AgentLoopError))
                    return
                pending[worker.__ray_ready__.remote()] = worker


# ---------------------------------------------------------------------- metrics of the rewards


def reward_spread(scores: Mapping[str, float]) -> dict[str, float]:
    """Standard deviation of the scores of a rollout, and the fraction of completions whose group has equal scores.

    As ``reward_std`` and ``frac_reward_zero_std`` of TRL. A metric that needs more completions than there are is left
    out, so the second one is absent with one completion per prompt.

    Args:
        scores: score of each completion by verl's key, ``{prompt}_{session}_{output}``. Of a session with several
            outputs the last one counts, as for the advantages of GRPO.
    """
    last: dict[tuple[str, str], tuple[int, float]] = {}
    for key, score in scores.items():
        prompt, session, output = key.rsplit("_", 2)
        last[prompt, session] = max(last.get((prompt, session), (-1, 0.0)), (int(output), score))
    groups: dict[str, list[float]] = defaultdict(list)
    for (prompt, _), (_, score) in last.items():
        groups[prompt].append(score)
    compared = [group for group in groups.values() if len(group) > 1]
    metrics = {}
    if len(last) > 1:
        metrics["critic/score/std"] = stdev(score for _, score in last.values())
    if compared:
        equal = sum(len(group) for group in compared if stdev(group) <= _ZERO)
        metrics["critic/score/frac_zero_std"] = equal / sum(map(len, compared))
    return metrics


_ZERO = 1e-8  # as torch.isclose in TRL


def _add_reward_spread(compute_metrics: Any) -> Any:
    """verl's method that computes the metrics of a step, followed by ours."""

    @functools.wraps(compute_metrics)
    def with_spread(self: Any, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        result = compute_metrics(self, batch, metrics, *args, **kwargs)
        data = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["rm_scores"]
        )
        scores = zip(batch.keys, batch.tags, data["rm_scores"].sum(dim=1).tolist(), strict=True)
        metrics.update(reward_spread({key: score for key, tag, score in scores if not tag.get("is_padding", False)}))
        return result

    return with_spread


PPOTrainer._compute_metrics = _add_reward_spread(PPOTrainer._compute_metrics)
