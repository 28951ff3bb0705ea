"""``troll train`` with a bound that adapts: flags, metrics, what is said at the end, the report, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from cli_cases import flags, train

from troll.lab.cli import main


def test_a_run_whose_bound_follows_the_projected_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, "--kl_bound_schedule", "projected target=0.9", "--write_report", "true")
    lines = run.metrics()
    bounds, shares = ([line[f"troll/{name}"] for line in lines] for name in ("kl_bound", "projected_fraction"))
    assert bounds[:4] == [0.05] * 4
    assert bounds[4:] == [bounds[4]] * 4
    counts = [json.loads(line)["count"] for line in (run.path / "tokens.jsonl").read_text().splitlines()[1:]]
    measured = sum(n * x for n, x in zip(counts[1:4], shares[1:4], strict=True)) / sum(counts[1:4])
    factor = min(max(math.sqrt(measured / 0.9), 1 / 1.5), 1.5)
    assert bounds[4] == pytest.approx(0.05 * factor, rel=1e-6)
    assert all(line["troll/kl_after/max"] <= line["troll/kl_bound"] * (1 + 1e-6) for line in lines)
    assert run.about["arm_label"] == "TROLL, projected bound"
    assert "the bound adapts, starting from 0.05." in " ".join(capsys.readouterr().out.split())
    assert "the bound adapts, starting from 0.05" in (run.path / "report.html").read_text()
    assert "kl_bound_schedule: projected target=0.9" in (run.path / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--kl_bound_schedule", "projected"], "'projected' needs target"),
        (["--kl_bound_schedule", "fixd"], "must be of kind geometric"),
        (["--kl_bound_schedule", "sequence limit=1", "--trust_region", "clip"], "trust_region='clip'"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert main(flags(tmp_path, *argv)) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
