"""Options as text: read by the annotation of the parameter, and refused in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.data.tasks.arguments import arguments_for
from evener.records.errors import InvalidInput, InvalidValue


def typed(
    data_dir: Path | None = None,
    depth: int = 1,
    rate: float = 0.1,
    cache: bool = False,
    model: str = "small",
    image: tuple[int, ...] = (1,),
    limit: int | None = None,
    names: list[str] | None = None,
) -> None: ...


def untyped(depth=1, rate=0.1, cache=False, model=None): ...  # type: ignore[no-untyped-def]


def demanding(width: int, *, height: int, depth: int = 1) -> None: ...


def bare() -> None: ...


def real_annotations() -> Callable[..., Any]:
    """A function whose annotations are types, not text, as in a file without `from __future__ import annotations`."""
    space: dict[str, Any] = {}
    exec("def task(depth: int = 1, image: tuple[int, ...] = (), limit: int | None = None): ...", space)
    function: Callable[..., Any] = space["task"]
    return function


@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [
        (typed, {}, {}),
        (typed, {"depth": "12"}, {"depth": 12}),
        (typed, {"rate": "1e-3"}, {"rate": 0.001}),
        (typed, {"cache": "true"}, {"cache": True}),
        (typed, {"cache": "No"}, {"cache": False}),
        (typed, {"cache": "0"}, {"cache": False}),
        (typed, {"model": "7"}, {"model": "7"}),
        (typed, {"image": "3x64x32"}, {"image": (3, 64, 32)}),
        (typed, {"image": "5"}, {"image": (5,)}),
        (typed, {"limit": "4"}, {"limit": 4}),
        (untyped, {"depth": "2", "rate": "2", "cache": "on"}, {"depth": 2, "rate": 2.0, "cache": True}),
        (untyped, {"model": "2"}, {"model": "2"}),
        (demanding, {"width": "1", "height": "2"}, {"width": 1, "height": 2}),
        (real_annotations(), {"depth": "1", "image": "1x2", "limit": "3"}, {"depth": 1, "image": (1, 2), "limit": 3}),
    ],
)
def test_options_are_read_by_their_type(
    function: Callable[..., Any], given: dict[str, str], expected: dict[str, Any]
) -> None:
    result = arguments_for(function, "task a", given, {"data_dir": None})
    assert result == expected
    assert [type(value) for value in result.values()] == [type(value) for value in expected.values()]


def test_data_folder_is_passed_on_unchanged() -> None:
    assert arguments_for(typed, "task a", {}, {"data_dir": Path("d")}) == {"data_dir": Path("d")}


@pytest.mark.parametrize(
    ("function", "given", "sentence"),
    [
        (
            typed,
            {"dept": "1"},
            "task a has no option 'dept', did you mean 'depth'?; "
            "its options are depth, rate, cache, model, image, limit, names",
        ),
        (demanding, {"zzz": "1"}, "task a has no option 'zzz'; its options are width, height, depth"),
        (typed, {"data_dir": "x"}, "task a has no option 'data_dir'; its options are depth,"),
        (bare, {"depth": "1"}, "task a has no option 'depth'; it takes no options"),
        (demanding, {"depth": "1"}, "task a needs a value for width and height"),
        (demanding, {"width": "1"}, "task a needs a value for height"),
        (
            typed,
            {"names": "a"},
            "task a: parameter names is annotated list[str] and cannot be an option; "
            "options are of type int, float, bool, str, tuple[int,...]",
        ),
    ],
)
def test_options_that_do_not_fit_the_function_are_refused(
    function: Callable[..., Any], given: dict[str, str], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match="^" + re.escape(sentence)):
        arguments_for(function, "task a", given, {"data_dir": None})


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("depth", "1.5", "a whole number"),
        ("depth", "", "a whole number"),
        ("rate", "fast", "a number"),
        ("cache", "maybe", "true or false"),
        ("image", "3x", "whole numbers written like 3x64x64"),
        ("image", "3,64,64", "whole numbers written like 3x64x64"),
        ("limit", "none", "a whole number"),
    ],
)
def test_value_of_the_wrong_type_is_refused(name: str, text: str, allowed: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(f"option {name} of task a must be {allowed}, got {text!r}")):
        arguments_for(typed, "task a", {name: text}, {})


def test_data_folder_without_a_parameter_is_refused() -> None:
    sentence = "task a takes no data_dir: leave it out, or give its function that parameter"
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        arguments_for(bare, "task a", {}, {"data_dir": Path("d")})
