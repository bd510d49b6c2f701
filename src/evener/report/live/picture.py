"""The messages that the live page receives as JSON: a picture of the run, and new points of its curves and log."""

from __future__ import annotations

from typing import NamedTuple

from evener.records.schema import Part
from evener.records.search_record import SearchRecord
from evener.report.live.losses import Loss
from evener.report.live.routes import RoutePicture


class NodePicture(Part, frozen=True, kw_only=True):
    """The state of one node.

    Attributes:
        stage: stage of a pipeline.
        share: recent share of the samples; once the run is over, of all samples.
        samples_per_second: speed while the node works.
        waits: fraction of its time that the node waits.
        is_waited_for: whether the other nodes wait for it.
        sent_per_second: bytes sent per second.
        sent_per_step: bytes sent per step.
        exchange_rate: bytes sent per second of waiting; None if the node does not wait.
        memory_bytes: peak memory, measured or predicted; 0: unknown.
        cpu_cores: number of cores that its process keeps busy; 0: unknown.
        state: empty if all is well, else `slow`, `lost`, `away`, `excluded`, `expelled`, `late`, `left`, `left out`.
        reason: reason of its state, or of its share.
    """

    name: str
    device: str
    stage: int
    share: float
    samples_per_second: float
    waits: float
    is_waited_for: bool
    sent_per_second: float
    sent_per_step: float
    exchange_rate: float | None
    memory_bytes: int
    cpu_cores: float
    state: str
    reason: str


class Picture(Part, frozen=True, kw_only=True):
    """The present state of a run, or the totals of a run that is over.

    Attributes:
        run: name of the run: that of its folder.
        task: name of its task; empty if unknown.
        file: file that defines the task; empty if unknown, or for a built-in task.
        began: time of the first event, in seconds since 1970; 0 if unknown.
        phase: current phase.
        detail: description of the phase.
        written: time of the last event, in seconds since 1970.
        left_seconds: expected seconds until the end; None if unknown.
        progress: completed fraction; None if unknown.
        samples_per_second: recent speed; the average of a run that is over.
        ideal: fraction of the speed that the nodes would reach if none waited.
        step_seconds: measured seconds per step.
        predicted_rate: bytes per second that the plan predicts from measured links.
        routes: who sends what to whom, among the nodes that take part.
    """

    run: str
    task: str
    file: str
    began: float
    phase: str
    detail: str
    strategy: str
    is_pipeline: bool
    is_over: bool
    written: float
    step: int
    epoch: int
    epochs: int
    left_seconds: float | None
    progress: float | None
    samples_per_second: float
    ideal: float | None
    loss: float | None
    step_seconds: float | None
    predicted_seconds: float | None
    predicted_rate: float | None
    advice: str
    losses: list[Loss]
    nodes: list[NodePicture]
    routes: list[RoutePicture]


class CurvePoint(NamedTuple):
    """A point of the curves, at one step."""

    step: int
    loss: float | None
    samples_per_second: float | None
    shares: list[float]


class StripColumn(NamedTuple):
    """A column of the strip of recent steps.

    Attributes:
        step: last step in the column.
        parts: by node, the fractions of the time loading, computing, updating and waiting.
        last: index of the node that the others waited for; -1: none.
    """

    step: int
    parts: list[tuple[float, ...]]
    last: int


class LogEntry(Part, frozen=True, kw_only=True):
    """A line of the log, or a point of the validation curves."""

    time: float
    step: int
    kind: str
    message: str
    nodes: tuple[str, ...] = ()
    scalars: dict[str, float] = {}


class Message(Part, frozen=True, kw_only=True):
    """One message to the page.

    Attributes:
        runs: names of all runs that the page can show, newest first.
        is_whole: whether the page discards its points, columns and log first.
        names: names of the nodes, in the order of shares and parts.
        search: state of the search, if the page shows one.
    """

    runs: list[str]
    is_whole: bool
    picture: Picture
    names: list[str]
    points: list[CurvePoint]
    columns: list[StripColumn]
    log: list[LogEntry]
    search: SearchRecord | None = None
