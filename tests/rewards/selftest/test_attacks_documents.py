"""The pages about the sandbox list the attacks that there are."""

from __future__ import annotations

import re
from pathlib import Path

from troll.rewards.selftest import suite
from troll.rewards.selftest.hacks import HACKS

DOCS = Path(__file__).parents[3] / "docs"
PAGE, REWARDS = (DOCS / "attacks.md").read_text(), (DOCS / "rewards.md").read_text()


def test_every_attack_is_on_the_page_with_what_held():
    row = re.compile(r"^\| ([^|]+) \| ([^|]+) \| (held|known limit) \| (held|known limit) \|$", re.MULTILINE)
    known = {attack.name for attack in suite.ATTACKS if "landlock" in attack.known}
    made = {attack.name: attack.description for attack in suite.ATTACKS} | {
        hack.name: hack.description for hack in HACKS
    }
    assert sorted(made) == sorted(suite.names())
    shown = row.findall(PAGE)
    assert {name: says for name, says, _, _ in shown} == made
    assert {name for name, _, _, landlock in shown if landlock != "held"} == known
    assert {bubblewrap for _, _, bubblewrap, _ in shown} == {"held"}
    assert f"against {len(made)} of {len(made)} attacks" in PAGE
    assert f"tries {len(made)} attacks" in REWARDS
