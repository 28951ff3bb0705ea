"""The documents say what the code does: examples run, tables are recomputed, names exist."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import get_args

import pytest
import torch

import troll
from troll.implementation import VARIABLE, Impl, choose
from troll.lab.cli import main
from troll.lab.report.rules import RULES, RuleMonitor, learning
from troll.lab.report.rules import health as upkeep
from troll.lab.report.rules import trust_region as region
from troll.lab.runs import Run
from troll.objective.metrics import IMPORTANT, REDUCTIONS
from troll.policy import align, head_gradients
from troll.policy.matmul import _TILE_BYTES, TiledMatmul
from troll.policy.scoring import KERNEL_SUPPORT

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
METRICS = (ROOT / "docs" / "metrics.md").read_text()


PYTORCH = (ROOT / "docs" / "pytorch.md").read_text()


def blocks(language: str, text: str = PYTORCH) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_the_worked_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    """Copied and pasted into an empty folder; the numbers may differ in the last digit between machines."""
    code = next(block for block in blocks("python") if "quickstart" in block or "for update in" in block)
    assert code.strip() == (ROOT / "examples" / "quickstart.py").read_text().split('"""\n\n', 1)[1].strip()
    (tmp_path / "example.py").write_text(code)
    run = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    number = re.compile(r"[-+]?\d+\.?\d*")
    assert number.sub("#", run.stdout).strip() == number.sub("#", blocks("text")[0]).strip()
    shown, printed = ([float(x) for x in number.findall(text)] for text in (blocks("text")[0], run.stdout))
    assert printed == pytest.approx(shown, abs=1.01)  # percentages are whole numbers
    assert [x for x in printed if x != int(x)] == pytest.approx([x for x in shown if x != int(x)], abs=2e-3)


@pytest.mark.parametrize("text", [README, PYTORCH])
def test_the_five_lines(text: str) -> None:
    lines = next(block for block in blocks("python", text) if "old_logits" in block and "import" not in block)
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 40, requires_grad=True)
    names = {
        "troll": troll,
        "old_logits": logits.detach() + 0.1 * torch.randn(2, 5, 40),
        "logits": logits,
        "sampled": torch.randint(40, (2, 5)),
        "advantages": torch.tensor([1.0, -1.0]),
        "loss_mask": torch.ones(2, 5, dtype=torch.bool),
    }
    exec(lines, names)
    assert logits.grad is not None
    assert (logits.grad != 0).any()
    assert all(line.split("#")[0].strip() in troll.__doc__ for line in lines.splitlines())


def policies(tail: str = "floor", max_support: int = 64) -> tuple[troll.SparsePolicy, troll.SparsePolicy, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    old_logits = torch.randn(2000, 500, generator=g)
    logits = old_logits + 0.3 * torch.randn(2000, 500, generator=g)
    sampled = torch.multinomial(old_logits.softmax(-1), 1, generator=g)[:, 0]
    old = troll.sparsify(old_logits, sampled, max_support)
    proposal = troll.sparsify(logits, sampled, max_support) if tail == "floor" else troll.restrict(logits, old)
    return proposal, old, troll.token_kl(logits.log_softmax(-1), old_logits.log_softmax(-1))


def test_the_table_on_the_floor() -> None:
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", METRICS, flags=re.MULTILINE)
    assert len(rows) == 5
    for support, kept, floor, bucket in rows:
        for tail, shown in (("floor", floor), ("bucket", bucket)):
            proposal, old, dense = policies(tail, int(support))
            kl = troll.token_kl(*align(proposal, old, tail)).mean().item()
            # Other random numbers than when the table was made: the mean over 2000 tokens has a spread of 1 %.
            assert kl == pytest.approx(float(shown), rel=0.04)
            assert old.kept_mass.mean().item() == pytest.approx(float(kept), rel=0.01)
            assert dense.mean().item() == pytest.approx(0.0447, rel=0.02)


def test_the_table_on_a_real_model() -> None:
    result = json.loads((ROOT / "experiments" / "tails" / "results.json").read_text())
    by_update = {row["update"]: row for row in result["rows"]}
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \|$", METRICS, flags=re.MULTILINE)
    assert [int(update) for update, *_ in rows] == [1, 3, 6]
    for update, *shown in rows:
        measured = [by_update[int(update)][name]["projected"] for name in ("dense", "floor, 64", "bucket, 64")]
        assert [f"{100 * x:.1f}" for x in measured] == shown
    assert f"{by_update[1]['kept mass, 64']:.3f}" in METRICS
    assert f"{result['tokens']:,} tokens" in METRICS
    assert all(row[f"bucket, {k}"]["projected by mistake"] == 0 for row in result["rows"] for k in (16, 64, 256))
    assert result["kl_bound"] == 0.05


EXPERIMENTS = (ROOT / "experiments" / "README.md").read_text()


def test_the_stress_test() -> None:
    runs = json.loads((ROOT / "experiments" / "arithmetic" / "results.json").read_text())
    arms = {"TROLL, bucket": "bucket", "TROLL, floor": "floor", "clip ±0.2": "clip", "no trust region": "none"}
    for name, arm in arms.items():
        mine = [run for run in runs if run["arm"] == arm]
        assert [run["seed"] for run in mine] == [0, 1, 2]
        assert all(len(run["reward"]) == 20 and run["machine"] == "NVIDIA H200" for run in mine)
        rewards = [mean(run["reward"][-10:]) for run in mine]
        kl = mean(mean(run["kl_before/mean"][-10:]) for run in mine)
        row = f"| {name} | {', '.join(f'{r:.3f}' for r in rewards)} | {mean(rewards):.3f} | {kl:.3f} |"
        assert row in EXPERIMENTS


def test_the_comparison_of_the_embedded_default() -> None:
    data = json.loads((ROOT / "experiments" / "embedded" / "comparison.json").read_text())
    tables = {m["key"]: {row["arm"]: row for row in m["table"]} for m in data["measures"]}
    assert data["seeds"] == [0, 1, 2]
    for arm in data["arms"]:
        held_out, reward, kl = (tables[key][arm["arm"]] for key in ("held_out_last", "reward_mean", "kl_mean"))
        seeds = ", ".join(f"{x:.3f}" for x in held_out["values"])
        row = f"| {arm['label']} | {seeds} | {held_out['mean']:.3f} | {reward['mean']:.3f} | {kl['mean']:.3f} |"
        assert row in EXPERIMENTS
    said = {(m["key"], v["b"]): v["says"] for m in data["measures"] for v in m.get("verdicts", [])}
    assert said.pop(("held_out_mean", "gspo")) == "TROLL is better"
    assert set(said.values()) == {"no difference"}


def test_the_weights_of_the_regression() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    runs = json.loads((ROOT / "experiments" / "regression" / "results.json").read_text())
    for variant in dict.fromkeys(run["variant"] for run in runs):
        mine = [run for run in runs if run["variant"] == variant]
        assert [run["seed"] for run in mine] == [0, 1, 2]
        assert all(run["machine"] == "NVIDIA H200" for run in mine)
        means = [mean(run["rewards"]) for run in mine]
        size, label = variant.split(", ", 1)
        held_out = mean(run["held_out"][-1] for run in mine)
        shown = f"{', '.join(f'{x:.3f}' for x in means)} | {mean(means):.3f} | {held_out:.3f}"
        assert f"| {size} | {label} | {shown} |" in page


def test_every_metric_is_explained_and_nothing_else() -> None:
    proposal, old, _ = policies("bucket")
    batch = proposal[None, :50], old[None, :50], torch.ones(1), torch.ones(1, 50, dtype=torch.bool)
    returned: set[str] = set()
    for loss, options in (
        (troll.troll_loss, {}),
        (troll.clip_loss, {"dual_clip": 3.0}),
        (troll.unconstrained_loss, {}),
    ):
        returned |= set(loss(*batch, **options)[1])
    explained: set[str] = set()
    for cell in re.findall(r"^\| (`.*?) \|", METRICS, flags=re.MULTILINE):
        stem = ""
        for name in re.findall(r"`([^`]+)`", cell):
            stem = stem if name.startswith("/") else name.split("/")[0]
            explained.add(stem + name if name.startswith("/") else name)
    explained -= {"max_support"}
    explained |= set(re.findall(r"`(\w*clipped_fraction)`", METRICS))
    assert returned == explained


def test_the_page_of_metrics_begins_with_the_important_ones_and_names_every_reduction() -> None:
    summary, _, rest = METRICS.partition("## How a metric is reduced")
    assert tuple(re.findall(r"^\| `(\S+)` \|", summary, flags=re.MULTILINE)) == IMPORTANT
    reductions = rest.partition("## Metrics of the losses")[0]
    for word, kind in (("minimum", "min"), ("sum", "sum")):
        row = re.findall(rf"^\| {word} \| (.*?) \|", reductions, flags=re.MULTILINE)[0]
        listed = {name.removeprefix("troll/") for name in re.findall(r"`([^`]+)`", row)}
        assert listed == {name for name, how in REDUCTIONS.items() if how == kind}


KERNELS = (ROOT / "docs" / "kernels.md").read_text()


def test_the_memory_budgets_on_the_page() -> None:
    """The first MiB with which each way is taken, for tensors that take no memory."""
    tokens = int(re.findall(r"In bf16, for (\d+) tokens, gradients included", KERNELS)[0])
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) MiB \| ([\d,]+) MiB \|$", KERNELS, flags=re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        V, H, whole, chunks = (int(x.replace(",", "")) for x in row)
        number = torch.zeros(1, dtype=torch.bfloat16)
        products = TiledMatmul(number.expand(tokens, H), number.expand(V, H), None)
        ways = [head_gradients.plan(products, True, mib * 2**20).way for mib in (chunks - 1, chunks, whole - 1, whole)]
        assert ways == ["recompute", "chunks", "chunks", "whole"]


def test_the_constants_on_the_kernel_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    text = " ".join(KERNELS.split())
    assert (head_gradients.BUDGET, _TILE_BYTES) == ({"cpu": 2**29, "other": 2**32}, {"cpu": 2**26, "other": 2**29})
    for said in (
        f"at most {KERNEL_SUPPORT} tokens per position",
        "default 4 GiB, ½ GiB on a CPU",
        "The tile takes 512 MiB (64 MiB on a CPU)",
        f"those of at least {head_gradients._FEWEST_ROWS} tokens",
        f"{choose('auto', torch.device('cpu'))}",
    ):
        assert said in text, said
    shown = set(re.findall(r'`?"(\w+)"`?', KERNELS.partition("is an argument of")[0].rpartition("- `impl=")[2]))
    assert shown == set(get_args(Impl))
    scan = pytest.importorskip("triton") and importlib.import_module("troll.policy.scoring.triton_forward")
    assert f"chunks of {scan.CHUNK.value}, and {scan.CHUNKS.value} chunks are a block" in text
    numbers = importlib.import_module("troll.policy.scoring.triton_bits")
    assert f"all below −{-numbers.LOWEST.value:.0e}".replace("e+", "e") in text


MARKDOWN = sorted(
    path
    for folder in (ROOT, *(ROOT / name for name in ("benchmarks", "docs", "examples", "experiments", "src", "tests")))
    for path in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
)


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]+`", "", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(text: str) -> set[str]:
    """The anchors that a viewer of repositories gives the headings: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", x) for x in re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", x).strip().lower().replace(" ", "-") for x in headings}


def dead_links(path: Path) -> list[str]:
    """Relative links of a Markdown file that lead to no file or no heading."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target.read_text()))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    """In a plain viewer of files, without the site."""
    assert dead_links(path) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# The `code`, (in) brackets\n\n```sh\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md#the-code-in-brackets) [b](#here) [c](https://x.y/#z) `[d](in-code)`\n"
        "[e](gone.md) [f](other.md#no-heading) ![g](gone.svg) [h](#there)"
    )
    assert dead_links(page) == ["gone.md", "other.md#no-heading", "gone.svg", "#there"]


PAGES = [path for path in MARKDOWN if path.name not in ("LOG.md", "CHANGELOG.md")]  # which name what was there once
FOREIGN = {"examples/data_preprocess/gsm8k.py"}  # of verl


def resolves(dotted: str) -> bool:
    """Whether ``troll.x.y.z`` is a module, or attributes of one."""
    parts = dotted.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:depth]))
        except ModuleNotFoundError:
            continue
        for name in parts[depth:]:
            if not hasattr(value, name):
                return name in getattr(value, "__annotations__", {})
            value = getattr(value, name)
        return True
    return False


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_and_paths_of_the_code_exist(path: Path) -> None:
    text = path.read_text()
    dotted = set(re.findall(r"(?<![\w/.-])troll(?:\.[A-Za-z_]\w*)+", text))
    files = {f"troll.{name}" for name in ("yaml", "json", "md", "py", "trl_compat")}
    assert [name for name in sorted(dotted - files) if not resolves(name)] == []
    named = set(re.findall(r"(?<![\w.])((?:src/troll|tests|benchmarks|examples|experiments|docs)/[\w./-]+)", text))
    assert [name for name in sorted(named - FOREIGN) if not (ROOT / name.rstrip(".")).exists()] == []


def test_a_name_that_is_gone_is_found() -> None:
    assert resolves("troll.troll_loss")
    assert resolves("troll.policy.SparsePolicy.kept_mass")
    assert not resolves("troll.adapters.trl")
    assert not resolves("troll.policy.no_such_name")


def test_the_public_names_exist() -> None:
    for name in troll.__all__:
        assert getattr(troll, name) is not None


EXPLAIN = (ROOT / "docs" / "explain.md").read_text()
EXPLAINED = ROOT / "tests" / "lab" / "report" / "rules"
sys.path.insert(0, str(EXPLAINED))


def marked(mark: str) -> str:
    """The text block under a comment."""
    (text,) = re.findall(rf"<!-- {mark} -->\n```text\n(.*?)```", EXPLAIN, flags=re.DOTALL)
    return str(text)


@pytest.mark.parametrize("name", ["arithmetic-troll", "arithmetic-none"])
def test_the_explanations_on_the_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of real runs, which are kept without what no rule reads."""
    shutil.copytree(EXPLAINED / "runs" / name, tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    assert main(["explain", name]) == 0
    assert capsys.readouterr().out == marked(f"explained: {name}")


def test_the_warnings_on_the_page(tmp_path: Path) -> None:
    """The lines of the run, given one after the other to the rules, as they were when it ran."""
    name = "arithmetic-none"
    lines = Run(EXPLAINED / "runs" / name).metrics()
    (tmp_path / "run.json").write_text((EXPLAINED / "runs" / name / "run.json").read_text())
    monitor, said = RuleMonitor(tmp_path), []
    for line in lines:
        monitor.add(line)
        said += [x.line() for x in monitor.new()] if line["step"] % 8 == 0 else []
    assert said == marked(f"warned: {name}").splitlines()
    assert [x.line() for x in monitor.new()] == []


def test_the_rules_on_the_page() -> None:
    cases = importlib.import_module("test_explain_rules").SPOKEN
    names = [{x.name for case in cases if (x := rule(case.history)) is not None} for rule in RULES]
    table = re.findall(r"^\| ([\w -]+) \| `(\w+)` \| (.*) \|", EXPLAIN, flags=re.MULTILINE)
    rows = {name: rest for _, name, rest in table}
    assert [{name} for name in rows] == names
    assert [(title, name) for title, name, _ in table] == [(x.title[0].upper() + x.title[1:], x.name) for x in RULES]
    for name, thresholds in {
        "reward_collapse": (
            *(learning.COLLAPSED_ROLLOUTS, learning.COLLAPSED, learning.FALLEN),
            *(learning.SUDDEN_ROLLOUTS, learning.SUDDEN),
        ),
        "no_signal": (learning.SAME_REWARD, learning.SMOOTH),
        "flat": (learning.FLAT_ROLLOUTS, learning.RISEN),
        "cut_completions": (upkeep.CUT, upkeep.ROLLOUTS),
        "sampler_mismatch": (upkeep.MISMATCH, upkeep.ROLLOUTS),
        "projected": (region.PROJECTED, region.ROLLOUTS, region.WIDE_BOUND),
        "far_outside": (region.FAR, region.FAR_NATS, region.ROLLOUTS),
        "entropy_collapse": (learning.ENTROPY_LEFT, learning.SMOOTH),
        "regression_outweighs": (region.OUTWEIGHS, region.WEAK, region.ROLLOUTS),
        "clipped": (region.CLIPPED, region.CLIPPED_SEQUENCES, region.ROLLOUTS),
        "kept_mass": (region.KEPT_MASS_FLOOR, region.KEPT_MASS_BUCKET, region.ROLLOUTS),
        "held_out_gap": (learning.HELD_OUT, learning.HELD_OUT_TIMES),
        "gradient_spikes": (upkeep.SPIKE, upkeep.SPIKES, upkeep.SPIKE_ROLLOUTS),
        "settled": (learning.LEFT,),
        "idle": (region.IDLE_ROLLOUTS,),
    }.items():
        assert {f"{x:g}" for x in thresholds} <= set(re.findall(r"\d[\d.]*\d|\d", rows[name])), name
    text = " ".join(EXPLAIN.split())
    assert f"averaged over {learning.SMOOTH} rollouts" in text
    assert f"median over {learning.SMOOTH} rollouts is at least {learning.NEAR_TOP:g}" in text
    assert f"It has *plateaued* if {learning.STALLED} rollouts" in text
    assert f"it has *fallen* if the average is below its highest by more than {learning.FALL:g} times" in text


def test_the_tables_of_real_runs() -> None:
    cases = importlib.import_module("explain_cases")
    rows = cases.table()
    shown = EXPLAIN.partition("## Tried on real runs")[2]
    body = re.findall(r"^\| (?!runs|reward at|---).*\|$", shown, flags=re.MULTILINE)
    assert body == rows + cases.table_of_ends()
    number = {row: int(row.split(" | ")[1]) for row in rows}
    with_star = sum(n for row, n in number.items() if row.startswith("| *"))
    well, between = (cases.by_end(star=True)[how] for how in ("well", "between"))
    text = " ".join(shown.split())
    for said in (
        f"The {sum(number.values())} runs of `experiments/studies`",
        f"of {with_star} runs whose settings",
        f"{sum(map(bool, well))} of {len(well)} are warned, {sum(map(bool, well)) / len(well):.1%},".replace("%", " %"),
        f"{sum(not names for names in between)} of {len(between)} have no warning",
    ):
        assert said in text
