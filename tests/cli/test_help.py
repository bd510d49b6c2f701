"""The help of the commands: every option under one heading, lines that the commands take, and the version."""

from __future__ import annotations

import shlex
import subprocess
from typing import Any

import pytest
import typer
from msgspec.structs import fields
from typer.testing import CliRunner

from evener import __version__
from evener.cli.commands import app
from evener.cli.help import EXAMPLES, PLAN, TRAIN, Panels
from evener.run.config import RunConfig
from evener.run.options import PlanConfig
from support.commands import evener


@pytest.mark.parametrize(("kind", "panels"), [(RunConfig, TRAIN), (PlanConfig, PLAN)])
def test_every_option_is_under_one_heading(kind: Any, panels: Panels) -> None:
    shown = [name for names in panels.values() for name in names]
    options = {one.name for one in fields(kind) if "description" in str(one.type) and not one.required}
    assert len(shown) == len(set(shown))
    assert set(shown) == options


@pytest.mark.parametrize(("command", "line"), [(name, line) for name, lines in EXAMPLES.items() for line in lines])
def test_every_example_has_options_that_the_command_takes(command: str, line: str) -> None:
    words = shlex.split(line)
    given = words[words.index("evener") + 1 :]
    assert given[0] == command
    known = {name for one in typer.main.get_command(app).commands[command].params for name in one.opts}  # type: ignore[attr-defined]
    assert {word for word in given if word.startswith("--")} <= known


def test_help_shows_headings_and_examples_within_80_columns() -> None:
    shown = CliRunner().invoke(app, ["train", "--help"], terminal_width=80, env={"COLUMNS": "80"}).stdout
    for heading in TRAIN:
        assert f" {heading} " in shown
    assert EXAMPLES["train"][0] in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_version_is_one_line(tmp_path: Any) -> None:
    result: subprocess.CompletedProcess[str] = evener("--version", cwd=tmp_path)
    assert (result.stdout, result.returncode) == (f"evener {__version__}\n", 0)
