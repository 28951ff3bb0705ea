"""A process over pipes: its first word, tokens, deadlines, its end."""

from __future__ import annotations

import sys

import pytest

from troll.rewards.workers import Conversation, NoReply
from troll.rewards.workers.lines import Ended, Garbled, Late

ECHO = """
import json, sys, time
print('"ready"', flush=True)
for line in sys.stdin:
    question = json.loads(line)
    EXTRA
    print(json.dumps({"token": question["token"], "reply": question["asked"]}), flush=True)
"""


def echo(extra: str = "pass") -> Conversation:
    return Conversation([sys.executable, "-c", ECHO.replace("EXTRA", extra)], {})


def test_it_replies_to_what_was_asked():
    conversation = echo()
    assert [conversation.ask(60.0, asked=i) for i in ("a", {"b": [1]}, "\ud800", "x" * 500_000)] == [
        "a", {"b": [1]}, "\ud800", "x" * 500_000,
    ]  # fmt: skip
    conversation.end()


def test_a_reply_that_comes_too_late_is_none():
    conversation = echo("time.sleep(60)")
    with pytest.raises(Late):
        conversation.ask(0.2, asked=1)
    conversation.end()


def test_a_reply_without_the_token_is_none():
    for extra in ("question['token'] = 'guess'", "print('[1]', flush=True)"):
        conversation = echo(extra)
        with pytest.raises(Garbled):
            conversation.ask(60.0, asked=1)
        conversation.end()


def test_an_end_is_said_at_once():
    conversation = echo("sys.exit(0)")
    with pytest.raises(Ended):
        conversation.ask(60.0, asked=1)
    conversation.end()


def test_what_does_not_start_says_why():
    for code, says in (("raise SystemExit('no memory')", "no memory"), ("pass", "it ended"), ("print(1)", "else than")):
        with pytest.raises(NoReply, match=says):
            Conversation([sys.executable, "-c", code], {})


def test_it_ends_with_the_last_use():
    conversation = echo()
    process = conversation._process
    del conversation
    assert process.returncode is not None
