"""The study of a search in Optuna: what is drawn, and everything that was found, in a journal on the disk.

    <folder>/journal.log        append-only; `optuna-dashboard` opens it
    <folder>/lock               held by the search that writes

Optuna is a library of one process here: it is asked and told, and every call is on the disk when it returns. Its
sampler is made anew for every trial from the seed and the trial's number, so that what is drawn depends on these and
on the trials that were told before, and not on how often the search was interrupted.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from evener.records.errors import InvalidFile, InvalidInput, MissingExtra
from evener.records.search_record import Outcome
from evener.search.space import Suggest
from evener.system.file_lock import lock_file
from evener.version import pip_install

NAME = "evener"
_ENDED, _VALUES = "ended", "options"


class KnownTrial(NamedTuple):
    """A trial as the journal has it.

    Attributes:
        number: from 0.
        values: options, as text.
        scores: by epoch, from 1.
        notes: what the search wrote down besides.
        is_told: whether the sampler knows its outcome.
    """

    number: int
    values: dict[str, str]
    scores: dict[int, float]
    notes: dict[str, Any]
    is_told: bool


class Study:
    """A study that this process alone writes.

    Args:
        folder: of it.
        study: of Optuna.
        storage: of that.
        seed: of what is drawn.
        learns: whether what is drawn follows from earlier trials.
    """

    def __init__(self, folder: Path, study: Any, storage: Any, seed: int, *, learns: bool) -> None:
        self.folder = folder
        self._study, self._storage, self._seed, self._learns = study, storage, seed, learns
        self._id = storage.get_study_id_from_name(NAME)

    def known(self) -> list[KnownTrial]:
        """All trials, by number."""
        return [
            KnownTrial(
                number=trial.number,
                values=trial.user_attrs.get(_VALUES, {}),
                scores=dict(trial.intermediate_values),
                notes=dict(trial.user_attrs),
                is_told=trial.state.is_finished(),
            )
            for trial in self._study.get_trials(deepcopy=False)
        ]

    def ask(self, number: int, suggest: Suggest) -> dict[str, str]:
        """The options of the trial of this number, which is the next. Raises what `suggest` raises."""
        self._study.sampler = self._sampler(number)
        trial = self._study.ask()
        assert trial.number == number
        return _drawn(trial, suggest)

    def ask_again(self, number: int, suggest: Suggest) -> dict[str, str]:
        """The options of a trial of which not all were written down."""
        import optuna

        self._study.sampler = self._sampler(number)
        return _drawn(optuna.trial.Trial(self._study, self._trial(number)), suggest)

    def report(self, number: int, epoch: int, score: float) -> None:
        """The score of a trial after `epoch`, from 1."""
        self._storage.set_trial_intermediate_value(self._trial(number), epoch, score)

    def note(self, number: int, name: str, value: Any) -> None:
        """Write down something about a trial that has not been told."""
        self._storage.set_trial_user_attr(self._trial(number), name, value)

    def tell(self, number: int, outcome: Outcome, score: float | None) -> None:
        """The outcome of a trial; from now on it counts for what is drawn."""
        from optuna.trial import TrialState

        state = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}[outcome]
        self._study.tell(number, score if outcome == "complete" else None, state)

    def importances(self) -> dict[str, float]:
        """How much of the scores' spread each varied option explains, summing to 1; empty if too little is known."""
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that options which never varied say nothing
            try:
                found = optuna.importance.get_param_importances(self._study)
            except (ValueError, RuntimeError):  # fewer than two complete trials, or all scores alike
                return {}
        return {name: float(value) for name, value in found.items()}

    def _sampler(self, number: int) -> Any:
        """For the trial of this number alone."""
        import optuna

        kind = optuna.samplers.TPESampler if self._learns else optuna.samplers.RandomSampler
        return kind(seed=_mixed(self._seed, number))

    def _trial(self, number: int) -> int:
        return int(self._storage.get_trial_id_from_study_id_trial_number(self._id, number))


@contextmanager
def open_study(
    folder: Path, *, larger_is_better: bool, seed: int, learns: bool = True, resume: bool = False
) -> Iterator[Study]:
    """The study in `folder`, for this process alone.

    Args:
        folder: made if it is not there.
        larger_is_better: of scores.
        seed: of what is drawn.
        learns: whether what is drawn follows from earlier trials.
        resume: go on with the study that is there.

    Raises:
        MissingExtra: Optuna is not installed.
        InvalidInput: another search writes it; there is one, or none, against what was asked for.
        InvalidFile: the journal is not one of a search.
    """
    optuna = _optuna()
    journal = folder / "journal.log"
    if journal.exists() != resume:
        raise InvalidInput(
            f"{folder} holds a study: add --resume to go on with it, or name another folder with --output"
            if journal.exists()
            else f"there is no study in {folder} to resume: leave --resume out"
        )
    if (lock := lock_file(folder / "lock")) is None:
        raise InvalidInput(f"another search writes the study in {folder}: wait for it, or stop it")
    with lock:
        _mend(journal)
        try:
            storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
            study = optuna.create_study(
                storage=storage,
                study_name=NAME,
                direction="maximize" if larger_is_better else "minimize",
                load_if_exists=True,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidFile(f"{journal} is not the journal of a search: {error}") from error
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


def _mend(journal: Path) -> None:
    """Take away what a search that was killed in the middle of a line left: half of it, and its lock.

    Optuna reads no further than to a line that is not whole.
    """
    if not journal.exists():
        return
    for left in journal.parent.glob(f"{journal.name}.*lock*"):
        left.unlink(missing_ok=True)
    data = journal.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with journal.open("r+b") as file:
            file.truncate(whole)


def some_values(suggest: Suggest, seed: int, number: int) -> dict[str, str]:
    """Options such as trials are given, of no study. Raises MissingExtra, and what `suggest` raises."""
    optuna = _optuna()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=_mixed(seed, number)))
    return suggest(study.ask())


def _drawn(trial: Any, suggest: Suggest) -> dict[str, str]:
    values = suggest(trial)
    trial.set_user_attr(_VALUES, values)
    return values


def _mixed(seed: int, number: int) -> int:
    """A seed of NumPy's old generators for a trial."""
    return (seed * 1_000_003 + number * 7919) % 2**32
