"""A thin worker and one with PyTorch serve one run, and what they agree on is what one process computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.command_cluster import cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
IMAGES, BATCH, EPOCHS = 1000, 200, 20


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """MNIST's training files with a few images: as many bright rows as the digit says."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, IMAGES, np.uint8)
    images = random.integers(0, 80, (IMAGES, 28, 28), np.uint8)
    images[np.arange(28)[np.newaxis] < 2 * labels[:, np.newaxis]] |= 128
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        head = bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">u4").tobytes()
        (tmp_path / f"train-{name}-ubyte").write_bytes(head + array.tobytes())
    return tmp_path


def test_thin_and_pytorch_workers_train_like_one_process(digits: Path) -> None:
    data = ("--data", str(digits))
    train = ("nfnn", *data, "--agreement", "sync", "--batch-size", str(BATCH), "--epochs", str(EPOCHS))
    with cluster() as ps:
        ps.join("torch", *data)
        ps.wait_for_nodes()
        alone = ps.train(*train, "--output", "alone")
        ps.join("thin", *data, "--thin")
        ps.wait_for_nodes()
        together = ps.train(*train, "--output", "together")
        record = read_noun(ps.folder / "together" / "record.json", TrainRecord)
        weights = [load_file(ps.folder / name / "model.safetensors") for name in ("alone", "together")]
        ps.down()
    assert [node["name"] for node in alone["nodes"]] == ["torch"]
    contributions = {node.name: node.contributions for node in record.nodes}
    assert min(contributions["thin"], contributions["torch"]) > 10, contributions
    for name, array in weights[0].items():
        np.testing.assert_allclose(weights[1][name], array, rtol=1e-5, atol=1e-5, err_msg=name)
    assert together["validation_accuracy"] == pytest.approx(alone["validation_accuracy"], abs=0.01)
    assert alone["validation_accuracy"] > 0.2  # of ten classes
