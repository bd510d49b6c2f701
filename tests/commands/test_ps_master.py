"""`evener stop`: who may end a run, and what he is told."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from evener.agreements.settings import Sgd, synchronous
from evener.commands.submission import any_node
from evener.commands.up import run_line, stop
from evener.config.options import StopAccess
from evener.ps.client import MasterClient
from evener.ps.protocol.messages import Invite
from evener.records.errors import EvenerError, InvalidInput
from evener.wire.identity import Address, Token
from support.linear_engine import Mood, job, weights
from support.master_in_threads import Plane, plane, wait_until
from support.refusals import refused

ENDLESS = job(synchronous(batch=6, outer=Sgd(learning_rate=0.1)), epochs=100_000)


def access(ps: Plane, token: Token, run: str | None = None) -> StopAccess:
    return StopAccess(master=str(ps.address), token=token.text, run=run)


def test_run_is_stopped_by_its_submitter_and_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with plane() as ps:
        ps.join("a", Mood(seconds=0.01))
        with ps.control() as admin:
            tokens = [
                Token.parse(admin.invite(Invite(submitter=name, seconds=60.0)).token) for name in ("alice", "bob")
            ]
            with MasterClient(ps.address, tokens[0], 5.0) as alice:
                alice.submit(ENDLESS, weights(), [])
        wait_until(lambda: ps.version() > 2)
        run = ps.ask().run
        assert run is not None
        assert ", by alice): epoch" in run_line(run)
        assert f" updates, loss {run.loss:.4f};" in run_line(run)
        assert " 0 updates; " in run_line(replace(run, version=0))
        assert "; the checkpoint of step 7 is here; results" in run_line(replace(run, checkpoint=7))
        assert "joined as a; measuring this machine" in ps.nodes[0].said
        with refused(EvenerError):
            stop(access(ps, tokens[1]))
        assert ps.ask().run is not None
        with refused(InvalidInput):
            stop(access(ps, tokens[0], "other"))
        stop(access(ps, tokens[0]))
        assert (
            f"run linear-1 has ended with what it had reached; results are in {run.folder}" in capsys.readouterr().out
        )
        assert ps.ask().run is None
        assert (ps.home.runs / "linear-1" / "record.json").exists()
        with pytest.raises(InvalidInput, match=rf"^no run goes on at {re.escape(ps.ask().address)}$"):
            stop(access(ps, ps.identity.token))


def test_admin_stops_any_run() -> None:
    with plane() as ps:
        ps.join("a", Mood(seconds=0.01))
        with MasterClient(ps.address, ps.identity.token_of("submitter"), 5.0) as somebody:
            somebody.submit(ENDLESS, weights(), [])
        wait_until(lambda: ps.version() > 2)
        stop(access(ps, ps.identity.token, "linear-1"))
        assert ps.ask().run is None


def test_any_node_is_true_once_a_node_has_joined() -> None:
    with plane() as ps, ps.control() as admin:
        assert not any_node(admin)
        ps.join("a", Mood(seconds=0.01))
        wait_until(lambda: any_node(admin))


def test_address_of_a_master_on_all_interfaces_is_specific() -> None:
    with plane() as ps:
        bound = ps.master.listen(Address("", 0))
        named = Address.parse(ps.ask().address)
        assert not named.is_everywhere
        assert named.port == bound.port
