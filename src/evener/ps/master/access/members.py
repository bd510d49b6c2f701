"""Members: the owners of nodes' names, and expelled nodes, which a master remembers across restarts.

A name belongs to the key that first joined with it. The master saves a hash of the key, which only its node knows:
names that came without an invitation soon, all others and expulsions at once. Their number is limited: nodes that are
gone, and were neither invited nor expelled, make room for others.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from evener.ps.master.rate_limited_file import RateLimitedFile
from evener.records.atomic import atomic_write
from evener.records.schema import Digest, Name, Noun, Part, Text, Word, encode_noun, read_noun, shown

MAX_MEMBERS = 4096
"""Limit of remembered nodes, and of expelled ones besides."""
_MAX_IN_FILE = 2 * MAX_MEMBERS
MAX_KEYS_PER_HOST = 64
"""Limit of the nodes of one address that joined without an invitation."""


class Member(Part, frozen=True, kw_only=True):
    """A remembered node.

    Attributes:
        key: SHA-256 of its key.
        invitation: invitation with which it joined; empty if it used the token of all nodes.
        expelled: reason why it was expelled; empty if it was not.
        host: address from which it first joined; empty if it came over a Unix socket, or that was not saved.
    """

    key: Digest
    invitation: Word = ""
    expelled: Text = ""
    host: Name = ""


class MemberList(Noun, frozen=True, kw_only=True):
    """All members by name, the oldest first."""

    members: Annotated[dict[Name, Member], Meta(max_length=_MAX_IN_FILE)] = {}


class Members:
    """The members of a master.

    Args:
        path: file of the members.
        is_known: whether the master still needs to know the node of a name; the others are gone.
        clock: seconds.
    """

    def __init__(
        self, path: Path, is_known: Callable[[str], bool] = lambda _: True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._is_known = path, is_known
        self._members: dict[str, Member] = {}
        self._file = RateLimitedFile(self._save, clock)

    def load(self) -> None:
        """Load the members of the last master of this state folder, with printable names.

        Raises:
            InvalidInput: the file is damaged.
        """
        if self._path.exists():
            self._members = dict(read_noun(self._path, MemberList, makes_printable=True).members)

    def name_for(self, wanted: str, key: str, *, is_named: bool) -> str:
        """Return the name for a node with this key: the wanted one, or with a number appended; empty if it is taken."""
        digest = _hash(key)
        if is_named:
            return wanted if self._is_free(wanted, digest) else ""
        names = (wanted if number == 1 else f"{wanted}-{number}" for number in count(1))
        return next(name for name in names if self._is_free(name, digest))

    def why_expelled(self, name: str, key: str) -> str:
        """Say why a node was expelled; empty if it was not. Another name with the same key is expelled, too."""
        digest = _hash(key)
        for known, member in self._members.items():
            if member.expelled and (known == name or (key and member.key == digest)):
                return member.expelled
        return ""

    @property
    def has_room(self) -> bool:
        """Whether another invited node can be remembered, perhaps instead of one that is gone."""
        return self._num_remembered < MAX_MEMBERS or self._first_gone(self._uninvited()) is not None

    def knows(self, key: str) -> bool:
        """Return whether a name belongs to this key."""
        digest = _hash(key)
        return bool(key) and any(member.key == digest for member in self._members.values())

    def num_invited(self, invitation: str) -> int:
        """Return the number of keys that joined with an invitation."""
        return len({member.key for member in self._members.values() if member.invitation == invitation})

    def bind(self, name: str, key: str, invitation: str = "", host: str = "") -> None:
        """Assign a free name to a key, if there is room; do nothing without a key. Raises OSError."""
        if not key or name in self._members:
            return
        of_host = self._uninvited(host) if host and not invitation else []
        if len(of_host) >= MAX_KEYS_PER_HOST and not self._forget_gone(of_host):
            return
        if self._num_remembered >= MAX_MEMBERS and not self._forget_gone(self._uninvited()):
            return
        self._members[name] = Member(key=_hash(key), invitation=invitation, host=host)
        if invitation:
            self._file.save()
        else:
            self._file.changed()

    def expel(self, name: str, reason: str) -> None:
        """Expel a node. If too many are expelled, forget one, if possible an uninvited one. Raises OSError."""
        known = self._members.pop(name, Member(key=""))
        expelled = [other for other, member in self._members.items() if member.expelled]
        if len(expelled) >= MAX_MEMBERS:
            uninvited = (other for other in expelled if not self._members[other].invitation)
            del self._members[next(uninvited, expelled[0])]
        self._members[name] = replace(known, expelled=shown(reason))
        self._file.save()

    def others_with_key_of(self, name: str) -> list[str]:
        """Return other names that belong to the key of this one."""
        key = self._members[name].key if name in self._members else ""
        return [other for other, member in self._members.items() if key and member.key == key and other != name]

    def forget(self, name: str) -> bool:
        """Free a name, and let its expelled owner join again; return whether it had an owner. Raises OSError."""
        if self._members.pop(name, None) is None:
            return False
        self._file.save()
        return True

    def tick(self) -> None:
        """Save what has changed if that is due. Raises OSError."""
        self._file.tick()

    def flush(self) -> None:
        """Save what has changed. Raises OSError."""
        self._file.flush()

    @property
    def _num_remembered(self) -> int:
        return sum(not member.expelled for member in self._members.values())

    def _uninvited(self, host: str | None = None) -> list[str]:
        """Return the nodes that were neither invited nor expelled, the oldest first: those of one host, or all."""
        return [
            name
            for name, member in self._members.items()
            if not member.invitation and not member.expelled and host in (None, member.host)
        ]

    def _first_gone(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if not self._is_known(name)), None)

    def _forget_gone(self, names: Sequence[str]) -> bool:
        """Forget the first of `names` whose node is gone; return whether there is one."""
        if (gone := self._first_gone(names)) is None:
            return False
        del self._members[gone]
        return True

    def _is_free(self, name: str, digest: str) -> bool:
        member = self._members.get(name)
        return member is None or member.key == digest

    def _save(self) -> None:
        atomic_write(self._path, encode_noun(MemberList(members=self._members)), private=True)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest() if key else ""
