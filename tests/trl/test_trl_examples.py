"""The examples for TRL run as a user runs them, the two-word diff is true, and docs/trl.md says what the code does."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import datasets
import gsm8k
import lora
import preference
import pytest
import tiny_models
import torch
import trl_cases
from datasets import Dataset
from safetensors.torch import load_file
from trl import GRPOConfig

import troll
import troll.trl
from troll.errors import InputError
from troll.objective.metrics import IMPORTANT
from troll.trl import TROLLConfig
from troll.trl.config import LOSS_TYPES
from troll.trl.estimators import Estimator

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "trl"
DOC = (ROOT / "docs" / "trl.md").read_text()
README = (EXAMPLES / "README.md").read_text()
AUTHORS, DEFAULT = 0.05, 0.2
"""Bounds: of the programs with the authors' settings, and of those that say nothing."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """``tiny_models.settings`` leaves torch one thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(program: Path, *flags: str, folder: Path) -> str:
    """Run a program in a folder, without the network, and return what it printed."""
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(EXAMPLES),
    }
    command = [sys.executable, str(program), *flags]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def printed(output: str) -> list[dict[str, float]]:
    """What was logged on each update, as printed."""
    lines = [ast.literal_eval(line) for line in output.splitlines() if line.startswith("{'loss'")]
    return [{name: float(value) for name, value in line.items()} for line in lines]


def saved(folder: Path) -> list[dict[str, float]]:
    """What was logged on each update, from the file."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "loss" in entry]


def assert_bound_acts_and_holds(history: list[dict[str, float]], bound: float = AUTHORS) -> None:
    """Sixteen updates, eight on each of two rollouts."""
    assert len(history) == 16
    for first in (history[0], history[8]):  # made by the policy that generated
        assert first["reward_std"] > 0
        assert first["troll/kl_before/max"] < 1e-9
    assert max(entry["troll/kl_before/max"] for entry in history) > 2 * bound
    assert max(entry["troll/projected_fraction"] for entry in history) > 0.5
    assert 0.98 * bound < max(entry["troll/kl_after/max"] for entry in history) <= bound * (1 + 1e-5)


def moved(folder: Path) -> float:
    """How far the saved model is from the untrained one."""
    before, after = (load_file(path / "model.safetensors") for path in (folder / "tiny-model", folder))
    assert before.keys() == after.keys()
    return max((before[name] - after[name]).abs().max().item() for name in before)


# ---------------------------------------------------------------------- two words


def reverse(diff: str, text: str) -> str:
    """What ``patch -R`` does."""
    for hunk in re.split(r"^@@.*@@\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        new, old = ("".join(line[1:] for line in lines if line[0] != other) for other in "-+")
        assert text.count(new) == 1, new
        text = text.replace(new, old)
    return text


def test_the_diff_changes_two_words() -> None:
    lines = (EXAMPLES / "two_words.diff").read_text().splitlines()
    removed, added = ([line[1:] for line in lines if re.match(rf"\{sign}[^-+]", line)] for sign in "-+")
    assert len(removed) == len(added) == 3
    imports = {"from troll.trl import": "from trl import"}
    for old, new in zip(removed, added, strict=True):
        for long, short in imports.items():
            new = new.replace(long, short)
        assert new.replace("TROLLConfig", "GRPOConfig").replace("TROLLTrainer", "GRPOTrainer") == old


RECORDED = """
import runpy
from troll.trl import TROLLTrainer

class Recorded(TROLLTrainer):
    def train(self):
        super().train()
        self.save_state()

import troll.trl
troll.trl.TROLLTrainer = Recorded
runpy.run_path({program!r}, run_name="__main__")
"""
"""Runs a program and saves everything that is logged, of which the five most important metrics are printed."""


def test_the_program_runs_with_the_two_words(tmp_path: Path) -> None:
    (tmp_path / "recorded.py").write_text(RECORDED.format(program=str(EXAMPLES / "minimal.py")))
    shown = printed(run(tmp_path / "recorded.py", "--tiny", "--output_dir", "out", folder=tmp_path))
    history = saved(tmp_path / "out")
    assert_bound_acts_and_holds(history, DEFAULT)
    assert len(shown) == len(history)
    for line, entry in zip(shown, history, strict=True):
        assert {name for name in line if name.startswith("troll/")} == {f"troll/{name}" for name in IMPORTANT}
        assert line == pytest.approx({name: entry[name] for name in line}, rel=1e-3)  # printed with four digits
    assert moved(tmp_path / "out") > 1e-2


def test_the_program_runs_without_them_as_plain_TRL(tmp_path: Path) -> None:
    stock = reverse((EXAMPLES / "two_words.diff").read_text(), (EXAMPLES / "minimal.py").read_text())
    assert "troll" not in stock.lower()
    (tmp_path / "stock.py").write_text(stock)
    history = printed(run(tmp_path / "stock.py", "--tiny", "--output_dir", "out", folder=tmp_path))
    assert len(history) == 16
    assert moved(tmp_path / "out") > 1e-2
    assert not any(name.startswith("troll/") for name in history[-1])
    assert all(entry["clip_ratio/region_mean"] == 0 for entry in history)
    assert "one update per rollout, on which no clip acts" in README


# ---------------------------------------------------------------------- GSM8K


def test_gsm8k_runs_tiny_and_logs_what_is_explained(tmp_path: Path) -> None:
    output = run(EXAMPLES / "gsm8k.py", "--tiny", "--output_dir", "out", folder=tmp_path)
    history = saved(tmp_path / "out")
    assert_bound_acts_and_holds(history)
    assert moved(tmp_path / "out") > 1e-2
    assert "trainer_state.json" in output

    g = torch.Generator().manual_seed(0)
    policy = troll.sparsify(torch.randn(1, 4, 9, generator=g), torch.zeros(1, 4, dtype=torch.long))
    _, explained = troll.troll_loss(policy, policy, torch.ones(1), torch.ones(1, 4, dtype=torch.bool))
    logged = {name.removeprefix("troll/") for name in history[0] if name.startswith("troll/")}
    assert logged == explained.keys() - {"skipped_tokens"}  # tests/test_documents.py: each of them is in metrics.md


def test_gsm8k_reads_files_and_yaml_evaluates_and_clips(tmp_path: Path) -> None:
    """As with a real model, data and a GPU, but for ``use_cpu``."""
    model = tiny_models.save("dense", tmp_path / "model")
    Path(tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gsm8k.PROBLEMS * 4))
    Dataset.from_list(gsm8k.PROBLEMS).to_parquet(tmp_path / "test.parquet")
    settings = tiny_models.settings() | {
        "model_name_or_path": model,
        "trust_region": "none",
        "measure_kl": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "per_device_eval_batch_size": 8,
        "max_steps": 2,
    }
    (tmp_path / "my.yaml").write_text(json.dumps(settings))  # JSON is YAML
    files = [
        "--dataset",
        "train.jsonl",
        "--eval_dataset",
        "test.parquet",
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "2",
    ]
    flags = ["--config", "my.yaml", "--trust_region", "clip", "--output_dir", "out", *files]
    run(EXAMPLES / "gsm8k.py", *flags, folder=tmp_path)
    first, second = saved(tmp_path / "out")
    assert first["rewards/exact_match/mean"] == 0  # and nothing else is rewarded
    assert "rewards/digits/mean" not in first
    assert "clip_ratio/region_mean" in second  # the flag won over the file
    assert "troll/kl_before/mean" in second
    assert "troll/kl_after/mean" not in second
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "eval_reward" in entry] == [2]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", "72"),
        ("3 * 4 = 12\nso\n#### 12\n", "12"),
        ("####12", "12"),
        ("#### 1,250", "1250"),
        ("#### 1,234,567", "1234567"),
        ("#### -5", "-5"),
        ("#### 0.25", "0.25"),
        ("#### -1,000.50", "-1000.5"),
        ("#### $18", "18"),
        ("#### 7.", "7"),
        ("#### 007", "7"),
        ("#### 3\nno, wait\n#### 4", "4"),  # the last one counts
        ("#### 4\n#### four", None),
        ("#### 4 or 5", None),
        ("#### 4\nThat is all.", None),
        ("#### 12 apples", None),
        ("#### 1,25", None),
        ("#### 1,2345", None),
        ("#### 1.2.3", None),
        ("#### --5", None),
        ("#### ٣", None),
        ("#### ", None),
        ("####", None),
        ("### 4", None),
        ("The answer is 4", None),
        ("4", None),
        ("", None),
    ],
)
def test_the_final_number(text: str, number: str | None) -> None:
    assert gsm8k.final_number(text) == (None if number is None else Decimal(number))


def test_the_reward_of_gsm8k_is_an_exact_match() -> None:
    texts = ["#### 1,250", "#### 1250.00", "#### 1251", "1250", "#### 1250 #### "]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert gsm8k.exact_match(completions, answer=["1250"] * 5, prompts=[]) == [1, 1, 0, 0, 0]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data read from files are copied here, and not to the home of whoever runs the tests."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
def test_gsm8k_reads_question_and_answer_from_a_file(cache: Path, form: str) -> None:
    file = str(cache / f"problems.{form}")
    data = Dataset.from_list(gsm8k.PROBLEMS)
    data.to_parquet(file) if form == "parquet" else data.to_json(file)
    rows = list(gsm8k.load(file, "train"))
    assert [row["answer"] for row in rows] == ["12", "1250", "-5", "84"]
    assert [row["prompt"][1]["content"] for row in rows] == [problem["question"] for problem in gsm8k.PROBLEMS]
    assert "####" in rows[0]["prompt"][0]["content"]


def test_data_that_cannot_be_used_are_refused_with_a_reason(cache: Path) -> None:
    file = cache / "data.jsonl"
    for load in (lambda name: gsm8k.load(name, "train"), preference.load):
        with pytest.raises(SystemExit, match=r"nowhere.jsonl does not exist; give a file, or a name on the hub"):
            load(str(cache / "nowhere.jsonl"))
        file.write_text('{"problem": "1 + 1", "solution": "2"}\n')
        with pytest.raises(SystemExit, match="has the columns problem, solution; expected"):
            load(str(file))
    file.write_text('{"question": "1 + 1?", "answer": "It is 2."}\n')
    with pytest.raises(SystemExit, match=r"an answer that does not end in '#### number': 'It is 2.'"):
        gsm8k.load(str(file), "train")


def test_help_teaches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for program in (gsm8k, lora, preference):
        monkeypatch.setattr(sys, "argv", ["program.py", "--help"])
        with pytest.raises(SystemExit) as stopped:
            program.main()
        assert stopped.value.code == 0
        shown = capsys.readouterr().out
        assert program.__doc__.strip() in shown  # as it is written
        for field in dataclasses.fields(TROLLConfig):
            assert f"--{field.name}" in shown
        bound = TROLLConfig.__dataclass_fields__["kl_bound"].metadata["help"]
        assert "0.05 with preset 'paper'" in bound
        assert bound in " ".join(shown.split())
        assert "as in the paper. (default: paper)" in " ".join(shown.split())
        assert "(default: constant)" in shown  # the program's own settings


# ---------------------------------------------------------------------- LoRA and a reward model


def test_lora_trains_an_adapter_and_leaves_the_model_alone(tmp_path: Path) -> None:
    output = run(EXAMPLES / "lora.py", "--tiny", "--output_dir", "out", "--beta", "0.05", folder=tmp_path)
    history = saved(tmp_path / "out")
    assert_bound_acts_and_holds(history)
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-9)  # the adapter starts as zero
    assert history[-1]["kl"] > 1e-3
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert adapter
    assert all("lora_" in name for name in adapter)
    assert all(weight.abs().max() > 1e-2 for name, weight in adapter.items() if "lora_B" in name)  # zero at first
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert re.search(r"trainable params: [\d,]+", output)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_dropout"] == 0


def test_preference_trains_on_a_reward_model_with_a_reference(tmp_path: Path) -> None:
    run(EXAMPLES / "preference.py", "--tiny", "--output_dir", "out", "--beta", "0.05", folder=tmp_path)
    history = saved(tmp_path / "out")
    assert_bound_acts_and_holds(history)
    assert moved(tmp_path / "out") > 1e-2
    assert "rewards/tiny-reward-model/mean" in history[0]
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert history[-1]["kl"] > 1e-3


@pytest.mark.parametrize("prompt", ["Say hello.", [{"role": "user", "content": "Say hello."}]], ids=["text", "chat"])
def test_prompts_are_chats_in_the_end(cache: Path, prompt: Any) -> None:
    (cache / "prompts.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    assert list(preference.load(str(cache / "prompts.jsonl"))) == [
        {"prompt": [{"role": "user", "content": "Say hello."}]}
    ]


# ---------------------------------------------------------------------- docs/trl.md


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def rows(header: str) -> list[list[str]]:
    """The cells of the table of docs/trl.md whose header begins so."""
    table = re.split(rf"^\| {header} \|.*\n\|-.*\n", DOC, flags=re.MULTILINE)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_the_table_of_settings_has_every_field_and_its_default() -> None:
    own = [field for field in dataclasses.fields(TROLLConfig) if field.name in TROLLConfig.__annotations__]
    shown = {name.strip("`"): ast.literal_eval(default.strip("`")) for name, default, _ in rows("field")}
    assert shown == {field.name: field.default for field in own}
    assert all(meaning for *_, meaning in rows("field"))


def test_the_tables_of_losses_and_estimators(tmp_path: Path) -> None:
    for names, status, why in rows("`loss_type`"):
        for name in re.findall(r"`(\w+)`", names):
            assert why
            assert (status == "supported") == (name in LOSS_TYPES)
            if status == "refused":
                for trust_region in ("troll", "none"):
                    with pytest.raises(InputError, match=name):
                        trl_cases.config(tmp_path, loss_type=name, trust_region=trust_region)
                trl_cases.config(tmp_path, loss_type=name, trust_region="clip")
    mentioned = {name for names, *_ in rows("`loss_type`") for name in re.findall(r"`(\w+)`", names)}
    section = re.search(r"loss_type \(`str`.*?mask_truncated_completions", str(GRPOConfig.__doc__), flags=re.DOTALL)
    assert section
    assert mentioned == set(re.findall(r'- `"(\w+)"`', section[0]))  # all there are
    assert [name.strip("`") for name, _ in rows("`advantage_estimator`")] == list(get_args(Estimator))


def test_the_schedule_is_as_explained(tmp_path: Path) -> None:
    base = {"updates_per_generation": None, "num_generations": 8}
    args = trl_cases.config(tmp_path, **base)
    assert (args.updates_per_generation, args.generation_batch_size) == (8, 64)  # "64 completions of 8 prompts"
    assert trl_cases.config(tmp_path, **base, gradient_accumulation_steps=2).steps_per_generation == 16
    assert trl_cases.config(tmp_path, **base, steps_per_generation=4).updates_per_generation == 4
    assert trl_cases.config(tmp_path, **base, num_iterations=3).updates_per_generation == 3
    uneven = trl_cases.config(tmp_path, **base, steps_per_generation=4, gradient_accumulation_steps=3)
    assert uneven.updates_per_generation is None
    assert uneven.trust_region_can_act
    both = trl_cases.config(tmp_path, num_generations=8, updates_per_generation=4, num_iterations=2)
    assert (both.steps_per_generation, both.steps_per_rollout) == (2, 4)
    with pytest.raises(InputError, match="updates_per_generation=4 contradicts steps_per_generation=2"):
        trl_cases.config(tmp_path, updates_per_generation=4, steps_per_generation=2)


def test_the_first_program_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but for the model and what a CPU needs."""
    first, *others = blocks(DOC, "python")
    for block in others:
        compile(block, "docs/trl.md", "exec")
    settings = tiny_models.settings() | {"max_steps": 3, "disable_tqdm": True}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(troll.trl, "TROLLConfig", lambda *args, **own: TROLLConfig(*args, **settings, **own))
    tiny_models.save("dense", "model")
    names: dict[str, Any] = {"reward": trl_cases.lower_case, "prompts": trl_cases.prompts()}
    exec(first.replace("Qwen/Qwen2.5-1.5B-Instruct", "model"), names)
    history = names["trainer"].state.log_history
    assert [entry["troll/kl_after/max"] <= DEFAULT * (1 + 1e-5) for entry in history if "loss" in entry] == [True] * 3
    assert history[2]["troll/kl_before/max"] > DEFAULT * (1 + 1e-5)


def test_every_command_that_is_shown_names_a_program_and_flags_that_exist() -> None:
    minimal = {"--tiny", "--model", "--output_dir"}
    ours = {
        program.__name__: {
            option for action in gsm8k.flags(program.Task, {}, "")._actions for option in action.option_strings
        }
        for program in (gsm8k, lora, preference)
    } | {"minimal": minimal, "stock": minimal}
    sources = [*blocks(DOC, "sh"), *blocks(README, "sh"), gsm8k.__doc__, lora.__doc__, preference.__doc__]
    commands = [line for text in sources for line in text.splitlines() if re.search(r"(^|\s|/)\w+\.py\s*", line)]
    seen = 0
    for command in commands:
        for program, flags in re.findall(
            r"(?:python|--num_processes 4) (?:examples/trl/)?(\w+)\.py((?: [^\s#]\S*)*)", command
        ):
            assert set(re.findall(r"--\w+", flags)) <= ours[program] | {"--config"}, command
            seen += 1
    assert seen >= 20
