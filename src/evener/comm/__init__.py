"""Ranks that work together: their process group, what they send (counted), and how their steps are timed."""
