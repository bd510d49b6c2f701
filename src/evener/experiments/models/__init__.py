"""Models that no library has, or not in the shape needed here: ordinary modules that know nothing of Evener."""
