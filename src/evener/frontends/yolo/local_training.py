"""A training of Ultralytics as a `Task`: model, loss, data, optimiser and schedule, without its loop.

Nodes of a master train by themselves, each its share of every epoch, and the master merges what they have come to. The
loop is that of `evener.ps.node.engine`; what it computes is Ultralytics' own: its trainer is set up as for one process,
and its parts are used one by one. Every batch of a node is a step: gradients are not accumulated over several.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from ultralytics.models.yolo.classify.train import ClassificationTrainer
from ultralytics.models.yolo.detect.train import DetectionTrainer
from ultralytics.models.yolo.obb.train import OBBTrainer
from ultralytics.models.yolo.pose.train import PoseTrainer
from ultralytics.models.yolo.segment.train import SegmentationTrainer

from evener.frontends.yolo.averaged import AveragedNet, LossAndParts
from evener.frontends.yolo.data_place import described_here
from evener.frontends.yolo.local_data import LocalData
from evener.frontends.yolo.local_schedule import WarmUpSchedule
from evener.frontends.yolo.rank import alone
from evener.frontends.yolo.settings import in_a_sentence
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


class LocalTraining:
    """The parts of a training on one node, or on the machine that asked for it.

    Args:
        settings: of Ultralytics, `task` among them.
        architecture: the model's own description.
        data_dir: folder of the description of the data; None: Ultralytics knows its name.
        weights: a model to begin with; None: one that has learned nothing, or is sent its weights.
        folder: of results; None: one that is gone with this object.

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
            close=_silence()(trainer._close_dataloader_mosaic),
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
    found = {**settings, "save_dir": str(folder), "device": "cpu", "amp": False, "workers": 0, "deterministic": False}
    found |= {"nbs": settings["batch"], "model": settings.get("model", architecture.get("yaml_file", "model.yaml"))}
    if data_dir is not None:
        found["data"] = str(described_here(data_dir, settings["data"], folder))
    with alone(), _silence(), in_a_sentence():
        trainer = type(f"Local{base.__name__}", (base,), {"run_callbacks": _keep_silent})(overrides=found)
        trainer.model = trainer.get_model(cfg=architecture, weights=weights, verbose=False)
        trainer._setup_train()
    torch.set_num_threads(threads)  # Ultralytics takes those of the whole machine
    trainer.model.criterion = trainer.model.init_criterion()
    return trainer


def _keep_silent(_trainer: Any, _event: str) -> None:
    """Trackers of experiments would hear of every node's part."""


@contextmanager
def _silence() -> Iterator[None]:
    """Inside, Ultralytics tells errors alone: it would do so on every node."""
    logger = logging.getLogger("ultralytics")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
