"""`evener init`: a file with a task that trains as it is, to be made one's own, and one for its usual options.

Needs no PyTorch.
"""

from __future__ import annotations

from pathlib import Path

from evener.records.errors import CannotWrite, InvalidInput

_TEMPLATE = Path(__file__).with_name("template.py")

_OPTIONS = """\
# Usual options of the tasks in this folder: those of `evener train`, with underscores. What is typed goes before.
# epochs = 10
# batch_size = 200
# local_nodes = [1.0, 0.5]

# [option]  # of the task itself
# width = 128
"""


def write_task(path: Path) -> None:
    """Write the template of a task to `path`, for somebody who has Evener installed.

    Raises:
        InvalidInput: it is no Python file, or there is one already.
        CannotWrite: there is no such folder, or it is closed.
    """
    if path.suffix != ".py":
        named = path.with_suffix(".py") if path.name else path / "my_task.py"
        raise InvalidInput(f"a task is a Python file: name it {named}")
    text = _TEMPLATE.read_text().replace("from evener.records.task import", "from evener import")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("THIS_FILE", path.name))
    except FileExistsError:
        raise InvalidInput(f"{path} is there already: name another file") from None
    except OSError as error:
        raise CannotWrite(path, error) from error


def write_options(folder: Path) -> Path | None:
    """Write `evener.toml`, in which nothing is set yet, into a folder that has none; None for another."""
    path = folder / "evener.toml"
    try:
        with path.open("x") as file:
            file.write(_OPTIONS)
    except FileExistsError:
        return None
    except OSError as error:
        raise CannotWrite(path, error) from error
    return path
