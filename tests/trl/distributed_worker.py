"""Trains case after case on all processes of a launch: ``torchrun distributed_worker.py FOLDER ddp|fsdp CASE...``.

``train`` does the same on a single process. Whatever the number of processes, an update is made on the same twelve
completions. A script writes them, as a function of prompt, row and step; and since every update takes all of them, the
order in which each process shuffles its own does not matter. A group has four completions: on two processes with six
rows each, the second group is on both.
"""

from __future__ import annotations

import faulthandler
import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import tiny_models
import torch
import trl_cases
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from troll.trl import TROLLTrainer
from troll.trl import passes as scoring

# transformers 5.10 resumes on several CPUs with map_location="cpu:0", which torch does not know
torch.serialization.register_package(
    100, lambda _: None, lambda storage, location: storage if location == "cpu:0" else None
)

ROWS = 12
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

DEFAULTS: dict[str, Any] = {
    # Plain gradient descent, and no clip of the gradient: its scale shows in the weights, which Adam and a clip would
    # hide, and rounding is not amplified where the gradient is nearly zero, as by Adam.
    "optim": "sgd",
    "learning_rate": 0.05,  # about half of the tokens are projected, here and in the cases below
    "max_grad_norm": 1e9,
    # Every update takes the whole rollout. Two rollouts, the second cut short.
    "updates_per_generation": None,
    "steps_per_generation": 1,
    "num_iterations": 4,
    "max_steps": 6,
}
UNTIED = {"tie_word_embeddings": False}
CUT = {"script": "late rows are cut off", "mask_truncated_completions": True, "model": UNTIED}
CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss_type": "grpo", "learning_rate": 0.1, "model": UNTIED},
    "bnpo": {"loss_type": "bnpo", "learning_rate": 0.2, "script": "equal"},  # TRL averages per process
    "dr_grpo": {"loss_type": "dr_grpo", "learning_rate": 0.1},
    "luspo": {"loss_type": "luspo", "learning_rate": 0.01, "importance_sampling_level": "sequence"},
    "floor": {"tail": "floor", "learning_rate": 0.002},
    "accumulated": {"gradient_accumulation_steps": 2, "steps_per_generation": 2},
    "clipped gradient": {"max_grad_norm": 0.5, "learning_rate": 0.3},
    "measured clip": {"trust_region": "clip", "measure_kl": True, "learning_rate": 0.1},
    "estimator dr_grpo": {"advantage_estimator": "dr_grpo", "learning_rate": 0.3},
    "estimator rloo": {"advantage_estimator": "rloo", "learning_rate": 0.3},
    "estimator reinforce_pp": {"advantage_estimator": "reinforce_pp"},
    "estimator reinforce_pp_baseline": {"advantage_estimator": "reinforce_pp_baseline"},
    "cut dapo": {**CUT, "learning_rate": 0.1},
    "cut grpo": {**CUT, "learning_rate": 0.15, "loss_type": "grpo"},
    "cut reinforce_pp": {**CUT, "advantage_estimator": "reinforce_pp"},
    "checkpointed": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "bf16 measured clip": {"bf16": True, "trust_region": "clip", "measure_kl": True},
    "bf16, outputs rounded": {"bf16": True},
    "network bound": {
        "kl_bound_schedule": "network target=0.15",
        "regression_coef_schedule": "projected target=0.6",
    },
    "projected bound": {"kl_bound_schedule": "projected target=0.4"},
    "entropy bound": {"kl_bound_schedule": "entropy"},
    "sequence bound": {"kl_bound_schedule": "sequence limit=0.1"},
    "scaled pull": {"scale_regression": True, "advantage_estimator": "rloo", "learning_rate": 0.3},
    "resumed": {"optim": "adamw_torch", "learning_rate": 1e-2, "max_grad_norm": 1.0},
}


class Scripted(TROLLTrainer):
    """Reads completions off a script, and keeps what it trains with."""

    script: str
    rollouts: list[dict[str, torch.Tensor]]
    ratios: list[list[float]]
    """Of each update the smallest and largest ratio that TRL multiplies with an advantage on this process."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        first = self.accelerator.process_index * len(prompt_ids)
        step = self.state.global_step
        return [self._completion(f"{ids}/{row}/{step}", row) for row, ids in enumerate(prompt_ids, first)], None

    def _completion(self, seed: str, row: int) -> list[int]:
        """At most eight tokens. Late rows are shorter: a process that has them alone pads to another width."""
        draw = random.Random(seed)
        late = row >= ROWS // 2
        cut = self.script == "late rows are cut off" and late
        length = 6 if self.script == "equal" else 7 if cut else draw.randint(2, 4 if late else 7)
        ids: list[int] = self.processing_class("".join(draw.choices(LETTERS, k=length)))["input_ids"]
        return ids if cut else [*ids, self.processing_class.eos_token_id]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.rollouts.append({name: output[name].clone() for name in ("advantages", "completion_mask")})
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **named: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **named)
        self._scored = result[0].detach()
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        ratio = (self._scored - inputs["old_per_token_logps"]).exp()[inputs["completion_mask"].bool()]
        self.ratios.append([ratio.min().item(), ratio.max().item()] if len(ratio) else [])
        return loss


def build(folder: Path, case: str, processes: int = 1, sharded: bool = False, **changes: Any) -> Scripted:
    """The trainer of a case."""
    settings = {**DEFAULTS, **CASES[case], **changes}
    script = settings.pop("script", "mixed")
    model, tokenizer = tiny_models.build("dense", **settings.pop("model", {}))
    batch = ROWS // processes // settings["steps_per_generation"]
    if sharded:
        settings |= {"fsdp": True, "fsdp_config": {"version": 2}}
    args = trl_cases.config(folder, per_device_train_batch_size=batch, **settings)
    if sharded:
        # Accelerate 1.15 shards on accelerators alone, and on CPU falls back to DDP without a word. Told that this is
        # an accelerator it shards here too, over gloo; the rest is its own FSDP2.
        assert PartialState().distributed_type == DistributedType.MULTI_CPU
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = Scripted(model, trl_cases.lower_case, args, trl_cases.prompts(), processing_class=tokenizer)
    trainer.script, trainer.rollouts, trainer.ratios = script, [], []
    return trainer


def outcome(trainer: Scripted) -> dict[str, Any]:
    """What the tests compare. All processes must ask for it: sharded weights are gathered."""
    parameters = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return {
        "weights": {n: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for n, p in parameters.items()},
        "sharded": [name for name, p in parameters.items() if isinstance(p, DTensor)],
        "log": trainer.state.log_history,
        "rollouts": trainer.rollouts,
        "ratios": trainer.ratios,
        "logged_advantages": list(trainer._logs["advantages"]),
    }


def train(folder: Path, case: str, processes: int = 1, sharded: bool = False) -> dict[str, Any]:
    """Train a case on this process, which may be one of several."""
    trainer = build(folder, case, processes, sharded)
    start = trl_cases.weights(trainer)
    if case == "bf16, outputs rounded":
        with mock.patch.object(scoring, "_exact", lambda returned, exact: returned.to(exact.dtype)):
            trainer.train()
    else:
        trainer.train()
    return {**outcome(trainer), "start": start}


def resume(folder: Path, case: str, processes: int, sharded: bool) -> dict[str, Any]:
    """Train, and train again from a checkpoint in the middle of the first rollout, on a model with other weights."""
    saves = {"save_strategy": "steps", "save_steps": 2}
    straight = build(folder, case, processes, sharded, **saves)
    straight.train()
    checkpoint = folder / "checkpoint-2"
    again = build(folder / "again", case, processes, sharded, model={"seed": 1})
    again.train(resume_from_checkpoint=str(checkpoint))
    files = sorted(file.name for file in checkpoint.iterdir())
    return {**outcome(again), "straight": outcome(straight), "files": files}


def main(folder: Path, strategy: str, cases: list[str]) -> None:
    """Write what each case comes to on this process."""
    faulthandler.dump_traceback_later(900, exit=True)  # whatever hangs
    state = PartialState(cpu=True, timeout=timedelta(minutes=5))
    rank, processes, sharded = state.process_index, state.num_processes, strategy == "fsdp"
    for case in cases:
        run = resume if case == "resumed" else train
        torch.save(run(folder / case, case, processes, sharded), folder / f"{case}.{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
