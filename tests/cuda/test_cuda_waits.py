"""A step through Evener waits for its device as often as the plain loop, and once for a loss that is a step old."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from support.accelerator import DEVICE, NEEDS_DEVICE, slow_after
from support.command_cluster import cluster
from support.commands import TINY, evener

WAITING, BATCHES = (str(Path(TINY).with_name(name)) for name in ("waiting.py", "waiting_batches.py"))
pytestmark = [
    *NEEDS_DEVICE,
    pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that counts waits"),
    pytest.mark.timeout(300),
]
PLAIN = """
import sys, torch
sys.path.insert(0, {folder!r})
from waiting import task as make
task = make()
from torch.utils.data import DataLoader
device = torch.device({device!r})
model = task.model().to(device)
optimizer = task.optimizer(model.parameters())
for inputs, targets in DataLoader(task.train_data(), batch_size=10, shuffle=True, pin_memory=True):
    inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
    optimizer.zero_grad()
    task.loss(model(inputs), targets).backward()
    optimizer.step()
"""
PROGRAM = """
import sys, evener, torch
sys.path.insert(0, {folder!r})
from waiting import data, model as network, note_waits
from torch import nn
from torch.utils.data import DataLoader
if __name__ == "__main__":
    run = evener.join()
    model, loader = network(), DataLoader(data(300, 1), batch_size=10, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        inputs, targets = inputs.to(run.device, non_blocking=True), targets.to(run.device, non_blocking=True)
        optimizer.zero_grad()
        outputs = model(inputs)
        note_waits(outputs.device)
        loss = nn.functional.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        {after}
"""
SHARING = """
import sys, evener, torch
sys.path.insert(0, {folder!r})
from waiting import data, model as network, note_waits
from torch import nn
if __name__ == "__main__":
    run = evener.join()
    model, (inputs, targets) = network(), (one.to(run.device) for one in data(300, 1).tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)
    for batch in zip(inputs.split(10), targets.split(10)):
        x, y = run.share(batch)
        optimizer.zero_grad()
        outputs = model(x)
        note_waits(outputs.device)
        nn.functional.cross_entropy(outputs, y).backward()
        optimizer.step()
"""
OTHER = "standin:1"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the task notes waits."""
    monkeypatch.setenv("EVENER_TEST_WAITS", str(tmp_path / "waits"))
    return tmp_path / "waits"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Waits of a step of the plain loop."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENER_TEST_WAITS", str(folder / "waits"))
        code = PLAIN.format(folder=str(Path(TINY).parent), device=DEVICE)
        exec(code, {})
    return waits_of_a_step(folder / "waits")


def waits_of_a_step(file: Path) -> float:
    """The median number of waits from a micro-batch to the next, of the thread that waits most.

    Only the last steps count, in threads that perform them: measurements before the first one wait as they like.
    """
    counts, lines = defaultdict[str, list[int]](list), [line.split() for line in file.read_text().splitlines()]
    for thread, number in lines:
        counts[thread].append(int(number))
    training = {thread for thread, _ in lines[-10:]}
    return max(float(median(b - a for a, b in pairwise(counts[thread][-20:]))) for thread in training)


@pytest.mark.parametrize(
    ("on", "words"),
    slow_after(
        1,
        (f"{DEVICE},{OTHER}", ("--shares", "2,1")),
        (DEVICE, ()),
        (f"{DEVICE},{OTHER}", ("--shares", "2,1", "--no-elastic")),
        (f"{DEVICE},cpu", ("--shares", "2,1")),
        (f"{DEVICE},{OTHER}", ("--shares", "2,1", "--strategy", "sharded")),
        (f"{DEVICE},{OTHER}", ("--shares", "2,1", "--strategy", "spatial")),
        (f"{DEVICE},{OTHER}", ("--strategy", "pipeline", "--micro-batches", "1")),
        (f"{DEVICE},{OTHER}", ("--shares", "2,1", "--option", "unused=20")),
    ),
    ids=lambda value: value if isinstance(value, str) else "".join(value),
)
def test_task_waits_once_more_than_the_plain_loop(
    tmp_path: Path, file: Path, plain: float, on: str, words: tuple[str, ...]
) -> None:
    ran = evener("train", WAITING, "--devices", on, *words, "--no-check", "--output", "run", cwd=tmp_path, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert waits_of_a_step(file) <= plain + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--strategy", "sharded"),
        ("--strategy", "filter"),
        ("--strategy", "pipeline", "--micro-batches", "1"),
    ],
    ids=lambda words: "".join(words[1:2]) or "data",
)
def test_clipped_gradients_wait_no_more(tmp_path: Path, file: Path, plain: float, words: tuple[str, ...]) -> None:
    words = ("--devices", f"{DEVICE},{OTHER}", *words, "--option", "clip=true", "--no-check", "--output", "run")
    ran = evener("train", WAITING, *words, cwd=tmp_path, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert waits_of_a_step(file) <= plain + 1


@pytest.mark.slow
@pytest.mark.parametrize("divisor", [False, True])
@pytest.mark.parametrize("on", [DEVICE, f"{DEVICE},{OTHER}"])
def test_batch_task_waits_once_more_than_the_plain_loop(
    tmp_path: Path, file: Path, plain: float, on: str, divisor: bool
) -> None:
    words = ("--devices", on, "--option", f"divisor={divisor}".lower(), "--no-check", "--output", "run")
    ran = evener("train", BATCHES, *words, cwd=tmp_path, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert waits_of_a_step(file) <= plain + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "code", "after", "words"),
    [
        (DEVICE, PROGRAM, "", ()),
        (f"{DEVICE},{OTHER}", PROGRAM, "", ()),
        (f"{DEVICE},{OTHER}", PROGRAM, "", ("--strategy", "filter")),
        (f"{DEVICE},{OTHER}", PROGRAM, "run.mean(loss)", ()),
        (f"{DEVICE},{OTHER}", SHARING, "", ()),
    ],
    ids=["one device", "two devices", "layers", "mean", "share"],
)
def test_program_waits_once_more_than_the_plain_loop(
    tmp_path: Path, file: Path, plain: float, on: str, code: str, after: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "program.py").write_text(code.format(folder=str(Path(TINY).parent), after=after))
    ran = evener("run", "--devices", on, *words, "program.py", cwd=tmp_path, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert waits_of_a_step(file) <= plain + 1


@pytest.mark.slow
@pytest.mark.parametrize("words", [("sync",), ("diloco", "--local-steps", "5")], ids=lambda words: words[0])
def test_node_of_a_master_waits_once_more_than_the_plain_loop(file: Path, plain: float, words: tuple[str, ...]) -> None:
    with cluster() as ps:
        ps.join("first", device=DEVICE)
        ps.join("second", device=OTHER)
        ps.wait_for_nodes()
        ps.train(WAITING, "--option", "norm=false", "--agreement", *words, "--output", "run")
        ps.down()
    assert waits_of_a_step(file) <= plain + 1
