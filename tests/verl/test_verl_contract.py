"""The tables of ``troll.verl.contract`` hold and are complete: they have every import from verl and every override."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from troll.contract import broken
from troll.verl import contract

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted((ROOT / "src/troll/verl").glob("*.py")), ROOT / "src/troll/lab/verl/stop_token_loop.py"]
TABLES = [x for x in vars(contract).values() if isinstance(x, dict) and all(":" in str(key) for key in x)]
IMPORTABLE = {name: x for table in TABLES if table is not contract.MEGATRON for name, x in table.items()}
ALL = {**IMPORTABLE, **contract.MEGATRON}
VERL = Path(importlib.util.find_spec("verl").origin).parent  # type: ignore[union-attr, arg-type]


def test_the_tables_are_found() -> None:
    assert len(TABLES) == 7
    assert len(ALL) > 40


@pytest.mark.parametrize("name", IMPORTABLE)
def test_the_installed_verl_has_it(name: str) -> None:
    assert broken(name, IMPORTABLE[name]) == ""


# ------------------------------------------------------------------ completeness


def imports(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Module, name and local name of everything that a module imports from verl."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl":
            for alias in node.names:
                yield str(node.module), alias.name, alias.asname or alias.name


def used(path: Path) -> Iterator[str]:
    """What a module imports from verl, as the tables write it; of a module, the attributes that are used or patched."""
    tree = ast.parse(path.read_text())
    for module, name, local in imports(tree):
        if _is_module(f"{module}.{name}"):
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == local:
                    yield f"{module}.{name}:{node.attr}"
        else:
            attributes = {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == local
            }
            if name == "EngineRegistry":
                yield from (f"{module}:{name}.{attribute}" for attribute in attributes)
            else:
                yield f"{module}:{name}"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def overrides(path: Path) -> Iterator[tuple[str, str]]:
    """Class and method for every method that calls the same method of its parent, and for every attribute of ``self``
    that neither this class nor ``TrustRegion`` defines."""
    ours = {
        node.target.id if isinstance(node, ast.AnnAssign) else node.name  # type: ignore[union-attr]
        for source in SOURCES
        for cls in ast.walk(ast.parse(source.read_text()))
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign)
    }
    for cls in ast.walk(ast.parse(path.read_text())):
        if not isinstance(cls, ast.ClassDef):
            continue
        own = ours | {
            node.attr
            for source in SOURCES
            for node in ast.walk(ast.parse(source.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        for node in ast.walk(cls):
            if not isinstance(node, ast.Attribute):
                continue
            parent = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
            itself = isinstance(node.value, ast.Name) and node.value.id == "self"
            if (parent and not node.attr.startswith("__")) or (itself and node.attr not in own):
                yield cls.name, node.attr


def known_attributes() -> set[str]:
    return {name.rsplit(".", 1)[-1].rsplit(":", 1)[-1] for name in ALL}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_import_is_in_a_table(path: Path) -> None:
    missing = {name for name in used(path) if name not in ALL}
    assert not missing


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_override_and_inherited_attribute_is_in_a_table(path: Path) -> None:
    missing = {(cls, name) for cls, name in overrides(path) if name not in known_attributes()}
    assert not missing


def test_every_override_in_the_mro_is_in_a_table() -> None:
    """What the syntax does not show: a method that replaces one of verl's without calling it."""
    found = set()
    for path in SOURCES:
        if path.name == "megatron.py":
            continue
        package = "troll.lab.verl" if "lab" in path.parts else "troll.verl"
        module = importlib.import_module(package if path.stem == "__init__" else f"{package}.{path.stem}")
        for cls in vars(module).values():
            if not (inspect.isclass(cls) and cls.__module__ == module.__name__):
                continue
            bases = [base for base in cls.__mro__ if base.__module__.startswith("verl.")]
            for name, value in vars(cls).items():
                if inspect.isfunction(value) and not name.startswith("__") and any(name in vars(x) for x in bases):
                    found.add(name)
    assert {"prepare_model_outputs", "forward_backward_batch", "_init_agent_loop_workers", "run"} <= found
    assert found <= known_attributes()


# ------------------------------------------------------------------ Megatron, which need not be installed


def functions(path: Path) -> dict[str, list[str]]:
    """All functions of a source file, by class and name, with their parameters."""
    result = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            result[node.name] = [x.arg for x in (*node.args.args, *node.args.kwonlyargs)]
    return result


@pytest.mark.parametrize("name", [name for name, x in contract.MEGATRON.items() if "(" not in x and "." in name])
def test_verls_sources_have_what_megatron_needs(name: str) -> None:
    module, _, path = name.partition(":")
    if "." not in path and path[0].isupper():
        return
    file = VERL.joinpath(*module.split(".")[1:])
    source = file / "transformer_impl.py" if file.is_dir() else file.with_suffix(".py")
    inherited = VERL / "workers" / "engine" / "base.py"
    got = {**functions(inherited), **functions(source)}[path.rsplit(".", 1)[-1]]
    expected = [word.strip() for word in contract.MEGATRON[name].replace("*,", "").split(",")]
    assert set(expected) <= set(got)


# ------------------------------------------------------------------ what a user sees

BREAKS: list[tuple[str, Any]] = [
    ("verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_outputs", None),
    ("verl.workers.utils.losses:ppo_loss", lambda config, outputs, data: None),
    ("verl.models.transformers.monkey_patch:is_trl_available", None),
    ("verl.workers.engine:BaseEngine.disable_adapter", lambda self, name: None),
]


@pytest.mark.parametrize(("name", "value"), BREAKS)
def test_a_verl_that_lacks_it_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, last = path.split(".")
    for cls in classes:
        owner = getattr(owner, cls)
    if value is None:
        monkeypatch.delattr(owner, last)
    else:
        monkeypatch.setattr(owner, last, value)
    with pytest.raises(
        ImportError, match=rf"{last} (does not exist|takes \(.*\) instead of) .*troll supports verl>=0.9"
    ):
        contract.check(*TABLES[:4])


@pytest.mark.slow
def test_importing_troll_verl_fails_with_one_sentence() -> None:
    code = (
        "import sys, verl.workers.utils.padding as p; del p.no_padding_2_padding\n"
        "for name in [x for x in sys.modules if x.startswith('troll.verl')]:\n"
        "    del sys.modules[name]  # verl has imported it, as its plug-in\n"
        "try:\n    import troll.verl\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "verl.workers.utils.padding.no_padding_2_padding does not exist (verl 0.9" in done.stdout


def test_the_supported_versions_are_those_of_the_package() -> None:
    assert f'"verl{contract.SUPPORTED}"' in (ROOT / "pyproject.toml").read_text()
