"""What NfNN's authors measured in a data centre (A10), by (mode, workers)."""

from __future__ import annotations

SECONDS = {
    ("sync", 1): 230.0,
    ("sync", 2): 230.0,
    ("sync", 3): 230.0,
    ("async", 1): 229.0,
    ("async", 2): 114.0,
    ("async", 3): 74.0,
}
"""Of 5000 updates."""

ACCURACY = {
    ("sync", 1): 0.8369,
    ("sync", 2): 0.8711,
    ("sync", 3): 0.8850,
    ("async", 1): 0.8369,
    ("async", 2): 0.8361,
    ("async", 3): 0.8380,
}
"""On the validation data, after 5000 updates."""

BYTES = 509_000_000
"""Each way and worker in 5000 updates of its own: 25 450 parameters of 4 bytes."""

UPDATES = 5000
