"""`evener init` writes a task that trains as it is, and overwrites nothing."""

from __future__ import annotations

from pathlib import Path

from evener.commands.train import perform
from evener.config.config_file import FILE, usual_options
from evener.config.run_config import RunConfig
from evener.data.tasks.starter import write_options, write_task
from evener.records.errors import CannotWrite, InvalidInput
from support.refusals import refused


def test_written_task_learns(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    write_task(path)
    assert "from evener import Task" in path.read_text()
    assert "`evener train mine.py --local-nodes 1,0.5`" in path.read_text()
    record = perform(RunConfig(task=str(path), output=tmp_path / "run", devices="cpu"), quiet=True)
    assert record.validation_accuracy is not None
    assert record.validation_accuracy > 0.9


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("mine")
    with refused(InvalidInput):
        write_task(path)
    assert path.read_text() == "mine"


def test_unwritable_paths_are_reported(tmp_path: Path) -> None:
    with refused(CannotWrite):
        write_task(tmp_path / "gone" / "mine.py")
    with refused(InvalidInput):
        write_task(tmp_path / "mine")


def test_written_options_apply_once_uncommented(tmp_path: Path) -> None:
    assert write_options(tmp_path) == tmp_path / FILE
    assert write_options(tmp_path) is None
    text = (tmp_path / FILE).read_text()
    typed = {"task": str(tmp_path / "mine.py"), "option": {}}
    with usual_options(typed, ()) as found:
        assert found.get("usual", "") == ""
    (tmp_path / FILE).write_text("\n".join(line.removeprefix("# ") for line in text.splitlines()[1:]))
    with usual_options(typed, ()) as found:
        config = RunConfig(**found)
    assert (config.epochs, config.batch_size, config.local_nodes, config.option) == (
        10,
        200,
        "1.0,0.5",
        {"width": "128"},
    )
