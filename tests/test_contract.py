"""What is expected of another package, and the one sentence that says what it does not have."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from troll.contract import ATTRIBUTE, EXISTS, broken, check_contract


class Parent:
    kept = 1

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def width(self) -> int:
        return self.size

    def step(self, model: object, inputs: object, scale: float = 1.0) -> None:
        self.last = inputs

    def named(self, model: object, *, first: int, second: int = 2) -> None: ...

    def anything(self, *args: object, **kwargs: object) -> None: ...

    @classmethod
    def make(cls, name: str) -> None:
        cls.made = name


class Child(Parent):
    pass


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("some_package")
    module.Parent, module.Child = Parent, Child  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_package", module)
    return module


HOLDS = {
    "Parent": EXISTS,
    "Child": "size",
    "Child.step": "self, model, inputs",
    "Parent.step": "self, model, inputs, scale",
    "Parent.named": "self, model, *, second, first",
    "Parent.anything": "self",
    "Parent.make": "name",
    "Child.size": ATTRIBUTE,
    "Child.last": ATTRIBUTE,
    "Child.made": ATTRIBUTE,
    "Child.kept": ATTRIBUTE,
    "Child.width": ATTRIBUTE,
}
BROKEN = {
    ("Parents", EXISTS): "does not exist",
    ("Parents.step", "self"): "does not exist",
    ("Parent.walk", "self"): "does not exist",
    ("Parent.step", "self, inputs, model"): "takes (self, model, inputs, scale) instead of (self, inputs, model)",
    ("Parent.step", "self, model"): "takes (self, model, inputs, scale) instead of (self, model)",
    (
        "Parent.named",
        "self, model, *, second",
    ): "takes (self, model, first, second) instead of (self, model, *, second)",
    ("Parent.named", "self, model, *, first, third"): "takes (self, model, first, second) instead of",
    ("Child.weight", ATTRIBUTE): "does not exist",
}


@pytest.mark.parametrize("name", HOLDS)
def test_what_holds(name: str) -> None:
    assert broken(f"some_package:{name}", HOLDS[name]) == ""


@pytest.mark.parametrize(("name", "expected"), BROKEN)
def test_what_does_not(name: str, expected: str) -> None:
    assert BROKEN[name, expected] in broken(f"some_package:{name}", expected)


def test_a_module_that_is_gone() -> None:
    assert broken("some_package.inner:Parent", EXISTS).startswith("cannot be imported (")


def test_the_error_is_one_sentence_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.11.2")
    contract = {"some_package:Parent": EXISTS, "some_package:Parent.walk": "self", "some_package:Gone": EXISTS}
    with pytest.raises(ImportError) as error:
        check_contract({"some-package": ">=0.9,<0.10"}, contract)
    assert str(error.value) == (
        "some_package.Parent.walk does not exist (some-package 0.11.2 installed); troll supports "
        "some-package>=0.9,<0.10. Install supported versions with: pip install 'some-package>=0.9,<0.10'"
    )
    check_contract({"some-package": ">=0.9,<0.10"}, {"some_package:Parent": EXISTS})


def test_a_package_without_metadata() -> None:
    with pytest.raises(ImportError, match=r"does not exist \(some-package \(unknown version\) installed"):
        check_contract({"some-package": ">=1"}, {"some_package:Gone": EXISTS})
