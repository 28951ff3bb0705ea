"""TRL's printed log line has the few ``troll/`` metrics that matter; everything else gets all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PrinterCallback, ProgressCallback
from trl_cases import trainer

from troll.objective.metrics import IMPORTANT
from troll.trl.metrics import printed


def test_details_are_left_out_and_counters_only_shown_when_they_count() -> None:
    shown = {f"troll/{name}": 0.1 for name in IMPORTANT} | {"eval_troll/entropy": 1.0, "loss": 0.0, "reward": 0.5}
    problems = {"troll/unconverged_tokens": 2.0, "troll/skipped_tokens": 1.0, "troll/skipped_updates": 1.0}
    hidden = {"troll/kept_mass/old": 1.0, "troll/ratio/min": 0.9, "eval_troll/mix": 0.0, "troll/lost_mass": 0.0}
    assert printed({**shown, **problems, **hidden}) == {**shown, **problems}
    assert printed(dict.fromkeys(problems, 0.0)) == {}


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_what_is_printed_and_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], disable_tqdm: bool
) -> None:
    run = trainer(tmp_path, max_steps=2, updates_per_generation=2, disable_tqdm=disable_tqdm)
    run.train()
    (first, *_) = [line for line in run.state.log_history if "troll/kl_before/mean" in line]
    assert sum(name.startswith("troll/") for name in first) > 20
    text = capsys.readouterr().out
    assert "'troll/kl_before/mean'" in text
    assert "kept_mass" not in text
    assert "'reward'" in text


def test_callbacks_of_the_user_stay(tmp_path: Path) -> None:
    class Own(ProgressCallback):
        pass

    run = trainer(tmp_path, max_steps=2)
    kinds: list[Any] = [type(x) for x in run.callback_handler.callbacks]
    assert ProgressCallback not in kinds
    assert sum(issubclass(kind, ProgressCallback | PrinterCallback) for kind in kinds) == 1
    run.add_callback(Own())
    assert Own in [type(x) for x in run.callback_handler.callbacks]
