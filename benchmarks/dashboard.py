"""The live page: how soon it shows a long run, what it costs the machine, and what writing the log costs the run.

    python benchmarks/dashboard.py [--nodes 64] [--steps 100000] [--apart 1] [--seconds 20] [--json]

The log of a long run whose steps are `--apart` seconds apart: what it costs the run a step, and how long it takes from
its file to the message that a page is sent. With `evener[browser]` and a Chromium: how long from asking for the page to
its first paint and to the first figures of a run, and which part of a core the page's process takes while one browser
watches ten steps a second of three nodes, at the low priority that it gives itself.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil
from results import Results, open_results, parser_of

from evener.records.event_log import EventLog
from evener.records.event_tail import EVENTS_FILE
from evener.records.events import Phase
from evener.records.plan import Assignment, Plan
from evener.records.record import NodeStep, Step
from evener.report.live.feed import Cursor, Sources

_ROUNDS = 5
_STEP_SECONDS = 0.1
_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def main() -> None:
    """All figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", type=int, default=64, help="of the run that is replayed")
    parser.add_argument("--steps", type=int, default=100_000, help="of the run that is replayed")
    parser.add_argument("--apart", type=float, default=1.0, help="seconds between steps of that run")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which a browser watches")
    words = parser.parse_args()
    with open_results(words) as results, tempfile.TemporaryDirectory(prefix="evener-") as place:
        folder = Path(place)
        show_log(results, folder / "long", words)
        show_replay(results, folder / "long")
        try:
            from playwright.sync_api import sync_playwright
        except ModuleNotFoundError:
            results.say("no browser: pip install -e '.[browser]'")
            return
        if _BROWSER is None:
            results.say("no browser: Chromium is not installed")
            return
        with sync_playwright() as started, served(folder) as (process, address):
            browser = started.chromium.launch(executable_path=_BROWSER, args=["--no-sandbox"])
            show_page(results, browser, process, address, folder / "short", words)
            browser.close()


def plan_of(nodes: int) -> Plan:
    """Nodes of which each takes a little longer than the one before."""
    some = range(nodes)
    rows = [
        Assignment(rank=rank, node=f"n{rank}", device="cpu", samples=4, sample_seconds=0.02 + rank * 1e-4)
        for rank in some
    ]
    return Plan(strategy="data", batch_size=4 * nodes, assignments=tuple(rows))


def steps_of(nodes: int) -> Iterator[Step]:
    """Steps of a tenth of a second, without end."""
    one = NodeStep(
        samples=4,
        io_seconds=0.001,
        compute_seconds=0.08,
        wait_seconds=0.015,
        update_seconds=0.004,
        sent_bytes=1000,
    )
    for number in count(1):
        yield Step(
            step=number,
            epoch=number // 1000,
            samples=4 * nodes,
            loss=1 / number,
            seconds=_STEP_SECONDS,
            nodes=(one,) * nodes,
        )


def show_log(results: Results, folder: Path, words: Namespace) -> None:
    """Write a long run, as if it had taken its time; what a step costs."""
    folder.mkdir()
    ticks = count()
    log = EventLog(folder / EVENTS_FILE, results.say, lambda: next(ticks) * words.apart)
    log.add(plan_of(words.nodes))
    begin = time.process_time()
    for step in islice(steps_of(words.nodes), words.steps):
        log.add(step)
    log.close()
    results.add(
        "the log costs {ms:.3f} ms a step of {nodes} nodes; {steps} steps are {mb:.1f} MB",
        what="log",
        ms=1000 * (time.process_time() - begin) / words.steps,
        nodes=words.nodes,
        steps=words.steps,
        mb=(folder / EVENTS_FILE).stat().st_size / 1e6,
    )


def show_replay(results: Results, folder: Path) -> None:
    """From the file to the message, each time as a page that has just been started."""
    clock, processor = [], []
    for _ in range(_ROUNDS):
        begin, before = time.perf_counter(), time.process_time()
        sources = Sources([folder])
        source = sources.find("")
        assert source is not None
        source.poll()
        message = msgspec.json.encode(Cursor(source).next(sources.names()))
        clock.append(time.perf_counter() - begin)
        processor.append(time.process_time() - before)
    results.add(
        "replay: {seconds:.2f} s by the clock (median of {rounds}, {most:.2f} s at most), {processor:.2f} s of "
        "processor time; a message of {kb:.0f} KB",
        what="replay",
        seconds=median(clock),
        rounds=_ROUNDS,
        most=max(clock),
        processor=median(processor),
        kb=len(message) / 1e3,
    )


@contextmanager
def served(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """The process that serves the page of the runs in `folder`, and its address."""
    command = [sys.executable, "-m", "evener", "dashboard", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http\S+", process.stdout.readline())
        assert found is not None
        try:
            yield psutil.Process(process.pid), found[0]
        finally:
            process.terminate()


def show_page(
    results: Results, browser: Any, process: psutil.Process, address: str, folder: Path, words: Namespace
) -> None:
    """How soon a run that goes on is seen, and what watching it costs."""
    end = threading.Event()
    writer = threading.Thread(target=write_live, args=(folder, end, results))
    writer.start()
    try:
        page = browser.new_page()
        begin = time.perf_counter()
        page.goto(address)
        page.wait_for_selector("#node-table table")
        shown = time.perf_counter() - begin
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
        before = sum(process.cpu_times()[:2])
        end.wait(words.seconds)
        busy = sum(process.cpu_times()[:2]) - before
    finally:
        end.set()
        writer.join()
    results.add(
        "first paint after {paint:.2f} s, figures of the run after {shown:.2f} s; a page that is watched takes "
        "{share:.2%} of a core",
        what="page",
        paint=paint,
        shown=shown,
        share=busy / words.seconds,
    )


def write_live(folder: Path, end: threading.Event, results: Results) -> None:
    """A run that goes on, ten steps a second, until `end`."""
    folder.mkdir()
    log = EventLog(folder / EVENTS_FILE, results.say)
    log.add(Phase(what="training", num_samples=1200, epochs=100))
    log.add(plan_of(3))
    for step in steps_of(3):
        log.add(step)
        if end.wait(_STEP_SECONDS):
            break
    log.close()


if __name__ == "__main__":
    main()
