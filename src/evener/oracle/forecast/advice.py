"""From an outlook to what the user is told, in at most two sentences, and to the Plan that training performs."""

from __future__ import annotations

from evener.oracle.forecast.quote import Quote
from evener.oracle.forecast.search import LEARNS_OTHERWISE, Outlook
from evener.plan import Assignment, Plan, Prediction, Rejected

_MUCH = 1.1
"""Local steps are advised from this many times the speed of what learns exactly alike on."""


def advice(outlook: Outlook) -> str:
    """What to do and why; if it pays, what else would be faster and at which price."""
    sentences = [_first(outlook)]
    other = next((quote for quote in outlook.ranked if quote.strategy == "averaging"), None)
    if other is not None and outlook.best.step_seconds > _MUCH * other.step_seconds:
        sentences.append(_second(outlook, other))
    return " ".join(sentences)


def plan_of(outlook: Outlook, quote: Quote | None = None) -> Plan:
    """The plan of `quote`, by default the best one's, with what was rejected for it."""
    quote, scenario = quote or outlook.best, outlook.scenario
    fastest = min(scenario.workers[device].unit_seconds for device in quote.devices)
    names = [layer.name for layer in scenario.job.graph.layers]
    pipelined = bool(quote.stages)
    assignments = tuple(
        Assignment(
            rank=rank,
            node=scenario.profile.devices[device].node,
            device=scenario.profile.devices[device].device,
            samples=quote.samples[rank],
            fixed_seconds=scenario.workers[device].fixed_seconds,
            sample_seconds=scenario.workers[device].unit_seconds,
            reason=f"speed {fastest / scenario.workers[device].unit_seconds:.2f} of the fastest",
            replica=quote.replicas[rank],
            share=quote.shares[rank],
            stage=rank % len(quote.stages) if pipelined else 0,
            first_layer=names[quote.stages[rank % len(quote.stages)]] if pipelined else "",
            memory_bytes=quote.memory_bytes[rank],
        )
        for rank, device in enumerate(quote.devices)
    )
    return Plan(
        strategy=quote.strategy,
        batch_size=scenario.job.batch_size,
        accumulate=quote.accumulate,
        assignments=assignments,
        prediction=_prediction(outlook, quote),
        rejected=(*_slower(outlook, quote), *outlook.rejected),
        local_steps=quote.local_steps,
        advice=advice(outlook),
    )


def _prediction(outlook: Outlook, quote: Quote) -> Prediction:
    return Prediction(
        step_seconds=quote.step_seconds,
        compute_seconds=quote.compute_seconds,
        communication_seconds=quote.communication_seconds,
        sent_bytes=quote.sent_bytes,
        alone_seconds=outlook.alone.step_seconds if outlook.alone else None,
        waiting_seconds=quote.waiting_seconds,
        bottleneck=quote.bottleneck,
    )


def _slower(outlook: Outlook, quote: Quote) -> list[Rejected]:
    """The other strategies, with what they would take."""
    return [
        Rejected(
            what=_name(other),
            reason=_why_not(other, quote),
            step_seconds=other.step_seconds,
        )
        for other in outlook.ranked
        if other is not quote
    ]


def _why_not(other: Quote, quote: Quote) -> str:
    if other.step_seconds < quote.step_seconds and other.strategy in LEARNS_OTHERWISE:
        return "does not give what one process would"
    return f"slower: {other.bottleneck}"


def _name(quote: Quote) -> str:
    if quote.local_steps > 1:
        return f"{quote.strategy} after every {quote.local_steps} steps"
    return quote.strategy


def _first(outlook: Outlook) -> str:
    best, scenario = outlook.best, outlook.scenario
    if len(best.devices) == 1:
        name = scenario.name(best.devices[0])
        if scenario.size == 1:
            return f"Train on {name}."
        return f"Train on {name} alone: {_next_best(outlook)}."
    speed = outlook.speedup(best)
    gain = f"{speed:.2g}x the best single device" if speed else "no single device could hold the job"
    devices = f"{len(best.devices)} of {scenario.size} devices"
    return f"Use {best.strategy} on {devices}: {gain}; the limit is {best.bottleneck}."


def _next_best(outlook: Outlook) -> str:
    """Why more devices do not pay: the best of them and what it spends its time on."""
    others = [q for q in outlook.ranked if len(q.devices) > 1 and q.strategy not in LEARNS_OTHERWISE]
    if not others:
        return "nothing else fits the memory"
    speed = outlook.speedup(others[0])
    return (
        f"{others[0].strategy} on {len(others[0].devices)} devices is {speed:.2g}x, because of {others[0].bottleneck}"
    )


def _second(outlook: Outlook, other: Quote) -> str:
    speed = outlook.speedup(other)
    gain = f"{speed:.2g}x" if speed else f"{outlook.best.step_seconds / other.step_seconds:.2g}x that speed"
    return (
        f"Averaging after every {other.local_steps} local steps is {gain} on {len(other.devices)} devices: "
        "use it if the result may differ a little from that of one process."
    )
