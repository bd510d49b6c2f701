"""A rank's environment in a run of torchrun, or of another launcher that sets its variables (slurm.py)."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace

from evener.comm.signed_store import SignedStore
from evener.doctor.interface_checks import gloo_interface
from evener.doctor.network import network_facts
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.rank_heartbeat import RankHeartbeat, StoreWatch
from evener.launch.rank_variables import number_of as _number
from evener.launch.rank_variables import require_rank_variables
from evener.launch.store import LEAST_START_SECONDS, connect_store, keep_store, launcher_secret
from evener.records.errors import InvalidInput, NodeLost, end_process
from evener.system import accelerators
from evener.system.cores import keep_to_quota, quota_speed
from evener.system.host import own_address
from evener.system.sign_of_life import sign_of_life

_ANSWER_FACTOR = 1.25
"""Time that a store may take to report a timeout, relative to that timeout."""


class Introduction(NamedTuple):
    """The facts that a rank publishes about itself.

    Attributes:
        host: name of its machine.
        machine: the launcher's number of the machine, or `-`.
        local: its number on the machine.
        device: it computes on.
        speed: its share of a processor's speed.
    """

    host: str
    machine: str
    local: str
    device: str
    speed: float


def torchrun_environment(
    variables: Mapping[str, str], patience: float, notify: Callable[[Any], None]
) -> RankEnvironment | None:
    """Return the environment of a rank of torchrun; None if it did not start this process.

    Raises:
        InvalidInput: this system has no POSIX, a variable is missing or not a number, or the ranks share no secret.
    """
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    require_rank_variables(variables)
    rank, size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    local = _number(variables, "LOCAL_RANK")
    host, port = variables["MASTER_ADDR"], _number(variables, "MASTER_PORT")
    device = _device(local)
    agent = variables.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    prefix = f"evener/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    secret, file = launcher_secret(variables)
    open_store = partial(connect_store, host, port, secret, patience=patience)
    is_keeper = rank == 0 and not agent
    machine = variables.get("GROUP_RANK") or variables.get("NODE_RANK") or "-"
    keep_to_quota()
    here = _number(variables, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in variables else 1
    speed = quota_speed(max(1, here)) if device == "cpu" else 1.0
    own = Introduction(socket.gethostname(), machine, str(local), device, speed)
    with ExitStack() as waiting:
        if local == 0 and size > 1:
            waiting.enter_context(sign_of_life(say, _waits(variables)))
        root = keep_store(host, port, secret)[0] if is_keeper else open_store()
        store = root.under(prefix)
        nodes = _introduce(store, rank, size, own, patience)
    if rank == 0 and file is not None:
        file.unlink()  # all ranks have used the secret by now
    env = RankEnvironment(
        rank=rank, nodes=nodes, device=torch.device(device), patience=patience, notify=notify, store=store, tell=say
    )
    env.address = _address(host, num_machines=len({node.host for node in nodes}))
    if size > 1:
        env.heartbeat = RankHeartbeat(
            open_store().under(prefix),
            rank=rank,
            nodes=env.names,
            patience=patience,
            on_lost=lambda lost: env.end(lost),
            keeps_store=is_keeper,
            on_stop=env.request_stop,
        )
    return env


def say(sentence: str) -> None:
    """Write a sentence to the terminal of this rank."""
    sys.stderr.write(f"evener: {sentence}\n")
    sys.stderr.flush()


def say_what_is_waited_for(variables: Mapping[str, str]) -> None:
    """Write, once per machine, that its ranks have started and where they wait for the other machines."""
    if _is_first_of_several(variables):
        say(_waits(variables))


def _is_first_of_several(variables: Mapping[str, str]) -> bool:
    """Whether this is the first rank of a machine, and there are other machines."""
    return variables.get("LOCAL_RANK") == "0" and variables.get("LOCAL_WORLD_SIZE") != variables["WORLD_SIZE"]


def _waits(variables: Mapping[str, str]) -> str:
    address = f"{variables.get('MASTER_ADDR')}:{variables.get('MASTER_PORT')}"
    return f"rank {variables['RANK']} of {variables['WORLD_SIZE']} has started and waits for the others at {address}"


def say_where_the_run_is_shown(env: RankEnvironment) -> None:
    """Write, on every machine but the first, that it takes part and which machine shows the run."""
    first = env.nodes[0].host
    is_first_here = all(node.host != env.node.host for node in env.nodes[: env.rank])
    if is_first_here and env.rank > 0:
        size = len(env.nodes)
        say(f"{env.node.name} is rank {env.rank} of {size}; {first} shows the run and has its results")


def _address(host: str, num_machines: int) -> str:
    """Return the address at which the other ranks reach this machine; Gloo listens there, too."""
    address = own_address(host)
    if num_machines > 1:
        if address.startswith("127."):
            address = own_address()  # on some systems the master's own name is a loopback address
        _choose_gloo_interface(address)
    return address


def _choose_gloo_interface(address: str) -> None:
    """Let Gloo listen where the other machines reach this one, unless the user chose an interface.

    By default Gloo uses the address of this machine's name, which is 127.0.1.1 on Debian and Ubuntu.
    """
    network = replace(network_facts(os.environ, socket.gethostname()), route_address=address)
    chosen = gloo_interface(network)
    if chosen is not None and not network.gloo_interfaces:
        os.environ["GLOO_SOCKET_IFNAME"] = chosen.name


def _device(local: int) -> str:
    """Return this rank's device: its accelerator, also if a launcher shows it only that one."""
    here = accelerators.names()
    if not here:
        return "cpu"
    if local >= len(here) > 1:
        raise InvalidInput(
            f"LOCAL_RANK is {local}, but this machine has {len(here)} accelerators: start at most that many ranks here"
        )
    return here[local] if len(here) > 1 else here[0]


def _introduce(
    store: SignedStore,
    rank: int,
    size: int,
    own: Introduction,
    patience: float,
) -> list[NodeSpec]:
    """Publish this rank's host, number and device, and read the others'. Raises NodeLost if one is missing."""
    rows, limit = list[Introduction](), max(patience, LEAST_START_SECONDS)
    with StoreWatch(_ANSWER_FACTOR * limit, end_process, own.host) as watch:
        store.set(f"name/{rank}", msgspec.json.encode(own))
        for other in range(size):
            try:
                store.wait([f"name/{other}"], timedelta(seconds=limit))
            except RuntimeError as error:
                raise NodeLost(f"rank {other} did not start within {limit:g} s") from error
            rows.append(store.get_as(f"name/{other}", Introduction))
            watch.answered()
    return named_nodes(rows)


def named_nodes(rows: Sequence[Introduction]) -> list[NodeSpec]:
    """Return one node per rank; a machine with the name of an earlier one is called `NAME-2`.

    Args:
        rows: of all ranks.
    """
    machines: dict[str, list[str]] = {}
    nodes: list[NodeSpec] = []
    for host, machine, local, device, speed in rows:
        times = sum(row[0] == host and row[2] == local for row in rows[: len(nodes)])
        known = machines.setdefault(host, [])
        key = f"time {times}" if machine == "-" else machine
        if key not in known:
            known.append(key)
        name = host if key == known[0] else f"{host}-{known.index(key) + 1}"
        nodes.append(NodeSpec(name=f"{name}/{local}", host=name, device=device, speeds=((0, speed),)))
    return nodes
