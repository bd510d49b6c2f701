"""The global random generators of Python and NumPy, which a model or a loss may use beside those of its library."""

from __future__ import annotations

import random

import numpy as np


def global_states() -> tuple[object, ...]:
    """Return the states of both generators; they differ from earlier ones if something has drawn meanwhile."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), np.asarray(keys, dtype=np.uint32).tobytes(), *rest
