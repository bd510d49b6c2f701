"""Which files travel with a task: those that its imports name, and nothing is run to find them."""

from __future__ import annotations

from pathlib import Path

from evener.commands.doctor_nodes import files_needed
from evener.records.errors import MissingFile, TrainingFailed
from support.refusals import refused


def write(folder: Path, **files: str) -> Path:
    """The file `task.py` in `folder`, beside the others; `__` in a name is a folder's slash."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "task.py"


def test_modules_beside_the_task_are_found_recursively(tmp_path: Path) -> None:
    task = write(tmp_path, task="import first\nimport os", first="from second import thing", second="", third="")
    assert files_needed(task) == ["first.py", "second.py", "task.py"]


def test_packages_are_found_with_their_relative_imports(tmp_path: Path) -> None:
    task = write(
        tmp_path,
        task="def late():\n    from pack.inner import one\nfrom loose import leaf",
        pack__init="",
        pack__inner="from . import two\nfrom .deep.three import x\nfrom ..outside import y",
        pack__two="",
        pack__deep__three="from ..four import z",
        pack__four="",
        pack__unused="",
        loose__leaf="import task",
        outside="",
    )
    (tmp_path / "pack" / "init.py").rename(tmp_path / "pack" / "__init__.py")
    wanted = ["pack/__init__.py", "pack/deep/three.py", "pack/four.py", "pack/inner.py", "pack/two.py"]
    assert files_needed(task) == ["loose/leaf.py", "outside.py", *wanted, "task.py"]


def test_import_scan_executes_nothing(tmp_path: Path) -> None:
    assert files_needed(write(tmp_path, task="raise SystemExit(1)\nimport helper", helper="1 / 0")) == [
        "helper.py",
        "task.py",
    ]


def test_missing_task_and_syntax_errors_are_named(tmp_path: Path) -> None:
    with refused(MissingFile):
        files_needed(tmp_path / "task.py")
    with refused(TrainingFailed):
        files_needed(write(tmp_path, task="import helper", helper="\ndef"))
