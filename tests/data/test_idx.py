"""IDX files: what is written comes back, and every kind of damage is told in one sentence."""

from __future__ import annotations

import gzip
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray

from evener.data.mnist import read_idx
from evener.records.errors import InvalidFile, MissingFile

CODES = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}


def idx_bytes(array: NDArray[Any]) -> bytes:
    header = bytes([0, 0, CODES[array.dtype.name], array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000 08 01 00000003 07 00 ff", np.array([7, 0, 255], np.uint8)),
        ("0000 09 01 00000002 07 ff", np.array([7, -1], np.int8)),
        ("0000 0b 01 00000002 0102 ffff", np.array([258, -1], np.int16)),
        ("0000 0c 02 00000002 00000001 00000102 fffffffe", np.array([[258], [-2]], np.int32)),
        ("0000 0d 01 00000001 3fc00000", np.array([1.5], np.float32)),
        ("0000 0e 01 00000001 c004000000000000", np.array([-2.5], np.float64)),
        ("0000 08 03 00000002 00000000 00000005", np.zeros((2, 0, 5), np.uint8)),
    ],
)
def test_every_element_type_is_read_big_endian(text: str, expected: NDArray[Any], tmp_path: Path) -> None:
    file = tmp_path / "a-idx"
    file.write_bytes(bytes.fromhex(text))
    array = read_idx(file)
    np.testing.assert_array_equal(array, expected, strict=True)
    assert array.dtype.isnative


@given(data=st.data(), kind=st.sampled_from(sorted(CODES)), packed=st.booleans())
def test_written_arrays_are_read_back_gzipped_or_not(data: st.DataObject, kind: str, packed: bool) -> None:
    array = data.draw(arrays(np.dtype(kind), array_shapes(min_dims=1, max_dims=5, min_side=0, max_side=4)))
    raw = idx_bytes(array)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a-idx"
        file.write_bytes(gzip.compress(raw) if packed else raw)
        np.testing.assert_array_equal(read_idx(file), array, strict=True)


def test_array_is_writable(tmp_path: Path) -> None:
    file = tmp_path / "a-idx"
    file.write_bytes(idx_bytes(np.zeros(3, np.uint8)))
    assert read_idx(file).flags.writeable


GOOD = idx_bytes(np.arange(6, dtype=np.int16).reshape(2, 3))
PACKED = gzip.compress(GOOD, mtime=0)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not an IDX file: it begins with nothing; expected 00 00, an element type (08, 09, 0b, 0c, 0d, 0e)"),
        (b"\0\0\x08", "it begins with 00 00 08; expected 00 00"),
        (b"\x89PNG....", "it begins with 89 50 4e 47; expected 00 00"),
        (b"\0\0\x0a\1" + bytes(4), "it begins with 00 00 0a 01;"),
        (b"\0\0\x08\0", "it begins with 00 00 08 00; "),
        (b"\0\0\x08\x21" + bytes(200), "and 01 to 20 dimensions"),
        (GOOD[:11], "ends inside its header: 11 bytes, expected 12 or more: fetch it again"),
        (GOOD[:-1], "holds 11 bytes of elements; its header (2x3 of int16) states 12: fetch it again"),
        (GOOD + b"\0", "holds 13 bytes of elements; its header (2x3 of int16) states 12: fetch it again"),
        (b"\0\0\x08\4" + b"\xff" * 16, "(4294967295x4294967295x4294967295x4294967295 of uint8) states "),
        (PACKED[:-9], "is a damaged gzip file ("),
        (PACKED[:10] + b"\xff" + PACKED[11:], "is a damaged gzip file ("),
        (PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:], "is a damaged gzip file (CRC check failed"),
    ],
)
def test_invalid_file_is_named_with_the_expected_content(content: bytes, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "broken-idx"
    file.write_bytes(content)
    with pytest.raises(InvalidFile, match=re.escape(sentence)) as caught:
        read_idx(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=re.escape(f"cannot read {tmp_path / 'none'}: No such file or directory")):
        read_idx(tmp_path / "none")
