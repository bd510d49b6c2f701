"""Weights and norms that come into models while these train, such as a head that is put into another's place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from evener.frontends.programs.work_division import Prepared
from evener.parallel.norm_forward import computation_of, norms_with_statistics
from evener.records.errors import InvalidInput


def take_in(models: Sequence[Prepared]) -> None:
    """Prepare what came into `models` since they were prepared.

    Raises:
        InvalidInput: it has a gradient already, which is of a part of a batch.
    """
    for one in models:
        norms, weights = _new_norms(one), new_weights(one.model.parameters(), models)
        _refuse_late(any(weight.grad is not None for weight in weights))
        if norms or weights:
            one.take_in(norms, weights)


def refuse_newcomers(models: Sequence[Prepared], optimizers: Sequence[Optimizer]) -> None:
    """Raise InvalidInput if, in the middle of a step, something is in models or optimisers that nobody has prepared."""
    trained = [weight for one in optimizers for group in one.param_groups for weight in group["params"]]
    held = [weight for one in models for weight in one.model.parameters()]
    _refuse_late(bool(new_weights([*held, *trained], models)) or any(_new_norms(one) for one in models))


def _refuse_late(is_late: bool) -> None:
    if is_late:
        raise InvalidInput(
            "new weights or norms came into a model between a batch and its update, so that they saw the samples of "
            "one node alone: change models, and add weights to optimisers, before a batch is loaded"
        )


def _new_norms(one: Prepared) -> dict[str, Any]:
    norms = norms_with_statistics(one.model)
    return {name: norm for name, norm in norms.items() if computation_of(norm) is None}


def new_weights(weights: Iterable[Any], models: Sequence[Prepared]) -> list[nn.Parameter]:
    """Those of whose gradients nobody makes means; tensors that are no parameters are the program's own."""
    own = {id(w): w for w in weights if isinstance(w, nn.Parameter) and (w.is_floating_point() or w.is_complex())}
    return [w for w in own.values() if not any(one.means.averages(w) for one in models)]
