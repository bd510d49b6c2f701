"""`evener train --agreement`: from the order to the weights, on the nodes of a master, or on private local ones.

load the task -> how to agree -> pack code and data -> submit -> watch -> record and weights
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from evener.errors import EvenerError, require
from evener.ps.blob import Blob, whole_folder
from evener.ps.engine import ModelBackend
from evener.ps.imports import files_needed
from evener.ps.job import Job
from evener.ps.master_client import MasterClient, find_master
from evener.ps.results import RunResult
from evener.ps.state_dir import StateDir
from evener.record import TrainRecord
from evener.report.tables import summary
from evener.run.console import print_line
from evener.run.folder import run_folder
from evener.run.ps_agreement import agreement_of
from evener.run.ps_backends import load_backend
from evener.run.ps_options import Way, Where, check_where
from evener.run.ps_view import StarView
from evener.schema import parse_noun
from evener.sync.protocol import Workload
from evener.tasks.load import is_path, thin_twin

if TYPE_CHECKING:
    from evener.run.order import Order
    from evener.run.settings import Settings


def train_on_star(order: Order, way: Way, where: Where, *, as_json: bool) -> None:
    """Train as `order` says, agreeing in the `way` that was chosen.

    Raises:
        EvenerError: what was asked for cannot be done; or the run ended before it was complete.
    """
    check_where(where, order)
    backend, settings = load_backend(order)
    blobs = _blobs(order, where)
    job = _job(order, way, backend, settings, blobs)
    output = run_folder(order.output)
    with StarView(output, to_stderr=as_json) as view:
        with master(where, order.patience) as (control, check):
            control.submit(job, backend.initial_weights(), list(blobs.values()))
            result = control.watch(job.run, view, check)
        record = _settle(result, backend, output, view)
    if result.exit_code:
        raise _error(result)
    assert record is not None
    if as_json:
        print_line(json.dumps(summary(record)))


def _job(
    order: Order, way: Way, backend: ModelBackend, settings: Settings, blobs: dict[str, Blob]
) -> Job:  # fmt: skip
    """What has to be done. Raises InvalidInput if it cannot be done in this way."""
    num_samples, batch = backend.num_samples, settings.batch_size
    require(num_samples > 0, "training samples", num_samples, "at least one")
    require(batch <= num_samples, "--batch-size", batch, f"at most the {num_samples} training samples")
    steps = settings.epochs * -(-num_samples // batch)
    digests = {what: blob.digest for what, blob in blobs.items()}
    return Job(
        run=f"{Path(order.task).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        task=Path(order.task).name if "code" in blobs else order.task,
        title=backend.name,
        data_dir=str(Path(order.data_dir).resolve()) if order.data_dir else "",
        options=order.options,
        precision=settings.precision,
        protocol=way.protocol or "",
        agreement=agreement_of(way, lambda: backend.server_optimizer(steps), clips=backend.clips_gradient, batch=batch),
        workload=Workload(num_samples=num_samples, num_epochs=settings.epochs, seed=settings.seed),
        layout=backend.layout,
        num_validation=backend.num_validation,
        has_accuracy=backend.has_accuracy,
        **digests,
    )


def _settle(result: RunResult, backend: ModelBackend, output: Path, view: StarView) -> TrainRecord | None:
    """Write record and weights into the run's folder, and show the record; None if the run never began."""
    if not result.record:
        return None
    backend.write_weights(result.weights, output / "model.safetensors")
    record = parse_noun(result.record, TrainRecord, source="the master's record")
    view.finish(record)
    return record


@contextmanager
def master(where: Where, patience: float) -> Iterator[tuple[MasterClient, Callable[[], None]]]:
    """The master that is to do it, and a check that somebody is left to do it."""
    if where.local_nodes is None:
        with MasterClient(*find_master(StateDir(where.home), where.master, where.token)) as control:
            yield control, _trust
        return
    from evener.launch.nodes import parse_local_nodes
    from evener.run.ps_local import local_cluster

    with (
        local_cluster(parse_local_nodes(where.local_nodes), patience) as cluster,
        MasterClient(cluster.address, cluster.token, patience) as control,
    ):
        cluster.wait_for_nodes(control)
        yield control, cluster.check_any


def _trust() -> None:
    """Nodes of a master may come back at any time."""


def _blobs(order: Order, where: Where) -> dict[str, Blob]:
    """What travels to the nodes: `code`, unless the task is built in, and `data`, if that was asked for."""
    found = {}
    if is_path(order.task):
        path = Path(order.task).resolve()
        twin = thin_twin(path)
        files = {*files_needed(path), *(files_needed(twin) if twin else ())}
        found["code"] = Blob(path.parent, sorted(files))
    if where.ship_data and order.data_dir:
        root = Path(order.data_dir).resolve()
        found["data"] = Blob(root, whole_folder(root))
    return found


def _error(result: RunResult) -> EvenerError:
    error = EvenerError(result.reason)
    error.exit_code = result.exit_code
    return error
