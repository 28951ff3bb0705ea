"""The settings of the trust region have one default, wherever they have one: that of the preset ``"default"``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import troll
from troll import diagnostics, objective
from troll.errors import InputError
from troll.lab.report import page
from troll.lab.report.rules import trust_region as region
from troll.objective import PRESETS, Preset, resolve
from troll.objective.bounds import FixedBound
from troll.policy import MAX_SUPPORT, TAIL, TAIL_MASS
from troll.projection import KL_BOUND
from troll.trl import TROLLConfig

SOURCES = Path(troll.__file__).parent
SETTINGS = {field.name for field in dataclasses.fields(Preset)}
BY_PRESET = (troll.troll_loss, troll.fused_troll_loss, diagnostics.compare_gradients)
"""They take ``preset``; None for a setting is the preset's."""
BY_CONSTANT = (diagnostics.by_position, diagnostics.by_class, diagnostics.by_advantage, diagnostics.solver_conditioning)


def test_they_are_ours_and_not_the_papers() -> None:
    assert PRESETS["default"] == Preset(0.2, 1.0, "bucket", 64, 1e-5)
    assert PRESETS["paper"] == Preset(0.05, 1.0, "floor", 64, 1e-5)
    assert PRESETS["default"] == Preset(KL_BOUND, 1.0, TAIL, MAX_SUPPORT, TAIL_MASS)


def test_an_explicit_value_wins_over_the_preset() -> None:
    assert resolve("paper", kl_bound=0.0, tail="bucket") == Preset(0.0, 1.0, "bucket", 64, 1e-5)
    with pytest.raises(InputError, match="preset must be"):
        resolve("papers")  # type: ignore[arg-type]


@pytest.mark.parametrize("function", BY_PRESET, ids=lambda function: function.__name__)
def test_of_functions_with_presets(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert parameters["preset"].default == "default"
    assert {parameters[name].default for name in SETTINGS & parameters.keys()} == {None}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_settings(preset: Any) -> None:
    """Of the loss, and of the loss from hidden states, which selects the proposal's tokens itself."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(2, 5, 6, generator=g), torch.randn(90, 6, generator=g)
    sampled, mask, advantages = torch.zeros(2, 5).long(), torch.ones(2, 5), torch.tensor([1.0, -1.0])
    logits, old = hidden @ weight.T, troll.sparsify(2 * hidden @ weight.T, sampled)
    settings = dataclasses.asdict(PRESETS[preset])
    proposal = troll.restrict(logits, old) if settings["tail"] == "bucket" else troll.sparsify(logits, sampled)
    three = {name: settings[name] for name in ("kl_bound", "regression_coef", "tail")}

    def loss(**options: Any) -> torch.Tensor:
        return troll.troll_loss(proposal, old, advantages, mask, **options)[0]

    def fused(**options: Any) -> torch.Tensor:
        return troll.fused_troll_loss(hidden, troll.Head(weight), old, advantages, mask, **options)[0]

    assert torch.equal(loss(preset=preset), loss(**three))
    assert not torch.equal(loss(**three | {"kl_bound": 0.05}), loss(**three | {"kl_bound": 0.2}))
    assert torch.equal(fused(preset=preset), fused(**settings))
    torch.testing.assert_close(fused(preset=preset), loss(preset=preset))


@pytest.mark.parametrize("function", BY_CONSTANT, ids=lambda function: function.__name__)
def test_of_functions(function: Any) -> None:
    assert inspect.signature(function).parameters["kl_bound"].default is KL_BOUND


@pytest.mark.parametrize("package", [troll, objective, diagnostics], ids=lambda package: package.__name__)
def test_no_public_function_is_missing_above(package: Any) -> None:
    public = [getattr(package, name) for name in package.__all__]
    given = [f for f in public if inspect.isfunction(f) and "kl_bound" in inspect.signature(f).parameters]
    empty = inspect.Parameter.empty
    with_default = {f for f in given if inspect.signature(f).parameters["kl_bound"].default is not empty}
    assert with_default - {resolve} <= {*BY_PRESET, *BY_CONSTANT}


def test_of_a_fixed_bound() -> None:
    (default,) = [field.default for field in dataclasses.fields(FixedBound) if field.name == "kl_bound"]
    assert default is KL_BOUND


@pytest.mark.parametrize("preset", PRESETS)
def test_of_TROLLConfig(preset: str, tmp_path: Path) -> None:
    """No number of its own: the preset fills in what is not given."""
    chosen = TROLLConfig(str(tmp_path), preset=preset, use_cpu=True, bf16=False)
    for field in dataclasses.fields(PRESETS[preset]):
        (default,) = [x.default for x in dataclasses.fields(TROLLConfig) if x.name == field.name]
        assert default is None
        assert getattr(chosen, field.name) == getattr(PRESETS[preset], field.name)


def test_of_verl() -> None:
    """Read and not imported, as verl may not be installed: the preset, and no number beside it."""
    loss = yaml.safe_load((SOURCES / "verl/configs/trust_region/loss.yaml").read_text())
    settings = loss["actor_rollout_ref"]["actor"]["policy_loss"]
    assert settings["preset"] == "default"
    assert {settings[name] for name in SETTINGS & settings.keys()} == {None}


def test_of_pages_and_advice() -> None:
    """They may not import the method, so they have the number again."""
    assert page._NO_SCALE == region.WIDE_BOUND == KL_BOUND


def literals(tree: ast.AST) -> Iterator[tuple[str, ast.expr, bool]]:
    """The defaults of parameters and fields called like a setting, and whether a ``preset`` stands beside them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = [x for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)]
            names = [ast.unparse(field.target) for field in fields]
            for name, value in zip(names, (field.value for field in fields), strict=True):
                if isinstance(value, ast.Call):
                    value = next((word.value for word in value.keywords if word.arg == "default"), None)
                if name in SETTINGS and value is not None:
                    yield name, value, "preset" in names
        if isinstance(node, ast.FunctionDef):
            plain = [*node.args.posonlyargs, *node.args.args]
            pairs = [*zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
            pairs += zip(plain[len(plain) - len(node.args.defaults) :], node.args.defaults, strict=True)
            preset = "preset" in [x.arg for x in (*plain, *node.args.kwonlyargs)]
            yield from ((x.arg, value, preset) for x, value in pairs if x.arg in SETTINGS and value is not None)


CONSTANTS = {
    "kl_bound": "KL_BOUND",
    "regression_coef": "1.0",
    "tail": "TAIL",
    "max_support": "MAX_SUPPORT",
    "tail_mass": "TAIL_MASS",
}


def test_no_source_has_a_number_of_its_own() -> None:
    """But for ``SequenceBound``, whose tokens have no bound of their own. ``tail=None`` is the proposal's."""
    found = [
        (path.relative_to(SOURCES).as_posix(), name, ast.unparse(value), preset)
        for path in sorted(SOURCES.rglob("*.py"))
        for name, value, preset in literals(ast.parse(path.read_text()))
    ]
    assert {path for path, *_ in found} >= {"verl/config.py", "trl/config.py", "objective/presets.py"}
    other = [
        (path, name, value)
        for path, name, value, preset in found
        if value != CONSTANTS[name] and not (value in ("None", "_FROM_PRESET") and (preset or name == "tail"))
    ]
    assert other == [("objective/bounds.py", "kl_bound", "math.inf")]
