"""One style for all figures. Figures are made without pyplot, so none stays in memory."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evener.records.atomic import atomic_write
from evener.records.errors import MissingExtra
from evener.records.version import pip_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, FAINT = "#1f2328", "#6b7280", "#e5e7eb"
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
LIGHT, DARK = "#fefefe", "#1f2329"
"""Colours of text on dark and on bright bars; unlike INK and white, they do not change with the page's theme."""
COLORS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
"""The palette of Okabe and Ito (2008), which people with any common colour blindness can tell apart."""
LINES = ("-", "--", ":", "-.")

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,
    "figure.facecolor": "white",
    "figure.dpi": 144,
    "savefig.dpi": 144,
    "axes.facecolor": "white",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


@contextmanager
def canvas(width: float, height: float, title: str) -> Iterator[Figure]:
    """Yield a figure of `width` by `height` inches to draw on; it can be saved afterwards.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(f"figures need Matplotlib: {pip_install('report')}") from error
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        yield figure


def png(figure: Figure) -> bytes:
    """Return `figure` as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


_THEME_STYLE = """<style>
:root { --ink: #1f2328; --muted: #6b7280; --faint: #e5e7eb; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --muted: #9aa4af; --faint: #30363d; --page: #0d1117; } }
</style>"""
_ROLES = {INK: "--ink", MUTED: "--muted", FAINT: "--faint", "#ffffff": "--page"}


def svg(figure: Figure) -> str:
    """Return `figure` as an SVG image that follows the light or dark theme of its reader."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "evener"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    drawn = buffer.getvalue()
    for color, role in _ROLES.items():
        drawn = drawn.replace(f": {color}", f": var({role})")
    head, _, rest = drawn[drawn.index("<svg") :].partition(">")
    return f"{head}>{_THEME_STYLE}{rest}"


def save_png(figure: Figure, path: Path) -> None:
    """Write `figure` to `path` atomically."""
    atomic_write(path, png(figure))


def save_figure(figure: Figure, path: Path) -> None:
    """Write `figure` to `path` atomically, in the format of its suffix."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:])
    atomic_write(path, buffer.getvalue())


def can_draw() -> bool:
    """Return whether Matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def bar_axes(axes: Axes, labels: Sequence[str], title: str) -> None:
    """Prepare `axes` for horizontal bars: one label per bar, the first on top, no ticks."""
    axes.set_title(title)
    axes.set_yticks(range(len(labels)), labels, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(labels) - 0.4, -0.6)


def bars_height(num_bars: int) -> float:
    """Return the inches that `num_bars` horizontal bars need with title and axis; many bars are drawn narrower."""
    return 1.5 + num_bars * (0.42 if num_bars <= 12 else 0.26)


def log_axis(
    axes: Axes, side: Literal["x", "y"], base: int, multiples: Sequence[float], format_tick: Callable[[float], str]
) -> None:
    """Make a `side` of `axes` logarithmic, with ticks at powers of `base` times `multiples`.

    `format_tick` writes the label of a tick's value.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    scale, axis = (axes.set_xscale, axes.xaxis) if side == "x" else (axes.set_yscale, axes.yaxis)
    scale("log", base=base)
    axis.set_major_locator(LogLocator(base=base, subs=multiples))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    axis.set_minor_formatter(NullFormatter())


def empty(axes: Axes, sentence: str) -> None:
    """Write on `axes` why there is nothing to draw."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, sentence, ha="center", va="center", color=MUTED, transform=axes.transAxes)


def require_matplotlib() -> None:
    """Raise MissingExtra unless Matplotlib is installed: commands call this before a long run, not after it."""
    with canvas(1, 1, ""):
        pass
