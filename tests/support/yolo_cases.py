"""Trainings of Ultralytics on drawn images, on one rank and on several: what `evener.frontends.yolo` is tested with.

Ultralytics is imported in the ranks' processes alone: it changes the environment of the process that imports it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch.utils._pytree import tree_leaves

from evener.comm.joining import leave_group
from evener.data.sampler import permutation
from evener.frontends.yolo.rank import alone, join
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.ps.node.torch_backend import TorchBackend
from evener.records.history import History
from evener.training.context import Arithmetic
from evener.training.session import TrainingSession
from support.yolo_trainers import Fault, clocked, exact, redivided, spoiled, struck, take_device, waiting, watched

needs_ultralytics = pytest.mark.skipif(
    importlib.util.find_spec("ultralytics") is None, reason="pip install -e '.[ultralytics]'"
)
OBJECTS = (5, 0, 1, 9, 2, 3, 4, 1)
"""On the images, again and again: uneven, one of them has none."""
SIZE = 64
SETTINGS: dict[str, Any] = {
    "epochs": 3,
    "batch": 8,
    "nbs": 8,
    "imgsz": 64,
    "close_mosaic": 1,
    "warmup_epochs": 1,
    "optimizer": "SGD",
    "seed": 1,
}
"""Of trainings that are compared: each batch a step."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A training.

    Attributes:
        model: yaml of a model.
        settings: of Ultralytics.
        out: folder of what each rank has at the end.
        shares: of the ranks.
        dtype: of all numbers; validation is left out in float64, which Ultralytics cannot validate in.
        is_plain: whether Ultralytics' own trainer trains, alone, given the batches of nodes.
        is_backwards: whether it is given the images of every batch in the opposite order.
        keeps_steps: whether some numbers of every weight are kept after every batch.
        spoiled_epoch: in which the last rank's first batch has images that are no numbers, once; None for none.
        memory: that every rank's node may use, in bytes; empty for all there is.
        fitness: of every epoch where validation is left out; other ranks than the leader would do better every time.
        save_seconds: that a checkpoint takes longer.
        later_seconds: of an image on every rank, by which batches are divided from the third one on, if any.
        faults: that strike ranks; there are others then that go on, and processes that come in the place of the dead.
        devices: of the ranks; empty for processors.
        counts_waits: whether the waits for the device of every batch are kept, on devices that count them.
    """

    model: str
    settings: dict[str, Any]
    out: str
    shares: str = "equal"
    dtype: str = "float64"
    is_plain: bool = False
    is_backwards: bool = False
    keeps_steps: bool = False
    spoiled_epoch: int | None = None
    memory: tuple[int, ...] = ()
    fitness: float = 0.0
    save_seconds: float = 0.0
    later_seconds: tuple[float, ...] = ()
    faults: tuple[Fault, ...] = ()
    devices: tuple[str, ...] = ()
    counts_waits: bool = False


def off(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of a tensor, relative to its own largest value."""
    worst = 0.0
    for name, value in wanted.items():
        if value.is_floating_point():
            difference = (found[name].double() - value.double()).abs().max()
            worst = max(worst, float(difference / value.double().abs().max().clamp(min=1e-6)))
    return worst


def train(case: Case, ranks: int) -> list[dict[str, Any]]:
    """What each rank has after the training of `case`."""
    Path(case.out).mkdir(parents=True)
    memory = case.memory or [None] * ranks
    devices = case.devices or ["cpu"] * ranks
    nodes = [NodeSpec(name=f"n{i}", device=devices[i], threads=1, memory_bytes=memory[i]) for i in range(ranks)]
    is_elastic = bool(case.faults)
    run_local(train_case, nodes, case, patience=60, on_event=lambda _: None, is_elastic=is_elastic)
    files = [Path(case.out) / f"{rank}.pt" for rank in range(ranks)]
    return [torch.load(file, weights_only=True) for file in files if file.exists() or not is_elastic]


def train_case(env: RankEnvironment, case: Case) -> None:
    import torchvision_operators  # noqa: F401

    group, left = join(env, is_elastic=bool(case.faults))
    with alone():
        from ultralytics import YOLO

        from evener.frontends.yolo.trainer import distributed_trainer
        from evener.frontends.yolo.trainer_rank import TrainerRank
        from support.plain_yolo import in_order_of_nodes

        logging.getLogger("ultralytics").setLevel(logging.ERROR)
        if env.device.type not in ("cpu", "cuda"):
            take_device(env.device)
        torch.set_default_dtype(getattr(torch, case.dtype))
        base = YOLO(case.model)._smart_load("trainer")
        base = exact(base, case.fitness, env.rank) if case.dtype == "float64" else base
        if case.spoiled_epoch is not None and env.rank == group.size - 1:
            base = spoiled(base, case.spoiled_epoch)
        trainer_rank = TrainerRank(env, group, case.shares, late_plan=left)
        trainer_rank.folder = Path(case.out) / "run0" if case.faults else None
        plain = partial(in_order_of_nodes, base, is_backwards=case.is_backwards)
        kind = plain() if case.is_plain else distributed_trainer(base, trainer_rank)
        spans: list[float] = []
        steps: list[torch.Tensor] = []
        kind = watched(kind, steps) if case.keeps_steps else kind
        waits: list[int] = []
        kind = waiting(kind, waits) if case.counts_waits else kind
        kind = struck(kind, case.faults, Path(case.out)) if case.faults else kind
        kind = redivided(kind, case.later_seconds) if case.later_seconds else kind
        trainer = clocked(kind, case.save_seconds, spans)(
            overrides={
                "model": case.model,
                "device": str(env.device.index or 0) if env.device.type == "cuda" else str(env.device),
                "plots": False,
                "save_dir": f"{case.out}/run{env.rank}{'late' if trainer_rank.is_late else ''}",
                **case.settings,
            }
        )
        trainer.train()
    model = trainer.model if case.is_plain else trainer.model.module
    history = History() if case.is_plain else trainer_rank.work.session.history
    found = {
        "weights": {name: value.cpu().clone() for name, value in model.state_dict().items()},
        "ema": {name: value.cpu().clone() for name, value in trainer.ema.ema.state_dict().items()},
        "items": torch.stack([value.cpu().double() for value in trainer.tloss.values()]),
        "metrics": {name: float(value) for name, value in (trainer.metrics or {}).items()},
        "outputs": outputs(trainer.ema.ema),
        "epochs": trainer.epoch + 1,
        "steps": steps,
        "waits": waits,
        "epoch_seconds": sum(spans),
        "step_seconds": sum(step.seconds for step in history.steps()),
        "shares": [assignment.samples for assignment in trainer_rank.work.plan.assignments]
        if trainer_rank.work.plan
        else [],
        "samples": sum(step.samples for step in history.steps()),
        "events": [event.message for event in history.events],
        "goodput": None if case.is_plain else _goodput(trainer_rank.work.session),
    }
    torch.save(found, Path(case.out) / f"{env.rank}.pt")
    trainer_rank.together(group.barrier)
    if not case.faults:
        leave_group()


def _goodput(session: TrainingSession) -> float:
    fields: dict[str, Any] = {"task": "case", "seed": 0, "epochs": 1, "precision": "fp64"}
    return session.record(time.time(), nodes=(), **fields).goodput


class LocalCase(msgspec.Struct, frozen=True, kw_only=True):
    """A training of one node of a master, which takes all samples.

    Attributes:
        model: yaml of a model.
        task: of it.
        settings: of Ultralytics.
        out: file of the node's state at the end.
    """

    model: str
    task: str
    settings: dict[str, Any]
    out: str


def train_locally(case: LocalCase) -> dict[str, torch.Tensor]:
    """The state of a node after the training of `case`: model and average."""
    run_local(train_local_case, [NodeSpec(name="n0", threads=1)], case, patience=60, on_event=lambda _: None)
    found: dict[str, torch.Tensor] = torch.load(case.out, weights_only=True)
    return found


def train_local_case(_: RankEnvironment, case: LocalCase) -> None:
    import torchvision_operators  # noqa: F401

    with alone():
        from ultralytics import YOLO

        from evener.frontends.yolo.local_training import LocalTraining

        architecture = YOLO(case.model).model.yaml
    settings = {**case.settings, "task": case.task, "model": case.model}
    training = LocalTraining(settings, architecture)
    arithmetic = Arithmetic("fp32", torch.device("cpu"))
    backend = TorchBackend(training.task, case.settings["seed"], arithmetic)
    batch, epochs = case.settings["batch"], case.settings["epochs"]
    batches = -(-backend.num_samples // batch)
    backend.prepare(epochs * batches)
    backend.set_training(True)
    for step in range(epochs * batches):
        order = permutation(backend.num_samples, case.settings["seed"], step // batches)
        backend.backward(order[step % batches * batch :][:batch], step // batches, (0, step))
        backend.step(step)
    torch.save({name: value.clone() for name, value in training.net.state_dict().items()}, case.out)


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    """All that `model` finds on an image, as one row of numbers."""
    first = next(model.parameters())
    image = torch.linspace(0, 1, 3 * SIZE * SIZE, dtype=first.dtype).view(1, 3, SIZE, SIZE).to(first.device)
    return torch.cat([leaf.flatten() for leaf in tree_leaves(model.eval()(image))]).cpu()


def draw_detection(folder: Path, count: int = 8, task: str = "detect") -> Path:
    """Images of coloured boxes on noise, with labels for `task`; the file that describes them."""
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        (folder / "images" / split).mkdir(parents=True)
        (folder / "labels" / split).mkdir(parents=True)
        for index in range(count):
            image = Image.fromarray(generator.integers(0, 80, (SIZE, SIZE, 3), dtype=np.uint8))
            lines = [_draw_object(image, generator, task) for _ in range(OBJECTS[index % len(OBJECTS)])]
            image.save(folder / "images" / split / f"{index:03}.png")
            (folder / "labels" / split / f"{index:03}.txt").write_text("\n".join(lines))
    data = {"path": str(folder), "train": "images/train", "val": "images/val", "names": {0: "dark", 1: "light"}}
    if task == "pose":
        data["kpt_shape"] = [4, 3]
    file = folder / "data.yaml"
    file.write_text(json.dumps(data))  # JSON is YAML
    return file


def _draw_object(image: Image.Image, generator: np.random.Generator, task: str) -> str:
    w, h = generator.uniform(0.15, 0.5, 2)
    x, y = generator.uniform(w / 2, 1 - w / 2), generator.uniform(h / 2, 1 - h / 2)
    kind = int(generator.integers(2))
    corners = [(x - w / 2, y - h / 2), (x + w / 2, y - h / 2), (x + w / 2, y + h / 2), (x - w / 2, y + h / 2)]
    colour = tuple(int(value) for value in generator.integers(90 + 80 * kind, 150 + 100 * kind, 3))
    ImageDraw.Draw(image).polygon([(a * SIZE, b * SIZE) for a, b in corners], fill=colour)
    return f"{kind} {_numbers(_label(x, y, w, h, corners, task))}"


def _label(x: float, y: float, w: float, h: float, corners: Sequence[tuple[float, float]], task: str) -> list[float]:
    flat = [value for corner in corners for value in corner]
    if task in ("segment", "obb"):
        return flat
    if task == "pose":
        return [x, y, w, h, *(value for a, b in corners for value in (a, b, 2.0))]
    return [x, y, w, h]


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.5f}" for value in values)


def draw_classes(folder: Path, count: int = 8) -> Path:
    """Images of two classes, in a folder for each."""
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for index in range(count):
            place = folder / split / ("dark", "light")[index % 2]
            place.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 120 + 120 * (index % 2), (SIZE, SIZE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{index:03}.png")
    return folder
