"""Reproductions of published experiments: each prints its figures beside the published ones."""
