"""Estimates of the memory and time of a run, from the shape of the model and the speed of this machine.

The model is built without parameters. Memory is the peak of one process. Time is the matrix products and memory traffic
of an update, divided by rates that are measured in a second. In five runs of SmolLM2-135M on one core the memory was
within 20 %; for the default run on two free cores the estimate was two minutes and the time 160 s. The estimates have
not been validated on a GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from troll.lab.models import ModelShape
from troll.lab.runs.formatting import count
from troll.trl import TROLLConfig

FASTEST, SLOWEST = 0.6, 1.8
"""The range of a time estimate, as factors."""
_CONTEXT = 500_000_000  # bytes of CUDA and its libraries
_OPERATIONS = 100  # overhead of one layer's forward, in units of the smallest operation
_REACHED = {"cpu": 0.8, "other": 0.5}  # rate of the matrix products of a model, relative to a large product


@dataclass(frozen=True)
class Speed:
    """The speed of a device."""

    flops: float
    """Floating-point operations per second of the matrix products of a model."""
    bandwidth: float
    """Bytes read and written per second."""
    operation: float
    """Seconds for the smallest operation."""

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Speed:
        """Measure the speed, in about a second."""
        reached = _REACHED.get(device.type, _REACHED["other"])
        n = 512 if device.type == "cpu" else 4096
        a, b, c = (torch.ones(n, n, device=device, dtype=dtype) for _ in range(3))
        source, target = (torch.ones(1 << 24, device=device) for _ in range(2))
        small = torch.ones(1, device=device)
        return cls(
            flops=reached * 2 * n**3 / _seconds(lambda: torch.mm(a, b, out=c), device),
            bandwidth=2 * 4 * source.numel() / _seconds(lambda: target.copy_(source), device),
            operation=_seconds(lambda: small.add_(1), device),
        )


def _seconds(operation: Callable[[], Any], device: torch.device, limit: float = 0.25) -> float:
    """Seconds of one call: the fastest of several series, because other processes only slow it down."""

    def series(n: int) -> float:
        start = time.perf_counter()
        for _ in range(n):
            operation()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - start) / n

    first = series(3)
    n = max(1, int(limit / 5 / max(first, 1e-7)))
    return min(series(n) for _ in range(4))


@dataclass(frozen=True)
class ResourceEstimate:
    """Memory in bytes, time in seconds."""

    memory: dict[str, int]
    """Bytes by purpose."""
    most: int
    """Peak memory."""
    available: int
    device: str
    update: dict[str, float]
    """Seconds of one update by phase, including its share of the rollout."""
    updates: int | None
    evaluation: float
    """Seconds of all evaluations."""
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether there is enough memory."""
        return self.most <= self.available

    @property
    def per_update(self) -> float:
        """Seconds per update."""
        return sum(self.update.values())

    @property
    def total(self) -> float | None:
        """Seconds of the run; None if the number of updates is unknown."""
        return None if self.updates is None else self.updates * self.per_update + self.evaluation

    def __str__(self) -> str:
        width = max(map(len, [*self.memory, *self.update, "all evaluations"])) + 2
        verdict = f"of {_gigabytes(self.available)} free ({self.device})" + ("" if self.fits else ": DOES NOT FIT")
        lines = ["Estimated memory", *(f"  {name:{width}}{_gigabytes(x):>9}" for name, x in self.memory.items() if x)]
        lines += [f"  {'peak':{width}}{_gigabytes(self.most):>9}  {verdict}", "", "Estimated time"]
        lines += [f"  {name:{width}}{_duration(x):>9}" for name, x in self.update.items() if x]
        lines += [f"  {'one update':{width}}{_duration(self.per_update):>9}"]
        if self.evaluation:
            lines += [f"  {'all evaluations':{width}}{_duration(self.evaluation):>9}"]
        if self.total is not None:
            between = f"between {_duration(FASTEST * self.total)} and {_duration(SLOWEST * self.total)}"
            lines += [f"  {'the run':{width}}{_duration(self.total):>9}  {self.updates} updates; {between}"]
        return "\n".join([*lines, "", "Assumptions", *(f"  {line}" for line in self.assumptions)])


def estimate(
    args: TROLLConfig,
    model_path: str,
    prompt_tokens: float,
    device: torch.device,
    *,
    prompts: int | None = None,
    eval_size: int = 0,
    peft_config: Any = None,
    speed: Speed | None = None,
) -> ResourceEstimate:
    """The memory and time of a run with these settings on this device, per process.

    Args:
        args: the schedule and the batch sizes.
        model_path: the model; only its configuration is read.
        prompt_tokens: mean length of a prompt.
        device: the training device.
        prompts: size of the training set, which determines the number of updates if ``max_steps`` is not set.
        eval_size: number of held-out problems.
        peft_config: configuration of the adapter, if one is trained.
        speed: speed of the device; measured if not given.
    """
    shape = ModelShape.of(model_path, peft_config, trust_remote_code=args.trust_remote_code)
    stored = _dtype((args.model_init_kwargs or {}).get("dtype"))
    lowered = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else stored
    sizes = _Sizes(args, shape, prompt_tokens, device, stored, lowered, peft_config is not None)
    speed = speed or Speed.measure(device, lowered)
    memory = sizes.memory()
    updates = sizes.updates(prompts)
    learning = sum(memory[name] for name in _LEARNING)
    generating = sum(memory[name] for name in _GENERATING)
    return ResourceEstimate(
        memory=memory,
        most=sum(memory.values()) - min(learning, generating),
        available=_available(device),
        device=_name(device),
        update=sizes.update(speed),
        updates=updates,
        evaluation=sizes.evaluation(speed, updates, eval_size),
        assumptions=tuple(sizes.assumptions(speed)),
    )


_LEARNING = ("gradients", "activations", "logits and head")
_GENERATING = ("key-value cache", "generation buffers")


@dataclass(frozen=True)
class _Sizes:
    """The formulas for memory and time."""

    args: TROLLConfig
    shape: ModelShape
    prompt: float
    device: torch.device
    stored: torch.dtype
    lowered: torch.dtype
    adapter: bool

    @property
    def batch(self) -> int:
        return int(self.args.per_device_train_batch_size)

    @property
    def rollout(self) -> int:
        """Completions per rollout in this process."""
        return int(self.batch * self.args.steps_per_generation)

    @property
    def completion(self) -> int:
        return int(self.args.max_completion_length)

    @property
    def length(self) -> float:
        return self.prompt + self.completion

    @property
    def keeps_old(self) -> bool:
        """Whether the old policy is stored."""
        return self.args.trust_region == "troll" or self.args.measure_kl

    def memory(self) -> dict[str, int]:
        """Bytes by purpose."""
        shape, args = self.shape, self.args
        stored, lowered = self.stored.itemsize, self.lowered.itemsize
        tokens = self.batch * self.length
        layers = shape.layers * shape.activations
        if args.gradient_checkpointing:
            layers = shape.layers * shape.hidden + shape.activations
        elements = 1 << (24 if self.device.type == "cpu" else 26)
        tile = min(self.batch * self.completion, max(1, elements // shape.vocabulary)) * shape.vocabulary
        head = 0 if self.adapter else 4 * shape.hidden * shape.vocabulary  # its gradient, summed in fp32
        logits = self.rollout * shape.vocabulary
        cache = self.rollout * self.length * shape.layers * 2 * shape.keys
        prefill = self.rollout * self.prompt * (4 * shape.hidden + 3 * shape.inner)
        vllm = args.use_vllm
        colocated = vllm and args.vllm_mode == "colocate"
        reference = args.beta != 0 and not self.adapter
        parts = {
            "Python and libraries": _libraries(self.device),
            "parameters": shape.parameters * stored,
            "parameters in half precision": shape.parameters * lowered if lowered < stored else 0,
            "reference model": shape.parameters * stored if reference else 0,
            "optimizer": shape.trainable * _optimizer_bytes(args.optim, stored),
            "old policy of a rollout": self.rollout * self.completion * (7 * args.max_support + 6) * self.keeps_old,
            "vLLM": args.vllm_gpu_memory_utilization * _total(self.device) if colocated else 0,
            "gradients": shape.trainable * stored,
            "activations": tokens * (layers + 2 * shape.hidden) * (lowered + (lowered < stored)),
            "logits and head": tile * (lowered + 4 * 2) + head,
            "key-value cache": 0 if vllm else cache * lowered,
            "generation buffers": 0 if vllm else prefill * lowered + 4 * 4 * logits,
        }
        return {name: int(x) for name, x in parts.items()}

    def update(self, speed: Speed) -> dict[str, float]:
        """Seconds of an update by phase; the time of a rollout is divided among its updates."""
        shape, args = self.shape, self.args
        updates = args.steps_per_rollout / args.gradient_accumulation_steps
        passes = 4 if args.gradient_checkpointing else 3  # a backward is two forwards
        learn = passes * self._layers(speed, self.batch, self.length)
        learn += self._head(speed, self.batch * self.completion, products=4)
        score = self._layers(speed, self.rollout, self.length) + self._head(speed, self.rollout * self.completion, 1)
        score *= (self.keeps_old or args.trust_region_can_act) + (args.beta != 0)
        # gradients are written, accumulated, measured and scaled; parameters and both moments are read and written
        optimizer = shape.trainable * self.stored.itemsize * 12 / speed.bandwidth
        return {
            "generate": self._generate(speed, self.rollout) / updates,
            "score": score / updates,
            "learn": learn * args.gradient_accumulation_steps,
            "optimizer": optimizer,
        }

    def _layers(self, speed: Speed, sequences: float, length: float) -> float:
        """Seconds of a forward through the layers."""
        shape = self.shape
        attention = 2 * length * shape.hidden * shape.layers
        products = sequences * length * (shape.forward + attention) / speed.flops
        traffic = sequences * length * shape.layers * shape.activations * self.lowered.itemsize / speed.bandwidth
        return products + traffic + shape.layers * _OPERATIONS * speed.operation

    def _head(self, speed: Speed, tokens: float, products: int) -> float:
        return tokens * products * (self.shape.head / speed.flops + 10 * 4 * self.shape.vocabulary / speed.bandwidth)

    def _generate(self, speed: Speed, sequences: float) -> float:
        """Seconds: the prompt in one forward, then one forward per token, which is bound by reading the parameters."""
        shape = self.shape
        reading = shape.parameters * self.lowered.itemsize / speed.bandwidth
        products = sequences * shape.forward / speed.flops
        cache = sequences * self.length * shape.layers * 2 * shape.keys * self.lowered.itemsize / speed.bandwidth
        step = reading + products + cache + shape.layers * _OPERATIONS * speed.operation
        step += self._head(speed, sequences, products=1)
        return self._layers(speed, sequences, self.prompt) + self.completion * step

    def updates(self, prompts: int | None) -> int | None:
        """Updates of the run: ``max_steps``, or those of the complete rollouts in the data."""
        args = self.args
        if args.max_steps > 0:
            return int(args.max_steps)
        if prompts is None:
            return None
        rollouts = prompts * args.num_generations // args.generation_batch_size
        passes = rollouts * args.steps_per_rollout
        per_epoch: int = max(1, math.ceil(passes / args.gradient_accumulation_steps))
        return math.ceil(float(args.num_train_epochs) * per_epoch)

    def evaluation(self, speed: Speed, updates: int | None, eval_size: int) -> float:
        """Seconds of all evaluations; 0 if their number is unknown."""
        args = self.args
        if args.eval_strategy != "steps" or not eval_size or not updates:
            return 0.0
        every = args.eval_steps if args.eval_steps >= 1 else max(1, math.ceil(args.eval_steps * updates))
        times = updates // every + bool(args.eval_on_start)
        samples = eval_size * (args.num_generations_eval or args.num_generations)
        batch = min(samples, int(args.per_device_eval_batch_size))
        one = self._generate(speed, batch) + self._layers(speed, batch, self.length)
        one += self._head(speed, batch * self.completion, 1)
        return float(times * math.ceil(samples / batch / max(1, args.world_size)) * one)

    def assumptions(self, speed: Speed) -> Iterator[str]:
        """The assumptions behind the estimate."""
        size = f"{count(self.shape.parameters)} parameters"
        yield f"{size} in {_short(self.stored)}, computed in {_short(self.lowered)}"
        rates = f"{speed.flops / 1e9:,.0f} GFLOP/s and {speed.bandwidth / 1e9:,.0f} GB/s"
        yield f"{rates}, measured just now; no other work on this machine"
        yield f"prompts of {self.prompt:.0f} tokens, completions of {self.completion} tokens, the maximum"
        if self.args.use_vllm:
            yield "vLLM generates as fast as transformers, although it is faster"
        if self.shape.experts:
            yield "every token uses all experts, although it uses a few"
        if self.args.world_size > 1:
            yield f"each of {self.args.world_size} processes needs this memory; FSDP and DeepSpeed divide it"


def _optimizer_bytes(name: Any, stored: int) -> float:
    """Bytes of optimizer state per trainable parameter."""
    name = str(getattr(name, "value", name))
    if "8bit" in name:
        return 2.0
    if "sgd" in name or "adafactor" in name:  # no state, or one value per row and column
        return 0.0
    return float(stored if "lion" in name else 2 * stored)


def _libraries(device: torch.device) -> int:
    return _CONTEXT if device.type != "cpu" else int(psutil.Process().memory_info().rss)


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return int(psutil.virtual_memory().available + psutil.Process().memory_info().rss)


def _total(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(value), torch.float32)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype))


def _gigabytes(x: float) -> str:
    if x < 1e7:
        return f"{x / 1e6:.1f} MB"
    return f"{x / 1e9:.2f} GB" if x < 1e10 else f"{x / 1e9:.0f} GB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
