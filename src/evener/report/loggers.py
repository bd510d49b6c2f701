"""Loggers that send a run's scalars to TensorBoard, Weights & Biases and MLflow.

Each service is imported when a run starts to write to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from evener.records.errors import MissingExtra, is_of_the_disk
from evener.records.plan import Plan
from evener.records.version import pip_install


@final
class TensorBoard:
    """Event files for TensorBoard, written without PyTorch, which a command at a master need not import.

    Args:
        folder: where the event files go; created if it does not exist.

    Raises:
        MissingExtra: `begin` was called and TensorBoard is not installed.
        OSError: the disk is full or gone; every method may raise this.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = folder
        self._writer: Any = None
        self._protocol: Any = None

    def begin(self, plan: Plan) -> None:
        """Open an event file and write the plan into it."""
        if self._writer is None:
            _silence_writers_on_a_full_disk()
            module = _imported("tensorboard.summary.writer.event_file_writer", "TensorBoard", "report")
            self._protocol = import_module("tensorboard.compat.proto.event_pb2")
            self._writer = module.EventFileWriter(str(self._folder))
        text = ", ".join(f"{name}: {value}" for name, value in _plan_fields(plan).items())
        self._add(import_module("tensorboard.plugins.text.summary_v2").text_pb("plan", text), step=0)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Add each scalar to the event file."""
        self._add({"value": [{"tag": name, "simple_value": float(value)} for name, value in scalars.items()]}, step)

    def _add(self, summary: Any, step: int) -> None:
        self._writer.add_event(self._protocol.Event(summary=summary, step=step, wall_time=time.time()))

    def close(self) -> None:
        """Close the event file and end the writer's thread."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _silence_writers_on_a_full_disk() -> None:
    """Stop TensorBoard's writer thread from printing a traceback when the disk is full.

    The next call of `write` raises the error.
    """
    previous_hook = threading.excepthook
    if getattr(previous_hook, "__module__", "") == __name__:
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        is_writer = type(args.thread).__module__.startswith("tensorboard")
        if not (is_writer and args.exc_value is not None and is_of_the_disk(args.exc_value)):
            previous_hook(args)

    threading.excepthook = hook


@final
class Wandb:
    """A run of Weights & Biases.

    Args:
        init_options: arguments of `wandb.init`, such as project="digits" or mode="offline"; the plan is added to its
            `config`.

    Raises:
        MissingExtra: `begin` was called and wandb is not installed.
    """

    def __init__(self, **init_options: Any) -> None:
        self._init_options = init_options
        self._run: Any = None

    def begin(self, plan: Plan) -> None:
        """Start a run whose configuration holds the plan."""
        if self._run is None:
            module = _imported("wandb", "wandb", "wandb")
            self._run = module.init(
                **{**self._init_options, "config": {**_plan_fields(plan), **self._init_options.get("config", {})}}
            )
            # wandb's own step may not decrease, but validations come late
            self._run.define_metric("*", step_metric="step")

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Log the scalars under their step."""
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        """Finish the run, and wait until everything has been sent."""
        if self._run is not None:
            self._run.finish()
            self._run = None


@final
class MLflow:
    """A run of MLflow.

    Args:
        tracking_uri: address of the server, or a folder as file:///...; None uses MLflow's default.
        experiment: name of the experiment; created if it does not exist.
        run_name: name of the run; None lets MLflow choose one.

    Raises:
        MissingExtra: `begin` was called and MLflow is not installed.
    """

    def __init__(
        self, tracking_uri: str | None = None, experiment: str = "evener", run_name: str | None = None
    ) -> None:
        self._uri, self._experiment, self._name = tracking_uri, experiment, run_name
        self._client: Any = None
        self._metric: Any = None
        self._run_id = ""

    def begin(self, plan: Plan) -> None:
        """Create a run whose parameters hold the plan."""
        if self._run_id:
            return
        module = _imported("mlflow", "MLflow", "mlflow")
        self._client, self._metric = module.MlflowClient(self._uri), import_module("mlflow.entities").Metric
        experiment = self._client.get_experiment_by_name(self._experiment)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        self._run_id = self._client.create_run(experiment_id, run_name=self._name).info.run_id
        for name, value in _plan_fields(plan).items():
            self._client.log_param(self._run_id, name, value)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Log the scalars as one batch of metrics."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished."""
        if self._run_id:
            self._client.set_terminated(self._run_id)
            self._run_id = ""


def has_tensorboard() -> bool:
    """Return whether TensorBoard is installed."""
    return find_spec("tensorboard") is not None


def _imported(module: str, name: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(f"{name} is not installed: {pip_install(extra)}") from error


def _plan_fields(plan: Plan) -> dict[str, Any]:
    """Return the fields of `plan` by which users find a run again."""
    nodes = ", ".join(f"{a.node} {a.samples}" for a in plan.assignments)
    return {"strategy": plan.strategy, "batch_size": plan.batch_size, "nodes": nodes}
