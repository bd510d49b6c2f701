"""The study of a search in Optuna: draws and results, in a journal on disk.

    <folder>/journal.log        append-only; `optuna-dashboard` opens it

Optuna runs in this process only; every call is on disk when it returns. A new sampler is made for every trial from the
seed and the trial's number. So a draw depends on these and on the outcomes reported before, not on interruptions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from evener.records.errors import InvalidFile, InvalidInput, MissingExtra
from evener.records.search_record import Outcome
from evener.records.version import pip_install
from evener.search.space import Suggest

NAME = "evener"
_JOURNAL = "journal.log"
_ENDED, _VALUES = "ended", "options"


class KnownTrial(NamedTuple):
    """A trial as stored in the journal.

    Attributes:
        number: number of the trial, from 0.
        values: options, as text.
        scores: score by epoch, from 1.
        notes: additional entries of the search.
        is_told: whether the sampler knows its outcome (`Study.tell`).
    """

    number: int
    values: dict[str, str]
    scores: dict[int, float]
    notes: dict[str, Any]
    is_told: bool


class Study:
    """A study that only this process writes.

    Args:
        folder: folder of the study.
        study: Optuna's study.
        storage: Optuna's storage of the study.
        seed: seed of the draws.
        learns: whether draws depend on earlier trials.
    """

    def __init__(self, folder: Path, study: Any, storage: Any, seed: int, *, learns: bool) -> None:
        self.folder = folder
        self._study, self._storage, self._seed, self._learns = study, storage, seed, learns
        self._id = storage.get_study_id_from_name(NAME)

    def known(self) -> list[KnownTrial]:
        """Return all trials that have begun, by number."""
        from optuna.trial import TrialState

        return [
            KnownTrial(
                number=trial.number,
                values=trial.user_attrs.get(_VALUES, {}),
                scores=dict(trial.intermediate_values),
                notes=dict(trial.user_attrs),
                is_told=trial.state.is_finished(),
            )
            for trial in self._study.get_trials(deepcopy=False)
            if trial.state != TrialState.WAITING
        ]

    def ask(self, number: int, suggest: Suggest) -> dict[str, str]:
        """Return the options of trial `number`, which must be the next. Raises the errors of `suggest`."""
        self._study.sampler = self._sampler(number)
        trial = self._study.ask()
        assert trial.number == number
        return _drawn(trial, suggest)

    def ask_again(self, number: int, suggest: Suggest) -> dict[str, str]:
        """Return the options of a trial that was drawn but not completely written."""
        import optuna

        self._study.sampler = self._sampler(number)
        return _drawn(optuna.trial.Trial(self._study, self._trial(number)), suggest)

    def report(self, number: int, epoch: int, score: float) -> None:
        """Store the score of a trial after `epoch`, counted from 1."""
        self._storage.set_trial_intermediate_value(self._trial(number), epoch, score)

    def note(self, number: int, name: str, value: Any) -> None:
        """Store an entry about a trial whose outcome has not been reported."""
        self._storage.set_trial_user_attr(self._trial(number), name, value)

    def tell(self, number: int, outcome: Outcome, score: float | None) -> None:
        """Report the outcome of a trial to the sampler; later draws take it into account."""
        from optuna.trial import TrialState

        state = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}[outcome]
        self._study.tell(number, score if outcome == "complete" else None, state)

    def importances(self) -> dict[str, float]:
        """Return the share of the scores' variance that each varied option explains; empty if too few trials are
        complete.
        """
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # options that never varied have no importance
            try:
                importances = optuna.importance.get_param_importances(self._study)
            except (ValueError, RuntimeError):  # fewer than two complete trials, or equal scores
                return {}
        return {name: float(value) for name, value in importances.items()}

    def _sampler(self, number: int) -> Any:
        """Return the sampler of one trial."""
        import optuna

        kind = optuna.samplers.TPESampler if self._learns else optuna.samplers.RandomSampler
        return kind(seed=_mixed(self._seed, number))

    def _trial(self, number: int) -> int:
        return int(self._storage.get_trial_id_from_study_id_trial_number(self._id, number))


def require_study(folder: Path, *, resume: bool) -> None:
    """Raise InvalidInput if the existence of a study in `folder` contradicts `resume`."""
    is_there = (folder / _JOURNAL).exists()
    if is_there != resume:
        raise InvalidInput(
            f"{folder} holds a study: add --resume to continue it, or name another folder with --output"
            if is_there
            else f"{folder} holds no study to resume: remove --resume"
        )


@contextmanager
def open_study(
    folder: Path,
    *,
    larger_is_better: bool,
    seed: int,
    learns: bool = True,
    resume: bool = False,
    first: Mapping[str, Any] | None = None,
) -> Iterator[Study]:
    """Open the study in `folder` for this process alone.

    Args:
        folder: folder of the study; created if it does not exist.
        larger_is_better: whether larger scores are better.
        seed: seed of the draws.
        learns: whether draws depend on earlier trials.
        resume: whether to continue the existing study.
        first: options of the first trial that are not drawn, by name.

    Raises:
        MissingExtra: Optuna is not installed.
        InvalidInput: the existence of the study contradicts `resume`.
        InvalidFile: the journal is not the journal of a search.
    """
    optuna = _optuna()
    require_study(folder, resume=resume)
    journal = folder / _JOURNAL
    _repair(journal)
    try:
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
        study = optuna.create_study(
            storage=storage,
            study_name=NAME,
            direction="maximize" if larger_is_better else "minimize",
            load_if_exists=True,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidFile(f"{journal} is not the journal of a search ({error}); use another --output") from error
    if first and not study.get_trials(deepcopy=False):
        study.enqueue_trial(dict(first))
    yield Study(folder, study, storage, seed, learns=learns)


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise MissingExtra(f"a search needs Optuna: {pip_install('tune')}") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _repair(journal: Path) -> None:
    """Remove the incomplete last line and the lock that a killed search may have left.

    Optuna stops reading at an incomplete line.
    """
    if not journal.exists():
        return
    for lock in journal.parent.glob(f"{journal.name}.*lock*"):
        lock.unlink(missing_ok=True)
    data = journal.read_bytes()
    complete = data.rfind(b"\n") + 1
    if complete < len(data):
        with journal.open("r+b") as file:
            file.truncate(complete)


def some_values(suggest: Suggest, seed: int, number: int) -> dict[str, str]:
    """Return drawn options without a study. Raises MissingExtra, and the errors of `suggest`."""
    optuna = _optuna()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=_mixed(seed, number)))
    return suggest(study.ask())


def _drawn(trial: Any, suggest: Suggest) -> dict[str, str]:
    values = suggest(trial)
    trial.set_user_attr(_VALUES, values)
    return values


def _mixed(seed: int, number: int) -> int:
    """Return the seed of a trial for NumPy's legacy generators."""
    return (seed * 1_000_003 + number * 7919) % 2**32
