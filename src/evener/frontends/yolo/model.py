"""The `YOLO` class of Ultralytics, whose `train` uses several nodes.

On one node and under torchrun, each process trains with the user's own object. Local nodes are other processes: they
receive the model, its callbacks and the trainer class, pickled; what the leader has at the end comes back.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from torch import nn

from evener.agreements.settings import Compression
from evener.commands.pickled import pickled
from evener.commands.train import choose_nodes, is_torchrun
from evener.config.options import PATIENCE, NodesConfig
from evener.frontends.programs.entry import is_rank, take_environment
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.yolo.callbacks import has_user_callbacks
from evener.frontends.yolo.command import LICENCE, as_rank, on_local_nodes, require_loadable
from evener.frontends.yolo.overrides import TASKS, YoloConfig, checkpoint_of, read_overrides, run_config
from evener.frontends.yolo.rank import alone, yolo_rank
from evener.launch.rank_environment import RankEnvironment
from evener.records.agreement import AgreementName
from evener.records.errors import InvalidInput, TrainingFailed
from evener.records.record import TrainRecord
from evener.records.search_record import SearchRecord
from evener.search.halving import Pruning
from evener.search.options import DEFAULT_AHEAD
from evener.system import accelerators
from evener.system.signals import STOP_SIGNALS
from evener.training.console import open_console

require_loadable()
with alone():
    from ultralytics.cfg import get_cfg, get_save_dir
    from ultralytics.engine.trainer import BaseTrainer
    from ultralytics.models.yolo.model import YOLO as PlainYOLO
    from ultralytics.nn.tasks import load_checkpoint
    from ultralytics.utils import RANK
    from ultralytics.utils.torch_utils import parse_device

    from evener.frontends.yolo.packed_training import is_text, packed_training, unpacked_training
    from evener.frontends.yolo.settings import AS_THEY_ARE, YoloTraining, plain_sentence

_RESULTS = ".results.pickle"
"""File in the folder of a run: what its leader has at the end, until the process that started the run reads it."""


class YOLO(PlainYOLO):
    """A model of Ultralytics that trains on uneven nodes; all other calls are Ultralytics' own.

        from evener.yolo import YOLO

        model = YOLO("yolov8n.pt")
        results = model.train(data="coco8.yaml", epochs=3, nodes="1,0.5")

    Attributes:
        record: of the last training; None before it, and on a rank that does not show the run.
        study: of the last search on nodes; None before it.
        leader: whether this process shows its runs; False on all but one of the ranks that torchrun or `evener run`
            starts, after a training.

    Raises:
        InvalidInput: Evener does not train such a model, or Ultralytics was imported first under torchrun.
    """

    record: TrainRecord | None = None
    study: SearchRecord | None = None
    leader: bool = True

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
        master: str | None = None,
        home: str | Path | None = None,
        token: str | None = None,
        token_file: str | Path | None = None,
        ship_data: bool = False,
        agreement: AgreementName | None = None,
        local_steps: int | None = None,
        compress: Compression | None = None,
        **settings: Any,
    ) -> Any:
        """Train on nodes of this machine or of a master, or as a rank of torchrun or `evener run`.

        The weights are those of one process, unless an agreement is named. Callbacks run on the node that leads, in its
        process: what they change in the objects of this process is not seen here. On the nodes of a master the
        callbacks and the trainer class are run as a program that this script submits; files that they write stay there.

        Args:
            trainer: your own trainer class, of Ultralytics' for this task.
            nodes: relative speeds of local nodes, such as "1,0.5"; None: one node per GPU of this machine.
            devices: as for `evener train --devices`: "all", "cpu" ...; Ultralytics' `device` works as well.
            shares: "measured", "equal", or relative ones such as "7,2,1".
            memory: of every node, such as "4GB" or "4GB,512MB".
            stationary: whether every node keeps to images of its own.
            elastic: whether the run goes on without lost nodes; None: where it can.
            node_patience: seconds of silence after which a node counts as lost. `patience` is Ultralytics' early stop.
            master, home, token, token_file: name a master on whose nodes to train, as options of `evener train` do.
            ship_data: whether the folder of `data` is sent to the nodes of the master.
            agreement: "average" or "diloco": nodes train by themselves, and a master merges their weights. They have
                no callbacks and no trainer class of yours.
            local_steps: batches between two merges; None: as many as usual.
            compress: of the weights that are sent: "none", "bf16", "int8" or "top-k".
            settings: of Ultralytics: data, epochs, batch ...

        Returns:
            The metrics of the best weights, as from Ultralytics; the model has these weights.

        Raises:
            InvalidInput: a setting is unknown, or does not go with several nodes.
            EvenerError: the run fails, as `evener yolo` does.
        """
        if "RANK" in os.environ and RANK != -1:
            raise InvalidInput("under torchrun, import evener.yolo before anything of ultralytics")
        if not isinstance(self.model, nn.Module):
            raise InvalidInput(f"{self.model_name} is no model of PyTorch: train its .pt or .yaml")
        if self.task not in TASKS:
            raise InvalidInput(f"the task of {self.model_name} is {self.task}; Evener trains {', '.join(TASKS)}")
        if trainer is not None and not (isinstance(trainer, type) and issubclass(trainer, BaseTrainer)):
            raise InvalidInput(f"trainer must be a trainer class of Ultralytics or of your own, got {trainer!r}")
        if settings.get("cfg"):
            raise InvalidInput(f"cfg={settings['cfg']}: name its settings one by one")
        settings, devices = _with_devices(settings, devices, nodes)
        settings = self._with_folder(settings)
        named = [f"{key}={value}" for key, value in settings.items() if is_text(value)]
        config = YoloConfig(
            overrides=("train", f"model={self.overrides['model']}", *named),
            local_nodes=_speeds(nodes),
            devices=devices,
            shares=shares,
            memory=memory,
            stationary=stationary,
            elastic=elastic,
            patience=node_patience,
            ship_data=ship_data,
            home=_path(home),
            master=master,
            token=token,
            token_file=_path(token_file),
            goes_on=True,
        )
        read_overrides(config.overrides)
        training = YoloTraining(self, settings, Path(settings["save_dir"]), trainer)
        merging = {"agreement": agreement, "local_steps": None if local_steps is None else str(local_steps)}
        merging |= {"compress": compress}
        if config.names_master or any(merging.values()):
            self._train_on_master(config, training, {name: value for name, value in merging.items() if value})
            return self.metrics
        if (taken := take_environment()) is not None:
            env, script = taken
            _rank_here(training, env, _under_evener_run(config, script))  # which shows the run
        elif is_torchrun(config):
            _train_once_per_rank()
            with _signals_restored():
                self.record = as_rank(config, partial(_rank_here, training), _folder_of)
        elif nodes is None and len(choose_nodes(config)) == 1:
            with _errors_of_callbacks():
                self.record = on_local_nodes(config, partial(_rank_here, training), _folder_of)
        else:
            packed = packed_training(training)
            config = msgspec.structs.replace(config, goes_on=False)  # it goes on here alone
            self.record = on_local_nodes(config, partial(_rank_in_process, packed), _folder_of)
            self._take_results(training.folder)
        return self.metrics

    def tune(
        self,
        use_ray: bool = False,
        iterations: int = 300,
        *arguments: Any,
        nodes: str | Sequence[float] | None = None,
        devices: str = "all",
        memory: str | None = None,
        prune: Pruning = "asha",
        join: bool = True,
        ahead: int = DEFAULT_AHEAD,
        node_patience: float = PATIENCE,
        master: str | None = None,
        home: str | Path | None = None,
        token: str | None = None,
        token_file: str | Path | None = None,
        ship_data: bool = False,
        **settings: Any,
    ) -> Any:
        """Search for settings on nodes of this machine or of a master; on one device, without either, as Ultralytics.

        Results are in the folder that Ultralytics chooses, and `study` names all trials. Trials begin with the weights
        of this model and its settings, and have no callbacks of yours, as with Ultralytics.

        Args:
            use_ray: whether Ultralytics searches with Ray Tune, which takes no nodes.
            iterations: number of trials.
            arguments: for Ray Tune.
            nodes: relative speeds of local nodes, such as "1,0.5"; None: one node per GPU of this machine.
            devices, memory, node_patience: as for `train`.
            prune: "asha", "hyperband" or "none"; Ultralytics trains every trial to its end.
            join: whether idle nodes join the slowest trial.
            ahead: trials that are drawn before earlier results are used.
            master, home, token, token_file, ship_data: as for `train`.
            settings: of Ultralytics, also `space`: ranges (low, high) or (low, high, gain), or choices as text.

        Raises:
            InvalidInput: a setting is unknown, or does not go with a search.
            EvenerError: every trial fails with the same error.
        """
        if is_rank() or "RANK" in os.environ:
            raise InvalidInput("tune starts its trials itself: run the script with python, not as ranks of a launcher")
        self.study = None
        others, devices = _with_devices(settings, devices, nodes)
        places: dict[str, Any] = {
            "local_nodes": _speeds(nodes),
            "devices": devices,
            "memory": memory,
            "patience": node_patience,
        }
        masters = {
            "master": master,
            "home": _path(home),
            "token": token,
            "token_file": _path(token_file),
            "ship_data": ship_data,
        }
        is_on_master = any(masters.values())
        here = [] if is_on_master else choose_nodes(NodesConfig(**places))
        if not is_on_master and nodes is None and (use_ray or len(here) == 1):
            named = {
                "memory": memory is not None,
                "prune": prune != "asha",
                "join": not join,
                "ahead": ahead != DEFAULT_AHEAD,
            }
            if wrong := next((name for name, is_named in named.items() if is_named), None):
                raise InvalidInput(f"{wrong} is for a search on nodes, which Ultralytics' own is not: name nodes")
            if devices != "all":
                others["device"] = here[0].device
            return super().tune(use_ray, iterations, *arguments, **others)
        if use_ray or arguments:
            raise InvalidInput(
                "Ray Tune places trials by itself: leave out use_ray and what follows, or what names nodes"
            )
        from evener.frontends.yolo import tuning

        places |= masters
        self.study = tuning.tune_model(self, others, places, iterations, prune=prune, joins=join, ahead=ahead)
        return None

    def _train_on_master(self, config: YoloConfig, training: YoloTraining, agreement: dict[str, str]) -> None:
        """Train on the nodes of a master, or on nodes that train by themselves; have the results."""
        if is_rank() or "RANK" in os.environ:
            raise InvalidInput("a master has nodes of its own: run the script with python, not as ranks of a launcher")
        if config.names_master and (config.local_nodes is not None or config.devices != "all"):
            raise InvalidInput("a master has nodes of its own: leave out nodes and devices, or what names the master")
        nothing = [
            f"{key}=None" for key, value in training.settings.items() if value is None and key not in AS_THEY_ARE
        ]
        config = msgspec.structs.replace(config, overrides=(*config.overrides, *nothing))
        options = run_config(config, **agreement)
        from evener.frontends.yolo import master_run

        open_console(to_stderr=False).print(LICENCE)
        if options.agreement is None:
            results = master_run.train_on_nodes(options, training)
            self.record = results.record
            self._take_weights(training.folder)
            if results.trainer:
                self.metrics = results.metrics
            self._keep_trainer(results.trainer, training.folder)
            return
        if has_user_callbacks(self.callbacks) or training.trainer is not None:
            own = "trainer" if training.trainer is not None else "callbacks"
            raise InvalidInput(
                f"{own} of your own do not go with agreement={options.agreement}: nodes train by themselves, without "
                "Ultralytics' loop; leave them out, or train without an agreement"
            )
        if unknown := [name for name, value in training.settings.items() if value is not None and not is_text(value)]:
            raise InvalidInput(f"{', '.join(unknown)} cannot be sent to nodes that train by themselves: leave it out")
        self.record, trainer = master_run.train_by_agreement(options, training)
        self._take_weights(training.folder)
        self.trainer, self.metrics = trainer, trainer.validator.metrics
        self._point_to(training.folder)

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
        if resume:
            last, names = Path(resume).resolve(), load_checkpoint(resume)[1].get("train_args", {})
            return {**settings, "resume": str(last), "save_dir": names.get("save_dir") or str(last.parents[1])}
        try:
            chosen = {**self.overrides, **settings, "task": self.task, "mode": "train"}
            folder = get_save_dir(get_cfg(overrides=chosen))
        except (SyntaxError, TypeError, ValueError, OSError, AssertionError) as error:
            raise InvalidInput(f"Ultralytics: {plain_sentence(error)}") from error
        return {**settings, "save_dir": str(folder)}

    def _take_results(self, folder: Path) -> None:
        """Have the weights and metrics of a training in other processes, as after one in this process."""
        file, trainer = folder / _RESULTS, {}
        self._take_weights(folder)
        if file.exists():
            self.metrics, trainer = pickle.loads(file.read_bytes())
            file.unlink()
        self._keep_trainer(trainer, folder)

    def _take_weights(self, folder: Path) -> None:
        """Have the weights of a training, and the metrics that its checkpoint names."""
        best, last = (folder / "weights" / name for name in ("best.pt", "last.pt"))
        self.model, self.ckpt = load_checkpoint(best if best.exists() else last)
        self.predictor = None
        self.overrides = self._reset_ckpt_args(self.model.args)
        self.metrics = self.ckpt.get("train_metrics")

    def _keep_trainer(self, attributes: dict[str, Any], folder: Path) -> None:
        """Have what a trainer in another process says of its training."""
        self.trainer = SimpleNamespace(**attributes, validator=SimpleNamespace(metrics=self.metrics))
        self._point_to(folder)

    def _point_to(self, folder: Path) -> None:
        """Have the trainer name the files of the run, where this rank has written into a folder that is gone."""
        weights = folder / "weights"
        files = {"best": weights / "best.pt", "last": weights / "last.pt", "csv": folder / "results.csv"}
        vars(self.trainer).update(files, save_dir=folder, wdir=weights)
        self.overrides["model"] = str(files["best"] if files["best"].exists() else files["last"])
        if isinstance(self.model, nn.Module) and Path(self.overrides["model"]).exists():
            self.model.pt_path = self.overrides["model"]


def _path(named: str | Path | None) -> Path | None:
    return None if named is None else Path(named).expanduser()


def _speeds(nodes: str | Sequence[float] | None) -> str | None:
    """Return the speeds of local nodes as for `--local-nodes`."""
    return nodes if nodes is None or isinstance(nodes, str) else ",".join(map(str, nodes))


def _folder_of(config: YoloConfig) -> Path:
    return Path(read_overrides(config.overrides)["save_dir"])


def _with_devices(
    settings: dict[str, Any], devices: str, nodes: str | Sequence[float] | None
) -> tuple[dict[str, Any], str]:
    """Return the settings without Ultralytics' `device`, and the devices of the nodes. Raises InvalidInput."""
    settings = dict(settings)
    device = settings.pop("device", None)
    device = parse_device("" if device is None else device)
    if not device:
        return settings, devices
    if nodes is not None or devices != "all":
        raise InvalidInput(f"device={device} and {'devices' if nodes is None else 'nodes'} name nodes twice: name one")
    here = accelerators.names()
    if missing := [one for one in device.split(",") if one.isdecimal() and int(one) >= len(here)]:
        raise InvalidInput(
            f"device={device}: there is no GPU {missing[0]} here, but {', '.join(here) or 'none at all'}"
        )
    return settings, ",".join(here[int(one)] if one.isdecimal() else one for one in device.split(","))


def _under_evener_run(config: YoloConfig, script: ScriptConfig) -> YoloConfig:
    """Return the options of a training under `evener run`, which names the nodes."""
    if (config.local_nodes, config.devices, config.memory) != (None, "all", None):
        raise InvalidInput("nodes, devices and memory are options of `evener run`, which has started this script")
    if script.strategy not in ("auto", "data"):
        raise InvalidInput(f"--strategy {script.strategy} does not go with a YOLO, whose batches nodes divide")
    shares = script.shares if config.shares == "measured" else config.shares
    return msgspec.structs.replace(config, shares=shares)


_trained: list[bool] = []


def _train_once_per_rank() -> None:
    """Raise InvalidInput at the second training of a rank, which could not meet the others again."""
    if _trained:
        raise InvalidInput("a rank of torchrun trains once: train again in a program of its own")
    _trained.append(True)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Let signals mean afterwards what they meant before: a rank stops after its batch only while it trains."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # one that Python did not set
                signal.signal(number, handler)


@contextmanager
def _errors_of_callbacks() -> Iterator[None]:
    """Raise the user's own errors as they are, inside this context, where the training runs in this process."""
    try:
        yield
    except TrainingFailed as error:
        raise (error.__cause__ if isinstance(error.__cause__, Exception) else error) from None


def _rank_here(training: YoloTraining, env: RankEnvironment, config: YoloConfig) -> None:
    """Run a rank with the user's own object."""
    yolo_rank(env, config, read=partial(_chosen, training))
    trainer_rank = training.model.trainer.trainer_rank
    training.model._point_to(
        trainer_rank.folder
    )  # the first rank's: another may have chosen a name that was free later
    training.model.leader = trainer_rank.leads


def _rank_in_process(packed: bytes, env: RankEnvironment, config: YoloConfig) -> None:
    """Run a rank of a process that this module's `train` started; the leader leaves the metrics."""
    training = unpacked_training(packed)
    yolo_rank(env, config, read=partial(_chosen, training))
    trainer, metrics = training.model.trainer, training.model.metrics
    if metrics is not None and trainer is not None and trainer.trainer_rank.leads:
        names = ("args", "metrics", "fitness", "best_fitness", "epoch", "epochs", "start_epoch", "data")
        results = metrics, {name: getattr(trainer, name) for name in names}
        with suppress(InvalidInput):  # metrics of the user's own: those of the checkpoint remain
            (_folder_of(config) / _RESULTS).write_bytes(pickled(results, "the metrics", "use plain values"))


def _chosen(training: YoloTraining, config: YoloConfig) -> YoloTraining:
    """Return the training with the folder of `config`; from its last epoch, if the run begins again without nodes."""
    named = read_overrides(config.overrides)
    folder, last = named["save_dir"], checkpoint_of(named)
    if not config.lost or last is None:
        return training._replace(settings={**training.settings, "save_dir": folder}, folder=Path(folder))
    training.model.overrides = {"model": str(last), "task": training.model.task}
    return training._replace(settings={"resume": str(last), "save_dir": folder}, folder=Path(folder))
