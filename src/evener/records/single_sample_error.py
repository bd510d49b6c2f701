"""Batches of one sample: BatchNorm has no statistics of them, and PyTorch's error does not say what to do."""

from __future__ import annotations

_MESSAGES = (
    "Expected more than 1 value per channel",  # of PyTorch
    "BatchNorm needs more than one value per channel",  # of ranks that share a batch
    "batch_norm needs more than one value a channel",  # of the thin engine
)


def is_of_lone_sample(sentence: str) -> bool:
    """Return whether an error says that a BatchNorm cannot take statistics of one sample."""
    return any(message in sentence for message in _MESSAGES)


def lone_sample_sentence(place: str) -> str:
    """Return the sentence for the user when a BatchNorm got one sample; `place` says where in the program."""
    return (
        f"BatchNorm got a batch or micro-batch of one sample in training, and cannot take statistics of it{place}: "
        "leave such batches out (drop_last=True of a loader), take another batch size, or fewer micro-batches"
    )


def better_size(samples: int, batch_size: int, parts: int = 1) -> str:
    """Suggest a batch size near `batch_size` that leaves no lone sample; empty if there is none."""
    near = sorted(range(2, min(samples, 2 * batch_size) + 1), key=lambda size: abs(size - batch_size))
    for size in near:
        if all(count // parts > 1 for count in (size, samples % size) if count):
            return f", such as {size}"
    return ""
