"""The fastest node trains alone."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from course import BATCH, STEPS, Contestant, Course, Started


def launch(course: Course, batch: int = BATCH) -> Started:
    """Start one process."""
    return course.start(course.nodes[0].name, course.script("alone", batch))


CONTESTANT = Contestant(
    title="the fastest node alone", package="torch", page="https://docs.pytorch.org/tutorials/beginner/basics/intro.html",
    launch=launch,
)  # fmt: skip


def main() -> None:
    """Train until the process is ended."""
    import torch
    from workload import Referee, Windows, make_model, make_optimizer, train_step

    folder, batch = Path(sys.argv[1]), int(sys.argv[3])
    model, data = make_model(), Windows(folder)
    optimizer, referee = make_optimizer(model.parameters()), Referee(folder)
    for step in count():
        places = torch.arange(step * batch, (step + 1) * batch) % len(data.images)
        train_step(model, optimizer, data.images[places], data.labels[places])
        if (step + 1) * batch // (BATCH * STEPS) > step * batch // (BATCH * STEPS):
            referee.judge(model, step + 1)


if __name__ == "__main__":
    main()
