"""JSON lines over pipes and worker processes: replies, tokens, deadlines, and every way to have no valid reply."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from troll.rewards.workers import NoReply, WorkerProcess
from troll.rewards.workers.process import JsonLines, PipeClosed, ReplyInvalid, ReplyLate, ReplyTooLong


@pytest.fixture
def pipes():
    """This end, and the two ends of the other."""
    (replies, to_us), (from_us, requests) = os.pipe(), os.pipe()
    handles = {replies, to_us, from_us, requests}
    yield JsonLines(replies, requests, max_bytes=1000), to_us, from_us, handles
    for handle in handles:
        os.close(handle)


def test_one_line_each_way(pipes):
    lines, to_us, from_us, _ = pipes

    def answer() -> None:
        assert os.read(from_us, 100) == b'{"a": [1, "\\u00fc"]}\n'
        os.write(to_us, b'{"b"')
        os.write(to_us, b": null}\n")

    thread = threading.Thread(target=answer)
    thread.start()
    assert lines.ask(20, {"a": [1, "ü"]}) == {"b": None}
    thread.join()


def test_a_reply_before_its_request_is_invalid(pipes):
    lines, to_us, from_us, _ = pipes
    os.write(to_us, b"7\n")
    with pytest.raises(ReplyInvalid, match="before its request"):
        lines.ask(20, "question")
    os.set_blocking(from_us, False)
    with pytest.raises(BlockingIOError):
        os.read(from_us, 1)  # it was not even asked


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"no json\n", ReplyInvalid),
        (b"1\n2\n", ReplyInvalid),
        (b"\xff\n", ReplyInvalid),
        (b"[" * 900 + b"\n", ReplyInvalid),
        (b"x" * 1001, ReplyTooLong),
        (b'"' + b"x" * 999 + b'"\n', ReplyTooLong),
        (b"1" * 500, ReplyLate),
        (b"", ReplyLate),
    ],
)
def test_a_reply_that_is_not_valid(pipes, reply, kind):
    lines, to_us, _, _ = pipes
    os.write(to_us, reply)
    with pytest.raises(kind):
        lines.receive(0.05)


def test_the_other_end_is_gone(pipes):
    lines, to_us, from_us, handles = pipes
    os.close(to_us)
    handles.remove(to_us)
    with pytest.raises(PipeClosed):
        lines.receive(20)
    with pytest.raises(PipeClosed):
        lines.ask(20, 1)
    os.close(from_us)
    handles.remove(from_us)
    with pytest.raises(PipeClosed):
        lines.send(20, 1)


def test_who_does_not_read_is_late(pipes):
    lines, _, from_us, _ = pipes
    with pytest.raises(ReplyLate):
        lines.send(0.05, "x" * (1 << 20))
    assert os.read(from_us, 3) == b'"xx'


def test_file_descriptors_may_be_large(pipes):
    """Beyond 1,024, where select() ends."""
    lines, to_us, from_us, handles = pipes
    import fcntl
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2100:
        pytest.skip("no such file descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2100), hard))
    high = [fcntl.fcntl(handle, fcntl.F_DUPFD, 2048) for handle in (lines.replies, lines.requests)]
    handles.update(high)
    os.write(to_us, b"3\n")
    far = JsonLines(*high)
    far.send(20, 2)
    assert far.receive(20) == 3
    assert os.read(from_us, 9) == b"2\n"
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


ECHO = """
import json, sys, time
print('"ready"', flush=True)
for line in sys.stdin:
    question = json.loads(line)
    EXTRA
    print(json.dumps({"token": question["token"], "reply": question["asked"]}), flush=True)
"""


def echo(extra: str = "pass") -> WorkerProcess:
    return WorkerProcess([sys.executable, "-c", ECHO.replace("EXTRA", extra)], {})


def test_it_replies_to_what_was_asked():
    worker = echo()
    assert [worker.ask(60.0, asked=i) for i in ("a", {"b": [1]}, "\ud800", "x" * 500_000)] == [
        "a", {"b": [1]}, "\ud800", "x" * 500_000,
    ]  # fmt: skip
    worker.end()


def test_a_late_reply():
    worker = echo("time.sleep(60)")
    with pytest.raises(ReplyLate):
        worker.ask(0.2, asked=1)
    worker.end()


def test_a_reply_without_the_token_is_invalid():
    for extra in ("question['token'] = 'guess'", "print('[1]', flush=True)"):
        worker = echo(extra)
        with pytest.raises(ReplyInvalid):
            worker.ask(60.0, asked=1)
        worker.end()


def test_the_end_of_a_process_is_noticed_at_once():
    worker = echo("sys.exit(0)")
    with pytest.raises(PipeClosed):
        worker.ask(60.0, asked=1)
    worker.end()


def test_a_process_that_does_not_start_gives_the_reason():
    for code, says in (
        ("raise SystemExit('no memory')", "no memory"),
        ("pass", "it ended"),
        ("print(1)", "is not .ready"),
    ):
        with pytest.raises(NoReply, match=says):
            WorkerProcess([sys.executable, "-c", code], {})


def test_a_process_ends_with_its_last_reference():
    worker = echo()
    process = worker._popen
    del worker
    assert process.returncode is not None
