"""Lightning's Trainer and Fabric on nodes of unequal strength, by one argument.

trainer = lightning.Trainer(strategy=EvenerStrategy(), ...)
fabric = lightning.Fabric(strategy=EvenerFabricStrategy())

Every node runs the script, started by `evener run`; the batch size is that of all nodes together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from evener.data.tasks.load import needing_extras
from evener.frontends.integrations.reductions import Reductions
from evener.frontends.programs.batch_parts import Count
from evener.frontends.programs.entry import join

with needing_extras():
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy as FabricSingleDevice
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import SingleDeviceStrategy


class _OnRun:
    """The common part of both strategies: their run, and its reductions."""

    _all: Reductions

    def _join(self, count: Count) -> Any:
        run = join()
        self._all = Reductions(run, count)
        rank_zero_only.rank = run.rank
        return run

    @property
    def is_global_zero(self) -> bool:
        """Whether this node prints and writes files."""
        return self._all.run.leader

    def barrier(self, *_args: Any, **_kwargs: Any) -> None:
        """Wait for all nodes."""
        self._all.run.group.barrier()

    def broadcast(self, obj: Any, *_source: Any, **_named: Any) -> Any:
        """Return the first node's object."""
        return self._all.broadcast(obj)

    def all_gather(self, tensor: Tensor, *_how: Any, **_named: Any) -> Tensor:
        """Raise InvalidInput on several nodes, whose parts differ in size; `evener.gather` supports that."""
        return self._all.rows(tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all nodes, or any of them, decide so."""
        return self._all.decided(decision, all)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader, of whose batches every node loads its part."""
        return self._all.loader(dataloader)


class EvenerStrategy(_OnRun, SingleDeviceStrategy):
    """A strategy for `lightning.Trainer` that divides batches unevenly and trains the same as one process.

    Args:
        count: divisor of the mean loss: "samples", "sum" for none, or a function of a batch.
    """

    def __init__(self, count: Count = "samples") -> None:
        run = self._join(count)
        super().__init__(device=run.device)
        self.global_rank, self.world_size = run.rank, run.size

    def setup(self, trainer: Any) -> None:
        """Set up the trainer, without its distributed sampler."""
        trainer._accelerator_connector.use_distributed_sampler = False  # batches are divided already
        if not any(isinstance(one, _Epochs) for one in trainer.callbacks):
            trainer.callbacks.append(_Epochs(self._all))
        super().setup(trainer)

    @property
    def is_distributed(self) -> bool:
        """Whether values logged with `sync_dist` have to be reduced."""
        return self._all.run.size > 1

    def _setup_model(self, model: nn.Module) -> nn.Module:
        made: nn.Module = self._all.once(model)
        return made

    def setup_optimizers(self, trainer: Any) -> None:
        """Set up and prepare the optimizers."""
        super().setup_optimizers(trainer)
        for optimizer in list[Any](self.optimizers):
            self._all.once(optimizer)

    def reduce(self, tensor: Any, *_group: Any, reduce_op: Any = "mean", **_named: Any) -> Any:
        """Return a sum, or a mean over samples within a step and over nodes elsewhere."""
        return self._all.reduced(tensor, reduce_op)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step, in which values belong to the current batch."""
        with self._all.inside():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a validation step, in which values belong to the current batch."""
        with self._all.inside():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a test step, in which values belong to the current batch."""
        with self._all.inside():
            return super().test_step(*args, **kwargs)


class _Epochs(Callback):
    """A callback that begins epochs of the run."""

    def __init__(self, reductions: Reductions) -> None:
        self._run = reductions.run

    def on_train_epoch_start(self, trainer: Any, *_module: Any) -> None:
        """Begin an epoch of the run."""
        self._run.begin_epoch(trainer.current_epoch, is_last=trainer.current_epoch + 1 == trainer.max_epochs)


class EvenerFabricStrategy(_OnRun, FabricSingleDevice):
    """A strategy for `lightning.Fabric`; its arguments are those of EvenerStrategy."""

    def __init__(self, count: Count = "samples") -> None:
        run = self._join(count)
        super().__init__(device=run.device)
        self.global_rank, self.world_size = run.rank, run.size
        self._backward_sync_control = _NoSync(self._all)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepare a model."""
        made: nn.Module = self._all.once(module)
        return made

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Prepare an optimizer."""
        made: Optimizer = self._all.once(optimizer)
        return made

    def all_reduce(self, tensor: Any, *_group: Any, reduce_op: Any = "mean", **_named: Any) -> Any:
        """Return a mean over the samples of the batch, or a sum."""
        with self._all.inside():
            return self._all.reduced(tensor, reduce_op)


class _NoSync:
    """The interface behind `fabric.no_backward_sync`."""

    def __init__(self, reductions: Reductions) -> None:
        self._run = reductions.run

    @contextmanager
    def no_backward_sync(self, _module: nn.Module, enabled: bool = True) -> Iterator[None]:
        """Keep gradients on this node inside."""
        if not enabled:
            yield
            return
        with self._run.no_sync():
            yield
