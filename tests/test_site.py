"""The documentation site builds, opens from disk, asks no other machine, and shows nothing that does not work."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from troll.lab.cli import check_command, main
from troll.lab.cli.main import COMMANDS
from troll.lab.report.figures import RUN_FIGURES
from troll.lab.runs import Comparison, Run
from troll.lab.runs.comparison import ARMS
from troll.lab.tasks import generated, load_task
from troll.lab.training.settings import DEFAULT_MODEL, defaults
from troll.trl import TROLLConfig

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
SHOWN = [*DOCS, ROOT / "README.md", *sorted(ROOT.glob("examples/*/README.md"))]
SOURCES = ("docs", "mkdocs.yml", "README.md", "LOG.md", "CHANGELOG.md", "benchmarks", "examples", "experiments", "src")


def build(folder: Path, output: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        folder / "mkdocs.yml",
        "-d",
        output,
    ]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("site")
    run = build(ROOT, output)
    assert run.returncode == 0, run.stderr
    assert not re.search(r"WARNING|ERROR", run.stderr), run.stderr
    return output


def blocks(language: str, *, mark: str = "") -> Iterator[tuple[str, str, str]]:
    """(what the mark says, page, text) of the blocks in a language; of those under a comment that begins so."""
    comment = rf"<!-- {mark}([^>]*) -->\n" if mark else "()"
    for path in SHOWN:
        for found in re.finditer(rf"{comment}```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
            yield found[1].strip(" :"), path.name, found[2]


def commands() -> list[list[str]]:
    """Every ``troll …`` that is shown, on a line of a shell block or in the text, without ``troll``."""
    lines = [line for _, _, text in blocks("(?:sh|shell|bash)") for line in text.replace("\\\n", " ").splitlines()]
    for path in SHOWN:
        prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        lines += [" ".join(span.split()) for span in re.findall(r"`(troll [a-z]+ [^`]+)`", prose)]
    shown = {tuple(shlex.split(line, comments=True)[1:]) for line in lines if line.startswith("troll ")}
    return [list(words) for words in sorted(shown)]


# ---------------------------------------------------------------------- the pages


def test_files_of_the_repository_are_pages(site: Path) -> None:
    log = (site / "log.html").read_text()
    for heading in re.findall(r"^## (.+)$", (ROOT / "LOG.md").read_text(), re.MULTILINE):
        assert heading in log
    figure = "experiments/regression/figure.svg"
    assert f'src="{figure}"' in article(site / "settings.html")
    assert (site / figure).read_bytes() == (ROOT / figure).read_bytes()
    tasks = article(site / "tasks.html")
    assert "[roman.py]" not in tasks  # a file that is no page: its name, without a link
    assert "roman.py" in tasks
    assert 'href="trl.html"' in article(site / "examples-trl.html")  # was ../../docs/trl.md
    assert 'href="examples-trl.html"' in article(site / "trl.html")  # was ../examples/trl
    assert 'href="derivation.html"' in article(site / "index.html")  # was ../src/troll/projection/README.md
    assert not (site / "hooks.py").exists()


def article(page: Path) -> str:
    """A page without its menus."""
    return page.read_text().partition("<article")[2].partition("</article>")[0]


class _Addresses(HTMLParser):
    """What a browser would load: every address in a page that is not a link to follow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("a", "svg"):
            self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "content")]


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(DOCS)
    for page in pages:
        parser = _Addresses()
        parser.feed(page.read_text())
        assert parser.found
        assert not [x for x in parser.found if re.match(r"(https?:)?//", x)], page.name
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", sheet.read_text()), sheet.name


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("[nowhere](nowhere.md)", "nowhere.md"),
        ("[no such heading](metrics.md#no-such-heading)", "#no-such-heading"),
        ("[Gone](../LOG.md#gone)", "#gone"),
        ("![no figure](../experiments/none.svg)", "experiments/none.svg"),
    ],
)
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, mistake: str, said: str) -> None:
    copy = copy_of_sources(tmp_path / "copy")
    with (copy / "docs" / "pytorch.md").open("a") as page:
        page.write(f"\n{mistake}\n")
    run = build(copy, tmp_path / "site")
    assert run.returncode != 0
    assert said in run.stderr


def test_a_page_nobody_can_reach_fails_the_build(tmp_path: Path) -> None:
    copy = copy_of_sources(tmp_path / "copy")
    (copy / "docs" / "lonely.md").write_text("# Lonely\n")
    run = build(copy, tmp_path / "site")
    assert run.returncode != 0
    assert "lonely.md" in run.stderr


def copy_of_sources(target: Path) -> Path:
    target.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("*.py[co]", "__pycache__"))
        else:
            shutil.copy(ROOT / name, target / name)
    return target


def test_in_a_browser_from_disk(site: Path) -> None:
    """No page asks for anything that is not on the disk, none complains, none is too wide; search finds."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None and not os.environ.get("CI"):
        pytest.skip("no Chromium on this machine")
    seen: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 400, "height": 900}, color_scheme="light")
        page.on("request", lambda request: seen.append(request.url))
        page.on("console", lambda message: seen.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: seen.append(f"error: {error}"))
        for path in sorted(set(site.glob("*.html")) - {site / "404.html"}):  # which only a server shows
            page.goto(path.as_uri())
            wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wider <= 0, path.name
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto((site / "index.html").as_uri())
        assert page.locator("img").evaluate_all("images => images.every(i => i.complete && i.naturalWidth > 0)")
        page.locator("input.md-search__input").click()
        page.keyboard.type("unconverged")
        page.locator("a.md-search-result__link[href*='metrics.html']").first.wait_for(state="attached")
        background = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(background)
        page.keyboard.press("Escape")
        page.locator("label[title='Dark']").click()
        assert page.evaluate(background) != light
        browser.close()
    assert seen
    assert not [x for x in seen if not x.startswith((site.as_uri(), "data:"))]


# ---------------------------------------------------------------------- what they show


@pytest.mark.parametrize("language", ["python", "py"])
def test_python_compiles(language: str) -> None:
    for _, page, code in blocks(language):
        compile(code, page, "exec")


def test_marked_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example_folder(tmp_path / "runs" / "arithmetic-troll")
    marked = list(blocks("python", mark="run"))
    assert {page for _, page, _ in marked} == {
        "diagnostics.md",
        "bounds.md",
        "kernels.md",
        "pytorch.md",
        "rewards.md",
        "runs.md",
        "tasks.md",
    }
    for _, page, code in marked:
        exec(compile(code, page, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "largest KL 0.0500" in printed
    assert "finished 0.05" in printed
    assert "1 0.48 0.0\n2 None 0.01\n0 0.47" in printed


def test_the_task_on_the_page_is_one(tmp_path: Path) -> None:
    ((_, page, code),) = blocks("python", mark="task")
    assert page == "tasks.md"
    (tmp_path / "reverse.py").write_text(code)
    task = load_task(str(tmp_path / "reverse.py"))
    assert (len(task.train_dataset), len(task.eval_dataset), task.stop) == (12, 4, "\n")
    (reward,) = task.reward_funcs
    assert reward(prompts=["", ""], completions=[" enots\n", " stone\n"], answer=["enots", "enots"]) == [1.0, 0.0]


@pytest.mark.parametrize("options", [{"digits": 2, "operations": "+-*", "shots": 4}])
def test_the_options_on_the_task_page(options: dict[str, Any]) -> None:
    page = (ROOT / "docs/tasks.md").read_text()
    shown = next(words for words in commands() if "arithmetic" in words and "--task_options" in words)
    assert shown[shown.index("--task_options") + 1 :] == [f"{key}={value}" for key, value in options.items()]
    assert "* " in "".join(load_task("arithmetic", options=options, train_size=50).train_dataset["prompt"])
    for name, default in generated.ARITHMETIC_OPTIONS.items():
        assert re.search(rf"^\| `{name}` \| `?{re.escape(str(default))}`? \|", page, re.MULTILINE), name


def test_there_are_commands_to_check() -> None:
    assert {words[0] for words in commands()} == {"train", "compare", "eval", "explain", "runs", "report", "doctor"}
    assert ["compare", "--arms", "troll", "clip", "none", "--seeds", "0", "1", "2"] in commands()


def test_every_command_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (flags,) = [text for _, page, text in blocks("yaml") if page == "quickstart.md"]
    for words in commands():
        if "--config" in words:
            file = tmp_path / words[words.index("--config") + 1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(flags)
        check_command(words)


FOREIGN_FLAGS = {"tiny", "config-name"}
"""Flags of examples/trl and of hydra."""


def test_every_flag_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags in the text, outside of commands; those of complete commands are parsed above."""
    for words in [*([command, "--help"] for command in COMMANDS), ["train", "--help_all"], ["compare", "--help_all"]]:
        with contextlib.suppress(SystemExit):
            main(words)
    known = set(re.findall(r"--([\w-]+)", capsys.readouterr().out))
    known = {name.replace("-", "_") for name in known}
    unknown = {
        (path.name, flag)
        for path in SHOWN
        for span in re.findall(r"`(--[^`]+)`", path.read_text())
        for flag in re.findall(r"(?:^|\s)--([\w-]+)", span)
        if flag not in FOREIGN_FLAGS and flag.replace("-", "_") not in known
    }
    assert not unknown, sorted(unknown)


def test_every_yaml_file_is_one_of_flags(tmp_path: Path) -> None:
    shown = [text for _, page, text in blocks("yaml") if page in {path.name for path in DOCS}]
    assert shown
    for text in shown:
        (tmp_path / "flags.yaml").write_text(text)
        check_command(["train", "--config", str(tmp_path / "flags.yaml")])


def test_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [names for path in SHOWN for names in re.findall(r"troll-rl\[([\w,]+)\]", path.read_text())]
    assert named
    assert {name for names in named for name in names.split(",")} <= set(extras)


def test_the_defaults_on_the_settings_page() -> None:
    shown = dict(re.findall(r"^\| `(\w+)` \(([\d.e-]+)[;)]", (ROOT / "docs/settings.md").read_text(), re.MULTILINE))
    assert len(shown) == 9
    config = TROLLConfig("unused", use_cpu=True, bf16=False)
    assert {name: getattr(config, name) for name in shown} == {name: float(value) for name, value in shown.items()}
    flags = re.findall(r"`--(\w+)", "".join(path.read_text() for path in DOCS))
    assert {"updates_per_generation", "epsilon_high", "per_device_train_batch_size"} <= set(flags)


def test_the_first_run_is_what_the_quick_start_says() -> None:
    page = " ".join((ROOT / "docs/quickstart.md").read_text().split())
    run = defaults(DEFAULT_MODEL, {}, has_gpu=False)
    updates = run["updates_per_generation"]
    rollouts, completions = run["max_steps"] // updates, run["per_device_train_batch_size"] * updates
    assert f"for {run['max_steps']} updates, {rollouts} rollouts of {completions} completions with {updates}" in page
    assert f"every {run['eval_steps']} updates, {generated.ARITHMETIC_SIZES[1]} problems" in page
    (rate,) = re.findall(rf"1e-6; ([\de.-]+) for `{DEFAULT_MODEL}`", (ROOT / "docs/settings.md").read_text())
    assert float(rate) == run["learning_rate"]


def test_the_arms_are_those_of_the_command() -> None:
    page = (ROOT / "docs/quickstart.md").read_text()
    assert re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE) == list(ARMS)
    gspo = ARMS["gspo"]
    assert float(re.findall(r"−([\de-]+), \+", page)[0]) == gspo["epsilon"]
    assert float(re.findall(r", \+([\de-]+) as GSPO", page)[0]) == gspo["epsilon_high"]


def test_the_cost_table_is_that_of_the_benchmark() -> None:
    page, benchmark = (ROOT / "docs/when-not.md").read_text(), (ROOT / "benchmarks/trl/README.md").read_text()
    rows = re.findall(r"^\| .*SmolLM2|^\| .*parameters.*", page, re.MULTILINE)
    assert len(rows) >= 4
    pairs = re.findall(r"([\d.]+) \(`bucket`\), ([\d.]+) \(`floor`\)", page)
    measured = re.findall(r"^\| [^|]+ \| (bucket|floor) \| ([\d.]+) \|", benchmark, re.MULTILINE)
    steps = {tail: [step for name, step in measured if name == tail] for tail in ("bucket", "floor")}
    assert sorted(pairs) == sorted(zip(steps["bucket"], steps["floor"], strict=True))


def test_every_figure_of_a_run_is_explained() -> None:
    rows = re.findall(r"^\| ([^|`]+) \|", (ROOT / "docs/report.md").read_text(), re.MULTILINE)
    explained = {row for row in rows[1:] if row[0].isupper()}
    assert {part for row in explained for part in row.split(", ")} == {x.title for x in RUN_FIGURES.values()}


def test_every_activity_that_is_timed_is_explained() -> None:
    code = "".join(path.read_text() for path in (ROOT / "src/troll/lab/training").glob("*.py"))
    timed = set(re.findall(r'stopwatch\("(\w+)"', code)) | {"other"}
    explained = set(re.findall(r"\| `time/(\w+)` \|", (ROOT / "docs/metrics.md").read_text()))
    assert timed == explained


# ---------------------------------------------------------------------- the run folder


def example_folder(folder: Path) -> Path:
    """The files as docs/runs.md shows them."""
    folder.mkdir(parents=True)
    text = (ROOT / "docs/runs.md").read_text()
    for name, content in re.findall(
        r"^## [^\n]*`([\w.]+)`\n(?:(?!^## ).)*?^```json\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    ):
        (folder / name).write_text(content)
    return folder


def test_the_run_folder_on_the_page_is_one(tmp_path: Path) -> None:
    folder = example_folder(tmp_path / "arithmetic-troll")
    run = Run.open(folder)
    assert run.about["name"] == folder.name
    assert run.about["model"]["parameters"] == 134_515_008
    assert [line["step"] for line in run.metrics()] == [1, 2]
    assert [line["eval_reward"] for line in run.evaluations()] == [0.47]
    tokens = run.tokens()
    assert tokens is not None
    for line in tokens.updates:
        for name in ("kl", "kl_after"):
            assert name not in line or sum(line[name]) == line["count"]
            assert name not in line or len(line[name]) == len(tokens.kl_edges) - 1
        assert sum(line["log_ratio"]) == line["count"]
        assert len(line["log_ratio"]) == len(tokens.log_ratio_edges) - 1
    (sample,) = run.samples()
    assert {len(sample[name]) for name in ("tokens", "kl", "kl_after", "projected", "ratio")} == {3}
    evaluation = run.evaluation()
    assert evaluation is not None
    assert all(x["pass@1"]["low"] < x["pass@1"]["value"] < x["pass@1"]["high"] for x in evaluation["models"])


def test_the_comparison_on_the_page_is_one(tmp_path: Path) -> None:
    comparison = Comparison.open(example_folder(tmp_path / "comparison"))
    about = comparison.about
    arms = [arm["arm"] for arm in about["arms"]]
    assert comparison.runs("troll") == []  # none of them is there
    for measure in about["measures"]:
        assert [row["arm"] for row in measure["table"]] == arms
        means = {row["arm"]: row["mean"] for row in measure["table"]}
        assert all(len(row["values"]) == len(about["seeds"]) for row in measure["table"])
        for verdict in measure["verdicts"]:
            assert verdict["difference"] == pytest.approx(means[verdict["a"]] - means[verdict["b"]], abs=1e-9)


def test_numbers_in_json_blocks_are_json() -> None:
    for _, page, text in blocks("json"):
        for part in [text] if text.startswith("{\n") else text.splitlines():
            assert isinstance(json.loads(part), dict), page
