"""What the user sees of a run: the plan, one progress line, what happens, and the tables at the end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from evener.errors import InvalidInput
from evener.plan import Plan
from evener.record import Event, Step, TrainRecord, Validation
from evener.report.tables import plan_table, predicted_table, record_table
from evener.report.tensorboard import ScalarWriter, open_scalars
from evener.schema import write_noun

if TYPE_CHECKING:
    from evener.events import RunEvent  # imports PyTorch, which a thin machine lacks

_PLAIN_INTERVAL = 5.0
_WIDTH_IN_FILES = 120
_SMOOTHING = 0.2


class RunView:
    """Shows what the leader of a run says, and keeps it in the run's folder.

    Args:
        output: folder for plan, record and scalars.
        to_stderr: keep stdout free for `--json`.
    """

    def __init__(self, output: Path, *, to_stderr: bool = False) -> None:
        self.console = open_console(to_stderr)
        self.record: TrainRecord | None = None
        self._output = output
        self._plan: Plan | None = None
        self._scalars: ScalarWriter | None = None
        self._bar: Progress | None = None
        self._bar_task: TaskID | None = None
        self._rate = 0.0
        self._last_line = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop_bar()
        if self._scalars is not None:
            self._scalars.close()

    def __call__(self, word: RunEvent) -> None:
        """Show `word`."""
        if isinstance(word, Plan):
            self._on_plan(word)
        elif isinstance(word, Step):
            self._on_step(word)
        elif isinstance(word, Validation):
            self._on_validation(word)
        elif isinstance(word, Event):
            self._on_event(word)
        elif isinstance(word, TrainRecord):
            self._on_record(word)

    def _on_plan(self, plan: Plan) -> None:
        self._plan = plan
        write_noun(plan, self._output / "plan.json")
        self._scalars = open_scalars(self._output / "scalars", [a.node for a in plan.assignments])
        if len(plan.assignments) > 1 or plan.rejected:
            self.console.print(plan_table(plan))

    def _on_step(self, step: Step) -> None:
        if self._scalars is not None:
            self._scalars.step(step)
        rate = step.samples / step.seconds if step.seconds else 0.0
        self._rate = rate if not self._rate else (1 - _SMOOTHING) * self._rate + _SMOOTHING * rate
        line = self._line(step)
        if self.console.is_terminal:
            self._show_bar(step, line)
        elif time.monotonic() - self._last_line > _PLAIN_INTERVAL:
            self._last_line = time.monotonic()
            self.console.print(f"step {step.step}  {line}")

    def _line(self, step: Step) -> str:
        """Throughput, loss, and the part of the step that each node waited."""
        names = [a.node for a in self._plan.assignments] if self._plan else []
        waits = [f"{name} {_percent(n.wait_seconds, step.seconds)}" for name, n in zip(names, step.nodes, strict=False)]
        waiting = f"  waiting: {', '.join(waits)}" if len(waits) > 1 else ""
        return f"epoch {step.epoch + 1}  {self._rate:,.0f} samples/s  loss {step.loss:.4f}{waiting}"

    def _show_bar(self, step: Step, line: str) -> None:
        if self._bar is None:
            columns = (TextColumn("step {task.completed}"), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True)
            self._bar_task = self._bar.add_task(line, total=None)
            self._bar.start()
        assert self._bar_task is not None
        self._bar.update(self._bar_task, completed=step.step, description=line)

    def _on_validation(self, validation: Validation) -> None:
        if self._scalars is not None:
            self._scalars.validation(validation)
        accuracy = "" if validation.accuracy is None else f"  accuracy {validation.accuracy:.2%}"
        self.console.print(
            f"epoch {validation.epoch + 1}  step {validation.step}  validation loss {validation.loss:.4f}{accuracy}"
        )

    def _on_event(self, event: Event) -> None:
        if event.kind != "checkpoint":
            self.console.print(f"step {event.step}  {event.kind}: {event.message}")

    def _on_record(self, record: TrainRecord) -> None:
        self._stop_bar()
        self.record = record
        write_noun(record, self._output / "record.json")
        self.console.print(record_table(record))
        if len(record.nodes) > 1:
            self.console.print(predicted_table(record))
        self.console.print(f"record, weights and checkpoints are in {self._output}")

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def run_folder(folder: Path) -> Path:
    """The folder of a run, which is there afterwards, so that a long run does not end in front of a locked door.

    Raises:
        InvalidInput: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot write into {folder}: {error.strerror}") from error
    return folder


def open_console(to_stderr: bool) -> Console:
    """Where tables are printed: as wide as the terminal; in a file as wide as they need."""
    console = Console(stderr=to_stderr, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_IN_FILES
    return console


def print_line(text: str) -> None:
    """One line on stdout, the last."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"
