"""The server of the tests' rollout: a transformers model in a Ray actor, one sampled token of every sequence a step.

There is no key-value cache, so the weights may change between two tokens and nothing is stale. ``sleep`` overwrites the
weights with NaN: a server that was not given new weights cannot generate. It does without verl, whose import would take
longer than all it has to do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@dataclass
class Output:
    """verl's ``TokenOutput``."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    extra_fields: dict[str, Any]
    routed_experts: None = None
    num_preempted: int = 0


class Sequence:
    """One request: the tokens so far, and a noise of its own."""

    def __init__(self, prompt: list[int], limit: int, temperature: float, seed: int) -> None:
        self.tokens, self.start, self.limit, self.temperature = list(prompt), len(prompt), limit, temperature
        self.log_probs: list[float] = []
        self.noise = torch.Generator().manual_seed(seed)
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def extend(self, logits: torch.Tensor, end: int) -> None:
        """Sample a token from logits (V,) and stop after the end token or the limit."""
        log_probs = (logits.float() / (self.temperature or 1.0)).log_softmax(-1)
        if self.temperature:
            token = int(torch.multinomial(log_probs.exp(), 1, generator=self.noise))
        else:
            token = int(log_probs.argmax())
        self.tokens.append(token)
        self.log_probs.append(float(log_probs[token]))
        if token == end or len(self.log_probs) >= self.limit:
            self.stopped.set_result("completed")


class TinyServer:
    """The actor. Sequences that are there at the same time go through the model together, up to ``width`` of them.

    ``pause`` seconds pass between two tokens: enough of them, and an asynchronous trainer interrupts sequences midway.
    """

    def __init__(self, path: str, seed: int, response_length: int, width: int, pause: float) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.end = int(self.model.config.eos_token_id)
        self.seed, self.response_length, self.width, self.pause, self.version = seed, response_length, width, pause, 0
        self.active: list[Sequence] = []
        self.seen: Counter[tuple[int, ...]] = Counter()
        self.may_run = asyncio.Event()
        self.loop: asyncio.Task[None] | None = None
        self.forget()

    def forget(self) -> None:
        for weight in self.model.parameters():
            weight.data.fill_(torch.nan)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> Output:
        prompt = tuple(prompt_ids)
        self.seen[prompt] += 1
        noise = hash((self.seed, self.version, prompt, self.seen[prompt])) % 2**63
        limit = sampling_params.get("max_tokens", self.response_length)
        sequence = Sequence(prompt_ids, limit, sampling_params["temperature"], noise)
        self.active.append(sequence)
        if self.loop is None or self.loop.done():
            self.loop = asyncio.create_task(self.run())
        reason = await sequence.stopped
        return Output(
            token_ids=sequence.tokens[sequence.start :],
            log_probs=sequence.log_probs,
            stop_reason=reason,
            extra_fields={"global_steps": self.version},
        )

    async def run(self) -> None:
        while self.active:
            await self.may_run.wait()
            try:
                self.step()
            except Exception as error:
                for sequence in self.active:
                    sequence.stopped.set_exception(error)
                self.active = []
            await asyncio.sleep(self.pause)  # requests, aborts and new weights come in between two tokens

    @torch.no_grad()
    def step(self) -> None:
        batch = self.active[: self.width]
        lengths = torch.tensor([len(s.tokens) for s in batch])
        rows = [torch.tensor(s.tokens) for s in batch]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
        logits = self.model(tokens, attention_mask=mask, use_cache=False).logits  # (B, T, V)
        last = logits[torch.arange(len(rows)), lengths - 1]
        if not last.isfinite().all():
            raise RuntimeError("the server was asked to generate before it had weights")
        for sequence, row in zip(batch, last, strict=True):
            sequence.extend(row, self.end)
        self.active = [s for s in self.active if not s.stopped.done()]

    async def load(self, weights: dict[str, torch.Tensor], version: int) -> None:
        self.model.load_state_dict(weights)
        self.version = version
        self.seen.clear()

    async def sleep(self) -> None:
        self.may_run.clear()
        self.forget()

    async def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        if "kv_cache" in tags:  # the last thing verl does before it generates again
            self.may_run.set()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        for sequence in self.active:
            sequence.stopped.set_result("aborted")
        self.active = []

    async def _nothing(self, **_: Any) -> None:
        """There is no cache to free and no profile to take."""

    resume_generation = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing
