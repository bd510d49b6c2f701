"""Models and optimizers of a user's program, prepared in place to train on several ranks.

agreed_model        the leader's weights on all ranks
PreparedModel       an agreed model with norms over all samples, and complete gradients after `backward()`
PreparedOptimizer   reports when an update begins and ends; the loss of a closure is that of the whole batch
move_state          an optimizer's state on the devices of its weights
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from evener.comm.group import Group
from evener.data.alike import require_alike
from evener.frontends.programs.batch_parts import BatchPart
from evener.parallel.gradient_hooks import GradientHooks
from evener.parallel.gradient_sums import ReplicaMeans
from evener.parallel.norm_forward import compute_by, norms_with_statistics
from evener.parallel.norm_statistics import LayerStatistics
from evener.parallel.refusals import refuse_lazy
from evener.parallel.shared_statistics import SharedNorms, for_all_channels
from evener.records.errors import InvalidInput
from evener.tracer.nested import map_tensors, tensors_in

_JOINED = (
    "the last batch has fewer samples than there are nodes and was put together with the one before it, as in an "
    "evaluation, but norms that train need each batch by itself: give the loader drop_last=True or another batch_size"
)


class WeighedSums:
    """Collectives for norms that weigh gradients by the weight of the loss that they come from.

    Each rank differentiates its own loss, and weighs gradients when it adds them to weights. Gradients that ranks
    exchange in between are weighed before they are sent, and divided by the weight on arrival.
    """

    def __init__(self, group: Group, weight: Callable[[], float], layer: str = "") -> None:
        self._group, self._weight, self._layer = group, weight, LayerStatistics(group, layer)

    def of_layer(self, name: str) -> WeighedSums:
        """Return the collectives of one layer."""
        return WeighedSums(self._group, self._weight, name)

    def all_gather(self, tensor: Tensor, kind: str) -> Tensor:
        """Gather `tensor` from all ranks."""
        return self._layer.all_gather(tensor, kind)

    def begin_all_sum(self, tensor: Tensor, kind: str) -> Callable[[], Tensor]:
        """Begin to sum gradients over the ranks; return a function that waits for the sum."""
        weight = self._weight()
        arrive = self._layer.begin_all_sum(tensor * weight, kind)
        return lambda: arrive() / weight if weight else arrive()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeighedSums:
        return self  # copies of a model use the same ranks


def agreed_model(model: nn.Module, group: Group) -> nn.Module:
    """Return `model`, on the rank's device, with the leader's weights and buffers.

    Raises:
        InvalidInput: the model is wrapped, lazy, or different on another rank.
    """
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise InvalidInput(f"run.prepare shares the model itself: leave {type(model).__name__} out")
    refuse_lazy(model).to(group.device)
    state = [*model.parameters(), *model.buffers()]
    shapes = repr([(name, tuple(t.shape), t.dtype) for name, t in model.state_dict().items()])
    require_alike(group, zlib.crc32(shapes.encode()), "the model must be the same on all nodes")
    group.broadcast_(state)
    return model


class PreparedModel:
    """A model whose copies on all ranks stay equal.

    Args:
        model: the user's; its norms now use the statistics of all ranks.
        group: the ranks.
        weight: returns the weight of the current batch.
        is_divided: returns whether the current batch is divided.
        step: returns the number of the current step.
        completed: called when gradients are complete.

    Attributes:
        model: the same object, for the program.
        means: of its gradients.

    Raises:
        InvalidInput: the model is wrapped, lazy, or different on another rank.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        weight: Callable[[], float],
        is_divided: Callable[[], bool],
        step: Callable[[], int] = int,
        completed: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self._group = agreed_model(model, group), group
        self._sums, self._is_divided = WeighedSums(group, weight), is_divided
        self._norms: list[SharedNorms] = []
        self._part: BatchPart | None = None
        self._share(norms_with_statistics(self.model))
        hooks = GradientHooks.taken_off(self.model)

        def complete() -> None:
            completed()
            hooks.run(self.model.named_parameters())

        self.means = ReplicaMeans(self.model, group, weight, complete, step)

    def _share(self, norms: Mapping[str, Any]) -> None:
        for name, norm in norms.items():
            layer = self._sums.of_layer(name)
            self._norms.append(SharedNorms(for_all_channels(layer), members=layer, is_divided=self._is_divided))
            compute_by(norm, self._norms[-1])

    def prepare_added(self, norms: Mapping[str, Any], weights: Sequence[nn.Parameter]) -> None:
        """Copy the leader's values of all weights, and average the added weights' gradients and norms' statistics."""
        agreed_model(self.model, self._group)
        self._share(norms)
        self.means.follow(weights)

    def compute(self, part: BatchPart) -> None:
        """Begin to compute `part`, whose samples count in statistics."""
        self._part = part
        for norm in self._norms:
            norm.counting = part.samples > 0
            norm.refusal = _JOINED if part.is_joined else ""

    def refuse_lone_sample(self, lone: str) -> None:
        """Raise InvalidInput by `lone` as soon as a norm sees one value per sample and channel in training."""

        def check(x: Tensor) -> None:
            if self._part is not None and x.numel() == self._part.loaded * x.shape[1]:
                raise InvalidInput(lone)

        for norm in self._norms:
            norm.check_inputs(check)

    @property
    def norm_passes(self) -> int:
        """The number of passes of norms in training mode."""
        return sum(norm.passes for norm in self._norms)


class Updates(Protocol):
    """A run's interface for its optimizers."""

    def before_update(self) -> None:
        """Begin an update."""
        ...

    def after_update(self, optimizer: Optimizer) -> None:
        """End an update by `optimizer`."""
        ...

    def mean(self, value: Any) -> Any:
        """Return the mean of every rank's `value` over the whole batch."""
        ...


class PreparedOptimizer:
    """An optimizer that does the same on all ranks."""

    def __init__(self, optimizer: Optimizer, run: Updates) -> None:
        self.optimizer, self._run = optimizer, run
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(lambda updating, *_: run.after_update(updating))

    def _before(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin an update, and replace a closure's loss by that of the whole batch."""
        self._run.before_update()
        owner, *rest = args
        named = dict(kwargs)
        if rest and callable(rest[0]):
            rest[0] = self._whole(rest[0])
        if callable(named.get("closure")):
            named["closure"] = self._whole(named["closure"])
        return (owner, *rest), named

    def _whole(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def whole() -> Any:
            loss = closure()
            return loss if loss is None else self._run.mean(loss)

        return whole


def move_state(optimizer: Optimizer) -> None:
    """Move an optimizer's state to the devices of its weights, where `load_state_dict` puts it.

    The weights may have moved since the state was loaded. PyTorch keeps the number of steps on the processor, unless
    the optimizer computes with it on the device.
    """
    for group in optimizer.param_groups:
        has_steps_on_device = group.get("capturable") or group.get("fused")
        for weight in group["params"]:
            state: Any = optimizer.state.get(weight)
            for name, value in state.items() if isinstance(state, dict) else ():
                is_elsewhere = any(tensor.device != weight.device for tensor in tensors_in(value))
                if is_elsewhere and (name != "step" or has_steps_on_device):
                    state[name] = map_tensors(value, partial(Tensor.to, device=weight.device))


def rate_of(optimizer: Optimizer) -> float:
    """Return the sum of an optimizer's learning rates."""
    return sum(float(group.get("lr", 0.0)) for group in optimizer.param_groups)


def sampled_weight(optimizer: Optimizer, step: int) -> float:
    """Return one element of the weights, a different one in every step."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.numel()]
    weight = cast(Tensor, weights[step % len(weights)]).detach().flatten()
    one = weight[step // len(weights) % len(weight)]
    return float(one.real + one.imag) if one.is_complex() else float(one)
