"""What only some strategies have to show: the timeline of a pipeline's last step, as a trace and as a picture."""

from __future__ import annotations

from pathlib import Path

from evener.atomic import atomic_write
from evener.errors import MissingExtra
from evener.parallel.parallel_model import ParallelModel
from evener.parallel.pipeline.staged import StagedModel
from evener.report.canvas import png
from evener.report.timeline import timeline_figure


def draw_timeline(model: ParallelModel, folder: Path) -> None:
    """Write `timeline.json` (for ui.perfetto.dev) and, with Matplotlib, `timeline.png`; every rank calls this.

    Args:
        model: that was trained; without stages there is nothing to draw.
        folder: of the run.
    """
    if not isinstance(model, StagedModel):
        return
    timeline = model.pipeline.timeline()
    if not model.group.is_leader:
        return
    atomic_write(folder / "timeline.json", timeline.chrome_trace())
    try:
        figure = timeline_figure(timeline)
    except MissingExtra:  # the trace says the same
        return
    atomic_write(folder / "timeline.png", png(figure))
