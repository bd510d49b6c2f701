"""A training of Ultralytics as a `Task`: model, loss, data, optimiser and schedule, without its loop.

Nodes of a master train independently, each on its share of every epoch, and the master merges their weights. The
loop is that of `evener.ps.node.engine`; what it computes is Ultralytics' own: its trainer is set up as for one process,
and its parts are used one by one. Every batch of a node is a step: gradients are not accumulated over several.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from ultralytics.models.yolo.classify.train import ClassificationTrainer
from ultralytics.models.yolo.detect.train import DetectionTrainer
from ultralytics.models.yolo.obb.train import OBBTrainer
from ultralytics.models.yolo.pose.train import PoseTrainer
from ultralytics.models.yolo.segment.train import SegmentationTrainer

from evener.data.loader import Collate
from evener.frontends.yolo.data_place import SENT_IMAGES, described_here
from evener.frontends.yolo.rank import alone
from evener.frontends.yolo.settings import in_a_sentence, quiet_ultralytics
from evener.frontends.yolo.sharded_loader import draw_from_all, keep_images, spare_bytes
from evener.records.task import Task

_TRAINERS: dict[str, type[Any]] = {
    "detect": DetectionTrainer,
    "segment": SegmentationTrainer,
    "classify": ClassificationTrainer,
    "pose": PoseTrainer,
    "obb": OBBTrainer,
}
_CLIP_NORM = 10.0
"""Of the whole gradient, as in Ultralytics' optimizer_step."""


LossAndParts = tuple[Tensor, dict[str, Tensor]]
"""The loss whose gradient is taken, and its parts without gradients, as a mean over the images."""


class AveragedNet(nn.Module):
    """A model that trains, beside the average that is evaluated.

    Args:
        model: of Ultralytics, with its settings.
        decay: (updates) -> part of the average that is kept.
        prepare: makes a loaded batch ready for the model.

    Attributes:
        model: itself.
        average: of its weights so far.
        updates: steps of all nodes together.
    """

    updates: Tensor

    def __init__(self, model: Any, decay: Callable[[int], float], prepare: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.average = _without_parameters(deepcopy(model)).eval()
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self._decay, self._prepare = decay, prepare
        self._pairs: tuple[list[Tensor], list[Tensor]] | None = None

    def forward(self, batch: Any) -> LossAndParts:
        """The loss of a batch: of the model where it trains, of the average where it is evaluated."""
        batch = self._prepare(batch)
        chosen = self.model if self.training else self.average
        vector, parts = self.model.loss(batch, chosen.predict(batch["img"]))
        return vector.sum(), parts

    def train(self, mode: bool = True) -> AveragedNet:
        """Have the model learn, or be evaluated; the average never learns."""
        super().train(mode)
        self.average.eval()
        return self

    @torch.no_grad()
    def follow(self) -> None:
        """Move the average towards the model, which has made a step."""
        self.updates += 1
        averages, values = self._pairs or self._paired()
        torch._foreach_lerp_(averages, values, 1 - self._decay(int(self.updates)))

    def _paired(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of the average and those of the model, which stay the same objects."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        averages = {name: tensor for name, tensor in self.average.named_buffers() if tensor.is_floating_point()}
        self._pairs = list(averages.values()), [tensors[name].data for name in averages]
        return self._pairs


def _without_parameters(model: Any) -> Any:
    """`model`, whose parameters have become buffers."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
    return model


class LocalData(Dataset[Any]):
    """Images as they are in an epoch; batches are ((batch of Ultralytics,), no targets).

    Args:
        dataset: of Ultralytics.
        collate: samples of it -> a batch of it.
        closing: epoch in which mosaics are closed, from 0; None: never.
        close: does so.
        begin: is called with the number of every epoch.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        *,
        closing: int | None = None,
        close: Callable[[], None] | None = None,
        begin: Callable[[int], None] | None = None,
    ) -> None:
        self._dataset, self._collate = dataset, collate
        self._closing, self._close, self._begin = closing, close, begin
        self._epoch: int | None = None
        keep_images(dataset, spare_bytes())
        draw_from_all(dataset)

    def __len__(self) -> int:
        """Images."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """An image, transformed, with its labels."""
        return self._dataset[index]

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`; mosaics that were closed stay closed."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        if self._begin is not None:
            self._begin(epoch)
        if self._close is not None and self._closing is not None and epoch >= self._closing:
            self._close()
            self._close = None
            draw_from_all(self._dataset)

    def collate_fn(self, samples: list[Any]) -> tuple[tuple[Any], tuple[()]]:
        """A batch as a task has it: arguments of the model, and targets."""
        return (self._collate(samples),), ()


class WarmUpSchedule(LRScheduler):
    """Rates rise (those of biases fall) while it warms up, then follow the epochs; momentum rises too.

    Args:
        optimizer: of `trainer`.
        trainer: of Ultralytics, which knows the settings.
        batches: of an epoch.
    """

    def __init__(self, optimizer: Optimizer, trainer: Any, batches: int) -> None:
        self._trainer, self._batches = trainer, batches
        self._warm_up = trainer._get_warmup_iterations(batches)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of every parameter group in the next step."""
        step, args = self.last_epoch, self._trainer.args
        factor = self._trainer.lf(step // self._batches)
        rates: list[float | Tensor] = [float(group["initial_lr"]) * factor for group in self.optimizer.param_groups]
        if not self._warm_up or step > self._warm_up:
            return rates
        for group in self.optimizer.param_groups:
            if "momentum" in group:
                group["momentum"] = self._between(step, args.warmup_momentum, args.momentum)
        firsts = [args.warmup_bias_lr if g.get("param_group") == "bias" else 0.0 for g in self.optimizer.param_groups]
        return [self._between(step, first, float(rate)) for first, rate in zip(firsts, rates, strict=True)]

    def _between(self, step: int, first: float, last: float) -> float:
        return float(np.interp(step, [0, self._warm_up], [first, last]))


class LocalTraining:
    """The parts of a training on one node, or on the machine that asked for it.

    Args:
        settings: of Ultralytics, `task` among them.
        architecture: the model's own description.
        data_dir: folder of the description of the data; None: Ultralytics knows its name.
        weights: a model to begin with; None: one that has learned nothing, or is sent its weights.
        folder: of results; None for a temporary one.

    Attributes:
        trainer: of Ultralytics, set up, whose loop is not run.
        net: model and average.
        task: all of it for Evener.

    Raises:
        InvalidInput: Ultralytics cannot read the data.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        architecture: dict[str, Any],
        data_dir: Path | None = None,
        *,
        weights: Any = None,
        folder: Path | None = None,
    ) -> None:
        if folder is None:
            self._own_folder = tempfile.TemporaryDirectory(prefix="evener-yolo-")
            folder = Path(self._own_folder.name)
        self.trainer = _set_up(settings, architecture, data_dir, weights, folder)
        args, loaders = self.trainer.args, (self.trainer.train_loader, self.trainer.test_loader)
        self._batches = -(-len(loaders[0].dataset) // args.batch)
        self.net = AveragedNet(self.trainer.model, self.trainer.ema.decay, self._prepare)
        self.trainer.optimizer.register_step_post_hook(lambda *_: self.net.follow())
        self.task = Task(
            name=f"{args.task} {architecture.get('yaml_file', args.model)}",
            model=lambda: self.net,
            loss=_loss,
            train_data=self._train_data,
            validation_data=self._validation_data if args.val else None,
            optimizer=self._optimizer,
            scheduler=lambda optimizer, _: WarmUpSchedule(optimizer, self.trainer, self._batches),
            batch_size=args.batch,
            epochs=args.epochs,
            correct=None,
            clip_norm=_CLIP_NORM,
        )

    def zero_losses(self) -> dict[str, Tensor]:
        """Parts of the loss by name, none of which has been computed yet."""
        data = self._train_data()
        self.net.eval()
        with torch.no_grad():
            (batch,), _ = data.collate_fn([data[0], data[1 % len(data)]])
            _, parts = self.net(batch)
        return {name: torch.zeros_like(value) for name, value in parts.items()}

    def _train_data(self) -> LocalData:
        trainer = self.trainer
        closing = trainer.epochs - trainer.args.close_mosaic if trainer.args.close_mosaic else None
        return LocalData(
            trainer.train_loader.dataset,
            trainer.train_loader.collate_fn,
            closing=closing,
            close=quiet_ultralytics()(trainer._close_dataloader_mosaic),
            begin=self._begin_epoch,
        )

    def _validation_data(self) -> LocalData:
        """Square images: a node is asked for any of them, in batches of any size."""
        dataset = copy.copy(self.trainer.test_loader.dataset)
        dataset.rect = False
        return LocalData(dataset, self.trainer.test_loader.collate_fn)

    def _begin_epoch(self, epoch: int) -> None:
        """Have the criterion be that of `epoch`."""
        criterion: Any = self.trainer.model.criterion
        while getattr(criterion, "updates", epoch) < epoch:
            criterion.update()

    def _optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """The trainer's own: it knows which parameters are of which kind."""
        wanted = {id(parameter) for parameter in parameters if parameter.requires_grad}
        optimizer: Optimizer = self.trainer.optimizer
        assert wanted <= {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return optimizer

    def _prepare(self, batch: Any) -> Any:
        self.trainer.device = next(self.net.parameters()).device
        return self.trainer.preprocess_batch(batch)


def _loss(outputs: LossAndParts, _targets: Any) -> Tensor:
    """With the value that Ultralytics shows, a mean over images, and the gradient that it takes, a sum over them."""
    total, parts = outputs
    shown = torch.stack(list(parts.values())).sum()
    return shown + (total - total.detach())


def _set_up(
    settings: dict[str, Any], architecture: dict[str, Any], data_dir: Path | None, weights: Any, folder: Path
) -> Any:
    """The trainer of a task with model, data and optimiser. Raises InvalidInput."""
    base, threads = _TRAINERS[settings["task"]], torch.get_num_threads()
    overrides = {
        **{name: value for name, value in settings.items() if name != SENT_IMAGES},
        "save_dir": str(folder),
        "device": "cpu",
        "amp": False,
        "workers": 0,
        "deterministic": False,
    }
    overrides |= {"nbs": settings["batch"], "model": settings.get("model", architecture.get("yaml_file", "model.yaml"))}
    if data_dir is not None:
        overrides["data"] = str(described_here(data_dir, settings["data"], folder, settings.get(SENT_IMAGES)))
    with alone(), quiet_ultralytics(), in_a_sentence():
        trainer = type(f"Local{base.__name__}", (base,), {"run_callbacks": keep_silent})(overrides=overrides)
        trainer.model = trainer.get_model(cfg=architecture, weights=weights, verbose=False)
        trainer._setup_train()
    torch.set_num_threads(threads)  # Ultralytics takes those of the whole machine
    trainer.model.criterion = trainer.model.init_criterion()
    return trainer


def keep_silent(_trainer: Any, _event: str) -> None:
    """Trackers of experiments would hear of every node's part."""
