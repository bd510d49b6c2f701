"""What the user sees of a run under a master: as of any other run, though nodes may come while it goes on."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from evener.events import RunEvent
from evener.plan import Plan
from evener.record import TrainRecord
from evener.report.tables import record_table
from evener.report.text import human_bytes
from evener.run.console import RunView
from evener.schema import write_noun


class MasterRunView:
    """Shows a run, and keeps what belongs into its folder.

    Args:
        output: the folder.
        to_stderr: keep stdout free for `--json`.
    """

    def __init__(self, output: Path, *, to_stderr: bool) -> None:
        self._output, self._to_stderr = output, to_stderr
        self._view = RunView(output, to_stderr=to_stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._view.__exit__(kind, error, at)

    def __call__(self, word: RunEvent) -> None:
        """Show `word`; a plan with more nodes than before begins a new table and new columns."""
        if isinstance(word, Plan):
            self._view.__exit__(None, None, None)
            self._view = RunView(self._output, to_stderr=self._to_stderr)
        self._view(word)

    def finish(self, record: TrainRecord) -> None:
        """Show and keep the record."""
        self._view.__exit__(None, None, None)
        write_noun(record, self._output / "record.json")
        console = self._view.console
        console.print(record_table(record))
        console.print(f"agreement {record.agreement}: {_agreement_words(record)}")
        console.print(f"record and weights are in {self._output}")


def _agreement_words(record: TrainRecord) -> str:
    contributions = sum(node.contributions for node in record.nodes)
    stale = sum(node.contributions * node.staleness for node in record.nodes)
    words = [f"{contributions} contributions"]
    if stale:
        most = max(node.most_stale for node in record.nodes)
        words.append(f"{stale / contributions:.2f} versions stale on average, {most} at most")
    sent, received = (sum(getattr(node, field) for node in record.nodes) for field in ("bytes_sent", "bytes_received"))
    words.append(f"{human_bytes(sent)} to the master, {human_bytes(received)} back")
    if record.bytes_saved:
        words.append(f"{human_bytes(record.bytes_saved)} saved by compression")
    refused, late = (sum(getattr(node, field) for node in record.nodes) for field in ("refused", "late"))
    words += [f"{count} {name}" for name, count in (("refused", refused), ("late", late)) if count]
    return ", ".join(words)
