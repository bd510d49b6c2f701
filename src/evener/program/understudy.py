"""A copy of a rank, in the rehearsal: it goes on with the program for a batch or two, writes what came, and ends."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from evener.atomic import atomic_write
from evener.comm.group import Group
from evener.comm.mesh_joining import join_mesh
from evener.data.loader import seed_all
from evener.errors import InvalidInput, first_line, place_of
from evener.launch.rank_environment import RankEnvironment
from evener.launch.store import connect_store
from evener.program.prepared import PreparedModel
from evener.run.context import Arithmetic
from evener.run.draws import SameDraws

_MOST_BATCHES, _MOST_UPDATES = 8, 8
_ROUNDS = 2
"""Batches that lead to an update: in a single one a mean over something else than samples may be right by chance."""
_SAMPLED = 50_000
"""Elements of a gradient by which parts are compared with the whole."""


@dataclass
class Understudy:
    """A copy of this rank.

    Attributes:
        models: of the program.
        group: the rank's; from `begin` on, that of the copies, in the place of the same object.
        path: of what it writes, without a suffix.
        samples: of a batch.
        divide: samples for every rank of so many.
        is_wide: compute in float64.
        seconds: after which it ends at the latest.
    """

    models: Sequence[PreparedModel]
    group: Group
    path: Path
    samples: int
    divide: Callable[[int], tuple[int, ...]]
    is_wide: bool
    seconds: int
    _values: dict[str, Tensor] = field(default_factory=dict)
    _own: list[Tensor] = field(default_factory=list)
    _batches: int = 0
    _updates: int = 0
    _rounds: int = 0
    _has_updated: bool = False
    _kept: list[Any] = field(default_factory=list)

    def begin(self, env: RankEnvironment, token: str | None) -> None:
        """Meet the other copies under `token`, or be alone with the whole."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(self.seconds)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        torch.set_num_threads(1)
        with self:
            self._regroup(env, token)
        self._widen()
        seed_all(0)
        draws: Any = SameDraws()
        self._kept.append(draws.__enter__())

    def sizes(self, count: int) -> tuple[int, ...]:
        """Samples for every copy of a batch of `count`."""
        return (count,) if self.group.size == 1 else self.divide(count)

    def widened(self, batch: Any) -> Any:
        """`batch` in the type in which the copy computes."""
        return Arithmetic("fp64", self.group.device).prepare(batch) if self.is_wide else batch

    def next_batch(self) -> None:
        """The program goes on to another batch: enough is known after two that led to updates, or after some others."""
        self._rounds += self._has_updated
        self._has_updated = False
        if self._rounds >= _ROUNDS or self._batches >= _MOST_BATCHES:
            self.end()
        self._batches += 1

    def before_update(self) -> None:
        """The program is about to update weights."""
        if self._updates >= _MOST_UPDATES:
            self.end()
        self._updates += 1
        self._has_updated = True

    def end(self) -> NoReturn:
        """Write down what came of it, and end."""
        with self:
            for index, model in enumerate(self.models):
                for name, tensor in model.model.state_dict().items():
                    self._values[f"{index}/state/{name}"] = _kept(tensor)
            self._values["parts"] = self._of_all()
            save_file(self._values, self.path.with_suffix(".part"))
            os.replace(self.path.with_suffix(".part"), self.path.with_suffix(".safetensors"))
        os._exit(0)

    def __enter__(self) -> None:
        """Inside, an error ends the copy."""

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Say why the program failed, and end."""
        with contextlib.suppress(OSError):
            kind = "" if isinstance(error, InvalidInput) else f"{type(error).__name__}: "
            sentence = f"{kind}{first_line(error)}{place_of(error)}"
            atomic_write(self.path.with_suffix(".failed"), sentence.encode())
        os._exit(1)

    def _regroup(self, env: RankEnvironment, token: str | None) -> None:
        """What was the rank's group is that of the copies."""
        group = self.group
        # their threads are not here, neither to end them nor for collectives of the program's own, such as Lightning's
        self._kept += [group.process_group, group.mesh, group.reports, dist.GroupMember.WORLD]
        dist.GroupMember.WORLD = None
        group.process_group = group.reports = group.mesh = None
        group.timer.pace.speed = 1.0
        if token is None:
            group.rank, group.size, group.nodes = 0, 1, group.nodes[:1]
            return
        assert env.store is not None
        kept = env.store.inner
        store = connect_store(kept.host, kept.port, env.store.secret, patience=self.seconds)
        group.mesh = join_mesh(
            rank=group.rank,
            nodes=group.nodes,
            store=store.under(f"rehearsal/{token}"),
            address=env.address,
            patience=self.seconds,
            longest_wait=self.seconds,
        )

    def _widen(self) -> None:
        for model in self.models:
            model.means.watch = partial(self._watch, model, f"{self.models.index(model)}/gradient/")
        if self.is_wide:
            torch.set_default_dtype(torch.float64)
            for model in self.models:
                model.model.double()

    def _watch(self, model: PreparedModel, head: str, is_complete: bool) -> None:
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


def _kept(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.cpu().clone().contiguous()
