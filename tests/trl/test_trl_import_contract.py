"""The import-time contract with TRL: it is complete, and it names what is missing or changed."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from troll.lab.training.recorder import RecordedTrainer
from troll.trl import contract
from troll.trl.robust import checkpoints, fingerprint, state

OURS = [kind for kind in RecordedTrainer.__mro__ if kind.__module__.startswith("troll.")]


def read(code: Any, names: tuple[str, ...]) -> set[str]:
    """Attributes of variables with these names, and of ``super()``."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code)))):
        if isinstance(node, ast.Attribute):
            of = node.value
            is_super = isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"
            if is_super or (isinstance(of, ast.Name) and of.id in names):
                found.add(node.attr)
    return found


def defined(kind: type) -> set[str]:
    """Names in a class: methods, annotations, and what it assigns to self before anybody else does."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    stored = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return set(vars(kind)) | set(vars(kind).get("__annotations__", {})) | stored


def test_every_override_and_every_attribute_of_the_parent_is_in_the_table() -> None:
    table = {*contract.METHODS, *contract.ATTRIBUTES}
    overridden = {name for kind in OURS for name in vars(kind) if hasattr(GRPOTrainer, name)}
    hidden = {
        "__module__",
        "__dict__",
        "__weakref__",
        "__doc__",
        "__parameters__",
        "__annotations__",
        "__firstlineno__",
        "__static_attributes__",
    }
    assert overridden - hidden - table == set()
    ours = {name for kind in OURS for name in defined(kind)} - set(contract.ATTRIBUTES)
    used = {name for kind in OURS for name in read(kind, ("self",))}
    used |= {name for module in (checkpoints, fingerprint, state) for name in read(module, ("trainer",))}
    assert used - ours - table - {"_update"} == set()
    assert {"_tr_loss", "_buffered_inputs", "_metrics", "_logs"} <= used  # the source is read


def test_nothing_in_the_table_is_unused() -> None:
    used = {name for kind in OURS for name in {*vars(kind), *read(kind, ("self",))}}
    used |= {name for module in (checkpoints, fingerprint, state) for name in read(module, ("trainer",))}
    by_name = {"entropy_coef", "_last_world_entropy", "_entropy_window_stats"}  # oom_retry reads them by name
    assert {*contract.METHODS, *contract.ATTRIBUTES} - used == by_name


def test_the_installed_TRL_keeps_it_and_the_versions_are_those_of_the_package() -> None:
    contract.check.__wrapped__()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"trl{contract.SUPPORTED}" in project["optional-dependencies"]["trl"]
    assert f"transformers{contract.TRANSFORMERS}" in project["optional-dependencies"]["trl"]


@pytest.mark.parametrize("name", ["_get_grad_norm", "_compute_loss", "_run_epoch"])
def test_a_method_that_was_renamed_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (owner,) = [kind for kind in GRPOTrainer.__mro__ if name in vars(kind)][:1]
    monkeypatch.delattr(owner, name)
    with pytest.raises(
        ImportError,
        match=rf"GRPOTrainer\.{name} does not exist \(trl 1\.16.*, transformers 5.*\); troll supports trl>=1\.16",
    ):
        contract.check.__wrapped__()


def test_a_method_whose_parameters_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def _compute_loss(self: Any, inputs: Any, model: Any) -> None: ...

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", _compute_loss)
    with pytest.raises(
        ImportError, match=r"_compute_loss takes \(self, inputs, model\) instead of \(self, model, inputs\)"
    ):
        contract.check.__wrapped__()


def test_the_check_runs_before_anything_is_imported_from_TRL() -> None:
    code = (
        "import trl.trainer.utils as u; del u._ChunkedLogProbFunction\n"
        "try:\n    from troll.trl import TROLLConfig\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "trl.trainer.utils._ChunkedLogProbFunction.forward does not exist" in done.stdout
