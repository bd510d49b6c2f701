"""Norms with statistics that several ranks share.

SharedStatistics        gives functional norms, also in the user's modules, the statistics of all replicas
SharedNorms             gives norm modules of any class these statistics, wherever they are called
untracked, uncounted    contexts for a recomputed pass, and for a pass of a rank without samples
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from evener.oracle.division.layout import Layout
from evener.parallel.norm_forward import computation_of, compute_by, norms_with_statistics
from evener.parallel.norm_statistics import DataAxis, Gathers
from evener.parallel.norms import move, normalise_channels
from evener.parallel.process_mesh import ProcessMesh
from evener.records.errors import InvalidInput

T = TypeVar("T")


class SharedStatistics(TorchFunctionMode):
    """Gives `F.batch_norm` and `F.instance_norm` in training the statistics of all replicas.

    Args:
        group: Returns the gathering object for a number of channels.

    Attributes:
        counting: Whether this rank's samples count.
        found: Whether any such norm has run.
        check: Called with the input of a BatchNorm that trains, before it is computed.
    """

    def __init__(self, group: Callable[[int], Gathers]) -> None:
        super().__init__()
        self._group, self.counting, self.found = group, True, False
        self.check: Callable[[Tensor], None] = lambda _: None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` or its replacement."""
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        if func is F.instance_norm:
            return self._instance_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

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
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        self.found = True
        self.check(input)
        group = self._group(input.shape[1])
        y, seen = normalise_channels(input, weight, bias, eps, group, self.counting)
        if running_mean is not None and running_var is not None:
            move(running_mean, running_var, seen, momentum)
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
        moved = running_mean.clone(), running_var.clone()
        y = F.instance_norm(input, *moved, weight, bias, True, momentum, eps)
        self.found = True
        count = float(len(input) * self.counting)
        with torch.no_grad():  # each sample has its own statistics; running ones are means over samples
            local = torch.cat((*moved, running_mean.new_ones(1))) * count
            sums = self._group(input.shape[1]).all_gather(local, "statistics").sum(0)
            mean, var = (sums[:-1] / sums[-1]).chunk(2)
            running_mean.copy_(mean)
            running_var.copy_(var)
        return y


class SharedNorms:
    """Computes norms with the statistics of all parts, as a `NormComputation`.

    Args:
        group: Returns the gathering object for a number of channels.
        members: The ranks with parts of the same samples. Norms without running statistics evaluate with their
            statistics.
        is_divided: Returns whether norms now see a part of a batch; otherwise they are computed as usual.

    Attributes:
        passes: Number of training passes of norms.
        refusal: Why norms may not train now; empty if they may.
    """

    def __init__(
        self,
        group: Callable[[int], Gathers],
        members: Gathers | None = None,
        is_divided: Callable[[], bool] = lambda: True,
    ) -> None:
        self.passes, self.refusal, self._is_divided = 0, "", is_divided
        self._trained = SharedStatistics(group)
        self._evaluated = SharedStatistics(lambda _: members) if members is not None else None

    @property
    def counting(self) -> bool:
        """Whether this rank's samples count."""
        return self._trained.counting

    @counting.setter
    def counting(self, counting: bool) -> None:
        self._trained.counting = counting
        if self._evaluated is not None:
            self._evaluated.counting = counting

    def check_inputs(self, check: Callable[[Tensor], None]) -> None:
        """Call `check` with the input of every BatchNorm that trains, before it is computed."""
        self._trained.check = check

    def compute(self, norm: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute `norm`. Raises InvalidInput if it trains but may not."""
        if not self._is_divided():
            return forward(*args, **kwargs)
        self.passes += norm.training
        if norm.training and self.refusal:
            raise InvalidInput(self.refusal)
        has_own = norm.running_mean is not None  # then no replica waits for another in evaluation
        shared = self._trained if norm.training else None if has_own else self._evaluated
        if shared is not None:
            with shared:
                return forward(*args, **kwargs)
        is_empty = len(args) == 1 and isinstance(args[0], Tensor) and args[0].numel() == 0
        return args[0] if is_empty else forward(*args, **kwargs)


def synchronise_norms(
    model: nn.Module, group: T, of_layer: Callable[[T, str], Gathers] = lambda group, _: cast(Gathers, group)
) -> nn.Module:
    """Give all norms in `model` the statistics of all ranks; return the model.

    Args:
        model: The model, on every rank.
        group: The ranks.
        of_layer: Returns the gathering object for the norm of a name.
    """
    for name, norm in norms_with_statistics(model).items():
        compute_by(norm, SharedNorms(for_all_channels(of_layer(group, name))))
    return model


def for_all_channels(group: Gathers) -> Callable[[int], Gathers]:
    """Return a function that gives `group` for any number of channels."""
    return lambda _: group


def shared_by(module: Any) -> SharedNorms | None:
    """Return the computation of `module` if it is a norm with the statistics of all parts."""
    computation = computation_of(module)
    return computation if isinstance(computation, SharedNorms) else None


def with_all_replicas(
    compute: Callable[[T], Tensor],
    mesh: ProcessMesh,
    layout: Layout,
    trains: Callable[[], bool],
    counts: Callable[[], bool],
) -> Callable[[T], Tensor]:
    """Return `compute`, which all ranks of a replica do alike, with its norms using the statistics of all replicas.

    Args:
        compute: Computes a part of the model.
        mesh: The position of this rank.
        layout: Layout of a value that all ranks of a replica have.
        trains: Returns whether the model is in training.
        counts: Returns whether the replica has samples.
    """
    replicas = len(mesh.arrangement.replicas)
    if replicas == 1:
        return compute
    shared = SharedStatistics(cache(lambda channels: DataAxis(mesh, (layout,) * replicas, channels)))

    def run(inputs: T) -> Tensor:
        shared.counting = counts()
        with shared if trains() else nullcontext():
            return compute(inputs)

    return run


def statistics_exchanges(model: nn.Module) -> tuple[int, int]:
    """Return (number, bytes to each peer) of a pass's exchanges: of 2 C + 1 and 2 C numbers per BatchNorm."""
    norms = _norms(model)
    numbers = sum(4 * norm.num_features + 1 for norm in norms)
    wide = any(p.dtype == torch.float64 for p in model.parameters())
    return 2 * len(norms), numbers * (8 if wide else 4)


def _norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


@contextmanager
def untracked(model: nn.Module) -> Iterator[None]:
    """Keep running statistics constant, for a forward pass that is recomputed.

    The momentum is set to 0 and the statistics stay in place: PyTorch saves them for backward, and recomputation has to
    save the same tensors as the first pass.
    """
    norms = _norms(model)
    before = [(n.momentum, None if n.num_batches_tracked is None else n.num_batches_tracked.clone()) for n in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if norm.num_batches_tracked is not None and batches is not None:
                norm.num_batches_tracked.copy_(batches)


@contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Exclude this rank's samples from all statistics: it has none, but has to join the collectives."""
    shared = [one for module in model.modules() if (one := shared_by(module)) is not None]
    for one in shared:
        one.counting = False
    try:
        yield
    finally:
        for one in shared:
            one.counting = True
