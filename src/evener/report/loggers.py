"""Loggers for the services that people keep their curves in; each is imported when a run begins to write to it."""

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
from evener.version import pip_install


@final
class TensorBoard:
    """Event files for TensorBoard.

    Args:
        folder: made if it is not there.

    Raises:
        MissingExtra: from `begin`: TensorBoard is not installed.
        OSError: from every method: the disk is full or gone.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = folder
        self._writer: Any = None

    def begin(self, plan: Plan) -> None:
        """As a ScalarLogger."""
        if self._writer is None:
            _silence_writers_on_a_full_disk()
            module = _imported("torch.utils.tensorboard", "TensorBoard", "report")
            self._writer = module.SummaryWriter(log_dir=str(self._folder))
        self._writer.add_text("plan", ", ".join(f"{name}: {value}" for name, value in _words_of(plan).items()))

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """As a ScalarLogger."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, global_step=step)

    def close(self) -> None:
        """As a ScalarLogger; ends the writer's thread."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _silence_writers_on_a_full_disk() -> None:
    """Have a thread of TensorBoard's print no traceback of a full disk: whoever writes next is told."""
    before = threading.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        is_writer = type(args.thread).__module__.startswith("tensorboard")
        if not (is_writer and args.exc_value is not None and is_of_the_disk(args.exc_value)):
            before(args)

    threading.excepthook = hook


@final
class Wandb:
    """A run of Weights & Biases.

    Args:
        words: of `wandb.init`, such as project="digits" or mode="offline"; the plan becomes its `config`.

    Raises:
        MissingExtra: from `begin`: wandb is not installed.
    """

    def __init__(self, **words: Any) -> None:
        self._words = words
        self._run: Any = None

    def begin(self, plan: Plan) -> None:
        """As a ScalarLogger."""
        if self._run is None:
            module = _imported("wandb", "wandb", "wandb")
            self._run = module.init(**{**self._words, "config": {**_words_of(plan), **self._words.get("config", {})}})
            self._run.define_metric("*", step_metric="step")  # wandb's own must not fall: a validation may come late

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """As a ScalarLogger."""
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        """As a ScalarLogger; waits until everything was sent."""
        if self._run is not None:
            self._run.finish()
            self._run = None


@final
class MLflow:
    """A run of MLflow.

    Args:
        tracking_uri: of the server, or a folder as file:///...; MLflow's own default by default.
        experiment: made if it is not there.
        run_name: MLflow makes one up by default.

    Raises:
        MissingExtra: from `begin`: MLflow is not installed.
    """

    def __init__(
        self, tracking_uri: str | None = None, experiment: str = "evener", run_name: str | None = None
    ) -> None:
        self._uri, self._experiment, self._name = tracking_uri, experiment, run_name
        self._client: Any = None
        self._metric: Any = None
        self._run_id = ""

    def begin(self, plan: Plan) -> None:
        """As a ScalarLogger."""
        if self._run_id:
            return
        module = _imported("mlflow", "MLflow", "mlflow")
        self._client, self._metric = module.MlflowClient(self._uri), import_module("mlflow.entities").Metric
        known = self._client.get_experiment_by_name(self._experiment)
        number = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self._run_id = self._client.create_run(number, run_name=self._name).info.run_id
        for name, value in _words_of(plan).items():
            self._client.log_param(self._run_id, name, value)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """As a ScalarLogger."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """As a ScalarLogger."""
        if self._run_id:
            self._client.set_terminated(self._run_id)
            self._run_id = ""


def has_tensorboard() -> bool:
    """Whether TensorBoard, and what PyTorch has for it, are installed."""
    return all(find_spec(name) is not None for name in ("torch", "tensorboard"))


def _imported(module: str, name: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(f"{name} is not installed: {pip_install(extra)}") from error


def _words_of(plan: Plan) -> dict[str, Any]:
    """What a run is found by."""
    nodes = ", ".join(f"{a.node} {a.samples}" for a in plan.assignments)
    return {"strategy": plan.strategy, "batch_size": plan.batch_size, "nodes": nodes}
