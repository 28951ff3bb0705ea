"""``scripts/mutations.py`` breaks the code in places that are still there."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "mutations.py"))


@pytest.mark.parametrize("mutation", SCRIPT["MUTATIONS"], ids=lambda mutation: mutation.name)
def test_a_mutation_finds_its_place_and_changes_it(mutation):
    text = (ROOT / "src" / "troll" / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.before) == 1
    assert mutation.before != mutation.after


def test_no_two_have_one_name():
    names = [mutation.name for mutation in SCRIPT["MUTATIONS"]]
    assert len(set(names)) == len(names)
