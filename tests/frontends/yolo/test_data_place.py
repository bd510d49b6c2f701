"""Where images are of a description that came from another machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from evener.frontends.yolo.data_place import described_here, place_of
from evener.records.errors import InvalidInput
from support.refusals import refused


def written(folder: Path, text: str) -> Path:
    (folder / "sent" / "images").mkdir(parents=True)
    (folder / "sent" / "data.yaml").write_text(text)
    return folder / "sent"


@pytest.mark.parametrize("said", [None, "/"])
def test_valid_description_is_used_unchanged(tmp_path: Path, said: str | None) -> None:
    folder = written(tmp_path, "train: images\n" + (f"path: {said}\n" if said else ""))
    assert described_here(folder, "data.yaml", tmp_path) == folder / "data.yaml"


@pytest.mark.parametrize(
    ("said", "place"), [(".", "sent"), ("images", "sent/images"), ("/home/somebody/data", "sent"), ("else", "sent")]
)
def test_missing_data_path_is_replaced_by_the_description_folder(tmp_path: Path, said: str, place: str) -> None:
    folder = written(tmp_path, f"path: {said}\ntrain: images\nnames: {{0: cat}}\n")
    found = yaml.safe_load(described_here(folder, "data.yaml", tmp_path / "own").read_text())
    assert (Path(found["path"]).resolve(), found["train"], found["names"]) == (tmp_path / place, "images", {0: "cat"})


def test_invalid_description_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = written(tmp_path, "path: [")
    with refused(InvalidInput):
        described_here(folder, "data.yaml", tmp_path)


def test_data_are_sent_as_a_name_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "classes").mkdir()
    (tmp_path / "data.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert place_of("classes") == (".", tmp_path / "classes")
    assert described_here(tmp_path / "classes", ".", tmp_path) == tmp_path / "classes"
    assert place_of("data.yaml") == ("data.yaml", tmp_path)
    assert place_of("coco8.yaml") == ("coco8.yaml", None)  # Ultralytics knows it
    assert place_of("") == ("", None)
