"""Evener: ranks on a master's nodes, which choose how to divide the work."""

from __future__ import annotations

from dataclasses import replace

from course import Course, Started

from contestants import evener_ranks


def launch(course: Course) -> Started:
    """Start a master, the nodes, and a run."""
    return evener_ranks.start(course, "--strategy", "auto")


CONTESTANT = replace(evener_ranks.CONTESTANT, title="Evener, auto", launch=launch)
