"""Where nothing can be written, a command says so before it works, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import TINY, evener_here


@pytest.mark.parametrize(
    "words",
    [
        ("benchmark", "--output"),
        ("trace", TINY, "--output"),
        ("plan", "vgg16", "--machines", "v100", "--save"),
        ("report", "record.json", "--output"),
        ("demo", "--output"),
        ("up", "--home"),
        ("train", TINY, "--output"),
    ],
    ids=lambda words: words[0],
)
def test_an_output_below_a_file_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = evener_here(*words, "file/out", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("evener: cannot write into ")
    assert len(result.stderr.splitlines()) == 1


def test_a_file_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    result = evener_here("trace", TINY, "--output", "folder", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, "evener: cannot write folder: it is a folder; name a file in it\n")


def test_a_report_of_a_folder_is_one_of_its_record(tmp_path: Path) -> None:
    result = evener_here("report", ".", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("evener: cannot read record.json")
