"""`evener up`, `join`, `nodes` and `down`: a master and its nodes as processes. Needs no PyTorch."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console

from evener.errors import InvalidInput, require
from evener.journey.star_engines import build, build_thin
from evener.journey.star_machine import choose_device, facts, reachable_address, versions
from evener.journey.star_options import TOKEN_VARIABLE, check_security, given_token
from evener.journey.star_profile import measuring
from evener.journey.star_table import run_line, situation_table
from evener.star.abilities import Abilities
from evener.star.control import Control, find_master
from evener.star.home import Beacon, Home, default_cache
from evener.star.line import Dial
from evener.star.master import Master, Setting
from evener.star.messages import Letter, ToNode
from evener.star.node import Node
from evener.wire import Address, Connection, Limits, Token, connect
from evener.wire.dialling import JOIN_SECONDS

DEFAULT_PORT = 7117
_WIDTH_IN_FILES = 160


def up(*, listen: str | None, insecure: bool, home: Path, patience: float | None, as_json: bool) -> None:
    """`evener up`: be the master of `home` until `evener down`, Ctrl-C or SIGTERM.

    What is not said is as it was the last time: so the nodes find a master again that was killed.
    """
    place = Home(home)
    last = _last_beacon(place)
    patience = (last.patience if last else Limits().patience) if patience is None else patience
    require(patience > 0, "--patience", patience, "positive seconds")
    with place.occupied(), sigterm_is_ctrl_c():
        identity = place.identity(insecure=insecure)
        wanted = Address.parse(listen or (last.listen if last else f":{DEFAULT_PORT}"))
        setting = Setting(place, identity, versions(), facts(), patience, say)
        master = Master(setting)
        try:
            bound = master.listen(wanted)
            reachable, token = reachable_address(bound), identity.token.text
            place.announce(
                Beacon(address=str(reachable), listen=str(bound), token=token, pid=os.getpid(), patience=patience)
            )
            _announce(reachable, token, insecure, as_json)
            master.serve()
        except KeyboardInterrupt:
            say("the master stops; its nodes wait for `evener up`")
        finally:
            master.close()


def _announce(address: Address, token: str, insecure: bool, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"address": str(address), "token": token, "pid": os.getpid()}) + "\n")
    else:
        sys.stdout.write(f"The master is up. On every node type:\n\n    {join_line(address, token)}\n\n")
    sys.stdout.flush()
    if insecure:
        say("warning: --insecure: nothing is encrypted, whoever hears the network can read and change everything")


def join_line(address: Address, token: str) -> str:
    """What to type on a node."""
    return f"evener join {address} --token {token}"


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
) -> Abilities:  # fmt: skip
    """What this machine brings, in the user's words and in those that were left to it; may import PyTorch."""
    chosen = "cpu" if thin else choose_device(device)
    own_name = name or socket.gethostname() + (f"-{chosen.replace(':', '')}" if device else "")
    here = versions()
    return Abilities(
        name=own_name,
        device=chosen,
        speed=speed,
        data=data.resolve() if data else None,
        cache=folder,
        versions=here,
        measure=measuring(own_name, chosen, speed, thin=thin, versions=here, cache=folder),
        build=build_thin if thin else build,
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

    def dial(seconds: float, patience: float) -> Connection[Letter]:
        return connect(address, token, ToNode, Limits(patience=patience), seconds=seconds)

    with dial(JOIN_SECONDS, Limits().patience) as first:
        standing = [first]
        yield lambda seconds, patience: standing.pop() if standing else dial(seconds, patience)


def nodes(*, home: Path, master: str | None, token: str | None, as_json: bool) -> None:
    """`evener nodes`: who is here, and what goes on."""
    with Control(*find_master(Home(home), master, token)) as control:
        situation = control.ask()
    if as_json:
        sys.stdout.write(msgspec.json.encode(situation).decode() + "\n")
        return
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_IN_FILES
    console.print(situation_table(situation))
    if situation.run is not None:
        console.print(run_line(situation.run))


def down(*, home: Path, master: str | None, token: str | None) -> None:
    """`evener down`: end the run, the nodes and the master."""
    with Control(*find_master(Home(home), master, token)) as control:
        control.down()
    sys.stdout.write("the master and its nodes have ended\n")


def _last_beacon(home: Home) -> Beacon | None:
    """How the last master of this home was reached; None if there was none."""
    try:
        return home.beacon()
    except InvalidInput:
        return None


def say(sentence: str) -> None:
    """Tell the user of a master or node what happens."""
    sys.stderr.write(f"evener: {sentence}\n")
    sys.stderr.flush()


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """Inside, a service manager's SIGTERM ends the process as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
