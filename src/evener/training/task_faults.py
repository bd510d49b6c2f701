"""Refusals of features that a Task cannot have; the messages name the front end that supports them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from evener.parallel.gradient_hooks import copied
from evener.records.errors import EvenerError, InvalidInput, TaskCannot, first_line
from evener.records.task import Task
from evener.tracer.meta_model import META, on_meta, value_on_meta
from evener.tracer.nested import call, map_values
from evener.training.context import RankContext

_FRONT_ENDS = "make it a BatchTask, or a program that calls evener.join()"


def refuse_outputs(task: Task, model: nn.Module, samples: Callable[[int], tuple[Any, Any]]) -> None:
    """Refuse a validation that counts accuracy by the arg-max of outputs that have none.

    Args:
        task: the task.
        model: its model.
        samples: returns inputs and targets of so many samples.

    Raises:
        InvalidInput: the outputs are no tensor of at least two dimensions.
    """
    if task.correct != "argmax" or task.validation_data is None:
        return
    inputs, _ = samples(2)
    try:
        with META, torch.no_grad():
            outputs = call(on_meta(model).eval(), map_values(inputs, value_on_meta))
    except Exception:  # a model of the user's may do anything where there are no values
        return
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        shown = f"a tensor of {outputs.dim()} dims" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        raise InvalidInput(
            f"accuracy is counted by the arg-max of the outputs, and the model returns {shown}: set Task.correct to a "
            "function of (outputs, targets), or to None"
        )


def refuse_scheduler(scheduler: Any) -> None:
    """Raise TaskCannot for a schedule that is stepped with the loss of a validation."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TaskCannot(
            "Task.scheduler is stepped after every step, and ReduceLROnPlateau with the loss of a validation: make it "
            "a BatchTask, which does so"
        )


def task_fault_of(context: RankContext, error: Exception) -> Exception:
    """Return an error that explains the unsupported feature; `error` itself for other causes."""
    text = first_line(error)
    if isinstance(error, EvenerError):
        return error
    if "closure" in text:
        return InvalidInput(
            f"the optimiser computes the loss again in its step, by a closure ({text}), which a Task has none of: "
            f"{_FRONT_ENDS}"
        )
    if "stack expects each tensor to be equal size" in text:
        return InvalidInput(
            f"samples have different shapes ({text}): give the data set a collate_fn(samples) that returns "
            f"(inputs, targets) of one shape, or {_FRONT_ENDS}"
        )
    if not _works(context, 2) and _works(context, context.batch_size):
        return InvalidInput(
            f"the model computes batches of {context.batch_size} samples, and no smaller ones ({text}), which nodes "
            "and measurements need: make what it keeps, such as hidden states, as large as its inputs are"
        )
    return error


def _works(context: RankContext, samples: int) -> bool:
    """Return whether a copy of the model computes the loss of this many samples."""
    try:
        inputs, targets = context.samples(samples)
        with torch.no_grad(), context.arithmetic.autocast():
            context.task.loss(call(copied(context.model).cpu(), inputs), targets)
    except Exception:  # any error means no
        return False
    return True
