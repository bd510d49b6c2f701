"""A model of a user's program whose layers the ranks divide, while the program sees a whole model.

Batches, weights, gradients, buffers and outputs are whole and equal on every rank. Ranks divide the work and the
activations of training passes. Every rank computes everything else itself, such as an evaluation. Therefore losses,
optimizers, clipping, moving averages and checkpoints of the program work as in one process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from evener.comm.group import Group
from evener.frontends.programs.batch_parts import BatchPart
from evener.frontends.programs.divided_pass import DividedPass
from evener.frontends.programs.layer_gradients import LayerGradients
from evener.frontends.programs.prepared import agreed_model
from evener.oracle.division.plan import Arrangement
from evener.parallel.gradient_hooks import GradientHooks, without_hooks
from evener.parallel.op_registry import without_synchronised
from evener.records.errors import InvalidInput
from evener.tracer.nested import tensors_in

_MAX_PASSES = 8
"""Number of cached passes with different modes and settings."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class PreparedLayers:
    """A model that all ranks hold, and whose training passes they compute together.

    Args:
        model: the user's; its `forward` is replaced in place.
        group: the ranks.
        arrangement: division of layers among the ranks.
        tell: called with a sentence if no layer of the model can be divided.

    Attributes:
        model: for the program: the same object, unless it is a synchronised BatchNorm itself.
        means: of its gradients.

    Raises:
        InvalidInput: the model is wrapped, lazy, or different on another rank.
    """

    def __init__(self, model: nn.Module, group: Group, arrangement: Arrangement, tell: Callable[[str], None]) -> None:
        self.model = without_synchronised(agreed_model(model, group))
        self._group, self._arrangement, self._tell = group, arrangement, tell
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
        """Return the outputs of the whole batch."""
        if self._group.size == 1 or not (torch.is_grad_enabled() and self.model.training):
            return self._whole(*args, **kwargs)
        inputs = self._in_order(args, kwargs)
        divided = self._pass_of(inputs)
        outputs = divided(inputs)
        made: list[Any] = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        for tensor in made:
            tensor.register_hook(lambda _: self._begin(divided))
        return outputs

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
        try:
            with without_hooks(self.model):
                yield
        finally:
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
