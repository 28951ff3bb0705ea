"""Signals, and what they ask of the trainer. That a resumed run is the same one is tested with the command line."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from troll.training.interrupt import Interrupt

ARGS = SimpleNamespace(world_size=1, device="cpu")


def step(interrupt: Interrupt, number: int, last: int = 10) -> Any:
    control = SimpleNamespace(should_save=False, should_training_stop=False, should_evaluate=True)
    interrupt.on_step_end(ARGS, SimpleNamespace(global_step=number, max_steps=last), control)
    return control


def test_without_a_signal_nothing_is_asked() -> None:
    with Interrupt() as interrupt:
        assert vars(step(interrupt, 1)) == {
            "should_save": False,
            "should_training_stop": False,
            "should_evaluate": True,
        }
    assert not interrupt.caught


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_after_the_update(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(number)
        assert (interrupt.caught, interrupt.stopped) == (True, False)
        control = step(interrupt, 3)
        assert (control.should_save, control.should_training_stop, control.should_evaluate) == (True, True, True)
        assert interrupt.stopped
        assert "with a checkpoint" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_after_the_last_update_there_is_nothing_to_stop(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupt() as interrupt:
        step(interrupt, 10)
        signal.raise_signal(signal.SIGINT)
        assert not step(interrupt, 10).should_training_stop
    assert not interrupt.stopped
    assert capfd.readouterr().err == "\nThe last update is made. Once more to stop at once.\n"


def test_handlers_are_put_back_even_after_an_error() -> None:
    before = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
    with contextlib.suppress(RuntimeError), Interrupt():
        assert [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)] != before
        raise RuntimeError
    assert [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_in_the_middle_of_a_print(tmp_path: Any) -> None:
    """Python refuses to print from inside a print, which a handler may be."""
    code = """
import signal, sys
from troll.training.interrupt import Interrupt
class Stream:
    def write(self, text):
        signal.raise_signal(signal.SIGINT) if not interrupt.caught else None
        raise_if_nested.append(1)
    def flush(self): pass
raise_if_nested = []
with Interrupt() as interrupt:
    sys.stderr = Stream()
    print("x", file=sys.stderr)
sys.stdout.write(f"{interrupt.caught} {len(raise_if_nested)}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True 2"  # the text and its newline: nothing else went through the stream
    assert "Stopping after this update" in done.stderr
