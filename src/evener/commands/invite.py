"""`evener invite`: tokens for others, which expire and can be revoked. Needs no PyTorch."""

from __future__ import annotations

import sys

from evener.commands.up import invitations_table, open_master
from evener.config.options import InviteConfig
from evener.ps.protocol.messages import Invite, RevokeInvitation
from evener.training.console import open_console


def invite(config: InviteConfig) -> None:
    """Print a token and how to use it; or revoke one, and show the others."""
    with open_master(config) as client:
        if config.revoke is not None:
            status = client.change(RevokeInvitation(invitation=config.revoke))
            open_console(to_stderr=False).print(invitations_table(status))
            return
        message = Invite(submitter=config.submitter or "", nodes=config.nodes, seconds=config.hours * 3600)
        invited = client.invite(message)
        address = client.ask().address
    if config.submitter is None:
        nodes = "1 node" if config.nodes == 1 else f"{config.nodes} nodes"
        intro = f"For {nodes}, to be used within {config.hours:g} h. There type `evener join` and the master's address,"
    else:
        intro = f"For {config.submitter}, for {config.hours:g} h. There type `evener train ... --master`, the address,"
    sys.stdout.write(
        f"{intro}\nand give this token when it asks, or with --token-file, or in $EVENER_TOKEN (the master is at "
        f"{address}):\n\n    {invited.token}\n\nevener invite --revoke {invited.invitation} makes it worthless.\n"
    )
