"""What the page is sent, as JSON: a picture of the run as it is now, and what its curves and log have got since."""

from __future__ import annotations

from typing import NamedTuple

from evener.records.schema import Part
from evener.records.search_record import SearchRecord
from evener.report.live.losses import Loss


class NodePicture(Part, frozen=True, kw_only=True):
    """One node.

    Attributes:
        stage: of a pipeline.
        share: of the samples, lately; of a run that is over, of all.
        samples_per_second: while it works.
        waits: fraction of its time that it waits.
        is_waited_for: whether the others wait for it.
        sent_per_second: bytes.
        sent_per_step: bytes.
        exchange_rate: bytes a second of its waiting; None if it waits for nothing.
        memory_bytes: at its peak, or predicted; 0: unknown.
        cpu_cores: that its process keeps busy; 0: unknown.
        state: empty if all is well, else `slow`, `lost`, `away`, `benched`, `expelled`, `late`, `left`, `left out`.
        reason: of its state, or of its share.
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
    """A run as it is now; one that is over, as a whole.

    Attributes:
        run: its name.
        phase: what it is about.
        detail: of that, in words.
        written: when something last happened, in seconds since 1970.
        left_seconds: that it will take yet; None where that is not known.
        progress: fraction that is done; likewise.
        samples_per_second: lately; of a run that is over, on average.
        ideal: fraction of what the nodes could do if none waited.
        step_seconds: measured.
        predicted_rate: bytes a second, as the plan has it of links that were measured.
    """

    run: str
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


class CurvePoint(NamedTuple):
    """Of the curves, at one step."""

    step: int
    loss: float | None
    samples_per_second: float | None
    shares: list[float]


class StripColumn(NamedTuple):
    """Of the strip.

    Attributes:
        step: the last one in it.
        parts: by node: fractions of the time loading, computing, updating, waiting.
        last: number of the node that was waited for; -1: none.
    """

    step: int
    parts: list[tuple[float, ...]]
    last: int


class Told(Part, frozen=True, kw_only=True):
    """A line of the log, or a point of the validation curves."""

    time: float
    step: int
    kind: str
    message: str
    nodes: tuple[str, ...] = ()
    scalars: dict[str, float] = {}


class Message(Part, frozen=True, kw_only=True):
    """What the page is sent at once.

    Attributes:
        runs: names of all that can be shown, the newest first.
        is_whole: what the page has of points, columns and told is thrown away.
        names: of the nodes, in the order of shares and parts.
        search: what has been found, where the page shows a search.
    """

    runs: list[str]
    is_whole: bool
    picture: Picture
    names: list[str]
    points: list[CurvePoint]
    columns: list[StripColumn]
    told: list[Told]
    search: SearchRecord | None = None
