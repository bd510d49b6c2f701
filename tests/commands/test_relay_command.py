"""`evener relay` and `evener up --relay`, as typed: a run through a relay has the weights of one without it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evener.wire.identity import Address
from support.command_cluster import Cluster, cluster, wait_until
from support.commands import TINY, command, evener
from support.sockets import free_port


@contextmanager
def relay(folder: Path, port: int = 0) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    """A relay, and what it says when it listens."""
    typed = command("relay", "--listen", f"127.0.0.1:{port}", "--key-file", str(folder / "key"), "--json")
    output = folder / "relay.json"
    with output.open("wb") as file:
        process = subprocess.Popen(typed, stdout=file)
    try:
        yield json.loads(wait_until(output.read_text, "that the relay listens")), process
    finally:
        was_killed = process.poll() is not None
        process.send_signal(signal.SIGTERM)
        assert was_killed or process.wait(10) == 0


def test_ctrl_c_ends_a_relay_with_open_connections(tmp_path: Path) -> None:
    with relay(tmp_path) as (said, process):
        host, _, port = said["address"].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10):
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0


def weights_of(ps: Cluster, agreement: str) -> dict[str, torch.Tensor]:
    """The weights of a run on all nodes."""
    record = ps.train(str(TINY), "--agreement", agreement, "--output", str(ps.folder / agreement), "--epochs", "1")
    assert record is not None
    return load_file(ps.folder / agreement / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("agreement", "names"), [("sync", ("one", "two")), ("diloco", ("one",))])
def test_run_through_a_relay_has_the_weights_of_one_without(
    tmp_path: Path, agreement: str, names: tuple[str, ...]
) -> None:
    """With several nodes, the rounds of `diloco` depend on their speeds."""
    with cluster() as ps:
        for name in names:
            ps.join(name)
        ps.wait_for_nodes()
        expected = weights_of(ps, agreement)
    with (
        relay(tmp_path) as (said, _),
        cluster("--relay", said["address"], "--relay-key-file", said["key_file"]) as ps,
    ):
        assert ps.address == said["address"]
        for name in names:
            ps.join(name)
        ps.wait_for_nodes()
        assert {node.address for node in ps.ask().nodes} == {Address.parse(said["address"]).description}
        for name, weight in weights_of(ps, agreement).items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_nodes_and_master_return_through_a_relay_that_was_killed(tmp_path: Path) -> None:
    port = free_port()
    with relay(tmp_path, port) as (said, first):
        place = ("--relay", said["address"], "--relay-key-file", said["key_file"])
        with cluster(*place) as ps:
            ps.join("one")
            ps.wait_for_nodes()
            first.kill()
            first.wait()
            wait_until(lambda: ps.state("one") != "present", "that the node is missed")
            with relay(tmp_path, port):
                wait_until(lambda: ps.state("one") == "present", "that the node is back")
                ps.down()


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("up", "--relay", "127.0.0.1:1"), "EVENER_RELAY_KEY"),
        (("up", "--relay", "127.0.0.1:1", "--relay-key-file", "missing"), "missing"),
        (("up", "--relay", "no:where"), "no:where"),
        (("up", "--relay", "127.0.0.1:1", "--insecure"), "--insecure"),
        (("relay", "--listen", "unix:/tmp/relay"), "path"),
        (("relay", "--listen", "203.0.113.7:7119"), "203.0.113.7"),
    ],
)
def test_wrong_options_are_refused_with_their_value(words: tuple[str, ...], value: str, tmp_path: Path) -> None:
    place = ("--home", str(tmp_path)) if words[0] == "up" else ("--key-file", str(tmp_path / "key"))
    result = evener(*words, *place, cwd=tmp_path, timeout=30)
    assert result.returncode == 2
    assert value in result.stderr


def test_relay_keeps_its_key_private(tmp_path: Path) -> None:
    with relay(tmp_path) as (said, _):
        key = Path(said["key_file"])
        assert len(key.read_text().strip()) >= 16
        assert not os.stat(key).st_mode & 0o077
