"""The variables that torchrun sets are checked before anything waits for another machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from evener.records.errors import InvalidInput
from support.commands import TINY, evener


@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.slow), "1"])
@pytest.mark.parametrize("address", ["no-such-machine.invalid", "a..b", "x" * 300])
def test_an_address_that_cannot_be_resolved_is_one_sentence_at_once(address: str, rank: str, tmp_path: Path) -> None:
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
