"""From `--option key=value` to the arguments of a function that makes a task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from evener.records.errors import InvalidInput, InvalidValue, nearest

_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _truth(text: str) -> bool:
    return _TRUTH[text.lower()]


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.lower().split("x"))


KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (_truth, "true or false"),
    "str": (str, "text"),
    "tuple[int,...]": (_sizes, "whole numbers written like 3x64x64"),
}
"""Annotation of a parameter, without spaces -> how its text is read, and what is allowed."""


def arguments_for(
    function: Callable[..., Any], where: str, options: Mapping[str, str], fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """The keyword arguments with which to call `function`.

    Args:
        function: its annotations (or defaults) say how each option is read: int, float, bool, str, tuple[int, ...].
        where: names the function in errors, such as "task digits".
        options: option -> text.
        fixed: arguments that are no options; left out where None.

    Raises:
        InvalidInput: an option is unknown, lacking or of a type without text; a fixed argument is not taken.
        InvalidValue: the text of an option does not fit its type.
    """
    parameters = {p.name: p for p in inspect.signature(function).parameters.values() if p.kind in _BY_NAME}
    result = {name: value for name, value in fixed.items() if value is not None}
    for name in result:
        if name not in parameters:
            raise InvalidInput(f"{where} takes no {name}: leave it out, or give its function that parameter")
    known = [name for name in parameters if name not in fixed]
    for name, text in options.items():
        if name not in known:
            raise InvalidInput(f"{where} has no option {name!r}{nearest(name, known)}; {_known(known)}")
        result[name] = _convert(parameters[name], where, text)
    lacking = [name for name, p in parameters.items() if p.default is p.empty and name not in result]
    if lacking:
        raise InvalidInput(f"{where} needs a value for {' and '.join(lacking)}")
    return result


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _known(options: list[str]) -> str:
    return f"its options are {', '.join(options)}" if options else "it takes no options"


def _convert(parameter: inspect.Parameter, where: str, text: str) -> Any:
    kind = _annotation(parameter)
    if kind not in KINDS:
        raise InvalidInput(
            f"{where}: parameter {parameter.name} is annotated {kind} and cannot be an option; "
            f"options are of type {', '.join(KINDS)}"
        )
    convert, allowed = KINDS[kind]
    try:
        return convert(text)
    except (ValueError, KeyError) as error:
        raise InvalidValue(f"option {parameter.name} of {where}", text, allowed) from error


def _annotation(parameter: inspect.Parameter) -> str:
    """Return the annotation without spaces and `| None`; for a parameter without one, the type of its default."""
    if parameter.annotation is parameter.empty:
        default = parameter.default
        return "str" if default is parameter.empty or default is None else type(default).__name__
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.replace(" ", "").removesuffix("|None")
