"""How fast the kernels are: troll against PyTorch, TRL's fused head, Liger and TROLL as its paper describes it.

    python benchmarks/kernels/kernels.py --output kernels.json              on a GPU; under four minutes on an H200
    python benchmarks/kernels/kernels.py --device cpu --output cpu.json     small sizes
    python benchmarks/kernels/kernels.py --only selection,loss --sizes 8192x151936x2560
    python benchmarks/kernels/kernels.py --table kernels.json --into benchmarks/kernels/README.md

Everything is checked before it is timed; if a number of ours is wrong, the run says which and ends without any time,
with exit code 1. A way that fails to run is reported as failed. The JSON is written after every part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import parts
import tables
import torch
from measure import peaks, reason
from problem import Size

SIZES = {
    "cuda": "8192x151936x2560,8192x49152x576,8192x262144x1152",
    "cpu": "128x2053x64",
}
PARTS = (*parts.TIMES, "growth")


def main() -> int:
    """Check, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--impl", help="of troll's fast ways: triton on a GPU, torch on a CPU")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    parser.add_argument("--sizes", help="NxVxH or NxVxHxK, with commas between them; growth starts from the first")
    parser.add_argument("--along", help="growth along this alone: K=32,128,256")
    parser.add_argument("--seconds", type=float, default=1.0, help="of repeats for each way")
    parser.add_argument("--limit", type=float, default=220.0, help="seconds after which no part or point is begun")
    parser.add_argument("--check", action="store_true", help="check and time nothing")
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--profile", type=Path, help="also write here which kernels the time of the first size goes to")
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the tables of an earlier run, and no more")
    parser.add_argument("--into", type=Path, help="with --table: put them between the marks of this file")
    options = parser.parse_args()
    if options.table:
        text = tables.markdown(json.loads(options.table.read_text()))
        if options.into:
            tables.put(text, options.into)
        else:
            print(text)
        return 0

    device = torch.device(options.device)
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only {', '.join(sorted(unknown))}: {', '.join(PARTS)}")
    sizes = [Size.parse(x) for x in (options.sizes or SIZES[device.type]).split(",")]
    impl = options.impl or ("triton" if device.type == "cuda" else "torch")
    run = parts.Run(device, getattr(torch, options.dtype), impl, options.seconds, options.limit)
    results = run.results
    results |= {**facts(device), "dtype": options.dtype, "checks": run.checks.lines, "parts": {}}

    def write() -> None:
        results["seconds"] = run.spent
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n")

    print(f"{results['device']}, torch {results['torch']}, Triton {results['triton']}", flush=True)
    results["peaks"] = peaks(device, run.dtype)
    write()
    for size, todo in plan(sizes, wanted):
        problem = run.make(size)
        for part in todo:
            print(f"{run.spent:5.0f} s  check {part}, {size}", flush=True)
            run.checks.part = part
            try:
                parts.CHECKS[part](run, problem)
            except Exception as error:
                results.setdefault("failed", []).append(f"check of {part}, {size}: {reason(error)}")
                print(f"    failed: {reason(error)}", flush=True)
        del problem
        write()
    if run.checks.red or options.check:
        return end(results, run.checks.red, write)
    for size, todo in plan(sizes, wanted):
        problem = run.make(size)
        for part in todo:
            if run.spent > run.limit:
                results.setdefault("skipped", []).append(f"{part}, {size}: out of time")
                continue
            print(f"{run.spent:5.0f} s  time {part}, {size}", flush=True)
            try:
                rows = run.rows(part, size, parts.TIMES[part](run, problem))
                found = {"size": vars(size), "data": problem.facts(), "ways": rows}
                results["parts"].setdefault(part, {})[str(size)] = found
            except Exception as error:
                results.setdefault("failed", []).append(f"{part}, {size}: {reason(error)}")
                print(f"    failed: {reason(error)}", flush=True)
            write()
        del problem
    if options.profile:
        print(f"{run.spent:5.0f} s  profile", flush=True)
        options.profile.write_text(parts.profiles(run, sizes[0]))
    if "growth" in wanted:
        print(f"{run.spent:5.0f} s  growth", flush=True)
        sweeps = parts.SWEEPS[device.type]
        if options.along:
            letter, values = options.along.split("=")
            sweeps = {letter: tuple(map(int, values.split(",")))}
        parts.growth(run, sizes[0], sweeps, write)
    if run.checks.red:
        return end(results, run.checks.red, write)
    write()
    print("\n" + tables.markdown(results))
    broken = [x for x in tables.failures(results) if "troll" in x]
    return 1 if broken or results.get("failed") else 0


def plan(sizes: list[Size], wanted: list[str]) -> list[tuple[Size, list[str]]]:
    """The parts of each size; the projection depends on N and K alone and is done once."""
    return [
        (size, [x for x in parts.TIMES if x in wanted and (i == 0 or x != "projection")])
        for i, size in enumerate(sizes)
    ]


def end(results: dict[str, Any], red: list[str], write: Any) -> int:
    """Say what is wrong, if anything is, and leave no time behind."""
    results["parts"], results["growth"], results["red"] = {}, {}, red
    write()
    print("\nRED, no time is reported:\n" + "\n".join(f"  {x}" for x in red) if red else "\nall checks passed")
    return 1 if red else 0


def facts(device: torch.device) -> dict[str, Any]:
    """The machine and the versions."""
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name, package in (("triton", "triton"), ("trl", "trl"), ("liger", "liger-kernel"), ("troll", "troll-rl")):
        found[name] = None
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(package)
    return found


if __name__ == "__main__":
    sys.exit(main())
