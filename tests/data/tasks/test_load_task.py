"""Finding a task by name or in a file; everything that can be wrong with a user's file is told with its place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from evener.data.tasks.load import BUILT_IN_TASKS, load_task, require_task
from evener.records.errors import EvenerError, InvalidInput, InvalidValue, MissingExtra, MissingFile, TrainingFailed
from evener.records.task import Task
from evener.records.version import pip_install
from support.refusals import refused

MAKE = """
    from torch import nn
    from evener import Task

    def make(name):
        return Task(name=name, model=lambda: nn.Linear(1, 1), loss=nn.MSELoss(), train_data=lambda: [])
"""


@pytest.fixture(autouse=True)
def _modules_kept() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("evener_task_", "beside_")):
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "my_task.py"


def write(file: Path, text: str) -> str:
    file.write_text(dedent(MAKE) + dedent(text))
    return str(file)


@pytest.mark.parametrize("name", ["digits", "mnist", "synthetic"])
def test_every_built_in_name_loads(name: str) -> None:
    assert name in BUILT_IN_TASKS
    task = load_task(name)
    assert task.name.startswith(name)
    assert isinstance(task.model(), torch.nn.Module)


def task_modules() -> set[str]:
    """Modules of task files that this process has loaded, also in other tests."""
    return {name for name in sys.modules if name.startswith("evener_task_my_task_")}


def test_listed_names_are_the_existing_ones() -> None:
    assert BUILT_IN_TASKS == ("digits", "mnist", "nfnn", "synthetic", "tiny-imagenet")


def test_options_reach_a_built_in_task() -> None:
    model = load_task("synthetic", options={"kind": "mlp", "image": "1x2x3", "width": "5", "depth": "1"}).model()
    assert next(tuple(p.shape) for p in model.parameters()) == (5, 6)


def test_task_file_loads(file: Path) -> None:
    assert load_task(write(file, "task = make('mine')")).name == "mine"


def test_relative_task_paths_load(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, "task = make('mine')")
    monkeypatch.chdir(file.parent)
    for reference in ("my_task.py", f".{os.sep}my_task.py", f"..{os.sep}{file.parent.name}{os.sep}my_task.py"):
        assert load_task(reference).name == "mine"


def test_function_receives_the_data_folder_and_options(file: Path) -> None:
    reference = write(file, "def task(data_dir=None, depth: int = 3): return make(f'{data_dir} {depth + 1}')")
    assert load_task(reference).name == "None 4"
    assert load_task(reference, Path("there"), {"depth": "6"}).name == "there 7"


def test_function_without_a_data_folder_parameter_is_called_without_it(file: Path) -> None:
    assert load_task(write(file, "def task(): return make('plain')")).name == "plain"


def test_task_file_is_read_again_each_time(file: Path) -> None:
    assert load_task(write(file, "task = make('first')")).name == "first"
    assert load_task(write(file, "task = make('the second')")).name == "the second"


def test_task_files_with_the_same_name_do_not_mix(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "my_task.py", f"task = make('{folder}')\nclass Mark: pass")
    before = task_modules()
    first, second = (load_task(str(tmp_path / folder / "my_task.py")) for folder in ("a", "b"))
    assert (first.name, second.name) == ("a", "b")
    assert len(task_modules() - before) == 2


def test_task_file_can_import_files_from_its_folder(file: Path) -> None:
    (file.parent / "beside_model.py").write_text("NAME = 'from beside'")
    assert load_task(write(file, "from beside_model import NAME\ntask = make(NAME)")).name == "from beside"


def test_unknown_name_lists_known_and_similar_names() -> None:
    sentence = (
        "there is no task 'mnits', did you mean 'mnist'?; Evener has digits, mnist, nfnn, synthetic, tiny-imagenet; "
        "for one of your own give the path of its Python file"
    )
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        load_task("mnits")
    with refused(InvalidInput):
        load_task("xyz")


def test_missing_task_file_is_named(file: Path) -> None:
    with pytest.raises(MissingFile, match=re.escape(f"there is no task file {file}")):
        load_task(str(file))


def test_task_file_that_is_not_python_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("a: 1")
    with pytest.raises(MissingFile, match=re.escape(f"{file} is not a Python file: a task file ends in .py")):
        load_task(str(file))


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        ("other = 1", InvalidInput, " must define task, a Task or a function that returns one; there is none"),
        ("task = 5", InvalidInput, " must define task, a Task or a function that returns one; it is of type int"),
        ("def task(): return 5", InvalidInput, ": the function task must return a Task, it returned type int"),
        ("\ntask = 1 / 0", TrainingFailed, " line 8: ZeroDivisionError: division by zero"),
        (
            "def task():\n    x = 1\n    return undefined",
            TrainingFailed,
            " line 9: NameError: name 'undefined' is not defined",
        ),
        (
            "def f():\n    return undefined\ndef task():\n    return f()",
            TrainingFailed,
            " line 8: NameError: name 'und",
        ),
        ("def task(:", TrainingFailed, " line 7: SyntaxError: "),
        ("import no_such_module", TrainingFailed, " line 7: ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise ValueError('one\\ntwo')", TrainingFailed, " line 7: ValueError: one"),
        ("import beside_broken", TrainingFailed, " line 7: RuntimeError: elsewhere"),
    ],
)
def test_task_file_errors_are_reported_with_file_and_line(
    text: str, kind: type[EvenerError], sentence: str, file: Path
) -> None:
    (file.parent / "beside_broken.py").write_text("\n\n\nraise RuntimeError('elsewhere')")
    with pytest.raises(kind, match="^" + re.escape(f"{write(file, text)}{sentence}")) as caught:
        load_task(str(file))
    assert "\n" not in str(caught.value)


def test_failed_task_file_leaves_no_module(file: Path) -> None:
    before = task_modules()
    with pytest.raises(TrainingFailed):
        load_task(write(file, "1 / 0"))
    assert task_modules() == before


def test_evener_errors_in_a_task_file_are_raised_unchanged(file: Path) -> None:
    text = "from evener.records.errors import InvalidValue\ndef task(): raise InvalidValue('depth', 0, 'positive')"
    with refused(InvalidValue):
        load_task(write(file, text))


@pytest.mark.parametrize(("data_dir", "options"), [(Path("d"), {}), (None, {"depth": "1"})])
def test_task_that_is_not_a_function_refuses_options(
    data_dir: Path | None, options: dict[str, str], file: Path
) -> None:
    reference = write(file, "task = make('mine')")
    sentence = f"{file}: task is not a function, so it takes no data folder and no options"
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        load_task(reference, data_dir, options)


def test_unknown_option_error_names_the_task() -> None:
    with refused(InvalidInput):
        load_task("synthetic", options={"dept": "2"})


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("BUILT_IN_TASKS[0]", "digits"),
        ("load_task('digits')", f"MissingExtra: PyTorch is not installed: {pip_install('torch')}"),
        ("load_task('./my_task.py')", f"MissingExtra: PyTorch is not installed: {pip_install('torch')}"),
    ],
)
def test_loading_without_torch_names_the_install_command(code: str, expected: str, file: Path) -> None:
    write(file, "task = make('mine')")
    script = dedent(f"""
        import sys
        sys.modules["torch"] = None
        from evener.records.errors import EvenerError
        from evener.data.tasks.load import BUILT_IN_TASKS, load_task
        try:
            print({code})
        except EvenerError as error:
            print(f"{{type(error).__name__}}: {{error}}")
    """)
    result = subprocess.run([sys.executable, "-c", script], cwd=file.parent, capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == (expected, "")


def test_missing_torchvision_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with refused(MissingExtra):
        load_task("tiny-imagenet")


def test_broken_torchvision_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    sentence = (
        "torchvision is installed but does not load (operator torchvision::nms does not exist): install a torchvision "
        "that was built for this PyTorch, see https://pytorch.org/get-started/locally"
    )
    with pytest.raises(MissingExtra, match=re.escape(sentence)):
        load_task("tiny-imagenet")


def test_a_loaded_task_is_a_task() -> None:
    assert isinstance(load_task("digits"), Task)


def test_special_file_is_refused_before_loading(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for nowhere in ("pipe", "."):
        with refused(InvalidInput):
            require_task(f"{tmp_path}/{nowhere}")


def test_program_is_refused_as_a_task_without_running_it(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import evener\nraise SystemExit('it ran')\nrun = evener.join()\n")
    with refused(InvalidInput):
        load_task(str(file))


@pytest.mark.parametrize(
    "task", ["task = make()", "def task(): ...", "from beside import task", "from beside import *"]
)
def test_file_with_a_task_and_a_program_part_is_accepted(tmp_path: Path, task: str) -> None:
    file = tmp_path / "both.py"
    file.write_text(f"import evener\n{task}\nif __name__ == '__main__':\n    run = evener.join()\n")
    require_task(str(file))
