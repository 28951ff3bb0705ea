"""JSON lines over pipes: every way in which a reply can be none."""

from __future__ import annotations

import os
import threading

import pytest

from troll.rewards.workers.lines import Ended, Garbled, Late, Lines, Long


@pytest.fixture
def pipes():
    """This end, and the two ends of the other."""
    (replies, to_us), (from_us, requests) = os.pipe(), os.pipe()
    handles = {replies, to_us, from_us, requests}
    yield Lines(replies, requests, longest=1000), to_us, from_us, handles
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


def test_a_reply_before_its_request_is_none(pipes):
    lines, to_us, from_us, _ = pipes
    os.write(to_us, b"7\n")
    with pytest.raises(Garbled, match="before its request"):
        lines.ask(20, "question")
    os.set_blocking(from_us, False)
    with pytest.raises(BlockingIOError):
        os.read(from_us, 1)  # it was not even asked


@pytest.mark.parametrize(
    ("reply", "kind"),
    [(b"no json\n", Garbled), (b"1\n2\n", Garbled), (b"\xff\n", Garbled), (b"[" * 900 + b"\n", Garbled),
     (b"x" * 1001, Long), (b'"' + b"x" * 999 + b'"\n', Long), (b"1" * 500, Late), (b"", Late)],
)  # fmt: skip
def test_what_is_no_reply(pipes, reply, kind):
    lines, to_us, _, _ = pipes
    os.write(to_us, reply)
    with pytest.raises(kind):
        lines.hear(0.05)


def test_the_other_end_is_gone(pipes):
    lines, to_us, from_us, handles = pipes
    os.close(to_us)
    handles.remove(to_us)
    with pytest.raises(Ended):
        lines.hear(20)
    with pytest.raises(Ended):
        lines.ask(20, 1)
    os.close(from_us)
    handles.remove(from_us)
    with pytest.raises(Ended):
        lines.say(20, 1)


def test_who_does_not_read_is_late(pipes):
    lines, _, from_us, _ = pipes
    with pytest.raises(Late):
        lines.say(0.05, "x" * (1 << 20))
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
    far = Lines(*high)
    far.say(20, 2)
    assert far.hear(20) == 3
    assert os.read(from_us, 9) == b"2\n"
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
