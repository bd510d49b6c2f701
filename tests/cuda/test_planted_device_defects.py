"""Defects of code for accelerators that are planted in a copy of the package: a test on the stand-in finds each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import evener
from support.accelerator import DEVICE, NEEDS_DEVICE

pytestmark = [
    *NEEDS_DEVICE,
    pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that can be lost and counts waits"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]
TESTS = Path(__file__).parents[1]
TRAINING, STAR = "cuda/test_cuda_training.py", "cuda/test_cuda_star.py"
DATA_PARALLEL = f"{TRAINING}::test_data_parallel_training_equals_one_process"
WAITS = "cuda/test_cuda_waits.py::test_task_waits_once_more_than_the_plain_loop"


class Plant(NamedTuple):
    """A defect.

    Attributes:
        file: of the package.
        right: text that stands there once.
        wrong: what replaces it.
        test: that finds it; the first of its cases.
    """

    file: str
    right: str
    wrong: str
    test: str


PLANTS = {
    "a tensor stays on the processor": Plant(
        "data/loader.py",
        "to_device(inputs, self._device), to_device(targets, self._device)",
        "to_device(inputs, self._device), targets",
        DATA_PARALLEL,
    ),
    "a buffer is not moved": Plant(
        "training/context.py",
        "return model.to(self._device) if on_device else model",
        "[setattr(one, '_parameters', {k: nn.Parameter(v.to(self._device)) for k, v in one._parameters.items()})"
        " for one in model.modules() if on_device]; return model",
        DATA_PARALLEL,
    ),
    "the generator of another device": Plant(
        "system/accelerators.py",
        "return [torch.default_generator, module.default_generators[device.index or 0]]",
        "return [torch.default_generator, torch.default_generator]",
        "benchmark/test_task_timing.py::test_gpu_timing_preserves_its_random_state",
    ),
    "a read of the device in the loop": Plant(
        "system/accelerators.py",
        'self._value = value.detach().to("cpu", non_blocking=True)',
        "self._value = float(value)",
        "training/test_host_copy.py::test_copy_does_not_wait_for_the_device",
    ),
    "a copy that blocks": Plant(
        "data/loader.py", "return item.to(device, non_blocking=True)", "return item.to(device)", WAITS
    ),
    "a step that waits for the device": Plant(
        "comm/step_timing.py",
        'event = None if phase == "io" else accelerators.marked(self._device)',
        "accelerators.synchronize(self._device); event = None",
        WAITS,
    ),
    "sums that are not copied back": Plant(
        "comm/staged_gloo.py",
        "self._copier.copy([(self._hosts[id(one)], one) for one in self._writes])",
        "pass",
        DATA_PARALLEL,
    ),
    "an exchange of the next generation that knows no devices": Plant(
        "membership/rendezvous.py",
        'own = b"staged" if accelerators.is_accelerator(self._device) else b""',
        'own = b""',
        "cuda/test_cuda_elastic.py::test_lost_device_is_a_lost_node",
    ),
    "a lost device that is not recognised": Plant(
        "system/device_failures.py",
        "    return accelerators.is_lost(error)",
        "    return False",
        "cuda/test_cuda_elastic.py::test_lost_device_is_a_lost_node",
    ),
    "a node that stays without its device": Plant(
        "ps/node/node.py",
        "if isinstance(failure, DeviceLost):",
        "if False:",
        f"{STAR}::test_node_whose_device_is_lost_leaves",
    ),
    "the memory of the machine": Plant(
        "system/accelerators.py",
        "    if capabilities(device).counts_memory:\n        ask",
        "    if not device.type:\n        ask",
        "cuda/test_cuda_measuring.py::test_device_memory_equals_that_of_the_driver",
    ),
    "a peak that is not reset": Plant(
        "system/accelerators.py",
        "torch.accelerator.reset_peak_memory_stats(device)",
        "pass",
        "cuda/test_cuda_measuring.py::test_predicted_batch_fits_and_its_peak_is_near_the_limit",
    ),
    "a program that is not compared": Plant(
        "frontends/programs/entry.py",
        "run.equivalence_check.begin_on_cpus(command)",
        "pass",
        "cuda/test_cuda_programs.py::test_program_that_would_differ_is_refused",
    ),
    "a merge that stays on the device": Plant(
        "ps/master/merges.py",
        "            target.copy_(total)",
        "            pass",
        f"{STAR}::test_device_merges_equal_cpu_merges[device]",
    ),
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_planted_defect_is_found(tmp_path: Path, plant: Plant) -> None:
    copy = tmp_path / "src" / "evener"
    shutil.copytree(Path(evener.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / plant.file
    text = file.read_text()
    assert text.count(plant.right) == 1
    file.write_text(text.replace(plant.right, plant.wrong))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), str(TESTS)])}
    words = ("-x", "-q", "-p", "no:cacheprovider", "-m", "cuda", "--timeout", "240", plant.test)
    typed = [sys.executable, "-m", "pytest", *words]
    ran = subprocess.run(typed, cwd=TESTS, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout[-3000:]
    assert " failed" in ran.stdout.splitlines()[-1]
