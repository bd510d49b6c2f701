"""What the user says about the star plane; options that make no sense together are refused in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from evener.errors import InvalidInput, MissingFile, require
from evener.schema import Part
from evener.sync.protocol import Compression
from evener.wire.identity import Token

if TYPE_CHECKING:
    from evener.run.order import Order  # imports PyTorch, which a node may lack

TOKEN_VARIABLE = "EVENER_TOKEN"
"""Environment variable with a token: unlike an option, it is not shown to everybody on the machine by `ps`."""

Protocol = Literal["sync", "async", "bounded", "average", "diloco"]
_LOCAL = ("average", "diloco")
_BELONG = {
    "staleness": ("bounded",),
    "local_steps": _LOCAL,
    "outer_lr": ("diloco",),
    "outer_momentum": ("diloco",),
    "overlap": _LOCAL,
}
"""Options that only some protocols have."""


class Way(Part, frozen=True, kw_only=True):
    """What the user said about agreeing.

    Attributes:
        protocol: by name; None: the nodes meet in collectives.
        staleness, local_steps, outer_lr, outer_momentum, compress, overlap: options of the command line; None where
            nothing was said.
    """

    protocol: str | None = None
    staleness: int | None = None
    local_steps: str | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    compress: str | None = None
    overlap: bool = False


def check_way(way: Way) -> None:
    """Refuse an unknown protocol, and options that it does not have.

    Raises:
        InvalidInput: says which option belongs to which protocol.
    """
    if way.protocol is not None:
        allowed = ", ".join(get_args(Protocol))
        require(way.protocol in get_args(Protocol), "--agreement", way.protocol, f"one of {allowed}")
    for field, protocols in _BELONG.items():
        given = getattr(way, field) not in (None, False)
        if given and way.protocol not in protocols:
            option = field.replace("_", "-")
            raise InvalidInput(f"--{option} belongs to --agreement {' or '.join(protocols)}")
    if way.compress is not None:
        if way.protocol is None:
            raise InvalidInput(f"--compress belongs to --agreement {', '.join(get_args(Protocol))}")
        allowed = ", ".join(get_args(Compression))
        require(way.compress in get_args(Compression), "--compress", way.compress, f"one of {allowed}")


class Where(NamedTuple):
    """On whose nodes to train, and what they are sent.

    Attributes:
        local_nodes: speeds of private ones; None for those of a master.
        home: of the master of this machine.
        master: address of another one.
        token: of that one.
        ship_data: whether the data travel.
    """

    local_nodes: str | None
    home: Path
    master: str | None
    token: str | None
    ship_data: bool


def refuse_collective(order: Order, *, plan: Path | None, devices: str, memory: str | None) -> None:
    """Refuse options of the collective plane beside --agreement. Raises InvalidInput."""
    given = {
        "--strategy": order.strategy != "auto",
        "--replicas": order.replicas is not None,
        "--micro-batches": order.micro_batches is not None,
        "--schedule": order.schedule != "1f1b",
        "--rematerialise": order.rematerialise != "auto",
        "--plan": plan is not None,
        "--devices": devices != "all",
        "--memory": memory is not None,
        "--shares": order.shares != "measured",
        "--accumulate": order.accumulate != 1,
        "--compile": order.compile,
        "--workers": order.workers != 0,
        "--stationary": order.stationary,
        "--checkpoint": order.checkpoint is not None,
        "--checkpoint-every": order.checkpoint_every is not None,
        "--resume": order.resume,
    }
    for option, is_given in given.items():
        if is_given:
            raise InvalidInput(f"{option} does not go with --agreement: leave one of them out")


def refuse_star(where: Where, *, home: Path | None) -> None:
    """Refuse options of the star plane without --agreement. Raises InvalidInput."""
    given = {"--home": home, "--master": where.master, "--token": where.token, "--ship-data": where.ship_data or None}
    for option, value in given.items():
        if value is not None:
            raise InvalidInput(f"{option} belongs to --agreement")


def check_where(where: Where, order: Order) -> None:
    """Refuse what does not make sense together. Raises InvalidInput."""
    if where.local_nodes is not None and (where.master or where.token):
        raise InvalidInput("--local-nodes have a master of their own: leave --master and --token out")
    if where.local_nodes is not None and where.ship_data:
        raise InvalidInput("--ship-data: local nodes read the data where they are: leave it out")
    if where.ship_data and order.data_dir is None:
        raise InvalidInput("--ship-data needs --data DIR: what is to be sent")


def given_token(token: str | None, token_file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token that the user gave in one of three ways; None if in none.

    Args:
        token: as an option.
        token_file: that holds it.
        environment: may hold it as $EVENER_TOKEN, which the other two come before.

    Raises:
        InvalidInput: both options are given.
        MissingFile: the file cannot be read.
    """
    if token is not None and token_file is not None:
        raise InvalidInput("--token and --token-file say the same: leave one of them out")
    if token_file is None:
        return token or environment.get(TOKEN_VARIABLE) or None
    try:
        return token_file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise MissingFile(f"cannot read --token-file {token_file}: {error.strerror}") from error


def check_security(token: Token, insecure: bool) -> None:
    """Refuse what the user and the token disagree about. Raises InvalidInput."""
    if insecure and not token.insecure:
        raise InvalidInput("--insecure: this token is of a master that encrypts; leave --insecure out")
    if token.insecure and not insecure:
        raise InvalidInput("this token is of a master without encryption: add --insecure if that is what you want")
