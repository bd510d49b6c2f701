"""The examples run by themselves, on one machine, and show what their texts say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"
_PATHS = [str(TESTS / "support" / "torchvision_site"), str(TESTS), os.environ.get("PYTHONPATH", "")]


def run(name: str, folder: Path, *words: str) -> str:
    """What an example prints, started by Python or as `evener run` if there are `words` for it."""
    typed = [sys.executable, *(["-m", "evener", "run"] if words else []), str(EXAMPLES / name), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_PATHS)}
    done = subprocess.run(typed, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_parameter_server_example_learns_and_only_sync_is_never_stale(tmp_path: Path) -> None:
    found = re.findall(
        r"^(\w+) +(\d+) updates .*accuracy ([\d.]+)%  at most (\d+) ", run("03_parameter_server.py", tmp_path), re.M
    )
    assert [name for name, *_ in found] == ["sync", "async", "bounded"]
    assert all(float(accuracy) > 85 for _, _, accuracy, _ in found)
    stale = {name: int(most) for name, _, _, most in found}
    assert stale["sync"] == 0 < stale["bounded"]
    assert stale["bounded"] <= (3 - 1) * (2 * 2 + 1)


def test_averaging_example_learns_with_a_fraction_of_the_bytes(tmp_path: Path) -> None:
    found = re.findall(
        r"^(\w+) .* ([\d.]+) MB sent  accuracy ([\d.]+)%", run("04_averaging_many_machines.py", tmp_path), re.M
    )
    sent = {name: float(megabytes) for name, megabytes, _ in found}
    assert list(sent) == ["sync", "average", "diloco"]
    assert sent["sync"] > 10 * sent["average"] > 20 * sent["diloco"]
    assert all(float(accuracy) > 85 for *_, accuracy in found)


def test_large_image_example_learns_the_same_on_two_nodes(tmp_path: Path) -> None:
    shown = run("05_large_images.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]
    alone, together = losses[: len(losses) // 2], losses[len(losses) // 2 :]
    assert together == pytest.approx(alone, abs=1e-4)
    (whole,) = (float(mib) for mib in re.findall(r"of 1 held (\d+) MiB", shown))
    larger, smaller = (float(mib) for mib in re.findall(r"of 2 held (\d+) MiB", shown))
    assert smaller < 0.5 * whole
    assert smaller < larger < 0.8 * whole


def test_pipeline_example_learns_and_writes_its_timeline(tmp_path: Path) -> None:
    shown = run("06_pipeline.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]
    assert losses[-1] < losses[0]
    events = json.loads((tmp_path / "pipeline.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events} == {0, 1}
    assert len(re.findall(r"node-\d holds \d+ parameters", shown)) == 2


def where_there_is(package: str, name: str) -> Any:
    """The example `name`, which needs an extra of that name."""
    return pytest.param(name, marks=pytest.mark.skipif(not find_spec(package), reason=f"needs evener[{package}]"))


PROGRAMS = [
    "08_own_program.py",
    "09_sum_and_pairs.py",
    "11_char_gpt.py",
    "12_dcgan.py",
    "13_vae.py",
    "14_graphs.py",
    "15_stream.py",
    where_there_is("lightning", "16_lightning.py"),
    where_there_is("transformers", "17_hugging_face.py"),
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_custom_programs_learn_on_uneven_nodes_as_alone(name: str, tmp_path: Path) -> None:
    together, alone = (
        [float(one) for one in re.findall(r"\d+\.?\d*", text)]
        for text in (run(name, tmp_path, "--local-nodes", "1.0,0.5"), run(name, tmp_path))
    )
    assert together == pytest.approx(alone, rel=2e-2)


def test_imagenet_example_has_the_same_accuracy_on_uneven_nodes(tmp_path: Path) -> None:
    name = "10_imagenet.py"
    together, alone = (
        [float(one) for one in re.findall(r"top-\d ([\d.]+)", text)]
        for text in (run(name, tmp_path, "--local-nodes", "1.0,0.5"), run(name, tmp_path))
    )
    assert len(together) == 4
    assert together == pytest.approx(alone, abs=3 / 48)  # of 48 images of noise, rounding decides about some


def test_detector_example_learns_on_uneven_nodes_as_alone(tmp_path: Path) -> None:
    name = "18_faster_rcnn.py"
    together, alone = (
        [float(one) for one in re.findall(r"loss ([\d.]+)", text)]
        for text in (run(name, tmp_path, "--local-nodes", "1.0,0.5"), run(name, tmp_path))
    )
    assert together == pytest.approx(alone, rel=0.15)
    assert together[-1] < 0.7 * together[0]
