"""Rights are asked for at every command, a revoked token is worth nothing at once, and every command hears of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from evener.cli.app import main
from evener.commands.join import connector
from evener.commands.up import down, nodes, stop
from evener.config.options import MasterAccess, NodesAccess, StopAccess
from evener.ps.client import MasterClient
from evener.ps.master.command_handlers import COMMANDS, CommandHandlers
from evener.ps.node.node import Node
from evener.ps.node.node_part import NodeConfig
from evener.ps.protocol import messages as m
from evener.ps.protocol.directions import ToCommand, ToNode
from evener.ps.protocol.messages import Invite, RevokeInvitation
from evener.ps.protocol.rank_messages import RankJob
from evener.records.errors import InvalidInput, NodeLost
from evener.records.profile import DeviceProfile
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.errors import CannotJoin, ConnectionLost
from evener.wire.identity import Role, Token
from evener.wire.limits import Limits
from support.agreements import SYNC
from support.linear_engine import Mood, build, job, weights
from support.master_in_threads import VERSIONS, Plane, plane, wait_until
from support.refusals import refused
from support.strangers import introduction, log_of, refusals, told_until_closed

_MEASURED = DeviceProfile(node="a", device="cpu", model="", cores=1, memory_bytes=1, usable_memory_bytes=1)
NODE = NodeConfig("a", "cpu", 1.0, None, Path("/nonexistent"), VERSIONS, lambda: _MEASURED, build(Mood()))
Act = Callable[[MasterClient], Any]
RANKS = RankJob(run="ranks", task="digits", title="digits", config=b"")
FOR_SUBMITTERS: dict[str, Act] = {
    "ask": MasterClient.ask,
    "submit": lambda client: client.submit(job(SYNC), weights(), []),
    "submit ranks": lambda client: client.submit(RANKS, None, []),
    "assign": lambda client: client.assign("linear-1", ()),
    "stop": lambda client: client.change(m.StopRun(run="linear-1")),
    "follow": lambda client: client.follow(["linear-1"]),
    "examine": lambda client: client.examine(1.0),
}
FOR_ADMINS: dict[str, Act] = {
    "expel": lambda client: client.change(m.ExpelNode(name="a")),
    "forget": lambda client: client.change(m.ForgetNode(name="a")),
    "revoke": lambda client: client.change(RevokeInvitation(invitation="x")),
    "invite": lambda client: client.invite(Invite(seconds=1.0)),
    "down": MasterClient.down,
}
CASES = [("node", name, act) for name, act in (FOR_SUBMITTERS | FOR_ADMINS).items()]
CASES += [("submitter", name, act) for name, act in FOR_ADMINS.items()]


@pytest.mark.parametrize(("role", "name", "act"), CASES, ids=lambda one: one if isinstance(one, str) else "")
def test_command_with_the_wrong_token_raises_and_the_master_survives(role: Role, name: str, act: Act) -> None:
    with plane() as ps, MasterClient(ps.address, ps.identity.token_of(role), 5.0) as client:
        with pytest.raises(InvalidInput, match=f"this is a {role}'s token; use a"):
            act(client)
        wait_until(lambda: refusals(ps))
        assert ps.ask().nodes == ()


@pytest.mark.parametrize("change", [{"expel": "a"}, {"forget": "a"}])
def test_changing_nodes_with_a_node_token_asks_for_an_admin_token(change: dict[str, Any]) -> None:
    with plane() as ps:
        access = NodesAccess(master=str(ps.address), token=ps.identity.token_of("node").text, **change)
        with refused(InvalidInput) as error:
            nodes(access, as_json=False)
        assert "use an admin's" in str(error.value)


@pytest.mark.parametrize("command", [down, lambda access: nodes(access, as_json=False), stop])
def test_command_with_a_node_token_is_rejected_and_prints_nothing(
    command: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    kinds: dict[Any, type[Any]] = {down: MasterAccess, stop: StopAccess}
    with plane() as ps:
        access = kinds.get(command, NodesAccess)(master=str(ps.address), token=ps.identity.token_of("node").text)
        with refused(InvalidInput):
            command(access)
        assert capsys.readouterr().out == ""
        assert ps.ask().nodes == ()


def test_stop_command_does_not_report_the_end_of_a_running_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with plane("a", patience=0.5) as ps, ps.control() as client:
        ps.nodes[0].mood.seconds = 0.05
        run = client.submit(job(SYNC, epochs=1000), weights(), [])
        monkeypatch.setattr("evener.commands.up._STOP_PATIENCES", 0.01)
        with monkeypatch.context() as patched:
            patched.setattr(ps.master._scheduler, "stop", lambda *_, **__: None)
            stop(StopAccess(master=str(ps.address), token=ps.identity.token.text, run=run))
        assert "has ended" not in capsys.readouterr().out
        client.change(m.StopRun(run=run))


@pytest.mark.parametrize("name", ["expel", "forget", "revoke"])
def test_admin_request_about_an_unknown_name_keeps_the_connection(name: str) -> None:
    with plane() as ps, ps.control() as admin:
        with pytest.raises(InvalidInput):
            FOR_ADMINS[name](admin)
        assert admin.ask().nodes == ()


@pytest.mark.parametrize("is_accepted", [True, False])
def test_lost_connection_during_down_raises_connection_lost(monkeypatch: pytest.MonkeyPatch, is_accepted: bool) -> None:
    def cut(handlers: CommandHandlers, peer: int, *_: object) -> None:
        if is_accepted:
            handlers._send_status(peer)
        ps.master.server.disconnect(peer, "a cut")

    with plane() as ps, ps.control() as admin:
        with monkeypatch.context() as patched:
            patched.setitem(cast(Any, COMMANDS), m.ShutDown, cut)
            with pytest.raises(ConnectionLost):
                admin.down()
        assert ps.ask().nodes == ()


def test_node_with_a_submitter_token_is_dismissed() -> None:
    with plane() as ps:
        connection: Connection[m.Header] = open_connection(
            ps.address, ps.identity.token_of("submitter"), ToNode, Limits(patience=5)
        )
        with connection:
            connection.send(introduction("a"))
            told = told_until_closed(connection)
        assert [type(one) for one in told if not isinstance(one, m.Heartbeat)] == [m.Dismiss]


@pytest.mark.parametrize("is_invited", [False, True])
def test_node_with_a_submitter_token_fails_at_its_first_connection(is_invited: bool) -> None:
    with plane() as ps:
        with ps.control() as admin:
            invitation = admin.invite(Invite(submitter="alice", seconds=60.0)).token
        token = Token.parse(invitation) if is_invited else ps.identity.token_of("submitter")
        num_connected = ps.master.server._num_connected
        with connector([ps.address], token) as dial, pytest.raises(NodeLost) as refused:
            Node(NODE, dial, lambda _: None).serve()
        assert not isinstance(refused.value, CannotJoin | ConnectionLost)
        assert ps.master.server._num_connected == num_connected + 1


@pytest.mark.parametrize("name", FOR_SUBMITTERS)
def test_command_with_a_node_token_fails_at_its_first_connection(name: str) -> None:
    with plane() as ps:
        num_connected = ps.master.server._num_connected
        with MasterClient(ps.address, ps.identity.token_of("node"), 5.0) as client:
            with pytest.raises(InvalidInput):
                FOR_SUBMITTERS[name](client)
            with pytest.raises(InvalidInput):
                client.watch("linear-1", lambda _: None, lambda: None)
        assert ps.master.server._num_connected == num_connected + 1


def invited(ps: Plane, token: str) -> MasterClient:
    return MasterClient(ps.address, Token.parse(token), 5.0)


@pytest.mark.parametrize("name", list(FOR_SUBMITTERS))
def test_revoked_submitter_cannot_act_over_its_open_connection(name: str) -> None:
    with plane() as ps, ps.control() as admin:
        invitation = admin.invite(Invite(submitter="alice", seconds=60.0))
        with invited(ps, invitation.token) as alice:
            alice.ask()
            admin.change(RevokeInvitation(invitation=invitation.invitation))
            wait_until(lambda: len(ps.master.server.peers) == 1, "that the connection is closed")
            with pytest.raises((InvalidInput, ConnectionLost)):
                FOR_SUBMITTERS[name](alice)
        assert ps.ask().runs == ()
        closed = [line for line in log_of(ps) if line["what"] == "closed"]
        assert [line["invitation"] for line in closed] == [invitation.invitation]


def test_revoked_submitter_that_watches_gets_invalid_input() -> None:
    with plane("a") as ps, ps.control() as admin:
        ps.nodes[0].mood.seconds = 0.05
        invitation = admin.invite(Invite(submitter="alice", seconds=60.0))
        with invited(ps, invitation.token) as alice:
            run = alice.submit(job(SYNC, epochs=1000), weights(), [])
            admin.change(RevokeInvitation(invitation=invitation.invitation))
            with refused(InvalidInput):
                alice.watch(run, lambda _: None, lambda: None)
        admin.change(m.StopRun(run=run))


@pytest.mark.parametrize("name", list(FOR_SUBMITTERS))
def test_expiry_of_an_invitation_is_checked_at_every_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with plane() as ps, ps.control() as admin:
        invitation = admin.invite(Invite(submitter="alice", seconds=60.0))
        with invited(ps, invitation.token) as alice:
            alice.ask()
            later = time.time() + 61
            monkeypatch.setattr(ps.master._effects.invitations, "_clock", lambda: later)
            with refused(InvalidInput):
                FOR_SUBMITTERS[name](alice)
        wait_until(lambda: refusals(ps))
        assert [line["invitation"] for line in refusals(ps)] == [invitation.invitation]


def test_frames_of_a_revoked_submitter_read_later_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with plane() as ps, ps.control() as admin:
        invitation = admin.invite(Invite(submitter="alice", seconds=60.0))
        connection: Connection[m.Header] = open_connection(
            ps.address, Token.parse(invitation.token), ToCommand, Limits(patience=5)
        )
        with connection:
            monkeypatch.setattr(ps.master._handlers.commands, "_close_revoked", lambda _: None)
            admin.change(RevokeInvitation(invitation=invitation.invitation))
            connection.send(m.SubmitRun(), [b"", b""])
            told = told_until_closed(connection)
        assert [one.is_final for one in told if isinstance(one, m.Refused)] == [True]
        wait_until(lambda: refusals(ps))
        assert ps.ask().runs == ()


def test_revocation_disconnects_pending_nodes_but_not_joined_ones() -> None:
    with plane() as ps, ps.control() as admin:
        invitation = admin.invite(Invite(nodes=2, seconds=60.0))
        ends: list[Connection[m.Header]] = [
            open_connection(ps.address, Token.parse(invitation.token), ToNode, Limits(patience=5)) for _ in range(2)
        ]
        with ends[0], ends[1]:
            ends[0].send(replace(introduction("a"), key="1" * 64))
            wait_until(lambda: "a" in ps.master.nodes.by_name)
            admin.change(RevokeInvitation(invitation=invitation.invitation))
            told = told_until_closed(ends[1])
            assert any(isinstance(one, m.Dismiss) for one in told)
            assert [node.state for node in ps.ask().nodes] == ["present"]
            ends[0].send(m.Leave())


def test_audit_log_names_the_invitation_of_each_action() -> None:
    with plane() as ps, ps.control() as admin:
        invitation = admin.invite(Invite(submitter="alice", seconds=60.0))
        with invited(ps, invitation.token) as alice:
            alice.examine(0.1)
            with pytest.raises(InvalidInput):
                alice.down()
        wait_until(lambda: refusals(ps))
        lines = {line["what"]: line for line in log_of(ps)}
        assert lines["had the nodes looked at"]["name"] == "alice"
        assert lines["had the nodes looked at"]["invitation"] == invitation.invitation
        assert lines["refused"]["invitation"] == invitation.invitation
        assert lines["invited"]["invitation"] == ""


@pytest.mark.parametrize(
    "words",
    [
        ("train", "mnist"),
        ("train", "mnist", "--agreement", "sync"),
        ("tune", "mnist"),
        ("yolo", "train", "model=yolov8n.pt"),
    ],
)
def test_submission_with_a_node_token_fails_before_loading_the_task(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("evener.cli.commands.loading", None)
    monkeypatch.setattr("evener.cli.commands.require_ultralytics", lambda: None)
    with plane() as ps:
        access = ("--master", str(ps.address), "--token", ps.identity.token_of("node").text)
        monkeypatch.setattr(sys, "argv", ["evener", *words, *access])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 2
    assert "this is a node's token; use a submitter's" in capsys.readouterr().err
