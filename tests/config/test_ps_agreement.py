"""How the nodes agree, from the words of the command line and what the task's own optimiser is."""

from __future__ import annotations

from typing import Any

from evener.agreements.settings import Sgd
from evener.commands.train_by_agreement import agreement_of
from evener.config.run_config import RunConfig
from evener.records.errors import InvalidInput
from support.refusals import refused


def test_server_clips_gradients_only_if_it_makes_the_steps() -> None:
    outer = Sgd(learning_rate=0.1)
    for agreement, bound in (("sync", 0.5), ("async", 0.5), ("bounded", 0.5), ("average", None), ("diloco", None)):
        words: Any = {"agreement": agreement}
        asked = RunConfig(task="t", **words)
        assert agreement_of(asked, lambda: outer, clip_norm=0.5, batch=4).clip_norm == bound


def test_optimizer_unknown_to_the_server_may_make_local_steps() -> None:
    def unknown() -> Sgd:
        raise InvalidInput("the server does not know it")

    found = agreement_of(RunConfig(task="t", agreement="average", local_steps="7"), unknown, clip_norm=1.0, batch=4)
    assert (found.local_steps, found.contribution) == (7, "delta")
    with refused(InvalidInput):
        agreement_of(RunConfig(task="t", agreement="sync"), unknown, clip_norm=None, batch=4)
