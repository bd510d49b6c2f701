"""Terminal output of a run: the plan, one progress line, events, and the tables at the end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Self

from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.status import Status

from evener.records.atomic import remove_drafts
from evener.records.errors import CannotWrite, EvenerError, Interrupted, InvalidInput, NodeLost, end_process, first_line
from evener.records.event_log import EventLog
from evener.records.event_tail import EVENTS_FILE, Moment
from evener.records.events import Phase, RunEvent
from evener.records.plan import Plan
from evener.records.record import RECORD, Event, Step, TrainRecord, Validation
from evener.records.schema import write_noun
from evener.report.live.live_run import OVER, LiveRun
from evener.report.live.picture import Picture
from evener.report.loggers import TensorBoard, has_tensorboard
from evener.report.scalars import ScalarLog
from evener.report.tables import agreement_line, plan_table, predicted_table, record_table
from evener.report.text import human_seconds
from evener.system.file_lock import FolderLock
from evener.system.sign_of_life import sign_of_life
from evener.training.checkpoint_folder import checkpoints_in
from evener.training.partial_record import RunRequest, partial_record

_LINE_INTERVAL_S = 5.0
_NEXT_STEP = "training: the next step"
_BAR_WIDTH = 12
"""Characters of the bar."""
_FREE_BYTES = 64 * 2**10
"""Bytes that a disk must have left when a run begins: for its plan, its record and what it has shown."""
_SHOW_TIMEOUT_S = 2.0
"""Seconds that a process that has to end waits for what is being shown by another thread."""


class RunView:
    """The display of a run: shows the events of its leader, and writes them to the run's folder.

    Args:
        output: folder for plan, record and scalars.
        to_stderr: keep stdout free for `--json`.
        shows_steps: whether to show steps and validations; false where something else shows them.
        by_lines: print a line now and then instead of a progress bar, since the user's program prints, too.
        request: the request for the run, for its record if it ends early.
        checkpoints: folder of its checkpoints, if that is not one in `output`.
        is_leader: whether this is the process of several that writes into these folders: no other run may.

    Raises:
        FolderInUse: another run writes there.
    """

    def __init__(
        self,
        output: Path,
        *,
        to_stderr: bool = False,
        shows_steps: bool = True,
        by_lines: bool = False,
        request: RunRequest | None = None,
        checkpoints: Path | None = None,
        is_leader: bool = True,
    ) -> None:
        self._writing = RunFolders(output, checkpoints) if is_leader else None
        self.console = open_console(to_stderr)
        self._by_lines = by_lines
        self.record: TrainRecord | None = None
        self._output, self._shows_steps = output, shows_steps
        self._checkpoints = checkpoints or output / "checkpoints"
        self._request = request or RunRequest(output.name)
        self._began = self._trains_since = time.monotonic()
        self._plan: Plan | None = None
        self._scalars = ScalarLog(TensorBoard(output / "scalars")) if has_tensorboard() else None
        self._bar: Progress | None = None
        self._bar_task: TaskID | None = None
        self._status: Status | None = None
        self._waiting = ExitStack()
        self._live = LiveRun(output.name)
        self._last_line = 0.0
        self._log: EventLog | None = None
        self._showing = threading.RLock()

    def __enter__(self) -> Self:
        for event in self._request.events:
            self(event)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """End the display of a run that is complete, or that `error` ended; write a partial record in that case."""
        with self._showing:
            try:
                self._close()
                if self._log is not None:
                    self._log_end(self._log, error)
            finally:
                if self._writing is not None:
                    self._writing.release()

    def end_process(self, error: EvenerError) -> None:
        """Call `end`, then end this process, from any thread: the main thread may wait in a collective forever."""
        if self._showing.acquire(timeout=_SHOW_TIMEOUT_S):
            self.end(error)
        end_process(error)

    def __call__(self, event: RunEvent) -> None:
        """Show `event`, and log it."""
        with self._showing:
            self._show(event)

    def _show(self, event: RunEvent) -> None:
        if self._log is None:
            self._log = EventLog(self._output / EVENTS_FILE, self.console.print, show=self._on_moment)
            request = self._request
            self._log.add(Phase(what="starting", options=request.options, task=request.task, file=request.file))
        self._log.add(event)
        if isinstance(event, Plan):
            self._on_plan(event)
        elif isinstance(event, Phase):
            self._on_phase(event)
        elif isinstance(event, Validation):
            self._on_validation(event)
        elif isinstance(event, Event):
            self._on_event(event)
        elif isinstance(event, TrainRecord):
            self._on_record(event)
        self._keep_scalars(lambda scalars: scalars(event))

    def _keep_scalars(self, action: Callable[[ScalarLog], None]) -> None:
        """Write curves; on a full disk they end, and the run continues."""
        if self._scalars is None:
            return
        try:
            action(self._scalars)
        except OSError as error:
            self._scalars = None
            self.console.print(f"cannot write {self._output / 'scalars'} ({error.strerror}): its curves end here")

    def _log_end(self, log: EventLog, error: BaseException | None) -> None:
        """Log how the run ended and which nodes failed."""
        sentence = first_line(error) if error is not None else ""
        if isinstance(error, NodeLost):
            log.add(Event(step=0, kind="node lost", message=sentence, nodes=error.nodes))
        if error is not None:
            log.flush()
            self._keep_unfinished(sentence)
        if isinstance(error, NodeLost) and checkpoints_in(self._checkpoints):
            self.console.print(f"to go on, add --resume --checkpoint {self._checkpoints} to the same command")
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        log.add(Phase(what="over" if error is None else "stopped" if stopped else "failed", detail=sentence))
        log.close()

    def _keep_unfinished(self, ending: str) -> None:
        """Write a partial record of a run that ends without a complete one."""
        if self.record is not None or self._plan is None or not self._live.history.last_step:
            return
        record = partial_record(
            self._live,
            self._plan,
            self._request,
            ending=ending,
            startup=self._trains_since - self._began,
            seconds=time.monotonic() - self._trains_since,
        )
        record = replace(record, usual=self._request.usual, options=self._request.options)
        try:
            write_noun(record, self._output / RECORD)
        except OSError as problem:  # the error that ended the run matters more
            self.console.print(f"cannot write {self._output / 'record.json'}: {problem.strerror}")
            return
        self.console.print(f"record of what was done is in {self._output}")

    def _on_plan(self, plan: Plan) -> None:
        """Show and write the plan; a master's run gets another plan when a node joins."""
        self._close()
        self._plan = plan
        self._write(plan, "plan.json")
        if len(plan.assignments) > 1 or plan.rejected:
            self.console.print(plan_table(plan))
        if self._shows_steps:
            self._wait(_NEXT_STEP)

    def _on_moment(self, moment: Moment) -> None:
        """Show progress: always on a terminal, as a line now and then elsewhere."""
        self._live.take(moment)
        if not any(isinstance(event, Step) for event in moment.events):
            return
        self._end_phase()
        if not self._shows_steps:
            return
        picture = self._live.picture()
        if self.console.is_terminal and not self._by_lines:
            self._show_bar(picture)
        elif time.monotonic() - self._last_line > _LINE_INTERVAL_S:
            self._last_line = time.monotonic()
            step = f"step {picture.step}"
            self.console.print(f"{step}  {progress_words(picture, self.console.width - len(step) - 2)}")

    def _show_bar(self, picture: Picture) -> None:
        if self._bar is None:
            columns = (TextColumn("step {task.fields[step]}"), BarColumn(_BAR_WIDTH), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar_task = self._bar.add_task("", total=None, step=picture.step)
            self._bar.start()
        assert self._bar_task is not None
        total = None if picture.progress is None else 1.0
        description = progress_words(picture, self.console.width - len(f"step {picture.step}") - _BAR_WIDTH - 2)
        self._bar.update(
            self._bar_task, total=total, completed=picture.progress or 0.0, description=description, step=picture.step
        )

    def _hide_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _on_phase(self, phase: Phase) -> None:
        """Show the phase: a spinner on a terminal, a line elsewhere."""
        self._end_phase()
        if phase.what == "training":
            self._trains_since = time.monotonic()
            if self._shows_steps:
                self._wait(_NEXT_STEP)
        elif phase.what not in OVER:
            message = f"{phase.what}: {phase.detail}"
            if not self._has_spinner:
                self.console.print(message)
            if self._shows_steps or phase.what != "stopping":  # Ultralytics shows the validation in progress
                self._wait(message)

    @property
    def _has_spinner(self) -> bool:
        return self.console.is_terminal and not self._by_lines and self._shows_steps

    def _wait(self, message: str) -> None:
        """Show that the run is alive until `_end_phase`: by a spinner, or by a line every few seconds."""
        if self._has_spinner:
            self._hide_bar()  # older versions of rich show only one thing that moves
            self._status = self.console.status(message)
            self._status.start()
        elif not self.console.quiet:
            self._waiting.enter_context(sign_of_life(self.console.print, message))

    def _end_phase(self) -> None:
        self._waiting.close()
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _on_validation(self, validation: Validation) -> None:
        if not self._shows_steps:
            return
        accuracy = "" if validation.accuracy is None else f"  accuracy {validation.accuracy:.2%}"
        others = "".join(f"  {name} {value:.4g}" for name, value in validation.metrics.items())
        self.console.print(
            f"epoch {validation.epoch + 1}  step {validation.step}  validation loss {validation.loss:.4f}"
            f"{accuracy}{others}"
        )

    def _on_event(self, event: Event) -> None:
        if event.kind != "checkpoint":
            self.console.print(f"step {event.step}  {event.kind}: {event.message}")
        if event.kind == "begins again":
            self._end_phase()
            self._wait("starting: the nodes")

    def _on_record(self, record: TrainRecord) -> None:
        self._close()
        request = self._request
        record = replace(
            record,
            usual=request.usual or record.usual,
            options=request.options or record.options,
            events=(*request.events, *record.events),
        )
        self.record = record
        self.console.print(record_table(record))
        if record.agreement:
            self.console.print(agreement_line(record))
        elif len(record.nodes) > 1 and record.plan.prediction is not None:
            self.console.print(predicted_table(record))
        self._write(record, RECORD)
        self.console.print(f"record {'is' if self._by_lines else 'and weights are'} in {self._output}")

    def _write(self, noun: Plan | TrainRecord, name: str) -> None:
        """Write a file into the folder of the run. Raise CannotWrite if the disk is full or missing."""
        try:
            write_noun(noun, self._output / name)
        except OSError as error:
            raise CannotWrite(self._output / name, error) from error

    def _close(self) -> None:
        self._end_phase()
        self._hide_bar()
        self._keep_scalars(ScalarLog.close)


class RunFolders:
    """The folders of a run, into which this process and its ranks alone write until `release`.

    Drafts of killed processes are removed, before and afterwards.

    Args:
        output: of record, plan and weights.
        checkpoints: of its checkpoints; None for one in `output`.

    Raises:
        FolderInUse: another run writes there.
    """

    def __init__(self, output: Path, checkpoints: Path | None = None) -> None:
        elsewhere = [] if checkpoints is None or checkpoints.resolve() == output.resolve() else [checkpoints]
        with ExitStack() as locks:
            for folder in (output, *elsewhere):
                locks.enter_context(FolderLock(folder))
            self._locks = locks.pop_all()
        self._folders = [output, *(output / name for name in ("checkpoints", "weights")), *elsewhere]
        self._remove_drafts()

    def release(self) -> None:
        """Unlock the folders after the run, whose processes have ended."""
        self._remove_drafts(but_of_living=True)
        self._locks.close()

    def _remove_drafts(self, *, but_of_living: bool = False) -> None:
        for folder in self._folders:
            remove_drafts(folder, keep_living=but_of_living)


def run_folder(folder: Path) -> Path:
    """Create the folder of a run, so that a long run does not fail when it writes its results.

    Raises:
        InvalidInput: it cannot be created or written to, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_FREE_BYTES))
            return folder
    except OSError as error:
        raise InvalidInput(f"cannot write into {folder}: {error.strerror}") from error


@contextmanager
def locked_folder(folder: Path) -> Iterator[Path]:
    """Lock the folder of `run_folder` for this process; remove a new one that stays empty.

    Raises:
        FolderInUse: another process writes there.
        InvalidInput: as `run_folder`.
    """
    is_new = not folder.exists()
    try:
        with FolderLock(run_folder(folder)):
            yield folder
    finally:
        if is_new and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


def output_file(path: Path) -> Path:
    """Return the path of a file to write, and create its folder. Raise InvalidInput as `run_folder` does."""
    if path.is_dir():
        raise InvalidInput(f"cannot write {path}: it is a folder; name a file in it")
    run_folder(path.parent)
    return path


def open_console(to_stderr: bool, width_in_files: int = 120) -> Console:
    """Return the console for tables: as wide as the terminal, or wide enough in a file."""
    console = Console(stderr=to_stderr, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = width_in_files
    return console


def print_line(text: str) -> None:
    """Print the last line on stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def progress_words(picture: Picture, width: int) -> str:
    """Return progress, speed and the slowest node as one line, as much as fits the width."""
    parts = [f"epoch {picture.epoch}/{picture.epochs}" if picture.epochs else f"epoch {picture.epoch}"]
    if picture.left_seconds is not None:
        parts.append(f"{human_seconds(round(picture.left_seconds))} left")
    parts.append(f"{picture.samples_per_second:,.0f} samples/s")
    if picture.loss is not None:
        parts.append(f"loss {picture.loss:.4f}")
    if len(picture.nodes) > 1 and picture.ideal is not None:
        parts.append(f"{picture.ideal:.0%} of the ideal")
        last = next((node.name for node in picture.nodes if node.is_waited_for), "")
        parts += [f"waits for {last}"] if last else []
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)
