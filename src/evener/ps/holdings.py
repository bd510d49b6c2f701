"""What every node has in hand: leases that it works on, and leases whose contributions are not judged yet. Pure."""

from __future__ import annotations

from evener.sync.messages import Lease


class Holdings:
    """See the first line."""

    def __init__(self) -> None:
        self._working: dict[str, dict[int, Lease]] = {}
        self._judged: dict[str, dict[int, Lease]] = {}

    def give(self, name: str, lease: Lease) -> None:
        """Node `name` gets a lease, or is told of it again."""
        self._working.setdefault(name, {})[lease.number] = lease

    def answered(self, name: str, number: int) -> Lease | None:
        """A contribution to a lease came, which is to be judged; None if the node does not have that lease."""
        lease = self._working.get(name, {}).pop(number, None)
        if lease is not None:
            self._judged.setdefault(name, {})[number] = lease
        return lease

    def judged(self, name: str, number: int) -> Lease | None:
        """A contribution was judged; its lease, if there was one."""
        return self._judged.get(name, {}).pop(number, None)

    def first(self, name: str) -> Lease | None:
        """The lease that node `name` works on; None if it has none."""
        return next(iter(self._working.get(name, {}).values()), None)

    def forget(self, name: str) -> None:
        """Node `name` is gone."""
        self._working.pop(name, None)
        self._judged.pop(name, None)
