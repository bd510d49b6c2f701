"""Hugging Face's Trainer on nodes of unequal strength: a mixin before it.

class MyTrainer(EvenerTrainerMixin, Trainer): pass          or EvenerTrainer itself

Every node runs the script, started by `evener run` or torchrun; `per_device_train_batch_size` is that of all nodes
together. A model whose loss is told the number of items of a step divides its part's sum by that of all nodes; of
others the mean over the samples is weighed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from evener.data.tasks.load import needing_extras
from evener.frontends.integrations.reductions import Reductions
from evener.frontends.programs.joining import join
from evener.frontends.programs.totals import total_of
from evener.records.errors import InvalidInput

with needing_extras():
    from transformers import Trainer, TrainingArguments


class EvenerTrainerMixin:
    """Before `transformers.Trainer` among the bases of a class; every node makes one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        run = join()
        for given in (*args, *kwargs.values()):
            if isinstance(given, TrainingArguments):
                _find_device_anew(given)
        self._all = Reductions(run, "samples")  # asked for while the Trainer is made
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if trainer.model_accepts_loss_kwargs:
            self._all = Reductions(run, "sum")
        if run.size > 1 and trainer.args.gradient_accumulation_steps > 1 and not trainer.model_accepts_loss_kwargs:
            raise InvalidInput(
                "the Trainer loads all batches of a step ahead, which this model's loss is not told of: leave "
                "gradient_accumulation_steps at 1"
            )
        if not run.leader:
            trainer.args.save_strategy, trainer.args.disable_tqdm = "no", True

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As a Trainer; model and optimiser are those of all nodes."""
        trainer: Any = self
        trainer.model = self._all.once(trainer.model)
        base: Any = super()
        trainer.optimizer = self._all.once(base.create_optimizer(*args, **kwargs))
        return trainer.optimizer

    def get_train_dataloader(self) -> Any:
        """As a Trainer; every node loads its part of each batch."""
        base: Any = super()
        return self._all.loader(base.get_train_dataloader())

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        """Of all nodes' parts; a node's stand-ins do not count."""
        base: Any = super()
        own, run = base._get_num_items_in_batch(batch_samples, device), self._all.run
        if own is None or run.group.size == 1:
            return own
        has_samples = run.part is not None and run.part.samples > 0
        total = float(total_of(run.group, "items", np.asarray(float(own) if has_samples else 0.0), 0.0))
        return torch.tensor(total, device=own.device) if isinstance(own, Tensor) else total

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As a Trainer; the loss that is shown is that of all nodes."""
        base: Any = super()
        loss: Tensor = base.training_step(*args, **kwargs)
        return self._all.run.mean(loss) if self._all.run.size > 1 else loss

    def is_world_process_zero(self) -> bool:
        """Whether this node prints and writes files."""
        return self._all.run.leader

    def is_local_process_zero(self) -> bool:
        """Likewise."""
        return self._all.run.leader


def _find_device_anew(arguments: TrainingArguments) -> None:
    """They were made before this process joined, and may have taken it for one of torchrun's."""
    vars(arguments).pop("_setup_devices", None)
    assert arguments.device is not None


class EvenerTrainer(EvenerTrainerMixin, Trainer):
    """`transformers.Trainer` on nodes of unequal strength."""
