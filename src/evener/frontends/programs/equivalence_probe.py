"""A forked replica for comparisons: it computes few samples in float64, with the same random numbers on all ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from evener.comm.group import Group
from evener.data.fingerprint import print_of
from evener.data.loader import seed_all
from evener.frontends.programs.batch_parts import BatchPart, part_of
from evener.frontends.programs.forked_replica import BACKGROUND_SECONDS, ForkedReplica, leave_workers_alone
from evener.frontends.programs.prepared import rate_of
from evener.frontends.programs.unprepared_tensors import Outside, by_likelihood, outside_tensors
from evener.frontends.programs.work_division import Prepared
from evener.launch.rank_environment import RankEnvironment
from evener.parallel.gradient_hooks import late_hooks
from evener.records.decoding import decode_json, decode_msgpack
from evener.system.cores import unbind
from evener.tracer.nested import tensors_in
from evener.training.context import Arithmetic
from evener.training.differences import as_real
from evener.training.draws import SameDraws
from evener.training.narrowing import Narrowing

_MAX_BATCHES, _MAX_UPDATES = 8, 8
"""In two rounds."""
PARTS, OF_BATCH = "parts/", " of batch "
"""In names of tensors that replicas write: local gradients of the ranks; gradients of a batch after the first."""
_NICE, _SLIGHTLY_NICE = 19, 5
_FINDINGS = "findings"
_SAMPLED = 50_000
"""Number of elements of a gradient for the comparison of parts with the whole."""


class Facts(msgspec.Struct, frozen=True):
    """Facts of a replica that explain a difference.

    Attributes:
        outside: a number for every tensor outside the models when the replica began.
        outside_later: the same when it ended, the likeliest causes of a difference first.
        containers: names among these of lists, dictionaries and the like.
        late_hooks: names of weights with gradient hooks that were registered after `run.prepare`.
        rates: learning rates at the updates.
        rows: a number for every sample of the batches that counted.
        tolerance: larger tolerance of a double-precision comparison whose program casts to a lower one.
    """

    outside: dict[str, float] = {}
    outside_later: dict[str, float] = {}
    containers: tuple[str, ...] = ()
    late_hooks: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    rows: tuple[tuple[float, ...], ...] = ()
    tolerance: float = 0.0


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """How much replicas compute.

    Attributes:
        samples: largest number of samples of a batch.
        rounds: number of batches that lead to an update.
        seed: of the random numbers.
        is_wide: whether to compute in float64.
        in_background: whether the ranks continue to train.
        is_short: whether that is expected to take so little processor time that it need not wait for an idle CPU.
    """

    samples: int
    rounds: int
    seed: int = 0
    is_wide: bool = True
    in_background: bool = False
    is_short: bool = False


class Findings(msgspec.Struct, frozen=True):
    """Findings of a replica about the program.

    Attributes:
        drawn: shapes of its random numbers.
        is_delayed: whether it computes batches later than it loads them.
        has_others: whether it trains on batches from elsewhere while a divided one is current.
        seconds_per_sample: processor time of the losses and their gradients.
        seconds: processor time of the replica.
    """

    drawn: tuple[tuple[int, ...], ...] = ()
    is_delayed: bool = False
    has_others: bool = False
    seconds_per_sample: float = 0.0
    seconds: float = 0.0


class EquivalenceProbe(ForkedReplica):
    """A replica that computes a part of a few samples, or all of them.

    Args:
        models: of the program.
        group: the rank's; `begin` turns this object into the group of the replicas.
        path: of gradients, buffers and weights, as safetensors; the facts are beside it.
        extent: how much the replica computes.
        divide: returns the samples of every rank in a batch.
        optimizers: of the program.
        moves_parts: whether replicas exchange parts of tensors, which needs Gloo.
    """

    def __init__(
        self,
        models: Sequence[Prepared],
        group: Group,
        path: Path,
        extent: Extent,
        divide: Callable[[int], tuple[int, ...]],
        optimizers: Sequence[Optimizer],
        moves_parts: bool = False,
    ) -> None:
        super().__init__(group, path, extent.samples, moves_parts)
        self._models, self._divide, self._optimizers = models, divide, optimizers
        self._extent, self._is_wide = extent, extent.is_wide
        if extent.in_background:
            self.seconds = BACKGROUND_SECONDS
        self._narrowing = Narrowing()
        self._outside: dict[str, Outside] = {}
        self._handed: list[Tensor] = []
        self._rates: list[float] = []
        self._rows: list[tuple[float, ...]] = []
        self._wide = Arithmetic("fp64", group.device)
        self._values: dict[str, Tensor] = {}
        self._local: dict[int, list[Tensor]] = {}
        self._batches = self._updates = self._rounds = 0
        self._has_updated = self._has_left_pass = False
        self._samples, self._seconds = 0, 0.0
        self._began: float | None = None
        self._draws: Any = SameDraws()
        self._draws.notes = False

    def begin(self, env: RankEnvironment, token: str | None) -> None:
        """Join the other replicas, and draw the same random numbers as they do."""
        super().begin(env, token)
        if self._extent.in_background:
            _yield_processor(until_idle=not self._extent.is_short)
            leave_workers_alone()
        _compile_nothing()
        self._outside = outside_tensors([model.model for model in self._models])
        self._widen()
        seed_all(self._extent.seed)
        modes: list[Any] = [self._draws, self._narrowing]
        self._kept += [mode.__enter__() for mode in modes]

    def sizes(self, count: int) -> tuple[int, ...]:
        """Return the samples of every replica in a batch of `count`."""
        return (count,) if self.group.size == 1 else self._divide(count)

    def prepare_batch(self, batch: Any, part: BatchPart) -> Any:
        """Convert a batch to the precision of the replica."""
        converted = self._wide.prepare(batch) if self._is_wide else batch
        self._handed += tensors_in(converted)
        self._rows.append(row_prints(converted) if part.samples else ())
        return converted

    def begin_step(self, _owner: object, part: BatchPart) -> None:
        """Set the samples of the next random numbers."""
        sizes = self._divide(part.total)
        parts = [part_of(rank, sizes) for rank in range(len(sizes))]
        self._draws.part = part.first, part.loaded
        self._draws.parts = ((0, part.total), *((one.first, one.loaded) for one in parts))
        self._draws.round, self._draws.notes = self._rounds, True
        self._samples, self._began = self._samples + part.samples, time.process_time()

    def end_step(self, owner: object) -> None:
        """Do nothing, because `next_batch` ends a step."""

    def next_batch(self) -> None:
        """End the replica after enough batches, at best such that led to updates."""
        self._draws.notes = False  # random numbers of a loader
        self._stop_clock()
        self._rounds += self._has_updated
        self._has_updated = False
        if self._has_left_pass:
            self.end()
        is_long = self._batches >= _MAX_BATCHES * self._extent.rounds // 2
        if self._rounds >= self._extent.rounds or (is_long and self._values):
            self.end()
        self._batches += 1

    def end_pass(self, *, is_over: bool) -> None:
        """End a replica in the background before the program evaluates and saves.

        A loop that was left early may have been left by an error, so such a replica ends at the next batch.
        """
        if is_over and self._extent.in_background:
            self.end()
        self._has_left_pass = self._extent.in_background

    def before_update(self) -> None:
        """Count an update, and end the replica after enough of them, as a closure may never stop."""
        self._stop_clock()
        if self._updates >= _MAX_UPDATES * self._extent.rounds // 2:
            self.end()
        self._updates += 1
        self._has_updated = True
        self._rates += [rate_of(one) for one in self._optimizers]

    def write(self, path: Path) -> None:
        """Write the gradients, and the state after the last update."""
        for index, model in enumerate(self._models):
            for name, tensor in model.model.state_dict().items():
                self._values[f"{index}/state/{name}"] = _kept(tensor)
        self._values.update({f"{PARTS}{number}": self._of_all(number) for number in range(self._extent.rounds)})
        models = [model.model for model in self._models]
        later = outside_tensors(models, self._handed)
        facts = Facts(
            outside={name: one.print for name, one in self._outside.items()},
            outside_later={name: later[name].print for name in by_likelihood(self._outside, later)},
            containers=tuple(name for name, one in (self._outside | later).items() if one.is_container),
            late_hooks=tuple(name for model in models for name in late_hooks(model)),
            rates=tuple(self._rates),
            rows=tuple(self._rows),
            tolerance=self._narrowing.tolerance,
        )
        of_all = self.group.all_gather_bytes(msgspec.msgpack.encode(facts))
        self.path.with_suffix(".facts").write_bytes(msgspec.msgpack.encode(of_all))
        findings = Findings(
            drawn=tuple(sorted(self._draws.shapes)),
            is_delayed=self.is_delayed,
            has_others=self.has_others,
            seconds_per_sample=self._seconds / max(self._samples, 1),
            seconds=time.process_time(),
        )
        save_file(self._values, path, {_FINDINGS: msgspec.json.encode(findings).decode()})

    def _stop_clock(self) -> None:
        if self._began is not None:
            self._seconds, self._began = self._seconds + time.process_time() - self._began, None

    def _widen(self) -> None:
        for model in self._models:
            model.means.watch = partial(self._watch, model, f"{self._models.index(model)}/gradient/")
        if self._is_wide:
            torch.set_default_dtype(torch.float64)
            for model in self._models:
                self._wide.prepare_model(model.model)
            for optimizer in self._optimizers:
                for state in optimizer.state.values():
                    state.update(
                        {name: value for name, value in self._wide.prepare(dict(state)).items() if name != "step"}
                    )

    def _watch(self, model: Prepared, head: str, is_complete: bool) -> None:
        """Store the gradients of the first `backward()` of a round: the mean, and before it this replica's own."""
        tail = f"{OF_BATCH}{self._rounds + 1}" if self._rounds else ""
        if any(name.startswith(head) and name.endswith(tail or name) for name in self._values):
            return
        gradients = {name: p.grad for name, p in model.model.named_parameters() if p.grad is not None}
        if is_complete:
            self._values.update({f"{head}{name}{tail}": _kept(grad) for name, grad in gradients.items()})
        else:
            self._local.setdefault(self._rounds, []).append(model.means.own_gradients())

    def _of_all(self, number: int) -> Tensor:
        """Return a sample of the local gradients of every replica in a round, one row each."""
        local = self._local.get(number)
        flat = torch.cat(local) if local else torch.zeros(1, dtype=torch.float64)
        flat = flat[:: -(-len(flat) // _SAMPLED)].contiguous()
        rows = self.group.all_gather_bytes(flat.numpy().tobytes())
        return torch.from_numpy(np.stack([np.frombuffer(row) for row in rows]).copy())


def read_facts(path: Path) -> list[Facts]:
    """Read the facts of all replicas that wrote beside `path`."""
    rows: list[bytes] = decode_msgpack(path.with_suffix(".facts").read_bytes(), list[bytes])
    return [decode_msgpack(row, Facts) for row in rows]


def row_prints(batch: Any) -> tuple[float, ...]:
    """Return one number per sample of a batch whose tensors have the samples in dim 0; empty for other batches."""
    tensors = [as_real(tensor) for tensor in tensors_in(batch) if tensor.dim() and not tensor.is_sparse]
    if len({len(tensor) for tensor in tensors}) != 1:
        return ()
    return tuple(print_of([tensor[i] for tensor in tensors]) for i in range(len(tensors[0])))


def read_findings(path: Path) -> Findings:
    """Read the findings of the replica that wrote `path`."""
    with safe_open(path, "pt") as file:
        return decode_json(file.metadata()[_FINDINGS], Findings)


def _yield_processor(*, until_idle: bool) -> None:
    """Let this process compute less than others, or only while a CPU is idle; also on that of another local node."""
    unbind()
    os.nice(_NICE if until_idle else _SLIGHTLY_NICE)
    if until_idle and hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):  # a container may forbid it; being nice is nearly as good
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _compile_nothing() -> None:
    """Run functions under torch.compile without compiling, which would take longer than everything else."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    vars(torch)["compile"] = _as_it_is  # the import of its compilers takes a second
    if "torch._dynamo" in sys.modules:  # otherwise it reads the variable above on import
        torch.compiler.set_stance("force_eager")


def _as_it_is(function: Any = None, **_: Any) -> Any:
    """Replace `torch.compile`, as a function and as a decorator with options."""
    return _as_it_is if function is None else function


def _kept(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return as_real(dense).cpu().clone().contiguous()
