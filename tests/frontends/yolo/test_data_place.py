"""Where images are of a description that came from another machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from evener.frontends.yolo.data_place import described_here, place_of, sent_images
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


DESCRIPTION = "train: images/train\nval: images/val\nnames: {0: cat}\n"


def cats(folder: Path, text: str = DESCRIPTION, name: str = "data.yaml") -> Path:
    """A description, and folders for its images."""
    for part in ("train", "val"):
        (folder / "images" / part).mkdir(parents=True)
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("said", ["", "path: HERE\n", "path: HERE/images/..\n", "path: .\n", "path: gone\n"])
def test_data_that_were_sent_are_never_looked_for_elsewhere(said: str, tmp_path: Path) -> None:
    """Though this machine has the folder that the description names, with other images perhaps."""
    own = cats(tmp_path / "own", said.replace("HERE", str(tmp_path / "own")) + DESCRIPTION)
    sent = cats(tmp_path / "sent", own.read_text())
    images = sent_images(str(own))
    found = yaml.safe_load(described_here(sent.parent, "data.yaml", tmp_path / "scratch", images).read_text())
    assert Path(found["path"]).resolve() == tmp_path / "sent"
    assert found["train"] == "images/train"


def test_images_below_the_description_are_found_there(tmp_path: Path) -> None:
    below = "train: train\nval: val\nnames: {0: cat}\n"
    own = cats(tmp_path / "own", f"path: {tmp_path / 'own' / 'images'}\n{below}")
    sent = cats(tmp_path / "sent", own.read_text())
    found = yaml.safe_load(described_here(sent.parent, "data.yaml", tmp_path / "s", sent_images(str(own))).read_text())
    assert Path(found["path"]).resolve() == tmp_path / "sent" / "images"


@pytest.mark.parametrize(
    "text",
    [
        "path: ELSEWHERE\n" + DESCRIPTION,
        "path: ../elsewhere\n" + DESCRIPTION,
        "train: ELSEWHERE\nval: images/val\nnames: {0: cat}\n",
        "train: [images/train, ELSEWHERE]\nval: images/val\nnames: {0: cat}\n",
        "train: list.txt\nval: images/val\nnames: {0: cat}\n",
    ],
)
def test_data_that_would_not_be_sent_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    own = cats(tmp_path / "own", text.replace("ELSEWHERE", str(tmp_path / "elsewhere")))
    (own.parent / "list.txt").write_text(f"{tmp_path}/elsewhere/1.jpg\n")
    with refused(InvalidInput):
        sent_images(str(own))


def test_description_in_a_folder_is_sent_as_one(tmp_path: Path) -> None:
    folder = cats(tmp_path / "own", f"path: {tmp_path / 'own'}\n{DESCRIPTION}").parent
    (folder / "other.yaml").write_text("[")
    assert place_of(str(folder)) == ("data.yaml", folder)
    assert sent_images(str(folder)) == "."
    cats(tmp_path / "two", name="a.yaml")
    (tmp_path / "two" / "b.yaml").write_text(DESCRIPTION)
    assert place_of(str(tmp_path / "two")) == (".", tmp_path / "two")


def test_missing_description_names_the_option_that_sends_it(tmp_path: Path) -> None:
    with refused(InvalidInput):
        described_here(tmp_path, "data.yaml", tmp_path / "s")
