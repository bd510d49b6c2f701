"""The `YOLO` class of Ultralytics, whose `train` uses several nodes.

On one node and under torchrun, each process trains with the user's own object. Local nodes are other processes: they
receive the model, its callbacks and the trainer class, pickled; what the leader has at the end comes back.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from evener.commands.pickled import pickled
from evener.commands.train import choose_nodes, is_torchrun
from evener.config.options import PATIENCE
from evener.frontends.programs.entry import take_environment
from evener.frontends.yolo.command import as_rank, on_local_nodes, require_loadable
from evener.frontends.yolo.overrides import TASKS, YoloConfig, read_overrides
from evener.frontends.yolo.rank import alone, yolo_rank
from evener.launch.rank_environment import RankEnvironment
from evener.records.errors import InvalidInput
from evener.records.record import TrainRecord

require_loadable()
with alone():
    import ultralytics.utils
    from ultralytics.cfg import get_cfg, get_save_dir
    from ultralytics.models.yolo.model import YOLO as PlainYOLO
    from ultralytics.nn.tasks import load_checkpoint
    from ultralytics.utils.torch_utils import parse_device

    from evener.frontends.yolo.settings import YoloTraining, plain_sentence

_METRICS = ".metrics.pickle"
"""File in the folder of a run: the metrics of its leader, until the process that started the run reads them."""
_PLAIN = (str, int, float, bool, Path, list, tuple)
_OPTIONS = ("nodes", "devices", "shares", "memory", "stationary", "elastic", "node_patience")


class YOLO(PlainYOLO):
    """A model of Ultralytics that trains on uneven nodes; all other calls are Ultralytics' own.

        from evener.yolo import YOLO

        model = YOLO("yolov8n.pt")
        results = model.train(data="coco8.yaml", epochs=3, nodes="1,0.5")

    Attributes:
        record: of the last training; None before it, and on a rank of torchrun that does not show the run.

    Raises:
        InvalidInput: Evener does not train such a model, or Ultralytics was imported first under torchrun.
    """

    record: TrainRecord | None = None

    def __init__(self, model: Any = "yolo26n.pt", task: str | None = None, verbose: bool = False) -> None:
        with alone():
            super().__init__(model=model, task=task, verbose=verbose)
        if not isinstance(self, YOLO):  # Ultralytics changes the class for other families
            family = type(self).__name__
            raise InvalidInput(f"{model} is a {family}, which Evener does not train: use ultralytics.{family}")

    def train(
        self,
        trainer: type | None = None,
        *,
        nodes: str | Sequence[float] | None = None,
        devices: str = "all",
        shares: str = "measured",
        memory: str | None = None,
        stationary: bool = False,
        elastic: bool | None = None,
        node_patience: float = PATIENCE,
        **settings: Any,
    ) -> Any:
        """Train on nodes of this machine, or as a rank of torchrun or `evener run`.

        The weights are those of one process. Callbacks run on the node that leads, in its process: under local nodes,
        what they change in the objects of this process is not seen here.

        Args:
            trainer: your own trainer class, of Ultralytics' for this task.
            nodes: relative speeds of local nodes, such as "1,0.5"; None: one node per GPU of this machine.
            devices: "all", "cpu", or devices such as "cuda:0,cuda:1"; Ultralytics' `device` is understood as well.
            shares: "measured", "equal", or relative ones such as "7,2,1".
            memory: of every node, such as "4GB" or "4GB,512MB".
            stationary: whether every node keeps to images of its own.
            elastic: whether the run goes on without lost nodes; None: where it can.
            node_patience: seconds of silence after which a node counts as lost. `patience` is Ultralytics' early stop.
            settings: of Ultralytics: data, epochs, batch ...

        Returns:
            The metrics of the best weights, as from Ultralytics; the model has these weights.

        Raises:
            InvalidInput: a setting is unknown, or does not go with several nodes.
            EvenerError: the run fails, as `evener yolo` does.
        """
        if "RANK" in os.environ and ultralytics.utils.RANK != -1:
            raise InvalidInput("under torchrun, import evener.yolo before anything of ultralytics")
        if self.task not in TASKS:
            raise InvalidInput(f"the task of {self.model_name} is {self.task}; Evener trains {', '.join(TASKS)}")
        settings, devices = _with_devices(settings, devices, nodes)
        settings = self._with_folder(settings)
        words = [f"{key}={value}" for key, value in settings.items() if isinstance(value, _PLAIN) and value != ""]
        config = YoloConfig(
            overrides=("train", f"model={self.overrides['model']}", *words),
            local_nodes=nodes if nodes is None or isinstance(nodes, str) else ",".join(map(str, nodes)),
            devices=devices,
            shares=shares,
            memory=memory,
            stationary=stationary,
            elastic=elastic,
            patience=node_patience,
            goes_on=True,
        )
        read_overrides(config.overrides)
        training = YoloTraining(self, settings, Path(settings["save_dir"]), trainer)
        if (env := take_environment()) is not None:
            _rank_here(training, env, config)  # `evener run` shows the run
        elif is_torchrun(config):
            self.record = as_rank(config, partial(_rank_here, training), _folder_of)
        elif nodes is None and len(choose_nodes(config)) == 1:
            self.record = on_local_nodes(config, partial(_rank_here, training), _folder_of)
        else:
            advice = "define them in a file, and open what they need in the first callback"
            packed = pickled(_without_run(training), "the model, its callbacks or its trainer", advice)
            config = msgspec.structs.replace(config, goes_on=False)  # it goes on here alone
            self.record = on_local_nodes(config, partial(_rank_in_process, packed), _folder_of)
            self._take_results(training.folder)
        return self.metrics

    def tune(self, *arguments: Any, **settings: Any) -> Any:
        """Search for settings as Ultralytics does, on one device. Raises InvalidInput: nodes are named."""
        if named := [name for name in _OPTIONS if name in settings]:
            raise InvalidInput(f"tune takes no {named[0]}: its trials run on one device, as those of Ultralytics")
        return super().tune(*arguments, **settings)

    def _with_folder(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return `settings` with the folder of the results, that of the checkpoint if a training is resumed."""
        resume = settings.get("resume", False)
        if isinstance(settings.get("data"), list | tuple):
            raise InvalidInput("data= names several data sets: train on one after the other")
        if resume is True:
            if not self.ckpt or self.ckpt.get("epoch", -1) < 0 or self.ckpt.get("optimizer") is None:
                raise InvalidInput(f"{self.ckpt_path or self.cfg} holds no training to resume")
            resume = str(self.ckpt_path)
        if resume and not Path(resume).is_file():
            raise InvalidInput(f"there is no checkpoint to go on from at {resume}: name PATH/weights/last.pt")
        try:
            chosen = {**self.overrides, **settings, "resume": resume, "task": self.task, "mode": "train"}
            folder = Path(resume).resolve().parents[1] if resume else get_save_dir(get_cfg(overrides=chosen))
            get_cfg(overrides=chosen)
        except (SyntaxError, TypeError, ValueError, OSError, AssertionError) as error:
            raise InvalidInput(f"Ultralytics: {plain_sentence(error)}") from error
        return {**settings, "resume": resume, "save_dir": str(folder)}

    def _take_results(self, folder: Path) -> None:
        """Have the weights and metrics of a training in other processes, as after one in this process."""
        weights, metrics = folder / "weights", folder / _METRICS
        best, last = weights / "best.pt", weights / "last.pt"
        self.model, self.ckpt = load_checkpoint(best if best.exists() else last)
        self.predictor = None
        self.overrides = self._reset_ckpt_args(self.model.args)
        self.metrics = self.ckpt.get("train_metrics")
        if metrics.exists():
            self.metrics = pickle.loads(metrics.read_bytes())
            metrics.unlink()
        self.trainer = SimpleNamespace(metrics=self.metrics)
        self._point_to(folder)

    def _point_to(self, folder: Path) -> None:
        """Have the trainer name the files of the run, where this rank has written into a folder that is gone."""
        weights = folder / "weights"
        files = {"best": weights / "best.pt", "last": weights / "last.pt", "csv": folder / "results.csv"}
        vars(self.trainer).update(files, save_dir=folder, wdir=weights)
        self.overrides["model"] = str(files["best"] if files["best"].exists() else files["last"])


def _folder_of(config: YoloConfig) -> Path:
    return Path(read_overrides(config.overrides)["save_dir"])


def _with_devices(
    settings: dict[str, Any], devices: str, nodes: str | Sequence[float] | None
) -> tuple[dict[str, Any], str]:
    """Return the settings without Ultralytics' `device`, and the devices of the nodes."""
    settings = dict(settings)
    device = parse_device(settings.pop("device", None) or "")
    if not device:
        return settings, devices
    if nodes is not None or devices != "all":
        raise InvalidInput(f"device={device} and {'devices' if nodes is None else 'nodes'} name nodes twice: name one")
    return settings, ",".join(f"cuda:{one}" if one.isdecimal() else one for one in device.split(","))


class _SentTraining(NamedTuple):
    """A training for the processes of nodes: the model with its callbacks, the settings, and the trainer class."""

    model: YOLO
    settings: dict[str, Any]
    trainer: type | None


def _without_run(training: YoloTraining) -> _SentTraining:
    """Return what processes of nodes need: of earlier trainings, only the weights."""
    model = copy.copy(training.model)
    model.trainer = model.predictor = model.metrics = None
    model.ckpt = {"epoch": -1} if model.ckpt else {}
    return _SentTraining(model, training.settings, training.trainer)


def _rank_here(training: YoloTraining, env: RankEnvironment, config: YoloConfig) -> None:
    """Run a rank with the user's own object."""
    yolo_rank(env, config, read=partial(_chosen, training))
    training.model._point_to(_folder_of(config))


def _rank_in_process(packed: bytes, env: RankEnvironment, config: YoloConfig) -> None:
    """Run a rank of a process that this module's `train` started; the leader leaves the metrics."""
    with alone():
        sent: _SentTraining = pickle.loads(packed)
    yolo_rank(env, config, read=partial(_chosen, YoloTraining(sent.model, sent.settings, Path(), sent.trainer)))
    own = sent.model.trainer
    if sent.model.metrics is not None and own is not None and own.trainer_rank.leads:
        (_folder_of(config) / _METRICS).write_bytes(pickle.dumps(sent.model.metrics))


def _chosen(training: YoloTraining, config: YoloConfig) -> YoloTraining:
    """Return the training with the folder of `config`; from its last epoch, if the run begins again without nodes."""
    words = read_overrides(config.overrides)
    settings = {**training.settings, "save_dir": words["save_dir"]}
    if config.lost and "resume" in words:
        settings = {"resume": words["resume"], "save_dir": words["save_dir"]}
    return training._replace(settings=settings, folder=Path(words["save_dir"]))
