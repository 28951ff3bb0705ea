"""Provenance of a run: versions, machine and git commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from troll.trl.robust import fingerprint


def versions() -> dict[str, str]:
    """Versions of Python, troll and the packages that affect training or load its data."""
    return fingerprint.versions((*fingerprint.PACKAGES, "datasets"))


def machine() -> dict[str, Any]:
    """Processor, memory and GPU."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "platform": platform.platform(terse=True),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(memory / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpus": torch.cuda.device_count(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the working directory and whether it has changes; None outside a repository."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
