"""Members: the owners of nodes' names, and expelled nodes, which a master remembers across restarts.

A name belongs to the key that first joined with it. The master saves a hash of the key, which only its node knows.
"""

from __future__ import annotations

import hashlib
from itertools import count
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from evener.records.atomic import atomic_write
from evener.records.schema import Digest, Name, Noun, Part, Text, Word, encode_noun, read_noun

MAX_MEMBERS = 4096


class Member(Part, frozen=True, kw_only=True):
    """A remembered node.

    Attributes:
        key: SHA-256 of its key.
        invitation: invitation with which it joined; empty if it used the token of all nodes.
        expelled: reason why it was expelled; empty if it was not.
    """

    key: Digest
    invitation: Word = ""
    expelled: Text = ""


class MemberList(Noun, frozen=True, kw_only=True):
    """All members, by name."""

    members: Annotated[dict[Name, Member], Meta(max_length=MAX_MEMBERS)] = {}


class Members:
    """The members of a master.

    Args:
        path: file of the members.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members: dict[str, Member] = {}

    def load(self) -> None:
        """Load the members of the last master of this state folder. Raises InvalidInput: the file is damaged."""
        if self._path.exists():
            self._members = dict(read_noun(self._path, MemberList).members)

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
        """Whether another name can be remembered."""
        return len(self._members) < MAX_MEMBERS

    def knows(self, key: str) -> bool:
        """Return whether a name belongs to this key."""
        digest = _hash(key)
        return bool(key) and any(member.key == digest for member in self._members.values())

    def num_invited(self, invitation: str) -> int:
        """Return the number of keys that joined with an invitation."""
        return len({member.key for member in self._members.values() if member.invitation == invitation})

    def bind(self, name: str, key: str, invitation: str = "") -> None:
        """Assign a free name to a key; do nothing without a key. Raises OSError."""
        if key and name not in self._members and self.has_room:
            self._members[name] = Member(key=_hash(key), invitation=invitation)
            self._save()

    def expel(self, name: str, reason: str) -> None:
        """Expel a node. Raises OSError."""
        known = self._members.get(name, Member(key=""))
        self._members[name] = Member(key=known.key, invitation=known.invitation, expelled=reason)
        self._save()

    def others_with_key_of(self, name: str) -> list[str]:
        """Return other names that belong to the key of this one."""
        key = self._members[name].key if name in self._members else ""
        return [other for other, member in self._members.items() if key and member.key == key and other != name]

    def forget(self, name: str) -> bool:
        """Free a name, and let its expelled owner join again; return whether it had an owner. Raises OSError."""
        if self._members.pop(name, None) is None:
            return False
        self._save()
        return True

    def _is_free(self, name: str, digest: str) -> bool:
        member = self._members.get(name)
        return member is None or member.key == digest

    def _save(self) -> None:
        atomic_write(self._path, encode_noun(MemberList(members=self._members)), private=True)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest() if key else ""
