"""``troll train`` on programs: a tiny model, MBPP's format, the real sandbox, two updates."""

from __future__ import annotations

import json
import string

import pytest
import torch
from cli_cases import lines, shared, train, weights
from safetensors.torch import load_file

from troll.rewards.judge import CodeWorker, Job
from troll.rewards.problems import read_problem

NAMES = f"globals().update(dict.fromkeys({string.ascii_letters!r}, 1))"  # a letter is a program that runs to its end
MBPP = [
    {
        "task_id": n,
        "prompt": f"Write any program, number {n}.",
        "code": "pass",
        "test_imports": [NAMES],
        "test_list": ["assert 1 + 1 == 2", f"assert {n} * a == {n}"],
    }
    for n in range(6)
]


@pytest.mark.slow
def test_two_updates_on_programs_in_the_sandbox(tmp_path):
    data = tmp_path / "mbpp.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in MBPP))
    run = train(
        tmp_path / "runs", "--task", "mbpp", "--data", str(data), "--max_steps", "2", "--updates_per_generation", "2",
        "--eval_size", "2", "--eval_steps", "2", "--max_completion_length", "1", "--num_generations", "8",
        "--per_device_train_batch_size", "16", reward=None,
    )  # fmt: skip
    assert run.about["status"] == "finished"
    steps = [line for line in lines(run.path / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    shares = {name: value for name, value in steps[0].items() if name.startswith("code/")}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert 0 < steps[0]["reward"] < 1
    assert shares["code/pass"] == pytest.approx(steps[0]["reward"])
    assert "code/infra_error" not in shares
    before, after = load_file(next((shared() / "model").glob("*.safetensors"))), weights(run)
    assert any(not torch.equal(before[name], after[name]) for name in after)
    samples = lines(run.path / "samples.jsonl")
    assert samples
    worker = CodeWorker()
    for sample in samples:  # what is rewarded is what the model wrote
        text = "".join(sample["tokens"])
        found = worker.do(Job(text, read_problem(MBPP[0]["test_list"], NAMES)))
        assert sample["reward"] == float(found.status == "pass")
        assert not (text.isascii() and text.isalnum()) or sample["reward"] == 1
    worker.end()
