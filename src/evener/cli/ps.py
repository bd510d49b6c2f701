"""`evener up`, `join`, `nodes`, `down`: a master and its nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from evener.cli.fields import Json, option_of
from evener.run.config import RunConfig
from evener.run.options import PATIENCE, PORT

Home = Annotated[Path | None, option_of(RunConfig, "home")]
Master = Annotated[str | None, option_of(RunConfig, "master")]
Token = Annotated[str | None, option_of(RunConfig, "token")]
TokenFile = Annotated[Path | None, option_of(RunConfig, "token_file")]


def up(
    listen: Annotated[
        str | None, typer.Option(help=f"HOST:PORT, or :PORT for all interfaces; as the last time, or :{PORT}.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without encryption.")] = False,
    home: Home = None,
    patience: Annotated[
        float | None,
        typer.Option(help=f"Seconds of silence after which a node is given up; as the last time, or {PATIENCE:g}."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Be a master that nodes join, until `evener down` or Ctrl-C; started again it is the same one."""
    from evener.run import ps_master

    ps_master.up(listen=listen, insecure=insecure, home=home, patience=patience, as_json=as_json)


def join(
    address: Annotated[str, typer.Argument(help="Of the master, as `evener up` printed it.")],
    token: Annotated[str | None, typer.Option(help="As `evener up` printed it.")] = None,
    token_file: TokenFile = None,
    name: Annotated[str | None, typer.Option(help="Of this node; the machine's by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or a device such as cuda:0; the best by default.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data on this node.")] = None,
    speed: Annotated[float, typer.Option(help="Below 1: slow this node down, for tests.")] = 1.0,
    cache: Annotated[Path | None, typer.Option(help="Folder for code and data that are sent to this node.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="The master runs without encryption.")] = False,
    thin: Annotated[bool, typer.Option("--thin", help="Compute without PyTorch, even if it is installed.")] = False,
) -> None:
    """Be a node of the master at ADDRESS, until it says goodbye or Ctrl-C. Needs no PyTorch to join."""
    from evener.run import ps_node

    ps_node.join(
        address=address,
        token=token,
        token_file=token_file,
        name=name,
        device=device,
        data=data,
        speed=speed,
        cache=cache,
        insecure=insecure,
        thin=thin,
        environment=os.environ,
    )


def nodes(
    home: Home = None,
    master: Master = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show the nodes of a master, and the run that goes on."""
    from evener.run import ps_master

    ps_master.nodes(ps_master.open_master(home, master, token, token_file), as_json=as_json)


def down(home: Home = None, master: Master = None, token: Token = None, token_file: TokenFile = None) -> None:
    """End a master's run, its nodes, and the master."""
    from evener.run import ps_master

    ps_master.down(ps_master.open_master(home, master, token, token_file))
