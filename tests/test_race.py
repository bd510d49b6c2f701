"""The contestants of the race: short files that start one command per node, and train the same network."""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks" / "race"
NAMES = tuple(sorted(path.stem for path in (FOLDER / "contestants").glob("[!_]*.py")))


@pytest.fixture(autouse=True)
def _race_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the race, which is no package, are imported by their own names."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), str(FOLDER.parent), *sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("contestants", "course", "workload", "evener_task", "race", "pictures"):
            del sys.modules[name]


class Started:
    """A command that says whatever it is waited for."""

    text = ""

    def wait_for(self, pattern: str, _seconds: float) -> re.Match[str]:
        said = (
            '{"address": "10.0.0.9:7117", "token": "t"} peer /ip4/10.0.0.1/p2p/x startup complete Ray runtime started '
            "training begins"
        )
        match = re.search(pattern, said)
        assert match is not None
        return match


@pytest.mark.parametrize("name", NAMES)
def test_contestant_is_short_and_names_its_documentation(name: str) -> None:
    assert len((FOLDER / "contestants" / f"{name}.py").read_text().splitlines()) <= 80
    contestant = import_module(f"contestants.{name}").CONTESTANT
    assert contestant.page.startswith(("https://", "docs/"))
    assert contestant.package in ("torch", "torchft", "hivemind", "flwr", "ray", "evener")


@pytest.mark.parametrize("name", NAMES)
def test_contestant_starts_a_command_on_every_node_that_trains(name: str, tmp_path: Path) -> None:
    course = import_module("course")
    nodes = [course.Node(name=f"n{i}", address=f"10.0.0.{i}", cores=0.8 / 2**i) for i in range(4)]
    commands: list[tuple[str, Sequence[str]]] = []
    later: list[Callable[[Any], Sequence[str]]] = []

    def start(host: str, command: Sequence[str]) -> Started:
        commands.append((host, command))
        return Started()

    def start_nodes(command: Callable[[Any], Sequence[str]], chosen: Sequence[Any]) -> list[Started]:
        later.append(command)
        return [start(node.name, command(node)) for node in chosen]

    built = course.Course(
        nodes=nodes[:3], all_nodes=nodes, master="10.0.0.9", network="cnn", data=tmp_path, folder=tmp_path, start=start,
        start_nodes=start_nodes, wait_for_nodes=lambda _: None,
    )  # fmt: skip
    import_module(f"contestants.{name}").CONTESTANT.launch(built)
    trains = [host for host, _ in commands if host != "master"]
    assert trains == (["n0"] if name.startswith("alone") else ["n0", "n1", "n2"])
    assert all(isinstance(word, str) for _, command in commands for word in command)
    if not name.startswith("alone"):  # a fourth node comes
        own = later[-1](nodes[3])
        assert not {nodes[2].address, nodes[2].name} & set(own)
        if name != "flower_fedavg":  # whose nodes have no names
            assert nodes[3].address in own or nodes[3].name in own


def test_order_of_the_race_names_every_contestant() -> None:
    assert sorted(import_module("race").ORDER) == sorted(NAMES)


def test_task_of_evener_is_the_workload_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    for stem, size in (("train", 60_000), ("t10k", 10_000)):
        images, labels = draw.integers(0, 256, (size, 28, 28), np.uint8), draw.integers(0, 10, size).astype(np.uint8)
        for kind, array, header in (
            ("images-idx3", images, [2051, size, 28, 28]),
            ("labels-idx1", labels, [2049, size]),
        ):
            with gzip.open(tmp_path / f"{stem}-{kind}-ubyte.gz", "wb", compresslevel=1) as file:
                file.write(np.array(header, ">i4").tobytes() + array.tobytes())
    workload, evener_task = import_module("workload"), import_module("evener_task")
    course: Any = import_module("course")
    for network in ("cnn", "mlp"):
        monkeypatch.setenv("RACE_NETWORK", network)
        ours, theirs = evener_task.task(tmp_path, network=network).model(), workload.make_model()
        assert str(ours) == str(theirs)
    task = evener_task.task(tmp_path)
    rows = (task.train_data(), workload.Windows(tmp_path))
    assert len(rows[0]) == len(rows[1]) == course.BATCH * course.STEPS
    for data in rows:
        data.set_epoch(20)  # which wraps around
    for index in (0, 1300, len(rows[0]) - 1):
        (image, label), (other_image, other_label) = rows[0][index], rows[1][index]
        assert torch.equal(image, other_image)
        assert label == other_label
    images, labels = task.validation_data().tensors
    tested = workload.read(tmp_path, "test", workload.TESTED)
    assert torch.equal(images, tested[0])
    assert torch.equal(labels, tested[1])
    defaults = task.optimizer([torch.nn.Parameter(torch.ones(1))]).defaults
    assert (defaults["lr"], defaults["momentum"]) == (course.LEARNING_RATE, course.MOMENTUM)


def test_picture_shows_every_contestant_over_every_line() -> None:
    rows = [
        {"title": title, "mbit": mbit, "accuracies": accuracies}
        for mbit in (1000.0, 10.0)
        for title, accuracies in (("DDP", [[1.0, 0.9], [2.0, 0.98]]), ("never began", []))
    ]
    drawn = import_module("pictures").picture(rows, "cnn, calm", 0.975)
    assert drawn.startswith("<svg")
    for text in ("cnn, calm", "1000 Mbit/s", "10 Mbit/s", "DDP", "never began"):
        assert f"<!-- {text} -->" in drawn
