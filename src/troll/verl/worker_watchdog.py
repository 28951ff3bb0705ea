"""verl's agent loops, watched: a run whose rollout workers die ends with an error.

verl sends prompts to its agent loop workers and polls TransferQueue for what comes of them. Nobody looks after the
workers, so the trainer of verl 0.9 polls for ever when one dies.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time

import ray
from ray.exceptions import RayActorError
from verl.trainer.ppo.v1 import AgentLoopManagerTQ

logger = logging.getLogger(__name__)
_PAUSE = 5.0  # seconds between looks


class AgentLoopError(RuntimeError):
    """Raised in the thread of the trainer, which waits in a loop that nothing else ends."""

    def __str__(self) -> str:
        return "an agent loop worker died with rollouts in progress, which will not come (the log says which and why)"


class WatchedAgentLoopManager(AgentLoopManagerTQ):
    """``actor_rollout_ref.rollout.agent.agent_loop_manager_class``: verl's own, and a look after its workers."""

    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        signs = {worker.__ray_ready__.remote(): worker for worker in self.agent_loop_workers}
        while True:
            time.sleep(_PAUSE)
            answered, _ = ray.wait(list(signs), num_returns=len(signs), timeout=0)
            for sign in answered:
                worker = signs.pop(sign)
                try:
                    ray.get(sign)
                except RayActorError as error:
                    logger.error(f"an agent loop worker died: {error}")
                    trainer = ctypes.c_ulong(threading.main_thread().ident or 0)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(trainer, ctypes.py_object(AgentLoopError))
                    return
                signs[worker.__ray_ready__.remote()] = worker
