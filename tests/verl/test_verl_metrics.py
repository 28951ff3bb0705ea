"""One metric schema: verl logs the names that TRL logs, with the same meaning; every difference has a reason."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_cases
import verl_cases
from tensordict import TensorDict
from trl.trainer.utils import nanstd
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

import troll
from troll.lab.verl.metrics import NAMES
from troll.objective import constrain, ratios, summarise, token_stats
from troll.verl import TrollPolicyLossConfig
from troll.verl.driver import reward_spread
from troll.verl.loss import PREFIX, TrustRegionLoss
from troll.verl.transport import OLD_POLICY, Positions, write

V, K, BOUND = 260, 8, 0.02
STORED = Path(__file__).parents[1] / "lab" / "report" / "rules" / "runs" / "verl-troll"

ONLY_TRL = {
    "completions/mean_terminated_length": "verl logs lengths of all completions alone",
    "completions/min_terminated_length": "verl logs lengths of all completions alone",
    "completions/max_terminated_length": "verl logs lengths of all completions alone",
    "rewards/lower_case/mean": "verl logs the sum of the rewards, and the single ones on held-out problems alone",
    "rewards/lower_case/std": "verl logs the sum of the rewards, and the single ones on held-out problems alone",
    "step_time": "the parts of a step are logged as time/…",
    "epoch": "the trainer's progress, not part of metrics.jsonl",
}
ONLY_VERL = {
    "seconds": "written by the recorder of a run, in both engines",
    "tokens_per_second": "written by the recorder of a run, in both engines",
    "time/generate": "written by the recorder of a run, in both engines",
    "time/score": "written by the recorder of a run, in both engines",
    "time/update": "written by the recorder of a run; TRL's has forward, backward and optimizer instead",
    "time/evaluate": "written by the recorder of a run, in both engines",
    "time/other": "written by the recorder of a run, in both engines",
}


# ------------------------------------------------------------------ a rollout, in micro-batches of two processes


class Rollout:
    """Logits of two policies for the tokens of ``verl_cases.rollout``, and what each sequence has in a batch."""

    def __init__(self) -> None:
        self.fields = verl_cases.rollout()
        del self.fields["ref_log_prob"], self.fields["rollout_is_weights"]
        self.fields["old_log_probs"] = [torch.zeros(len(x)) for x in self.fields["responses"]]
        generator = torch.Generator().manual_seed(8)
        lengths = [len(x) for x in self.fields["input_ids"]]
        self.old = [2 * torch.randn(n, V, generator=generator) for n in lengths]
        self.new = [x + 0.3 * torch.randn(x.shape, generator=generator) for x in self.old]
        self.tokens = sum(int(x.sum()) for x in self.fields["loss_mask"])

    def batch(self, sequences: list[int], processes: int) -> tuple[Any, torch.Tensor]:
        """A micro-batch as verl has it, with the old policy in it, and its logits [1, T, V]."""
        columns = {
            name: torch.nested.as_nested_tensor([rows[i] for i in sequences], layout=torch.jagged)
            for name, rows in self.fields.items()
        }
        data = TensorDict(columns, batch_size=len(sequences))
        positions = Positions.of(data)
        old = torch.cat([self.old[i] for i in sequences])
        data[OLD_POLICY] = write(troll.sparsify(old, positions.sampled, K, loss_mask=positions.counted), positions)
        tu.assign_non_tensor(
            data, dp_size=processes, batch_num_tokens=self.tokens, global_batch_size=len(self.fields["prompts"])
        )
        return data, torch.cat([self.new[i] for i in sequences])[None]

    def expected(self, sequences: list[int], level: Any) -> dict[str, torch.Tensor]:
        """The metrics of the core over whole sequences."""
        parts = [len(prompt) - 1 for prompt in self.fields["prompts"]]
        old, new = (verl_cases.padded([rows[i][parts[i] : -1] for i in sequences]) for rows in (self.old, self.new))
        mask = verl_cases.padded([self.fields["loss_mask"][i] for i in sequences]).bool()
        sampled = verl_cases.padded([self.fields["responses"][i] for i in sequences])
        policy = troll.sparsify(old, sampled, K, loss_mask=mask)
        proposal = troll.restrict(new, policy, loss_mask=mask)
        step = constrain(proposal, policy, BOUND, mask, tail="bucket")
        ratio = ratios(step.log_ratio, mask, level)
        return summarise(token_stats(proposal, policy, ratio, step.projection, step.regression), mask)


def through_verl(rollout: Rollout, shares: list[list[list[int]]], level: str) -> dict[str, float]:
    """Processes × micro-batches × sequences → what verl makes of the metrics of an update."""
    everyones: list[dict[str, Any]] = []
    for share in shares:
        metrics: dict[str, Any] = {}
        for sequences in share:
            data, logits = rollout.batch(sequences, len(shares))
            actor = FSDPActorConfig(
                strategy="fsdp2",
                ppo_micro_batch_size_per_gpu=2,
                rollout_n=1,
                policy_loss=TrollPolicyLossConfig(kl_bound=BOUND, importance_sampling_level=level),
            )
            loss = TrustRegionLoss(
                partial(ppo_loss, config=actor), K, lambda x, old, _: troll.restrict(x, old), lambda x: x
            )
            offsets = data["input_ids"].offsets()
            output = {
                name: torch.nested.nested_tensor_from_jagged(x[0], offsets)
                for name, x in loss(student_logits=logits, data=data).items()
            }
            for name, value in loss(model_output=output, data=data)[1].items():
                if isinstance(value, Metric):
                    metrics.setdefault(name, value.init_list()).append(value)
        everyones.append(metrics)
    return {
        name.removeprefix(PREFIX): float(Metric.aggregate_dp([metrics[name] for metrics in everyones]))
        for name in everyones[0]
        if name.startswith(PREFIX)
    }


SHARES = [[[0, 1], [2, 3]], [[4, 5, 6], [7]]]  # nothing counts in the last sequence


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_metrics_of_an_update_are_those_of_the_core(level: str) -> None:
    """Exact over micro-batches and processes, except where the docstring of ``_metrics`` says otherwise."""
    rollout = Rollout()
    got = through_verl(rollout, SHARES, level)
    whole = rollout.expected([*range(8)], level)
    assert got.keys() == whole.keys()
    assert 0 < whole["projected_fraction"] < 1
    batches = [rollout.expected(sequences, level) for share in SHARES for sequences in share]
    for name, value in got.items():
        expected = float(whole[name])
        if name.endswith("/p99") or name == "solver_steps/mean":
            expected = sum(float(batch[name]) for batch in batches) / len(batches)
            assert expected > 0
        elif name in ("sequence_kl_before", "sequence_kl_after"):
            expected *= 7 / 8  # verl divides by all sequences, also by those in which nothing counts
        assert value == pytest.approx(expected, rel=1e-5, abs=1e-7), name


def test_unconverged_tokens_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over micro-batches and processes, although verl averages over processes."""
    from troll.verl import loss

    def nothing_converges(*args: Any) -> Any:
        stats = token_stats(*args)
        return {**stats, "unconverged": torch.ones_like(stats["unconverged"])}

    monkeypatch.setattr(loss, "token_stats", nothing_converges)
    rollout = Rollout()
    assert through_verl(rollout, SHARES, "token")["unconverged_tokens"] == rollout.tokens


# ------------------------------------------------------------------ the spread of the rewards


def keyed(groups: list[list[float]]) -> dict[str, float]:
    """With the keys of TransferQueue: prompt, session, output."""
    return {f"a_b{i}_{j}_0": score for i, group in enumerate(groups) for j, score in enumerate(group)}


@pytest.mark.parametrize(
    ("groups", "equal"),
    [
        ([[0, 1, 1, 0], [1, 1, 1, 1]], 0.5),
        ([[0.1] * 3, [0.2] * 3], 1.0),
        ([[0, 1], [2, 3], [0.5, 0.5 + 1e-6]], 0.0),
        ([[1, 1, 1], [0, 1]], 0.6),  # of the completions, as in TRL
        ([[1, 1], [0]], 1.0),  # a group of one is not compared
    ],
)
def test_the_spread_of_rewards_is_TRLs(groups: list[list[float]], equal: float) -> None:
    found = reward_spread(keyed(groups))
    every = torch.tensor([score for group in groups for score in group], dtype=torch.float64)
    assert found["critic/score/std"] == pytest.approx(float(nanstd(every)), rel=1e-6)  # its correction is fp32
    assert found["critic/score/frac_zero_std"] == equal
    rows = torch.tensor([group for group in groups if len(group) == len(groups[0])], dtype=torch.float64)
    if len(rows) == len(groups):
        assert equal == float(torch.isclose(nanstd(rows, dim=1), torch.zeros(1).double()).float().mean())


def test_without_groups_there_is_no_fraction() -> None:
    assert reward_spread(keyed([[0.0], [1.0]])) == {"critic/score/std": pytest.approx(0.5**0.5)}
    assert reward_spread(keyed([[0.0]])) == reward_spread({}) == {}


def test_of_a_session_the_last_output_counts() -> None:
    scores = {"p_0_0": 5.0, "p_0_10": 1.0, "p_0_9": 7.0, "p_1_0": 1.0}
    assert reward_spread(scores) == {"critic/score/std": 0.0, "critic/score/frac_zero_std": 1.0}


# ------------------------------------------------------------------ names


def test_verl_logs_what_TRL_logs(tmp_path: Path) -> None:
    """The names of a run's metrics.jsonl, from a run with verl and from TRL; each difference is in a table."""
    trainer = trl_cases.trainer(tmp_path, max_steps=2, logging_steps=1)
    trainer.train()
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    by_trl = {name for line in lines for name in line} | {"step"}
    stored = [json.loads(line) for line in (STORED / "metrics.jsonl").read_text().splitlines()]
    by_verl = {name for line in stored if "loss" in line for name in line}
    by_verl |= {NAMES[name] for name in reward_spread(keyed([[0.0, 1.0]]))}  # the stored run is older than these two
    assert by_trl - by_verl == ONLY_TRL.keys()
    assert by_verl - by_trl == ONLY_VERL.keys()
    ours = {f"troll/{name}" for name in through_verl(Rollout(), SHARES, "token")}
    assert ours == {name for name in by_verl if name.startswith("troll/")}  # the stored run is not of older code
    assert ours == {name for name in by_trl if name.startswith("troll/")}
    assert {"troll/kl_before/p99", "troll/kl_after/p99", "troll/ratio/p99", "troll/unconverged_tokens"} <= ours
