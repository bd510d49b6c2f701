"""Callbacks of Ultralytics, which every rank has and the leader runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from evener.records.errors import InvalidInput

_TRACKERS = "ultralytics.utils.callbacks."
"""Modules in which Ultralytics reports to TensorBoard, Weights & Biases and others."""
_OF_IMAGES = ("augment", "mosaic", "rect")
"""Attributes of a data set that decide how its images are augmented."""
OPENING = ("on_pretrain_routine_start", "on_pretrain_routine_end", "on_train_start")
"""Events at which they begin to report."""


class LeaderCallbacks(defaultdict[str, list[Callable[[Any], object]]]):
    """Callbacks by event; none of them for a rank that does not lead, until it does.

    Args:
        callbacks: functions of a trainer or a validator, by event.
        leads: whether this rank leads now.
    """

    def __init__(self, callbacks: Mapping[str, list[Callable[[Any], object]]], leads: Callable[[], bool]) -> None:
        super().__init__(list, callbacks)
        self._leads = leads

    def get(self, event: str, default: Any = None) -> Any:
        """Return the functions to run at an event."""
        return super().get(event, default) if self._leads() else []


@contextmanager
def unchanged(trainer: Any, event: str) -> Iterator[None]:
    """Run callbacks of the leader inside. Raises InvalidInput: they change what all ranks have alike, here alone."""
    before = shared_state(trainer)
    yield
    after = shared_state(trainer)
    if changed := next((name for name, value in before.items() if value != after[name]), None):
        raise InvalidInput(
            f"a callback changed {changed} at {event} on the node that leads, where callbacks run: do this in a "
            "trainer class of your own, whose methods every node runs"
        )


def shared_state(trainer: Any) -> dict[str, object]:
    """Return what a callback may not change in the leader's trainer alone, by what to call it.

    Tensors are known by the counts of their changes and by their norms, which cost less than a copy. Before a trainer
    is set up, there are only its settings.
    """
    model, average = getattr(trainer, "model", None), getattr(trainer, "ema", None)
    modules = [one for one in (model, getattr(average, "ema", None)) if isinstance(one, nn.Module)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    floating = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(floating)]).tolist() if floating else []
    groups = getattr(getattr(trainer, "optimizer", None), "param_groups", ())
    data = getattr(getattr(trainer, "train_loader", None), "dataset", None)
    return {
        "the number of epochs": trainer.epochs,
        "settings": repr(sorted(vars(trainer.args).items())),
        "weights or averages": [*((id(tensor), tensor._version) for tensor in tensors), *map(repr, norms)],
        "which weights are trained": [tensor.requires_grad for tensor in tensors],
        "the optimizer": [{name: value for name, value in group.items() if name != "params"} for group in groups],
        "early stopping": dict(vars(getattr(trainer, "stopper", None) or SimpleNamespace())),
        "images": [*(getattr(data, name, None) for name in _OF_IMAGES), id(getattr(data, "transforms", None))],
    }


def has_user_callbacks(callbacks: Mapping[str, list[Callable[[Any], object]]]) -> bool:
    """Return whether the user has added any of these callbacks."""
    return any(
        not (getattr(function, "__module__", "") or "").startswith("ultralytics.")
        for functions in callbacks.values()
        for function in functions
    )


def without_trackers(callbacks: Mapping[str, list[Callable[[Any], object]]]) -> dict[str, list[Any]]:
    """Return callbacks by event, without those that Ultralytics adds itself when it trains or validates."""
    rest = {event: [one for one in functions if not _is_added(one)] for event, functions in callbacks.items()}
    return {event: functions for event, functions in rest.items() if functions}


def _is_added(function: Any) -> bool:
    """Return whether Ultralytics adds a callback itself: a tracker's, or that of its own statistics."""
    module = getattr(function, "__module__", "") or ""
    return module.startswith(("ultralytics.utils.events", _TRACKERS)) and module != f"{_TRACKERS}base"


def open_trackers(trainer: Any, events: Sequence[str]) -> None:
    """Let the experiment trackers of Ultralytics begin on a rank that leads instead of a lost one.

    The user's own callbacks have run at these events on the lost rank. Trackers that can go on with a run whose files
    are in the folder of the training, such as Weights & Biases, do so.

    Args:
        trainer: of Ultralytics.
        events: those of `OPENING` that have passed, and the start of the epoch in progress.
    """
    resume, trainer.args.resume = trainer.args.resume, True
    try:
        for event in events:
            for function in list(trainer.callbacks.get(event, [])):
                module = getattr(function, "__module__", "") or ""
                if module.startswith(_TRACKERS) and module != f"{_TRACKERS}base":
                    function(trainer)
    finally:
        trainer.args.resume = resume
