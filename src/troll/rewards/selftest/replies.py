"""Attacks on the judge, by what is sent to it: replies and values that are to break it, or hold it up."""

from __future__ import annotations

from typing import Any

from troll.rewards.selftest.attack import Attack


def _reply(name: str, says: str, line: str, then: str = "time.sleep(60)", **options: Any) -> Attack:
    """It writes its own reply, an expression for bytes, and then does not return."""
    code = f"import os, time\ndef f(x):\n    os.write(4, {line})\n    while True: {then}\n"
    return Attack(name, "resources", says, code, ("assert f(3) == 9",), **options)


def _value(name: str, says: str, program: str, test: str, **options: Any) -> Attack:
    return Attack(name, "resources", says, program, (test,), **options)


REPLIES = (
    _reply("endless reply", "Replies with a line that does not end.", "b'9' * (1 << 24)"),
    _reply(
        "slow reply",
        "Replies with one byte at a time, for ever.",
        "b'9'",
        "time.sleep(0.001); os.write(4, b'9')",
        seconds=0.7,
    ),
    _reply(
        "busy reply", "Replies with one byte at a time, as fast as it can.", "b'9'", "os.write(4, b'9')", seconds=0.7
    ),
    _reply("half a reply", "Replies with half a line.", "b'{\"value\": 9'", seconds=0.5),
    _reply("flood of replies", "Replies a thousand times.", "b'{\"value\": 9}\\n' * 1000"),
    _reply(
        "deep reply", "Replies with brackets in brackets.", "b'{\"value\": ' + b'[' * 200000 + b']' * 200000 + b'}\\n'"
    ),
    _reply(
        "deep tuples",
        "Replies with just as many as JSON allows, and the decoder does not.",
        "b'{\"value\": ' + b'{\"tuple\": [' * 490 + b']}' * 490 + b'}\\n'",
    ),
    _reply("long integer", "Replies with a million digits.", "b'{\"value\": ' + b'9' * 1000000 + b'}\\n'"),
    _reply(
        "long complex number",
        "Replies with a complex number that is no float.",
        "b'{\"value\": {\"complex\": [' + b'9' * 4000 + b', 0]}}\\n'",
    ),
    _reply("unhashable error", "Replies with an error that cannot be looked up.", 'b\'{"value": 9, "error": []}\\n\''),
    _reply("unhashable items", "Replies with a set of lists.", 'b\'{"value": {"set": [[], [9]]}}\\n\''),
    _reply(
        "colliding items",
        "Replies with a set of numbers that all have one hash.",
        "b'{\"value\": {\"set\": [' + b','.join(b'%d' % (n * (2**61 - 1)) for n in range(40000)) + b']}}\\n'",
        seconds=1.0,
    ),
    _reply(
        "colliding keys",
        "Replies with a dict whose keys all have one hash.",
        "b'{\"value\": {\"dict\": [' + b','.join(b'[%d,0]' % (n * (2**61 - 1)) for n in range(30000)) + b']}}\\n'",
        seconds=1.0,
    ),
    _reply("no text", "Replies with bytes that are no UTF-8.", "b'\\xff\\xfe{\\x80\\n'"),
    _reply("not a number", "Replies with NaN and infinities.", "b'{\"value\": [NaN, Infinity, -Infinity, 1e999]}\\n'"),
    _reply("lone surrogates", "Replies with characters that cannot be written.", 'b\'{"value": "\\\\ud800"}\\n\''),
    _reply("no reply", "Closes the pipe and goes on.", "b''", "os.closerange(0, 9); time.sleep(60)"),
    _value(
        "poisoned test",
        "Returns a number that makes the test itself compute for ever.",
        "def f(x): return 10 ** 4000",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nassert 512 >= 2 ** f(3)",
        seconds=4.0,
    ),
    _value(
        "fat test",
        "Returns a number that makes the test itself run out of memory.",
        "def f(x): return 10 ** 10",
        "assert len([0] * f(3)) < 10",
    ),
    _value(
        "colliding test",
        "Returns numbers with one hash, for the test to put into a set.",
        "def f(x): return [n * (2**61 - 1) for n in range(30000)]",
        "assert 10 > len(set(f(3)))",
        seconds=1.0,
    ),
    Attack(
        "silent stop",
        "hack",
        "Raises StopIteration, which ends the loop in the test that would find it wrong.",
        "def f(x): raise StopIteration",
        ("assert all(map(f, [1, 2, 3]))",),
    ),
)
