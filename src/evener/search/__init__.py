"""Search over machines: many trials of one task with other options, each a run like any other, on unequal nodes."""
