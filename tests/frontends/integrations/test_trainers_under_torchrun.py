"""Trainers of others under torchrun: what it tells its processes is for the run alone, which divides the batches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
EXAMPLES = TESTS.parent / "examples"
ACCELERATE = TESTS / "programs" / "scripts" / "accelerate_script.py"
_PATHS = [str(TESTS / "support" / "torchvision_site"), str(TESTS), os.environ.get("PYTHONPATH", "")]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def needing(package: str, extra: str) -> pytest.MarkDecorator:
    """Skips a test where `package` is not installed; importing it here would leave its traces in this process."""
    return pytest.mark.skipif(not find_spec(package), reason=f"needs evener[{extra}]")


def started(folder: Path, script: Path, *, ranks: int) -> subprocess.CompletedProcess[str]:
    """`script` alone or by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_PATHS)}
    typed = [sys.executable, *torchrun, str(script)]
    return subprocess.run(typed, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)


def losses(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return re.findall(r"loss ([\d.]+)", done.stdout)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("16_lightning.py", marks=needing("lightning", "lightning")),
        pytest.param("17_hugging_face.py", marks=needing("transformers", "transformers")),
    ],
)
def test_trainer_under_torchrun_equals_one_process(name: str, tmp_path: Path) -> None:
    alone, together = (losses(started(tmp_path, EXAMPLES / name, ranks=ranks)) for ranks in (1, 2))
    assert set(together) == set(alone)
    assert alone


def accelerate_script(folder: Path, old: str, new: str) -> Path:
    """The program of tests/programs, which prints its weights; `new` in the place of `old`."""
    path = folder / "program.py"
    shown = "if run.leader:\n    print('loss', float(sum(value.double().abs().sum() for value in results.values())))\n"
    text = ACCELERATE.read_text()
    assert old in text
    path.write_text(text.replace(old, new) + shown)
    return path


@needing("accelerate", "transformers")
def test_accelerate_script_under_torchrun_equals_one_process(tmp_path: Path) -> None:
    path = accelerate_script(tmp_path, "x = torch.randn", "torch.manual_seed(0)\nx = torch.randn")
    alone, together = (float(losses(started(tmp_path, path, ranks=ranks))[0]) for ranks in (1, 2))
    assert together == pytest.approx(alone, rel=1e-5)


@needing("accelerate", "transformers")
@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("run = evener.join()  # added\naccelerator = Accelerator(cpu=True)",
         "accelerator = Accelerator(cpu=True)\nrun = evener.join()",
         "call evener.join() before it is made"),
        ("run = evener.join()  # added", "torch.distributed.init_process_group('gloo')\nrun = evener.join()",
         "in place of init_process_group"),
        ("from accelerate import Accelerator\n", "run = evener.join()\nfrom accelerate import Accelerator\n",
         "import accelerate before it calls evener.join()"),
    ],
)  # fmt: skip
def test_batches_divided_twice_are_refused_in_one_sentence(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    done = started(tmp_path, accelerate_script(tmp_path, old, new), ranks=2)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("evener: ")]
    assert told
    assert all(sentence in line for line in told), told
    assert "[rank0]" not in done.stderr
