"""A task that needs NumPy only: linear regression in float64, as an engine that can be told to misbehave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evener.agreements.layout import Flat, StateLayout, flat_of, layout_of
from evener.agreements.messages import Lease, positions
from evener.agreements.settings import AgreementSettings, Workload
from evener.data.sampler import permutation
from evener.oracle.apportion import NodeCost
from evener.ps.node.engine import EngineSetup
from evener.ps.protocol.job import Job
from evener.records.errors import InvalidInput
from evener.system.pace import StepSeconds

SAMPLES, FEATURES, VALIDATION, BATCH = 60, 5, 21, 12
RATE = 0.05
TRUTH = np.arange(1.0, FEATURES + 1)


def data(count: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    draw = np.random.default_rng(seed)
    inputs = draw.standard_normal((count, FEATURES))
    return inputs, inputs @ TRUTH + 3.0 + 0.01 * draw.standard_normal(count)


def start() -> dict[str, NDArray[np.float64]]:
    return {"w": np.zeros(FEATURES), "b": np.zeros(1)}


def job(
    agreement: AgreementSettings, *, run: str = "linear-1", epochs: int = 4, seed: int = 3, name: str = "sync"
) -> Job:
    return Job(
        run=run,
        task="linear",
        title="linear",
        agreement_name=name,
        agreement=agreement,
        workload=Workload(num_samples=SAMPLES, num_epochs=epochs, seed=seed),
        layout=layout_of(start()),
        num_validation=VALIDATION,
    )


def weights() -> Flat:
    return flat_of(layout_of(start()), start())


def gradient(
    w: NDArray[np.float64], b: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Of half the mean square of the residual; and that."""
    residual = x @ w + b[0] - y
    return residual @ x / len(y), np.array([residual.mean()]), float((residual**2).mean() / 2)


def serial(epochs: int, seed: int = 3) -> dict[str, NDArray[np.float64]]:
    """The weights after as many epochs of one process."""
    state, (x, y) = start(), data(SAMPLES, 1)
    for epoch in range(epochs):
        order = permutation(SAMPLES, seed, epoch)
        for first in range(0, SAMPLES, BATCH):
            chosen = order[first : first + BATCH]
            dw, db, _ = gradient(state["w"], state["b"], x[chosen], y[chosen])
            state = {"w": state["w"] - RATE * dw, "b": state["b"] - RATE * db}
    return state


@dataclass
class Mood:
    """How an engine misbehaves.

    Attributes:
        nan_calls: numbers of calls, from 1, whose result is NaN; `always` for all.
        always_nan: see above.
        refuses: why it cannot be made; empty if it can.
        fails_at: call that raises an error; 0 for none.
        seconds: that every call takes.
        step_seconds: that every local step takes besides.
        unit_seconds: that it says that a sample takes.
        lies: whether it says that everything is right, without looking.
        factor: that its contributions are multiplied by.
        rubbish: whether it sends noise, as long as what is due.
        gate: closed while the engine is to stand still.
        calls: made so far.
        made: engines made so far.
    """

    nan_calls: tuple[int, ...] = ()
    always_nan: bool = False
    refuses: str = ""
    fails_at: int = 0
    seconds: float = 0.001
    step_seconds: float = 0.0
    unit_seconds: float = 1e-3
    lies: bool = False
    factor: float = 1.0
    rubbish: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    validation_gate: threading.Event = field(default_factory=threading.Event)
    calls: int = 0
    made: int = 0
    code: Path | None = None
    data: Path | None = None

    def __post_init__(self) -> None:
        self.gate.set()
        self.validation_gate.set()


class LinearEngine:
    """See the first line."""

    unused: tuple[int, ...] = ()

    def __init__(self, setup: EngineSetup, mood: Mood) -> None:
        mood.made += 1
        mood.code, mood.data = setup.code, setup.data
        if mood.refuses:
            raise InvalidInput(mood.refuses)
        self._job, self._mood, self._between = setup.job, mood, setup.between_steps
        self._train, self._validation = data(SAMPLES, 1), data(VALIDATION, 2)
        self._state = flat_of(self._job.layout, start())

    @property
    def layout(self) -> StateLayout:
        return self._job.layout

    def load(self, weights: Flat) -> None:
        self._state.copy_from(weights)

    def gradient(self, lease: Lease, into: Flat) -> float:
        x, y = self._samples(lease)
        state = self._state.views()
        dw, db, loss = gradient(state["w"], state["b"], x, y)
        into.fill({"w": dw, "b": db})
        return self._misbehave(into, loss)

    def local_steps(self, lease: Lease, into: Flat) -> float:
        x, y = self._samples(lease)
        state, batch, losses = self._state.views(), self._job.agreement.batch, 0.0
        for first in range(0, len(y), batch):
            part = slice(first, first + batch)
            dw, db, loss = gradient(state["w"], state["b"], x[part], y[part])
            self._state.fill({"w": state["w"] - RATE * dw, "b": state["b"] - RATE * db})
            losses += loss * len(y[part])
            if self._mood.step_seconds:
                time.sleep(self._mood.step_seconds)
            self._between()
        into.copy_from(self._state)
        return self._misbehave(into, losses / len(y))

    def step_seconds(self) -> StepSeconds:
        return StepSeconds(fixed=0.0, each=self._mood.unit_seconds)

    def validate(self, weights: Flat, first: int, size: int) -> tuple[float, float]:
        self._mood.validation_gate.wait()
        x, y = (part[first : first + size] for part in self._validation)
        state = weights.views()
        if self._mood.lies:
            return 0.0, float(size)
        residual = x @ state["w"] + state["b"][0] - y
        return float((residual**2).sum() / 2), float((abs(residual) < 0.5).sum())

    def close(self) -> None:
        pass

    def _samples(self, lease: Lease) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        self._mood.gate.wait()
        self._mood.calls += 1
        if self._mood.calls == self._mood.fails_at:
            raise ZeroDivisionError("the task divides by nothing")
        if self._mood.seconds:
            time.sleep(self._mood.seconds)
        order = permutation(SAMPLES, self._job.workload.seed, lease.samples.epoch)
        chosen = order[positions(lease.samples)]
        return self._train[0][chosen], self._train[1][chosen]

    def _misbehave(self, into: Flat, loss: float) -> float:
        if self._mood.always_nan or self._mood.calls in self._mood.nan_calls:
            into.floats[0][0] = np.nan
            return float("nan")
        for array in into.floats:
            array *= self._mood.factor
            if self._mood.rubbish:
                noise = np.random.default_rng(self._mood.calls).standard_normal(array.shape)
                array[...] = noise * np.linalg.norm(array) / np.linalg.norm(noise)
        return loss


def build(mood: Mood) -> Callable[[EngineSetup], LinearEngine]:
    return lambda setup: LinearEngine(setup, mood)


def costs(seconds: dict[str, float]) -> dict[str, NodeCost]:
    return {name: NodeCost(unit_seconds=each) for name, each in seconds.items()}
