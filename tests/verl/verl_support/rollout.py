"""The tests' rollout, by verl's route for your own: a replica that starts the server, an adapter that feeds it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl_support.server import TinyServer


def name(replica: int) -> str:
    return f"tiny_server_{replica}"


class TinyReplica(RolloutReplica):
    """Starts the server of its ranks."""

    async def launch_servers(self) -> None:
        config, own = self.config, self.config.engine_kwargs.get("tiny", {})
        self._server_address = name(self.replica_rank)
        self._server_handle = (
            ray.remote(TinyServer)
            .options(name=self._server_address, num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(
                self.model_config.path,
                seed=config.seed + self.replica_rank,
                response_length=config.response_length,
                width=config.max_num_seqs,
                pause=own.get("pause", 0.0),
            )
        )
        self.servers = [self._server_handle]


class TinyAdapter(BaseRollout):
    """Lives in the training workers: gathers the weights with all ranks, the first of a replica sends them."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, **options: Any) -> None:
        super().__init__(config, model_config, device_mesh, **options)
        ranks = self.config.tensor_model_parallel_size
        self.replica_rank, place = divmod(int(os.environ["RANK"]), ranks)
        self.is_leader_rank = place == 0

    async def _ask(self, method: str, *args: Any) -> None:
        if self.is_leader_rank:
            await getattr(ray.get_actor(name(self.replica_rank)), method).remote(*args)

    async def resume(self, tags: list[str]) -> None:
        await self._ask("wake_up", tuple(tags))

    async def release(self) -> None:
        await self._ask("sleep")

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None, **_: Any
    ) -> None:
        gathered = {key: weight.detach().clone() for key, weight in weights}
        await self._ask("load", gathered, global_steps)
