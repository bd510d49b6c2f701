"""A thin task as the star plane's subject: no PyTorch on the machine that submits it, nor on any other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from evener.atomic import atomic_write
from evener.ps.thin_engine import layout_of_thin_model, thin_model
from evener.ps.thin_schedule import outer_of_thin
from evener.run.ps_subject import Subject
from evener.sync.flat import flat_of
from evener.tasks.load import load_thin_task

if TYPE_CHECKING:
    from evener.run.order import Order


def load_thin_subject(order: Order) -> Subject:
    """The thin task that was asked for. Raises InvalidInput."""
    task = load_thin_task(order.task, Path(order.data_dir) if order.data_dir else None, order.options)
    settings = order.settings(task)
    model = thin_model(task, settings.seed, settings.precision)
    layout = layout_of_thin_model(model)
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    validation = task.validation_data() if task.validation_data else ((),)
    return Subject(
        name=task.name,
        settings=settings,
        num_samples=len(task.train_data()[0]),
        num_validation=len(validation[0]),
        has_accuracy=task.has_accuracy,
        clips=False,
        weights=flat_of(layout, {name: tensor.detach().numpy() for name, tensor in named.items()}),
        outer=lambda num_steps: outer_of_thin(task, model, num_steps),
        keep=lambda data, path: atomic_write(path, data),
    )
