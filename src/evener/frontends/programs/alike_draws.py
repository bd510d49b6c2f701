"""Random draws that are shared by all samples, such as one coin per batch: equal on all nodes, and as in one process.

Every other draw of torch belongs to samples of one node. The comparison before the first step shows which draws are
shared: single numbers, and those with the shape of a weight.

    common numbers   a coin, noise for a weight              torch's generator, in the first node's state in every batch
    local numbers    dropout, noise, masks of samples        another state of it, while a model is called, and in the
                                                             drawing functions below
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from evener.frontends.programs.function_modes import ModelCalls, begin_mode, end_mode
from evener.records.errors import InvalidInput
from evener.tracer.operation import is_computed_twice

_FACTORIES = (
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "poisson"),
    *("binomial", "multinomial", "_standard_gamma", "_sample_dirichlet", "dropout"),
)
_METHODS = (
    *("uniform_", "normal_", "bernoulli_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_"),
    *("bernoulli", "multinomial"),
)
_INITIAL = ("uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_")
_OF_LAST_DIM: tuple[Any, ...] = (torch._sample_dirichlet, torch.multinomial, Tensor.multinomial)
_DRAWING: frozenset[Any] = frozenset(
    (
        *(getattr(torch, name) for name in _FACTORIES),
        *(getattr(Tensor, name) for name in _METHODS),
        *(getattr(nn.init, name) for name in (*_INITIAL, "xavier_normal_")),
        *(F.dropout, F.alpha_dropout, F.gumbel_softmax),
    )
)


class AlikeDraws(TorchFunctionMode):
    """Inside this mode, shared draws are equal on all nodes whose generators start in the same state.

    Args:
        seed: of this node's local numbers.
        shapes: of shared draws, in addition to single numbers.
        models: draws within their calls are local unless their shape is shared.
    """

    def __init__(self, seed: int, shapes: Iterable[tuple[int, ...]], models: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self._shapes = frozenset(shapes)
        self._other = torch.Generator().manual_seed(seed).get_state()
        self._is_own = False
        self._calls = ModelCalls(lambda _, __: self._swap(), lambda: self._swap())
        for model in models:
            self._calls.follow(model)

    def begin(self) -> None:
        """Activate the mode in this thread."""
        begin_mode(self)

    def end(self) -> None:
        """Deactivate the mode."""
        self._calls.end()
        end_mode(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, with the shared or the local random numbers.

        Raises:
            InvalidInput: a shared number would be drawn again in a backward pass.
        """
        kwargs = kwargs or {}
        if func not in _DRAWING or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        made = func(*args, **kwargs)
        if not isinstance(made, Tensor) or made.device.type != "cpu" or self._is_of_samples(func, made) == self._is_own:
            return made
        if is_computed_twice():
            raise InvalidInput(
                "a number is drawn for the whole batch inside of torch.utils.checkpoint, which would not be the same "
                "on all nodes: draw it with Python's random, or before"
            )
        torch.set_rng_state(before)
        self._swap()
        try:
            return func(*args, **kwargs)
        finally:
            self._swap()

    def _is_of_samples(self, func: Callable[..., Any], made: Tensor) -> bool:
        shape = made.shape[:-1] if func in _OF_LAST_DIM else made.shape
        return shape.numel() != 1 and tuple(made.shape) not in self._shapes

    def _swap(self) -> None:
        """Switch between the shared and the local random numbers."""
        state = torch.get_rng_state()
        torch.set_rng_state(self._other)
        self._other, self._is_own = state, not self._is_own
