"""The submission of a run to a master: its name, and the files for the nodes."""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path

from evener.commands.doctor_nodes import code_of
from evener.config.run_config import RunConfig
from evener.data.tasks.load import is_path
from evener.ps.client import MasterClient
from evener.ps.protocol.blob import Blob, whole_folder
from evener.records.events import Phase

NO_NODE = Phase(what="waiting", detail="for a node, as none is here: type there what `evener up` says")
"""Shown when a run has been submitted and no node is present."""


def any_node(client: MasterClient) -> bool:
    """Return whether a node is present, so that a submitted run begins at once."""
    return any(node.state == "present" for node in client.ask().nodes)


def new_run_name(config: RunConfig) -> str:
    """Return the name of a run and of its folder: task, time and a random suffix."""
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", Path(config.task).stem).strip("-")[:60] or "run"
    return f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def blobs_of(config: RunConfig) -> dict[str, Blob]:
    """Return the files for the nodes: `code`, unless the task is built in, and `data` with `--ship-data`."""
    blobs = {}
    if is_path(config.task):
        blobs["code"] = code_of(config.task)
    if config.ship_data and config.data:
        root = config.data.resolve()
        blobs["data"] = Blob(root, whole_folder(root))
    return blobs
