"""The check before ranks of several machines join: whether the machines reach each other and fit together.

The first rank of every machine performs the check, over the store that all of them have reached:

    every machine                              the store
        listen; publish addresses and ports -> hello
        read the others' ports             <-
        connect to each of them, both ways: receive its clock and 64 KB, which need large packets
        publish facts and failures          -> facts
    every rank reads the facts of all, and draws the same conclusion
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from evener.comm.signed_store import SignedStore
from evener.comm.staged_gloo import BACKEND
from evener.doctor.finding import Finding, faults
from evener.doctor.interface_checks import listening_addresses
from evener.doctor.network import network_facts
from evener.doctor.peers import PeerFacts, Unreached, check_peers
from evener.doctor.probe import Listeners, probe
from evener.launch.rank_environment import RankEnvironment
from evener.records.errors import EvenerError, InvalidInput, NodeLost
from evener.records.schema import Part
from evener.records.version import VERSION
from evener.system.host import version_of

_CONNECT_SECONDS = 4.0
T = TypeVar("T")
_WAIT_SECONDS = 30.0


class _Hello(Part, frozen=True, kw_only=True):
    """The first message of a machine.

    Attributes:
        machine: name of the machine.
        places: addresses and ports at which it listens.
    """

    machine: str
    places: tuple[tuple[str, int], ...]


def require_fit(env: RankEnvironment, *, is_wanted: bool) -> list[Finding]:
    """Check that the machines of all ranks fit together, if there are several; every rank calls this.

    Args:
        env: of this rank.
        is_wanted: whether to check; the value of the first rank counts.

    Returns:
        Warnings, the same on every rank.

    Raises:
        NodeLost: a machine cannot be reached, or does not respond.
        InvalidInput: another problem, with machine and advice.
    """
    heads = first_ranks([node.host for node in env.nodes])
    if len(heads) < 2 or env.store is None or (env.control is not None and env.control.is_late):
        return []
    store = env.store.under("preflight")
    if env.rank == 0:
        store.set("wanted", msgspec.json.encode(is_wanted))
    if not _awaited(store, "wanted", "the first machine", bool):
        return []
    if env.rank in heads:
        _look(env, store, heads)
    findings = faults(check_peers([_facts_of(env, store, head) for head in heads]))
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise _error_of(errors)
    return findings


def first_ranks(hosts: Sequence[str]) -> list[int]:
    """Return the first rank on every machine, in order."""
    return sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())


def own_facts(env: RankEnvironment) -> PeerFacts:
    """Return this machine's facts."""
    return PeerFacts(
        machine=env.node.host,
        evener=VERSION,
        python=platform.python_version(),
        torch=version_of("torch"),
        ahead=0.0,
        network=replace(network_facts(os.environ, platform.node()), route_address=env.address),
        uses_gloo=env.backend in ("gloo", BACKEND),
    )


def _look(env: RankEnvironment, store: SignedStore, heads: Sequence[int]) -> None:
    """Publish this machine's facts and the machines that it reaches."""
    facts = own_facts(env)
    network = replace(facts.network, route_address=env.address)
    with Listeners(listening_addresses(network, uses_gloo=facts.uses_gloo)) as listeners:
        hello = _Hello(machine=facts.machine, places=listeners.places)
        store.set(f"hello/{env.rank}", msgspec.json.encode(hello))
        greetings = {head: _hello_of(env, store, head) for head in heads if head != env.rank}
        ahead, unreached = _connect(env.rank, greetings)
        facts = replace(facts, ahead=ahead, unreached=unreached)
        store.set(f"facts/{env.rank}", msgspec.json.encode(facts))
        for head in heads:
            _facts_of(env, store, head)  # others may connect until then


def _connect(rank: int, greetings: dict[int, _Hello]) -> tuple[float, tuple[Unreached, ...]]:
    """Return the seconds by which this clock is ahead of the first machine's, and the unreachable places."""
    places = [(head, hello.machine, *place) for head, hello in greetings.items() for place in hello.places]
    until = time.monotonic() + _CONNECT_SECONDS
    with ThreadPoolExecutor(max_workers=min(64, len(places)), thread_name_prefix="evener-preflight") as pool:
        results = list(pool.map(lambda place: probe(place[2], place[3], until), places))
    failed = [
        Unreached(machine=machine, address=address, port=port, reason=result)
        for (_, machine, address, port), result in zip(places, results, strict=True)
        if isinstance(result, str)
    ]
    first = min([rank, *greetings])
    theirs = [result for (head, *_), result in zip(places, results, strict=True) if head == first]
    ahead = next((-result for result in theirs if isinstance(result, float)), 0.0)
    return ahead, tuple(failed)


def _hello_of(env: RankEnvironment, store: SignedStore, head: int) -> _Hello:
    return _awaited(store, f"hello/{head}", env.nodes[head].host, _Hello)


def _facts_of(env: RankEnvironment, store: SignedStore, head: int) -> PeerFacts:
    return _awaited(store, f"facts/{head}", env.nodes[head].host, PeerFacts)


def _awaited(store: SignedStore, key: str, machine: str, kind: type[T]) -> T:
    """Return a value, once it exists. Raises NodeLost after a timeout, or if it is no `kind`."""
    try:
        store.wait([key], timedelta(seconds=_WAIT_SECONDS))
    except RuntimeError as error:
        raise NodeLost(
            f"{machine} said nothing for {_WAIT_SECONDS:g} s before the run: is it another version of Evener?"
        ) from error
    return store.get_as(key, kind)


def _error_of(errors: Sequence[Finding]) -> EvenerError:
    """Combine all errors into one; an unreachable machine counts as lost."""
    sentences = "; ".join(dict.fromkeys(error.words for error in errors))
    is_lost = any(error.what == "port" for error in errors)
    return (NodeLost if is_lost else InvalidInput)(f"{sentences} (--no-preflight: start without this check)")
