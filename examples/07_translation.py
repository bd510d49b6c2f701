"""Translation from and to English in a pipeline: a Transformer, language pairs of unlike size.

    evener train examples/07_translation.py --data FOLDER --strategy pipeline --local-nodes 1.0,0.5 --batch-size 64

FOLDER holds deu-eng.zip of https://www.manythings.org/anki (sentence pairs of Tatoeba, CC BY), a line a pair with a tab
between, and fra-eng.zip, spa-eng.zip ... beside it if there are to be more languages: two pairs each. To show what
temperature does, English to German has all sentences and German to English a twentieth. A pair of n sentences is drawn
with a probability in proportion to n ** (1 / temperature) (Huang et al., 2019, section 5, after Arivazhagan et al.):
with 1 the small pair is hardly seen, with 5 (`--option temperature=5`) almost as often as the large one.

A sample is a source, which begins with the language to translate into, and a target; its loss is the mean over the
target's words. Layers are scaled and logits clipped as in `evener.experiments.models.Transformer`, so that depth does
no harm.
"""

import re
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from evener import Task
from evener.experiments.models.transformer import Transformer
from evener.records.errors import MissingFile

PADDING, UNKNOWN, BEGIN, END, TO_GERMAN, TO_ENGLISH = range(6)
SPECIAL, LONGEST, VALIDATION, RARER = 6, 12, 512, 20


def languages(folder: Path) -> list[str]:
    """Those of FOLDER, German first."""
    found = sorted(path.name.removesuffix("-eng.zip") for path in folder.glob("*-eng.zip"))
    return sorted(found, key=lambda language: language != "deu")


def tag_of(index: int) -> int:
    """Of the language so many places behind German: what the source begins with."""
    return TO_GERMAN if index == 0 else SPECIAL + index - 1


def pairs(folder: Path, language: str = "deu") -> list[tuple[list[str], list[str]]]:
    """(English, the other language) as words, both at most LONGEST long, shuffled."""
    with zipfile.ZipFile(folder / f"{language}-eng.zip") as archive:
        lines = archive.read(f"{language}.txt").decode().splitlines()
    words = [[re.findall(r"\w+|[^\w\s]", side.lower()) for side in line.split("\t")[:2]] for line in lines]
    short = [(english, other) for english, other in words if max(len(english), len(other)) <= LONGEST]
    order = torch.randperm(len(short), generator=torch.Generator().manual_seed(0)).tolist()
    return [short[i] for i in order]


def vocabulary(sentences: list[tuple[list[str], list[str]]], size: int, first: int) -> dict[str, int]:
    """Numbers, from `first` on and below `size`, of the most frequent words of all languages."""
    counts = Counter(word for pair in sentences for side in pair for word in side)
    return {word: i for i, (word, _) in enumerate(counts.most_common(size - first), first)}


def probabilities(sizes: list[int], temperature: float) -> Tensor:
    """Of every language pair."""
    weights = torch.tensor(sizes, dtype=torch.float64) ** (1 / temperature)
    return weights / weights.sum()


class Sentences(Dataset[tuple[tuple[Tensor, Tensor], Tensor]]):
    """`samples` draws from the language pairs: ((source, target), the target's successors), all padded."""

    def __init__(self, folder: Path, size: int, samples: int, temperature: float, held_out: bool) -> None:
        texts = [pairs(folder, language) for language in languages(folder)]
        self.numbers = vocabulary([pair for text in texts for pair in text], size, SPECIAL + len(texts) - 1)
        directions: list[tuple[int, list[tuple[list[str], list[str]]]]] = []
        for index, text in enumerate(texts):
            sentences = text[:VALIDATION] if held_out else text[VALIDATION:]
            small = sentences if held_out else sentences[::RARER]
            directions += [(tag_of(index), sentences), (TO_ENGLISH, [(other, english) for english, other in small])]
        draw = torch.Generator().manual_seed(1)
        chances = probabilities([len(own) for _, own in directions], temperature)
        self.drawn = []
        for pair in torch.multinomial(chances, samples, replacement=True, generator=draw).tolist():
            tag, own = directions[pair]
            self.drawn.append((tag, *own[int(torch.randint(len(own), (), generator=draw))]))

    def __len__(self) -> int:
        return len(self.drawn)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        tag, source, target = self.drawn[index]
        source_numbers, numbers = ([self.numbers.get(word, UNKNOWN) for word in side] for side in (source, target))
        return (padded([tag, *source_numbers]), padded([BEGIN, *numbers])), padded([*numbers, END])


def padded(numbers: list[int]) -> Tensor:
    """To LONGEST words and one more."""
    return torch.tensor(numbers + [PADDING] * (LONGEST + 1 - len(numbers)))


def loss(logits: Tensor, successors: Tensor) -> Tensor:
    """Mean over sentences of the mean over their words."""
    each = F.cross_entropy(logits.transpose(1, 2), successors, ignore_index=PADDING, reduction="none")
    return (each.sum(1) / (successors != PADDING).sum(1)).mean()


def correct(logits: Tensor, successors: Tensor) -> Tensor:
    """Sum over sentences of the share of words that are right, each after the right ones before it."""
    known = successors != PADDING
    return (((logits.argmax(2) == successors) & known).sum(1) / known.sum(1)).sum()


def task(
    data_dir: Path | None = None,
    layers: int = 3,
    dim: int = 128,
    words: int = 4000,
    samples: int = 20000,
    temperature: float = 5.0,
) -> Task:
    """Translates in both directions; `samples` are drawn for an epoch, pairs of languages by `temperature`."""
    if data_dir is None or not (data_dir / "deu-eng.zip").is_file():
        raise MissingFile("--data has to name the folder with deu-eng.zip of https://www.manythings.org/anki")
    data = partial(Sentences, data_dir, words, temperature=temperature)
    return Task(
        name="translation",
        model=partial(Transformer, words, layers, dim, heads=4, hidden=4 * dim, dropout=0.0),
        loss=loss,
        correct=correct,
        train_data=partial(data, samples=samples, held_out=False),
        validation_data=partial(data, samples=VALIDATION, held_out=True),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        batch_size=64,
        clip_norm=1.0,
    )
