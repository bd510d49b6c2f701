"""Callbacks of Ultralytics, which every rank has and the leader runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import isclose, isnan
from typing import Any

import torch

from evener.records.schema import Part

_TRACKERS = "ultralytics.utils.callbacks."
"""Modules in which Ultralytics reports to TensorBoard, Weights & Biases and others."""
_ROUNDING = 1e-5
"""Relative difference of norms that different devices may come to by the same updates."""
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


class TrainerMark(Part, frozen=True, kw_only=True):
    """What callbacks of the leader may have changed in its trainer, where the others' trainers remain as they were.

    Attributes:
        stop: whether the training ends after this epoch.
        epochs: of the training.
        trained: for each weight whether it is trained.
        norms: of the weights.
    """

    stop: bool
    epochs: int
    trained: tuple[bool, ...]
    norms: tuple[float, ...]

    @classmethod
    def of(cls, trainer: Any) -> TrainerMark:
        """Return that of a trainer of Ultralytics, set up."""
        weights = list(trainer.model.parameters())
        norms = torch.stack(torch._foreach_norm(weights)).tolist()
        trained = tuple(one.requires_grad for one in weights)
        return cls(stop=bool(trainer.stop), epochs=trainer.epochs, trained=trained, norms=tuple(norms))

    def difference(self, leader: TrainerMark) -> str:
        """Return what the leader's callbacks have changed; empty for nothing but the stop."""
        if self.epochs != leader.epochs:
            return "the number of epochs"
        if self.trained != leader.trained:
            return "which weights are trained"
        pairs = zip(self.norms, leader.norms, strict=True)
        is_equal = all(isclose(*pair, rel_tol=_ROUNDING, abs_tol=_ROUNDING) or all(map(isnan, pair)) for pair in pairs)
        return "" if is_equal else "the weights, or how they are trained,"


def has_own(callbacks: Mapping[str, list[Callable[[Any], object]]]) -> bool:
    """Return whether the user has added any of these callbacks."""
    return any(
        not getattr(function, "__module__", "").startswith("ultralytics.")
        for functions in callbacks.values()
        for function in functions
    )


def open_trackers(trainer: Any, events: Sequence[str]) -> None:
    """Let the experiment trackers of Ultralytics begin on a rank that leads instead of a lost one.

    The user's own callbacks have run at these events on the lost rank.

    Args:
        trainer: of Ultralytics.
        events: those of `OPENING` that have passed.
    """
    for event in events:
        for function in list(trainer.callbacks.get(event, [])):
            if getattr(function, "__module__", "").startswith(_TRACKERS) and function.__module__ != f"{_TRACKERS}base":
                function(trainer)
