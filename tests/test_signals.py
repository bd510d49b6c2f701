"""Signals that ask to stop are collected or interrupt, as a command wants, and are as before afterwards."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from evener.signals import requests_to_stop, sigterm_is_ctrl_c

BOTH = (signal.SIGINT, signal.SIGTERM)


def test_requests_are_collected_and_interrupt_nothing() -> None:
    before = [signal.getsignal(number) for number in BOTH]
    with requests_to_stop() as requests:
        for number in BOTH:
            os.kill(os.getpid(), number)
        assert requests == list(BOTH)
    assert [signal.getsignal(number) for number in BOTH] == before


def test_handlers_are_put_back_when_the_block_raises() -> None:
    before = [signal.getsignal(number) for number in BOTH]
    with pytest.raises(KeyError), requests_to_stop():
        raise KeyError
    assert [signal.getsignal(number) for number in BOTH] == before


def test_sigterm_ends_as_ctrl_c_does() -> None:
    with pytest.raises(KeyboardInterrupt), sigterm_is_ctrl_c():
        os.kill(os.getpid(), signal.SIGTERM)


def test_other_threads_than_the_main_one_change_nothing() -> None:
    before, found = signal.getsignal(signal.SIGINT), []

    def look() -> None:
        with requests_to_stop(), sigterm_is_ctrl_c():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
