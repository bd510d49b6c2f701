"""Signals that ask to stop are collected or interrupt, as a command wants, and are as before afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from evener.system.signals import STOP_SIGNALS, first_request, interrupt_on_stop_signals, requests_to_stop

pytestmark = pytest.mark.posix


def test_stop_requests_are_collected_without_interrupting() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with requests_to_stop() as requests:
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
        assert requests == list(STOP_SIGNALS)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_handlers_are_restored_when_the_block_raises() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(KeyError), requests_to_stop():
        raise KeyError
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, getattr(signal, "SIGHUP", None)])
def test_sigterm_and_sighup_raise_keyboard_interrupt(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), interrupt_on_stop_signals():
        os.kill(os.getpid(), number)


def test_interruption_that_a_library_swallows_ends_the_command_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "swallowing.py").write_text(SWALLOWING)
    ran = subprocess.run(
        [sys.executable, "swallowing.py", "nodes"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 130, ran.stderr
    assert ran.stderr.endswith("evener: stopped\n")
    assert "Traceback" not in ran.stderr


SWALLOWING = """
import os
from evener.__main__ import main
from evener.cli import app

LIBRARY = '''
import os, signal, time

def app_of(first):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    except KeyboardInterrupt:
        raise AttributeError("module 'numpy' has no attribute 'matrix'") from None
'''
library = {}
exec(compile(LIBRARY, os.__file__, "exec"), library)
app.app_of = library["app_of"]
main()
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_ignored_at_the_start_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with requests_to_stop() as requests, interrupt_on_stop_signals(), first_request(pytest.fail):
            os.kill(os.getpid(), number)
        assert requests == []
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_signal_handlers_change_only_in_the_main_thread() -> None:
    before, found = signal.getsignal(signal.SIGINT), []

    def look() -> None:
        with requests_to_stop(), interrupt_on_stop_signals():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
