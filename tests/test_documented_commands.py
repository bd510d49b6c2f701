"""What README and docs tell people to type is what the commands take, and works: read from the pages themselves."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evener.cli.app import app_of
from evener.cli.fields import with_default_port
from evener.commands import dashboard as page
from evener.commands import demo
from evener.commands import doctor as doctor_command
from evener.commands import join as ps_node
from evener.commands import plan as plan_command
from evener.commands import relay as relay_command
from evener.commands import train as commands
from evener.commands import train_as_ranks as ranks_train
from evener.commands import train_by_agreement as ps_train
from evener.commands import up as ps_master
from evener.experiments import abci, gpipe, nfnn, scattered, strategies
from evener.frontends.programs import calling, script
from evener.search import command as search
from support.commands import evener
from support.documented import documented_commands, documented_file

COMMANDS = [line for line in documented_commands() if "yolo" not in line]
"""Without those of docs/yolo.md, which yolo/ tests where Ultralytics is installed."""
_OF_A_MASTER = ("up", "relay", "join", "leave", "nodes", "stop", "down", "invite")
_WITHOUT_END = "dashboard"
"""Until Ctrl-C: report/live/."""
_ELSEWHERE = ("--agreement ", "--master", "--home", "--nodes", "cuda", "nfnn", "tiny-imagenet", "evener experiment ")
RUN_HERE = [
    line
    for line in COMMANDS
    if line.split()[1] not in (*_OF_A_MASTER, _WITHOUT_END) and not any(word in line for word in _ELSEWHERE)
]
"""Others need a master, a GPU, MNIST or torchvision: commands/test_ps_commands.py, cuda/, experiments/, tasks/."""


def test_pages_contain_every_main_command() -> None:
    assert {"train", "plan", "benchmark", "up", "join", "nodes", "down"} <= {line.split()[1] for line in COMMANDS}


@pytest.mark.parametrize("line", COMMANDS)
def test_documented_options_of_every_command_are_accepted(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ask(config: Any, *_: Any, **__: Any) -> None:
        asked.append(config)

    for module, name in [
        (calling, "train_command"), *((commands, name) for name in ("benchmark", "trace")), (demo, "demo"),
        *((ps_master, name) for name in ("up", "nodes", "stop", "down")),
        (script, "run_program"), (plan_command, "plan"),
        *((experiment, "run") for experiment in (abci, gpipe, nfnn, scattered, strategies)),
        *((ps_node, name) for name in ("join", "leave")), (relay_command, "relay"),
        (ps_train, "train_by_agreement"), (ranks_train, "train_as_ranks"),
        (page, "dashboard"), (ps_master, "invite"), (doctor_command, "doctor"), (search, "tune"),
    ]:  # fmt: skip
        monkeypatch.setattr(module, name, ask)
    monkeypatch.setattr("evener.cli.commands.require_files", lambda config: None)  # they are the reader's
    monkeypatch.setattr(ps_master, "require_submitter", lambda access: None)  # of a master
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()
    for name in ("my_task.py", "my_search.py", "train.py", "bccd.yaml"):
        (tmp_path / name).touch()
    result = CliRunner().invoke(app_of(), with_default_port(shlex.split(line)[1:]))
    assert result.exit_code == 0, result.output
    assert len(asked) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader types: with the files that the pages show."""
    made = tmp_path_factory.mktemp("reader")
    (made / "my_task.py").write_text(documented_file("docs/tutorial/own-model.md", "my_task.py"))
    (made / "my_search.py").write_text(documented_file("docs/tune.md", "my_search.py"))
    (made / "train.py").write_text(documented_file("docs/programs.md", "train.py"))
    for words in (("benchmark", "--task", "my_task.py"), ("plan", "my_task.py", "--save", "plan.json")):
        result = evener(*words, cwd=made, timeout=300)
        assert result.returncode == 0, result.stderr
    (made / "measured").mkdir()
    for name in MEASURED:
        (made / name).rename(made / "measured" / name)
    return made


MEASURED = ("cluster.json", "plan.json")
"""Files that earlier commands of a reader have left; each command begins with those of one node."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("line", RUN_HERE)
def test_every_documented_command_works(line: str, folder: Path) -> None:
    for left in (folder / "runs", *([folder / "kept"] if "--resume" not in line else [])):
        shutil.rmtree(left, ignore_errors=True)
    for name in MEASURED:
        shutil.copy(folder / "measured" / name, folder / name)
    result = evener(*shlex.split(line)[1:], cwd=folder, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "nan" not in result.stdout.split()
