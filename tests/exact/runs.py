"""Runs a recipe: whole, in plain PyTorch, or one rank's part of it, with what `evener train` runs after its plan."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evener.comm.group import Group
from evener.config.run_config import RunConfig
from evener.data.loader import seed_all
from evener.data.sampler import MicroBatch
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.records.schema import write_noun
from evener.tracer.nested import call, map_tensors
from evener.training.context import make_context
from evener.training.rank import prepare
from evener.training.step import TrainStep
from evener.training.training import Training
from exact.divisions import BATCH, Way
from exact.recipe import Recipe, shape_of, tensors_of

SEED = 3
COURSE = (("train", BATCH), ("train", BATCH), ("evaluate", BATCH), ("train", 7), ("evaluate", 6))
"""What is done, with so many samples each: the last batch of an epoch is smaller."""


@dataclass
class Outcome:
    """What a run gave.

    Attributes:
        losses: of every pass of the course; of one rank, its part of it.
        outputs: of every evaluation, as (shape of the structure, tensors), replica by replica.
        weights: and buffers after all steps.
        across: whether the model looks across samples.
    """

    losses: list[float] = field(default_factory=list)
    outputs: list[list[tuple[list[str], list[Tensor]]]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    across: bool = False

    def to_bytes(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(vars(self), buffer)
        return buffer.getvalue()

    @staticmethod
    def of_bytes(data: bytes) -> Outcome:
        return Outcome(**torch.load(io.BytesIO(data)))

    def see(self, outputs: Any) -> None:
        """Keep the outputs of an evaluation."""
        self.outputs.append([(shape_of(outputs), [tensor.detach().clone() for tensor in tensors_of(outputs)])])


def part_of(batch: Any, start: int, count: int) -> Any:
    """Samples [start, start + count) of a batch."""
    return map_tensors(batch, lambda tensor: tensor[start : start + count].clone())


def run_whole(recipe: Recipe) -> Outcome:
    """One process, with nothing of ours but the seeds of the steps."""
    seed_all(SEED)
    model = recipe.model().double()
    seed_all(SEED, 0, 0, 1)
    optimizer = recipe.optimizer(model.parameters())
    outcome = Outcome(across=recipe.looks_across(model))
    for number, (what, samples) in enumerate(COURSE):
        inputs, targets = recipe.batch(number, samples)
        model.train(what == "train")
        seed_all(SEED, number, 0)
        if what == "train":
            loss = recipe.loss(call(model, inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            seed_all(SEED, number, 0, 1)
            optimizer.step()
            model.zero_grad()
        else:
            with torch.no_grad():
                outputs = call(model, inputs)
                loss = recipe.loss(outputs, targets)
            outcome.see(outputs)
        outcome.losses.append(float(loss.detach()))
    outcome.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return outcome


class _Batch:
    """A loader of one step: this replica's part of a batch."""

    def __init__(self, batch: Any, number: int, sizes: tuple[int, ...], replica: int) -> None:
        self._batch, self._number, self._sizes, self._replica = batch, number, sizes, replica

    def next_step(self) -> Iterator[tuple[MicroBatch, Any, Any]]:
        start, own = sum(self._sizes[: self._replica]), self._sizes[self._replica]
        indices = np.arange(start, start + own)
        part = MicroBatch(epoch=0, step=self._number, indices=indices, total=sum(self._sizes), is_last=True)
        yield part, *(part_of(one, start, own) if own else part_of(one, 0, 1) for one in self._batch)


def run_divided(recipe: Recipe, training: Training) -> Outcome:
    """This rank's part; the weights are on the first rank."""
    step, outcome = TrainStep(training), Outcome()
    assert training.division is not None
    for number, (what, samples) in enumerate(COURSE):
        batch = recipe.batch(number, samples)
        training.model.train(what == "train")
        seed_all(SEED, number, training.model.rng_stream)
        if what == "train":
            sizes = training.division.sizes(number + 1, samples)
            loader: Any = _Batch(batch, number, sizes, training.model.replica)
            outcome.losses.append(float(step(loader).loss or 0.0))
        else:
            sizes = training.division.parts(number + 1, samples)
            _evaluate(recipe, training, batch, sizes, outcome)
    weights = training.model.gather_weights()
    outcome.weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
    return outcome


def _evaluate(recipe: Recipe, training: Training, batch: Any, sizes: tuple[int, ...], outcome: Outcome) -> None:
    """As `evaluate` of a run does, but the outputs are kept."""
    model, loss = training.model, 0.0
    start, own = sum(sizes[: model.replica]), sizes[model.replica]
    found: list[Any] = []
    if own:
        inputs, targets = (part_of(one, start, own) for one in batch)
        outputs = model.predict(inputs)
        if model.is_reporter:
            with torch.no_grad():
                loss = float(recipe.loss(outputs, targets)) * own / sum(sizes)
            outcome.see(outputs)
            found = outcome.outputs.pop()
    outcome.outputs.append(found)
    outcome.losses.append(loss)


def prepared(reference: str, way: Way, group: Group, across: bool, is_checked: bool) -> Training:
    """What `evener train` makes of a recipe on this rank before the first step, its self-check included."""
    plan = way.plan(1 if across else 2)
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "plan.json"  # whoever gives a plan is spared the rehearsal of it
        write_noun(plan, given)
        config = RunConfig(
            task=str(Path(__file__).with_name("recipe_task.py")),
            option={"recipe": reference},
            plan=given,
            check=is_checked,
            precision="fp64",
            seed=SEED,
            rematerialise=way.rematerialise,
        )
        env = RankEnvironment(
            rank=group.rank,
            nodes=[NodeSpec(name=name) for name in group.nodes],
            device=group.device,
            patience=30,
            notify=lambda _: None,
        )
        context = make_context(env, group, config)
    training = prepare(context, config)
    assert isinstance(training, Training)
    return training
