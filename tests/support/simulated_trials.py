"""A search whose trials are simulated: they have their own clock, and their scores follow from options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from evener.config.run_config import RunConfig
from evener.launch.nodes import NodeSpec
from evener.records.errors import EvenerError, Interrupted, NodeLost
from evener.records.events import RunEvent
from evener.records.record import Epoch
from evener.search.assignments import Assignments
from evener.search.halving import Pruning
from evener.search.local_runner import RunEnd
from evener.search.placement import speed_of
from evener.search.search import Search
from evener.search.space import parse_varied, suggest_varied
from evener.search.study import open_study
from evener.search.trial_folder import TrialFolder
from evener.search.trials import Rules, SearchTrial

Score = Callable[[dict[str, str], int], float]


@dataclass
class _SimulatedRun:
    nodes: tuple[str, ...]
    seconds: float
    epoch: int
    last: int
    options: dict[str, str]
    next_at: float
    waits: bool = False
    stops: bool = False


@dataclass
class SimulatedRunner:
    """A `TrialRunner` on a simulated clock; `epoch_seconds` at speed 1, `startup` before each run's first step.

    `shared_seconds` are the additional seconds of an epoch on several nodes; `receive` returns after `tick` seconds
    even if nothing has happened.
    """

    score: Score
    epoch_seconds: float = 10.0
    startup: float = 0.0
    shared_seconds: float = 0.0
    tick: float = inf
    kill: Callable[[int, int], EvenerError | None] = lambda number, epoch: None
    now: float = 0.0
    runs: dict[int, _SimulatedRun] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    parts: dict[int, float] = field(default_factory=dict)
    begun: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    here: Sequence[NodeSpec] = ()

    def nodes(self) -> Sequence[NodeSpec]:
        return self.here

    def forget(self, number: int) -> None:
        assert number not in self.runs

    def start(self, number: int, nodes: Sequence[str], config: RunConfig) -> None:
        names = tuple(nodes)
        busy = {name for run in self.runs.values() for name in run.nodes}
        assert not busy & set(names), "a node has one trial at a time"
        speed, epoch = (
            speed_of([node.speed_at(0) for node in self.here if node.name in names]),
            self.done.get(number, 0),
        )
        self.begun.append((number, names))
        assert config.epochs is not None
        seconds = self.epoch_seconds / speed + (self.shared_seconds if len(names) > 1 else 0.0)
        at = self.now + self.startup + (1 - self.parts.pop(number, 0.0)) * seconds
        self.runs[number] = _SimulatedRun(names, seconds, epoch, config.epochs, config.option, at)

    def answer(self, number: int, event: RunEvent, is_over: bool) -> None:
        run = self.runs[number]
        run.waits, run.next_at = False, self.now + run.seconds
        if is_over or run.epoch == run.last:
            run.stops, run.last, run.next_at = False, run.epoch, self.now

    def stop(self, number: int) -> None:
        self.runs[number].stops = True

    def receive(self, timeout: float) -> list[tuple[int, RunEvent | RunEnd]]:
        for number, run in list(self.runs.items()):
            if run.stops:
                del self.runs[number]
                self.parts[number] = 1 - (run.next_at - self.now) / run.seconds
                return [(number, RunEnd(Interrupted("stopped as asked")))]
        number, run = min(self.runs.items(), key=lambda item: item[1].next_at)
        if run.next_at > self.now + self.tick:
            self.now += self.tick
            return []
        self.now = max(self.now, run.next_at)
        if run.epoch == run.last:
            del self.runs[number]
            return [(number, RunEnd(None))]
        if (error := self.kill(number, run.epoch + 1)) is not None:
            del self.runs[number]
            return [(number, RunEnd(error))]
        run.epoch += 1
        self.done[number] = run.epoch
        return [(number, Epoch(step=10 * run.epoch, epoch=run.epoch - 1, loss=self.score(run.options, run.epoch)))]


class Killed(Exception):
    """The process of a search is gone."""


def lost(message: str = "node died") -> EvenerError:
    return NodeLost(message)


def search(
    folder: Path,
    speeds: Sequence[float],
    runs: SimulatedRunner,
    *,
    vary: Sequence[str] = ("lr=1e-4..1e-1:log", "width=16..256"),
    trials: int = 20,
    epochs: int = 9,
    prune: Pruning = "asha",
    ahead: int = 8,
    joins: bool = True,
    learns: bool = True,
    resume: bool = False,
    notify: Callable[[SearchTrial, str], None] = lambda trial, sentence: None,
) -> Search:
    """Run a search over simulated nodes; smaller scores are better."""
    runs.here = [NodeSpec(name=f"node-{i}", speeds=((0, speed),)) for i, speed in enumerate(speeds)]
    rules = Rules(epochs, prune, ahead, larger_is_better=False)
    folder.mkdir(exist_ok=True)
    with open_study(folder, larger_is_better=False, seed=3, learns=learns, resume=resume) as study:
        search = Search(
            study=study,
            rules=rules,
            assignments=Assignments(epochs, batch_size=32),
            runner=runs,
            suggest=suggest_varied([parse_varied(text) for text in vary]),
            folder_of=lambda number: TrialFolder(folder / "trials" / str(number)),
            config_of=lambda trial, _: RunConfig(task="digits", option=trial.values, epochs=epochs),
            score_of=lambda epoch: epoch.loss or 0.0,
            num_trials=trials,
            joins=joins,
            notify=notify,
            clock=lambda: runs.now,
        )
        search.run()
        return search
