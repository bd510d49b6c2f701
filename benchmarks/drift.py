"""A node that slows to a third in mid-run: how soon is the throughput back at 90 % of the new ideal?

    python benchmarks/drift.py [--at 30] [--task digits]

Two equal nodes; from step --at on one has a third of its speed. The new ideal is (1 + 1/3) / 2 of the throughput
before.
"""

from __future__ import annotations

import argparse
from statistics import median

from uneven_nodes import run

from evener.launch.nodes import parse_local_nodes

BEFORE, IN_A_ROW = 12, 5


def main() -> None:
    """Run once and print the throughput around the change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", type=int, default=30)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--epochs", type=int, default=11)
    words = parser.parse_args()
    nodes = parse_local_nodes(f"1.0,1.0@{words.at}=0.3333")
    record = run(words.task, {}, nodes, "measured", words.epochs)
    full = {s.step: s.samples / s.seconds for s in record.steps if s.samples == record.plan.batch_size}
    before = median(v for k, v in full.items() if words.at - BEFORE <= k < words.at)
    ideal = before * (1 + 1 / 3) / 2
    print(f"before {before:.0f} samples/s; the new ideal is {ideal:.0f}")
    for event in record.events:
        if event.kind == "rebalanced":
            print(f"step {event.step}: {event.message}")
    later = sorted(k for k in full if k >= words.at)
    for step in (k for k in later if k <= words.at + 24):
        print(f"step {step}: {full[step]:.0f} samples/s, {full[step] / ideal:.0%} of the ideal")
    back = next((k for i, k in enumerate(later) if all(full[n] >= 0.9 * ideal for n in later[i : i + IN_A_ROW])), None)
    after = median(v for k, v in full.items() if k >= words.at + 20)
    print(f"from 20 steps after the change on: {after:.0f} samples/s, {after / ideal:.1%} of the new ideal")
    reached = "never" if back is None else f"{back - words.at} steps after the change"
    print(f"at 90 % or above for {IN_A_ROW} full steps in a row: from {reached}")


if __name__ == "__main__":
    main()
