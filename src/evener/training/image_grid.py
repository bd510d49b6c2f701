"""Ranks as a grid that divides images by rows and columns: the position and part of each rank."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from evener.oracle.division.layout import Replica
from evener.records.plan import Plan


def grid_of(shares: Sequence[float], columns: int) -> Replica:
    """Return the grid of ranks in rows of `columns`; a row's or column's share is the sum over its ranks.

    Args:
        shares: of the work, one a rank; as many as fill whole rows.
        columns: ranks side by side.
    """
    rows = (sum(shares[start : start + columns]) for start in range(0, len(shares), columns))
    return Replica(shares=tuple(rows), columns=tuple(sum(shares[column::columns]) for column in range(columns)))


def in_columns(plan: Plan, columns: int) -> Plan:
    """Return `plan` with the ranks of every replica in rows of `columns`.

    A rank's share is its row's share times its column's: a row has the same image rows, a column the same columns.
    """
    assignments = list(plan.assignments)
    for ranks in plan.replica_ranks:
        grid = grid_of([plan.assignments[rank].share for rank in ranks], columns)
        across, down = sum(grid.columns), sum(grid.shares)
        for place, rank in enumerate(ranks):
            row, column = divmod(place, columns)
            share = grid.shares[row] / down * grid.columns[column] / across
            assignments[rank] = replace(assignments[rank], share=min(share, 1.0))
    return replace(plan, columns=columns, assignments=tuple(assignments))
