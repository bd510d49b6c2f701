"""The optimiser of a model of which ranks hold parts; its steps are those of one process.

What an optimiser looks at to change an element decides what a rank needs, and a probe finds out:

    element    the element, its gradient and its state    every rank steps the parts that it has
    tensor     the whole tensor                           likewise, where tensors are whole: the stages of a pipeline
    model      other tensors, or random numbers           weights and gradients are gathered, all ranks step alike

Parameter groups are those of the whole model: while an optimiser is made, every parameter looks whole.
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
from evener.system.memory import is_out_of_memory


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of the model, and what ranks have of it.

    Attributes:
        name: in the model.
        shape: of the whole.
        own: this rank's part; of no elements if it has none.
        route: from the parts of all ranks to the whole on each; None where every rank has the whole.
        is_here: whether this rank uses any of it.
    """

    name: str
    shape: Shape
    own: nn.Parameter
    route: Route | None = None
    is_here: bool = True


@dataclass(frozen=True)
class HeldModel:
    """All parameters of a model, in its order.

    Attributes:
        group: the ranks that hold it together.
        parameters: of the whole model.
        suffices: the widest scope of an optimiser that needs no more than what each rank has.
        shards: by name, how parameters are divided that are.
        is_first: whether `group` is the one that saves.
    """

    group: Group
    parameters: Sequence[HeldParameter]
    suffices: Scope = "model"
    shards: dict[str, Shard] | None = None
    is_first: bool = True


class ModelOptimizer:
    """Makes the steps of one process on parts of a model; all ranks make the same calls.

    Args:
        make: the user's optimiser of some parameters.
        model: what ranks hold of it.

    Attributes:
        inner: the user's, for schedules.
        is_gathered: whether it is given whole tensors; its state then is whole on every rank.

    Raises:
        InvalidInput: it cannot be made, or wants to compute losses itself.
    """

    inner: Optimizer

    def __init__(self, make: MakeOptimizer, model: HeldModel) -> None:
        self._model, self._whole = model, _WholeTensors(model)
        self.is_gathered = not _includes(model.suffices, _agreed_scope(make, model))
        parameters = [held.own for held in model.parameters]
        shapes = [held.shape for held in model.parameters]
        with self._whole if self.is_gathered else looking_whole(parameters, shapes), _users("cannot be made"):
            self.inner = make(iter(parameters))
        _refuse_closures(self.inner)
        grouped = _names_by_group(self.inner, model)
        if not self.is_gathered:
            regions = [_own_region(held, model.group.rank) for held in model.parameters]
            keep_parts(self.inner, parameters, shapes, regions)
        here = {held.name: held.own for held in model.parameters if held.is_here}
        shards = model.shards or {}
        absent = {held.name: held.own for held in model.parameters if not held.is_here and held.name in shards}
        self._state = OptimizerState(model.group, here, shards, grouped, absent)

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Change the weights by their gradients; with a `scaler`, unless it finds those infinite."""
        with self._whole if self.is_gathered else nullcontext(), _users("failed in its step"):
            if scaler is None:
                self.inner.step()
            else:
                scaler.step(self.inner)

    def clear_gradients(self) -> None:
        """Free the gradients of the whole model."""
        for held in self._model.parameters:
            held.own.grad = None

    def gather(self) -> dict[str, Any]:
        """The state dict of one process's optimiser on the first rank of all, else an empty one."""
        if not self._model.is_first:
            return {}
        if self.is_gathered or self._model.suffices == "model":
            return self.inner.state_dict() if self._model.group.is_leader else {}
        return self._state.gather(self.inner)

    def own(self) -> tuple[dict[str, Any], dict[str, Piece]]:
        """What this rank has of such a state dict, and which of its tensors are parts; as `OptimizerState.own`."""
        if self.is_gathered or self._model.suffices == "model":
            return self.inner.state_dict(), {}
        return self._state.own(self.inner)

    def load(self, whole: dict[str, Any]) -> None:
        """Take what this rank needs of the state dict of one process's optimiser."""
        if self.is_gathered or self._model.suffices == "model":
            self.inner.load_state_dict(whole)
        else:
            self._state.load(self.inner, whole)


class _WholeTensors:
    """Inside, weights and gradients of which ranks have parts are whole; afterwards each has its part again."""

    def __init__(self, model: HeldModel) -> None:
        self._group = model.group
        divided = [held for held in model.parameters if held.route is not None]
        dtypes = dict.fromkeys(held.own.dtype for held in divided)
        self._divided = [[held for held in divided if held.own.dtype == dtype] for dtype in dtypes]
        self._exchanges: list[Exchange] = []
        self._parts: list[tuple[HeldParameter, Tensor]] = []

    def __enter__(self) -> None:
        self._exchanges = self._exchanges or [Exchange(self._group, _routes(some), "weights") for some in self._divided]
        for some, exchange in zip(self._divided, self._exchanges, strict=True):
            self._fill(some, exchange)

    def _fill(self, some: Sequence[HeldParameter], exchange: Exchange) -> None:
        rows = self._group.all_gather_bytes(bytes(held.own.grad is not None for held in some))
        parts = [held.own.detach() for held in some]
        grads = [torch.zeros_like(w) if h.own.grad is None else h.own.grad for h, w in zip(some, parts, strict=True)]
        own = [shape_of(route.own[self._group.rank]) for route in _routes(some)]
        found = exchange.all_gather([x.reshape(shape) for x, shape in zip((*parts, *grads), own, strict=True)])
        for i, (held, part) in enumerate(zip(some, parts, strict=True)):
            self._parts.append((held, part))
            held.own.grad = None
            held.own.data = found[i].view(held.shape)
            if any(row[i] for row in rows):
                held.own.grad = found[len(some) + i].view(held.shape)

    def __exit__(self, *_: object) -> None:
        for held, part in self._parts:
            assert held.route is not None
            whole = held.own.detach().view(shape_of(held.route.need[self._group.rank]))
            part.copy_(part_of(whole, held.route.own[self._group.rank]).reshape(part.shape))
            held.own.grad = None
            held.own.data = part
        self._parts = []


def _routes(some: Sequence[HeldParameter]) -> list[Route]:
    """Of the weights, then of their gradients."""
    routes = [held.route for held in some if held.route is not None]
    return [Route(route.own, route.need, source=i) for i, route in enumerate((*routes, *routes))]


def _own_region(held: HeldParameter, rank: int) -> Region | None:
    """What `rank` has of the whole; None: nothing that it uses."""
    if not held.is_here:
        return None
    return held.route.own[rank] if held.own.shape != held.shape and held.route else whole_of(held.shape)


def _refuse_closures(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InvalidInput(
            f"the task's optimizer, {type(optimizer).__name__}, computes losses in its step (it needs a closure): "
            "take one that is given the gradients of one loss"
        )


def _names_by_group(optimizer: Optimizer, model: HeldModel) -> list[list[str]]:
    names = {id(held.own): held.name for held in model.parameters}
    grouped = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    if model.group.size > 1 and any("" in some for some in grouped):
        raise InvalidInput(
            "the task's optimizer changes a tensor that is no parameter of the model, and would differ from node to "
            "node: let the model have it"
        )
    return grouped


@contextmanager
def _users(what: str) -> Iterator[None]:
    """Inside, the user's optimiser runs; what it raises is one sentence."""
    try:
        yield
    except EvenerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        kind = InvalidInput if what == "cannot be made" else TrainingFailed
        raise kind(f"the task's optimizer {what}{place_of(error)}: {words_of(error)}") from error


def _includes(suffices: Scope, scope: Scope) -> bool:
    scopes = get_args(Scope)
    return bool(scopes.index(scope) <= scopes.index(suffices))


def _agreed_scope(make: MakeOptimizer, model: HeldModel) -> Scope:
    """The widest scope that a rank found; without a probe where nothing is divided."""
    if model.suffices == "model":
        return "model"
    scopes: tuple[Scope, ...] = get_args(Scope)
    own = scopes.index(scope_of(make, [held.shape for held in model.parameters], model.group.device))
    return scopes[max(row[0] for row in model.group.all_gather_bytes(bytes([own])))]
