"""Whose runs a node takes part in: its user's choice, which the master cannot overrule."""

from __future__ import annotations

from typing import NamedTuple

from evener.ps.job import Job
from evener.tasks.load import BUILT_IN_TASKS


class Acceptance(NamedTuple):
    """What a node's user allows.

    Attributes:
        built_in_only: no code that travels: the tasks that come with Evener alone.
        submitters: names of those whose runs it takes, as the master knows them; None for all.
    """

    built_in_only: bool = False
    submitters: frozenset[str] | None = None

    def objection(self, job: Job) -> str:
        """Why the node does not take part in a run; empty if it does."""
        if self.built_in_only and (job.code or job.task not in BUILT_IN_TASKS):
            return "its user lets it run tasks that come with Evener, and no others (--built-in-only)"
        if self.submitters is not None and job.submitter not in self.submitters:
            return f"its user lets it run the tasks of {', '.join(sorted(self.submitters))}, not of {job.submitter}"
        return ""
