"""Finding: what a check says of a machine, in one sentence, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from evener.records.errors import require
from evener.records.schema import Name, Part, Text

Severity: TypeAlias = Literal["ok", "warning", "error"]
"""`warning`: runs go, but slowly, or not all of them; `error`: some run will fail or hang."""


class Finding(Part, frozen=True, kw_only=True):
    """One thing that was looked at.

    Attributes:
        machine: of which it is said; of two, with a comma between.
        what: was looked at, in a word: `disk`, `clock`, `MTU`.
        severity: see above.
        sentence: what was found, without the machine.
        cure: what to do; empty if nothing has to be done.

    Raises:
        InvalidValue: a fault is without a cure.
    """

    machine: Name
    what: Name
    severity: Severity
    sentence: Text
    cure: Text = ""

    def __post_init__(self) -> None:
        require(self.severity == "ok" or bool(self.cure), "cure", self.cure, "there for every fault")

    @property
    def words(self) -> str:
        """All of it as one sentence."""
        return f"{self.machine}: {self.sentence}" + (f"; {self.cure}" if self.cure else "")


def has_error(findings: Iterable[Finding]) -> bool:
    """Whether some run will fail."""
    return any(finding.severity == "error" for finding in findings)


def faults(findings: Iterable[Finding]) -> list[Finding]:
    """Those that say that something is to be done."""
    return [finding for finding in findings if finding.severity != "ok"]


def found(machine: str, what: str, severity: Severity, sentence: str, cure: str = "") -> Finding:
    """A finding, of its fields in order."""
    return Finding(machine=machine, what=what, severity=severity, sentence=sentence, cure=cure)
