"""Ranks as a grid that divides images by rows and columns: who stands where in it, and how large each one's part is."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from evener.oracle.division.layout import Replica
from evener.records.plan import Plan


def grid_of(shares: Sequence[float], columns: int) -> Replica:
    """Ranks in rows of `columns`, one row after the other: a row's share is that of its ranks, and so is a column's.

    Args:
        shares: of the work, one a rank; as many as fill whole rows.
        columns: ranks side by side.
    """
    rows = (sum(shares[start : start + columns]) for start in range(0, len(shares), columns))
    return Replica(shares=tuple(rows), columns=tuple(sum(shares[column::columns]) for column in range(columns)))


def in_columns(plan: Plan, columns: int) -> Plan:
    """`plan` with the ranks of every replica in rows of `columns`: each has its row's share times its column's.

    Shares that are no such products cannot be: all ranks of a row have the same rows, all of a column the same columns.
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
