"""A record as the few numbers that a script wants."""

from __future__ import annotations

from evener.record import TrainRecord


def summary(record: TrainRecord) -> dict[str, object]:
    """What `--json` prints: ready for `json.dumps`.

    Returns:
        `task`, `strategy`, `seconds` (of training), `samples_per_second`, `validation_accuracy` (in [0, 1], or None),
        `final_loss` (or None), and `nodes`: for every node its `name`, `share` (fraction of all samples),
        `seconds_computing`, `seconds_waiting` and `bytes_sent`. Of a star also `agreement`, its name, and
        `bytes_saved`, by sending fewer bits.
    """
    star = {"agreement": record.agreement, "bytes_saved": record.bytes_saved} if record.agreement else {}
    return {
        "task": record.task,
        "strategy": record.plan.strategy,
        "seconds": record.seconds,
        "samples_per_second": record.samples_per_second,
        "validation_accuracy": record.validation_accuracy,
        "final_loss": record.final_loss,
        "nodes": [
            {
                "name": node.name,
                "share": node.share,
                "seconds_computing": node.seconds_computing,
                "seconds_waiting": node.seconds_waiting,
                "bytes_sent": node.bytes_sent,
            }
            for node in record.nodes
        ],
        **star,
    }
