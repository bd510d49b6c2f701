"""The options of a task are read from its file, of which nothing is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.cli.app import TaskParameter, task_parameters

FILE = '''
raise SystemExit("run")
RATE = 0.1

def task(
    data_dir=None, width: int = 64, rate: float = RATE, *,
    image: tuple[int, ...] = (3, 8, 8), name="a", deep: "bool", other: list = [],
):
    """A task.

    Args:
        width: of its layers.
        rate (float): of learning,
            which may be long.

    Raises:
        ValueError: never.
    """
'''


def test_every_parameter_has_its_kind_default_and_description(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    assert task_parameters(str(tmp_path / "mine.py")) == [
        TaskParameter("width", "int", "64", "of its layers."),
        TaskParameter("rate", "float", "", "of learning,"),
        TaskParameter("image", "sizes, such as 3x64x64", "(3, 8, 8)", ""),
        TaskParameter("name", "str", "'a'", ""),
        TaskParameter("deep", "bool", None, ""),
        TaskParameter("other", "no option", "[]", ""),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [("task = Task(model=f)", []), ("from other import task", None), ("task = other.task", None), ("def task(:", None)],
)
def test_task_that_is_no_function_has_no_known_parameters(
    tmp_path: Path, text: str, found: list[TaskParameter] | None
) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert task_parameters(str(tmp_path / "mine.py")) == found


def test_built_in_tasks_have_parameters_and_other_words_none() -> None:
    assert [one.name for one in task_parameters("digits") or ()] == ["channels", "blocks"]
    assert "width" in {one.name for one in task_parameters("synthetic") or ()}
    assert task_parameters("tiny-imagenet") is not None
    assert task_parameters("--epochs") is None
    assert task_parameters("gone.py") is None
