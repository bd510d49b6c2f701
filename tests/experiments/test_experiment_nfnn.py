"""`evener experiment nfnn`, as typed: the published experiment on a master and thin nodes of this machine."""

from __future__ import annotations

import csv
import gzip
import json
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evener.agreements.messages import Answer, Lease, Push, SampleRange
from evener.data.mnist import ELEMENTS
from evener.experiments.nfnn import (
    PUBLISHED_BYTES,
    PUBLISHED_UPDATES,
    NfnnOutcome,
    row_of,
    seconds_and_accuracy,
    tables,
)
from evener.ps.protocol.messages import Contribution, ServerReply
from evener.report.canvas import png
from evener.wire.frame import encode_frame
from evener.wire.limits import Limits
from support.commands import command, evener, evener_here, processes_of

IMAGES, PARAMETERS = 1000, 25_450
WEIGHT_BYTES = 4 * PARAMETERS
UBYTE = next(code for code, kind in ELEMENTS.items() if kind == ">u1")


def write_idx(path: Path, array: np.ndarray[Any, Any]) -> None:
    head = bytes([0, 0, UBYTE, array.ndim]) + np.asarray(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write MNIST files of images whose brightest column gives the digit, except for every third image."""
    folder = tmp_path_factory.mktemp("mnist")
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, IMAGES)
    images = random.integers(0, 60, (IMAGES, 28, 28))
    images[np.arange(IMAGES), :, 2 * np.where(random.random(IMAGES) < 2 / 3, labels, 0)] = 255
    write_idx(folder / "train-images-idx3-ubyte.gz", images)
    write_idx(folder / "train-labels-idx1-ubyte.gz", labels)
    return folder


@pytest.fixture(scope="module")
def done(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, int], Any], str]:
    folder = tmp_path_factory.mktemp("run")
    words = ("--updates", "300", "--workers", "1,2", "--repeat", "2", "--output", "out", "--json")
    result = evener("experiment", "nfnn", "--data", str(digits), *words, cwd=folder, timeout=110)
    assert result.returncode == 0, result.stderr
    cells = json.loads(result.stdout.strip().splitlines()[-1])["cells"]
    return folder, {(cell["mode"], cell["workers"]): cell for cell in cells}, result.stderr


SEEDED = ("accuracy", "accuracy_interval", "bytes_sent", "bytes_received")
"""Columns that depend on the seed only."""

Done = tuple[Path, dict[tuple[str, int], Any], str]


@pytest.mark.slow
def test_every_cell_runs_in_the_published_order_and_learns(done: Done) -> None:
    _, cells, _ = done
    assert list(cells) == [("sync", 1), ("sync", 2), ("async", 1), ("async", 2)]
    for cell in cells.values():
        assert cell["seconds"] > 0
        assert cell["seconds_interval"] > 0
        assert 0.4 < cell["accuracy"] < 0.9
        assert cell["updates"] == 300


@pytest.mark.slow
def test_single_worker_learns_the_same_in_both_modes(done: Done) -> None:
    _, cells, _ = done
    assert cells["sync", 1]["accuracy"] == cells["async", 1]["accuracy"]
    assert cells["sync", 1]["accuracy_interval"] > 0, "each repetition has an order of its own"


@pytest.mark.slow
def test_weights_are_sent_once_each_way_per_update_and_worker(done: Done) -> None:
    _, cells, _ = done
    for (mode, workers), cell in cells.items():
        expected = WEIGHT_BYTES * 300 * (workers if mode == "sync" else 1)
        assert cell["bytes_sent"] == pytest.approx(expected, rel=0.01)
        assert cell["bytes_received"] == pytest.approx(expected + workers * WEIGHT_BYTES, rel=0.01)


@pytest.mark.slow
def test_encryption_changes_only_the_time(digits: Path, done: Done, tmp_path: Path) -> None:
    words = ("--updates", "300", "--workers", "1", "--mode", "sync", "--repeat", "2", "--json", "--tls")
    result = evener("experiment", "nfnn", "--data", str(digits), *words, cwd=tmp_path, timeout=110)
    assert result.returncode == 0, result.stderr
    (cell,) = json.loads(result.stdout.strip().splitlines()[-1])["cells"]
    _, cells, _ = done
    assert {name: cell[name] for name in SEEDED} == {name: cells["sync", 1][name] for name in SEEDED}


def test_framing_overhead_of_an_update_is_below_one_percent() -> None:
    lease = Lease(number=2**62, version=2**31, samples=SampleRange(epoch=99, ranges=((47_000, 32),)), num_steps=1)
    push = Push(number=lease.number, seconds=0.123456789, loss=2.3456789)
    answer = Answer(answers=lease.number, verdict="applied", version=2**31, contents="weights", lease=lease)
    for header in (Contribution(run="nfnn-async-3-4", push=push), ServerReply(run="nfnn-async-3-4", answer=answer)):
        frame = encode_frame(2**40, header, [bytes(WEIGHT_BYTES)], Limits())
        assert WEIGHT_BYTES < sum(map(len, frame)) < 1.01 * WEIGHT_BYTES


@pytest.mark.slow
def test_tables_csv_and_figure_include_the_published_values(done: Done) -> None:
    folder, cells, shown = done
    assert "published" in shown
    assert "±" in shown
    with (folder / "out" / "nfnn.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["mode"], int(row["workers"])) for row in rows] == list(cells)
    assert [float(row["accuracy"]) for row in rows] == [cell["accuracy"] for cell in cells.values()]
    assert (folder / "out" / "nfnn.png").read_bytes().startswith(b"\x89PNG")


def test_difference_to_the_publication_is_in_points_of_accuracy() -> None:
    outcome = NfnnOutcome(10.0, 0.8800, 3 * PUBLISHED_BYTES, 3 * PUBLISHED_BYTES)
    cell = row_of("sync", 3, [outcome], PUBLISHED_UPDATES)
    seconds, accuracy = ([str(next(iter(column.cells))) for column in table.columns] for table in tables([cell]))
    assert seconds == ["sync", "3", "10.00", "-", "500", "230", "23"]
    assert accuracy == ["sync", "3", "88.00%", "-", "88.50%", "-0.50", "1,527.0", "1,527.0", "1,527.0"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--workers", "0"), "--workers must be different positive numbers such as 1,2,4, got '0'"),
        (("--workers", "1,1"), "--workers must be different positive numbers such as 1,2,4, got '1,1'"),
        (("--workers", "two"), "--workers must be different positive numbers such as 1,2,4, got 'two'"),
        (("--mode", "synch"), "--mode must be sync, async or sync,async, got 'synch'"),
        (("--mode", "sync,sync"), "--mode must be sync, async or sync,async, got 'sync,sync'"),
        (("--updates", "0"), "--updates must be positive, got 0"),
        (("--repeat", "-1"), "--repeat must be positive, got -1"),
        (("--seed", "-1"), "--seed must be 0 or more, got -1"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(digits: Path, words: tuple[str, str], sentence: str) -> None:
    result = evener_here("experiment", "nfnn", "--data", str(digits), *words, cwd=digits)
    assert (result.returncode, result.stderr) == (2, f"evener: {sentence}\n")


def test_missing_and_truncated_data_are_reported_in_one_sentence(digits: Path, tmp_path: Path) -> None:
    result = evener("experiment", "nfnn", "--data", "nowhere", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("evener: MNIST is not in nowhere (train-images-idx3-ubyte.gz is missing): fetch")
    assert "Traceback" not in result.stderr
    for file in digits.glob("*.gz"):
        (tmp_path / file.name).write_bytes(file.read_bytes()[:-100])
    result = evener("experiment", "nfnn", "--data", str(tmp_path), cwd=tmp_path)
    assert result.returncode == 2
    assert "is a damaged gzip file" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_survives_the_command(digits: Path, tmp_path: Path, number: signal.Signals) -> None:
    name, value = "EVENER_TEST", str(uuid.uuid4())
    words = ("--workers", "2", "--updates", "1000000", "--repeat", "1")
    process = subprocess.Popen(
        command("experiment", "nfnn", "--data", str(digits), *words),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, name: value, "TMPDIR": str(tmp_path)},
    )
    marker, until = f"{name}={value}", time.monotonic() + 60
    try:
        while not list(tmp_path.glob("evener-*/**/run/*")):  # the master keeps the run in progress there
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    until = time.monotonic() + 20
    while processes_of(marker):
        assert time.monotonic() < until
        time.sleep(0.1)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert "Traceback" not in errors
        assert not list(tmp_path.glob("evener-*"))


def test_figure_has_a_tick_per_number_of_workers_and_readable_times() -> None:
    outcome = NfnnOutcome(10.0, 0.8800, PUBLISHED_BYTES, PUBLISHED_BYTES)
    cells = [row_of(mode, workers, [outcome], 500) for mode in ("sync", "async") for workers in (1, 2, 3)]
    figure = seconds_and_accuracy(cells)
    png(figure)
    left, right = figure.axes
    for axes in (left, right):
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "3"]
    labels = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    assert not any("mathdefault" in label for label in labels)
    assert "1 min 40 s" in labels
    assert "85 %" in labels
    assert right.get_title(loc="left") == "accuracy (here after 500 updates)"
