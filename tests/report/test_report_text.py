"""Numbers as people read them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from evener.report.text import ellipsis, grid, human_bytes, human_count, human_seconds, percent


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.4, "999 B"),
        (1000, "1.00 KB"),
        (12_345, "12.3 KB"),
        (999_499, "999 KB"),
        (999_600, "1.00 MB"),
        (2.4e10, "24.0 GB"),
        (10**18, "1,000 PB"),
    ],
)
def test_bytes_have_three_digits_and_a_decimal_unit(num_bytes: float, text: str) -> None:
    assert human_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3.2e-7, "0.320 µs"),
        (41.2e-6, "41.2 µs"),
        (9.994e-4, "999 µs"),
        (9.996e-4, "1.00 ms"),
        (0.0412, "41.2 ms"),
        (0.9996, "1.00 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (11_220, "3 h 07 min"),
        (float("inf"), "inf"),
    ],
)
def test_seconds_go_from_microseconds_to_hours(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (0.0123, "0.0123"),
        (9.996, "10.0"),
        (99.96, "100"),
        (999.6, "1,000"),
        (12_345.6, "12,346"),
        (-4.5, "-4.50"),
    ],
)
def test_counts_have_three_digits_and_separated_thousands(count: float, text: str) -> None:
    assert human_count(count) == text


@pytest.mark.parametrize(
    ("fraction", "text"), [(0, "0 %"), (0.004, "0.4 %"), (0.0994, "9.9 %"), (0.58, "58 %"), (1, "100 %")]
)
def test_small_percentages_have_a_digit_after_the_point(fraction: float, text: str) -> None:
    assert percent(fraction) == text


def test_long_name_is_shortened_in_its_middle() -> None:
    assert ellipsis("node-17.example.org", 10) == "node…e.org"
    assert len(ellipsis("x" * 50, 9)) == 9
    assert ellipsis("node-17", 7) == "node-17"


def shown(width: int) -> list[str]:
    """The lines of a table of two names, twelve numbers with units, and reasons."""
    columns = ("strategy", *(f">on {2**i}" for i in range(12)), "limited by")
    rows = [
        (name, *(f"{i}.{i}{i} ms" for i in range(12)), "the link between them " * 3) for name in ("data", "sharded")
    ]
    console = Console(file=io.StringIO(), width=width)
    console.print(grid("Ways", columns, [rows[0], None, rows[1]], caption="Of a step."))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 300])
def test_wide_table_continues_in_blocks_with_complete_names(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for i in range(12):
        assert text.count(f"on {2**i} ") == 1
        assert text.count(f"{i}.{i}{i} ms") >= 2
    assert text.count("Ways") == text.count("Of a step.") == 1
    assert text.count("sharded") == text.count("strategy") == (1 if width == 300 else text.count("data"))


LONG = "attic-workstation-with-a-name-that-is-long.cluster.example.org-17"


@pytest.mark.parametrize("length", [12, 40, 64])
@pytest.mark.parametrize("numbers", [1, 7])
def test_long_names_wrap_at_80_columns_without_cutting_units(length: int, numbers: int) -> None:
    name = (LONG * 2)[:length]
    caption = (
        "380,170 parameters (1.52 MB); per sample 47.3 MFLOP forward, 139 KB kept for backward, which is all of it"
    )
    columns = ["node", *(f">a heading {i}" for i in range(numbers)), "reason"]
    console = Console(file=io.StringIO(), width=80)
    cells = [f"unsupported [{i}]" for i in range(numbers)]
    console.print(grid("A title", columns, [[name, *cells, "it would slow the others down"]], caption=caption))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text
    assert all(f"unsupported [{i}]" in text and f"a heading {i}" in text for i in range(numbers))
    starts = "".join(line.split()[0] for line in lines if line.strip() and line.split()[0] in name)
    assert name.replace(" ", "") in starts
    assert "per sample 47.3 MFLOP forward" in " ".join(text.split())
    assert text.splitlines()[-2].startswith("380,170 parameters (1.52 MB); per sample 47.3 MFLOP")


def test_optional_columns_are_dropped_before_splitting_a_table() -> None:
    columns = ("node", "model?", ">cores?", ">GB/s?", ">matmul", ">score")
    rows = [("node-0", "AMD EPYC 9354 32-Core Processor", "64", "81.4", "192", "287")]
    for width, left_out in ((100, []), (70, ["GB/s"]), (60, ["cores", "GB/s"]), (30, ["model", "cores", "GB/s"])):
        console = Console(file=io.StringIO(), width=width)
        console.print(grid("Devices", columns, rows))
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert max(map(len, text.splitlines())) <= width
        assert text.count("node-0") == 1
        assert all(number in text for number in ("192", "287"))
        assert ("Left out" in text) == bool(left_out)
        told = text.partition("narrow: ")[2].replace(chr(10), " ") if left_out else ""
        assert [name for name in ("model", "cores", "GB/s") if name in told] == left_out


def test_row_keeps_its_cells_when_columns_are_dropped() -> None:
    console = Console(file=io.StringIO(), width=24)
    console.print(grid("T", ("a", "much longer?", ">b"), [("1", "x" * 20, "2")]))
    assert isinstance(console.file, io.StringIO)
    assert ["1", "2"] in [line.split() for line in console.file.getvalue().splitlines()]
