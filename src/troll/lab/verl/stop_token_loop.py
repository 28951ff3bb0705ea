"""An agent loop of verl whose completions also end at a token of the task."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class StopAgentLoop(SingleTurnAgentLoop):
    """verl's single turn, with ``stop_token_ids`` for the sampler."""

    def __init__(self, *args: Any, stop: int, **named: Any) -> None:
        super().__init__(*args, **named)
        self.stop = stop

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> AgentLoopOutput:
        """One completion."""
        return await super().run({**sampling_params, "stop_token_ids": [self.stop]}, **named)
