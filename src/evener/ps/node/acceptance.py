"""The runs that a node takes part in: its user's choice, which the master cannot override."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from evener.data.tasks.load import BUILT_IN_TASKS


class SubmittedTask(Protocol):
    """A task for a node to load, of a run or of an examination."""

    @property
    def task(self) -> str:
        """Name of a built-in task, or of a file in the blob `code`."""
        ...

    @property
    def code(self) -> str:
        """Blob with the task's files; empty for none."""
        ...

    @property
    def submitter(self) -> str:
        """Name of the submitter at the master."""
        ...


class Acceptance(NamedTuple):
    """Restrictions that a node's user sets.

    Attributes:
        built_in_only: whether to run only the tasks that come with Evener, and no submitted code.
        submitters: names of the submitters whose runs are accepted; None for all.
    """

    built_in_only: bool = False
    submitters: frozenset[str] | None = None

    def objection(self, task: SubmittedTask) -> str:
        """Say why the node does not load a task; empty if it does."""
        if self.built_in_only and (task.code or task.task not in BUILT_IN_TASKS):
            return "its user lets it run only tasks that come with Evener (--built-in-only)"
        if self.submitters is not None and task.submitter not in self.submitters:
            return (
                f"its user lets it run only the tasks of {', '.join(sorted(self.submitters))}, not of {task.submitter}"
            )
        return ""
