"""The fastest node trains alone."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from course import BATCH, STEPS, Contestant, Course, Started


def launch(course: Course) -> Started:
    """Start one process."""
    return course.start(course.nodes[0].name, course.script("alone"))


CONTESTANT = Contestant(
    title="the fastest node alone", package="torch", page="https://docs.pytorch.org/tutorials/beginner/basics/intro.html",
    launch=launch,
)  # fmt: skip


def main() -> None:
    """Train until the process is ended."""
    from workload import Referee, Windows, make_model, make_optimizer, train_step

    folder = Path(sys.argv[1])
    model, data = make_model(), Windows(folder)
    optimizer, referee = make_optimizer(model.parameters()), Referee(folder)
    for step in count():
        train_step(model, optimizer, *data.batch(step, 0, BATCH))
        if (step + 1) % STEPS == 0:
            referee.judge(model, step + 1)


if __name__ == "__main__":
    main()
