"""A watchdog for verl's agent loop workers: a run ends with an error when one of them dies.

verl sends prompts to its agent loop workers and polls TransferQueue for the completions. Nothing monitors the workers,
so the trainer of verl 0.9 polls forever when one dies.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time

import ray
from ray.exceptions import RayActorError

from troll.verl.contract import AGENT_LOOP_MANAGER, check

check(AGENT_LOOP_MANAGER)

from verl.trainer.ppo.v1 import AgentLoopManagerTQ  # noqa: E402

logger = logging.getLogger(__name__)
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
