"""The translation example: pairs are drawn by temperature, sentences become numbers, a pipeline trains them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.commands.train import perform
from evener.config.run_config import RunConfig
from evener.data.tasks.load import import_file
from evener.records.errors import MissingFile
from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.refusals import refused

FILE = Path(__file__).parents[2] / "examples" / "07_translation.py"


@pytest.fixture(scope="module")
def example() -> Any:
    return import_file(FILE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thousand pairs of sentences in which each word has one translation."""
    made = tmp_path_factory.mktemp("text")
    lines = [f"I see {i % 7} cat{i % 3}.\tich sehe {i % 7} katze{i % 3} ." for i in range(1000)]
    with zipfile.ZipFile(made / "deu-eng.zip", "w") as archive:
        archive.writestr("deu.txt", "\n".join([*lines, "too long " * 20 + "\tzu lang"]))
    return made


def test_higher_temperature_draws_the_small_pair_more_often(example: Any) -> None:
    sizes = [1000, 10]
    shares = [float(example.probabilities(sizes, temperature)[1]) for temperature in (1, 2, 5, 1e9)]
    assert shares[0] == pytest.approx(10 / 1010)
    assert shares[1] == pytest.approx(1 / 11)
    assert shares == sorted(shares)
    assert shares[3] == pytest.approx(0.5)


def test_sample_holds_source_with_language_target_and_successors(example: Any, folder: Path) -> None:
    data = example.Sentences(folder, 40, samples=300, temperature=5.0, held_out=False)
    words = {number: word for word, number in data.numbers.items()}
    tags = set()
    for (source, target), successors in (data[i] for i in range(len(data))):
        assert source.shape == target.shape == successors.shape == (example.LONGEST + 1,)
        tags.add(int(source[0]))
        length = int((target != example.PADDING).sum())
        assert target[0] == example.BEGIN
        assert torch.equal(target[1:length], successors[: length - 1])
        assert successors[length - 1] == example.END
        first = "ich" if source[0] == example.TO_GERMAN else "i"
        assert words[int(successors[0])] == first
    assert tags == {example.TO_GERMAN, example.TO_ENGLISH}


def test_all_language_pairs_are_drawn_by_temperature(example: Any, tmp_path: Path) -> None:
    for language, word, lines in (("deu", "katze", 2000), ("fra", "chat", 1200), ("spa", "gato", 700)):
        with zipfile.ZipFile(tmp_path / f"{language}-eng.zip", "w") as archive:
            archive.writestr(f"{language}.txt", "\n".join(f"cat {i % 9}\t{word} {i % 9}" for i in range(lines)))
    counts = {}
    for temperature in (1.0, 100.0):
        data = example.Sentences(tmp_path, 60, samples=4000, temperature=temperature, held_out=False)
        tags = [int(source[0]) for (source, _), _ in (data[i] for i in range(len(data)))]
        counts[temperature] = {tag: tags.count(tag) for tag in set(tags)}
        assert set(tags) == {example.TO_GERMAN, example.TO_ENGLISH, 6, 7}
        assert min(data.numbers.values()) == 8
        words = {number: word for word, number in data.numbers.items()}
        first = {int(source[0]): words[int(target[1])] for (source, target), _ in (data[i] for i in range(400))}
        assert (first[example.TO_GERMAN], first[6], first[7]) == ("katze", "chat", "gato")
    assert counts[1.0][example.TO_GERMAN] > 5 * counts[1.0][7]  # 1488 sentences to 188
    assert counts[100.0][example.TO_GERMAN] < 1.3 * counts[100.0][7]


def test_long_sentences_are_left_out(example: Any, folder: Path) -> None:
    assert len(example.pairs(folder)) == 1000


def test_missing_data_are_reported(example: Any, tmp_path: Path) -> None:
    with refused(MissingFile):
        example.task(data_dir=tmp_path)


@pytest.mark.slow
def test_pipeline_of_uneven_nodes_learns_to_translate(folder: Path, tmp_path: Path) -> None:
    config = RunConfig(
        task=str(FILE),
        data=folder,
        option={"samples": "1500", "layers": "1", "dim": "32", "words": "40"},
        strategy="pipeline",
        epochs=3,
        output=tmp_path / "run",
        local_nodes="1.0,0.5",
    )
    perform(config)
    found = read_noun(tmp_path / "run" / "record.json", TrainRecord).validations
    assert found[-1].loss < 0.5 * found[0].loss
