"""Pictures of the race: accuracy over time, a panel for each line; one file for each network and scenario.

    python benchmarks/race/pictures.py RESULTS.json ... --to FOLDER

Results are documents of `race.py --json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.report.canvas import COLORS, LINES, MUTED, canvas, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
LOWEST = 0.8
"""Accuracy at the bottom of a picture."""


def main() -> None:
    """Draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=Path())
    words = parser.parse_args()
    documents = [json.loads(path.read_text()) for path in words.results]
    cells: dict[tuple[str, str], list[Row]] = {}
    for document in documents:
        for row in document["rows"]:
            cells.setdefault((document["options"]["network"], row["scenario"]), []).append(row)
    for (network, scenario), rows in cells.items():
        path = words.to / f"race-{network}-{scenario}.svg"
        path.write_text(picture(rows, f"{network}, {scenario}", documents[0]["options"]["target"]))
        print(path)


def picture(rows: Sequence[Row], title: str, target: float) -> str:
    """Return an SVG image of the rows of one network and scenario."""
    speeds = sorted({row["mbit"] for row in rows}, reverse=True)
    names = list(dict.fromkeys(row["title"] for row in rows))
    styles = {
        name: {"color": COLORS[i % len(COLORS)], "linestyle": LINES[i // len(COLORS)]} for i, name in enumerate(names)
    }
    with canvas(3.3 * len(speeds) + 2.4, 3.6, title) as figure:
        panels = figure.subplots(1, len(speeds), sharey=True, squeeze=False)[0]
        for axes, mbit in zip(panels, speeds, strict=True):
            draw(axes, [row for row in rows if row["mbit"] == mbit], styles)
            axes.axhline(target, color=MUTED, linewidth=0.8)
            axes.set_title(f"{mbit:g} Mbit/s")
            axes.set_xlabel("seconds since the first step")
        panels[0].set_ylabel("accuracy")
        panels[0].set_ylim(LOWEST, 1.0)
        lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
        shown = [name for name in names if name in lines]
        figure.legend([lines[name] for name in shown], shown, loc="outside right upper")
        return svg(figure)


def draw(axes: Axes, rows: Sequence[Row], styles: dict[str, dict[str, Any]]) -> None:
    """Draw one line over another for each contestant."""
    for row in rows:
        seconds, accuracies = zip(*row["accuracies"], strict=True) if row["accuracies"] else ((), ())
        axes.plot(seconds, accuracies, label=row["title"], marker=".", markersize=3, **styles[row["title"]])


if __name__ == "__main__":
    main()
