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
from typing import NamedTuple

import torch
from safetensors.torch import load as load_weights
from safetensors.torch import save_model
from torch import nn

from evener.cluster import parse_local_nodes
from evener.data import seed_all
from evener.errors import EvenerError, InvalidInput, require
from evener.journey.console import print_line
from evener.journey.order import Order, load
from evener.journey.star_agreement import agreement_of
from evener.journey.star_local import local_cluster
from evener.journey.star_options import Way, Where, check_where
from evener.journey.star_view import StarView
from evener.noun import parse_noun
from evener.record import TrainRecord
from evener.report import summary
from evener.star.control import Control, find_master
from evener.star.home import Home
from evener.star.imports import files_needed
from evener.star.job import Job
from evener.star.parcel import Parcel, whole_folder
from evener.star.settlement import Result
from evener.star.torch_state import layout_of_model, shared_state
from evener.sync.flat import Flat, flat_of
from evener.sync.workload import Workload
from evener.task import Task
from evener.tasks.load import is_path, thin_twin
from evener.train import Settings
from evener.train.precision import Arithmetic


class Work(NamedTuple):
    """What is submitted.

    Attributes:
        job: to be done.
        model: that will get the weights.
        weights: to begin with.
        parcels: code and data.
    """

    job: Job
    model: nn.Module
    weights: Flat
    parcels: list[Parcel]


def train_on_star(order: Order, way: Way, where: Where, *, as_json: bool) -> None:
    """Train as `order` says, agreeing in the `way` that was chosen.

    Raises:
        EvenerError: what was asked for cannot be done; or the run ended before it was complete.
    """
    check_where(where, order)
    work = prepare(order, way, where)
    output = _folder(order.output)
    with StarView(output, to_stderr=as_json) as view:
        with master(where, order.patience) as (control, check):
            control.submit(work.job, work.weights, work.parcels)
            result = control.watch(work.job.run, view, check)
        record = settle(result, work.model, output, view)
    if result.exit_code:
        raise _error(result)
    assert record is not None
    if as_json:
        own = {"agreement": record.agreement, "bytes_saved": record.bytes_saved}
        print_line(json.dumps({**summary(record), **own}))


def prepare(order: Order, way: Way, where: Where) -> Work:
    """Load the task and say what has to be done.

    Raises:
        EvenerError: the task is wrong, or cannot be trained in this way.
    """
    task, settings = load(order)
    require(settings.precision != "fp16", "--precision", settings.precision, "fp32, bf16 or fp64 with --agreement")
    train = task.train_data()
    num_samples, num_validation = len(train), _size(task)  # type: ignore[arg-type]
    require(num_samples > 0, "training samples", num_samples, "at least one")
    batch = settings.batch_size
    require(batch <= num_samples, "--batch-size", batch, f"at most the {num_samples} training samples")
    seed_all(settings.seed)
    model = Arithmetic(settings.precision, torch.device("cpu")).prepare_model(task.model())
    code = _code(order.task)
    data = _data(order.data_dir) if where.ship_data and order.data_dir else None
    steps = settings.epochs * -(-num_samples // batch)
    job = Job(
        run=f"{Path(order.task).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        task=Path(order.task).name if code else order.task,
        title=task.name,
        code=code.digest if code else "",
        data=data.digest if data else "",
        data_dir=str(Path(order.data_dir).resolve()) if order.data_dir else "",
        options=order.options,
        precision=settings.precision,
        protocol=way.protocol or "",
        agreement=agreement_of(way, task, model, batch=batch, num_steps=steps),
        workload=_workload(settings, num_samples),
        layout=layout_of_model(model),
        num_validation=num_validation,
        has_accuracy=task.correct is not None,
    )
    return Work(job, model, weights_of_model(job, model), [parcel for parcel in (code, data) if parcel])


def weights_of_model(job: Job, model: nn.Module) -> Flat:
    """The state of `model` as it travels."""
    return flat_of(job.layout, {name: tensor.detach().numpy() for name, tensor in shared_state(model).items()})


def settle(result: Result, model: nn.Module, output: Path, view: StarView) -> TrainRecord | None:
    """Write record and weights into the run's folder, and show the record; None if the run never began."""
    if not result.record:
        return None
    model.load_state_dict(load_weights(result.weights), strict=False)
    save_model(model, str(output / "model.safetensors"))
    record = parse_noun(result.record, TrainRecord, source="the master's record")
    view.finish(record)
    return record


@contextmanager
def master(where: Where, patience: float) -> Iterator[tuple[Control, Callable[[], None]]]:
    """The master that is to do it, and a check that somebody is left to do it."""
    if where.local_nodes is None:
        with Control(*find_master(Home(where.home), where.master, where.token)) as control:
            yield control, _trust
        return
    with (
        local_cluster(parse_local_nodes(where.local_nodes), patience) as cluster,
        Control(cluster.address, cluster.token, patience) as control,
    ):
        cluster.wait_for_nodes(lambda: len(control.ask().nodes))
        yield control, cluster.check


def _trust() -> None:
    """Nodes of a master may come back at any time."""


def _workload(settings: Settings, num_samples: int) -> Workload:
    return Workload(num_samples=num_samples, num_epochs=settings.epochs, seed=settings.seed)


def _size(task: Task) -> int:
    return len(task.validation_data()) if task.validation_data else 0  # type: ignore[arg-type]


def _code(reference: str) -> Parcel | None:
    """The task's file and what it imports from beside it; None for a built-in task."""
    if not is_path(reference):
        return None
    path = Path(reference).resolve()
    files = files_needed(path)
    if (twin := thin_twin(path)) is not None:
        files = sorted({*files, *files_needed(twin)})
    return Parcel(path.parent, files)


def _data(folder: str) -> Parcel:
    root = Path(folder).resolve()
    return Parcel(root, whole_folder(root))


def _folder(name: str) -> Path:
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot write into {folder}: {error.strerror}") from error
    return folder


def _error(result: Result) -> EvenerError:
    error = EvenerError(result.reason)
    error.exit_code = result.exit_code
    return error
