"""A PyTorch task as the star plane's subject."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load as load_weights
from safetensors.torch import save_model
from torch import nn

from evener.data.loader import seed_all
from evener.errors import require
from evener.ps.torch_schedule import outer_of
from evener.ps.torch_state import layout_of_model, shared_state
from evener.run.load import load
from evener.run.order import Order
from evener.run.precision import Arithmetic
from evener.run.ps_subject import Subject
from evener.sync.flat import flat_of


def load_torch_subject(order: Order) -> Subject:
    """The task that was asked for. Raises EvenerError."""
    task, settings = load(order)
    require(settings.precision != "fp16", "--precision", settings.precision, "fp32, bf16 or fp64 with --agreement")
    num_samples = len(task.train_data())  # type: ignore[arg-type]
    num_validation = len(task.validation_data()) if task.validation_data else 0  # type: ignore[arg-type]
    seed_all(settings.seed)
    model = Arithmetic(settings.precision, torch.device("cpu")).prepare_model(task.model())
    state = {name: tensor.detach().numpy() for name, tensor in shared_state(model).items()}
    return Subject(
        name=task.name,
        settings=settings,
        num_samples=num_samples,
        num_validation=num_validation,
        has_accuracy=task.correct is not None,
        clips=task.clip_norm is not None,
        weights=flat_of(layout_of_model(model), state),
        outer=lambda num_steps: outer_of(task, model, num_steps),
        keep=lambda data, path: _keep(model, data, path),
    )


def _keep(model: nn.Module, data: bytes, path: Path) -> None:
    """Write the weights as the model itself would: with all names of those that it shares."""
    model.load_state_dict(load_weights(data), strict=False)
    save_model(model, str(path))
