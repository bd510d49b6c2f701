"""The variables that torchrun sets are checked before anything waits for another machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from evener.launch.rank_variables import number_of
from evener.records.errors import InvalidInput
from support.commands import TINY, evener
from support.refusals import refused


@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.slow), "1"])
@pytest.mark.parametrize("address", ["no-such-machine.invalid", "a..b", "x" * 300])
def test_unresolvable_address_gives_one_sentence_at_once(address: str, rank: str, tmp_path: Path) -> None:
    variables: dict[str, Any] = {
        "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address,
        "MASTER_PORT": "29511", "EVENER_SECRET": "a secret of the tests",
    }  # fmt: skip
    began = time.monotonic()
    ended = evener("train", TINY, "--output", "run", cwd=tmp_path, **variables)
    assert ended.returncode == InvalidInput.exit_code, ended.stderr
    assert address in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("text", ["", "x", "\uff19", "1_0", " 9", "1e3", "+9", "9" * 40])
def test_variable_that_is_no_plain_number_is_rejected(text: str) -> None:
    with refused(InvalidInput):
        number_of({"MASTER_PORT": text}, "MASTER_PORT", 1, 65535)
    assert number_of({"MASTER_PORT": "29500"}, "MASTER_PORT", 1, 65535) == 29500
