"""Ranks that a launcher started are named by their machines, also where two of these have one name."""

from __future__ import annotations

import pytest

from evener.launch.torchrun import Introduction, named_nodes, say_what_is_waited_for


@pytest.mark.parametrize(
    ("rows", "names", "hosts"),
    [
        (["a 0 0", "a 0 1", "b 1 0"], ["a/0", "a/1", "b/0"], ["a", "a", "b"]),
        (["pc 0 0", "pc 1 0", "pc 1 1"], ["pc/0", "pc-2/0", "pc-2/1"], ["pc", "pc-2", "pc-2"]),
        (["pc - 0", "pc - 1", "pc - 0"], ["pc/0", "pc/1", "pc-2/0"], ["pc", "pc", "pc-2"]),
        (["pc 3 0", "b 0 0", "pc 1 0"], ["pc/0", "b/0", "pc-2/0"], ["pc", "b", "pc-2"]),
    ],
)
def test_machines_of_one_name_are_distinguished(rows: list[str], names: list[str], hosts: list[str]) -> None:
    nodes = named_nodes(
        [Introduction(host, machine, local, "cpu", 1.0) for host, machine, local in map(str.split, rows)]
    )
    assert [node.name for node in nodes] == names
    assert [node.host for node in nodes] == hosts


@pytest.mark.parametrize(
    ("local_rank", "local_size", "is_written"), [("0", "2", True), ("1", "2", False), ("0", "4", False)]
)
def test_first_local_rank_prints_the_awaited_address(
    local_rank: str, local_size: str, is_written: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {
        "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip
    say_what_is_waited_for(variables)
    assert ("10.0.0.1:29500" in capsys.readouterr().err) == is_written
