"""Hugging Face's Trainer on nodes of unequal strength, by a mixin.

class MyTrainer(EvenerTrainerMixin, Trainer): pass          or EvenerTrainer itself

Every node runs the script, started by `evener run` or torchrun; `per_device_train_batch_size` is that of all nodes
together. A model whose loss takes the number of items of a step divides its sum by that of all nodes; for other models
the means over samples are weighed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from evener.data.tasks.load import needing_extras
from evener.frontends.integrations.reductions import Reductions
from evener.frontends.programs.entry import join
from evener.frontends.programs.totals import total_of
from evener.records.errors import InvalidInput

with needing_extras():
    from transformers import Trainer, TrainingArguments


class EvenerTrainerMixin:
    """A mixin before `transformers.Trainer` in the bases of a class; every node creates one trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        run = join()
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, TrainingArguments):
                _reset_device(argument)
        self._all = Reductions(run, "samples")  # the Trainer uses it while it is made
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if trainer.model_accepts_loss_kwargs:
            self._all = Reductions(run, "sum")
        if run.size > 1 and trainer.args.gradient_accumulation_steps > 1 and not trainer.model_accepts_loss_kwargs:
            raise InvalidInput(
                "the Trainer loads all batches of a step ahead, whose number this model's loss does not take: leave "
                "gradient_accumulation_steps at 1"
            )
        if not run.leader:
            trainer.args.save_strategy, trainer.args.disable_tqdm = "no", True

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer; prepare model and optimizer for all nodes."""
        trainer: Any = self
        trainer.model = self._all.once(trainer.model)
        base: Any = super()
        trainer.optimizer = self._all.once(base.create_optimizer(*args, **kwargs))
        return trainer.optimizer

    def get_train_dataloader(self) -> Any:
        """Return the loader, of whose batches every node loads its part."""
        base: Any = super()
        return self._all.loader(base.get_train_dataloader())

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        """Return the number of items over all nodes, without stand-ins."""
        base: Any = super()
        items, run = base._get_num_items_in_batch(batch_samples, device), self._all.run
        if items is None or run.group.size == 1:
            return items
        has_samples = run.part is not None and run.part.samples > 0
        total = float(total_of(run.group, "items", np.asarray(float(items) if has_samples else 0.0), 0.0))
        return torch.tensor(total, device=items.device) if isinstance(items, Tensor) else total

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run a training step and return the mean loss of all nodes."""
        base: Any = super()
        loss: Tensor = base.training_step(*args, **kwargs)
        return self._all.run.mean(loss) if self._all.run.size > 1 else loss

    def is_world_process_zero(self) -> bool:
        """Whether this node prints and writes files."""
        return self._all.run.leader

    def is_local_process_zero(self) -> bool:
        """Whether this node prints and writes files."""
        return self._all.run.leader


def _reset_device(arguments: TrainingArguments) -> None:
    """Let the arguments detect the device again, as they may have read torchrun's variables."""
    vars(arguments).pop("_setup_devices", None)
    assert arguments.device is not None


class EvenerTrainer(EvenerTrainerMixin, Trainer):
    """`transformers.Trainer` on nodes of unequal strength."""
