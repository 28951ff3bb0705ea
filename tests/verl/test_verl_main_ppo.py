"""verl's own ``main_ppo`` with the trust region: V1 trainer, Ray, TransferQueue, two ranks of FSDP2 over gloo."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from trl.trainer.utils import nanstd
from verl_support import runs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed")]

TROLL = ("hydra.searchpath=[pkg://troll.verl.configs]", "+trust_region=troll")
BOUND = 0.05
FOUR_UPDATES = {
    "data.train_batch_size": 16,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.policy_loss.kl_bound": BOUND,
}
CRITIC = {
    "algorithm.adv_estimator": "gae",
    "critic.strategy": "fsdp2",
    "critic.optim.lr": 1e-2,
    "critic.ppo_micro_batch_size_per_gpu": 16,
    "critic.model.enable_gradient_checkpointing": False,
    "+critic.model.override_config.attn_implementation": "sdpa",
    "+critic.fsdp.mixed_precision.param_dtype": "fp32",
}
SLOW_SERVER = {  # one batch at a time, in three seconds: the next is interrupted midway
    "actor_rollout_ref.rollout.max_num_seqs": 128,
    "+actor_rollout_ref.rollout.engine_kwargs.tiny.pause": 0.4,
}
HANGS = 600  # seconds after which a run counts as hanging; one needs 160 s of processor time, most of it for imports


def check_trust_region(run: runs.Run) -> None:
    """verl's log has our numbers, they are finite, and they are those of a trust region that acts where it must.

    A step may have nothing to project: how far an update goes depends on what was sampled, and on who is served first.
    """
    for step in run.steps:
        assert all(math.isfinite(value) for name, value in step.items() if name.startswith("actor/"))
        leaves = step["actor/troll/kl_before/max"] > BOUND
        assert (step["actor/troll/projected_fraction"] > 0) == leaves
        assert step["actor/troll/kl_after/max"] <= BOUND * (1 + 1e-3)
        assert step["actor/troll/unconverged_tokens"] == 0
        assert step["actor/grad_norm"] > 0
    assert max(run.logged("actor/troll/projected_fraction")) > 0


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[runs.Run]:
    """Two ranks, a reference policy, four updates on a rollout: seven steps of a run that would go on for long."""
    settings = {**FOUR_UPDATES, "actor_rollout_ref.actor.use_kl_loss": True, "trainer.total_training_steps": 1000}
    folder = tmp_path_factory.mktemp("sync")
    settings["trainer.rollout_data_dir"] = str(folder / "rollouts")
    with runs.started(folder, *TROLL, settings=settings) as run:
        run.wait_for_step(7, HANGS)
        yield run


def test_the_trust_region_acts_and_verl_logs_it(synchronous: runs.Run) -> None:
    check_trust_region(synchronous)


def test_the_reference_policy_stays_behind(synchronous: runs.Run) -> None:
    """The old policy follows the trained one within a rollout or so; the reference does not move at all."""
    from_reference = synchronous.logged("actor/kl_loss")
    from_old = synchronous.logged("actor/troll/kl_before/mean")
    assert from_reference[-1] > 5 * from_old[-1]


def test_the_server_samples_with_the_weights_of_the_trainer(synchronous: runs.Run) -> None:
    """In fp32 two programs differ by rounding in a probability, by more than 1e-2 if an update had not arrived."""
    assert max(synchronous.logged("training/rollout_probs_diff_max")) < 1e-4


def test_the_reward_rises(synchronous: runs.Run) -> None:
    """From a tenth, what bytes at random earn."""
    rewards = synchronous.logged("critic/score/mean")
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.5


def test_the_spread_of_the_rewards_is_that_of_verls_own_rollouts(synchronous: runs.Run) -> None:
    """verl writes every completion with its score; from these, TRL's own function gives the two metrics."""
    for step in (1, 4, 7):
        dumped = synchronous.folder / "rollouts" / f"{step}.jsonl"
        rows = [json.loads(line) for line in dumped.read_text().splitlines()]
        groups: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            groups[row["uid"].rsplit("_", 2)[0]].append(row["score"])
        scores = torch.tensor(list(groups.values()))
        assert scores.shape == (16, 8)
        logged = synchronous.steps[step - 1]
        assert logged["critic/score/std"] == pytest.approx(float(nanstd(scores)), rel=1e-5)
        same = torch.isclose(nanstd(scores, dim=1), torch.zeros(16))
        assert logged["critic/score/frac_zero_std"] == float(same.float().mean())


def test_a_killed_worker_ends_the_run_with_an_error(synchronous: runs.Run) -> None:
    """Nothing waits for ever for the rank that is gone, and the one that is left trains no further.

    The worker is stopped before it is killed, for as long as verl needs to get to the other rank's next collective.
    """
    steps = len(synchronous.steps) + 1
    synchronous.wait_for_step(steps, 120)
    victim = synchronous.workers()[-1]
    victim.suspend()
    time.sleep(8)
    victim.kill()
    assert synchronous.wait(120) != 0
    assert f"pid: {victim.pid}" in synchronous.output
    assert "ActorDiedError" in synchronous.output
    assert len(synchronous.steps) == steps


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """Generation goes on while the policy is updated; PPO as it was, with a critic and GAE."""
    settings = {**FOUR_UPDATES, **CRITIC, "trainer.v1.trainer_mode": "colocate_async"}
    settings |= {"trainer.total_training_steps": 4, **SLOW_SERVER}
    return runs.finished(tmp_path_factory.mktemp("async"), *TROLL, settings=settings, timeout=HANGS)


def test_asynchronous_rollouts(asynchronous: runs.Run) -> None:
    """The old policy is the one the trainer scored with, whatever older one has sampled."""
    assert len(asynchronous.steps) == 4
    check_trust_region(asynchronous)
    stale = asynchronous.logged("training/off_policy/trajectory_staleness_worst/max")
    differs = asynchronous.logged("training/rollout_probs_diff_max")
    assert max(stale) >= 1
    assert all((difference > 1e-4) == (age > 0) for age, difference in zip(stale, differs, strict=True))


def test_gae_with_a_critic(asynchronous: runs.Run) -> None:
    """The critic learns the returns from nothing: its first values are off by one or so, returns lie in [0, 1]."""
    error = asynchronous.logged("critic/vf_loss")
    assert error[-1] < error[0] / 4
    assert all(
        math.isfinite(x) for step in asynchronous.steps for name, x in step.items() if name.startswith("critic/")
    )


def test_a_killed_agent_loop_ends_the_run_with_an_error(tmp_path: Path) -> None:
    """verl alone would wait for the rollouts of that process for ever."""
    with runs.started(tmp_path, *TROLL, settings={**FOUR_UPDATES, "trainer.total_training_steps": 1000}) as run:
        run.wait_for_step(1, HANGS)
        (victim,) = (p for p in run.processes() if "AgentLoopWorker" in "".join(p.cmdline()))
        victim.kill()
        assert run.wait(120) != 0
    assert "an agent loop worker died, so the rollouts" in run.output


def test_what_cannot_work_ends_before_ray_starts_and_says_why(tmp_path: Path) -> None:
    with runs.started(tmp_path, *TROLL, settings={"algorithm.rollout_correction.bypass_mode": True}) as run:
        assert run.wait(HANGS) != 0
    assert "the sampler would provide the old policy" in run.output
    assert "Set bypass_mode=False" in run.output
    assert "Started a local Ray instance" not in run.output
