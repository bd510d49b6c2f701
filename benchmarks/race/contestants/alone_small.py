"""The fastest node trains alone, with batches of a size that only a single machine can afford."""

from __future__ import annotations

from dataclasses import replace

from course import Course, Started

from contestants import alone


def launch(course: Course) -> Started:
    """Start the program of `alone` with batches of 42 samples."""
    return alone.launch(course, 42)


CONTESTANT = replace(alone.CONTESTANT, title="the same, batches of 42", launch=launch)
