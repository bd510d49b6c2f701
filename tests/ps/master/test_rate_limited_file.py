"""A file that changes often takes a bounded part of the master's time, and loses nothing."""

from __future__ import annotations

import errno

import pytest

from evener.ps.master.rate_limited_file import RateLimitedFile


class Scene:
    """A file whose writing takes a second."""

    def __init__(self) -> None:
        self.now, self.value, self.is_full, self.written = 0.0, 0, False, list[int]()
        self.file = RateLimitedFile(self.write, lambda: self.now)

    def write(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", "file")
        self.now += 1.0
        self.written.append(self.value)

    def change(self) -> None:
        self.value += 1
        self.file.changed()


def test_writing_takes_a_twentieth_of_the_time() -> None:
    scene = Scene()
    for _ in range(100):
        scene.change()
        scene.now += 1.0
    assert len(scene.written) == 5
    assert scene.written[0] == 1  # the first change is written at once
    scene.now += 100.0
    scene.file.tick()
    assert scene.written[-1] == 100
    scene.file.tick()
    assert len(scene.written) == 6


def test_flush_writes_what_is_left() -> None:
    scene = Scene()
    scene.change()
    scene.change()
    assert scene.written == [1]
    scene.file.flush()
    scene.file.flush()
    assert scene.written == [1, 2]


def test_failed_write_is_tried_again_after_a_pause() -> None:
    scene = Scene()
    scene.is_full = True
    with pytest.raises(OSError, match="No space"):
        scene.change()
    scene.file.tick()  # not yet, and so without an error
    scene.is_full = False
    scene.now += 10.0
    scene.file.tick()
    assert scene.written == [1]
