"""`evener up`, `nodes` and `down`: a master as a process, and what goes on there. Needs no PyTorch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from evener.errors import InvalidInput, require
from evener.host import environment
from evener.ps.master import Master, MasterConfig
from evener.ps.master_client import MasterClient, find_master
from evener.ps.state_dir import Beacon, StateDir
from evener.run.ps_machine import reachable_address, versions
from evener.run.ps_service import say
from evener.run.ps_table import run_line, situation_table
from evener.signals import sigterm_is_ctrl_c
from evener.wire.frame import Limits
from evener.wire.identity import Address

DEFAULT_PORT = 7117
_WIDTH_IN_FILES = 160


def up(*, listen: str | None, insecure: bool, home: Path, patience: float | None, as_json: bool) -> None:
    """`evener up`: be the master of `home` until `evener down`, Ctrl-C or SIGTERM.

    What is not said is as it was the last time: so the nodes find a master again that was killed.
    """
    place = StateDir(home)
    last = _last_beacon(place)
    patience = (last.patience if last else Limits().patience) if patience is None else patience
    require(patience > 0, "--patience", patience, "positive seconds")
    with place.occupied(), sigterm_is_ctrl_c():
        identity = place.identity(insecure=insecure)
        wanted = Address.parse(listen or (last.listen if last else f":{DEFAULT_PORT}"))
        setting = MasterConfig(place, identity, versions(), environment(), patience, say)
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


def nodes(*, home: Path, master: str | None, token: str | None, as_json: bool) -> None:
    """`evener nodes`: who is here, and what goes on."""
    with MasterClient(*find_master(StateDir(home), master, token)) as control:
        situation = control.ask()
    if as_json:
        sys.stdout.write(msgspec.json.encode(situation).decode() + "\n")
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_IN_FILES
    console.print(situation_table(situation))
    if situation.run is not None:
        console.print(run_line(situation.run))


def down(*, home: Path, master: str | None, token: str | None) -> None:
    """`evener down`: end the run, the nodes and the master."""
    with MasterClient(*find_master(StateDir(home), master, token)) as control:
        control.down()
    sys.stdout.write("the master and its nodes have ended\n")


def _last_beacon(home: StateDir) -> Beacon | None:
    """How the last master of this home was reached; None if there was none."""
    try:
        return home.beacon()
    except InvalidInput:
        return None
