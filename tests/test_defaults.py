"""``kl_bound`` has one default, wherever it has one."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import troll
from troll import diagnostics, objective
from troll.lab.report import page
from troll.lab.report.rules import trust_region as region
from troll.objective.bound import Fixed
from troll.projection import KL_BOUND
from troll.trl import TROLLConfig

SOURCES = Path(troll.__file__).parent
FUNCTIONS = (
    *(troll.troll_loss, troll.fused_troll_loss),
    *(diagnostics.by_position, diagnostics.by_class, diagnostics.by_advantage),
    *(diagnostics.compare_gradients, diagnostics.solver_conditioning),
)


def test_it_is_ours_and_not_the_papers() -> None:
    assert KL_BOUND == 0.2


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_of_functions(function: Any) -> None:
    assert inspect.signature(function).parameters["kl_bound"].default is KL_BOUND


@pytest.mark.parametrize("package", [troll, objective, diagnostics], ids=lambda package: package.__name__)
def test_no_public_function_is_missing_above(package: Any) -> None:
    public = [getattr(package, name) for name in package.__all__]
    given = [f for f in public if inspect.isfunction(f) and "kl_bound" in inspect.signature(f).parameters]
    empty = inspect.Parameter.empty
    assert {f for f in given if inspect.signature(f).parameters["kl_bound"].default is not empty} <= set(FUNCTIONS)


@pytest.mark.parametrize("settings", [Fixed, TROLLConfig], ids=lambda settings: settings.__name__)
def test_of_settings(settings: type) -> None:
    (default,) = [field.default for field in dataclasses.fields(settings) if field.name == "kl_bound"]
    assert default is KL_BOUND


def test_of_verl() -> None:
    """Read and not imported, as verl may not be here; the file cannot name the constant."""
    given = yaml.safe_load((SOURCES / "verl/configs/trust_region/loss.yaml").read_text())
    assert given["actor_rollout_ref"]["actor"]["policy_loss"]["kl_bound"] == KL_BOUND


def test_of_pages_and_advice() -> None:
    """They may not import the method, so they have the number again."""
    assert page._NO_SCALE == region.WIDE_BOUND == KL_BOUND


def literals(tree: ast.AST) -> Iterator[ast.expr]:
    """What stands as the default of a parameter or of a field called ``kl_bound``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "kl_bound":
            if isinstance(node.value, ast.Call):
                yield from (word.value for word in node.value.keywords if word.arg == "default")
            elif node.value is not None:
                yield node.value
        if isinstance(node, ast.FunctionDef):
            named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            last = [*node.args.posonlyargs, *node.args.args][-len(node.args.defaults) or None :]
            pairs = [*named, *zip(last, node.args.defaults, strict=False)]
            yield from (value for name, value in pairs if name.arg == "kl_bound" and value is not None)


def test_no_source_has_a_number_of_its_own() -> None:
    """But for ``SequenceBudget``, whose tokens have no bound of their own."""
    found = [
        (path.relative_to(SOURCES).as_posix(), ast.unparse(value))
        for path in sorted(SOURCES.rglob("*.py"))
        for value in literals(ast.parse(path.read_text()))
    ]
    assert {name for name, _ in found} >= {"verl/config.py", "trl/config.py", "objective/fused.py"}
    assert [case for case in found if case[1] != "KL_BOUND"] == [("objective/bound/tokens.py", "math.inf")]
