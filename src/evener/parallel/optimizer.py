"""The optimizer of a model of which ranks hold parts. Its steps equal those of a single process.

A probe finds the scope of an optimizer: what it reads to change an element. The scope decides what a rank needs:

    element    the element, its gradient and its state    every rank steps the parts that it has
    tensor     the whole tensor                           ranks with whole tensors, such as stages, step what they have
    model      other tensors, or random numbers           weights and gradients are gathered, and all ranks step alike

Parameter groups are those of the whole model: while the optimizer is made, every parameter looks whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.comm.exchange import Exchange, Route, shape_of
from evener.comm.group import Group
from evener.oracle.division.layout import Region, Shape
from evener.oracle.division.pieces import Piece
from evener.oracle.division.plan import Shard
from evener.parallel.full_state import OptimizerState
from evener.parallel.optimizer_probe import MakeOptimizer, Scope, keep_parts, looking_whole, scope_of, whole_of
from evener.parallel.redistribute import part_of
from evener.records.errors import EvenerError, InvalidInput, TrainingFailed, place_of, words_of


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of the model and this rank's part of it.

    Attributes:
        name: Name in the model.
        shape: Shape of the whole parameter.
        part: This rank's part; it has no elements if this rank has nothing.
        route: Route from the parts of all ranks to the whole on each; None if every rank has the whole.
        is_here: Whether this rank uses any of it.
    """

    name: str
    shape: Shape
    part: nn.Parameter
    route: Route | None = None
    is_here: bool = True


@dataclass(frozen=True)
class HeldModel:
    """All parameters of a model, in its order.

    Attributes:
        group: The ranks that hold the model together.
        parameters: All parameters of the whole model.
        suffices: The widest optimizer scope for which each rank's parts are enough.
        shards: How divided parameters are divided, by name.
        is_first: Whether `group` is the one that saves.
    """

    group: Group
    parameters: Sequence[HeldParameter]
    suffices: Scope = "model"
    shards: dict[str, Shard] | None = None
    is_first: bool = True


class ModelOptimizer:
    """Steps an optimizer on parts of a model as a single process would. All ranks make the same calls.

    Args:
        make: Makes the user's optimizer of some parameters.
        model: The parameters that ranks hold.

    Attributes:
        inner: The user's optimizer, for schedulers.
        is_gathered: Whether it steps whole tensors; its state is then whole on every rank.

    Raises:
        InvalidInput: The optimizer cannot be made, or needs a closure that computes losses.
    """

    inner: Optimizer

    def __init__(self, make: MakeOptimizer, model: HeldModel) -> None:
        self._model, self._whole = model, _WholeTensors(model)
        scopes = get_args(Scope)
        self.is_gathered = scopes.index(_agreed_scope(make, model)) > scopes.index(model.suffices)
        parameters = [held.part for held in model.parameters]
        shapes = [held.shape for held in model.parameters]
        with self._whole if self.is_gathered else looking_whole(parameters, shapes), _users("cannot be made"):
            self.inner = make(iter(parameters))
        _refuse_closures(self.inner)
        grouped = _names_by_group(self.inner, model)
        if not self.is_gathered:
            regions = [_own_region(held, model.group.rank) for held in model.parameters]
            keep_parts(self.inner, parameters, shapes, regions)
        here = {held.name: held.part for held in model.parameters if held.is_here}
        shards = model.shards or {}
        absent = {held.name: held.part for held in model.parameters if not held.is_here and held.name in shards}
        self._state = OptimizerState(model.group, here, shards, grouped, absent)

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Update the weights. With a `scaler`, skip the update if gradients are infinite."""
        with self._whole if self.is_gathered else nullcontext(), _users("failed in its step"):
            if scaler is None:
                self.inner.step()
            else:
                scaler.step(self.inner)

    def clear_gradients(self) -> None:
        """Free the gradients of the whole model."""
        for held in self._model.parameters:
            held.part.grad = None

    def gather(self) -> dict[str, Any]:
        """Return the state dict of a single process's optimizer on the first rank, and an empty one elsewhere."""
        if not self._model.is_first:
            return {}
        if self.is_gathered or self._model.suffices == "model":
            return self.inner.state_dict() if self._model.group.is_leader else {}
        return self._state.gather(self.inner)

    def own(self) -> tuple[dict[str, Any], dict[str, Piece]]:
        """Return this rank's part of that state dict, and which of its tensors are pieces; see `OptimizerState.own`."""
        if self.is_gathered or self._model.suffices == "model":
            return self.inner.state_dict(), {}
        return self._state.own(self.inner)

    def load(self, whole: dict[str, Any]) -> None:
        """Load this rank's part of the state dict of a single process's optimizer."""
        if self.is_gathered or self._model.suffices == "model":
            self.inner.load_state_dict(whole)
        else:
            self._state.load(self.inner, whole)


class _WholeTensors:
    """Makes divided weights and gradients whole inside the context; afterwards each rank has its part again."""

    def __init__(self, model: HeldModel) -> None:
        self._group = model.group
        divided = [held for held in model.parameters if held.route is not None]
        dtypes = dict.fromkeys(held.part.dtype for held in divided)
        self._divided = [[held for held in divided if held.part.dtype == dtype] for dtype in dtypes]
        self._exchanges: list[Exchange] = []
        self._parts: list[tuple[HeldParameter, Tensor]] = []

    def __enter__(self) -> None:
        self._exchanges = self._exchanges or [Exchange(self._group, _routes(some), "weights") for some in self._divided]
        for some, exchange in zip(self._divided, self._exchanges, strict=True):
            self._fill(some, exchange)

    def _fill(self, some: Sequence[HeldParameter], exchange: Exchange) -> None:
        rows = self._group.all_gather_bytes(bytes(held.part.grad is not None for held in some))
        parts = [held.part.detach() for held in some]
        grads = [torch.zeros_like(w) if h.part.grad is None else h.part.grad for h, w in zip(some, parts, strict=True)]
        shapes = [shape_of(route.owned[self._group.rank]) for route in _routes(some)]
        whole = exchange.all_gather([x.reshape(shape) for x, shape in zip((*parts, *grads), shapes, strict=True)])
        for i, (held, part) in enumerate(zip(some, parts, strict=True)):
            self._parts.append((held, part))
            held.part.grad = None
            held.part.data = whole[i].view(held.shape)
            if any(row[i] for row in rows):
                held.part.grad = whole[len(some) + i].view(held.shape)

    def __exit__(self, *_: object) -> None:
        for held, part in self._parts:
            assert held.route is not None
            whole = held.part.detach().view(shape_of(held.route.need[self._group.rank]))
            part.copy_(part_of(whole, held.route.owned[self._group.rank]).reshape(part.shape))
            held.part.grad = None
            held.part.data = part
        self._parts = []


def _routes(some: Sequence[HeldParameter]) -> list[Route]:
    """Return the routes of the weights, then those of their gradients."""
    routes = [held.route for held in some if held.route is not None]
    return [Route(route.owned, route.need, source=i) for i, route in enumerate((*routes, *routes))]


def _own_region(held: HeldParameter, rank: int) -> Region | None:
    """Return the region of the whole that `rank` has; None if it uses nothing of it."""
    if not held.is_here:
        return None
    return held.route.owned[rank] if held.part.shape != held.shape and held.route else whole_of(held.shape)


def _refuse_closures(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InvalidInput(
            f"the task's optimizer, {type(optimizer).__name__}, needs a closure that computes losses: use an optimizer "
            "whose step needs only gradients"
        )


def _names_by_group(optimizer: Optimizer, model: HeldModel) -> list[list[str]]:
    names = {id(held.part): held.name for held in model.parameters}
    grouped = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    if model.group.size > 1 and any("" in some for some in grouped):
        raise InvalidInput(
            "the task's optimizer changes a tensor that is not a parameter of the model and would differ between "
            "nodes: register the tensor as a parameter of the model"
        )
    return grouped


@contextmanager
def _users(what: str) -> Iterator[None]:
    """Report errors of the user's optimizer as a single sentence."""
    try:
        yield
    except EvenerError:
        raise
    except Exception as error:
        kind = InvalidInput if what == "cannot be made" else TrainingFailed
        raise kind(f"the task's optimizer {what}{place_of(error)}: {words_of(error)}") from error


def _agreed_scope(make: MakeOptimizer, model: HeldModel) -> Scope:
    """Return the widest scope that any rank found. Without divided parameters there is no probe."""
    if model.suffices == "model":
        return "model"
    scopes: tuple[Scope, ...] = get_args(Scope)
    scope = scopes.index(scope_of(make, [held.shape for held in model.parameters], model.group.device))
    return scopes[max(row[0] for row in model.group.all_gather_bytes(bytes([scope])))]
