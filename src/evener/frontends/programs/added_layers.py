"""Weights and norms that a program adds to models after `run.prepare`, such as a new head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from evener.frontends.programs.work_division import Prepared
from evener.parallel.norm_forward import computation_of, norms_with_statistics
from evener.records.errors import InvalidInput


def prepare_added(models: Sequence[Prepared]) -> None:
    """Prepare the weights and norms that were added to `models`; call it before a training batch.

    Raises:
        InvalidInput: an added weight has a gradient already, computed from this node's samples alone.
    """
    for one in models:
        norms, weights = _new_norms(one), added_weights(one.model.parameters(), models)
        _refuse_late(any(weight.grad is not None for weight in weights))
        if norms or weights:
            one.prepare_added(norms, weights)


def refuse_added(models: Sequence[Prepared], optimizers: Sequence[Optimizer]) -> None:
    """Raise InvalidInput if a weight or norm was added to a model or an optimizer since the last batch."""
    trained = [weight for one in optimizers for group in one.param_groups for weight in group["params"]]
    held = [weight for one in models for weight in one.model.parameters()]
    _refuse_late(bool(added_weights([*held, *trained], models)) or any(_new_norms(one) for one in models))


def _refuse_late(is_late: bool) -> None:
    if is_late:
        raise InvalidInput(
            "new weights or norms were added to a model between a batch and its update, so they saw only one node's "
            "samples: change models, and add weights to optimizers, before a batch is loaded"
        )


def _new_norms(one: Prepared) -> dict[str, Any]:
    norms = norms_with_statistics(one.model)
    return {name: norm for name, norm in norms.items() if computation_of(norm) is None}


def added_weights(weights: Iterable[Any], models: Sequence[Prepared]) -> list[nn.Parameter]:
    """Return the parameters in `weights` whose gradients no model averages yet, and make parameters of tensors."""
    parameters = {id(w): as_parameter(w) for w in weights if w.is_floating_point() or w.is_complex()}
    return [w for w in parameters.values() if not any(one.means.averages(w) for one in models)]


def as_parameter(weight: Any) -> nn.Parameter:
    """Return the same tensor, which PyTorch takes for a parameter, as `torch.zeros(2, requires_grad=True)` is none."""
    if not isinstance(weight, nn.Parameter):
        weight._is_param = True
    parameter: nn.Parameter = weight
    return parameter
