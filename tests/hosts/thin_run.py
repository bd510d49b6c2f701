"""A program for a host: one asynchronous run of NfNN's experiment on a master's thin nodes; says its updates a second.

thin_run.py ADDRESS TOKEN DATA WORKERS UPDATES
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from evener.experiments.nfnn import NfnnMaster, NfnnRun
from evener.ps.master_client import MasterClient
from evener.tasks.load import load_thin_task
from evener.wire.identity import Address, Token


def main(address: str, token: str, data: str, workers: str, updates: str) -> None:
    """Wait for the nodes, run, and write a line."""
    with MasterClient(Address.parse(address), Token.parse(token), 60.0) as control:
        while sum(node.score is not None and node.state == "present" for node in control.ask().nodes) < int(workers):
            time.sleep(0.1)
        running = NfnnMaster(load_thin_task("nfnn", Path(data)), Path(data), control, lambda: None)
        outcome = running.run(NfnnRun("async", int(workers), int(updates), weights_seed=9, order_seed=0))
    sys.stdout.write(f"{int(updates) / outcome.seconds:.1f} updates/s, accuracy {outcome.accuracy:.4f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
