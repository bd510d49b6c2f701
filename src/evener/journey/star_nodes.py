"""`evener up`, `join`, `nodes` and `down`: a master and its nodes as processes. Needs no PyTorch."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

import psutil
from rich.console import Console
from rich.table import Table

from evener import __version__
from evener.errors import InvalidInput, InvalidValue, require
from evener.journey.star_engines import build, build_thin
from evener.profile import DeviceProfile
from evener.report import human_bytes
from evener.report.grid import grid
from evener.star.control import Control, find_master
from evener.star.home import Beacon, Home, default_cache
from evener.star.master import Master, Setting
from evener.star.messages import Letter, ToNode
from evener.star.node import Abilities, Node
from evener.star.reception import Versions
from evener.star.situation import NodeState, Situation
from evener.star.strength import measure_strength
from evener.wire import Address, Connection, Limits, Token, connect

DEFAULT_PORT = 7117
_MEASURE_SECONDS = 2.0
_WIDTH_IN_FILES = 160
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
    token: str,
    name: str | None,
    device: str | None,
    data: Path | None,
    speed: float,
    cache: Path | None,
    insecure: bool,
    thin: bool,
    environment: Mapping[str, str],
) -> None:
    """`evener join`: be a node of a master until it says goodbye, Ctrl-C or SIGTERM."""
    where, secret = Address.parse(address), Token.parse(token)
    check_security(secret, insecure)
    require(0 < speed <= 1, "--speed", speed, "above 0 and at most 1")
    require(data is None or data.is_dir(), "--data", str(data), "a folder that is there")
    require(not thin or device in (None, "cpu"), "--device", device, "cpu with --thin")
    chosen = "cpu" if thin else _choose_device(device)
    own_name = name or socket.gethostname() + (f"-{chosen.replace(':', '')}" if device else "")
    abilities = Abilities(
        name=own_name,
        device=chosen,
        speed=speed,
        data=data.resolve() if data else None,
        cache=cache or default_cache(environment),
        versions=versions(),
        measure=partial(measure_strength, own_name, speed) if thin else partial(_measure, own_name, chosen, speed),
        build=build_thin if thin else build,
    )
    with sigterm_is_ctrl_c():
        serve(abilities, where, secret, say)


def serve(abilities: Abilities, address: Address, token: Token, say: Callable[[str], None]) -> None:
    """Be a node.

    Raises:
        CannotJoin: the master cannot be reached; says where, why and what to do.
        NodeLost: the master refuses the node.
    """

    def dial(seconds: float, patience: float) -> Connection[Letter]:
        return connect(address, token, ToNode, Limits(patience=patience), seconds=seconds)

    Node(abilities, dial, say).serve()


def nodes(*, home: Path, master: str | None, token: str | None, as_json: bool) -> None:
    """`evener nodes`: who is here, and what goes on."""
    with Control(*find_master(Home(home), master, token)) as control:
        situation = control.ask()
    if as_json:
        import msgspec

        sys.stdout.write(msgspec.json.encode(situation).decode() + "\n")
        return
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_IN_FILES
    console.print(situation_table(situation))
    if situation.run is not None:
        console.print(_run_line(situation))


def down(*, home: Path, master: str | None, token: str | None) -> None:
    """`evener down`: end the run, the nodes and the master."""
    with Control(*find_master(Home(home), master, token)) as control:
        control.down()
    sys.stdout.write("the master and its nodes have ended\n")


def situation_table(situation: Situation) -> Table:
    """All nodes."""
    heads = ("node", "address", "device", ">GFLOP/s", "does", ">samples/s", ">sent", ">received", "state")
    return grid(f"Nodes of the master at {situation.address}", heads, [_row(node) for node in situation.nodes])


def _row(node: NodeState) -> tuple[str, ...]:
    return (
        node.name,
        node.address,
        node.device,
        "" if node.score is None else f"{node.score:,.0f}",
        node.doing,
        f"{node.samples_per_second:,.0f}" if node.samples_per_second else "",
        human_bytes(node.bytes_sent),
        human_bytes(node.bytes_received),
        state_words(node),
    )


def state_words(node: NodeState) -> str:
    """The state of a node, with what is left of it and why: `benched for 12 s: ...`."""
    seconds = "" if node.seconds is None else f" for {node.seconds:.0f} s"
    return node.state if node.state == "present" else f"{node.state}{seconds}: {node.reason}"


def _run_line(situation: Situation) -> str:
    run = situation.run
    assert run is not None
    accuracy = "" if run.accuracy is None else f", accuracy {run.accuracy:.2%}"
    epochs = f" of {run.epochs}" if run.epochs else ""
    return (
        f"run {run.run} ({run.protocol}): epoch {run.epoch + 1}{epochs}, {run.version} updates, loss {run.loss:.4f}"
        f"{accuracy}; results will be in {run.folder}"
    )


def check_security(token: Token, insecure: bool) -> None:
    """Refuse what the user and the token disagree about. Raises InvalidInput."""
    if insecure and not token.insecure:
        raise InvalidInput("--insecure: this token is of a master that encrypts; leave --insecure out")
    if token.insecure and not insecure:
        raise InvalidInput("this token is of a master without encryption: add --insecure if that is what you want")


def versions() -> Versions:
    """What runs here; PyTorch is not imported."""
    return Versions(__version__, platform.python_version(), _version("torch"))


def facts() -> dict[str, str]:
    """Versions and host, for records."""
    here = versions()
    return {
        "evener": here.evener,
        "python": here.python,
        "torch": here.torch or "not installed",
        "os": platform.platform(),
        "host": socket.gethostname(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def reachable_address(bound: Address) -> Address:
    """The address under which other machines find what listens at `bound`."""
    if bound.path or bound.host not in ("", "0.0.0.0", "::"):
        return bound
    return Address(_own_address(), bound.port)


def _own_address() -> str:
    """The address with which this machine speaks to others; the loopback's if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing: asks the system for the way to anywhere
            return str(sock.getsockname()[0])
        except OSError:
            pass
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    return _LOOPBACK[0]


def _last_beacon(home: Home) -> Beacon | None:
    """How the last master of this home was reached; None if there was none."""
    try:
        return home.beacon()
    except InvalidInput:
        return None


def _choose_device(device: str | None) -> str:
    """The device that the user named, or the best that is here."""
    if device in (None, "cpu") and importlib.util.find_spec("torch") is None:
        return "cpu"
    if device == "cpu":
        return "cpu"
    if importlib.util.find_spec("torch") is None:
        raise InvalidValue("--device", device, "cpu, for PyTorch is not installed")
    import torch

    known = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if device is None:
        return known[1] if len(known) > 1 else "cpu"
    require(device in known, "--device", device, f"one of {', '.join(known)}")
    return device


def _measure(name: str, device: str, speed: float) -> DeviceProfile:
    """The profile of this node's device."""
    if importlib.util.find_spec("torch") is None:
        return measure_strength(name, speed, _MEASURE_SECONDS)
    import torch

    from evener.benchmark import profile_device

    return profile_device(name, torch.device(device), speed=speed, seconds=_MEASURE_SECONDS)


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
