"""What plain DistributedDataParallel makes of the programs: two equal ranks, the nearest to what a user would type.

A program is given a run that does with PyTorch's own means what comes closest to each of Evener's lines. Where DDP's
error message advises one of its options, that is tried, too. Results are not compared with those of one process, as
samplers and statistics differ: DDP trains a program if both ranks come to its end, with the same weights.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from evener.frontends.programs import entry
from evener.tracer.nested import map_tensors
from programs.suite import Outcome, perform, plain, source

DIFFER = "the ranks end with different weights"
_RANKS = 2
_SECONDS = 60.0
"""That a program may take."""
_ADVISED: tuple[dict[str, Any], ...] = ({}, {"find_unused_parameters": True}, {"static_graph": True})
"""Options that DDP's error messages advise."""
_OF_PACKAGES: dict[str, dict[str, str]] = {
    "accelerate_script": {},
    "hf_trainer": {},
    "lightning_fabric": {"devices=1": 'devices=2, strategy="ddp"'},
    "lightning_trainer": {"L.Trainer(": 'L.Trainer(strategy="ddp", devices=2, '},
}
"""Programs whose packages divide them by themselves, and what is written in them for that."""
_KEPT = ("num_workers", "collate_fn", "drop_last", "worker_init_fn")


class _Ddp(DistributedDataParallel):
    """With attributes, layers and state dict of the model, which a user would write `.module` for."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, index: Any) -> Any:
        return cast(Any, self.module)[index]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)


class PlainRun:
    """Has the methods of `evener.frontends.programs.run.Run`, with DDP, DistributedSampler and all-reduce.

    Args:
        options: of DistributedDataParallel.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
        self.leader = self.rank == 0
        self.models: list[nn.Module] = []
        self._options = options
        self._samplers: list[DistributedSampler[Any]] = []

    def prepare(self, *things: Any, count: object = "samples") -> Any:
        """Wrapped, or divided."""
        made = [self._prepared(thing) for thing in things]
        return made[0] if len(made) == 1 else made

    def _prepared(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module) and any(p.requires_grad for p in thing.parameters()):
            self.models.append(_Ddp(thing, **self._options))
            return self.models[-1]
        if isinstance(thing, DataLoader) and type(thing.sampler) in (RandomSampler, SequentialSampler):
            return self._divided(thing)
        return thing  # of an own sampler, or a stream, DDP knows no parts: every rank goes through it

    def _divided(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
            return loader
        is_shuffled = isinstance(loader.sampler, RandomSampler)
        dataset: Any = loader.dataset
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, self.size, self.rank, shuffle=is_shuffled)
        self._samplers.append(sampler)
        kept = {name: getattr(loader, name) for name in _KEPT}
        return DataLoader(loader.dataset, max(1, loader.batch_size // self.size), sampler=sampler, **kept)

    def epochs(self, rounds: Any) -> Iterator[Any]:
        """Every sampler is told its epoch."""
        for index, value in enumerate(range(rounds) if isinstance(rounds, int) else rounds):
            for sampler in self._samplers:
                sampler.set_epoch(index)
            yield value

    def share(self, batch: Any, dim: int = 0, count: object = "samples") -> Any:
        """Equal parts."""
        return map_tensors(batch, lambda x: x.chunk(self.size, dim)[self.rank] if x.dim() > dim else x)

    def sum(self, value: Any) -> Any:
        """Of all ranks."""
        total = torch.as_tensor(value, dtype=torch.float64).detach().clone()
        dist.all_reduce(total)
        return total.to(value.dtype) if isinstance(value, Tensor) else type(value)(total.item())

    def mean(self, value: Any) -> Any:
        """Of the ranks' means."""
        return self.sum(value) / self.size

    def ratio(self, numerator: Tensor, denominator: Any) -> Tensor:
        """Of this rank."""
        return numerator / float(denominator)

    def gather(self, rows: Tensor) -> Tensor:
        """Differentiable, of equal parts."""
        gather: Any = all_gather
        return torch.cat(gather(rows))

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Without DDP's prefix."""
        return {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Of all models."""
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(cast(DistributedDataParallel, model).no_sync())
            yield


def text_of(name: str) -> str:
    """A program as DDP is given it."""
    if name not in _OF_PACKAGES:
        return source(name)
    text = plain(source(name))
    for before, after in _OF_PACKAGES[name].items():
        text = text.replace(before, after)
    return text


def under_ddp(name: str, folder: Path) -> Outcome:
    """What DDP makes of a program: failed with the sentence, or trained, with the weights of all ranks."""
    for options in _ADVISED:
        with tempfile.TemporaryDirectory() as scratch:
            found = _tried(name, options, Path(scratch))
        if not found.sentence:
            break
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tuple(found), folder / f"{name}.pt")
    return found


def _tried(name: str, options: dict[str, Any], folder: Path) -> Outcome:
    context = get_context("forkserver")
    context.set_forkserver_preload(["programs.suite"])
    port = str(_free_port())
    words = [(name, options, str(folder), str(rank), port) for rank in range(_RANKS)]
    ranks: list[BaseProcess] = [context.Process(target=_rank_of_ddp, args=some) for some in words]
    for rank in ranks:
        rank.start()
    _wait(ranks)
    found = [Outcome(*torch.load(path)) for path in sorted(folder.glob("*.pt"))]
    failed = next((one for one in found if one.sentence), None)
    if failed is not None or len(found) < _RANKS:
        return failed or Outcome({}, f"a rank ended without a word, or took more than {_SECONDS:.0f} s")
    first, *others = (one.values for one in found)
    is_alike = all(torch.allclose(value, other[key]) for other in others for key, value in first.items())
    return Outcome(first, "" if is_alike else DIFFER)


def _wait(ranks: Sequence[BaseProcess]) -> None:
    """Until all have ended, which they are made to where one of them hangs."""
    for rank in ranks:
        rank.join(_SECONDS)
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
            rank.join()


def _rank_of_ddp(name: str, options: dict[str, Any], folder: str, rank: str, port: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(_RANKS), "LOCAL_WORLD_SIZE": str(_RANKS)}
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "plain"}
    _silence()
    dist.init_process_group("gloo")
    run = PlainRun(options)
    runs: list[Any] = entry._runs
    runs[:] = [run]
    try:
        perform(text_of(name), name)
        found = Outcome({key: value for i, model in enumerate(run.models) for key, value in _weights(i, model)})
    except Exception as error:  # whatever a program raises is what is shown
        found = Outcome({}, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
    torch.save(tuple(found), Path(folder) / f"{rank}.pt")
    os._exit(0)


def _weights(index: int, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, weight in model.named_parameters():
        yield f"{index}/{name}", weight.detach().clone()


def _silence() -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
