"""A copy of a rank that is compared with others: a few samples of two batches, alike in float64 wherever it goes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from evener.comm.group import Group
from evener.data.loader import seed_all
from evener.launch.rank_environment import RankEnvironment
from evener.program.batch_parts import BatchPart
from evener.program.understudy import Understudy
from evener.program.work_division import Prepared
from evener.run.context import Arithmetic
from evener.run.differences import as_real
from evener.run.draws import SameDraws

_MOST_BATCHES, _MOST_UPDATES = 8, 8
_ROUNDS = 2
"""Batches that lead to an update: in a single one a mean over something else than samples may be right by chance."""
_SAMPLED = 50_000
"""Elements of a gradient by which parts are compared with the whole."""


class ComparedCopy(Understudy):
    """One of the copies that divide a few samples, or the one that has them all.

    Args:
        models: of the program.
        group: as of an Understudy; also the following.
        path: of gradients, buffers and weights, as safetensors.
        samples: of a batch.
        divide: samples for every rank of so many.
        is_wide: compute in float64.
        moves_parts: whether copies send each other parts of tensors, for which Gloo is needed.
    """

    def __init__(
        self,
        models: Sequence[Prepared],
        group: Group,
        path: Path,
        samples: int,
        divide: Callable[[int], tuple[int, ...]],
        is_wide: bool,
        moves_parts: bool = False,
    ) -> None:
        super().__init__(group, path, samples, moves_parts)
        self._models, self._divide, self._is_wide = models, divide, is_wide
        self._wide = Arithmetic("fp64", group.device)
        self._values: dict[str, Tensor] = {}
        self._own: list[Tensor] = []
        self._batches = self._updates = self._rounds = 0
        self._has_updated = False

    def begin(self, env: RankEnvironment, token: str | None) -> None:
        """Besides, draw what every other copy draws."""
        super().begin(env, token)
        _compile_nothing()
        self._widen()
        seed_all(0)
        draws: Any = SameDraws()
        self._kept.append(draws.__enter__())

    def sizes(self, count: int) -> tuple[int, ...]:
        """Samples for every copy of a batch of `count`."""
        return (count,) if self.group.size == 1 else self._divide(count)

    def given(self, batch: Any) -> Any:
        """In the type in which the copy computes."""
        return self._wide.prepare(batch) if self._is_wide else batch

    def begin_step(self, owner: object, part: BatchPart) -> None:
        """Nothing is to be done."""

    def end_step(self, owner: object) -> None:
        """Likewise."""

    def next_batch(self) -> None:
        """Enough is known after two batches that led to updates, or after some others."""
        self._rounds += self._has_updated
        self._has_updated = False
        if self._rounds >= _ROUNDS or self._batches >= _MOST_BATCHES:
            self.end()
        self._batches += 1

    def before_update(self) -> None:
        """An update more; of closures without end, some are enough."""
        if self._updates >= _MOST_UPDATES:
            self.end()
        self._updates += 1
        self._has_updated = True

    def write(self, path: Path) -> None:
        """Gradients, and the state afterwards."""
        for index, model in enumerate(self._models):
            for name, tensor in model.model.state_dict().items():
                self._values[f"{index}/state/{name}"] = _kept(tensor)
        self._values["parts"] = self._of_all()
        save_file(self._values, path)

    def _widen(self) -> None:
        for model in self._models:
            model.means.watch = partial(self._watch, model, f"{self._models.index(model)}/gradient/")
        if self._is_wide:
            torch.set_default_dtype(torch.float64)
            for model in self._models:
                self._wide.prepare_model(model.model)

    def _watch(self, model: Prepared, head: str, is_complete: bool) -> None:
        """Keep the gradients of the first `backward()` of a round: the means, and before that the very first's own."""
        tail = " of another batch" if self._rounds else ""
        if any(name.startswith(head) and name.endswith(tail or name) for name in self._values):
            return
        found = {name: p.grad for name, p in model.model.named_parameters() if p.grad is not None}
        if is_complete:
            self._values.update({f"{head}{name}{tail}": _kept(grad) for name, grad in found.items()})
        elif not self._rounds:
            self._own.append(model.means.own_gradients())

    def _of_all(self) -> Tensor:
        """Some elements of the own gradients of every copy, one row each."""
        flat = torch.cat(self._own) if self._own else torch.zeros(1, dtype=torch.float64)
        flat = flat[:: -(-len(flat) // _SAMPLED)].contiguous()
        rows = self.group.all_gather_bytes(flat.numpy().tobytes())
        return torch.from_numpy(np.stack([np.frombuffer(row) for row in rows]).copy())


def _compile_nothing() -> None:
    """From now on functions under torch.compile are run as they are: compiling them would take longer than all else."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    vars(torch)["compile"] = _as_it_is  # to wrap a function, PyTorch imports its compilers: a second of each copy
    if "torch._dynamo" in sys.modules:  # else it reads this when it is needed
        torch.compiler.set_stance("force_eager")


def _as_it_is(function: Any = None, **_: Any) -> Any:
    """In the place of `torch.compile`, as a function and as a decorator with options."""
    return _as_it_is if function is None else function


def _kept(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return as_real(dense).cpu().clone().contiguous()
