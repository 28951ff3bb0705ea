"""verl on a CPU: a platform, the places where verl takes a GPU for granted, and the rollout of these tests.

Every process of a run imports this module (``VERL_USE_EXTERNAL_MODULES=verl_support.cpu``) and picks the platform
(``VERL_PLATFORM=cpu``). Engines registered for cuda are found with ``VERL_ENGINE_DEVICE=cuda``.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.fsdp
import transformers
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import distributed
from verl.workers.rollout import base, replica

ROLLOUT = "tiny"


def _always(answer: Any) -> Any:
    """A function that gives the same answer whatever it is asked."""
    return lambda *_, **__: answer


class _Device(types.ModuleType):
    """``torch.cpu`` with the names that verl expects of ``torch.cuda``."""

    empty_cache = ipc_collect = set_device = synchronize = staticmethod(_always(None))
    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = staticmethod(_always(0))
    mem_get_info = staticmethod(_always((0, 0)))
    is_available = staticmethod(_always(True))
    get_device_name = staticmethod(_always("CPU"))
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class CPU(PlatformBase):
    """A CPU that counts as one of Ray's GPUs: ``ray.init(num_gpus=...)`` says how many ranks fit."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = _Device("verl_cpu_device")

    is_available = is_ipc_supported = _always(True)
    device_count = _always(1)
    current_device = _always("cpu")  # what tensors are moved to: an index would mean a GPU
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _always("GPU")
    ray_noset_envvars = _always([])
    set_device = synchronize = set_allocator_settings = empty_cache = _always(None)
    profiler_start = profiler_stop = cudart = _always(None)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield


class _Unpinned(torch.distributed.fsdp.CPUOffloadPolicy):
    """verl keeps the reference model in pinned memory, which only a GPU's driver can give."""

    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__(pin_memory=False)


def _gloo(join: Any) -> Any:
    """Join the process group over gloo: verl's own string would name the CPU twice."""
    return lambda timeout_second=None, backend=None: join(timeout_second, backend="cpu:gloo")


def _plain_attention(load: Any) -> Any:
    """The critic asks for flash attention in so many words."""

    def from_pretrained(*args: Any, **options: Any) -> Any:
        return load(*args, **{**options, "attn_implementation": "sdpa"})

    return from_pretrained


torch.distributed.fsdp.CPUOffloadPolicy = _Unpinned
distributed.initialize_global_process_group_ray = _gloo(distributed.initialize_global_process_group_ray)
transformers.AutoModelForTokenClassification.from_pretrained = _plain_attention(
    transformers.AutoModelForTokenClassification.from_pretrained
)
base._ROLLOUT_REGISTRY[(ROLLOUT, "async")] = "verl_support.rollout.TinyAdapter"


def _replica() -> Any:
    from verl_support.rollout import TinyReplica

    return TinyReplica


replica.RolloutReplicaRegistry.register(ROLLOUT, _replica)
