"""The state of a training of Ultralytics between two batches, as one rank gives it to another: without pickle.

    length of the head (8 bytes) | head: numbers and text | tensors

It holds what decides the batches that come, and the history: any rank that goes on may have to write the record.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor

from evener.records.history import History
from evener.records.schema import Amount, Part, Whole
from evener.training.checkpoint import apart

_LENGTH = struct.Struct("<Q")
_MODEL, _AVERAGE, _OPTIMIZER, _SUMMED = "model.", "average.", "optimizer.", "summed."
Number = float | int | bool | None


class TrainerState(Part, frozen=True, kw_only=True):
    """The state of a training apart from its tensors.

    Attributes:
        batch: the last one, from 1, that the weights and the gradients that wait for a step contain.
        epoch: in which the loop is, from 0; `first_epoch` is the one with which the run began.
        stepped: batch, from 0, after which the optimiser stepped last; -1: none.
        updates: of the averaged weights.
        rounds: how often the loss was told that an epoch is over.
        best_fitness: of all validations so far.
        stopper: what decides an early stop, by name.
        recoveries: from losses that were no numbers, in a row.
        metrics: of the last validation; `fitness` is theirs.
        losses: the parts of the last batch's loss; `mean_losses` those of the epoch so far.
        numbers: of the optimiser's state, what is no tensor, by `<weight>.<name>`.
        history: of the run.
    """

    batch: Amount
    epoch: Amount
    first_epoch: Amount
    stepped: Whole
    updates: Amount
    rounds: Amount
    best_fitness: float | None
    stopper: dict[str, Number]
    recoveries: Amount
    metrics: dict[str, float]
    fitness: float | None
    losses: dict[str, float]
    mean_losses: dict[str, float] | None
    numbers: dict[str, Number]
    history: History


def encode_state(trainer: Any, batch: int, first_epoch: int, history: History) -> bytes:
    """The state of `trainer`, whose weights contain `batch`."""
    model, average, gradients = trainer.model.module, trainer.ema, trainer.model.gradients
    optimizer, numbers = _optimizer_state(trainer.optimizer)
    head = TrainerState(
        batch=batch,
        epoch=trainer.epoch,
        first_epoch=first_epoch,
        stepped=gradients.last,
        updates=average.updates,
        rounds=getattr(model.criterion, "updates", 0),
        best_fitness=trainer.best_fitness,
        stopper=vars(trainer.stopper),
        recoveries=trainer.nan_recovery_attempts,
        metrics=trainer.metrics or {},
        fitness=trainer.fitness,
        losses=_floats(trainer.model.told[1]) or {},
        mean_losses=_floats(trainer.tloss),
        numbers=numbers,
        history=history,
    )
    tensors = {
        **_named(_MODEL, model.state_dict()),
        **_named(_AVERAGE, average.ema.state_dict()),
        **_named(_OPTIMIZER, optimizer),
        **_named(_SUMMED, {str(i): grad for i, grad in enumerate(gradients.summed) if grad is not None}),
    }
    encoded = msgspec.msgpack.encode(head, enc_hook=float)
    return b"".join((_LENGTH.pack(len(encoded)), encoded, save(apart(tensors))))


@torch.no_grad()
def restore_state(trainer: Any, data: bytes | bytearray) -> TrainerState:
    """Bring `trainer` to the state that `encode_state` made `data` of; return the rest of the state."""
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    head = msgspec.msgpack.decode(data[_LENGTH.size : _LENGTH.size + length], type=TrainerState)
    tensors = load(bytes(data[_LENGTH.size + length :]))
    model, average, gradients = trainer.model.module, trainer.ema, trainer.model.gradients
    model.load_state_dict(_of(_MODEL, tensors))
    average.ema.load_state_dict(_of(_AVERAGE, tensors))
    average.updates = head.updates
    _restore_optimizer(trainer.optimizer, _of(_OPTIMIZER, tensors), head.numbers)
    summed = _of(_SUMMED, tensors)
    count = sum(parameter.requires_grad for parameter in model.parameters())
    gradients.summed = [summed.get(str(i)) for i in range(count)] if summed else []
    gradients.last = head.stepped
    trainer.best_fitness, trainer.fitness, trainer.metrics = head.best_fitness, head.fitness, dict(head.metrics)
    trainer.nan_recovery_attempts = head.recoveries
    vars(trainer.stopper).update(head.stopper)
    if hasattr(model.criterion, "update") and head.rounds:
        model.criterion.updates = head.rounds - 1
        model.criterion.update()
    return head


def _floats(losses: Mapping[str, Tensor] | None) -> dict[str, float] | None:
    return None if losses is None else {name: float(value) for name, value in losses.items()}


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _of(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Number]]:
    """Its tensors and its numbers, by `<weight>.<name>`."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Number] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                numbers[f"{index}.{name}"] = value
    return tensors, numbers


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, Number]
) -> None:
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**numbers, **tensors}.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
