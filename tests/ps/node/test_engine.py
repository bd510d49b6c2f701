"""One engine over both backends: NumPy computes what PyTorch does, lease by lease, for one job that both serve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from evener.agreements.layout import Flat, flat_of
from evener.agreements.messages import Lease, SampleRange
from evener.agreements.settings import AgreementSettings, Sgd, Workload
from evener.commands.engines import build_engine, build_thin_engine, build_torch_engine
from evener.data.tasks.load import load_thin_task
from evener.ps.node.engine import EngineSetup, NodeEngine
from evener.ps.node.thin_backend import ThinBackend
from evener.ps.protocol.job import Job
from evener.records.errors import InvalidInput, InvalidValue, MissingExtra
from support.refusals import refused

OPTIONS = {"channels": "4", "blocks": "1"}
TRAIN, VALIDATION = 1438, 359


def backend(precision: str = "fp64") -> ThinBackend:
    return ThinBackend(load_thin_task("digits", None, OPTIONS), 0, precision)


def job(task: str = "digits", precision: str = "fp64", samples: int = TRAIN) -> Job:
    return Job(
        run="one",
        task=task,
        title=task,
        options=OPTIONS if task == "digits" else {},
        precision=precision,
        agreement_name="average",
        agreement=AgreementSettings(batch=16, outer=Sgd(learning_rate=1.0), contribution="delta", local_steps=3),
        workload=Workload(num_samples=samples, num_epochs=2, seed=4),
        layout=backend(precision).layout,
        num_validation=VALIDATION,
    )


def setup(wanted: Job) -> EngineSetup:
    return EngineSetup(job=wanted, code=None, data=None, device="cpu", speed=1.0, between_steps=lambda: None)


@pytest.fixture(scope="module")
def engines() -> tuple[NodeEngine, NodeEngine]:
    return build_thin_engine(setup(job())), build_torch_engine(setup(job()))


def weights() -> Flat:
    """Random ones: those that the task begins with leave half of its gradients zero."""
    layout, random = job().layout, np.random.default_rng(1)
    return flat_of(layout, {entry.name: 0.1 * random.standard_normal(entry.shape) for entry in layout.entries})


def lease(steps: int, samples: int) -> Lease:
    portion = SampleRange(epoch=1, ranges=((7, samples - 5), (300, 5)))
    return Lease(number=3, version=0, samples=portion, num_steps=steps)


def test_numpy_gradients_equal_pytorch(engines: tuple[NodeEngine, NodeEngine]) -> None:
    losses, found = [], []
    for engine in engines:
        into = Flat(engine.layout)
        engine.load(weights())
        losses.append(engine.gradient(lease(1, 20), into))
        found.append(into.parameters[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-14, abs=0)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-10, atol=1e-14)


def test_numpy_local_steps_equal_pytorch(engines: tuple[NodeEngine, NodeEngine]) -> None:
    losses, found = [], []
    for engine in engines:
        into = Flat(engine.layout)
        engine.load(weights())
        losses.append(engine.local_steps(lease(3, 40), into))
        found.append(into.parameters[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12, abs=0)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-8, atol=1e-10)  # AdamW divides by small roots
    assert not np.allclose(found[0], weights().parameters[0], atol=1e-4)


def test_numpy_validation_equals_pytorch_and_leaves_the_model_alone(engines: tuple[NodeEngine, NodeEngine]) -> None:
    sums = []
    for engine in engines:
        other, before, after = weights(), Flat(engine.layout), Flat(engine.layout)
        other.parameters[0][:] *= 2
        engine.load(weights())
        engine.gradient(lease(1, 20), before)
        sums.append(engine.validate(other, 10, 50))
        engine.gradient(lease(1, 20), after)
        np.testing.assert_array_equal(before.memory, after.memory)
    assert sums[0] == pytest.approx(sums[1], rel=1e-14, abs=0)


def test_thin_engine_serves_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    engine = build_engine(setup(job()))
    assert isinstance(engine._backend, ThinBackend)


def test_task_without_a_thin_version_raises_missing_extra() -> None:
    with refused(MissingExtra):
        build_thin_engine(setup(job("synthetic")))


def test_data_that_differ_from_the_job_are_rejected() -> None:
    with refused(InvalidInput):
        build_thin_engine(setup(job(samples=1400)))


def test_half_precision_needs_pytorch() -> None:
    with refused(InvalidValue):
        backend("bf16")


def test_model_that_differs_from_the_job_is_rejected() -> None:
    wanted = job()
    with refused(InvalidInput):
        build_thin_engine(setup(replace(wanted, options={"channels": "5", "blocks": "1"})))


@pytest.mark.parametrize("number", [0, 1], ids=["thin", "torch"])
def test_sample_time_is_measured_without_changing_the_model(
    engines: tuple[NodeEngine, NodeEngine], number: int
) -> None:
    engine, before, after = engines[number], Flat(job().layout), Flat(job().layout)
    engine.load(weights())
    engine.gradient(lease(1, 20), before)
    assert 0 < engine.step_seconds()(1) < 1
    engine.gradient(lease(1, 20), after)
    np.testing.assert_array_equal(before.memory, after.memory)


def test_engine_reads_mnist_from_the_data_folder(tmp_path: Path) -> None:
    wanted = job("mnist")
    with pytest.raises(InvalidInput, match=f"MNIST is not in {tmp_path}"):
        build_thin_engine(setup(wanted)._replace(data=tmp_path))
