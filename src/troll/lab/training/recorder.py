"""``RecordedTrainer``: a ``TROLLTrainer`` that writes metrics, token statistics and samples to the run folder.

Histograms of KL and ratio over the tokens of an update are written to ``tokens.jsonl`` once per update. The mean KL by
sign of the advantage and by quarter of the completion is logged in every forward pass; ``troll.diagnostics`` has more
detailed statistics.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from troll.lab.runs import append_line
from troll.lab.runs.folder import METRICS, SAMPLES, TOKENS
from troll.lab.training.progress import Stopwatch
from troll.objective import TokenStats
from troll.projection.geodesic import solver_dtype
from troll.trl import TROLLTrainer
from troll.trl.passes import REWARDS

KL_EDGES = [0.0, *np.logspace(-8, 2, 61).tolist()]
LOG_RATIO_EDGES = np.linspace(-3, 3, 61).tolist()
QUANTILES = (0.5, 0.9, 0.99, 1.0)
QUARTERS = 4

HEADER = {"format": 1, "kl_edges": KL_EDGES, "log_ratio_edges": LOG_RATIO_EDGES}
_SHOWN, _SHOWN_TOKENS, _SHOWINGS = 4, 1024, 24  # completions at a time, tokens of each, number of times in a run


class RecordedTrainer(TROLLTrainer):
    """Writes metrics, token histograms and sampled completions to ``folder``, and measures the time of each phase."""

    def __init__(self, *args: Any, folder: Path, seconds_before: float = 0.0, **kwargs: Any) -> None:
        self._stopwatch = Stopwatch()
        self._histogram = TokenHistogram()
        self._folder = folder
        self._seconds_before, self._began = seconds_before, time.perf_counter()
        self._busy = 0.0
        self._before: tuple[float, float] | None = None
        super().__init__(*args, **kwargs)
        self.add_callback(_Record(self))

    # Time

    @property
    def seconds(self) -> float:
        """Wall time of the run until now, including the time before a resume."""
        return self._seconds_before + time.perf_counter() - self._began

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As in TRL. Time that no phase below claims is counted as the backward pass."""
        with self._stopwatch("backward"):
            return super().training_step(*args, **kwargs)

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        with self._stopwatch("other"):
            return super()._prepare_inputs(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self._stopwatch("generate"):
            return super()._generate(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        with self._stopwatch("score"):
            return super()._generate_and_score_completions(inputs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._stopwatch("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        with self._stopwatch("forward"):
            return super()._compute_loss(model, inputs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As in TRL."""
        with self._stopwatch("evaluate", exclusive=True):
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._stopwatch("save", exclusive=True):
            super()._save_checkpoint(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in TRL, with the seconds of each phase since the last log."""
        if self._mode == "train":
            metrics, laps = self._metrics["train"], self._stopwatch.lap()
            self._busy += sum(seconds for name, seconds in laps.items() if name not in ("evaluate", "save"))
            for activity, seconds in laps.items():
                metrics[f"time/{activity}"] = [seconds]
            if metrics.get("num_tokens"):
                metrics["tokens_per_second"] = [self._rate(metrics["num_tokens"][-1])]
        super().log(logs, *args, **kwargs)

    def _rate(self, tokens: float) -> float:
        """Tokens per second since the previous log with a rollout, without the time of evaluation and saving."""
        seconds, before = self._before or (self._busy, math.nan)
        self._before = (self._busy, tokens)
        return (tokens - before) / (self._busy - seconds) if self._busy > seconds else math.nan

    # Tokens

    def observe_tokens(self, stats: TokenStats, counted: Tensor, inputs: dict[str, Any]) -> None:
        """Log the KL of groups of tokens, add all tokens to the histogram, and store some completions."""
        if self._mode == "train":
            advantages = inputs["advantages"]
            per_token = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(inputs["completion_ids"])
            for name, value in kl_by_group(stats["kl_before"], counted, self._gather(per_token)).items():
                self._metrics["train"][f"troll/{name}"].append(value)
        if self._mode == "train" and self.accelerator.is_main_process:
            self._histogram.add(stats, counted)
            if self._shows_now:
                self._show(stats, counted, inputs)

    def update_again(self) -> None:
        """Discard the tokens of an update that is repeated."""
        self._histogram = TokenHistogram()

    @property
    def _place_in_rollout(self) -> int | None:
        """The index of the present update within its rollout."""
        updates = self.args.updates_per_generation
        return None if updates is None else self.state.global_step % updates

    @property
    def _shows_now(self) -> bool:
        """True in the last update of some rollouts, where the policy is farthest from the old one."""
        updates = self.args.updates_per_generation or 1
        rollout, place = divmod(self.state.global_step, updates)
        rollouts = math.ceil(self.state.max_steps / updates)
        every = math.ceil(rollouts / _SHOWINGS)
        chosen = rollout % every == 0 or rollout == rollouts - 1
        return bool(chosen and place == updates - 1 and self.accelerator.sync_gradients)

    def _show(self, stats: TokenStats, counted: Tensor, inputs: dict[str, Any]) -> None:
        ids, prompts, masks = inputs["completion_ids"], inputs["prompt_ids"], inputs["prompt_mask"].bool()
        rewards, advantages = inputs.get(REWARDS), inputs["advantages"]

        def decode(tokens: list[int]) -> str:
            text: str = self.processing_class.decode(
                tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            return text

        for row in range(min(_SHOWN, len(ids))):
            kept = counted[row].nonzero()[:_SHOWN_TOKENS, 0]
            if not len(kept):
                continue
            of_token = {name: values[row, kept].tolist() for name, values in stats.items()}
            advantage = advantages[row] if advantages.dim() == 1 else advantages[row, kept[0]]
            line = {
                "step": self.state.global_step + 1,
                "update": self._place_in_rollout,
                "place": row,
                "prompt": decode(prompts[row, masks[row]].tolist()),
                "tokens": pieces(ids[row, kept].tolist(), decode),
                "kl": of_token["kl_before"],
                "ratio": of_token["ratio"],
                "reward": None if rewards is None else float(rewards[row]),
                "advantage": float(advantage),
            }
            if "projected" in stats:
                line["kl_after"] = of_token["kl_after"]
                line["projected"] = [x > 0 for x in of_token["projected"]]
            append_line(self._folder / SAMPLES, line)


def pieces(tokens: list[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text that each token adds. A token that ends inside a character adds nothing, the next one adds it."""
    texts: list[str] = []
    known = new = 0  # the text of tokens [known:new] is decoded again, as spaces depend on what stands before
    for end in range(1, len(tokens) + 1):
        before, text = decode(tokens[known:new]), decode(tokens[known:end])
        unfinished = text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(tokens)
        texts.append("" if unfinished else text[len(before) :])
        if not unfinished:
            known, new = new, end
    return texts


class _Record(TrainerCallback):
    """Writes the files of the run folder."""

    def __init__(self, trainer: RecordedTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and not (self.trainer._folder / TOKENS).exists():
            append_line(self.trainer._folder / TOKENS, HEADER)
        self.trainer._stopwatch.lap()
        self.trainer._began = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._optimizer = self.trainer._stopwatch("optimizer")
        self._optimizer.__enter__()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._optimizer.__exit__(None, None, None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        line = trainer._histogram.line()
        trainer._histogram = TokenHistogram()
        if line is not None:
            updates = args.updates_per_generation
            place = None if updates is None else (state.global_step - 1) % updates
            append_line(trainer._folder / TOKENS, {"step": state.global_step, "update": place, **line})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if not state.is_world_process_zero or "train_runtime" in logs:
            return
        line = {"step": state.global_step, "seconds": round(self.trainer.seconds, 3), **logs}
        append_line(self.trainer._folder / METRICS, {k: v for k, v in line.items() if v is not None})


class TokenHistogram:
    """Histograms of the tokens of one update, over its forward passes."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def add(self, stats: TokenStats, counted: Tensor) -> None:
        """Add the tokens of one forward pass."""
        for name in ("kl_before", "kl_after", "ratio"):
            if name in stats:
                self._values.setdefault(name, []).append(stats[name][counted].double().cpu())
        if "solver_steps" in stats:
            active = counted & (stats["projected"] > 0)
            self._values.setdefault("solver_steps", []).append(stats["solver_steps"][active].double().cpu())

    def line(self) -> dict[str, Any] | None:
        """The line of ``tokens.jsonl``, or None if there was no token."""
        values = {name: torch.cat(parts).numpy() for name, parts in self._values.items()}
        if not values or not values["kl_before"].size:
            return None
        kl = values["kl_before"]
        line: dict[str, Any] = {
            "count": int(kl.size),
            "kl": _counts(kl, KL_EDGES),
            "log_ratio": _counts(np.log(np.maximum(values["ratio"], 1e-30)), LOG_RATIO_EDGES),
            "kl_quantiles": np.quantile(kl, QUANTILES, method="lower").tolist(),
        }
        if "kl_after" in values:
            line["kl_after"] = _counts(values["kl_after"], KL_EDGES)
            steps = Counter(values["solver_steps"].astype(int).tolist())
            line["solver_steps"] = {str(number): steps[number] for number in sorted(steps)}
        return line


def _counts(values: np.ndarray[Any, Any], edges: list[float]) -> list[int]:
    """Counts per bin. Values outside are counted in the first and last bin, NaN in the last."""
    inside = np.clip(np.nan_to_num(values, nan=np.inf), edges[0], np.nextafter(edges[-1], edges[0]))
    return [int(n) for n in np.histogram(inside, bins=edges)[0]]


@torch.no_grad()
def kl_by_group(kl: Tensor, counted: Tensor, advantages: Tensor) -> dict[str, float]:
    """Mean of ``kl`` over the counted tokens of each non-empty group, by metric name. Six masked sums, one transfer.

    Args:
        kl: [B, T] KL per token.
        counted: [B, T] bool.
        advantages: [B, T].
    """
    length = counted.sum(-1, keepdim=True).clamp(min=1)
    quarter = (counted.cumsum(-1) - 1) * QUARTERS // length  # token i of n: ⌊4 i / n⌋
    groups = {"kl_by_sign/positive": advantages > 0, "kl_by_sign/negative": advantages < 0}
    groups |= {f"kl_by_quarter/{i + 1}": quarter == i for i in range(QUARTERS)}
    inside = torch.stack(list(groups.values())) & counted  # [6, B, T]
    sums = torch.where(inside, kl.to(solver_dtype(kl)), 0.0).sum((1, 2))
    totals, counts = torch.stack([sums, inside.sum((1, 2)).to(sums.dtype)]).tolist()
    return {name: total / n for name, total, n in zip(groups, totals, counts, strict=True) if n}
