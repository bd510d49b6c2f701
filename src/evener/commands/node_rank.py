"""A rank of a master's run, in a process of its own on a node (`rank_host`); its messages go through the node."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import fields

from evener.comm.signed_store import SignedStore
from evener.commands.rank_task import RankTask
from evener.config.conflicts import MASTER_OPTIONS, THIS_MACHINE
from evener.config.run_config import RunConfig
from evener.data.tasks.load import import_file
from evener.doctor.network import interfaces
from evener.launch.line_store import LineStore, RankLine
from evener.launch.nodes import LocalNode
from evener.launch.parent import Parent
from evener.launch.rank_environment import RankEnvironment, hosted_environment, run_rank
from evener.ps.protocol.config import return_seconds
from evener.ps.protocol.rank_messages import RankPlace, decode_rank_place
from evener.system.cores import usable_cores
from evener.system.host import own_address
from evener.training.rank import train_rank

_OPTIONS_OF_A_MACHINE = {*MASTER_OPTIONS, *THIS_MACHINE, "system", "dashboard"} - {"elastic", "compile", "resume"}
_WORKERS_OF_A_CORE = 4
_MAX_ABSENCE = 8
"""Patiences within which a lost master must return; then this node must reconnect."""


def be_rank(parent: Parent, task: RankTask) -> None:
    """Train as a rank of a master's run."""
    place, line = decode_rank_place(task.place), RankLine(parent.say, parent.hear)
    nodes = [LocalNode(name=n.name, host=n.host, device=n.device, speeds=((0, n.speed),)) for n in place.nodes]
    env = hosted_environment(
        parent,
        partial(_open_store, line, place.secret),
        rank=place.rank,
        nodes=nodes,
        patience=place.patience,
        process=task.process,
        is_late=place.is_late,
        receive=line.receive,
        absence=_MAX_ABSENCE * place.patience + return_seconds(place.patience),
    )
    env.address, env.has_own_paths = _address(place, task.towards), True
    run_rank(env, partial(_program, brings_program=task.brings_program), _config_of(task))


def _program(env: RankEnvironment, config: RunConfig, *, brings_program: bool) -> None:
    """Run Evener's program of a rank, or the one in the task's file."""
    if brings_program:
        import_file(Path(config.task)).rank_program(env, config)
    else:
        train_rank(env, config)


def _open_store(line: RankLine, secret: bytes) -> SignedStore:
    return SignedStore(LineStore(line), secret)


def _config_of(task: RankTask) -> RunConfig:
    """Return the config of the run, with the paths of this machine: a submitter chooses no folder of it."""
    config = msgspec.json.decode(task.config, type=RunConfig, dec_hook=lambda _, text: Path(text))
    usual = {one.name: one.default for one in fields(RunConfig) if one.name in _OPTIONS_OF_A_MACHINE}
    own: dict[str, Any] = {
        **usual,
        "task": task.task,
        "data": None if task.data is None else Path(task.data),
        "output": Path(task.folder),
        "resume": task.resumes,
        "workers": min(config.workers, _WORKERS_OF_A_CORE * usable_cores()),
    }
    return msgspec.structs.replace(config, **own)


def _address(place: RankPlace, towards: str) -> str:
    """Return the address of this machine for the other ranks, and make Gloo listen there."""
    address = own_address(towards) if towards else "127.0.0.1"
    if address.startswith("127.") and any(not node.host.startswith("127.") for node in place.nodes):
        address = own_address()
    names = [one.name for one in interfaces() if address in one.addresses]
    if names:
        os.environ["GLOO_SOCKET_IFNAME"] = names[0]
    return address
