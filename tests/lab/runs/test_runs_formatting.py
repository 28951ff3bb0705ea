"""Foreign text on a terminal."""

from __future__ import annotations

import pytest

from troll.lab.runs.formatting import one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain  text", "plain  text"),
        ("a\nb\r\n\tc", "a b c"),
        ("\x1b[2J\x1b]0;title\x07x\x9b31m", "[2J ]0;title x 31m"),
        ("\u202egnp.exe\u2028b\u2029c\ud83d", "gnp.exe b c"),
        ("漢字 🙂 é → −", "漢字 🙂 é → −"),
        ("\x00", ""),
    ],
)
def test_a_line_cannot_do_anything_to_a_terminal(text: str, shown: str) -> None:
    assert one_line(text) == shown
