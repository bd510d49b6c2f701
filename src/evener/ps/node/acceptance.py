"""Whose runs a node takes part in: its user's choice, which the master cannot overrule."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from evener.data.tasks.load import BUILT_IN_TASKS


class AskedTask(Protocol):
    """A task that a node is to load: of a run, or to be tried."""

    @property
    def task(self) -> str:
        """Name of a built-in task, or of a file that travels."""
        ...

    @property
    def code(self) -> str:
        """Blob with the files that travel; empty for none."""
        ...

    @property
    def submitter(self) -> str:
        """Who asks, as the master knows him."""
        ...


class Acceptance(NamedTuple):
    """What a node's user allows.

    Attributes:
        built_in_only: no code that travels: the tasks that come with Evener alone.
        submitters: names of those whose runs it takes, as the master knows them; None for all.
    """

    built_in_only: bool = False
    submitters: frozenset[str] | None = None

    def objection(self, asked: AskedTask) -> str:
        """Why the node does not load a task; empty if it does."""
        if self.built_in_only and (asked.code or asked.task not in BUILT_IN_TASKS):
            return "its user lets it run tasks that come with Evener, and no others (--built-in-only)"
        if self.submitters is not None and asked.submitter not in self.submitters:
            return f"its user lets it run the tasks of {', '.join(sorted(self.submitters))}, not of {asked.submitter}"
        return ""
