"""Norms in a pipeline stage: each micro-batch is normalised by its own statistics (Huang et al., 2019).

Running statistics move once per step, by all micro-batches of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from evener.parallel.norm_forward import computation_of, compute_by, norms_with_statistics
from evener.parallel.norm_statistics import Statistics, combine
from evener.parallel.norms import move
from evener.records.errors import InvalidInput


class DeferredStatistics(TorchFunctionMode):
    """Collects the statistics of a norm in micro-batches, separately for each use; `move` applies them.

    Args:
        norm: A BatchNorm or InstanceNorm of any class; this object computes it from now on.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        compute_by(norm, self)
        self._norm, self._is_batch_norm = norm, isinstance(norm, _BatchNorm)
        self._parts: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._counting = True
        self._use = self._micro_batches = self._moved_in = 0

    @property
    def tracks(self) -> bool:
        """Whether the norm keeps running statistics."""
        return self._norm.running_mean is not None

    def begin(self, counting: bool) -> None:
        """Begin a micro-batch; `counting` says whether it counts."""
        self._counting, self._use = counting, 0
        self._micro_batches += 1

    def compute(self, norm: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute `norm`, without moving its running statistics.

        Raises:
            InvalidInput: The norm moves its statistics itself, in every micro-batch.
        """
        if not norm.training or norm.running_mean is None:
            return forward(*args, **kwargs)
        before = [buffer._version for buffer in (norm.running_mean, norm.running_var)]
        batches = norm.num_batches_tracked
        number = None if batches is None else batches.clone()
        with self:
            outputs = forward(*args, **kwargs)
        if batches is not None and number is not None:
            batches.copy_(number)
        if before != [buffer._version for buffer in (norm.running_mean, norm.running_var)]:
            self._refuse_second_move(norm)
        return outputs

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, or record the statistics of a norm that would move running ones."""
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        if func is F.instance_norm:
            return self._instance_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def collected(self) -> list[Statistics]:
        """Return the statistics of every use since the last call, each of shape (C,), and forget them."""
        running: Tensor = self._norm.running_mean
        empty = torch.zeros(3, self._norm.num_features, dtype=running.dtype, device=running.device)
        statistics = [self._combined(torch.stack(parts or [empty]).unbind(1)) for parts in self._parts.values()]
        self.forget()
        return statistics

    def combined(self, rows: Tensor) -> Statistics:
        """Combine the statistics of several ranks, (ranks, 3, C)."""
        return self._combined(rows.unbind(1))

    @torch.no_grad()
    def move(self, seen: Statistics) -> None:
        """Move the running statistics as a single process would after it has `seen` these, unless they are empty."""
        norm, factor = self._norm, self._norm.momentum
        if not self._is_batch_norm:  # an InstanceNorm counts no batches, and its statistics are means over samples
            factor = (factor or 0.0) * (seen.num_values > 0).to(norm.running_mean.dtype)
            norm.running_mean.lerp_(seen.mean, factor)
            norm.running_var.lerp_(seen.var, factor)
            return
        norm.num_batches_tracked += (seen[2][0] > 0).to(norm.num_batches_tracked.dtype)
        factor = factor if factor is not None else 1.0 / max(1.0, float(norm.num_batches_tracked))
        move(norm.running_mean, norm.running_var, seen, factor)

    def forget(self) -> None:
        """Drop the collected statistics: the step is over, or was not finished."""
        self._parts = defaultdict(list, {use: [] for use in self._parts})
        self._micro_batches = self._moved_in = 0

    def _combined(self, parts: Any) -> Statistics:
        """Combine parts stacked in dim 0; those of an InstanceNorm are means over samples."""
        seen = Statistics(*parts)
        if self._is_batch_norm:
            return combine(seen)
        count = seen.num_values.sum(0)
        mean, var = ((seen.num_values * one).sum(0) / count.clamp(min=1) for one in (seen.mean, seen.var))
        return Statistics(mean, var, count)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training or running_mean is None or running_var is None:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
        y = F.batch_norm(input, mean, var, weight, bias, True, 1.0, eps)  # sets both to the statistics of the input
        count = input.numel() // input.shape[1]
        self._observe(mean, var * ((count - 1) / count), count)
        return y

    def _instance_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not use_input_stats or running_mean is None or running_var is None:
            return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
        y = F.instance_norm(input, mean, var, weight, bias, True, 1.0, eps)
        self._observe(mean, var, len(input))
        return y

    def _observe(self, mean: Tensor, var: Tensor, count: int) -> None:
        if self._counting:
            self._parts[self._use].append(torch.stack((mean, var, torch.full_like(mean, count))))
            self._use += 1

    def _refuse_second_move(self, norm: Any) -> None:
        """Raise InvalidInput if the norm moved its statistics itself in two micro-batches of a step."""
        self._moved_in += 1
        if self._micro_batches > 1 and self._moved_in > 1:
            raise InvalidInput(
                f"{type(norm).__name__} moves its running statistics itself, in every micro-batch of a pipeline: call "
                "the forward of its base class, or use --micro-batches 1 or a strategy without pipelines"
            )


def defer_statistics(module: nn.Module) -> nn.Module:
    """Defer the running statistics of norms in `module`; return the module."""
    for norm in norms_with_statistics(module).values():
        if not isinstance(computation_of(norm), DeferredStatistics):
            DeferredStatistics(norm)
    return module


def deferred_in(root: nn.Module) -> dict[str, DeferredStatistics]:
    """Return by name of the norm in `root` the object that defers its running statistics."""
    computations = {path: computation_of(module) for path, module in root.named_modules()}
    return {path: one for path, one in computations.items() if isinstance(one, DeferredStatistics) and one.tracks}
