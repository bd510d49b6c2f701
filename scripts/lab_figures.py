"""Draw the pictures of docs/lab from the tables there: `python scripts/lab_figures.py`.

A comment such as `<!-- figure: yolo; column 3; % of plain yolo train -->` before a table names the picture, the column
of its numbers and their unit. The first column has the labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

LAB = Path(__file__).parents[1] / "docs" / "lab"
_TABLE = re.compile(r"<!-- figure: (\S+); column (\d+); (.+) -->\n\n((?:\|.*\n)+)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_INCHES_PER_BAR = 0.38


def figures(page: str) -> Iterator[tuple[str, str, list[tuple[str, float]]]]:
    """Yield name, unit and bars (label, number) of every picture that `page` asks for."""
    for name, column, unit, table in _TABLE.findall(page):
        rows = [[cell.strip(" `") for cell in row.split("|")] for row in table.splitlines()[2:]]
        numbers = [(row[1].replace("`", ""), _NUMBER.match(row[int(column)].lstrip("*"))) for row in rows]
        yield name, unit, [(label, float(number[0])) for label, number in numbers if number]


def draw(bars: list[tuple[str, float]], unit: str, path: Path) -> None:
    """Write horizontal bars with their numbers as an SVG file."""
    figure = Figure(figsize=(7, 0.9 + _INCHES_PER_BAR * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.barh([label for label, _ in bars], [number for _, number in bars], color="#00897b")
    axes.bar_label(drawn, fmt="{:g}", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Draw all pictures."""
    mpl.rcParams.update({"svg.hashsalt": "evener", "svg.fonttype": "none"})
    (LAB / "figures").mkdir(exist_ok=True)
    for page in sorted(LAB.glob("*.md")):
        for name, unit, bars in figures(page.read_text()):
            draw(bars, unit, LAB / "figures" / f"{name}.svg")


if __name__ == "__main__":
    main()
