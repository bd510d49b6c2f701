"""A node that slows to a third in mid-run: how soon is the throughput back at 90 % of the new ideal?

    python benchmarks/drift.py [--at 30] [--task digits] [--json]

Two equal nodes; from step --at on one has a third of its speed. The new ideal is (1 + 1/3) / 2 of the throughput
before.
"""

from __future__ import annotations

from statistics import median

from results import Results, open_results, parser_of
from uneven_nodes import run

from evener.launch.nodes import parse_local_nodes
from evener.records.errors import require
from evener.records.record import TrainRecord

BEFORE, IN_A_ROW, SETTLED, SHOWN = 12, 5, 20, 24
"""Steps: that the ideal is taken from, that have to be good, until the new shares hold, and that are shown."""


def main() -> None:
    """One run, and the throughput around the change."""
    parser = parser_of(__doc__)
    parser.add_argument("--at", type=int, default=30)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--epochs", type=int, default=11)
    words = parser.parse_args()
    with open_results(words) as results:
        record = run(words.task, {}, parse_local_nodes(f"1.0,1.0@{words.at}=0.3333"), "measured", words.epochs)
        show(results, record, words.at)


def show(results: Results, record: TrainRecord, at: int) -> None:
    """Steps and new shares after step `at`, and when the throughput was back."""
    full = {s.step: s.samples / s.seconds for s in record.steps if s.samples == record.plan.batch_size}
    later = sorted(k for k in full if k >= at)
    last = max(full, default=0) - SETTLED
    require(
        BEFORE <= at <= last, "--at", at, f"from {BEFORE} to {last}, {SETTLED} full steps before the end of the run"
    )
    before = median(v for k, v in full.items() if at - BEFORE <= k < at)
    ideal = before * (1 + 1 / 3) / 2
    results.add("before {before:.0f} samples/s; the new ideal is {ideal:.0f}", before=before, ideal=ideal)
    for event in record.events:
        if event.kind == "rebalanced":
            results.add("step {step}: {event}", step=event.step, event=event.message)
    for step in (k for k in later if k <= at + SHOWN):
        share = full[step] / ideal
        results.add(
            "step {step}: {rate:.0f} samples/s, {share:.0%} of the ideal", step=step, rate=full[step], share=share
        )
    back = next((k for i, k in enumerate(later) if all(full[n] >= 0.9 * ideal for n in later[i : i + IN_A_ROW])), None)
    after = median(v for k, v in full.items() if k >= at + SETTLED)
    results.add(
        "from 20 steps after the change on: {after:.0f} samples/s, {share:.1%} of the new ideal",
        after=after,
        share=after / ideal,
    )
    reached = "never" if back is None else "from {steps_after} steps after the change"
    results.add(
        f"at 90 % or above for {{in_a_row}} full steps in a row: {reached}",
        in_a_row=IN_A_ROW,
        steps_after=None if back is None else back - at,
    )


if __name__ == "__main__":
    main()
