"""`evener.toml` beside a task says how it is usually trained: below what is typed, above the defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from evener.cli.app import app_of
from evener.config.config_file import FILE, usual_options
from evener.config.run_config import RunConfig
from evener.frontends.programs import calling
from evener.records.errors import InvalidFile, InvalidInput
from evener.search.options import TuneConfig
from support.commands import TINY, evener_here, last_json
from support.refusals import refused

Asks = Callable[..., RunConfig]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asks:
    """What `evener train` would do with a task beside a file, of what is typed."""
    configs: list[RunConfig] = []
    monkeypatch.setattr(calling, "train_command", lambda config, **_: configs.append(config))
    (tmp_path / "my_task.py").touch()

    def ask(text: str, *words: str, task: str = "my_task.py") -> RunConfig:
        (tmp_path / FILE).write_text(text)
        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(app_of(), ["train", task, *words])
        if result.exception is not None:
            raise result.exception
        return configs[-1]

    return ask


def test_command_line_overrides_the_file_and_the_file_the_defaults(asked: Asks) -> None:
    text = "epochs = 3\nbatch-size = 50\ncheck = false\n"
    config = asked(text, "--epochs", "8", "--check")
    assert (config.epochs, config.batch_size, config.check, config.seed) == (8, 50, True, 0)
    assert config.usual == "batch_size=50 (from evener.toml)"


def test_typed_default_value_overrides_the_file(asked: Asks) -> None:
    assert asked("seed = 7", "--seed", "0").seed == 0
    assert not asked("compile = true", "--no-compile").compile
    assert asked("compile = true").compile


def test_task_options_are_merged_one_by_one(asked: Asks) -> None:
    config = asked("[option]\nwidth = 16\nimage = [3, 64, 64]\nnorm = true", "--option", "width=32")
    assert config.option == {"width": "32", "image": "3x64x64", "norm": "True"}
    assert config.usual == "option.image=3x64x64, option.norm=True (from evener.toml)"


def test_numbers_and_lists_are_accepted(asked: Asks) -> None:
    config = asked("local_nodes = [1.0, 0.5]\nshares = [2, 1]\npatience = 5\ncheckpoint_every = 100\n")
    assert (config.local_nodes, config.shares, config.patience, config.checkpoint_every) == ("1.0,0.5", "2,1", 5, "100")


def test_paths_are_relative_to_the_folder_of_the_file(asked: Asks, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_task.py").touch()
    (tmp_path / "mine" / FILE).write_text('data = "images"\noutput = "/runs/x"')
    config = asked("epochs = 2", task="mine/my_task.py")
    assert (config.data, config.output, config.epochs) == (Path("mine/images"), Path("/runs/x"), None)


def test_search_uses_training_options_and_its_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[TuneConfig] = []
    monkeypatch.setattr("evener.search.command.tune", lambda config, **_: configs.append(config))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_task.py").touch()
    text = 'epochs = 3\nworkers = 2\noutput = "x"\n[option]\nwidth = 16\n[tune]\ntrials = 9\nseed = 4\njoin = false\n'
    (tmp_path / FILE).write_text(text)
    for words in ((), ("--trials", "5", "--join", "--option", "width=8")):
        result = CliRunner().invoke(app_of(), ["tune", "my_task.py", "--vary", "lr=0.1,0.2", *words])
        assert result.exception is None, result.output
    usual, typed = configs
    assert (usual.epochs, usual.trials, usual.seed, usual.join, usual.option) == (3, 9, 4, False, {"width": "16"})
    assert usual.output is None  # of a training
    assert usual.usual == "epochs=3, trials=9, seed=4, join=False, option.width=16 (from evener.toml)"
    assert (typed.trials, typed.join, typed.option) == (5, True, {"width": "8"})
    (tmp_path / FILE).write_text("[tune]\ntrails = 9\n")
    failed = CliRunner().invoke(app_of(), ["tune", "my_task.py", "--vary", "lr=0.1,0.2"])
    assert "evener.toml line 2: evener tune has no option 'trails', did you mean 'trials'?" in str(failed.exception)


def test_training_ignores_the_table_of_a_search(asked: Asks) -> None:
    config = asked("epochs = 3\n[tune]\ntrials = 9\n")
    assert (config.epochs, config.usual) == (3, "epochs=3 (from evener.toml)")


def test_run_from_python_uses_the_file_beside_a_named_task(tmp_path: Path) -> None:
    (tmp_path / "usual_task.py").write_text(f"from pathlib import Path\nexec(Path({str(TINY)!r}).read_text())\n")
    (tmp_path / FILE).write_text("epochs = 1\nseed = 5\n")
    _, record = calling.train(tmp_path / "usual_task.py", output=tmp_path / "run", devices="cpu", seed=7, quiet=True)
    assert (record.epochs, record.seed) == (1, 7)
    assert record.usual == f"epochs=1 (from {tmp_path / FILE})"
    (tmp_path / FILE).write_text('agreement = "sync"\n')
    with refused(InvalidInput):
        calling.train(tmp_path / "usual_task.py", output=tmp_path / "run", devices="cpu", quiet=True)


def test_built_in_tasks_ignore_the_file(asked: Asks) -> None:
    config = asked("epochs = 3", task="digits")
    assert (config.epochs, config.usual) == (None, "")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# mine\nepocs = 3", "evener.toml line 2: evener train has no option 'epocs', did you mean 'epochs'?"),
        ('task = "digits"', "evener.toml line 1: evener train has no option 'task'"),
        ('[mine]\nepochs = "3"', "evener.toml line 1: evener train has no option 'mine'"),
        ('\nepochs = "3"', "evener.toml line 2: epochs must be a whole number, got '3'"),
        ("data = 3", "evener.toml line 1: data must be the name of a file or folder"),
        ("epochs = true", "evener.toml line 1: epochs must be a whole number, got True"),
        ('token = "secret"', "line 1: do not put a token into a file beside code"),
        ("epochs 3", "evener.toml: Expected '=' after a key in a key/value pair (at line 1, column 8)"),
    ],
)
def test_error_in_the_file_is_reported_with_its_line(asked: Asks, text: str, sentence: str) -> None:
    with pytest.raises(InvalidFile) as refused:
        asked(text)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seed = 1\nepochs = -1", "got -1; --epochs is from evener.toml line 2"),
        ('strategy = "filtre"', "did you mean 'filter'?; --strategy is from evener.toml line 1"),
        ("staleness = 2", "--staleness belongs to --agreement bounded; --staleness is from evener.toml line 1"),
    ],
)
def test_invalid_value_is_reported_with_its_origin(asked: Asks, text: str, sentence: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        asked(text)
    assert sentence in str(refused.value)


def test_typed_error_is_not_attributed_to_the_file(asked: Asks) -> None:
    with pytest.raises(InvalidInput) as refused:
        asked("epochs = 3", "--batch-size", "0")
    assert str(refused.value) == "--batch-size must be positive, got 0"


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"\xff")
    with refused(InvalidFile), usual_options(_typed(tmp_path), ()):
        pass


def _typed(folder: Path) -> dict[str, Any]:
    return msgspec.structs.asdict(RunConfig(task=str(folder / "my_task.py")))


def test_first_line_and_record_list_the_options_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(Path(TINY).read_text())
    (tmp_path / FILE).write_text('epochs = 1\ndevices = "cpu"\noutput = "out"\n')
    result = evener_here("train", "tiny.py", "--json", cwd=tmp_path)
    assert last_json(result)["task"]
    told = "epochs=1, devices=cpu, output=out (from evener.toml)"
    assert f'"usual": "{told}"' in (tmp_path / "out" / "record.json").read_text()
