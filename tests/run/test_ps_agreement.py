"""How the nodes agree, from the words of the command line and what the task's own optimiser is."""

from __future__ import annotations

import pytest

from evener.errors import InvalidInput
from evener.run.config import RunConfig
from evener.run.ps_train import agreement_of
from evener.sync.protocol import Sgd


def test_a_bound_on_the_gradient_s_norm_does_not_go_with_rounds() -> None:
    outer = Sgd(learning_rate=0.1)
    with pytest.raises(InvalidInput, match="cannot bound the norm"):
        agreement_of(RunConfig(task="t", agreement="sync"), lambda: outer, clips=True, batch=4)
    assert agreement_of(RunConfig(task="t", agreement="async"), lambda: outer, clips=True, batch=4).outer == outer


def test_an_optimiser_that_the_server_does_not_know_may_make_local_steps() -> None:
    def unknown() -> Sgd:
        raise InvalidInput("the server does not know it")

    found = agreement_of(RunConfig(task="t", agreement="average", local_steps="7"), unknown, clips=True, batch=4)
    assert (found.local_steps, found.contribution) == (7, "delta")
    with pytest.raises(InvalidInput, match="does not know"):
        agreement_of(RunConfig(task="t", agreement="sync"), unknown, clips=False, batch=4)
