"""Evener: nodes make local steps and exchange what they changed, by the agreement `diloco`, from batches of 42."""

from __future__ import annotations

from dataclasses import replace

from course import Course, Started

from contestants import evener_ranks


def launch(course: Course) -> Started:
    """Start a master, the nodes, and a run with an agreement."""
    return evener_ranks.start(course, "--agreement", "diloco", "--local-steps", "20", batch=42)


CONTESTANT = replace(evener_ranks.CONTESTANT, title="Evener, diloco", launch=launch)
