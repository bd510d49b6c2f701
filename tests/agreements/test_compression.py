"""Numbers in fewer bytes: nothing is further off than it must be, and what was read is written the same again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from numpy.typing import NDArray

from evener.agreements.compression import CHUNK, CODECS, ROW, Codec

Floats = NDArray[Any]
DTYPES = [np.float32, np.float64]
KEPT = 64


def write(code: Codec, numbers: Floats) -> tuple[NDArray[np.uint8], Floats, bool]:
    """Image, meaning, and whether all could be written; in two pieces, as blocks would be."""
    image, meaning = np.zeros(code.num_bytes(len(numbers)), np.uint8), np.empty_like(numbers)
    cut = len(numbers) // 2 // CHUNK * CHUNK if code is CODECS["top-k"] else len(numbers) // 2 // ROW * ROW
    with np.errstate(all="ignore"):
        parts = [code.write(numbers[a:b], image, a, meaning[a:b]) for a, b in ((0, cut), (cut, len(numbers))) if b > a]
    return image, meaning, all(parts)


def read(code: Codec, image: NDArray[np.uint8], count: int, dtype: Any) -> Floats:
    """In two pieces, as blocks would be."""
    out = np.empty(count, dtype)
    cut = count // 2 // CHUNK * CHUNK if code is CODECS["top-k"] else count // 2 // ROW * ROW
    for a, b in ((0, cut), (cut, count)):
        if b > a:
            code.read(image, a, out[a:b])
    return out


def arrays(low: float, high: float) -> st.SearchStrategy[Floats]:
    values = st.floats(low, high, width=32, allow_subnormal=True)
    return st.sampled_from(DTYPES).flatmap(lambda d: nps.arrays(d, st.integers(1, 3 * ROW), elements=values))


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None)
@given(arrays(-(2.0**100), 2.0**100))
def test_compression_is_idempotent(name: Any, numbers: Floats) -> None:
    code = CODECS[name]
    image, meaning, is_fine = write(code, numbers)
    assert is_fine
    np.testing.assert_array_equal(read(code, image, len(numbers), numbers.dtype), meaning)
    again, same, _ = write(code, meaning)
    np.testing.assert_array_equal(same, meaning)
    np.testing.assert_array_equal(read(code, again, len(numbers), numbers.dtype), meaning)


@settings(deadline=None)
@given(arrays(-(2.0**100), 2.0**100))
def test_bf16_equals_pytorch(numbers: Floats) -> None:
    _, meaning, _ = write(CODECS["bf16"], numbers)
    expected = torch.from_numpy(numbers).to(torch.float32).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(meaning, expected)


@settings(deadline=None)
@given(arrays(-(2.0**100), 2.0**100))
def test_int8_error_is_at_most_half_a_quantum(numbers: Floats) -> None:
    _, meaning, _ = write(CODECS["int8"], numbers)
    for a in range(0, len(numbers), ROW):
        row = numbers[a : a + ROW].astype(np.float64)
        quantum = np.abs(row).max() / 127 * (1 + 2**-14)
        smallest = np.finfo(np.float32).tiny * 127
        assert (np.abs(row - meaning[a : a + ROW]) <= max(quantum * 0.5001, smallest)).all()


def test_int8_represents_multiples_of_the_row_maximum_exactly() -> None:
    numbers = np.array([127, -127, 64, 1, 0, -3], np.float32) * np.float32(0.03125)
    _, meaning, _ = write(CODECS["int8"], numbers)
    np.testing.assert_array_equal(meaning, numbers)


def test_rows_are_quantized_independently() -> None:
    numbers = np.concatenate([np.full(ROW, 1e6), np.full(ROW, 1e-6), np.full(3, 5.0)])
    _, meaning, _ = write(CODECS["int8"], numbers)
    np.testing.assert_allclose(meaning, numbers, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000, 0x7F7FFFFF])
def test_non_finite_values_remain_non_finite(name: Any, bits: int, dtype: Any) -> None:
    alike = CHUNK if name == "top-k" else ROW
    numbers = np.ones(2 * alike, dtype)
    with np.errstate(all="ignore"):
        numbers[3] = np.array([bits], np.uint32).view(np.float32)[0]
    image, _, is_fine = write(CODECS[name], numbers)
    found = read(CODECS[name], image, len(numbers), dtype)
    assert not is_fine
    assert not np.isfinite(found[3])
    others = found[alike:]
    np.testing.assert_allclose(others[others != 0], 1, rtol=1e-4)
    assert np.count_nonzero(others) == (KEPT if name == "top-k" else ROW)


def test_float64_beyond_float32_becomes_non_finite() -> None:
    for code in CODECS.values():
        image, _, is_fine = write(code, np.array([1.0, 1e300]))
        assert not is_fine
        assert not np.isfinite(read(code, image, 2, np.float64)[1])


def test_values_below_the_smallest_scale_become_zero() -> None:
    image, meaning, is_fine = write(CODECS["int8"], np.array([1e-42, -1e-40, 0], np.float32))
    assert is_fine
    assert not meaning.any()
    assert not read(CODECS["int8"], image, 3, np.float32).any()


@pytest.mark.parametrize(("count", "bf16", "int8"), [(1, 2, 5), (256, 512, 260), (257, 514, 265), (1000, 2000, 1016)])
def test_compressed_sizes_are_known_in_advance(count: int, bf16: int, int8: int) -> None:
    assert (CODECS["bf16"].num_bytes(count), CODECS["int8"].num_bytes(count)) == (bf16, int8)


def decoded_top_k(image: NDArray[np.uint8], count: int) -> Floats:
    """The numbers that an image of `top-k` stands for, bit by bit."""
    chunks = -(-count // CHUNK)
    out = np.zeros(chunks * CHUNK, np.float32)
    data = image.tobytes()
    assert len(data) == chunks * (4 + 96 + 16)
    for chunk in range(chunks):
        levels = [
            np.array([int.from_bytes(data[at : at + 2], "little") << 16], np.uint32).view(np.float32)[0]
            for at in (4 * chunk, 4 * chunk + 2)
        ]
        places = int.from_bytes(data[4 * chunks + 96 * chunk :][:96], "little")
        codes = int.from_bytes(data[100 * chunks + 16 * chunk :][:16], "little")
        for number in range(KEPT):
            place, code = places >> 12 * number & 0xFFF, codes >> 2 * number & 3
            out[chunk * CHUNK + place] = levels[code >> 1] * (-1 if code & 1 else 1)
    return out[:count]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, KEPT, KEPT + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 100])
def test_top_k_keeps_the_largest_numbers_of_every_chunk(count: int, dtype: Any) -> None:
    numbers = np.random.default_rng(count).standard_normal(count).astype(dtype)
    image, meaning, is_fine = write(CODECS["top-k"], numbers)
    assert is_fine
    np.testing.assert_array_equal(decoded_top_k(image, count), meaning.astype(np.float32))
    for first in range(0, count, CHUNK):
        values, sent = numbers[first : first + CHUNK], meaning[first : first + CHUNK]
        kept = np.flatnonzero(sent)
        largest = np.argsort(-np.abs(values))[:KEPT]
        assert set(kept) == set(largest)
        assert (np.sign(sent[kept]) == np.sign(values[kept])).all()
        sizes = np.abs(values[kept])
        for level in np.unique(np.abs(sent[kept])):
            members = sizes[np.abs(sent[kept]) == level]
            if len(kept) == KEPT:
                assert level == pytest.approx(members.mean(), rel=2**-7)
        assert ((values - sent) ** 2).sum() < (values**2).sum()


def test_top_k_counts_nothing_as_sent_of_a_chunk_with_many_numbers_that_are_not_finite() -> None:
    numbers = np.ones(2 * CHUNK, np.float32)
    numbers[: 2 * KEPT] = np.nan
    _, meaning, is_fine = write(CODECS["top-k"], numbers)
    assert not is_fine
    assert np.isnan(meaning[:CHUNK]).all()
    assert np.count_nonzero(meaning[CHUNK:]) == KEPT


def test_top_k_is_a_hundred_times_smaller() -> None:
    sizes = {count: CODECS["top-k"].num_bytes(count) for count in (1, CHUNK, CHUNK + 1, 1_000_000)}
    assert sizes == {1: 116, CHUNK: 116, CHUNK + 1: 232, 1_000_000: 116 * 245}
    assert 4 * 1_000_000 / sizes[1_000_000] > 140
