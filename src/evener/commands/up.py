"""`evener up`, `nodes`, `stop` and `down`: the master's process, and its status. Needs no PyTorch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import msgspec
from rich.table import Table

from evener.commands.dashboard import page_beside
from evener.commands.discovery import SHOWN_DIGITS, announced
from evener.commands.join import given_token
from evener.commands.relay import lines_of, relay_of
from evener.commands.terminal import print_notice, warn_of_readers
from evener.commands.up_ssh import address_for, nodes_by_ssh, parse_hosts
from evener.config.options import PATIENCE, InviteConfig, MasterAccess, NodesAccess, StopAccess, UpConfig
from evener.config.run_config import RunConfig
from evener.ps.client import MasterClient, find_master
from evener.ps.master.master import Master
from evener.ps.protocol.config import (
    Beacon,
    MasterConfig,
    StateDir,
    default_state_dir,
    reachable_address,
    versions_here,
)
from evener.ps.protocol.messages import ExpelNode, ForgetNode, Invite, ReleaseNode, RevokeInvitation, StopRun
from evener.ps.protocol.status import ClusterStatus, InvitationStatus, NodeStatus, RunStatus
from evener.ps.protocol.system import System, read_system
from evener.records.errors import InvalidInput
from evener.report.text import human_bytes, table_of
from evener.system.host import environment, require_posix
from evener.system.malloc import return_large_memory
from evener.system.signals import interrupt_on_stop_signals
from evener.training.console import open_console
from evener.wire.identity import MASTER_PORT, Address, Token

_STOP_PATIENCES = 2.0
"""Wait of `evener stop`: the master gives the ranks of a run one patience to end after their step."""
_PAUSE_SECONDS = 0.1


def up(config: UpConfig, *, as_json: bool) -> None:
    """`evener up`: be the master of a home (of this user by default) until `evener down`, Ctrl-C or SIGTERM.

    Options that are not given keep their previous values, so nodes find a restarted master.
    """
    require_posix("a master")
    place, insecure = StateDir(config.home or default_state_dir(os.environ)), config.insecure
    hosts = parse_hosts(config.ssh) if config.ssh is not None else []
    return_large_memory()
    last = _last_beacon(place)
    patience = config.patience or (last.patience if last else PATIENCE)
    relay, relay_key = relay_of(config, last, os.environ)
    is_announced = config.announce if config.announce is not None else bool(last and last.announce)
    with place.occupied(), page_beside(place.runs, config.dashboard), interrupt_on_stop_signals():
        warn_of_readers(place.identity_file(insecure=insecure))
        identity = place.identity(insecure=insecure, rotate=config.rotate)
        wanted = Address.parse(config.listen or (last.listen if last else f":{MASTER_PORT}"))
        file = str(config.system.resolve()) if config.system else last.system if last else ""
        system = read_system(Path(file)) if file else None
        settings = MasterConfig(place, identity, versions_here(), environment(), patience, print_notice, system=system)
        master = Master(settings)
        try:
            bound = master.listen(wanted)
            reachable, token = reachable_address(bound), identity.token.text
            if relay:
                lines = lines_of(relay, relay_key, patience)
                master.listen_by(lines)
                lines.start(waits=config.relay is None)
            place.announce(
                Beacon(
                    address=str(reachable),
                    listen=str(bound),
                    token=token,
                    pid=os.getpid(),
                    patience=patience,
                    system=file,
                    relay=relay,
                    relay_key=relay_key,
                    announce=is_announced,
                )
            )
            in_network = announced(bound, identity.token.fingerprint) if is_announced else nullcontext()
            with in_network, _nodes_elsewhere(config, hosts, bound, place):
                _print_address(lines.address if relay else reachable, place, token, insecure, as_json, system)
                if is_announced and identity.token.fingerprint is not None:
                    digits = identity.token.fingerprint.hex()[:SHOWN_DIGITS]
                    print_notice(f"in this network, `evener join` alone also finds this master; fingerprint {digits}")
                master.serve()
        except KeyboardInterrupt:
            print_notice("the master stops; its nodes wait for `evener up`")
        finally:
            master.close()


def _nodes_elsewhere(
    config: UpConfig, hosts: Sequence[str], bound: Address, place: StateDir
) -> AbstractContextManager[None]:
    """Return a context that runs the nodes of `--ssh` while the master serves."""
    if not hosts:
        return nullcontext()
    token, insecure = (place.tokens / "node").read_text().strip(), " --insecure" * config.insecure
    return nodes_by_ssh(
        hosts,
        partial(address_for, bound),
        token,
        print_notice,
        join=config.ssh_join + insecure,
        config=config.ssh_config,
    )


def _print_address(
    address: Address, place: StateDir, token: str, insecure: bool, as_json: bool, system: System | None
) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"address": str(address), "token": token, "pid": os.getpid()}) + "\n")
    else:
        sys.stdout.write(invitation(address, place, system))
    sys.stdout.flush()
    if insecure:
        print_notice("warning: --insecure: nothing is encrypted; anyone on the network can read and change everything")


def invitation(address: Address, place: StateDir, system: System | None = None) -> str:
    """Return what to type on a node; the token is on no command line, which `ps` shows to all users."""
    lines = [f"    evener join {address}"] if system is None else _lines_of(system, address)
    where = "every node" if system is None else f"the nodes of {system.file}, each its line,"
    joined = "\n".join(lines)
    return (
        f"The master is up. On {where} type:\n\n{joined}\n\n"
        f"and give it this token when it asks (or with --token-file, or in $EVENER_TOKEN):\n\n"
        f"    {(place.tokens / 'node').read_text().strip()}\n\n"
        "This token lets a machine compute. To submit runs from another machine, copy the submitter's token to it,\n"
        f"from {place.tokens / 'submitter'}, and type `evener train ... --master {address} --token-file FILE`.\n"
    )


def _lines_of(system: System, address: Address) -> list[str]:
    return [
        f"    evener join {address} --name {name} --device {device.device}"
        + (f"     # on {device.address}" if device.address else "")
        for name, device in system.devices.items()
    ]


def open_master(access: MasterAccess | RunConfig) -> MasterClient:
    """Connect to the master that the user named, or to that of this machine. Raises InvalidInput, MissingFile."""
    place = place_of_master(access)
    if access.token is None and access.token_file is None and access.master is None:
        warn_of_readers(StateDir(access.home or default_state_dir(os.environ)).beacon_file)
    return MasterClient(*place)


def require_submitter(access: MasterAccess | RunConfig) -> None:
    """Ask the master whether the user's token may submit runs, before anything that takes long is loaded.

    Raises:
        InvalidInput: it may not, or no master is found.
        CannotJoin: the master cannot be reached, or refuses the token.
    """
    with MasterClient(*place_of_master(access)) as client:
        client.ask()


def place_of_master(access: MasterAccess | RunConfig) -> tuple[Address, Token, float]:
    """Return the master's address, token and patience, without connecting. Raises InvalidInput, MissingFile."""
    token = given_token(access.token, access.token_file, os.environ if access.master else {})
    return find_master(StateDir(access.home or default_state_dir(os.environ)), access.master, token)


def nodes(access: NodesAccess, *, as_json: bool) -> None:
    """`evener nodes`: show the nodes, and the runs in progress."""
    with open_master(access) as client:
        changes = [] if access.expel is None else [client.change(ExpelNode(name=access.expel))]
        changes += (
            [] if access.release is None else [client.change(ReleaseNode(name=access.release, seconds=access.grace))]
        )
        changes += [] if access.forget is None else [client.change(ForgetNode(name=access.forget))]
        status = changes[-1] if changes else client.ask()
    if as_json:
        sys.stdout.write(msgspec.json.encode(status).decode() + "\n")
        return
    console = open_console(to_stderr=False, width_in_files=160)
    console.print(nodes_table(status))
    for node, reason in reasons_of(status):
        console.print(f"{node}: {reason}")
    if status.invitations:
        console.print(invitations_table(status))
    for run in status.runs:
        console.print(run_line(run))


def stop(access: StopAccess) -> None:
    """`evener stop`: end a run with its current results. Raise InvalidInput if it is not in progress."""
    with open_master(access) as client:
        run = _run_to_stop(client.ask(), access.run)
        status = client.change(StopRun(run=run.run, at_once=access.now))
        until = time.monotonic() + _STOP_PATIENCES * client.patience
        while goes_on := any(one.run == run.run for one in status.runs):  # ranks end after their step
            if time.monotonic() > until:
                break
            time.sleep(_PAUSE_SECONDS)
            status = client.ask()
    ending = "is asked to end, but goes on" if goes_on else "has ended with what it had reached"
    sys.stdout.write(f"run {run.run} {ending}; results {'will be' if goes_on else 'are'} in {run.folder}\n")


def _run_to_stop(status: ClusterStatus, wanted: str | None) -> RunStatus:
    """Return the run of this name, or the only one. Raise InvalidInput if there is none, or several."""
    runs = [run for run in status.runs if wanted in (None, run.run)]
    if len(runs) > 1:
        names = ", ".join(run.run for run in runs)
        raise InvalidInput(f"several runs go on at {status.address}: name one of {names}")
    if not status.runs:
        raise InvalidInput(f"no run goes on at {status.address}")
    if not runs:
        names = ", ".join(f"run {run.run}" for run in status.runs)
        on = f"{names} {'does' if len(status.runs) == 1 else 'do'}"
        raise InvalidInput(f"run {wanted} does not go on at {status.address}: {on}")
    return runs[0]


def down(access: MasterAccess) -> None:
    """`evener down`: end the run, the nodes and the master."""
    with open_master(access) as client:
        client.down()
    sys.stdout.write("the master and its nodes have ended\n")


def nodes_table(status: ClusterStatus) -> Table:
    """Return a table of all nodes."""
    return table_of(
        f"Nodes of the master at {status.address}",
        {
            "node": lambda node: node.name,
            "address?": lambda node: node.address,
            "device": lambda node: node.device,
            ">GFLOP/s?": lambda node: "" if node.score is None else f"{node.score:,.0f}",
            "does": lambda node: node.doing.partition(":")[0],
            ">samples/s": lambda node: f"{node.samples_per_second:,.0f}" if node.samples_per_second else "",
            ">sent?": lambda node: human_bytes(node.bytes_sent),
            ">received?": lambda node: human_bytes(node.bytes_received),
            "state": _state,
        },
        status.nodes,
    )


def invitations_table(status: ClusterStatus) -> Table:
    """Return a table of all invitations."""
    return table_of(
        "Invitations",
        {
            "name": lambda one: one.name,
            "for": lambda one: (
                f"submitter {one.submitter}" if one.submitter else f"{one.nodes} node{'s' * (one.nodes > 1)}"
            ),
            ">joined": lambda one: "" if one.submitter else str(one.joined),
            ">open for": _open_for,
        },
        status.invitations,
    )


def _open_for(one: InvitationStatus) -> str:
    is_open = one.seconds > 0 and (bool(one.submitter) or one.joined < one.nodes)
    return f"{one.seconds / 3600:.1f} h" if is_open else "closed"


def run_line(run: RunStatus) -> str:
    """Return a line with a run's progress and its folder."""
    accuracy = "" if run.accuracy is None else f", accuracy {run.accuracy:.2%}"
    epochs = f" of {run.epochs}" if run.epochs else ""
    how = f"{run.method}, by {run.submitter}" if run.submitter else run.method
    if run.nodes is not None:
        how += f", on {', '.join(run.nodes)}" if run.nodes else ", at rest"
    loss = f", loss {run.loss:.4f}" if run.version else ""
    checkpoint = f"; the checkpoint of step {run.checkpoint} is here" if run.checkpoint else ""
    return (
        f"run {run.run} ({how}): epoch {run.epoch + 1}{epochs}, {run.version} updates{loss}"
        f"{accuracy}{checkpoint}; results will be in {run.folder}"
    )


def _state(node: NodeStatus) -> str:
    """Return the state of a node, with its remaining time."""
    seconds = "" if node.seconds is None or node.state == "present" else f" for {node.seconds:.0f} s"
    return f"{node.state}{seconds}"


def reasons_of(status: ClusterStatus) -> Iterator[tuple[str, str]]:
    """Yield name and reason of each node that is absent, or cannot take part: a cell of the table would cut them."""
    for node in status.nodes:
        if node.state != "present":
            yield node.name, node.reason
        if ":" in node.doing:
            yield node.name, node.doing


def _last_beacon(home: StateDir) -> Beacon | None:
    """Return the address of the last master with this state directory; None if there was none."""
    try:
        return home.beacon()
    except InvalidInput:
        return None


def invite(config: InviteConfig) -> None:
    """Print a token and how to use it; or revoke one, and show the others."""
    with open_master(config) as client:
        if config.revoke is not None:
            status = client.change(RevokeInvitation(invitation=config.revoke))
            open_console(to_stderr=False).print(invitations_table(status))
            return
        message = Invite(submitter=config.submitter or "", nodes=config.nodes, seconds=config.hours * 3600)
        invited = client.invite(message)
        address = client.ask().address
    if config.submitter is None:
        nodes = "1 node" if config.nodes == 1 else f"{config.nodes} nodes"
        intro = f"For {nodes}, to be used within {config.hours:g} h. There type `evener join` and the master's address,"
    else:
        intro = f"For {config.submitter}, for {config.hours:g} h. There type `evener train ... --master`, the address,"
    sys.stdout.write(
        f"{intro}\nand give this token when it asks, or with --token-file, or in $EVENER_TOKEN (the master is at "
        f"{address}):\n\n    {invited.token}\n\nevener invite --revoke {invited.invitation} makes it worthless.\n"
    )
