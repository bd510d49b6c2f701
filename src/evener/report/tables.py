"""Tables of plans and records: who does how much and why, what happened, and predictions against measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.table import Table

from evener.oracle.all_reduce_shares import shares_among
from evener.records.plan import Check, Plan, Prediction, Rejected
from evener.records.record import TrainRecord
from evener.report.measured import typical_step, waiting_fraction
from evener.report.text import (
    Row,
    exact_percent,
    grid,
    human_bytes,
    human_count,
    human_seconds,
    percent,
    table_of,
)

_NODE_FIELDS = ("name", "share", "seconds_computing", "seconds_waiting", "bytes_sent")


def summary(record: TrainRecord) -> dict[str, object]:
    """Return the fields that `--json` prints, ready for `json.dumps`.

    Returns:
        `task`, `strategy`, `seconds` (of training), `samples_per_second`, `validation_accuracy` (in [0, 1], or None),
        `final_loss` (or None), and `nodes`: for every node its `name`, `share` (fraction of all samples),
        `seconds_computing`, `seconds_waiting` and `bytes_sent`. With a parameter server also
        `agreement`, its name, and `bytes_saved` by compression; where nodes left or joined also `goodput`, the
        fraction of `seconds` that was not lost because of this.
    """
    elastic_fields = {"goodput": record.goodput} if record.goodput < 1 else {}
    sync_fields = {"agreement": record.agreement, "bytes_saved": record.bytes_saved} if record.agreement else {}
    return {
        "task": record.task,
        "strategy": record.plan.strategy,
        "seconds": record.seconds,
        "samples_per_second": record.samples_per_second,
        "validation_accuracy": record.validation_accuracy,
        "final_loss": record.final_loss,
        "nodes": [{name: getattr(node, name) for name in _NODE_FIELDS} for node in record.nodes],
        **sync_fields,
        **elastic_fields,
    }


def plan_table(plan: Plan) -> Table:
    """Return a table of each rank's part of a step of `plan` and why, then what was rejected and why."""
    parts = f", in {plan.accumulate} micro-batches" if plan.accumulate > 1 else ""
    parts += f" ({plan.schedule})" if plan.schedule else ""
    rows: list[Row] = [(a.node, a.device, str(a.samples), percent(plan.part(a)), a.reason) for a in plan.assignments]
    if plan.rejected:
        rows += [None, *(_rejected_row(rejected) for rejected in plan.rejected)]
    captions = [_predicted(plan, plan.prediction)] if plan.prediction else []
    captions += [_checked(plan.check)] if plan.check else []
    captions += [_copied(plan.copy_steps)] if plan.copy_steps else []
    captions += [_summed(plan)] if plan.line_rates else []
    return grid(
        f"Plan: {plan.strategy}, {plan.batch_size} samples a step{parts}",
        ("node", "device", ">samples", ">share", "reason"),
        rows,
        caption="\n".join(captions),
    )


def _rejected_row(rejected: Rejected) -> Row:
    seconds = rejected.step_seconds
    predicted = f" ({human_seconds(seconds)} a step)" if seconds is not None else ""
    return (rejected.what, "-", "-", "-", f"not used: {rejected.reason}{predicted}")


def _copied(steps: int) -> str:
    every = "every step" if steps == 1 else f"every {steps} steps"
    return f"Each node's part is copied into the next node's memory {every}: losing a node repeats no more than these."


def _summed(plan: Plan) -> str:
    nodes = [one.node for one in plan.assignments]
    shares = shares_among(nodes, plan.line_rates) or [1 / len(nodes)] * len(nodes)
    parts = [
        f"{node} {share:.0%} ({human_bytes(plan.line_rates[node])}/s)" if node in plan.line_rates else node
        for node, share in zip(nodes, shares, strict=True)
    ]
    return f"Parts of the sums of gradients, by the rates of the lines: {', '.join(parts)}"


def _checked(check: Check) -> str:
    samples, precisions = "+".join(map(str, check.samples)), " and ".join(check.precisions)
    return (
        f"Checked: {samples} samples in {precisions}; these nodes and a single process agree "
        f"(to {check.off:.0e}, in {human_seconds(check.seconds)})"
    )


def _between(prediction: Prediction) -> str:
    least, most = prediction.interval
    return f" (four times of five {human_seconds(least)} to {human_seconds(most)})" if prediction.spread else ""


def _predicted(plan: Plan, prediction: Prediction) -> str:
    sentence = f"Predicted: {human_seconds(prediction.step_seconds)} a step{_between(prediction)}"
    if prediction.alone_seconds is None or prediction.step_seconds <= 0 or len(plan.assignments) == 1:
        return sentence
    factor = prediction.alone_seconds / prediction.step_seconds
    alone = human_seconds(prediction.alone_seconds)
    if factor < 1:
        advice = "train on that device alone, or measure again when the machine is idle"
        further_advice = f". {plan.advice}" if plan.advice else ""
        return f"{sentence}, longer than on the best device alone ({alone}): {advice}{further_advice}"
    return f"{sentence}, {factor:.2f} times as fast as the best device alone ({alone})"


def record_table(record: TrainRecord) -> Table:
    """Return a table of the nodes of `record`: share, seconds computing and waiting, bytes sent, peak memory."""
    notes = [f"{percent(record.of_ideal)} of the ideal"] if record.of_ideal is not None else []
    notes += [f"goodput {exact_percent(record.goodput)}"] if record.goodput < 1 else []
    rate = ", ".join([f"{human_count(record.samples_per_second)} samples/s", *notes])
    return table_of(
        f"Run: {record.task}, {human_seconds(record.seconds)}, {rate}",
        {
            "node": lambda node: node.name,
            ">share": lambda node: percent(node.share),
            ">computing": lambda node: human_seconds(node.seconds_computing),
            ">waiting": lambda node: human_seconds(node.seconds_waiting),
            ">of its time": lambda node: percent(node.waiting),
            ">sent MB?": lambda node: human_count(node.bytes_sent / 1e6),
            ">peak memory?": lambda node: human_bytes(node.peak_memory_bytes),
        },
        record.nodes,
        caption=f"Ended early: {record.ending}" if record.ending else "",
    )


def agreement_line(record: TrainRecord) -> str:
    """Return a line on the contributions of a master's nodes and the bytes that they sent and received."""
    contributions = sum(node.contributions for node in record.nodes)
    stale = sum(node.contributions * node.staleness for node in record.nodes)
    parts = [f"{contributions} contributions"]
    if stale:
        max_staleness = max(node.most_stale for node in record.nodes)
        parts.append(f"{stale / contributions:.2f} versions stale on average, {max_staleness} at most")
    sent, received = (sum(getattr(node, field) for node in record.nodes) for field in ("bytes_sent", "bytes_received"))
    parts.append(f"{human_bytes(sent)} to the master, {human_bytes(received)} back")
    if record.bytes_saved:
        parts.append(f"{human_bytes(record.bytes_saved)} saved by compression")
    refused, late = (sum(getattr(node, field) for node in record.nodes) for field in ("refused", "late"))
    parts += [f"{count} {name}" for name, count in (("refused", refused), ("late", late)) if count]
    return f"agreement {record.agreement}: {', '.join(parts)}"


def comparison_table(records: Mapping[str, TrainRecord]) -> Table:
    """Return a table with one row per run; speed-ups are over the samples per second of the first."""
    reference = next((record.samples_per_second for record in records.values()), 0.0)
    return table_of(
        "Comparison",
        {
            "run": lambda item: item[0],
            ">nodes": lambda item: str(len(item[1].nodes)),
            ">time?": lambda item: human_seconds(item[1].seconds),
            ">samples/s": lambda item: human_count(item[1].samples_per_second),
            ">speed-up": lambda item: f"{item[1].samples_per_second / reference:.2f}" if reference else "-",
            ">accuracy": lambda item: exact_percent(item[1].validation_accuracy),
            ">waiting": lambda item: percent(waiting_fraction(item[1].nodes)),
        },
        records.items(),
        caption="Accuracy: of the last validation. Waiting: of the time of all nodes.",
    )


def predicted_table(record: TrainRecord) -> Table:
    """Return a table of the step that the plan of `record` predicted and the median step that was measured."""
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
            _against("sent by a rank", prediction.sent_bytes, typical.sent_bytes, human_bytes),
        ]
    rebalanced = sum(event.kind == "rebalanced" for event in record.events)
    return grid(
        "Predicted and measured",
        ("of one step", ">predicted", ">measured (median)", ">error"),
        rows,
        caption=_prediction_caption(bool(rows), rebalanced),
    )


def _against(what: str, predicted: float, measured: float, form: Callable[[float], str] = human_seconds) -> Row:
    error = f"{100 * (predicted - measured) / measured:+.1f} %" if measured else "-"
    return (what, form(predicted), form(measured), error)


def _prediction_caption(known: bool, rebalanced: int) -> str:
    if not known:
        return "Nothing to compare: the plan holds no prediction, or the record no steps."
    times = "once" if rebalanced == 1 else f"{rebalanced} times"
    return f"The shares were changed {times} after this prediction." if rebalanced else ""
