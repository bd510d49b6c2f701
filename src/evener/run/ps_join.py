"""`evener join`: a node as a process. Needs no PyTorch, and loads nothing that only a master needs."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from evener.errors import InvalidInput, require
from evener.ps.messages import Header, ToNode
from evener.ps.node import Node
from evener.ps.node_config import NodeConfig
from evener.ps.reconnecting_client import Dial
from evener.ps.state_dir import default_cache
from evener.run.ps_backends import build_engine, build_thin_engine
from evener.run.ps_machine import choose_device, versions
from evener.run.ps_options import TOKEN_VARIABLE, check_security, given_token
from evener.run.ps_profile import measuring
from evener.run.ps_service import say
from evener.signals import sigterm_is_ctrl_c
from evener.wire.connect import JOIN_SECONDS, open_connection
from evener.wire.connection import Connection
from evener.wire.frame import Limits
from evener.wire.identity import Address, Token


def join(
    *,
    address: str,
    token: str | None,
    name: str | None,
    device: str | None,
    data: Path | None,
    speed: float,
    cache: Path | None,
    insecure: bool,
    thin: bool,
    environment: Mapping[str, str],
    token_file: Path | None = None,
) -> None:
    """`evener join`: be a node of a master until it says goodbye, Ctrl-C or SIGTERM."""
    where, secret = Address.parse(address), _secret(token, token_file, environment)
    check_security(secret, insecure)
    require(0 < speed <= 1, "--speed", speed, "above 0 and at most 1")
    require(data is None or data.is_dir(), "--data", str(data), "a folder that is there")
    require(not thin or device in (None, "cpu"), "--device", device, "cpu with --thin")
    with sigterm_is_ctrl_c(), dialling(where, secret) as dial:  # first of all: who cannot join is told at once
        Node(_abilities(name, device, data, speed, cache or default_cache(environment), thin), dial, say).serve()


def _abilities(
    name: str | None, device: str | None, data: Path | None, speed: float, folder: Path, thin: bool
) -> NodeConfig:  # fmt: skip
    """What this machine brings, in the user's words and in those that were left to it; may import PyTorch."""
    chosen = "cpu" if thin else choose_device(device)
    own_name = name or socket.gethostname() + (f"-{chosen.replace(':', '')}" if device else "")
    here = versions()
    return NodeConfig(
        name=own_name,
        device=chosen,
        speed=speed,
        data=data.resolve() if data else None,
        cache=folder,
        versions=here,
        measure=measuring(own_name, chosen, speed, thin=thin, versions=here, cache=folder),
        build=build_thin_engine if thin else build_engine,
    )


def _secret(token: str | None, token_file: Path | None, environment: Mapping[str, str]) -> Token:
    given = given_token(token, token_file, environment)
    if given is None:
        raise InvalidInput(f"the master's token is missing: give --token T, --token-file FILE or ${TOKEN_VARIABLE}")
    return Token.parse(given)


@contextmanager
def dialling(address: Address, token: Token) -> Iterator[Dial]:
    """What makes connections to a master; the first one stands already, and is closed with the block.

    Raises:
        CannotJoin: the master cannot be reached; says where, why and what to do.
    """

    def dial(seconds: float, patience: float) -> Connection[Header]:
        return open_connection(address, token, ToNode, Limits(patience=patience), seconds=seconds)

    with dial(JOIN_SECONDS, Limits().patience) as first:
        standing = [first]
        yield lambda seconds, patience: standing.pop() if standing else dial(seconds, patience)
