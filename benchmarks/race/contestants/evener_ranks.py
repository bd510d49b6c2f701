"""Evener: ranks on a master's nodes divide every batch, equal to one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from course import BATCH, STEPS, Contestant, Course, Node, Started

TASK = str(Path(__file__).parents[1] / "evener_task.py")


def launch(course: Course) -> Started:
    """Start a master, the nodes, and a run whose nodes divide every batch."""
    return start(course, "--strategy", "data")


def start(course: Course, *words: str, batch: int = BATCH) -> Started:
    """Start a master, the nodes, and a run with these options."""
    home = course.folder / "home"
    evener = [sys.executable, "-m", "evener"]
    up = course.start("master", [*evener, "up", "--listen", f"{course.master}:0", "--home", str(home), "--json"])
    said = json.loads(up.wait_for(r"\{.*\}", 60)[0])

    def join(node: Node) -> list[str]:
        own = ("--name", node.name, "--data", str(course.data), "--cache", str(course.folder / node.name))
        return [*evener, "join", said["address"], "--token", said["token"], "--device", "cpu", *own]

    course.start_nodes(join, course.nodes)
    course.wait_for_nodes([*evener, "nodes", "--json", "--home", str(home)])
    own = ("--data", str(course.data), "--home", str(home), "--output", str(course.folder / "run"))
    options = (
        "--batch-size",
        str(batch),
        "--option",
        f"samples={BATCH * STEPS}",
        "--option",
        f"network={course.network}",
    )
    return course.start("master", [*evener, "train", TASK, *options, *own, *words])


CONTESTANT = Contestant(
    title="Evener, ranks", package="evener", page="docs/two-pcs.md", launch=launch, begins="Checked:|step 1 ",
)  # fmt: skip
