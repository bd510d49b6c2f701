"""The options that a search varies: ranges and choices from the command line, or a function `space` of the task's file.

`lr=1e-4..1e-1:log` is a range with a uniform logarithm, and `width=16..256` a range of whole numbers, because both ends
are whole. `depth=2,4,8` and `norm=batch,none` are choices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evener.records.errors import InvalidInput, InvalidValue, require
from evener.records.schema import Part

_FORM = "NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=A,B,C, such as lr=1e-4..1e-1:log or width=64,128,256"
_INTEGER = re.compile(r"[+-]?\d+")
Suggest = Callable[[Any], dict[str, str]]
"""A function from a trial of Optuna to the options of the task, as text."""


class Varied(Part, frozen=True, kw_only=True):
    """An option that a search varies.

    Attributes:
        name: name of the task's option.
        choices: choices as text; empty for a range.
        low, high: ends of a range, inclusive.
        is_log: whether the logarithm is uniform over the range instead of the value.
        is_whole: whether values are whole numbers.
    """

    name: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False

    def suggest(self, trial: Any) -> Any:
        """Return the value in a trial of Optuna."""
        if self.choices:
            return trial.suggest_categorical(self.name, list(self.choices))
        if self.is_whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.is_log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.is_log)


def parse_varied(text: str) -> Varied:
    """Parse the text of one `--vary`. Raises InvalidValue."""
    name, separator, rule = text.partition("=")
    if not (separator and name and rule):
        raise InvalidValue("--vary", text, _FORM)
    if ".." not in rule:
        choices = tuple(choice.strip() for choice in rule.split(","))
        require(
            len(set(choices)) == len(choices) > 1 and all(choices), "--vary", text, "at least two different choices"
        )
        return Varied(name=name, choices=choices)
    range_text, _, kind = rule.partition(":")
    ends = range_text.split("..")
    if len(ends) != 2 or kind not in ("", "log"):
        raise InvalidValue("--vary", text, _FORM)
    try:
        low, high = (float(end) for end in ends)
    except ValueError:
        raise InvalidValue("--vary", text, _FORM) from None
    require(low < high < float("inf") and low > float("-inf"), "--vary", text, "a range whose low end comes first")
    require(kind != "log" or low > 0, "--vary", text, "a range above 0, for a logarithm")
    is_whole = all(_INTEGER.fullmatch(end.strip()) for end in ends)
    return Varied(name=name, low=low, high=high, is_log=kind == "log", is_whole=is_whole)


def suggest_varied(varied: Sequence[Varied]) -> Suggest:
    """Return the function that draws the command line's options. Raises InvalidInput if one is varied twice."""
    names = [option.name for option in varied]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInput(f"--vary {duplicate} is given twice: give each option once")

    def suggest(trial: Any) -> dict[str, str]:
        return {option.name: option_text(option.suggest(trial)) for option in varied}

    return suggest


def option_text(value: Any) -> str:
    """Return a value as text for `--option`, which is parsed to exactly the same number."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "x".join(str(size) for size in value)
    return str(value)


def options_of(returned: Any, where: str) -> dict[str, str]:
    """Return the result of a user's function `space` as options. Raises InvalidInput if it is not a dictionary."""
    if not isinstance(returned, Mapping) or not all(isinstance(name, str) for name in returned):
        raise InvalidInput(
            f"{where}: space(trial) must return a dictionary of options, such as "
            f'{{"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}}; it returned type {type(returned).__name__}'
        )
    return {name: option_text(value) for name, value in returned.items()}
