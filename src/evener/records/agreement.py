"""The agreements: how the nodes of a master come to common weights (`--agreement`).

docs/adding-an-agreement.md lists what a new one needs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

AgreementName: TypeAlias = Literal["sync", "async", "bounded", "average", "federated", "diloco"]


class AgreementFacts(NamedTuple):
    """Facts of an agreement, for options and reports; `agreements.settings.AGREEMENT_SETTINGS` has its settings.

    Attributes:
        sends: what a node sends to the master; with `gradients`, the master makes the steps of the task's optimizer.
        may_compress: whether a node with a slow link may have to compress although the user did not ask for it.
        takes_local_steps: whether the user chooses how many steps a node takes between two exchanges; then exchanges
            may overlap with work, and rounds may close without late nodes.
        in_rounds: whether updates are made in rounds of all nodes, which can be compressed with top-k.
    """

    sends: Literal["gradients", "changes of weights"]
    may_compress: bool
    takes_local_steps: bool = False
    in_rounds: bool = True


AGREEMENT_FACTS: dict[AgreementName, AgreementFacts] = {
    "sync": AgreementFacts("gradients", may_compress=False),
    "async": AgreementFacts("gradients", may_compress=True, in_rounds=False),
    "bounded": AgreementFacts("gradients", may_compress=True, in_rounds=False),
    "average": AgreementFacts("changes of weights", may_compress=True, takes_local_steps=True),
    "federated": AgreementFacts("changes of weights", may_compress=False),
    "diloco": AgreementFacts("changes of weights", may_compress=True, takes_local_steps=True),
}


def agreement_facts(name: str) -> AgreementFacts | None:
    """Return the facts of the agreement in a record; None if it is no agreement of this version."""
    return next((facts for known, facts in AGREEMENT_FACTS.items() if known == name), None)
