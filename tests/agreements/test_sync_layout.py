"""A state's arrays lie side by side in one piece of memory, and nowhere twice."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.agreements.layout import ArraySpec, Flat, StateLayout, flat_of, layout_of
from evener.records.errors import InvalidValue
from support.refusals import refused

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
kinds = st.sampled_from(
    [
        ("float32", "parameter"),
        ("float32", "statistic"),
        ("float64", "parameter"),
        ("float64", "statistic"),
        ("int64", "counter"),
    ]
)


@st.composite
def layouts(draw: st.DrawFn) -> StateLayout:
    drawn = draw(st.lists(st.tuples(shapes, kinds), max_size=8))
    entries = [ArraySpec(name=f"e{i}", shape=shape, dtype=d, kind=k) for i, (shape, (d, k)) in enumerate(drawn)]  # type: ignore[arg-type]
    return StateLayout(entries=(ArraySpec(name="w", shape=(2,), dtype="float32", kind="parameter"), *entries))


def entry(name: str, dtype: str, kind: str, *shape: int) -> ArraySpec:
    return ArraySpec(name=name, shape=shape, dtype=dtype, kind=kind)  # type: ignore[arg-type]


def test_sections_are_ordered_by_width_and_kind() -> None:
    layout = StateLayout(
        entries=(
            entry("w", "float32", "parameter", 2, 3),
            entry("mean", "float32", "statistic", 4),
            entry("d", "float64", "parameter", 5),
            entry("tracked", "int64", "counter"),
            entry("b", "float32", "parameter", 1),
        )
    )
    assert [(s.dtype, s.kind, s.offset, s.size) for s in layout.sections] == [
        ("int64", "counter", 0, 1),
        ("float64", "parameter", 8, 5),
        ("float64", "statistic", 48, 0),
        ("float32", "parameter", 48, 7),
        ("float32", "statistic", 76, 4),
    ]
    assert layout.offsets == {"tracked": 0, "d": 8, "w": 48, "b": 72, "mean": 76}
    assert (layout.num_bytes, layout.float_offsets) == (92, (8, 48))


@given(layouts())
def test_named_arrays_cover_the_memory_once(layout: StateLayout) -> None:
    flat = Flat(layout)
    for i, (name, view) in enumerate(flat.views().items()):
        assert view.shape == next(e.shape for e in layout.entries if e.name == name)
        view[...] = i + 1
    found = [*flat.counters, *(x for array in flat.floats for x in array)]
    expected = [i + 1 for i, e in enumerate(layout.entries) for _ in range(prod(e.shape))]
    assert sorted(found) == sorted(expected)
    assert sum(e.size * np.dtype(e.dtype).itemsize for e in layout.entries) == layout.num_bytes


@given(layouts())
def test_parameters_precede_statistics_in_each_array(layout: StateLayout) -> None:
    flat = Flat(layout)
    for array in flat.parameters:
        array[:] = 1
    for array in flat.statistics:
        array[:] = 2
    for array in flat.floats:
        assert (np.diff(array) >= 0).all()
        assert array.all()


def test_layout_survives_a_round_trip_through_arrays() -> None:
    arrays = {"w": np.arange(6.0).reshape(2, 3), "m": np.ones(2, np.float32), "n": np.array(7)}
    layout = layout_of(arrays, statistics=["m"])
    flat = flat_of(layout, arrays)
    assert {e.name: e.kind for e in layout.entries} == {"w": "parameter", "m": "statistic", "n": "counter"}
    copy = Flat(layout, flat.copy().memory)
    for name, view in copy.views().items():
        np.testing.assert_array_equal(view, arrays[name])
    copy.parameters[0][0] = 9
    assert flat.views()["w"][0, 0] == 0


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ((("w", "int64", "parameter"),), "dtype of w must be float32 or float64, or int64 for a counter"),
        ((("w", "float32", "counter"),), "dtype of w must be float32 or float64, or int64 for a counter"),
        ((("w", "float32", "parameter"), ("w", "float32", "statistic")), "entries must be of unique names"),
        ((("m", "float32", "statistic"),), "entries must be at least one parameter"),
        ((("w", "float32", "parameter", -1),), "shape of w must be sizes of zero or more"),
    ],
)
def test_impossible_layouts_are_rejected(entries: tuple[tuple[str, str, str], ...], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        StateLayout(entries=tuple(entry(*words) for words in entries))


def test_half_precision_is_rejected_with_a_remedy() -> None:
    with refused(InvalidValue):
        layout_of({"w": np.zeros(2, np.float16)})


def test_memory_of_another_size_is_rejected() -> None:
    layout = layout_of({"w": np.zeros(2)})
    with refused(InvalidValue):
        Flat(layout, np.zeros(15, np.uint8))
