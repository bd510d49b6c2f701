"""Searches for settings of Ultralytics: `evener tune` of a model of theirs, and `YOLO.tune` with nodes.

    <folder>/tune_results.ndjson, best_hyperparameters.yaml, weights/, plots   as Ultralytics' own search leaves them
    <folder>/journal.log, study.json                                           as every search of Evener
    <folder>/trials/0007                                                       folder of one training
    <folder>/trials/0007/metrics.json                                          of its best weights

Trials are pruned, placed, shared and resumed as those of a task. Without `--vary` they vary what Ultralytics varies,
within its bounds, and the first trial has the settings as they are.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml

from evener.commands.train import choose_nodes
from evener.frontends.yolo.command import require_loadable
from evener.frontends.yolo.overrides import (
    YoloConfig,
    checkpoint_of,
    is_automatic,
    read_overrides,
    run_config,
    search_overrides,
)
from evener.frontends.yolo.rank import alone, yolo_rank
from evener.frontends.yolo.searched_trial import FITNESS, STATE_FILE, LocalTrial, TrialConfig
from evener.launch.nodes import NodeSpec
from evener.launch.processes import RANK_MODULES, LocalProcesses
from evener.launch.rank_environment import RankEnvironment, RankFunction
from evener.records.atomic import atomic_draft, atomic_write, remove_drafts
from evener.records.errors import InvalidInput, TrainingFailed
from evener.records.plan import Plan
from evener.records.record import Epoch
from evener.records.search_record import SearchRecord, TrialSummary
from evener.search.command import search_for
from evener.search.halving import Pruning
from evener.search.local_runner import LocalRunner, TrialRunner
from evener.search.objective import Notify, Objective
from evener.search.options import TuneConfig
from evener.search.runners import open_master_runner
from evener.search.space import Varied, parse_varied, suggest_varied
from evener.search.study import some_values
from evener.search.torch_trial import TorchTrial
from evener.search.trial_folder import TrialFolder
from evener.search.trials import SearchTrial

require_loadable()
with alone():
    from ultralytics.cfg import CFG_INT_KEYS, get_cfg
    from ultralytics.engine.tuner import Tuner
    from ultralytics.utils.callbacks.base import get_default_callbacks
    from ultralytics.utils.plotting import plot_tune_results

    from evener.frontends.yolo.criteria import require_known_loss
    from evener.frontends.yolo.master_trials import master_options, prepared_trials
    from evener.frontends.yolo.packed_training import packed_training, unpacked_training
    from evener.frontends.yolo.settings import (
        YoloTraining,
        plain_sentence,
        quiet_ultralytics,
        read_training,
        typed,
    )

_PRELOADED = (*RANK_MODULES, "ultralytics.models.yolo.model", "evener.frontends.yolo.trainer")
_DIGITS = 5
"""Digits after the point of a fitness, as many as Ultralytics keeps."""
_OPTIMIZER = "AdamW"
"""Optimizer of trials, as in Ultralytics' own search: "auto", its other default, ignores a trial's learning rate."""
_PLAIN = str | int | float | bool | Path
_OF_FOLDER = ("project", "name", "save_dir", "exist_ok", "mode", "task")
"""Settings that the folder of a trial, and the model, decide."""
_NOT_VARIED = (*_OF_FOLDER, "model", "data", "epochs", "resume", "val", "split")
_RESULTS = "tune_results.ndjson"
_BEST = "best_hyperparameters.yaml"
_METRICS = "metrics.json"
Space = Mapping[str, Sequence[Any]]
"""Ranges (low, high) or (low, high, gain) by setting, as Ultralytics takes them, or choices as text."""


def trial_rank(env: RankEnvironment, config: TrialConfig) -> None:
    """Run one rank of a trial. Ultralytics says nothing: several trials run at a time."""
    with quiet_ultralytics():
        yolo_rank(env, config.training, trial=LocalTrial(config.state))


def tune(config: TuneConfig, *, as_json: bool) -> None:
    """`evener tune` of a model of Ultralytics. Raises like `evener.search.command.tune`."""
    config = _with_optimizer(config, [parse_varied(text).name for text in config.vary])
    if config.output is None:
        with alone(), quiet_ultralytics():
            described = read_training(search_overrides(config, {}))
        settings = {name: value for name, value in described.settings.items() if name != "save_dir"}
        tuner = tuner_of({**settings, "task": described.model.task})
        config = msgspec.structs.replace(config, output=Path(tuner.tune_dir))
    _require_trained(search_for(config, yolo_objective, as_json=as_json))
    draw_results(config.folder)


def tune_model(
    model: Any,
    settings: Mapping[str, Any],
    places: Mapping[str, Any],
    iterations: int,
    *,
    prune: Pruning,
    joins: bool,
    ahead: int,
) -> SearchRecord:
    """Search for settings of a model of the user's script, as `YOLO.tune`; return all trials.

    Args:
        model: that every trial begins with.
        settings: of Ultralytics, by name, and its `space`.
        places: options of `TuneConfig` that name nodes of this machine, or a master.
        iterations: number of trials.
        prune, joins, ahead: see `TuneConfig`.

    Raises:
        InvalidInput: a setting is unknown, or does not go with a search.
        EvenerError: every trial fails with the same error.
    """
    space = settings.get("space")
    if space is not None and not isinstance(space, Mapping):
        raise InvalidInput(f"space must be a dictionary of ranges by setting, got {type(space).__name__}")
    chosen = {name: value for name, value in {**model.overrides, **settings}.items() if name != "space"}
    if wrong := next((name for name, value in chosen.items() if not isinstance(value, _PLAIN | None)), None):
        raise InvalidInput(f"{wrong} must be a plain value in a search, got {type(chosen[wrong]).__name__}")
    folder, resume = Path(tuner_of(chosen).tune_dir), bool(chosen.pop("resume", False))
    named = {name: str(value) for name, value in chosen.items() if value is not None and name not in _OF_FOLDER}
    epochs, data = named.pop("epochs", None), named.pop("data", None)
    config = TuneConfig(
        task=named.pop("model"),
        trials=iterations,
        data=None if data is None else Path(data),
        epochs=None if epochs is None else int(epochs),
        seed=int(named.pop("seed", 0)),
        option=named,
        prune=prune,
        join=joins,
        ahead=ahead,
        output=folder,
        resume=resume,
        **places,
    )
    config = _with_optimizer(config, list(space or ()))
    plain = copy.copy(model)
    plain.callbacks = get_default_callbacks()
    packed = packed_training(YoloTraining(plain, {}, folder))
    objective = partial(yolo_objective, space=space, program=partial(_sent_trial_rank, packed), model=plain)
    record = _require_trained(search_for(config, objective, as_json=False))
    draw_results(folder)
    return record


def _require_trained(record: SearchRecord) -> SearchRecord:
    """Return the record of a search. Raises TrainingFailed: all of its trials failed."""
    if record.trials and all(trial.outcome == "failed" for trial in record.trials):
        raise TrainingFailed(f"all {len(record.trials)} trials failed, the last one so: {record.trials[-1].reason}")
    return record


def _with_optimizer(config: TuneConfig, varied: Sequence[str]) -> TuneConfig:
    """Return `config` with an optimizer that takes the learning rates of trials, unless the user has chosen one."""
    if "optimizer" in varied or "optimizer" in config.option:
        return config
    return msgspec.structs.replace(config, option={**config.option, "optimizer": _OPTIMIZER})


def _sent_trial_rank(packed: bytes, env: RankEnvironment, config: TrialConfig) -> None:
    """Run one rank of a trial that begins with the user's own model."""
    model = unpacked_training(packed).model

    def read(training: YoloConfig) -> YoloTraining:
        return read_training(training.overrides, model)

    with quiet_ultralytics():
        yolo_rank(env, config.training, read=read, trial=LocalTrial(config.state))


def tuner_of(settings: Mapping[str, Any]) -> Any:
    """Return Ultralytics' own tuner of a training, which knows its folder and what it varies. It is not called.

    Raises:
        InvalidInput: a setting is wrong.
    """
    with alone(), quiet_ultralytics():
        try:
            return Tuner({**settings, "mode": "train"}, model=object())
        except (SyntaxError, TypeError, ValueError, OSError, AssertionError) as error:
            raise InvalidInput(f"Ultralytics: {plain_sentence(error)}") from error


def yolo_objective(
    config: TuneConfig, space: Space | None = None, program: RankFunction = trial_rank, model: Any = None
) -> Objective:
    """Return the objective of a search for settings of a model of Ultralytics.

    Args:
        config: of the search, with its folder.
        space: what varies; None or empty: what `--vary` names, or else what Ultralytics varies.
        program: runs a rank of a trial.
        model: that every trial begins with; None: the one that `config` names.

    Raises:
        InvalidInput: a setting is unknown or does not go with a search.
    """
    varied = [parse_varied(text) for text in config.vary]
    if not varied:
        settings = read_overrides(search_overrides(config, {}))
        varied = _varied(space or tuner_of(typed(settings)).space)
    if wrong := next((one.name for one in varied if one.name in _NOT_VARIED), None):
        raise InvalidInput(
            f"{wrong} cannot vary in a search: trials are compared epoch by epoch, in folders of the search"
        )
    if any(one.name == "batch" and _may_be_automatic(one) for one in varied):
        raise InvalidInput(
            "batch cannot vary to an automatic one in a search: trials on different nodes would have different ones"
        )
    suggest = suggest_varied(varied)
    args = _settings(config, some_values(suggest, config.seed, 0), model)
    return Objective(
        suggest=suggest,
        epochs=args.epochs,
        batch_size=args.batch,
        metric=FITNESS,
        open_runner=partial(_open_runner, config, program, model, args.epochs),
        config_of=partial(_trial_config, config),
        score_of=_score_of,
        folder_of=_TrialFolder,
        first={one.name: value for one in varied if (value := _usual(one, getattr(args, one.name))) is not None},
        leave=partial(leave_results, config.folder),
    )


def _settings(config: TuneConfig, values: Mapping[str, str], model: Any) -> Any:
    """Return the settings of a trial apart from those that vary. Raises InvalidInput: they do not go with a search, or
    Ultralytics does not know one of them or of the `values`.
    """
    settings = read_overrides(search_overrides(config, values))
    if is_automatic(batch := settings.get("batch", "16")):
        raise InvalidInput(
            f"batch={batch} does not go with a search: trials on different nodes would have different batches; "
            "name a number"
        )
    if config.is_on_master:
        for chosen in ({}, values):
            run_config(YoloConfig(overrides=search_overrides(config, chosen), **master_options(config)))
    if checkpoint_of(settings) is not None:
        raise InvalidInput("resume=True does not go with a search: all its trials begin with the same model")
    with alone(), quiet_ultralytics():
        read_training(search_overrides(config, values), model)
        described = read_training(search_overrides(config, {}), model)
        args = get_cfg(overrides=described.settings)
    require_known_loss(described.model.model)
    if not args.val and config.prune != "none":
        raise InvalidInput(
            "val=False leaves no fitness to prune by before the last epoch: leave it out, or do not prune"
        )
    return args


def _may_be_automatic(batch: Varied) -> bool:
    """Return whether a drawn batch may be no number of images."""
    return any(map(is_automatic, batch.choices)) if batch.choices else batch.low < 1


def _usual(varied: Varied, value: Any) -> Any:
    """Return the value of a setting that is not varied as one of those that may be drawn; None if there is none."""
    if varied.choices:
        return str(value) if str(value) in varied.choices else None
    if not isinstance(value, int | float):
        return None
    limited = min(max(value, varied.low), varied.high)
    return round(limited) if varied.is_whole else float(limited)


def _varied(space: Space) -> list[Varied]:
    """Return the ranges of a search space of Ultralytics. Raises InvalidInput: it is none."""
    return [_varied_one(name, bounds) for name, bounds in space.items()]


def _varied_one(name: str, bounds: Any) -> Varied:
    bounds = tuple(bounds) if isinstance(bounds, tuple | list) else (bounds,)
    if len(bounds) > 1 and all(isinstance(one, str) for one in bounds):
        return parse_varied(f"{name}={','.join(bounds)}")
    if not (2 <= len(bounds) <= 3 and all(isinstance(one, int | float) for one in bounds) and bounds[0] < bounds[1]):
        raise InvalidInput(f"space: {name}={bounds} is neither (low, high) nor (low, high, gain) nor choices")
    return Varied(name=name, low=float(bounds[0]), high=float(bounds[1]), is_whole=name in CFG_INT_KEYS)


def _score_of(epoch: Epoch) -> float:
    assert epoch.validation is not None
    return epoch.validation.metrics[FITNESS]


def _trial_config(config: TuneConfig, trial: SearchTrial, folder: TrialFolder, plan: Plan | None) -> TrialConfig:
    overrides = search_overrides(config, trial.values)
    samples = {} if plan is None else {one.node: one.samples for one in plan.assignments}
    training = YoloConfig(
        overrides=(*overrides, f"save_dir={folder.folder}", "exist_ok=True"),
        elastic=None if config.is_on_master else False,
        patience=config.patience,
        to_stderr=True,
        **master_options(config),
    )
    return TrialConfig(training, folder.checkpoints / STATE_FILE, samples)


@contextmanager
def _open_runner(
    config: TuneConfig, program: RankFunction, model: Any, epochs: int, folder: Path, notify: Notify
) -> Iterator[TrialRunner]:
    """Yield the runner of the trials, whose nodes are its own until the block ends."""
    if config.is_on_master:
        with (
            alone(),
            prepared_trials(config, model, epochs, notify) as prepare,
            open_master_runner(config, folder, notify, prepare) as runner,
        ):
            yield runner
        return
    nodes = choose_nodes(config)
    with LocalProcesses(_PRELOADED) as processes:
        yield LocalRunner(processes, partial(_open_trial, program), nodes)


def _open_trial(
    program: RankFunction, processes: LocalProcesses, nodes: Sequence[NodeSpec], config: TrialConfig
) -> TorchTrial:
    return TorchTrial(processes, nodes, config.among([node.name for node in nodes]), program)


class _TrialFolder(TrialFolder):
    """The folder of one trial, as Ultralytics leaves that of a training."""

    def record_epoch(self, epoch: Epoch) -> None:
        """Write the metrics of an epoch that is the best so far; others have no metrics but the fitness."""
        assert epoch.validation is not None
        if set(epoch.validation.metrics) != {FITNESS}:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self.folder / _METRICS, json.dumps(epoch.validation.metrics).encode())

    def forget_unreported(self, _epochs: int) -> None:
        """Prepare the folder: an epoch whose report was lost is reported again when the next one ends."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        remove_drafts(self.folder)
        remove_drafts(self.checkpoints)

    def conclude(self, *, keep_weights: bool) -> None:
        """Remove the files that are no longer needed."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        remove_drafts(self.folder)
        if not keep_weights:
            shutil.rmtree(self.folder / "weights", ignore_errors=True)


def leave_results(folder: Path, record: SearchRecord) -> None:
    """Write what Ultralytics' own search leaves in its folder, from the complete trials."""
    complete = [trial for trial in record.trials if trial.outcome == "complete"]
    lines = [json.dumps(_result(folder, trial)) for trial in complete]
    atomic_write(folder / _RESULTS, "".join(f"{line}\n" for line in lines).encode())
    if record.best is None:
        return
    best = record.trials[record.best]
    source = folder / "trials" / f"{best.number:04d}" / "weights"
    (folder / "weights").mkdir(exist_ok=True)
    for weights in source.glob("*.pt"):
        _copy(weights, folder / "weights" / weights.name)
    head = f"# trial {best.number} of {len(record.trials)}, fitness {best.score}\n"
    atomic_write(folder / _BEST, (head + yaml.safe_dump(_values(best), sort_keys=False)).encode())


def _copy(source: Path, target: Path) -> None:
    """Copy a file, unless it is there already, atomically."""
    there, here = (path.stat() if path.exists() else None for path in (source, target))
    if there is None or here is None or (there.st_size, there.st_mtime_ns) != (here.st_size, here.st_mtime_ns):
        with atomic_draft(target) as draft:
            shutil.copy2(source, draft)


def draw_results(folder: Path) -> None:
    """Draw the course of a search that is over, as Ultralytics does, if all that varies are numbers."""
    file = folder / _RESULTS
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    values = [value for line in lines for value in line["hyperparameters"].values()]
    if values and all(isinstance(value, int | float) for value in values):
        with quiet_ultralytics():
            plot_tune_results(str(file))


def _result(folder: Path, trial: TrialSummary) -> dict[str, Any]:
    """Return the line of a trial in the file of Ultralytics."""
    own = folder / "trials" / f"{trial.number:04d}"
    file = own / _METRICS
    metrics = json.loads(file.read_text()) if file.exists() else {}
    return {
        "iteration": trial.number + 1,
        "fitness": round(trial.score or 0.0, _DIGITS),
        "hyperparameters": _values(trial),
        "datasets": {"data": metrics},
        "save_dirs": {"data": str(own)},
    }


def _values(trial: TrialSummary) -> dict[str, Any]:
    """Return the drawn settings of a trial with their types."""
    return typed(trial.values)
