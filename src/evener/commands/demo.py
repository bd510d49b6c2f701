"""`evener demo`: three ways to train on the same nodes take turns, so that other programs disturb all of them alike.

Each way is an `evener train` of its own. All of them are started, one after the other, and stopped at their first step.
Then each continues for a few seconds, in turn, and is stopped again (SIGSTOP), until the first one has ended. A round
is one turn of each way. The result is the median of the rounds, with their range, since the speed of a machine may
change within seconds. For the same reason the best node alone counts with the mean of its turns before and after, and
the ideal is that of the same turn (`records.history.fraction_of_ideal`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
from msgspec.structs import replace
from rich.console import Console

from evener.config.options import DemoConfig
from evener.launch.nodes import NodeSpec, parse_local_nodes
from evener.records.errors import InvalidInput, MissingExtra, TrainingFailed, require
from evener.records.event_tail import EVENTS_FILE, EventTail
from evener.records.history import Entry, fraction_of_ideal
from evener.records.plan import Plan
from evener.records.record import RECORD, Step, TrainRecord
from evener.records.schema import read_noun
from evener.records.version import pip_install
from evener.report.bars import comparison_figure
from evener.report.canvas import require_matplotlib, save_png
from evener.report.html import write_page
from evener.report.tables import comparison_table, summary
from evener.report.text import human_count, percent
from evener.system.host import require_posix, version_of
from evener.system.signals import interrupt_on_stop_signals
from evener.training.console import locked_folder, open_console, print_line

_ALONE, _EQUAL, _EVENER = "best node alone", "equal shares", "evener"
WAYS = {_ALONE: "measured", _EQUAL: "equal", _EVENER: "measured"}
"""Ways that are compared, each with its `--shares`."""
_TURN_SECONDS, _SETTLING_SECONDS = 2.5, 0.9
"""Length of a turn, and of its beginning, which does not count: slowed nodes make up for the time in which they were
stopped."""
_MORE_SECONDS = 60.0
"""Seconds by which a turn is longer in which no step counts, because steps are long."""
_START_SECONDS = 120.0
_PATIENCE = 600.0
"""Patience of the runs in seconds, which are stopped while others start."""
_POLL_SECONDS = 0.02
_PROGRAM = """
import os, runpy, sys
from evener.system.process_exit import kill_with_parent
kill_with_parent()
if os.getppid() == int(sys.argv.pop(1)):  # the demo is still there
    runpy.run_module("evener", run_name="__main__", alter_sys=True)
"""
"""`python -m evener` after the demo's process number: the kernel kills it when the demo has ended, even if stopped."""
_MAX_OTHERS = 0.15
"""Number of cores that other programs may use before the result mentions them."""
_MAX_RANGE = 0.25
"""Range of the rounds, relative to their median, from which on there is no result."""


def demo(config: DemoConfig, *, as_json: bool) -> dict[str, TrainRecord]:
    """`evener demo`: train on the best node alone, with equal shares, and with Evener's; return the records."""
    require_posix("evener demo")
    if not version_of("torch"):  # which the runs load, not this process
        raise MissingExtra(f"this needs PyTorch, which is not installed: {pip_install('torch')}")
    require_matplotlib()
    require(config.epochs is None or config.epochs > 0, "--epochs", config.epochs, "positive")
    nodes = parse_local_nodes(config.local_nodes)
    console = open_console(as_json)
    with locked_folder(config.output) as output:
        result = _measure(config, nodes, console, output)
        records = {name: read_noun(run.folder / RECORD, TrainRecord) for name, run in result.runs.items()}
        records = {name: _between_turns(record, result, name) for name, record in records.items()}
        _compare(result, records, console, output)
    if as_json:
        rows = {name: {**summary(record), "rounds": result.speeds[name]} for name, record in records.items()}
        print_line(json.dumps({name.replace(" ", "_"): row for name, row in rows.items()}))
    return records


@dataclass
class _Result:
    """Speeds of all ways in all rounds.

    Attributes:
        runs: runs by name.
        speeds: samples per second of each way in every round in which all took part, and of the best node alone once
            more at the end.
        of_ideal: Evener's speed in each round, as a fraction of the nodes' speed together if none waits.
        others: cores that other programs used meanwhile.
    """

    runs: dict[str, _Run] = field(default_factory=dict)
    speeds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in WAYS})
    of_ideal: list[float] = field(default_factory=list)
    others: float = 0.0


class _Turn(NamedTuple):
    """Samples per second in a turn, and these as a fraction of the ideal; None for a single node."""

    speed: float
    of_ideal: float | None


class _Run:
    """An `evener train` in a process of its own, which trains during its turns; close it.

    Args:
        name: name of the way.
        arguments: arguments of `evener train`.
        folder: folder of the run.
    """

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name, self.folder = name, folder
        self._log = folder.with_suffix(".log")
        self._tail = EventTail(folder / EVENTS_FILE)
        self._plan: Plan | None = None
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(os.getpid()), "train", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which ends the others
            )

    @property
    def pid(self) -> int:
        """Number of the command's process."""
        return self._process.pid

    @property
    def is_over(self) -> bool:
        """Whether it has ended. Raises InvalidInput or TrainingFailed if it failed."""
        if (code := self._process.poll()) is None:
            return False
        if code:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            error = InvalidInput if code == InvalidInput.exit_code else TrainingFailed
            raise error(lines[-1] if lines else f"{self.name}: exit code {code} without a message")
        return True

    def begin(self) -> None:
        """Let it start until its first step. Raises as `is_over`."""
        until = time.monotonic() + _START_SECONDS
        while not self.is_over and not any(steps for _, steps in self._steps()):
            if time.monotonic() > until:
                raise TrainingFailed(f"{self.name}: no step within {_START_SECONDS:.0f} s; see {self._log}")
            time.sleep(_POLL_SECONDS)
        self._send(signal.SIGSTOP)

    def turn(self) -> _Turn | None:
        """Let it train for a turn; return None if it has ended, or made no step in a minute."""
        if self.is_over:
            return None
        begin, end = time.time(), time.monotonic() + _TURN_SECONDS
        counted, before = list[Step](), 0.0
        self._send(signal.SIGCONT)
        while not self.is_over and (time.monotonic() < end or (not counted and time.monotonic() < end + _MORE_SECONDS)):
            time.sleep(_POLL_SECONDS)
            for written, steps in self._steps():
                if before > begin + _SETTLING_SECONDS:  # so that all steps of this line began after it
                    counted += steps
                before = written
        self._send(signal.SIGSTOP)
        if not counted or self.is_over or self._plan is None:
            return None
        names = [one.node for one in self._plan.assignments]
        of_ideal = fraction_of_ideal([Entry.of(step, names) for step in counted], self._plan)
        return _Turn(sum(step.samples for step in counted) / sum(step.seconds for step in counted), of_ideal)

    def proceed(self) -> None:
        """Let it train to its end."""
        self._send(signal.SIGCONT)

    def finish(self) -> None:
        """Wait for its end. Raises as `is_over`."""
        self._process.wait()
        assert self.is_over

    def close(self) -> None:
        """End all processes of the run."""
        self._send(signal.SIGKILL)
        self._process.wait()

    def _steps(self) -> Iterator[tuple[float, list[Step]]]:
        """Yield when new lines of events were written, and their steps."""
        for moment in self._tail.read():
            for event in moment.events:
                self._plan = event if isinstance(event, Plan) else self._plan
            yield moment.time, [event for event in moment.events if isinstance(event, Step)]

    def _send(self, number: int) -> None:
        """Send a signal to all processes that train, SIGKILL to all.

        The command and its fork server are not stopped: they end when this process is killed, and the others with them.
        """
        if self._process.poll() is not None:  # its number may be another process's by now
            return
        with suppress(psutil.NoSuchProcess):
            command = psutil.Process(self._process.pid)
            processes = [one for child in command.children() for one in child.children(recursive=True)]
            if number == signal.SIGKILL:
                processes = [*command.children(recursive=True), command]
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)


def _measure(config: DemoConfig, nodes: Sequence[NodeSpec], console: Console, output: Path) -> _Result:
    """Start the runs, let them take turns until one has ended, and then let the others end."""
    best = max(nodes, key=lambda node: node.speed_at(0))
    stamp, result = time.strftime("%Y%m%d-%H%M%S"), _Result()
    with interrupt_on_stop_signals(), ExitStack() as stack:
        for name, shares in WAYS.items():
            console.print(f"starting: {name}")
            folder = output / f"{name.replace(' ', '_')}-{stamp}"
            arguments = _arguments(config, [best] if name == _ALONE else nodes, shares, folder)
            run = result.runs[name] = _Run(name, arguments, folder)
            stack.callback(run.close)
            run.begin()
        others = _OtherPrograms([run.pid for run in result.runs.values()])
        while len(turns := _round(result.runs)) == len(WAYS):
            for name, turn in turns.items():
                result.speeds[name].append(turn.speed)
            result.of_ideal.append(turns[_EVENER].of_ideal or 1.0)
            result.others = others.cores()
            shown = ", ".join(f"{name} {human_count(turn.speed)}" for name, turn in turns.items())
            console.print(f"round {len(result.of_ideal)}, samples per second: {shown}")
        alone = result.speeds[_ALONE]
        if last := turns.get(_ALONE) or result.runs[_ALONE].turn():
            alone.append(last.speed)
        elif alone:
            alone.append(alone[-1])
        for run in result.runs.values():
            run.proceed()
        for run in result.runs.values():
            run.finish()
    return result


def _round(runs: Mapping[str, _Run]) -> dict[str, _Turn]:
    """Let each way have a turn; return those of the ways that have not ended."""
    return {name: turn for name, run in runs.items() if (turn := run.turn()) is not None}


def _arguments(config: DemoConfig, nodes: Sequence[NodeSpec], shares: str, folder: Path) -> list[str]:
    speeds = ["@".join([f"{node.speed_at(0):g}", *(f"{at}={one:g}" for at, one in node.speeds[1:])]) for node in nodes]
    return [
        *(config.task, "--local-nodes", ",".join(speeds), "--shares", shares, "--output", str(folder), "--quiet"),
        *("--no-elastic", "--patience", str(_PATIENCE)),
        *(("--epochs", str(config.epochs)) if config.epochs is not None else ()),
    ]


class _OtherPrograms:
    """Counts the processor time of programs other than these processes and this one.

    Args:
        pids: processes, which count with their descendants.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = [*pids, psutil.Process().pid]
        self._begin, self._before = time.monotonic(), self._seconds()

    def cores(self) -> float:
        """Return how many cores they used since the beginning, in the mean."""
        return max(0.0, self._seconds() - self._before) / (time.monotonic() - self._begin)

    def _seconds(self) -> float:
        """Return the processor time of all programs, less that of these processes."""
        total = psutil.cpu_times()
        seconds = sum(total) - sum(getattr(total, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
        for pid in self._pids:
            with suppress(psutil.NoSuchProcess):
                command = psutil.Process(pid)
                descendants = command.children(recursive=True) if pid != psutil.Process().pid else []
                for process in (command, *descendants):
                    with suppress(psutil.NoSuchProcess):
                        times = process.cpu_times()
                        seconds -= times.user + times.system
        return float(seconds)


def _between_turns(record: TrainRecord, result: _Result, name: str) -> TrainRecord:
    """Return `record` without the steps in which the run was stopped, and with the speeds of its turns."""
    typical = median(step.seconds for step in record.steps)
    steps = tuple(step for step in record.steps if step.seconds < typical + _TURN_SECONDS)
    waits = [sum(step.nodes[i].wait_seconds for step in steps) for i in range(len(record.nodes))]
    speeds, validating = result.speeds[name], sum(one.seconds for one in record.validations)
    return replace(
        record,
        steps=steps,
        seconds=sum(step.seconds for step in steps) + validating,
        samples_per_second=median(speeds) if speeds else record.samples_per_second,
        of_ideal=median(result.of_ideal) if name == _EVENER and speeds else None,
        nodes=tuple(replace(node, seconds_waiting=one) for node, one in zip(record.nodes, waits, strict=True)),
    )


def _compare(result: _Result, records: dict[str, TrainRecord], console: Console, output: Path) -> None:
    """Print the result, draw it, and write the page."""
    sentence = verdict(result.speeds, result.of_ideal, result.others)
    ranges = {name: (min(speeds), max(speeds)) for name, speeds in result.speeds.items() if speeds}
    console.print(comparison_table(records))
    console.print(sentence)
    save_png(comparison_figure(records, ranges), output / "demo.png")
    write_page(output / "demo.html", records, "Evener: one model, uneven nodes", summary=sentence, ranges=ranges)
    console.print(f"picture: {output / 'demo.png'}   page: {output / 'demo.html'}")


def verdict(speeds: Mapping[str, Sequence[float]], of_ideal: Sequence[float], others: float) -> str:
    """Return the result of the demo in a sentence or two.

    Args:
        speeds: samples per second of each way in every round.
        of_ideal: Evener's speed in each round, as a fraction of the nodes' speed together if none waits.
        others: cores that other programs used meanwhile.
    """
    if not of_ideal:
        return "The runs ended before all ways had a turn, so there is nothing to compare: let --epochs be larger."
    beside = f"Other programs used {others:.1f} cores of this machine meanwhile."
    low, high = percent(min(of_ideal)), percent(max(of_ideal))
    if max(of_ideal) - min(of_ideal) > _MAX_RANGE * median(of_ideal):
        return f"This machine is too busy for a result: its rounds are between {low} and {high} of the ideal. {beside}"
    gains = [_spread(gains_over(way, speeds)) for way in (_ALONE, _EQUAL)]
    sentence = (
        f"With Evener's shares, training is {gains[0]} times as fast as on the best node alone, and {gains[1]} times "
        f"as fast as with equal shares. It reached {percent(median(of_ideal))} ({low} to {high}) of the ideal, the "
        f"speed of these nodes together if none waits. These are medians and ranges of {len(of_ideal)} rounds."
    )
    return f"{sentence} {beside}" if others > _MAX_OTHERS else sentence


def gains_over(way: str, speeds: Mapping[str, Sequence[float]]) -> list[float]:
    """Return how many times as fast as `way` Evener was in each round; see the module for the best node alone."""
    others = speeds[way]
    if way == _ALONE:
        others = [(before + after) / 2 for before, after in pairwise(others)]
    return [speed / other for speed, other in zip(speeds[_EVENER], others, strict=True)]


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
