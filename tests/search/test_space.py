"""Varied options, and their conversion to options of the task."""

from __future__ import annotations

import pytest

from evener.records.errors import InvalidInput, InvalidValue
from evener.search.space import Varied, option_text, options_of, parse_varied, suggest_varied
from support.refusals import refused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr=1e-4..1e-1:log", Varied(name="lr", low=1e-4, high=0.1, is_log=True)),
        ("width=16..256", Varied(name="width", low=16, high=256, is_whole=True)),
        ("width=16..256:log", Varied(name="width", low=16, high=256, is_whole=True, is_log=True)),
        ("drop=0..0.5", Varied(name="drop", low=0, high=0.5)),
        ("width=64,128,256", Varied(name="width", choices=("64", "128", "256"))),
        ("norm=batch, none", Varied(name="norm", choices=("batch", "none"))),
    ],
)
def test_ranges_and_choices_of_the_command_line_are_parsed(text: str, expected: Varied) -> None:
    assert parse_varied(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "lr",
        "lr=",
        "=1..2",
        "lr=1",
        "lr=1,1",
        "lr=1,,2",
        "lr=2..1",
        "lr=a..b",
        "lr=1..2..3",
        "lr=0..1:log",
        "lr=1..2:lg",
    ],
)
def test_invalid_texts_are_rejected(text: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse_varied(text)
    assert (caught.value.field, caught.value.value) == ("--vary", text)


def test_option_varied_twice_is_rejected() -> None:
    with pytest.raises(InvalidInput):
        suggest_varied([parse_varied("lr=1..2"), parse_varied("lr=3,4")])


def test_values_survive_their_text_form() -> None:
    assert float(option_text(0.1 + 0.2)) == 0.1 + 0.2
    assert [option_text(value) for value in (True, False, (3, 64, 64), 7, "adam")] == [
        "true",
        "false",
        "3x64x64",
        "7",
        "adam",
    ]


def test_a_space_must_return_a_dictionary_of_options() -> None:
    assert options_of({"lr": 0.5, "depth": 3}, "my_task.py") == {"lr": "0.5", "depth": "3"}
    with refused(InvalidInput):
        options_of([1], "my_task.py")
