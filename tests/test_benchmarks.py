"""Every benchmark says what it takes and can print JSON; those that start ranks still do, at their smallest."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import count

import pytest

from support.benchmarks import FOLDER, NAMES, benchmark

SMALLEST = (
    "check_cost --steps 25 --batch 16 --rounds 1",
    "ddp_parity --blocks 2 --steps 2 --batch 8",
    "dashboard --nodes 4 --steps 200 --seconds 1",
    "elastic_cost --rounds 1 --seconds 0.5 --width 8",
    "merging --rounds 1 --workers 2",
    "oracle_live --networks plain --nodes 1,1 --strategies data,pipeline --steps 2",
    "own_program --blocks 2 --steps 2 --rounds 1 --batch 16",
    "pipeline overhead --rounds 1",
    "ps --updates 60 --blocks 1",
    "self_check --tasks digits --strategies data",
    "strategies filter --ranks 2 --rounds 1",
    "tune --parts overhead",
    "uneven_nodes --speeds 1,0.5 --rounds 1 --epochs 2 --task digits",
    "wire --megabytes 4 --rounds 50 --blocks 1",
)
"""Too short to measure anything."""


def run(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> None:
    """As the command line would."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for limit in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(limit, "1")  # `autodiff` sets them before NumPy is there
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    benchmark(name).main()


@pytest.mark.parametrize("name", NAMES)
def test_results_page_names_the_command_of_each_benchmark(name: str) -> None:
    assert f"python benchmarks/{name}.py" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_help_names_its_command_and_json_option(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, name, "--help")
    assert f"python benchmarks/{name}.py" in (said := capsys.readouterr().out)
    assert "--json" in said


def test_json_holds_the_printed_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "oracle_search", "--devices", "64", "--json")
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["benchmark"] == "oracle_search"
    assert found["options"] == {"json": True, "devices": [64]}
    assert {"cpu", "cores", "os", "python", "evener", "torch", "numpy"} <= found["machine"].keys()
    (row,) = found["rows"]
    assert row["of_limit"] == row["seconds"] / 5
    machine, head, shown = said.err.splitlines()
    assert f"numpy {found['machine']['numpy']}" in machine
    assert head.split()[:2] == ["devices", "seconds"]
    assert shown.split()[:2] == ["64", f"{row['seconds']:.1f}"]


def test_invalid_option_gives_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "uneven_nodes", "--speeds", "fast")
    assert capsys.readouterr().err.startswith("--local-nodes must be")


def test_results_convert_values_to_json(capsys: pytest.CaptureFixture[str]) -> None:
    results, turns = benchmark("results"), benchmark("turns")
    kept = results.Results(argparse.Namespace(json=False, data=FOLDER))
    kept.add("{time:.2f} s", time=turns.spread([3.0, 1.0, 2.0]), rate=float("inf"))
    assert capsys.readouterr().out == "2.00 (1.00 to 3.00) s\n"
    found = json.loads(kept.document())
    assert found["rows"] == [{"time": {"median": 2.0, "least": 1.0, "most": 3.0}, "rate": None}]
    assert found["options"]["data"].endswith("benchmarks")


def test_variants_alternate_after_a_warm_up_round() -> None:
    turns, clock = benchmark("turns"), count()
    assert turns.in_turn({"a": lambda: next(clock), "b": lambda: next(clock)}, 2) == {"a": [2, 4], "b": [3, 5]}
    assert turns.ratios([2.0, 6.0, 4.0], [1.0, 2.0, 4.0]) == turns.Spread(2.0, 1.0, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("line", SMALLEST, ids=lambda line: line.partition(" ")[0])
def test_benchmark_runs_as_its_page_says(line: str) -> None:
    name, *words = line.split()
    command = [sys.executable, str(FOLDER / f"{name}.py"), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]
