"""Bad input is one sentence and exit code 2, without a traceback and without starting anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import TINY, evener, evener_here


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("train", "digit"), "digits"),
        (("train", "nowhere/task.py"), "nowhere/task.py"),
        (("train", TINY, "--local-nodes", ""), "--local-nodes must be a list of one node or more"),
        (("train", TINY, "--local-nodes", "1,-0.5"), "--local-nodes must be speeds from 0.001 to 1, got '-0.5'"),
        (
            ("train", TINY, "--local-nodes", "1,1,1", "--batch-size", "2"),
            "--batch-size must be at least the 3 nodes, got 2",
        ),
        (("train", TINY, "--batch-size", "0"), "--batch-size must be positive, got 0"),
        (("train", TINY, "--batch-size", "51"), "--batch-size must be at most the 50 training samples, got 51"),
        (("train", TINY, "--epochs", "0"), "--epochs must be positive"),
        (("train", TINY, "--accumulate", "99"), "--accumulate must be 1 to 10, got 99"),
        (("train", TINY, "--precision", "int4"), "--precision must be"),
        (("train", TINY, "--strategy", "magic"), "--strategy must be one of auto, data, filter"),
        (("train", TINY, "--plan", "none.json"), "cannot read none.json: No such file or directory"),
        (("train", TINY, "--strategy", "data", "--micro-batches", "3"), "--micro-batches does not go with"),
        (
            ("train", TINY, "--shares", "1,2", "--local-nodes", "1,1,1"),
            "--shares must be one number a node, got '1,2': 2 numbers for 3 nodes",
        ),
        (
            ("train", TINY, "--shares", "most", "--local-nodes", "1,1"),
            "numbers such as 7,2,1, got 'most': 'most' is not a number",
        ),
        (("train", TINY, "--devices", "cuda:99"), "--devices must be all, or some of cpu"),
        (("train", TINY, "--memory", "lots"), "--memory must be a number and a unit, such as 512MB or 4GB, got 'lots'"),
        (("train", TINY, "--patience", "0"), "--patience must be positive seconds"),
        (("train", TINY, "--resume"), "--resume finds no checkpoint, since runs/"),
        (("train", TINY, "--option", "lr"), "--option must be key=value, got 'lr'"),
        (("train", TINY, "--option", "colour=1"), "colour"),
        (("train", "mnist", "--data", "nowhere"), "nowhere"),
        (("train",), "Missing argument"),
        (("train", TINY, "--fast"), "No such option"),
        (("report", "none.json"), "cannot read none.json: No such file or directory"),
    ],
    ids=lambda value: " ".join(value[1:]).replace(TINY, "tiny") if isinstance(value, tuple) else "",
)
def test_invalid_input_gives_one_sentence_and_exit_code_2(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    result = evener_here(*words, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert sentence in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_process_with_invalid_input_ends_with_exit_code_2(tmp_path: Path) -> None:
    result = evener("train", TINY, "--precision", "int4", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("evener: --precision must be")
    assert "Traceback" not in result.stderr


def test_new_run_does_not_overwrite_checkpoints(tmp_path: Path) -> None:
    first = evener_here("train", TINY, "--output", "a", "--epochs", "1", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    again = evener_here("train", TINY, "--output", "a", "--epochs", "1", cwd=tmp_path)
    assert again.returncode == 2
    assert "holds checkpoints of an earlier run; add --resume" in again.stderr


def test_resume_needs_the_same_order_of_samples(tmp_path: Path) -> None:
    assert evener_here("train", TINY, "--output", "a", "--epochs", "1", cwd=tmp_path).returncode == 0
    other = evener_here("train", TINY, "--output", "a", "--resume", "--batch-size", "8", cwd=tmp_path)
    assert other.returncode == 2
    assert "it was made with batch_size 10, this run has 8" in other.stderr


@pytest.mark.slow
def test_batch_that_does_not_fit_in_memory_gives_a_remedy(tmp_path: Path) -> None:
    result = evener("train", TINY, "--local-nodes", "1,1", "--memory", "9KB", "--batch-size", "50", cwd=tmp_path)
    assert result.returncode == 5
    assert "fit" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("strategy", ["auto", pytest.param("data", marks=pytest.mark.slow)])
def test_loss_that_is_not_a_scalar_is_reported(tmp_path: Path, strategy: str) -> None:
    task = (
        Path(TINY)
        .read_text()
        .replace("cross_entropy(outputs, targets)", "cross_entropy(outputs, targets, reduction='none')")
    )
    (tmp_path / "own.py").write_text(task)
    words = ("train", "own.py", "--strategy", strategy, "--batch-size", "8", "--local-nodes", "1,1")
    result = evener_here(*words, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "loss returns a tensor of shape" in result.stderr
    assert "Traceback" not in result.stderr


def test_iterable_dataset_suggests_a_batch_task(tmp_path: Path) -> None:
    stream = "from torch.utils.data import IterableDataset\nclass Stream(IterableDataset):\n    __iter__ = None\n"
    (tmp_path / "own.py").write_text(stream + Path(TINY).read_text().replace("lambda: data(samples, 1)", "Stream"))
    result = evener_here("train", "own.py", cwd=tmp_path)
    assert result.returncode == 2
    assert "streams are trained by a BatchTask" in " ".join(result.stderr.split())
