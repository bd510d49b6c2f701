"""A server is killed and its successor goes on as if nothing had happened, but for what was not finished."""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from evener.agreements.layout import ArraySpec, Flat, StateLayout
from evener.agreements.messages import WorkerTotals
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.settings import Adam, AgreementSettings, Sgd, Workload, synchronous
from evener.agreements.snapshot import load_snapshot, save_snapshot
from evener.records.errors import InvalidFile, InvalidValue, MissingFile
from support.numpy_engine import NumpyEngine, Problem
from support.refusals import refused
from support.server_hall import CASES, EPOCHS, SAMPLES, SECONDS, Hall
from support.stepped_server import SteppedServer, run_stepped

AGREEMENT = synchronous(batch=24, outer=Adam(learning_rate=0.05))


def new_server(problem: Problem, agreement: AgreementSettings = AGREEMENT) -> ParameterServer:
    workload = Workload(num_samples=problem.num_samples, num_epochs=3, seed=problem.seed)
    return ParameterServer(agreement, workload, problem.start.copy(), quorum=2)


def totals(server: ParameterServer) -> dict[str, WorkerTotals]:
    return {name: worker.totals for name, worker in server.workers.items()}


def begun(problem: Problem, steps: int) -> SteppedServer:
    stepped = SteppedServer(new_server(problem), AGREEMENT)
    for name in "ab":
        stepped.join(name, NumpyEngine(problem))
    for _ in range(steps):
        for name in "ab":
            stepped.turn(name)
    return stepped


@pytest.mark.parametrize("steps", [0, 7, 16])
def test_resumed_server_continues_bit_for_bit(tmp_path: Path, steps: int) -> None:
    problem = Problem()
    stepped = begun(problem, steps)
    save_snapshot(stepped.server.snapshot(), tmp_path / "run" / "master.safetensors")
    snapshot = load_snapshot(tmp_path / "run" / "master.safetensors")
    server = ParameterServer.resume(snapshot, first_number=10**6, quorum=2)
    assert server.version == stepped.server.version
    after = run_stepped(server, AGREEMENT, {name: NumpyEngine(problem) for name in "ab"})
    whole = run_stepped(new_server(problem), AGREEMENT, {name: NumpyEngine(problem) for name in "ab"})
    np.testing.assert_array_equal(after.server.weights.memory, whole.server.weights.memory)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["master.safetensors"]


@pytest.mark.parametrize("name", CASES)
def test_leases_of_a_killed_server_are_reissued_and_answers_are_late(name: str) -> None:
    hall = Hall(CASES[name])
    for action in [
        ("join", "a"),
        ("join", "b"),
        ("push", "a"),
        ("push", "b"),
        ("push", "a"),
        ("join", "c"),
        ("push", "c"),
    ]:
        hall.act(*action)
    used_before = Counter({key: count for key, count in hall.used().items() if count})
    old_leases = {worker: list(leases) for worker, leases in hall.held.items()}
    counters = hall.server.weights.counters.copy()
    successor = Hall(CASES[name])
    successor.server = ParameterServer.resume(hall.server.snapshot(), first_number=1000)
    assert totals(successor.server) == totals(hall.server)
    for worker in old_leases:
        successor.act("join", worker)
    for worker, leases in old_leases.items():
        for lease in leases:
            assert successor.server.inbox(worker, lease.number) is None
    successor.finish()
    np.testing.assert_array_equal(successor.server.weights.counters[: len(counters)] >= counters, True)
    assert used_before + successor.used() == {(epoch, p): 1 for epoch in range(EPOCHS) for p in range(SAMPLES)}


def test_snapshot_holds_the_measured_speeds() -> None:
    hall = Hall(CASES["sync"])
    for action in [("join", "a"), ("join", "c"), ("push", "a"), ("push", "a"), ("push", "c"), ("push", "a")]:
        hall.act(*action)
    seconds = hall.server.snapshot().state.unit_seconds
    assert seconds == {"a": SECONDS["a"], "c": SECONDS["c"]}
    assert ParameterServer.resume(hall.server.snapshot(), first_number=0).snapshot().state.unit_seconds == seconds


def test_snapshot_is_a_copy() -> None:
    problem = Problem()
    stepped = begun(problem, 8)
    snapshot = stepped.server.snapshot()
    weights, state = snapshot.weights.memory.copy(), {name: a.copy() for name, a in snapshot.optimiser.items()}
    stepped.run()
    np.testing.assert_array_equal(snapshot.weights.memory, weights)
    for name, array in snapshot.optimiser.items():
        np.testing.assert_array_equal(array, state[name])


def test_snapshot_file_names_weights_and_optimizer_state(tmp_path: Path) -> None:
    problem = Problem()
    stepped = begun(problem, 8)
    save_snapshot(stepped.server.snapshot(), tmp_path / "x")
    arrays = load_file(tmp_path / "x")
    for name, view in stepped.server.weights.views().items():
        np.testing.assert_array_equal(arrays[name], view)
    remembered = {f"evener.outer/{name}.float64" for name in ("mean", "square", "skipped")}
    assert remembered == set(arrays) - set(problem.start.views())


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    snapshot = begun(Problem(), 4).server.snapshot()
    save_snapshot(snapshot, path)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        save_snapshot(snapshot, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_full_disk_raises_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("evener.agreements.snapshot.save_file", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        save_snapshot(begun(Problem(), 0).server.snapshot(), tmp_path / "x")
    assert raised.value.errno == errno.ENOSPC


def test_invalid_snapshot_is_rejected_by_name(tmp_path: Path) -> None:
    snapshot = begun(Problem(), 4).server.snapshot()
    path = tmp_path / "x"
    with refused(MissingFile):
        load_snapshot(path)
    path.write_bytes(b"nonsense")
    with refused(InvalidFile):
        load_snapshot(path)
    save_file({"w": np.zeros(3)}, path)
    with refused(InvalidFile):
        load_snapshot(path)
    save_snapshot(snapshot, path)
    arrays, metadata = load_file(path), _metadata(path)
    save_file({name: a for name, a in arrays.items() if name != "out.bias"}, path, metadata)
    with refused(InvalidFile):
        load_snapshot(path)
    save_file({name: a for name, a in arrays.items() if not name.startswith("evener.outer/mean")}, path, metadata)
    with refused(InvalidFile):
        ParameterServer.resume(load_snapshot(path), first_number=0)
    save_file(arrays, path, {"evener.server": metadata["evener.server"].replace('"batch":24', '"batch":-24')})
    with refused(InvalidFile):
        load_snapshot(path)


def test_snapshot_holds_epoch_weights_not_yet_validated(tmp_path: Path) -> None:
    server, path = begun(Problem(), 7).server, tmp_path / "x"
    ends = {3: server.weights.copy(), 12: Flat(server.weights.layout)}
    save_snapshot(replace(server.snapshot(), ends=ends), path)
    found = load_snapshot(path)
    assert {epoch: bytes(weights.memory) for epoch, weights in found.ends.items()} == {
        epoch: bytes(weights.memory) for epoch, weights in ends.items()
    }
    np.testing.assert_array_equal(found.weights.memory, server.weights.memory)
    save_file({**load_file(path), "evener.end/3": np.zeros(7, np.uint8)}, path, _metadata(path))
    with refused(InvalidFile):
        load_snapshot(path)


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="numpy") as file:
        return dict(file.metadata())


@pytest.mark.parametrize("prefix", ["evener.outer/", "evener.end/"])
def test_reserved_array_name_is_rejected(prefix: str) -> None:
    layout = StateLayout(entries=(ArraySpec(name=f"{prefix}w", shape=(1,), dtype="float32", kind="parameter"),))
    server = ParameterServer(
        synchronous(batch=1, outer=Sgd(learning_rate=1.0)), Workload(num_samples=1, num_epochs=1), Flat(layout)
    )
    with pytest.raises(InvalidValue, match=f"names of the state must be without the prefix {prefix}"):
        server.snapshot()
