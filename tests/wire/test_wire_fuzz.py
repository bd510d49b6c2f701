"""Mutated frames by the thousand: no crash, no hang, no growth. The script itself is fuzz_frames.py."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from evener.wire.limits import Limits
from evener.wire.reader import FrameReader
from support.fuzz_frames import WARM_UP, Wrong, largest_kilobytes, mutate_alone, run, valid_stream

NUM_REFUSALS = 7


def _fuzz(runs: int, seed: int) -> None:
    mutate_alone(WARM_UP, seed=1)
    before = largest_kilobytes()
    outcomes = mutate_alone(runs, seed)
    assert outcomes.total() == runs
    assert len(outcomes) == NUM_REFUSALS + 2, outcomes
    assert min(outcomes.values()) > runs / 200, f"some refusal is hardly ever reached: {outcomes}"
    assert largest_kilobytes() - before < 5_000


@pytest.mark.posix
def test_reader_survives_20_000_mutated_streams_without_growth() -> None:
    _fuzz(20_000, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_reader_survives_a_million_mutated_streams_without_growth() -> None:
    _fuzz(1_000_000, seed=3)


def test_valid_streams_are_read_to_the_end() -> None:
    random = Random(4)
    outcomes = Counter(run(bytes(valid_stream(random))) for _ in range(300))
    assert outcomes == {"not refused, whole frames": 300}


def test_atheris_guides_the_fuzzer_if_installed() -> None:
    pytest.importorskip("atheris")
    script = Path(__file__).parents[1] / "support" / "fuzz_frames.py"
    command = [sys.executable, str(script), "--runs", "3000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "3000 inputs in" in done.stdout


def test_fuzzer_detects_a_reader_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = FrameReader.__init__

    def unlimited(self: FrameReader, headers: object, limits: Limits, place: object) -> None:  # type: ignore[type-arg]
        begin(self, headers, Limits(), place)  # type: ignore[arg-type]

    monkeypatch.setattr(FrameReader, "__init__", unlimited)
    with pytest.raises(Wrong, match="asked for"):
        mutate_alone(2000, seed=5)


def test_fuzzer_detects_a_reader_that_reads_on_after_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    read = FrameReader.feed

    def forgetful(self: FrameReader, count: int) -> object:  # type: ignore[type-arg]
        self.refused = None
        return read(self, count)

    monkeypatch.setattr(FrameReader, "feed", forgetful)
    with pytest.raises(Wrong, match="not final"):
        mutate_alone(2000, seed=5)
