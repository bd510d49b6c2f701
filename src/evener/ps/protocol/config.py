"""Configuration of a master: its state folder, which makes it the same master after a restart, its identity, and a
clock; and what nodes have, too: versions and cache folders.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from evener.ps.protocol.system import System
from evener.records.atomic import atomic_write, remove_drafts
from evener.records.decoding import decode_json
from evener.records.errors import CannotWrite, InvalidFile, InvalidInput, MissingFile
from evener.records.schema import MAX_RUN_NAME_LENGTH, NOT_DECODED, Part
from evener.records.version import VERSION
from evener.system.file_lock import lock_file, shared_folder
from evener.system.host import own_address, version_of
from evener.wire.connect import JOIN_SECONDS, MAX_PAUSE_SECONDS
from evener.wire.identity import ROLES, Address, Identity, make_identity

_IDENTITY = {False: "identity.json", True: "identity-insecure.json"}
_BEACON = "master.json"
_LOCK = "lock"
RANKS = "ranks"
"""Folder of the ranks' folders in the cache of a node."""


class Beacon(Part, frozen=True, kw_only=True):
    """How to reach a master, written where commands on its machine look for it.

    Attributes:
        address: address that nodes join.
        listen: address that the master listens at.
        token: token to join with.
        pid: process of the master; 0 after it has ended.
        patience: seconds.
        system: file that describes the only nodes that may join; empty if there is none.
        relay: address of the relay by which nodes also join; empty if there is none.
        relay_key: of the relay.
        announce: whether the master announces itself to the local network.
    """

    address: str
    listen: str
    token: str
    pid: int
    patience: float
    system: str = ""
    relay: str = ""
    relay_key: str = ""
    announce: bool = False


class StateDir:
    """The state folder of a master, readable for its user only.

    Args:
        folder: path of the folder; it is made when something is first written.

    Attributes:
        folder: see above.
        run: folder of the runs in progress.
        runs: folder of the results of runs.
        blobs: folder of code and data that were submitted.
        aside: folder of runs that could not be continued, or whose results could not be written.
        profile: file of all nodes' ClusterProfile.
        audit: file of the audit log.
        refusals: file of the connections that were turned away before they had proved a token.
        members: file of the nodes' names, and of expelled nodes.
        invitations: file of the invitations, without their tokens.
        tokens: folder of the tokens, one file for each role.
        beacon_file: file that says how to reach the master, with the admin's token.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.runs = folder / "runs"
        self.aside = folder / "aside"
        self.blobs = folder / "blobs"
        self.profile = folder / "cluster.json"
        self.audit = folder / "audit.jsonl"
        self.refusals = folder / "refusals.jsonl"
        self.members = folder / "members.json"
        self.invitations = folder / "invitations.json"
        self.tokens = folder / "tokens"
        self.beacon_file = folder / _BEACON

    def free_name(self, wanted: str) -> str:
        """Return the name of a new run: the wanted one, with a number appended if there are results of that name.

        The wanted name is shortened where the number would make it too long for a `RunName`.
        """
        suffixes = ("" if number == 1 else f"-{number}" for number in count(1))
        names = (f"{wanted[: MAX_RUN_NAME_LENGTH - len(suffix)]}{suffix}" for suffix in suffixes)
        return next(name for name in names if not (self.runs / name).exists())

    def set_aside(self, files: Sequence[Path]) -> str:
        """Move files of a run to a folder of their own; return a clause that says where."""
        if not files:
            return "no files of it exist"
        place = self.aside / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns()}"
        try:
            place.mkdir(parents=True, mode=0o700)
            for path in files:
                path.replace(place / path.name)
        except OSError as error:
            return f"its files cannot be moved ({error.strerror}) and stay in {self.folder}"
        return f"its files were moved to {place}"

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Keep other masters out of this folder inside; the system releases the lock when the process dies.

        Raises:
            InvalidInput: another master runs here, or the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = lock_file(self.folder / _LOCK)
        except OSError as error:
            raise InvalidInput(f"cannot write into {self.folder}: {error.strerror}") from error
        if lock is None:
            raise InvalidInput(f"a master already runs in {self.folder}; end it with `evener down`")
        with lock:
            self._remove_drafts()
            yield

    def _remove_drafts(self) -> None:
        """Remove the drafts of masters that were killed while they wrote."""
        for folder in (self.folder, self.run, self.tokens, *self.runs.glob("*")):
            remove_drafts(folder)
        _remove_all(self.blobs.glob(".*"))

    def identity_file(self, *, insecure: bool) -> Path:
        """Return the path of the master's certificate and secret."""
        return self.folder / _IDENTITY[insecure]

    def identity(self, *, insecure: bool, rotate: bool = False) -> Identity:
        """Return the master's identity; make it if there is none.

        With `rotate`, its secret changes, and that of the identity with or without encryption that is not used now.
        The token of each role is written to a file of its own, for this user only.
        """
        path = self.identity_file(insecure=insecure)
        if not path.exists():
            make_identity(insecure=insecure).save(path)
        if rotate:
            for file in (self.folder / name for name in _IDENTITY.values() if (self.folder / name).exists()):
                Identity.load(file).rotated().save(file)
            self.invitations.unlink(missing_ok=True)
        identity = Identity.load(path)
        for role in ROLES:
            _write_new(self.tokens / role, identity.token_of(role).text.encode() + b"\n")
        return identity

    def announce(self, beacon: Beacon) -> None:
        """Write how to reach the master; on a full disk, accept a file that already leads to this master.

        Raises:
            CannotWrite: the disk is full or gone, and no file leads to this master.
        """
        path, data = self.beacon_file, msgspec.json.format(msgspec.json.encode(beacon), indent=1)
        try:
            atomic_write(path, data, private=True)
        except OSError as error:
            if not path.exists() or replace(self.beacon(), pid=beacon.pid) != beacon:
                raise CannotWrite(path, error, "; free space for the master's folder") from error

    def beacon(self) -> Beacon:
        """Return how to reach the master that runs, or last ran, in this folder.

        Raises:
            MissingFile: no master ever ran here.
            InvalidFile: the file is damaged.
        """
        path = self.beacon_file
        try:
            return decode_json(path.read_bytes(), Beacon)
        except OSError as error:
            raise MissingFile(
                f"no master was ever started in {self.folder}: start one with `evener up`, "
                "or name one with --master ADDRESS --token-file FILE"
            ) from error
        except NOT_DECODED as error:
            raise InvalidFile(f"{path} is damaged: {error}; start `evener up` again") from error


def _write_new(path: Path, data: bytes) -> None:
    """Write a private file unless it has these contents: a master can start on a full disk, too."""
    if not path.exists() or path.stat().st_mode & 0o077 or path.read_bytes() != data:
        atomic_write(path, data, private=True)


def default_state_dir(environment: Mapping[str, str]) -> Path:
    """Return $EVENER_HOME, or `evener` in the folder where the system keeps the state of a user's programs."""
    if named := environment.get("EVENER_HOME"):
        return Path(named)
    return Path(environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "evener"


def default_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder in which a node keeps code and data that it received."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evener"


@contextmanager
def node_cache(folder: Path) -> Iterator[None]:
    """Use a node's cache inside, together with other nodes of this machine.

    Files of killed nodes are removed: ranks' folders with checkpoints, and incomplete code and data.
    """

    def clean() -> None:
        _remove_all((*(folder / "blobs").glob(".*"), *(folder / RANKS).glob("*")))

    with shared_folder(folder, clean):
        yield


def _remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class Versions(NamedTuple):
    """Versions on a machine; `torch` is empty where it is not installed."""

    evener: str
    python: str
    torch: str


def versions_here() -> Versions:
    """Return the versions on this machine, without importing PyTorch."""
    return Versions(VERSION, platform.python_version(), version_of("torch"))


class MasterConfig(NamedTuple):
    """Configuration of a master.

    Attributes:
        home: state folder.
        identity: certificate and secret.
        versions: versions on this machine.
        environment: versions and more, for records.
        patience: seconds of silence after which a node counts as lost.
        notify: shows a message to the master's user.
        clock: monotonic seconds: all durations are differences of it, since the system's clock may be set.
        system: the only nodes that may join; None: all that have a token.
    """

    home: StateDir
    identity: Identity
    versions: Versions
    environment: dict[str, str]
    patience: float
    notify: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    system: System | None = None


def reachable_address(bound: Address) -> Address:
    """Return the address at which other machines reach a server that listens at `bound`."""
    return Address(own_address(), bound.port) if bound.is_everywhere else bound


def return_seconds(patience: float) -> float:
    """Return the seconds that a node may take to reconnect to a restarted master.

    A node that has not noticed the master's end needs one patience to notice it and one to connect. A node that has
    noticed it may have failed to connect just before, and then makes its longest pause.
    """
    return max(2 * patience, MAX_PAUSE_SECONDS + JOIN_SECONDS)
