"""An agent loop for verl whose completions also end at the task's stop token."""

from __future__ import annotations

from typing import Any

from troll.verl.contract import AGENT_LOOP, check

check(AGENT_LOOP)

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput  # noqa: E402
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop  # noqa: E402


class StopTokenAgentLoop(SingleTurnAgentLoop):
    """verl's single-turn loop with ``stop_token_ids`` in the sampling parameters."""

    def __init__(self, *args: Any, stop: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stop = stop

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Generate one completion."""
        return await super().run({**sampling_params, "stop_token_ids": [self.stop]}, **kwargs)
