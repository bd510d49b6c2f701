"""What a master is given: its folder, in which it is the same master when started again, its identity, and a clock."""

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
from evener.records.errors import CannotWrite, InvalidFile, InvalidInput, MissingFile
from evener.records.schema import NOT_DECODED, Part
from evener.system.file_lock import lock_file, shared_folder
from evener.system.host import version_of
from evener.version import VERSION
from evener.wire.identity import ROLES, Identity, make_identity

_IDENTITY = {False: "identity.json", True: "identity-insecure.json"}
_BEACON = "master.json"
_LOCK = "lock"
RANKS = "ranks"
"""In the cache of a node: the folders of its ranks."""


class Beacon(Part, frozen=True, kw_only=True):
    """How to reach the master of a home, written where the commands on its machine look.

    Attributes:
        address: that nodes join.
        listen: what it listens at.
        token: to join with.
        pid: of its process; 0 after it has ended.
        patience: seconds.
        system: file that describes the nodes that alone may join; empty: there is none.
    """

    address: str
    listen: str
    token: str
    pid: int
    patience: float
    system: str = ""


class StateDir:
    """The folder of a master; everything in it is for its user only.

    Args:
        folder: made when something is first written.

    Attributes:
        folder: see above.
        run: folder of the run in progress.
        runs: folder of what runs ended with.
        blobs: folder of code and data that have passed through.
        aside: folder of runs that could not be gone on with, or whose results could not be written.
        profile: file of all nodes' ClusterProfile.
        audit: file of the audit log.
        members: file of the nodes' names and who was expelled.
        invitations: file of the invitations, without their tokens.
        tokens: folder of the tokens, one file for each role.
        beacon_file: how to reach its master, with the admin's token.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.runs = folder / "runs"
        self.aside = folder / "aside"
        self.blobs = folder / "blobs"
        self.profile = folder / "cluster.json"
        self.audit = folder / "audit.jsonl"
        self.members = folder / "members.json"
        self.invitations = folder / "invitations.json"
        self.tokens = folder / "tokens"
        self.beacon_file = folder / _BEACON

    def free_name(self, wanted: str) -> str:
        """The name of a new run: the wanted one, or with a number behind it if there are results of that name."""
        names = (wanted if number == 1 else f"{wanted}-{number}" for number in count(1))
        return next(name for name in names if not (self.runs / name).exists())

    def set_aside(self, files: Sequence[Path]) -> str:
        """Move files of a run to a folder of their own; where that is, in words."""
        if not files:
            return "nothing was written down of it"
        place = self.aside / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns()}"
        place.mkdir(parents=True, mode=0o700)
        for path in files:
            path.replace(place / path.name)
        return f"it is set aside in {place}"

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Inside, no other master may live here; the system ends the occupation when the process dies.

        Raises:
            InvalidInput: another one does, or nothing can be written there.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = lock_file(self.folder / _LOCK)
        except OSError as error:
            raise InvalidInput(f"cannot write into {self.folder}: {error.strerror}") from error
        if lock is None:
            raise InvalidInput(f"a master lives in {self.folder} already; end it with `evener down`")
        with lock:
            self._remove_drafts()
            yield

    def _remove_drafts(self) -> None:
        """Remove what masters left behind that were killed while they wrote."""
        for folder in (self.folder, self.run, self.tokens, *self.runs.glob("*")):
            remove_drafts(folder)
        _remove_all(self.blobs.glob(".*"))

    def identity_file(self, *, insecure: bool) -> Path:
        """The file with the master's certificate and secret."""
        return self.folder / _IDENTITY[insecure]

    def identity(self, *, insecure: bool, rotate: bool = False) -> Identity:
        """The identity of this home, made when it is first asked for; with `rotate`, with another secret from now on.

        The token of each role is written where its user can take it from, for this user only.
        """
        path = self.identity_file(insecure=insecure)
        if not path.exists():
            make_identity(insecure=insecure).save(path)
        identity = Identity.load(path)
        if rotate:
            identity = identity.rotated()
            identity.save(path)
            self.invitations.unlink(missing_ok=True)
        for role in ROLES:
            _write_new(self.tokens / role, identity.token_of(role).text.encode() + b"\n")
        return identity

    def announce(self, beacon: Beacon) -> None:
        """Write down how to reach the master; on a full disk what is there stays, if it leads to this master, too.

        Raises:
            CannotWrite: the disk is full or gone, and nothing there leads to this master.
        """
        path, data = self.beacon_file, msgspec.json.format(msgspec.json.encode(beacon), indent=1)
        try:
            atomic_write(path, data, private=True)
        except OSError as error:
            if not path.exists() or replace(self.beacon(), pid=beacon.pid) != beacon:
                raise CannotWrite(path, error, "; make room for the master's folder") from error

    def beacon(self) -> Beacon:
        """How to reach the master that lives, or last lived, here.

        Raises:
            MissingFile: none ever did.
            InvalidFile: the file is damaged.
        """
        path = self.beacon_file
        try:
            return msgspec.json.decode(path.read_bytes(), type=Beacon)
        except OSError as error:
            raise MissingFile(
                f"no master was ever started in {self.folder}: start one with `evener up`, "
                "or name one with --master ADDRESS --token T"
            ) from error
        except NOT_DECODED as error:
            raise InvalidFile(f"{path} is damaged: {error}; start `evener up` again") from error


def _write_new(path: Path, data: bytes) -> None:
    """Write a private file, unless this is what it holds: a master starts again on a full disk, too."""
    if not path.exists() or path.stat().st_mode & 0o077 or path.read_bytes() != data:
        atomic_write(path, data, private=True)


def default_state_dir(environment: Mapping[str, str]) -> Path:
    """$EVENER_HOME, or `evener` in the folder where the system keeps the state of a user's programs."""
    if named := environment.get("EVENER_HOME"):
        return Path(named)
    return Path(environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "evener"


def default_cache(environment: Mapping[str, str]) -> Path:
    """Where a node keeps code and data that were sent to it."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evener"


@contextmanager
def node_cache(folder: Path) -> Iterator[None]:
    """Inside, this process is a node that keeps there what is sent to it, beside other nodes of this machine.

    What nodes left there that were killed is removed: ranks' folders with checkpoints, and code and data that had not
    come whole.
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
    """What runs on a machine; `torch` is empty where it is not installed."""

    evener: str
    python: str
    torch: str


def versions_here() -> Versions:
    """What runs on this machine; PyTorch is not imported."""
    return Versions(VERSION, platform.python_version(), version_of("torch"))


class MasterConfig(NamedTuple):
    """What a master is given.

    Attributes:
        home: its folder.
        identity: who it is.
        versions: of what runs here.
        environment: the same and more, for records.
        patience: seconds of silence after which a node is given up.
        notify: tells its user.
        clock: seconds, never going back: all durations are differences of it, for the system's clock may be set.
        system: whose nodes alone may join; None: all that have a token.
    """

    home: StateDir
    identity: Identity
    versions: Versions
    environment: dict[str, str]
    patience: float
    notify: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    system: System | None = None
