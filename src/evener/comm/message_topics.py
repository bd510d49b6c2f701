"""Topics of the messages between ranks: a rank that receives another topic than it expects raises `OutOfStep`.

Without them, ranks whose collectives differ (one skips a layer, a `backward()`, or the rest of an epoch) would wait for
each other for ever.
"""

from __future__ import annotations

from evener.records.errors import OutOfStep

NEXT_BATCH = "the next batch"
END = "the end of the program"
_EPOCH, _GRADIENTS, _STATISTICS = "the start of epoch ", "the gradients of step ", "the batch statistics of "
_ANOTHER = "another call"
_LONGEST = 250


def epoch(index: int) -> str:
    """The topic of the start of epoch `index`, from 0."""
    return f"{_EPOCH}{index + 1}"


def gradients(step: int) -> str:
    """The topic of the mean gradients of a step."""
    return f"{_GRADIENTS}{step}"


def statistics(layer: str) -> str:
    """The topic of the mean and variance of a normalisation layer."""
    return f"{_STATISTICS}{layer or 'the model'}"


def framed(topic: str, message: bytes) -> bytes:
    """Return `message` with its topic in front."""
    name = topic.encode()[:_LONGEST]
    return bytes([len(name)]) + name + message


def unframed(data: bytes) -> tuple[str, bytes]:
    """Return (topic, message)."""
    begin = 1 + data[0]
    return data[1:begin].decode(errors="replace"), data[begin:]


def out_of_step(node: str, topic: str, other_node: str, other_topic: str) -> OutOfStep:
    """Return the error of two nodes that wait for different calls.

    Args:
        node: that waits.
        topic: that it waits for.
        other_node: that sent something else.
        other_topic: that it sent.
    """
    topics = (topic or _ANOTHER, other_topic or _ANOTHER)
    return OutOfStep({node: topics[0], other_node: topics[1]}, _advice(topics))


def _advice(topics: tuple[str, str]) -> str:
    if any(topic == END or topic.startswith(_EPOCH) for topic in topics):
        return (
            "the nodes left the loop at different steps: decide by a value that all nodes have, such as run.mean(loss)"
        )
    if any(topic.startswith(_STATISTICS) for topic in topics):
        return (
            "which layers are computed depends on one node's samples or random numbers: decide by a value that all "
            "nodes have, such as run.mean(loss), or draw from a torch.Generator that is seeded alike on all nodes"
        )
    return (
        "all nodes must call backward() and the functions of the run equally often: decide by a value that all nodes "
        "have, such as run.mean(loss), not by one node's loss, its samples or what it keeps of them"
    )
