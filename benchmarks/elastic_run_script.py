"""The runs of `elastic.py`: started from Python, so that a run can end when the storm is over, or where another did.

python elastic_run_script.py OUTPUT EPOCHS [--over FILE | --last EPOCH] [--pause SECONDS] [--nodes 1,0.5 --patience 2]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import evener
from evener.records.record import Epoch

TASK = Path(__file__).with_name("elastic_task.py")


def main() -> None:
    """One run, to the end of the epoch in which it is to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("epochs", type=int)
    parser.add_argument("--over", type=Path, help="end with the epoch in which this file is there")
    parser.add_argument("--last", type=int, help="end with this epoch, from 0")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--nodes")
    parser.add_argument("--patience", type=float)
    words = parser.parse_args()

    def is_end(event: object) -> bool:
        if not isinstance(event, Epoch):
            return False
        return event.epoch == words.last or (words.over is not None and words.over.exists())

    options: dict[str, Any] = {"option": {"pause": str(words.pause)}, "epochs": words.epochs, "precision": "fp64"}
    if words.nodes is not None:
        options |= {"local_nodes": words.nodes, "shares": words.nodes, "patience": words.patience, "elastic": True}
    evener.train(TASK, callbacks=[is_end], output=words.output, **options)


if __name__ == "__main__":
    main()
