"""Trials of a search for settings of Ultralytics on the nodes of a master: runs of ranks that work together.

settings of a trial, the program that all trials share -> a run, which `MasterRunner` submits
results of its ranks                                   -> the files of Ultralytics in the folder of the trial
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from evener.commands.submission import pack
from evener.commands.train_as_ranks import job_of
from evener.frontends.yolo.master_run import (
    METRICS,
    begins_with_weights,
    completed,
    config_of_ranks,
    program_of,
    take_results,
    trainer_here,
)
from evener.frontends.yolo.overrides import YoloConfig, run_config, search_overrides
from evener.frontends.yolo.packed_training import packed_code
from evener.frontends.yolo.rank import alone
from evener.frontends.yolo.rank_on_node import SEARCH_OPTION, minor_version
from evener.frontends.yolo.searched_trial import TrialConfig
from evener.frontends.yolo.settings import YoloTraining, in_a_sentence, quiet_ultralytics, read_training
from evener.ps.protocol.blob import Blob
from evener.records.atomic import atomic_write
from evener.records.record import WEIGHTS
from evener.search.master_runner import Submittable
from evener.search.options import TuneConfig


@contextmanager
def prepared_trials(
    config: TuneConfig, model: Any, epochs: int, notify: Callable[[str], None]
) -> Iterator[Callable[[TrialConfig, bool], Submittable]]:
    """Yield the function that prepares a trial for a master; what it sends is there until the block ends.

    Args:
        config: of the search.
        model: that every trial begins with; None: the one that `config` names.
        epochs: of a trial that is not pruned.
        notify: shows a message to the user.

    Raises:
        InvalidInput: a setting does not go with a master's nodes, or the data are not here.
    """
    overrides = search_overrides(config, {})
    common = run_config(YoloConfig(overrides=overrides, **master_options(config)))
    with alone(), quiet_ultralytics(), in_a_sentence():
        first = completed(read_training(overrides, model))
        trainer_here(first)
    code = packed_code(first)
    facts = {SEARCH_OPTION: "True", **({"python": minor_version()} if code else {})}
    packed = config_of_ranks(common, first, facts, sends_data=config.ship_data)
    data = pack(packed, notify, is_task=False)[0].get("data")
    programs: dict[bool, Blob] = {}
    with ExitStack() as stack:

        def prepare(trial: TrialConfig, _is_shared: bool) -> Submittable:
            with alone(), quiet_ultralytics(), in_a_sentence():
                training = completed(read_training(trial.training.overrides, first.model))
                has_weights = begins_with_weights(training)
                if has_weights not in programs:
                    programs[has_weights] = stack.enter_context(program_of(training, code))
            blobs = {"code": programs[has_weights], **({} if data is None else {"data": data})}
            sent = config_of_ranks(run_config(trial.training), training, facts, sends_data=config.ship_data)
            return Submittable(
                job_of(sent, {what: blob.digest for what, blob in blobs.items()}, brings_program=True),
                list(blobs.values()),
                epochs,
                lambda: None,
                partial(_save, training),
            )

        yield prepare


def master_options(config: TuneConfig) -> dict[str, Any]:
    """Return the options of a search that name its master, by name."""
    return {name: getattr(config, name) for name in ("ship_data", "home", "master", "token", "token_file")}


def _save(training: YoloTraining, weights: bytes) -> None:
    """Write the results of the ranks as Ultralytics does."""
    training.folder.mkdir(parents=True, exist_ok=True)
    atomic_write(training.folder / WEIGHTS, weights)
    with alone(), quiet_ultralytics(), in_a_sentence():
        take_results(training, trainer_here(training), METRICS[training.model.task]())
