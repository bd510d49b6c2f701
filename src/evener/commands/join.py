"""`evener join`: a node as a process. This module imports PyTorch inside of functions alone, and nothing of a master.

this process, main thread    `ps.node.node.Node`: messages, measuring, and the computing of an agreement (`engines`)
    threads, always          heartbeats; requests to leave (`ps.node.departure`)
    threads, at times        loading PyTorch's optimizers; the end of standard input; what the doctor asks; messages of
                             a run whose exchanges overlap with work or whose data come early, and of a rank; pieces of
                             data, from and for other nodes; watching an accelerator, whose loss ends this process
                             (`system.device_watch`)
child                        from the first rank on, the server that forks ranks, and Python's resource tracker
    its child                one rank: `node_rank.run_node_rank`, called by `_run_rank` below
        its children         workers of data loaders
child, for a moment          measures NumPy, if there is no PyTorch or with `--thin` (`benchmark.numpy_device`), unless
                             there is a profile of the last day

With `--sandbox` all of these run inside bwrap, started by a process that only waits (`sandbox`).

Other things of this name: `evener.join()` of a user's program (`frontends.programs.entry`), the admission of a node by
a master (`ps.master.joining`), and the connecting of ranks (`comm.joining`).
"""

from __future__ import annotations

import getpass
import hashlib
import importlib.util
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO

from msgspec.structs import replace

from evener.benchmark.numpy_device import profile_numpy_apart
from evener.benchmark.processor_time import ProcessorWatch, busy_sentence, quota_sentence, taken_by_others
from evener.commands.discovery import ask_on_terminal, choose_master
from evener.commands.engines import build_engine, build_thin_engine
from evener.commands.node_look import look_here, reachable_host
from evener.commands.sandbox import FOLDER as SANDBOX
from evener.commands.sandbox import join_confined
from evener.commands.terminal import print_notice, warn_of_readers
from evener.config.options import JoinConfig, LeaveConfig
from evener.doctor.facts import is_loopback
from evener.launch.nodes import device_speeds
from evener.launch.parent import Parent
from evener.ps.node.acceptance import Acceptance
from evener.ps.node.blob_fetcher import Serve
from evener.ps.node.departure import ask_to_leave, leave_request, running_nodes
from evener.ps.node.node import Node
from evener.ps.node.node_part import NodeConfig
from evener.ps.node.piece_exchange import PieceServer
from evener.ps.node.rank_child import RankHost, RankTask
from evener.ps.node.reconnecting_client import Dial
from evener.ps.protocol.config import default_cache, node_cache, versions_here
from evener.ps.protocol.directions import ToNode
from evener.ps.protocol.messages import Header
from evener.records.atomic import atomic_write
from evener.records.bounded_file import read_bounded
from evener.records.errors import InvalidFile, InvalidInput, InvalidValue, MissingFile, require_one_of
from evener.records.profile import ClusterProfile, DeviceProfile
from evener.records.schema import read_noun, write_noun
from evener.system.cores import keep_to_quota
from evener.system.file_lock import lock_file
from evener.system.host import has_posix, own_address, version_of
from evener.system.sign_of_life import sign_of_life
from evener.system.signals import interrupt_on_stop_signals
from evener.wire.connect import JOIN_SECONDS, open_connection
from evener.wire.connection import Connection
from evener.wire.errors import CannotJoin
from evener.wire.identity import Address, Token, with_port
from evener.wire.limits import Limits

TOKEN_VARIABLE = "EVENER_TOKEN"
"""Environment variable with a token: unlike an option, `ps` does not show it to other users."""
MEASURE_SECONDS = 2.0
KNOWN_SECONDS = 24 * 3600.0
"""Lifetime of a device's profile: a restarted node need not measure again."""
_MAX_TOKEN_FILE_BYTES = 2**20
_PAUSE_SECONDS = 0.1


def join(config: JoinConfig, environment: Mapping[str, str] = os.environ) -> None:
    """`evener join`: be a node of a master until the master dismisses it, Ctrl-C or SIGTERM."""
    text = sys.stdin.readline() if config.token_stdin else given_token(config.token, config.token_file, environment)
    if config.address is None:
        token = None if text is None else Token.parse(text)
        config = replace(config, address=choose_master(token, ask_on_terminal(), print_notice))
    if text is None and sys.stdin.isatty():
        text = getpass.getpass("token of the master, as `evener up` shows it: ")
    if text is None:
        raise InvalidInput(f"the master's token is missing: give --token-file FILE or ${TOKEN_VARIABLE}")
    config = replace(config, address=with_port(str(config.address)))
    masters, token = [Address.parse(one) for one in str(config.address).split(",")], Token.parse(text)
    check_security(token, config.insecure)
    cache, thin = config.cache or default_cache(environment), config.thin
    keep_to_quota()
    if config.sandbox:
        with interrupt_on_stop_signals(), ends_with_stdin() if config.token_stdin else nullcontext():
            raise SystemExit(join_confined(config, text.strip(), TOKEN_VARIABLE, cache, environment))
    leash = ends_with_stdin() if config.token_stdin else nullcontext()
    # Connect first, so that a failure shows at once.
    with interrupt_on_stop_signals(), leash, connector(masters, token) as dial:
        with sign_of_life(print_notice, "starting: loading what is needed"):
            device = "cpu" if thin else choose_device(config.device)
            speed = config.speed * device_speeds([device])[0]
        starts_ranks = has_posix() and bool(version_of("torch"))
        default = socket.gethostname() + (f"-{device.replace(':', '')}" if config.device else "")
        with own_name(config.name, default, cache) as name, node_cache(cache), leave_request(cache, name) as request:
            node = NodeConfig(
                name=name,
                device=device,
                speed=speed,
                data=config.data.resolve() if config.data else None,
                cache=cache,
                versions=versions_here(),
                measure=lambda: _then_load(known_profile(name, device, speed, thin=thin, cache=cache)),
                build=build_thin_engine if thin else build_engine,
                key=own_key(cache),
                is_named=config.name is not None,
                accepts=Acceptance(
                    built_in_only=config.built_in_only,
                    submitters=None if config.submitters is None else frozenset(config.submitters.split(",")),
                ),
                look=partial(look_here, config),
                host=RankHost(_run_rank, speed, masters[0].host) if starts_ranks and not thin else None,
                grace=config.grace,
                leave_request=request,
                serve=_server_of_pieces(config, token),
            )
            Node(node, dial, print_notice).serve()


def leave(config: LeaveConfig, environment: Mapping[str, str] = os.environ) -> None:
    """`evener leave`: ask nodes of this machine to leave, and wait until they have.

    Raises:
        InvalidInput: no such node runs.
    """
    cache = config.cache or default_cache(environment)
    running = [(cache, name) for cache in (cache, cache / SANDBOX) for name in running_nodes(cache)]
    leaving = [(cache, name) for cache, name in running if config.name in (None, name)]
    if not leaving:
        what = "no node runs" if config.name is None else f"no node {config.name} runs"
        others = f"; those that run are {', '.join(name for _, name in running)}" if running else ""
        raise InvalidInput(f"{what} on this machine with the cache {cache}{others}")
    for one, name in leaving:
        ask_to_leave(one, name)
    with sign_of_life(print_notice, "waiting until the nodes have finished their work"):
        for one, name in leaving:
            while name in running_nodes(one):
                time.sleep(_PAUSE_SECONDS)
            print_notice(f"node {name} has left")


def _server_of_pieces(config: JoinConfig, token: Token) -> Serve | None:
    """Return how this node serves pieces of data to others; None if it does not, or no other machine is there."""
    if not config.listen or Address.parse(str(config.address).partition(",")[0]).path:
        return None
    host = reachable_host(str(config.address))
    address = own_address(host) if host else own_address()
    if host and is_loopback(address):  # without IPv4, or behind a forwarded port
        return None
    return partial(PieceServer, address, is_insecure=token.insecure)


def _run_rank(parent: Parent, task: RankTask) -> None:
    """Run a rank in its process, which a fork server with PyTorch has made.

    The node itself loads PyTorch only for its device, for an agreement, or if the doctor asks about a task.
    """
    from evener.commands.node_rank import run_node_rank

    run_node_rank(parent, task)


@contextmanager
def ends_with_stdin() -> Iterator[None]:
    """End this process as by SIGTERM when the writer of its stdin closes it or ends."""
    is_over = threading.Event()

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass  # ignore further input
        if not is_over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="evener-stdin", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


@contextmanager
def own_name(name: str | None, default: str, folder: Path | None = None) -> Iterator[str]:
    """Reserve the name of a node during the block.

    A master knows nodes by their names, and a node that joins with the name of another takes its place. With `name`,
    the user requests that. A node without one is called `default`, or `default-2` and so on if another process of this
    machine has that name. The system frees a name when its process dies, so a restarted node keeps it.

    Args:
        name: that the user chose, if any.
        default: used without `name`.
        folder: of the locks; the default is the system's folder for temporary files.
    """
    if name is not None:
        yield name
        return
    place = folder or Path(tempfile.gettempdir())
    place.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        candidate = default if number == 1 else f"{default}-{number}"
        lock = _lock(place / f"evener-node-{candidate}.lock")
        if lock is not None:
            with lock:
                yield candidate
            return


def _lock(file: Path) -> IO[str] | None:
    """Return the open file, locked until it is closed; None if another process holds it."""
    try:
        return lock_file(file)
    except PermissionError:
        return None


def own_key(cache: Path) -> str:
    """Return this machine's key for masters: random, created when it first joins, readable only by this user."""
    file = cache / "key"
    if not file.exists():
        draft = cache / f"key-{secrets.token_hex(8)}"
        atomic_write(draft, secrets.token_hex(32).encode(), private=True)
        with suppress(FileExistsError):  # another node of this machine was faster
            os.link(draft, file)
        draft.unlink()
    warn_of_readers(file)
    key = file.read_text(encoding="ascii", errors="replace").strip()
    if re.fullmatch("[0-9a-f]{64}", key) is None:
        raise InvalidFile(f"{file} is not the key of a node: remove it for a new one")
    return key


def choose_device(device: str | None) -> str:
    """Return the device that the user named, or the best one of this machine.

    Raises:
        InvalidValue: there is no such device.
    """
    if device == "cpu":
        return "cpu"
    if importlib.util.find_spec("torch") is None:
        if device is None:
            return "cpu"
        raise InvalidValue("--device", device, "cpu, for PyTorch is not installed")
    from evener.system import accelerators

    known = ["cpu", *accelerators.names()]
    if device is None:
        return known[1] if len(known) > 1 else "cpu"
    require_one_of("--device", device, known)
    return device


def known_profile(
    name: str,
    device: str,
    speed: float,
    *,
    thin: bool,
    cache: Path,
    measure: Callable[[str, float, float], DeviceProfile] | None = None,
    clock: Callable[[], float] = time.time,
) -> DeviceProfile:
    """Return the profile of a node's device, which is measured when it first joins and kept for a day.

    Args:
        name: of the node.
        device: that computes.
        speed: 1, or the fraction to which the node is slowed down.
        thin: whether NumPy computes even if PyTorch is installed.
        cache: folder of the profile.
        measure: takes name, speed and seconds; the default measures NumPy or PyTorch.
        clock: seconds since 1970.
    """
    is_thin = thin or importlib.util.find_spec("torch") is None
    key = hashlib.sha256(repr((name, device, speed, is_thin, tuple(versions_here()))).encode()).hexdigest()[:16]
    file = cache / "profiles" / f"{key}.json"
    try:
        if 0 <= clock() - file.stat().st_mtime < KNOWN_SECONDS:
            return read_noun(file, ClusterProfile).devices[0]
    except (OSError, InvalidInput):
        pass  # no file, or not one of this version: measure
    if measure is None and is_thin:
        profile, spent = profile_numpy_apart(name, speed, MEASURE_SECONDS)
    else:
        measure, watch = measure or partial(_profile_torch, device), ProcessorWatch(name)
        profile, spent = measure(name, speed, MEASURE_SECONDS), watch.stop()
    if sentence := quota_sentence([spent]):
        print_notice(f"CPU quota: {sentence}")
    if sentence := busy_sentence(taken_by_others([spent])):
        print_notice(f"busy machine: {sentence}")
    write_noun(ClusterProfile(devices=(profile,)), file)
    return profile


@contextmanager
def connector(addresses: Sequence[Address], token: Token) -> Iterator[Dial]:
    """Yield a function that connects to a master; the first connection is open already, and closed after the block.

    Args:
        addresses: possible ones; names are resolved at every attempt.
        token: of the master.

    Raises:
        CannotJoin: the master cannot be reached; says where, why and what to do.
    """

    def dial(seconds: float, patience: float) -> Connection[Header]:
        failures: list[CannotJoin] = []
        for address in addresses:
            try:
                return open_connection(
                    address, token, ToNode, Limits(patience=patience), seconds=seconds / len(addresses)
                )
            except CannotJoin as error:
                failures.append(error)
        raise next((one for one in failures if not one.lasting), failures[0])

    with dial(JOIN_SECONDS, Limits().patience) as first:
        standing = [first]
        yield lambda seconds, patience: standing.pop() if standing else dial(seconds, patience)


def _then_load(profile: DeviceProfile) -> DeviceProfile:
    """Load what the first run will need, in a thread; return the profile, during whose measurement nothing is loaded.

    Optimizers import `torch._dynamo`, which takes one to two seconds.
    """
    if "torch" in sys.modules:
        threading.Thread(
            target=importlib.import_module, args=("torch._dynamo",), name="evener-load", daemon=True
        ).start()
    return profile


def _profile_torch(device: str, name: str, speed: float, seconds: float) -> DeviceProfile:
    import torch

    from evener.benchmark.device import profile_device

    return profile_device(name, torch.device(device), speed=speed, seconds=seconds)


def given_token(token: str | None, token_file: Path | None, environment: Mapping[str, str]) -> str | None:
    """Return the user's token from the option, the file or $EVENER_TOKEN, in this order; None without one.

    Raises:
        MissingFile: the file cannot be read.
        InvalidFile: it is far too large.
    """
    if token_file is None:
        return token or environment.get(TOKEN_VARIABLE) or None
    warn_of_readers(token_file)
    try:
        return read_bounded(token_file, _MAX_TOKEN_FILE_BYTES).decode(errors="replace")
    except OSError as error:
        raise MissingFile(f"cannot read --token-file {token_file}: {error.strerror}") from error


def check_security(token: Token, insecure: bool) -> None:
    """Raise InvalidInput if `--insecure` and the token disagree."""
    if insecure and not token.insecure:
        raise InvalidInput("--insecure: this token is of a master that encrypts; leave --insecure out")
    if token.insecure and not insecure:
        raise InvalidInput("this token is of a master without encryption: add --insecure if that is what you want")
