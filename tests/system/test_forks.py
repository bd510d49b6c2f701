"""Forks collect no garbage of the process that made them."""

from __future__ import annotations

import gc
import os

from evener.system.forks import garbage_left_to_parent


class Owner:
    """An object in a circle that ends a process other than its own when it is collected, as a lost thread does."""

    def __init__(self, collected: list[int]) -> None:
        self.itself, self.pid, self.collected = self, os.getpid(), collected

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            os._exit(7)
        self.collected.append(self.pid)


def test_fork_leaves_garbage_to_its_parent() -> None:
    collected: list[int] = []
    gc.collect()
    Owner(collected)
    with garbage_left_to_parent():
        pid = os.fork()
    if pid == 0:
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gc.collect()
    assert collected == [os.getpid()]
