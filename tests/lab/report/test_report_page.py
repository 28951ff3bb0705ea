"""The page as a file: complete, escaped, the same every time, and honest about what is missing."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_cases as cases

from troll.errors import InputError
from troll.lab.report import write_report
from troll.lab.runs.formatting import digits

FIGURES = {"reward", "entropy", "kl", "constrained", "sequence_kl", "solver_steps", "ratio", "times", "loss"}
FIGURES |= {"grad_norm", "kl_groups", "learning_rate"}


class Page(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    def figures(self) -> dict[str, str]:
        return {a["id"]: a["class"] for tag, a in self.tags if tag == "figure"}

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = cases.write_run(tmp_path_factory.mktemp("runs") / "arithmetic-troll")
    cases.write_evaluation(path)
    return path


@pytest.fixture(scope="module")
def page(folder) -> Page:
    return report(folder)


@pytest.fixture
def run(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "run"))


def report(folder: Path) -> Page:
    return Page(write_report(folder, figures=False))


def test_a_run_becomes_one_page_with_everything(folder, tmp_path):
    output = write_report(folder, tmp_path / "new" / "page.html", formats=("svg", "png"))
    page = Page(output)
    assert output == tmp_path / "new" / "page.html"
    assert output.stat().st_size < 3_000_000
    assert set(page.figures()) == {f"figure-{name}" for name in FIGURES}
    for text in (
        "smollm2-135m, 135 M parameters",
        "TROLL, KL ≤ 0.05",
        "the bound is 0.05",
        "troll train --run_name arithmetic-troll --trust_region troll --seed 0",
        "learning_rate: 2.0e-05",
        "updates_per_generation",
        "2.13.0",
        "with uncommitted changes",
        "200 held-out problems of arithmetic, 8 samples each",
        "90\N{NO-BREAK SPACE}% 86\N{NO-BREAK SPACE}% to 94\N{NO-BREAK SPACE}%".replace("\N{NO-BREAK SPACE}", " "),
        "5-10",
    ):
        assert text in page.text, text
    figures = sorted(path.name for path in (output.parent / "figures").iterdir())
    assert len(figures) == 2 * len(page.figures())
    assert figures[:2] == ["constrained.png", "constrained.svg"]
    assert all(path.stat().st_size > 1000 for path in (output.parent / "figures").iterdir())


def test_the_evaluation_has_a_column_for_each_measure_and_nothing_else(page):
    assert "modelpass@1pass@8majoritybefore" in page.text.replace(" ", "")


def test_the_same_folder_gives_the_same_bytes(folder, tmp_path):
    for name in ("a", "b"):
        write_report(folder, tmp_path / name / "report.html", formats=("svg",))
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) == 1 + 12
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_what_a_model_wrote_is_text(folder, page):
    assert cases.HOSTILE in "".join(page.words)
    assert page.count("script") == 1
    assert page.count("img") == 0
    assert "␛[31mred␀⟨U+202E⟩reversed⟨U+2028⟩⟨U+FEFF⟩" in page.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e\u2028\ufeff]", (folder / "report.html").read_text("utf-8"))


def test_hostile_names_are_text_everywhere(run):
    about = json.loads((run / "run.json").read_text())
    evil = "<b onclick=alert(1)>$x^2$ \"'&amp;漢\ud800"
    about |= {"name": evil, "status": "<i>", "arm": evil, "arm_label": evil, "command": evil}
    about["task"] = {"name": evil, "description": evil}
    about["model"] = {"name": evil, "parameters": None}
    about["machine"] = {"processor": evil, "gpu": None}
    about["settings"] |= {evil: evil}
    (run / "run.json").write_text(json.dumps(about))
    evaluation = json.loads((run / "eval.json").read_text())
    evaluation["models"][0]["label"] = evil
    (run / "eval.json").write_text(json.dumps(evaluation))
    page = report(run)
    assert page.text.count("<b onclick=alert(1)>") >= 9
    assert not any("onclick" in attributes for _, attributes in page.tags)
    assert page.count("i") == 1  # the stroke of the scale


def test_the_page_asks_for_nothing(folder, page):
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action", "data"):
            value = attributes.get(name) or ""
            assert value.startswith(("#", "data:")) or not value, (tag, value)
    text = (folder / "report.html").read_text("utf-8")
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert not re.findall(r"url\((?!#)", text)


def test_every_token_is_marked_once(folder, page):
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    tokens = [a for tag, a in page.tags if tag == "span" and "title" in a]
    assert len(tokens) == sum(len(row["tokens"]) for row in samples)
    marked = [t for t in tokens if "p" in t["class"].split()]
    assert len(marked) == sum(sum(row["projected"]) for row in samples)
    assert all("projected" in t["title"] for t in marked)
    assert {t["class"].split()[1] for t in marked} <= {"k6", "k7", "k8"}  # beyond the bound


def test_a_clip_run_claims_no_projection(tmp_path):
    page = report(cases.write_run(tmp_path / "run", "clip", updates=16))
    assert "figure-solver_steps" not in page.figures()
    assert "share of tokens clipped" in page.text
    assert "without a bound" in page.text
    assert "projected" not in page.text
    assert "bound 0.05" not in page.text


@pytest.mark.parametrize(
    ("gone", "missing"),
    [
        (("metrics.jsonl",), 9),
        (("tokens.jsonl",), 3),
        (("samples.jsonl",), 1),
        (("metrics.jsonl", "tokens.jsonl", "samples.jsonl", "config.yaml", "eval.json"), 13),
    ],
)
def test_what_is_missing_is_said(run, gone, missing):
    for name in gone:
        (run / name).unlink()
    page = report(run)
    assert sum(a.get("class") == "missing" for _, a in page.tags) == missing
    assert len(page.figures()) == 12


def test_a_run_that_has_just_begun(run):
    about = json.loads((run / "run.json").read_text())
    about |= {"status": "running", "finished": None, "seconds": None, "git": None}
    (run / "run.json").write_text(json.dumps(about))
    for name in ("metrics.jsonl", "tokens.jsonl", "samples.jsonl", "eval.json"):
        (run / name).write_text("") if name != "eval.json" else (run / name).unlink()
    assert "The run has logged no update yet." in report(run).text


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_a_few_updates_are_enough(tmp_path, updates):
    page = report(cases.write_run(tmp_path / "run", updates=updates, per_rollout=1, reach=0))
    assert "each rollout is used for one update" in page.text


def test_a_line_cut_short_and_numbers_that_are_none_change_nothing_else(run, page):
    whole = page.text
    for name in ("metrics.jsonl", "tokens.jsonl", "samples.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 9999, "loss": 0.1, "tok')
    assert report(run).text == whole
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 101, "loss": NaN, "grad_norm": Infinity, "reward": null, "entropy": "high"}\n')
    with (run / "samples.jsonl").open("a") as file:
        file.write('\n{"step": 101, "update": null, "prompt": null, "tokens": ["a"], "kl": [NaN], "ratio": []}\n')
    with (run / "tokens.jsonl").open("a") as file:
        file.write('\n{"step": 101, "update": null, "count": 0, "kl": [], "log_ratio": [], "kl_quantiles": [null]}\n')
    page = report(run)
    assert "KL unknown" in str(page.tags)
    assert not any(a.get("class") == "missing" for _, a in page.tags)
    assert not re.search(r"\b(nan|inf)\b", page.text)


def test_a_run_json_with_little_in_it(run):
    (run / "run.json").write_text('{"format": 1}')
    page = report(run)
    assert "unknown" in page.text
    assert len(page.figures()) == 11  # without a bound nothing is said of a solver


def test_long_runs_stay_small(tmp_path):
    folder = cases.write_run(tmp_path / "run", updates=1500)
    assert write_report(folder, figures=False).stat().st_size < 1_500_000


@pytest.mark.parametrize("content", [None, "{}", '{"format": 2}', "[]", "{"])
def test_a_folder_that_is_no_run_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(InputError):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_an_unknown_format_and_a_place_that_cannot_be_written_are_refused(run, tmp_path):
    with pytest.raises(InputError, match="gif"):
        write_report(run, formats=("gif",))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_report(run, tmp_path / "file" / "report.html", figures=False)


def test_a_comparison_has_its_table_and_verdicts(tmp_path):
    folder = cases.write_comparison(tmp_path / "compare", updates=12)
    output = write_report(folder)
    page = Page(output)
    about = json.loads((folder / "comparison.json").read_text())
    for measure in about["measures"]:
        for row in measure["table"]:
            assert f"{row['mean']:#.3g}" in page.text
            assert f"{row['low']:#.3g} to {row['high']:#.3g}" in page.text
            assert ", ".join(f"{value:#.3g}" for value in row["values"]) in page.text
        for verdict in measure["verdicts"]:
            pair = f"TROLL, KL ≤ 0.05 against {cases.LABELS[verdict['b']]}: "
            said = (pair if verdict["says"] == "inconclusive" else "") + verdict["says"]
            gap, low, high = (digits(verdict[key]) for key in ("difference", "low", "high"))
            assert f"{said} Difference {gap} ({low} to {high}): {verdict['because']}" in page.text
    assert "Held-out accuracy, end: TROLL is better than clip ±0.2; TROLL is better than no trust region." in page.text
    assert [f"{label}, seed 0" in page.text for label in ("TROLL, KL ≤ 0.05", "clip ±0.2", "no trust region")] == [
        True
    ] * 3
    assert sorted(p.name for p in (folder / "figures").glob("*.svg")) == [
        f"{name}.svg" for name in ("entropy", "held_out", "intervals", "largest_kl", "reward", "token_kl")
    ]


def test_a_comparison_in_progress_says_what_is_missing(tmp_path):
    folder = cases.write_comparison(tmp_path / "compare", ("troll", "clip"), updates=4)
    about = json.loads((folder / "comparison.json").read_text())
    about |= {"measures": [], "missing": ["clip-0", "clip-1", "clip-2"]}
    (folder / "comparison.json").write_text(json.dumps(about))
    for seed in (0, 1, 2):
        shutil.rmtree(folder / f"clip-{seed}")
    (folder / "troll-1" / "metrics.jsonl").unlink()
    page = report(folder)
    assert "clip ±0.2 (0 runs)" in page.text
    assert "Not finished, excluded from the numbers: clip-0, clip-1, clip-2." in page.text
    assert page.text.count("No measure has been computed yet.") == 2
    assert "TROLL, KL ≤ 0.05, seed 0" in page.text


def test_findings_have_a_section_of_their_own(page, run):
    """Warnings first, with every flag to try; a sentence where no rule found anything."""
    assert not [a for _, a in page.tags if a.get("class") == "findings"]
    assert "The rules that could be checked found no problem." in page.text
    about = json.loads((run / "run.json").read_text())
    about["settings"]["tail"] = "floor"
    (run / "run.json").write_text(json.dumps(about))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    noted = {"troll/kept_mass/old": 0.5, "troll/projected_fraction": 0.0, "troll/unscored_completions": 2.0}
    cases.lines(run / "metrics.jsonl", [line if "eval_reward" in line else line | noted for line in lines])
    warned = report(run)
    levels = [a.get("class") for tag, a in warned.tags if tag == "li"]
    assert [level for level in levels if level in ("warning", "note")] == ["warning", "warning", "note"]
    assert {"findings"} <= {a.get("id") for tag, a in warned.tags if tag == "section"}
    assert "#findings" in {a.get("href") for tag, a in warned.tags if tag == "a"}
    for text in (
        "Warning since update 1 2 completions of a rollout had no reward.",
        "The kept tokens have 0.5000 of the probability.",
        "Try --tail bucket",
        "Note since update 1 No token was projected in 25 rollouts",
        "Try --learning_rate 6e-05.",
    ):
        assert text in warned.text, text
