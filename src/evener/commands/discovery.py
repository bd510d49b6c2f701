"""Masters in the local network, by multicast DNS (python-zeroconf): no address to type.

    evener up --announce     says name, address and fingerprint of its certificate to the local network
    evener join              finds masters, and joins the one that its token belongs to, or that its user chooses

Anyone in the network can announce anything, so a fingerprint is only a proposal. A node trusts the fingerprint in its
token, which it has from the master's user.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple

import psutil

from evener.records.errors import InvalidInput, MissingExtra, NodeLost
from evener.records.schema import shown
from evener.records.version import pip_install
from evener.wire.identity import FINGERPRINT_BYTES, Address, Token

SERVICE = "_evener._tcp.local."
FIND_SECONDS = 5.0
"""Three questions, as python-zeroconf repeats them: one or two of them may be lost in a wireless network."""
_SETTLE_SECONDS = 0.5
"""Time for further masters after the first one."""
_MAX_FOUND, _MAX_LOOKUPS = 32, 256
_FINGERPRINT = "fingerprint"
SHOWN_DIGITS = 16


class FoundMaster(NamedTuple):
    """A master that was announced.

    Attributes:
        name: that it gives itself, printable.
        addresses: HOST:PORT of its network interfaces.
        fingerprint: SHA-256 of its certificate, as it claims.
    """

    name: str
    addresses: tuple[str, ...]
    fingerprint: bytes

    @property
    def description(self) -> str:
        """A line for the user."""
        digits = self.fingerprint.hex()[:SHOWN_DIGITS]
        return f"{self.name} at {self.addresses[0]}, fingerprint {digits}"


@contextmanager
def announced(bound: Address, fingerprint: bytes | None) -> Iterator[None]:
    """Announce a master during the block.

    Args:
        bound: address at which it listens.
        fingerprint: of its certificate; None without one.

    Raises:
        InvalidInput: it listens at no port, or does not encrypt.
        MissingExtra: zeroconf is not installed.
    """
    if bound.path or fingerprint is None:
        what = "a Unix socket" if bound.path else "a master without encryption"
        raise InvalidInput(f"--announce: {what} cannot be announced")
    zeroconf = _zeroconf()
    host = socket.gethostname().partition(".")[0]
    addresses = _own_addresses() if bound.is_everywhere else [bound.host]
    info = zeroconf.ServiceInfo(
        SERVICE,
        f"{host}-{fingerprint.hex()[:8]}.{SERVICE}",
        port=bound.port,
        parsed_addresses=addresses,
        properties={_FINGERPRINT: fingerprint.hex()},
        server=f"{host}.local.",
    )
    with zeroconf.Zeroconf(interfaces=_interfaces()) as service:
        service.register_service(info, allow_name_change=True)
        yield


def find_masters(is_wanted: Callable[[FoundMaster], bool] = lambda _: True) -> list[FoundMaster]:
    """Return the masters that are announced in the local network, by name.

    It looks for FIND_SECONDS, or until a moment after the first one that is wanted.

    Args:
        is_wanted: whether a master is one to look for; the others are not returned.

    Raises:
        MissingExtra: zeroconf is not installed.
    """
    zeroconf = _zeroconf()
    changed, found, lookups = threading.Condition(), dict[str, FoundMaster](), count()

    def look_up(service: Any, name: str) -> None:
        with suppress(zeroconf.Error, OSError):  # it was closed
            info = service.get_service_info(SERVICE, name, int(FIND_SECONDS * 1000))
            master = None if info is None else _found(name, info)
            with changed:
                if master is not None and is_wanted(master) and len(found) < _MAX_FOUND:
                    found[name] = master
                    changed.notify()

    def on_change(zeroconf: Any, name: str, state_change: Any, **_: Any) -> None:
        if state_change.name == "Added" and next(lookups) < _MAX_LOOKUPS:
            threading.Thread(target=look_up, args=(zeroconf, name), daemon=True).start()  # some never answer

    with zeroconf.Zeroconf(interfaces=_interfaces()) as service:
        browser = zeroconf.ServiceBrowser(service, SERVICE, handlers=[on_change])
        with changed:
            if changed.wait_for(lambda: found, FIND_SECONDS):
                changed.wait(_SETTLE_SECONDS)
            masters = sorted(found.values())
        browser.cancel()
    return masters


def choose_master(token: Token | None, ask: Callable[[str], str] | None, say: Callable[[str], None]) -> str:
    """Return the addresses of a master in the local network, separated by commas.

    Args:
        token: of the master, if the user gave it: then nothing is asked.
        ask: shows a question and returns the answer; None without a terminal.
        say: shows a message to the user.

    Raises:
        NodeLost: there is no such master.
        InvalidInput: it cannot be asked which one is meant.
    """
    if token is not None:
        of_token = find_masters(is_wanted=lambda one: one.fingerprint == token.fingerprint)
        if not of_token:
            raise NodeLost(_NONE.format("no master that this token belongs to"))
        return ",".join(sorted({address for one in of_token for address in one.addresses}))  # strangers among them fail
    masters = find_masters()
    if not masters:
        raise NodeLost(_NONE.format("no master"))
    if ask is None:
        names = "; ".join(one.description for one in masters)
        raise InvalidInput(f"name the address of the master, or give its token: these are announced: {names}")
    for number, one in enumerate(masters, 1):
        say(f"{number}: {one.description}")
    answer = ask("number of the master to join (compare the fingerprint with the one that `evener up` shows): ").strip()
    if not answer.isdecimal() or not 1 <= int(answer) <= len(masters):
        raise InvalidInput(f"there is no master {shown(answer)!r}: nothing is joined")
    return ",".join(masters[int(answer) - 1].addresses)


_NONE = (
    "{} is announced in this network: name its address, as in `evener join HOST:PORT`, or type `evener up --announce`"
)


def _found(name: str, info: Any) -> FoundMaster | None:
    """Return the announced master; None if the announcement is not valid."""
    text = (info.properties.get(_FINGERPRINT.encode()) or b"").decode(errors="replace")
    addresses = info.parsed_addresses()
    try:
        fingerprint = bytes.fromhex(text)
        reachable = tuple(str(Address(host, info.port)) for host in addresses[:4])
    except (ValueError, InvalidInput):
        return None
    if len(fingerprint) != FINGERPRINT_BYTES or not reachable:
        return None
    return FoundMaster(shown(name.removesuffix(f".{SERVICE}")), reachable, fingerprint)


def _own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine's network interfaces, apart from its own."""
    interfaces = psutil.net_if_addrs().values()
    every = [one.address for addresses in interfaces for one in addresses if one.family == socket.AF_INET]
    return [one for one in every if not one.startswith("127.")] or every


def _interfaces() -> Any:
    """Return the network interfaces to use: all of this machine."""
    return _zeroconf().InterfaceChoice.All


def _zeroconf() -> Any:
    try:
        import zeroconf
    except ImportError as error:
        raise MissingExtra(f"zeroconf, which finds masters, is not installed: {pip_install('discovery')}") from error
    return zeroconf


def ask_on_terminal() -> Callable[[str], str] | None:
    """Return how to ask the user of this terminal; None without one."""
    return input if sys.stdin.isatty() else None
