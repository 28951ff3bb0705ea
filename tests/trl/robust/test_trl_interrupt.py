"""Signals, and what they ask of the trainer. That a resumed run is the same one is tested with the command line."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from troll.trl.robust.interrupt import LAUNCHED, SIGNALS, StopOnSignal

ARGS = SimpleNamespace(world_size=1, device="cpu")


@contextlib.contextmanager
def begun(number: int = 0, last: int = 10) -> Iterator[StopOnSignal]:
    """While a run trains."""
    with StopOnSignal() as interrupt:
        interrupt.on_train_begin(ARGS, SimpleNamespace(global_step=number, max_steps=last), None)
        yield interrupt


def step(interrupt: StopOnSignal, number: int, last: int = 10) -> Any:
    control = SimpleNamespace(should_save=False, should_training_stop=False, should_evaluate=True)
    interrupt.on_step_end(ARGS, SimpleNamespace(global_step=number, max_steps=last), control)
    return control


def test_without_a_signal_nothing_is_asked() -> None:
    with begun() as interrupt:
        assert vars(step(interrupt, 1)) == {
            "should_save": False,
            "should_training_stop": False,
            "should_evaluate": True,
        }
    assert not interrupt.caught


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_stops_after_the_update(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    with begun() as interrupt:
        signal.raise_signal(number)
        assert (interrupt.caught, interrupt.stopped) == (True, False)
        control = step(interrupt, 3)
        assert (control.should_save, control.should_training_stop, control.should_evaluate) == (True, True, True)
        assert interrupt.stopped
        assert "with a checkpoint" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_after_the_last_update_there_is_nothing_to_stop(capfd: pytest.CaptureFixture[str]) -> None:
    with begun() as interrupt:
        step(interrupt, 10)
        signal.raise_signal(signal.SIGINT)
        assert not step(interrupt, 10).should_training_stop
    assert not interrupt.stopped
    assert capfd.readouterr().err == "\nThe last update is done. Press Ctrl-C again to stop at once.\n"


def test_handlers_are_put_back_even_after_an_error() -> None:
    before = [signal.getsignal(x) for x in SIGNALS]
    with contextlib.suppress(RuntimeError), begun():
        assert [signal.getsignal(x) for x in SIGNALS] != before
        raise RuntimeError
    assert [signal.getsignal(x) for x in SIGNALS] == before


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", SIGNALS)
def test_before_training_there_is_nothing_to_save(number: int) -> None:
    with pytest.raises(KeyboardInterrupt), StopOnSignal():
        signal.raise_signal(number)


def test_a_run_that_has_made_all_of_its_updates_has_only_its_end_to_make(capfd: pytest.CaptureFixture[str]) -> None:
    with begun(10):
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "\nThe last update is done. Press Ctrl-C again to stop at once.\n"


def test_a_launcher_says_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches every process of the terminal, and torchrun passes it on as a SIGTERM."""
    monkeypatch.setenv(LAUNCHED, "1")
    with begun() as interrupt:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert step(interrupt, 3).should_save
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    monkeypatch.delenv(LAUNCHED)
    with begun():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with begun() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupt.caught
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_of_the_main_thread_there_are_no_signals() -> None:
    entered: list[StopOnSignal] = []

    def run() -> None:
        with begun() as interrupt:
            entered.append(interrupt)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [interrupt.caught for interrupt in entered] == [False]


def test_a_signal_in_the_middle_of_a_print(tmp_path: Any) -> None:
    """Python refuses to print from inside a print, which a handler may be."""
    code = """
import signal, sys
from types import SimpleNamespace
from troll.trl.robust.interrupt import StopOnSignal
class Stream:
    def write(self, text):
        signal.raise_signal(signal.SIGINT) if not interrupt.caught else None
        raise_if_nested.append(1)
    def flush(self): pass
raise_if_nested = []
with StopOnSignal() as interrupt:
    interrupt.on_train_begin(None, SimpleNamespace(global_step=0, max_steps=1), None)
    sys.stderr = Stream()
    print("x", file=sys.stderr)
sys.stdout.write(f"{interrupt.caught} {len(raise_if_nested)}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True 2"  # the text and its newline: nothing else went through the stream
    assert "Stopping after this update" in done.stderr
