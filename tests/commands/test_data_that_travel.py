"""Nodes of a master begin before all data have come, and learn what one process learns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evener.commands import submission
from evener.commands.submission import pack
from evener.config.run_config import RunConfig
from evener.ps.protocol.blob import Blob
from evener.system import sign_of_life
from support.command_cluster import cluster, wait_until
from support.struck_runs import distance

TASK = """
from pathlib import Path
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from evener import Task

class Images(Dataset):
    def __init__(self, folder):
        self.files = sorted(folder.glob("*.npy"))
    def __len__(self):
        return len(self.files)
    def __getitem__(self, i):
        return torch.from_numpy(np.load(self.files[i])).double() + 0.1 * torch.rand(1), i % 5

def task(data_dir):
    return Task(
        name="images",
        model=lambda: nn.Sequential(nn.AvgPool2d(20), nn.Flatten(), nn.Linear(3 * 81, 5)),
        loss=nn.functional.cross_entropy,
        train_data=lambda: Images(Path(data_dir) / "train"),
        validation_data=lambda: Images(Path(data_dir) / "validation"),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch_size=20,
    )
"""
OPTIONS = ("--precision", "fp64", "--epochs", "2")


def write_images(folder: Path) -> Path:
    """40 MB of images in files of their own."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 380), ("validation", 30)):
        (folder / part).mkdir(parents=True)
        for number in range(count):
            np.save(folder / part / f"{number:03}.npy", draw.integers(0, 9, (3, 182, 182), dtype=np.uint8))
    return folder


def phases(output: Path) -> list[dict[str, Any]]:
    lines = (output / "events.jsonl").read_text().splitlines()
    return [event for line in lines for kind, event in json.loads(line)["events"] if kind == "Phase"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_early_data_train_the_weights_of_one_process(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data")
    (tmp_path / "task.py").write_text(TASK)
    words = (str(tmp_path / "task.py"), "--data", str(data), *OPTIONS)
    with cluster() as ps:
        alone = ps.folder / "alone"
        assert ps.evener("train", *words, "--local-nodes", "1", "--output", str(alone), timeout=90).returncode == 0
        ps.join("one")
        ps.join("two", "--speed", "0.5")
        ps.wait_for_nodes()
        caches = [ps.folder / f"cache-{name}" / "blobs" for name in ("one", "two")]
        ways = {"sync": ("--agreement", "sync"), "ranks": ("--workers", "1")}
        for way, options in ways.items():
            ps.train(*words, "--ship-data", *options, "--output", way)
            assert distance(alone, ps.folder / way) < 1e-10
            wait_until(lambda: not [path for one in caches for path in one.glob(".*")], "that the data are in place")
            for cache in caches:  # so that the other way begins without data again
                for blob in cache.iterdir():
                    blob.rename(ps.folder / f"{way}-{cache.parent.name}-{blob.name}")
        assert any("as they come" in phase["detail"] for phase in phases(ps.folder / "sync"))
        ps.train(*words, "--ship-data", "--agreement", "diloco", "--output", "diloco")
        ps.down()


def test_command_says_that_it_reads_much_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class SlowBlob(Blob):
        def __init__(self, root: Path, files: Sequence[str]) -> None:
            wait_until(lambda: said, "that a message is shown")
            super().__init__(root, files)

    (tmp_path / "data").write_bytes(b"x")
    monkeypatch.setattr(sign_of_life, "_SILENCE_SECONDS", 0.01)
    monkeypatch.setattr(submission, "Blob", SlowBlob)
    config = RunConfig(task="digits", agreement="sync", data=tmp_path, ship_data=True)
    blobs, reads_early = pack(config, said.append)
    assert (list(blobs), reads_early) == (["data"], False)
    assert said[0].startswith("reading the data that the nodes receive")
