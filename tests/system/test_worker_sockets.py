"""Folders of data loaders' workers, which a worker that is killed does not remove."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

PROGRAM = """
import os, signal, sys, torch
from multiprocessing import active_children
from multiprocessing.util import get_temp_dir
from torch.utils.data import DataLoader
from evener.system.process_exit import exit_now, own_worker_sockets, put_worker_sockets_into

if sys.argv[1] == "chosen":
    put_worker_sockets_into(os.path.join(os.environ["TMPDIR"], "chosen"))
own_worker_sockets()
print(get_temp_dir())
batches = iter(DataLoader(torch.ones(64, 4), batch_size=2, num_workers=1))
next(batches)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler raises when a worker is killed
for worker in active_children():
    worker.kill()
    worker.join()
exit_now(0)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("how", "left"), [("own", []), ("chosen", ["chosen"])])
def test_socket_folder_is_removed_by_its_owner(how: str, left: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:  # short: a socket's path has at most 107 bytes
        variables = {**os.environ, "TMPDIR": temporary}
        ended = subprocess.run([sys.executable, "-c", PROGRAM, how], env=variables, capture_output=True, check=False)
        assert ended.returncode == 0, ended.stderr.decode()
        assert os.listdir(temporary) == left


@pytest.mark.timeout(120)
def test_sockets_are_elsewhere_if_paths_would_be_too_long() -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:
        folder = os.path.join(temporary, "x" * 80)
        os.mkdir(folder)
        variables = {**os.environ, "TMPDIR": folder}
        ended = subprocess.run([sys.executable, "-c", PROGRAM, "own"], env=variables, capture_output=True, check=False)
        assert ended.returncode == 0, ended.stderr.decode()
        assert os.listdir(folder) == []
        own = ended.stdout.decode().strip()  # other tests have folders in /tmp, too
        assert own.startswith("/tmp/evener-"), own
        assert not os.path.exists(own)
