"""A model of a user's program whose layers the ranks divide, while the program sees a whole model.

Batches, weights, gradients, buffers and outputs are whole and equal on every rank. Ranks divide the work and the
activations of training passes. Every rank computes everything else itself, such as an evaluation. Therefore losses,
optimizers, clipping, moving averages and checkpoints of the program work as in one process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.comm.exchange import Exchange, Route, shape_of
from evener.comm.group import Group
from evener.data.alike import rows_of_ranks
from evener.data.fingerprint import print_of
from evener.frontends.programs.batch_parts import BatchPart
from evener.frontends.programs.layer_gradients import LayerGradients
from evener.frontends.programs.prepared import agreed_model
from evener.oracle.division.layout import ALIKE, WHOLE, Layout, Move, Shape
from evener.oracle.division.plan import Arrangement
from evener.parallel.gradient_hooks import GradientHooks, without_hooks
from evener.parallel.op_registry import make_plain, synchronised_norms
from evener.parallel.process_mesh import ProcessMesh
from evener.parallel.redistribute import mover, part_of, regions
from evener.parallel.sharded import ShardedModule
from evener.records.errors import InvalidInput
from evener.system import accelerators
from evener.tracer.nested import tensors_in
from evener.training.differences import as_real

_MAX_PASSES = 8
"""Number of cached passes with different modes and settings."""
_ALIKE = 1e-4
"""Largest difference of alike inputs, relative to their size: machines round differently what they compute before."""
SAME_BATCHES = "nodes that divide layers need the same batches: seed them alike"
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class PreparedLayers:
    """A model that all ranks hold, and whose training passes they compute together.

    Args:
        model: the user's; its `forward` is replaced in place.
        group: the ranks.
        arrangement: division of layers among the ranks.
        tell: called with a sentence if no layer of the model can be divided.
        is_compared: whether ranks have compared the current batch.

    Attributes:
        model: for the program: the same object.
        means: of its gradients.

    Raises:
        InvalidInput: the model is wrapped, lazy, or different on another rank.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        arrangement: Arrangement,
        tell: Callable[[str], None],
        is_compared: Callable[[], bool],
    ) -> None:
        self.model = agreed_model(model, group)
        self._synchronised = synchronised_norms(self.model)
        for norm in self._synchronised:  # they stay what the program made; the passes hold plain copies
            vars(norm)["forward"] = MethodType(_BatchNorm.forward, norm)
        self._group, self._arrangement, self._tell, self._is_compared = group, arrangement, tell, is_compared
        self._whole: Callable[..., Any] = self.model.forward
        self._passes: dict[tuple[Any, ...], DividedPass] = {}
        self._begun: list[DividedPass] = []
        hooks = GradientHooks.taken_off(self.model)
        self.means = LayerGradients(self.model, self._collect, lambda: hooks.run(self.model.named_parameters()))
        vars(self.model)["forward"] = _Forward(self)

    norm_passes = 0
    """Always 0, because batches are whole."""

    def prepare_added(self, norms: Mapping[str, Any], weights: Sequence[nn.Parameter]) -> None:
        """Do nothing, because every pass divides the layers that the model then has."""

    def compute(self, part: BatchPart) -> None:
        """Do nothing, because every rank has all samples."""

    def refuse_lone_sample(self, lone: str) -> None:
        """Do nothing, because norms are computed by the divided pass, not here."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the whole batch.

        Raises:
            InvalidInput: ranks have different inputs; or, in the backward pass, different losses.
        """
        if self._group.size == 1 or not (torch.is_grad_enabled() and self.model.training):
            return self._whole(*args, **kwargs)
        inputs, is_compared = self._in_order(args, kwargs), self._is_compared()
        if not is_compared:
            self._require_same(inputs)
        divided = self._pass_of(inputs)
        outputs = divided(inputs)
        made: list[Any] = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        for tensor in made:
            if not is_compared:  # labels may differ, too
                tensor.register_hook(lambda gradient: self._require_same([gradient]))
            tensor.register_hook(lambda _: self._begin(divided))
        return outputs

    def _require_same(self, inputs: Sequence[Tensor]) -> None:
        """Raise InvalidInput unless all ranks have the same tensors, except for rounding."""
        inputs = accelerators.on_host(inputs)
        numbers = [as_real(x).nan_to_num(0.0, 0.0, 0.0) for x in inputs if _has_fractions(x)]
        size = sum(float(x.abs().sum(dtype=torch.float64)) for x in numbers)
        prints, sizes = rows_of_ranks(self._group, [print_of(inputs), size]).T
        if abs(prints - prints[0]).max() > _ALIKE * (sizes.max() or 1.0):
            raise InvalidInput(SAME_BATCHES)

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
        """Return the inputs of a call as tensors in the order of its arguments. Raises InvalidInput for others."""
        rule = "layers are divided of models that take tensors in order"
        bound = inspect.signature(self._whole).bind(*args, **kwargs)
        for name, value in bound.kwargs.items():
            if value is not None:
                raise InvalidInput(f"{rule}, not {name}= by name")
        for value in bound.args:
            if not isinstance(value, Tensor):
                raise InvalidInput(f"{rule}, not a {type(value).__name__} among them")
        return bound.args

    def _pass_of(self, inputs: Sequence[Tensor]) -> DividedPass:
        weights = [(p.requires_grad, p.dtype) for p in self.model.parameters()]
        modes = (*(_settings(module) for module in self.model.modules()), *weights)
        if modes in self._passes:
            self._passes[modes] = self._passes.pop(modes)  # now the most recently used
        else:
            for oldest in list(self._passes)[: len(self._passes) + 1 - _MAX_PASSES]:
                del self._passes[oldest]
            with self._as_it_was():
                self._passes[modes] = DividedPass(self.model, self._group, self._arrangement, inputs)
            if not self._passes[modes].divides:
                self._tell(f"no layer of {type(self.model).__name__} can be divided so: every node computes all of it")
        return self._passes[modes]

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Restore `forward`, so that the model can be traced and copied inside."""
        ours = vars(self.model).pop("forward")
        for norm in self._synchronised:
            vars(norm).pop("forward", None)
            make_plain(norm)
        try:
            with without_hooks(self.model):
                yield
        finally:
            for norm in self._synchronised:
                norm.__class__ = nn.SyncBatchNorm
                vars(norm)["forward"] = MethodType(_BatchNorm.forward, norm)
            vars(self.model)["forward"] = ours

    def _begin(self, divided: DividedPass) -> None:
        """Handle a `backward()` that has reached the outputs of a pass."""
        divided.sums.begin()
        if divided not in self._begun:
            self._begun.append(divided)
        self.means.begin()

    def _collect(self) -> bool:
        begun, self._begun = self._begun, []
        gradients = [divided.give_gradients() for divided in begun]  # of all of them, not only up to the first
        return any(gradients)


def _has_fractions(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Return the settings of `module` that the program may change between passes, such as a mode or probability."""
    settings = []
    for name, value in vars(module).items():
        values = value if isinstance(value, tuple | list) else (value,)
        if not name.startswith("_") and all(isinstance(one, _PLAIN) for one in values):
            settings.append((name, *values))
    return tuple(settings)


class _Forward:
    """A replacement of a model's `forward`; a copy of the model, such as a moving average, gets the original one."""

    def __init__(self, prepared: PreparedLayers) -> None:
        self._prepared = prepared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._prepared.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo.get(id(self._prepared.model))
        return self if twin is None else MethodType(type(twin).forward, twin)


class DividedPass:
    """Training passes through `model`, in the current modes of its modules.

    Args:
        model: whole, alike on every rank.
        group: the ranks.
        arrangement: division of layers among the ranks.
        inputs: example inputs.

    Attributes:
        sums: completes the gradients of the parts during backward.

    Raises:
        InvalidInput: the model cannot be followed, or has a weight that cannot be divided.
    """

    def __init__(self, model: nn.Module, group: Group, arrangement: Arrangement, inputs: Sequence[Tensor]) -> None:
        self._model, self._group = model, group
        mesh = ProcessMesh(group, group, arrangement, 0, has_same_generators=group.has_same_generators())
        self._sharded = ShardedModule(model, mesh, inputs)
        self._shards = self._sharded.state_shards()
        self.sums = self._sharded.sums
        divided = [held for held in self._sharded.held().parameters if held.route is not None]
        self._divided = {held.name: held for held in divided}
        self._weights = _Gathering(group, [held.route for held in divided if held.route is not None], "gradients")
        buffers = {name for name, _ in self._sharded.part.named_buffers()}
        self._buffers = [name for name, one in self._shards.items() if name in buffers and one.layout.state == "split"]
        routes = [_to_all(self._shards[name].layout, self._shards[name].shape, group.size) for name in self._buffers]
        self._statistics = _Gathering(group, routes, "statistics")

    @property
    def divides(self) -> bool:
        """Whether any layer is divided."""
        steps = self._sharded.plan.steps
        return any(step.choice.gives.state in ("split", "partial") or step.choice.mode for step in steps)

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """Return the model's outputs for whole inputs, whole on every rank."""
        self._take_state()
        before = {name: (buffer, buffer._version) for name, buffer in self._sharded.part.named_buffers()}
        outputs = self._sharded(*(self._of_all(x) if x.requires_grad else x for x in inputs))
        self._give_buffers(before)
        return outputs

    def give_gradients(self) -> bool:
        """Add the gradients of the parts to the model's; return whether there were any. Every rank calls this."""
        if self.sums.has_started:
            self.sums.finish()
        rows = self._group.all_gather_bytes(bytes(held.part.grad is not None for held in self._divided.values()))
        parts = [held.part for held in self._divided.values()]
        gathered = self._weights.of([torch.zeros_like(p) if p.grad is None else p.grad for p in parts])
        whole = dict(zip(self._divided, gathered, strict=True))
        has_any = dict(zip(self._divided, map(any, zip(*rows, strict=True)), strict=True))
        has_added = False
        for name, part in self._sharded.part.named_parameters():
            grad = (whole[name] if has_any[name] else None) if name in whole else part.grad
            part.grad = None
            if grad is not None:
                _add(self._model.get_parameter(name), grad)
                has_added = True
        return has_added

    def _of_all(self, x: Tensor) -> Tensor:
        """Return `x` such that its gradient is the sum over all ranks."""
        return mover(Move(0, tuple(x.shape), self._group.size, ALIKE, WHOLE), self._group)(x)

    @torch.no_grad()
    def _take_state(self) -> None:
        local, whole = self._sharded.part.state_dict(), self._model.state_dict()
        pairs = [
            (local[name], part_of(whole[name], shard.layout.region(self._group.rank, shard.shape)))
            for name, shard in self._shards.items()
        ]
        for own, part in compress(pairs, _differ(pairs)):  # a copy would invalidate what an earlier pass saved
            own.copy_(part)

    @torch.no_grad()
    def _give_buffers(self, before: Mapping[str, tuple[Tensor, int]]) -> None:
        """Copy buffers to the model, which had these objects and versions `before` the pass.

        Autograd checks versions. As in one process, only operations in place give a buffer a new one, while kernels
        change statistics of norms without.
        """
        buffers = dict(self._sharded.part.named_buffers())
        changed = {
            name
            for name, one in buffers.items()
            if name not in before or before[name][0] is not one or before[name][1] != one._version
        }
        gathered = self._statistics.of([buffers[name] for name in self._buffers])
        buffers |= dict(zip(self._buffers, gathered, strict=True))
        for name, buffer in self._model.named_buffers():
            (buffer if name in changed else buffer.data).copy_(buffers[name])


class _Gathering:
    """An all-gather of tensors from their parts on all ranks.

    Args:
        group: the ranks.
        routes: of the tensors, in order.
        kind: name of the sent data in the counts of traffic.
    """

    def __init__(self, group: Group, routes: Sequence[Route], kind: str) -> None:
        self._group, self._routes, self._kind = group, routes, kind
        self._exchanges: dict[torch.dtype, Exchange] = {}

    def of(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole tensors; every rank calls this with its parts."""
        gathered = list(parts)
        for dtype in dict.fromkeys(part.dtype for part in parts):
            chosen = [i for i, part in enumerate(parts) if part.dtype == dtype]
            routes = [self._routes[i] for i in chosen]
            if dtype not in self._exchanges:
                numbered = [Route(route.owned, route.need, source=i) for i, route in enumerate(routes)]
                self._exchanges[dtype] = Exchange(self._group, numbered, self._kind)
            shapes = [shape_of(route.owned[self._group.rank]) for route in routes]
            blocks = [parts[i].reshape(shape) for i, shape in zip(chosen, shapes, strict=True)]
            for i, whole in zip(chosen, self._exchanges[dtype].all_gather(blocks), strict=True):
                gathered[i] = whole
        return gathered


def _differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Return of each pair of tensors, all on one device, whether they differ; wait for the device once."""
    if not pairs or not accelerators.is_accelerator(pairs[0][0].device):
        return [not torch.equal(first, second) for first, second in pairs]
    differ: list[bool] = torch.stack([(first != second).any() for first, second in pairs]).tolist()
    return differ


def _to_all(layout: Layout, shape: Shape, size: int) -> Route:
    return Route(regions(layout, shape, size), regions(WHOLE, shape, size))


def _add(weight: nn.Parameter, grad: Tensor) -> None:
    """Add `grad` to the gradient of `weight`, as autograd does."""
    grad = grad.view_as(weight)
    if weight.grad is None:
        weight.grad = grad
    elif weight.grad.is_sparse:
        weight.grad = weight.grad + grad
    else:
        weight.grad.add_(grad)
