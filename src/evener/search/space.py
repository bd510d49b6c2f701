"""What a search varies: ranges and choices from the command line, or a function `space` of the task's file.

`lr=1e-4..1e-1:log` is a range whose logarithm is even, `width=16..256` one of whole numbers, as both ends are;
`depth=2,4,8` and `norm=batch,none` are choices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evener.records.errors import InvalidInput, InvalidValue, require
from evener.records.schema import Part

_FORM = "NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=A,B,C, such as lr=1e-4..1e-1:log or width=64,128,256"
_WHOLE = re.compile(r"[+-]?\d+")
Suggest = Callable[[Any], dict[str, str]]
"""From a trial of Optuna to the options of the task, as text."""


class Varied(Part, frozen=True, kw_only=True):
    """One option that a search varies.

    Attributes:
        name: of the task's option.
        choices: as text; empty for a range.
        low, high: ends of a range, both part of it.
        is_log: whether the logarithm is even over the range, and not the value.
        is_whole: whether values are whole numbers.
    """

    name: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False

    def suggest(self, trial: Any) -> Any:
        """The value in a trial of Optuna."""
        if self.choices:
            return trial.suggest_categorical(self.name, list(self.choices))
        if self.is_whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.is_log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.is_log)


def parse_varied(text: str) -> Varied:
    """What one `--vary` says. Raises InvalidValue."""
    name, separator, rule = text.partition("=")
    if not (separator and name and rule):
        raise InvalidValue("--vary", text, _FORM)
    if ".." not in rule:
        choices = tuple(word.strip() for word in rule.split(","))
        require(len(set(choices)) == len(choices) > 1 and all(choices), "--vary", text, "two different choices or more")
        return Varied(name=name, choices=choices)
    ends, _, kind = rule.partition(":")
    words = ends.split("..")
    if len(words) != 2 or kind not in ("", "log"):
        raise InvalidValue("--vary", text, _FORM)
    try:
        low, high = (float(word) for word in words)
    except ValueError:
        raise InvalidValue("--vary", text, _FORM) from None
    require(low < high < float("inf") and low > float("-inf"), "--vary", text, "a range whose low end comes first")
    require(kind != "log" or low > 0, "--vary", text, "a range above 0, for a logarithm")
    is_whole = all(_WHOLE.fullmatch(word.strip()) for word in words)
    return Varied(name=name, low=low, high=high, is_log=kind == "log", is_whole=is_whole)


def suggest_varied(varied: Sequence[Varied]) -> Suggest:
    """Of what the command line varies. Raises InvalidInput: an option is varied twice."""
    names = [one.name for one in varied]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInput(f"--vary {twice} is given twice: what an option may be is said once")

    def suggest(trial: Any) -> dict[str, str]:
        return {one.name: option_text(one.suggest(trial)) for one in varied}

    return suggest


def option_text(value: Any) -> str:
    """A value as `--option` takes it: exactly that number when it is read again."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "x".join(str(size) for size in value)
    return str(value)


def options_of(found: Any, where: str) -> dict[str, str]:
    """What a user's function `space` returned, as options. Raises InvalidInput."""
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise InvalidInput(
            f"{where}: space(trial) must return a dictionary of options, such as "
            f'{{"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}}, it returned type {type(found).__name__}'
        )
    return {name: option_text(value) for name, value in found.items()}
