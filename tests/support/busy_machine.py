"""Tests that measure time, on machines that do other work as well."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


def met_once_in(tries: int) -> Callable[[Callable[Arguments, None]], Callable[Arguments, None]]:
    """Repeat a test that measures time until it passes, so many times at most.

    Other work on the machine can disturb a measurement, and does not do so every time. What is wrong with the code
    that is tested is wrong every time.
    """

    def repeated(test: Callable[Arguments, None]) -> Callable[Arguments, None]:
        @functools.wraps(test)
        def run(*words: Arguments.args, **named: Arguments.kwargs) -> None:
            for _ in range(tries - 1):
                try:
                    return test(*words, **named)
                except AssertionError:
                    continue
            return test(*words, **named)

        return run

    return repeated
