"""A program for a host: one asynchronous run of NfNN's experiment on a master's thin nodes; says its updates a second.

thin_run.py ADDRESS TOKEN DATA WORKERS UPDATES
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from evener.experiments.nfnn import job_of, load_task, outcome_of
from evener.ps.client import MasterClient
from evener.wire.identity import Address, Token


def main(address: str, token: str, data: str, workers: str, updates: str) -> None:
    """Wait for the nodes, run, and write a line."""
    with MasterClient(Address.parse(address), Token.parse(token), 60.0) as control:
        while sum(node.score is not None and node.state == "present" for node in control.ask().nodes) < int(workers):
            time.sleep(0.1)
        task = load_task(Path(data))
        job = job_of(task, Path(data), "async", int(workers), int(updates), order_seed=0)
        outcome = outcome_of(task, job, weights_seed=9, client=control, check=lambda: None)
    sys.stdout.write(f"{int(updates) / outcome.seconds:.1f} updates/s, accuracy {outcome.accuracy:.4f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
