"""Tables of plans and records: who does how much and why, what happened, and whether it was foreseen."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from evener.plan import Plan, Prediction, Rejected
from evener.record import NodeSummary, TrainRecord
from evener.report.measured import typical_step, waiting_fraction
from evener.report.text import Row, grid, human_bytes, human_count, human_seconds, percent


def summary(record: TrainRecord) -> dict[str, object]:
    """What `--json` prints: ready for `json.dumps`.

    Returns:
        `task`, `strategy`, `seconds` (of training), `samples_per_second`, `validation_accuracy` (in [0, 1], or None),
        `final_loss` (or None), and `nodes`: for every node its `name`, `share` (fraction of all samples),
        `seconds_computing`, `seconds_waiting` and `bytes_sent`. With a parameter server also
        `agreement`, its name, and `bytes_saved`, by sending fewer bits.
    """
    of_ps = {"agreement": record.agreement, "bytes_saved": record.bytes_saved} if record.agreement else {}
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
        **of_ps,
    }


def plan_table(plan: Plan) -> Table:
    """Who does how much of every step of `plan` and why; below, what was left out or not chosen, with the reason."""
    micro_batches = f", in {plan.accumulate} micro-batches" if plan.accumulate > 1 else ""
    rows: list[Row] = [(a.node, a.device, str(a.samples), percent(plan.part(a)), a.reason) for a in plan.assignments]
    if plan.rejected:
        rows += [None, *(_rejected_row(rejected) for rejected in plan.rejected)]
    return grid(
        f"Plan: {plan.strategy}, {plan.batch_size} samples a step{micro_batches}",
        ("node", "device", ">samples", ">share", "reason"),
        rows,
        caption=_predicted(plan.prediction) if plan.prediction else "",
    )


def _rejected_row(rejected: Rejected) -> Row:
    seconds = rejected.step_seconds
    predicted = f" ({human_seconds(seconds)} a step)" if seconds is not None else ""
    return (rejected.what, "-", "-", "-", f"not used: {rejected.reason}{predicted}")


def _predicted(prediction: Prediction) -> str:
    sentence = f"Predicted: {human_seconds(prediction.step_seconds)} a step"
    if prediction.alone_seconds is None or prediction.step_seconds <= 0:
        return sentence
    factor = prediction.alone_seconds / prediction.step_seconds
    alone = human_seconds(prediction.alone_seconds)
    return f"{sentence}, {factor:.2f} times as fast as the best device alone ({alone})"


def record_table(record: TrainRecord) -> Table:
    """What every node of `record` did: its share, the seconds it computed and waited, what it sent and held."""
    return grid(
        f"Run: {record.task}, {human_seconds(record.seconds)}, {human_count(record.samples_per_second)} samples/s",
        ("node", ">share", ">computing", ">waiting", ">of its time", ">sent MB", ">peak memory"),
        [_node_row(node) for node in record.nodes],
    )


def _node_row(node: NodeSummary) -> Row:
    seconds = node.seconds_computing + node.seconds_waiting
    return (
        node.name,
        percent(node.share),
        human_seconds(node.seconds_computing),
        human_seconds(node.seconds_waiting),
        percent(node.seconds_waiting / seconds if seconds else 0.0),
        human_count(node.bytes_sent / 1e6),
        human_bytes(node.peak_memory_bytes),
    )


def comparison_table(records: Mapping[str, TrainRecord]) -> Table:
    """One row per way of training; speed-ups are over the samples per second of the first."""
    first = next(iter(records.values()), None)
    return grid(
        "Comparison",
        ("way", ">nodes", ">time", ">samples/s", ">speed-up", ">accuracy", ">waiting"),
        [_way_row(name, record, first.samples_per_second) for name, record in records.items() if first],
        caption="Accuracy: of the last validation. Waiting: of the time of all nodes.",
    )


def _way_row(name: str, record: TrainRecord, reference: float) -> Row:
    accuracy = record.validation_accuracy
    return (
        name,
        str(len(record.nodes)),
        human_seconds(record.seconds),
        human_count(record.samples_per_second),
        f"{record.samples_per_second / reference:.2f}" if reference else "-",
        "-" if accuracy is None else f"{100 * accuracy:.2f} %",
        percent(waiting_fraction(record)),
    )


def predicted_table(record: TrainRecord) -> Table:
    """The step that the plan of `record` predicted against the median step that was measured."""
    prediction, typical = record.plan.prediction, typical_step(record)
    rows: list[Row] = []
    if prediction and typical:
        rows = [
            _against("whole step", prediction.step_seconds, typical.step_seconds),
            _against("computing (slowest rank)", prediction.compute_seconds, typical.compute_seconds),
            _against(
                "waiting for others",
                prediction.communication_seconds + prediction.waiting_seconds,
                typical.communication_seconds,
            ),
            _bytes_against("sent by a rank", prediction.sent_bytes, typical.sent_bytes),
        ]
    rebalanced = sum(event.kind == "rebalanced" for event in record.events)
    return grid(
        "Predicted and measured",
        ("of one step", ">predicted", ">measured (median)", ">error"),
        rows,
        caption=_prediction_caption(bool(rows), rebalanced),
    )


def _against(what: str, predicted: float, measured: float) -> Row:
    return (what, human_seconds(predicted), human_seconds(measured), _error(predicted, measured))


def _bytes_against(what: str, predicted: float, measured: float) -> Row:
    return (what, human_bytes(predicted), human_bytes(measured), _error(predicted, measured))


def _error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted - measured) / measured:+.1f} %" if measured else "-"


def _prediction_caption(known: bool, rebalanced: int) -> str:
    if not known:
        return "Nothing to compare: the plan holds no prediction, or the record no steps."
    times = "once" if rebalanced == 1 else f"{rebalanced} times"
    return f"The shares were changed {times} after this prediction." if rebalanced else ""
