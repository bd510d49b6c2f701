"""The help of the commands: every option under one heading, lines that the commands take, and the version."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec.structs import fields
from typer.testing import CliRunner

from evener import __version__
from evener.cli.app import app_of
from evener.cli.help import EXAMPLES, PLAN, TRAIN, Panels
from evener.config.options import PlanConfig
from evener.config.run_config import RunConfig
from support.commands import evener


@pytest.mark.parametrize(("kind", "panels"), [(RunConfig, TRAIN), (PlanConfig, PLAN)])
def test_every_option_is_under_one_heading(kind: Any, panels: Panels) -> None:
    shown = [name for names in panels.values() for name in names]
    options = {one.name for one in fields(kind) if "description" in str(one.type) and not one.required}
    assert len(shown) == len(set(shown))
    assert set(shown) == options


@pytest.mark.parametrize(("command", "line"), [(name, line) for name, lines in EXAMPLES.items() for line in lines])
def test_every_example_uses_options_of_its_command(command: str, line: str) -> None:
    words = shlex.split(line)
    given = words[words.index("evener") + 1 :]
    assert given[0] == command
    known = {name for one in typer.main.get_command(app_of()).commands[command].params for name in one.opts}  # type: ignore[attr-defined]
    assert {word for word in given if word.startswith("--")} <= known


def test_help_shows_headings_and_examples_within_80_columns() -> None:
    shown = CliRunner().invoke(app_of(), ["train", "--help"], terminal_width=80, env={"COLUMNS": "80"}).stdout
    for heading in TRAIN:
        assert f" {heading} " in shown
    assert EXAMPLES["train"][0] in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_version_is_one_line(tmp_path: Any) -> None:
    result: subprocess.CompletedProcess[str] = evener("--version", cwd=tmp_path)
    assert (result.stdout, result.returncode) == (f"evener {__version__}\n", 0)


def test_cli_starts_without_loading_slow_packages() -> None:
    code = "import sys, evener.cli.app; print({'numpy', 'torch', 'matplotlib', 'cryptography'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "set()"


@pytest.mark.parametrize("words", [["train", "my_task.py", "--help"], ["tune", "--trials", "3", "my_task.py", "-h"]])
def test_help_shows_the_options_of_the_named_task(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_task.py").write_text("def task(width: int = 64, *, name: str): pass")
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app_of(), words, env={"COLUMNS": "80"}).stdout
    assert "Options of my_task.py, each as --option NAME=VALUE" in shown
    assert "width=  <int>  [default: 64]" in shown
    assert "name=   <str>  [required]" in shown


def test_help_without_a_task_shows_no_task_options() -> None:
    assert "--option NAME=VALUE" not in CliRunner().invoke(app_of(), ["train", "--help"]).stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("evener tr", {"train", "trace"}),
        ("evener train --micro", {"--micro-batches"}),
        ("evener train --strategy sp", {"spatial"}),
        ("evener train --agreement av", {"average"}),
        ("evener tune --prune h", {"hyperband"}),
    ],
)
def test_shell_completes_commands_options_and_choices(typed: str, offered: set[str]) -> None:
    words = {"_EVENER_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    result = CliRunner().invoke(app_of(), [], prog_name="evener", env=words)
    assert set(result.stdout.split()) == offered
