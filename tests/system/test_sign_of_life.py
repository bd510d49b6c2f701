"""Whatever takes long says so every few seconds, and no longer than it takes."""

from __future__ import annotations

import threading
import time

import pytest

from evener.system import sign_of_life


def test_line_repeats_until_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sign_of_life, "_SILENCE_SECONDS", 0.01)
    lines: list[str] = []
    said_twice = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            said_twice.set()

    with sign_of_life.sign_of_life(say, "measuring"):
        assert said_twice.wait(20)
    count = len(lines)
    time.sleep(0.05)
    assert len(lines) == count
    assert all(line.startswith("measuring (") for line in lines)
