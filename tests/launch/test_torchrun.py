"""Ranks that a launcher started are named by their machines, also where two of these have one name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest

from evener.launch import torchrun
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


@pytest.mark.parametrize(("local_rank", "is_told"), [("0", True), ("1", False)])
def test_first_rank_of_a_single_machine_shows_what_it_waits_for(
    local_rank: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def sign_of_life(_say: object, line: str) -> AbstractContextManager[None]:
        lines.append(line)
        return nullcontext()

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(torchrun, "sign_of_life", sign_of_life)
    monkeypatch.setattr(torchrun, "connect_store", refuse)
    variables = {
        "RANK": local_rank, "WORLD_SIZE": "2", "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "EVENER_SECRET": "secret" * 6,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    with pytest.raises(ConnectionError):
        torchrun.torchrun_environment(variables, 1.0, lambda _: None)
    assert bool(lines) == is_told
