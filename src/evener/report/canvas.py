"""The one look of all figures. Figures are made without pyplot, so none stays behind in memory."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evener.records.atomic import atomic_write
from evener.records.errors import MissingExtra
from evener.version import pip_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, FAINT = "#1f2328", "#6b7280", "#e5e7eb"
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
LIGHT, DARK = "#fefefe", "#1f2329"
"""Of words on dark and on bright bars: alike on light and on dark pages, where INK and white change places."""
COLORS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
"""Of Okabe and Ito (2008): apart for all common kinds of colour blindness."""
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
    """A figure of `width` by `height` inches to draw on while the context lasts; it can be saved after.

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
    """`figure` as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


_DRESS = """<style>
:root { --ink: #1f2328; --muted: #6b7280; --faint: #e5e7eb; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --muted: #9aa4af; --faint: #30363d; --page: #0d1117; } }
</style>"""
_ROLES = {INK: "--ink", MUTED: "--muted", FAINT: "--faint", "#ffffff": "--page"}


def svg(figure: Figure) -> str:
    """`figure` as an SVG image that is light or dark as its reader's pages are."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "evener"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    drawn = buffer.getvalue()
    for color, role in _ROLES.items():
        drawn = drawn.replace(f": {color}", f": var({role})")
    head, _, rest = drawn[drawn.index("<svg") :].partition(">")
    return f"{head}>{_DRESS}{rest}"


def save_png(figure: Figure, path: Path) -> None:
    """Write `figure` to `path`, whole or not at all."""
    atomic_write(path, png(figure))


def can_draw() -> bool:
    """Whether Matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def bar_axes(axes: Axes, labels: Sequence[str], title: str) -> None:
    """Make `axes` one of horizontal bars: a label a bar, the first on top, no ticks."""
    axes.set_title(title)
    axes.set_yticks(range(len(labels)), labels, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(labels) - 0.4, -0.6)


def bars_height(num_bars: int) -> float:
    """Inches for `num_bars` horizontal bars with title and axis; more of them are drawn narrower."""
    return 1.5 + num_bars * (0.42 if num_bars <= 12 else 0.26)


def log_axis(
    axes: Axes, side: Literal["x", "y"], base: int, multiples: Sequence[float], words: Callable[[float], str]
) -> None:
    """Make a `side` of `axes` logarithmic, with ticks at powers of `base` times `multiples`, each told in `words`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    scale, axis = (axes.set_xscale, axes.xaxis) if side == "x" else (axes.set_yscale, axes.yaxis)
    scale("log", base=base)
    axis.set_major_locator(LogLocator(base=base, subs=multiples))
    axis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    axis.set_minor_formatter(NullFormatter())


def empty(axes: Axes, sentence: str) -> None:
    """Say on `axes` why there is nothing to see."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, sentence, ha="center", va="center", color=MUTED, transform=axes.transAxes)


def require_matplotlib() -> None:
    """Raise MissingExtra unless figures can be drawn: before a long run rather than after it."""
    with canvas(1, 1, ""):
        pass
