"""``python -m verl.trainer.main_ppo`` on a tiny byte model, in a Ray cluster of its own that ends with the test."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet
import tiny_models

HERE = Path(__file__).parent
MARK = "VERL_SUPPORT_RUN"
WORKER = "ray::WorkerDict"  # title of a process with a rank of actor, critic and reference

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    "PYTHONHASHSEED": "0",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_USE_EXTERNAL_MODULES": "verl_support.cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "TQ_NUM_THREADS": "1",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}

RANKS = 2
SETTINGS: dict[str, Any] = {
    "data.train_batch_size": 8,
    "data.max_prompt_length": 32,
    "data.max_response_length": 8,
    "data.seed": 0,
    "data.dataloader_num_workers": 0,
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16,
    "actor_rollout_ref.actor.optim.lr": 1e-2,
    "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": "fp32",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 16,
    "actor_rollout_ref.rollout.name": "tiny",
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": RANKS,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 16,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "reward.num_workers": 1,
    "reward.custom_reward_function.path": str(HERE / "lower_case.py"),
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "trainer.device": "cpu",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": RANKS,
    "trainer.logger": ["console", "file"],
    "trainer.val_before_train": False,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.resume_mode": "disable",
    "trainer.total_epochs": 100,
    "trainer.total_training_steps": 2,
    "ray_kwargs.ray_init.num_cpus": 16,
    "+ray_kwargs.ray_init.num_gpus": RANKS,
    "+ray_kwargs.ray_init.include_dashboard": False,
    "hydra.run.dir": ".",
    "hydra.output_subdir": None,
}


@dataclass
class Run:
    """A run in progress or ended: its process, what it printed and what it logged."""

    folder: Path
    mark: str
    process: subprocess.Popen[bytes]

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of every step that verl logged so far."""
        log = self.folder / "metrics.jsonl"
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        return [json.loads(line)["data"] for line in lines]

    def logged(self, name: str) -> list[float]:
        return [step[name] for step in self.steps]

    def processes(self) -> list[psutil.Process]:
        """Every process of this run that is alive, wherever Ray has put it."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def workers(self) -> list[psutil.Process]:
        """The processes that hold a rank of the model."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(WORKER):
                    found.append(process)
        return found

    def wait_for_step(self, step: int, timeout: float) -> None:
        end = time.monotonic() + timeout
        while len(self.steps) < step:
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"no step {step} after {timeout} s:\n{self.output[-6000:]}")
            time.sleep(0.2)

    def wait(self, timeout: float) -> int:
        """The exit code. A run that takes longer fails the test: it hangs."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"main_ppo still runs after {timeout} s:\n{self.output[-6000:]}") from None


def write_case(folder: Path, seed: int = 0) -> dict[str, Any]:
    """Model, tokenizer and prompts in the folder, as settings."""
    model = tiny_models.save("dense", folder / "model", seed=seed)
    rows = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": f"say {i}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i in range(64)
    ]
    data = folder / "prompts.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(rows), data)
    return {
        "actor_rollout_ref.model.path": model,
        "critic.model.path": model,
        "data.train_files": str(data),
        "data.val_files": str(data),
    }


def _rendered(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(_rendered, value))}]"
    return str(value)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; Ray's own processes follow main_ppo in the same way


@contextmanager
def started(folder: Path, *words: str, settings: Mapping[str, Any] | None = None) -> Iterator[Run]:
    """main_ppo with hydra's words (``+group=name``) and settings, which go before the ones above."""
    settings = {**SETTINGS, **write_case(folder), **(settings or {})}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    command += [f"{key}={_rendered(value)}" for key, value in settings.items()]
    mark = uuid.uuid4().hex
    ray_folder = tempfile.mkdtemp(prefix="ray")  # a short path: sockets are made in it
    environment = {**os.environ, **ENVIRONMENT, MARK: mark, "RAY_TMPDIR": ray_folder, "RAY_AUTH_TOKEN": mark}
    environment["VERL_FILE_LOGGER_PATH"] = str(folder / "metrics.jsonl")
    environment.pop("RAY_ADDRESS", None)
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    run = Run(folder, mark, process)
    try:
        yield run
    finally:
        process.kill()
        process.wait()
        _end(run)
        shutil.rmtree(ray_folder, ignore_errors=True)


def _end(run: Run) -> None:
    """Kill what is left of the run, until nothing is."""
    for _ in range(50):
        left = run.processes()
        if not left:
            return
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)
    raise AssertionError(f"processes of the run survive: {left}")


def finished(folder: Path, *words: str, timeout: float = 300, settings: Mapping[str, Any] | None = None) -> Run:
    """Run main_ppo to its end and expect it to succeed."""
    with started(folder, *words, settings=settings) as run:
        code = run.wait(timeout)
    assert code == 0, f"main_ppo ended with {code}:\n{run.output[-6000:]}"
    return run
