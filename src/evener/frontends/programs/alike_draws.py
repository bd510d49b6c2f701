"""Random draws that are shared by all samples, such as one coin per batch: equal on all nodes, and as in one process.

Every other draw of torch belongs to samples of one node. The comparison before the first step shows which draws are
shared: single numbers, and those with the shape of a weight.

    common numbers   a coin, noise for a weight           torch's generators, in the first node's state in every batch
    local numbers    dropout, noise, masks of samples     another state of them, while a model is called, and in the
                                                          drawing functions below

A node with an accelerator has two generators, its own and the processor's. If the nodes have devices of different
kinds, the processor draws the common numbers of accelerators, too: they are equal on all nodes, but not what one
accelerator draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from evener.data.loader import seed_all
from evener.frontends.programs.function_modes import ModelCalls, begin_mode, end_mode
from evener.records.errors import InvalidInput
from evener.system import accelerators
from evener.system.processor_draws import ProcessorDraws
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
_CHANGING: frozenset[Any] = frozenset(
    (
        *(getattr(Tensor, name) for name in _METHODS if name.endswith("_")),
        *(getattr(nn.init, name) for name in (*_INITIAL, "xavier_normal_")),
        *(F.dropout, F.alpha_dropout),
    )
)
"""Functions that may change their first argument, which has the shape of the draw."""
_OF_LAST_DIM: tuple[Any, ...] = (torch._sample_dirichlet, torch.multinomial, Tensor.multinomial)
_DRAWING: frozenset[Any] = _CHANGING | frozenset(
    (
        *(getattr(torch, name) for name in _FACTORIES),
        *(getattr(Tensor, name) for name in _METHODS),
        F.gumbel_softmax,
    )
)


class AlikeDraws(TorchFunctionMode):
    """Inside this mode, shared draws are equal on all nodes whose generators start in the same state.

    Args:
        seed: of this node's local numbers.
        shapes: of shared draws, in addition to single numbers; None if all draws are shared.
        models: draws within their calls are local unless their shape is shared.
        device: of this node.
        on_processor: whether the processor draws the shared numbers, because the nodes' devices draw different ones.
        is_compared: whether the program was compared, which shows all shared shapes. If it was not, draws outside of
            models are shared between a backward pass and the next batch.

    Attributes:
        is_after_backward: whether a backward pass has ended since the batch began.
    """

    def __init__(
        self,
        seed: int,
        shapes: Iterable[tuple[int, ...]] | None,
        models: Iterable[nn.Module] = (),
        *,
        device: torch.device = accelerators.CPU,
        on_processor: bool = False,
        is_compared: bool = True,
    ) -> None:
        super().__init__()
        self._shapes = None if shapes is None else frozenset(shapes)
        self._device, self._on_processor, self._is_compared = device, on_processor, is_compared
        self._generators = accelerators.generators(device)
        shared = self._states()
        for generator in self._generators:
            generator.manual_seed(seed)
        self._other = self._states()
        self._restore(shared)
        self._is_own = self.is_after_backward = False
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

    def seed(self, *entropy: int, rank: int) -> None:
        """Seed the shared numbers, equal on all nodes and as in one process, and the local ones of `rank`."""
        seed_all(*entropy, stream=rank + 1, device=self._device)
        self._other = self._states()
        seed_all(*entropy, device=self._device)

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
        before = self._states()
        changed = args[0] if func in _CHANGING and args else None
        made = func(*args, **kwargs) if changed is None else changed
        if not isinstance(made, Tensor):
            return made
        is_of_samples = self._is_of_samples(func, made)
        by_processor = self._on_processor and not is_of_samples and made.device.type != "cpu"
        by_others = is_of_samples != self._is_own
        if changed is None and not by_processor and not by_others:
            return made
        if by_others and is_computed_twice():
            raise InvalidInput(
                "a number is drawn for the whole batch inside of torch.utils.checkpoint, which would not be the same "
                "on all nodes: draw it with Python's random, or before"
            )
        self._restore(before)
        with self._swapped() if by_others else nullcontext(), ProcessorDraws() if by_processor else nullcontext():
            return func(*args, **kwargs)

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _is_of_samples(self, func: Callable[..., Any], made: Tensor) -> bool:
        is_for_weights = self.is_after_backward and not self._is_compared and not self._is_own
        if self._shapes is None or is_for_weights:
            return False
        shape = made.shape[:-1] if func in _OF_LAST_DIM else made.shape
        return shape.numel() != 1 and tuple(made.shape) not in self._shapes

    def _swap(self) -> None:
        """Switch between the shared and the local random numbers."""
        states = self._states()
        self._restore(self._other)
        self._other, self._is_own = states, not self._is_own

    def _states(self) -> list[Tensor]:
        return [one.get_state() for one in self._generators]

    def _restore(self, states: list[Tensor]) -> None:
        for one, state in zip(self._generators, states, strict=True):
            one.set_state(state)
