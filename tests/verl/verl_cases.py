"""A rollout and two policies for the tests of the verl adapter: what core and TRL compute from them is the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny_models
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

B, MAX_SUPPORT, TAIL_MASS = 8, 8, 1e-3  # so few tokens that much is dropped
OLD, NEW = "old", "new"
CPU = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_MODULES": "verl_support.cpu"}
PROCESSES = [1] if torch.cuda.is_available() else [1, 2]
BACKENDS = ["fsdp2", "fsdp"] if torch.cuda.is_available() else ["fsdp2"]  # verl's FSDP1 does not run on a CPU


def save_policies(folder: Path, change: float = 0.02) -> None:
    """Two checkpoints, ``old`` and ``new``: the second is the first with noise in every weight."""
    tiny_models.save("dense", folder / OLD)
    tiny_models.save("dense", folder / NEW)
    model = AutoModelForCausalLM.from_pretrained(folder / OLD, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(change * torch.randn_like(weight))
    model.save_pretrained(folder / NEW)


def rollout() -> dict[str, list[Tensor]]:
    """Sequences of all lengths; in some, tokens in the middle do not count; in the last, none does."""
    generator = torch.Generator().manual_seed(3)

    def some(n: int, low: int, high: int) -> Tensor:
        return torch.randint(low, high, (n,), generator=generator)

    lengths = some(B, 2, 7)
    lengths[0] = 1  # so the very first position counts
    prompts = [some(int(n), 10, 250) for n in lengths]
    responses = [some(int(n), 10, 250) for n in some(B, 2, 10)]
    if sum(map(len, prompts + responses)) % 2 == 0:
        prompts[1] = prompts[1][1:]  # an odd number of tokens: two processes cannot share them without padding
    masks = [torch.ones_like(x) for x in responses]
    masks[1][1] = 0
    masks[4][:2] = 0
    masks[-1][:] = 0
    normal = [torch.randn(len(x), generator=generator) for x in responses]
    return {
        "prompts": prompts,
        "responses": responses,
        "loss_mask": masks,
        "response_mask": [x.clone() for x in masks],
        "input_ids": [torch.cat(pair) for pair in zip(prompts, responses, strict=True)],
        "position_ids": [torch.arange(len(p) + len(r)) for p, r in zip(prompts, responses, strict=True)],
        "advantages": normal,
        "rollout_is_weights": [0.5 + torch.rand(len(x), generator=generator) for x in responses],
        "ref_log_prob": [-6 + torch.randn(len(x), generator=generator) for x in responses],
    }


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def completion_logits(model: Any, batch: dict[str, list[Tensor]]) -> Tensor:
    """[B, R, V] logits that predict the completions, each sequence alone: nothing is packed or padded."""
    rows = []
    for ids, prompt in zip(batch["input_ids"], batch["prompts"], strict=True):
        rows.append(model(ids[None]).logits[0, len(prompt) - 1 : -1])
    return padded(rows)


def launch(script: str, folder: Path, processes: int) -> None:
    """Run a worker of these tests on that many processes; without a GPU, on the tests' CPU platform."""
    here = Path(__file__).parent
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"),
            *(str(here / script), str(folder)),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(here), str(here.parents[1] / "examples" / "trl"), os.environ.get("PYTHONPATH", "")]
            ),
            "OMP_NUM_THREADS": "1",
            **({} if torch.cuda.is_available() else CPU),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]


def join() -> None:
    """What every process of a worker begins with."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
