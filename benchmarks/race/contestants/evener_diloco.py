"""Evener: nodes make local steps and exchange what they changed, by the protocol `diloco`."""

from __future__ import annotations

from dataclasses import replace

from course import STEPS, Course, Started

from contestants import evener_ranks


def launch(course: Course) -> Started:
    """Start a master, the nodes, and a run with an agreement."""
    return evener_ranks.launch(course, "--agreement", "diloco", "--local-steps", str(STEPS))


CONTESTANT = replace(evener_ranks.CONTESTANT, title="Evener, diloco", launch=launch)
