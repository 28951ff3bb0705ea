"""Times and memory of several ways to compute the same thing: in turns, medians, after warming up."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Way = Callable[[], Any]
Row = dict[str, Any]
"""``ms`` (median), ``low`` and ``high`` (quartiles), ``repeats``, ``MiB``; or ``failed`` with the reason alone."""


class AbsentError(Exception):
    """The way is not there: a package is missing, or this version of it has no such function."""


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reason(error: Exception) -> str:
    """One line that says what went wrong."""
    kind = "" if isinstance(error, AbsentError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())[:300]


def in_turns(
    ways: dict[str, Way],
    device: torch.device,
    seconds: float = 1.0,
    least: int = 3,
    most: int = 30,
    before: Callable[[], None] = lambda: None,
    seen: Callable[[str, Any], None] = lambda name, result: None,
) -> dict[str, Row]:
    """Measure every way; one that raises is reported as failed and the others go on.

    The first call compiles, and ``seen`` may look at what it returned; the second gives the peak of memory above what
    was allocated before it (outputs included) and the time by which ``seconds`` is turned into a number of repeats.
    Then the ways take turns. On a GPU a time is that between two events in the stream; before the first, 256 MiB are
    written, which empties the cache and lets Python run ahead of the device: a way pays for being launched from Python
    only where it makes the device wait.

    Args:
        ways: what to call.
        device: where they run.
        seconds: for each way.
        least, most: bounds of the number of repeats.
        before: called before each call, outside the measured time.
        seen: called with each way's name and first result.
    """
    rows: dict[str, Row] = {}
    counts: dict[str, int] = {}
    for name, way in ways.items():
        try:
            before()
            seen(name, way())
            rows[name], alone = _second_call(way, device, before)
            counts[name] = max(least, min(most, int(seconds / max(alone, 1e-9))))
        except Exception as error:
            rows[name] = {"failed": reason(error)}
            print(f"    {name}: {rows[name]['failed']}", flush=True)
        gc.collect()
    timers: dict[str, list[_Timer]] = {name: [] for name in counts}
    rounds = max(counts.values(), default=0)
    wipe = torch.empty(1 << 28 if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    for i in range(rounds):
        for name, count in counts.items():
            if (i + 1) * count // rounds == i * count // rounds or "failed" in rows[name]:
                continue  # a way with fewer repeats takes part in rounds spread over all of them
            try:
                before()
                wipe.zero_()
                with _Timer(device) as timer:
                    ways[name]()
                timers[name].append(timer)
            except Exception as error:
                rows[name] = {"failed": reason(error)}
    synchronise(device)
    for name, list_ in timers.items():
        if "failed" not in rows[name]:
            rows[name] |= _spread([timer.ms() for timer in list_])
    return rows


def _second_call(way: Way, device: torch.device, before: Callable[[], None]) -> tuple[Row, float]:
    before()
    synchronise(device)
    held = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    way()
    synchronise(device)
    took = time.perf_counter() - start
    peak = (torch.cuda.max_memory_allocated(device) - held) / 2**20 if device.type == "cuda" else None
    return {"MiB": peak}, took


def _spread(ms: list[float]) -> Row:
    low, middle, high = statistics.quantiles(ms, n=4) if len(ms) > 1 else ms * 3
    del middle
    return {"ms": statistics.median(ms), "low": low, "high": high, "repeats": len(ms)}


class _Timer:
    """Milliseconds of a block: events on a GPU, the wall clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self.ends: list[float] = []

    def _mark(self, which: int) -> None:
        if self.events:
            self.events[which].record()
        else:
            self.ends.append(time.perf_counter())

    def __enter__(self) -> _Timer:
        self._mark(0)
        return self

    def __exit__(self, *_: object) -> None:
        self._mark(1)

    def ms(self) -> float:
        """After the device was waited for."""
        return self.events[0].elapsed_time(self.events[1]) if self.events else 1e3 * (self.ends[1] - self.ends[0])


def wall_and_device(way: Way, device: torch.device, calls: int = 20) -> Row:
    """``wall ms`` of a call that is waited for (median), and ``device ms``, the sum of its kernels (profiler)."""
    way()
    times = []
    for _ in range(calls):
        synchronise(device)
        start = time.perf_counter()
        way()
        synchronise(device)
        times.append(1e3 * (time.perf_counter() - start))
    row: Row = {"wall ms": statistics.median(times)}
    if device.type == "cuda":
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in range(calls):
                way()
            synchronise(device)
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        row["device ms"] = sum(e.time_range.elapsed_us() for e in kernels) / calls / 1e3
        row["kernels"] = len(kernels) / calls
    return row


def profiled(way: Way, device: torch.device, calls: int = 3) -> str:
    """A table of the kernels (on a CPU: operators) that so many calls spend their time in."""
    way()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    synchronise(device)
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(calls):
            way()
        synchronise(device)
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return f"{calls} calls\n{profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=80)}\n"


def peaks(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """What this device reaches: TB/s of a copy (bytes read and written) and TFLOP/s of a large matrix product."""
    n = 8192 if device.type == "cuda" else 512
    x = torch.randn(n, n, device=device, dtype=dtype)
    y, out = torch.randn_like(x), torch.empty_like(x)
    source = torch.empty(1 << (31 if device.type == "cuda" else 24), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    ways = {"copy": lambda: target.copy_(source), "product": lambda: torch.mm(x, y, out=out)}
    rows = in_turns(ways, device, seconds=0.2)
    return {
        "copy TB/s": 2 * source.numel() / rows["copy"]["ms"] / 1e9,
        "product TFLOP/s": 2 * n**3 / rows["product"]["ms"] / 1e9,
    }
