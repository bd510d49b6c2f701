"""Images divided by rows and columns: the grid of ranks, and that it trains what one process trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from evener.commands.train import perform
from evener.config.run_config import RunConfig
from evener.oracle.division.layout import Replica
from evener.records.errors import EvenerError, InvalidInput
from evener.records.plan import Assignment, Plan
from evener.training.image_grid import grid_of, in_columns
from support.commands import TINY
from support.refusals import refused


def test_grid_rows_and_columns_sum_the_shares_of_their_ranks() -> None:
    assert grid_of((3, 1, 2, 2), 2) == Replica(shares=(4, 4), columns=(5, 3))
    assert grid_of((2, 1), 1) == Replica(shares=(2, 1), columns=(3,))
    assert grid_of((2, 1, 0), 3) == Replica(shares=(3,), columns=(2, 1, 0))


def test_plan_shares_are_products_of_row_and_column_shares() -> None:
    shares = (0.375, 0.125, 0.25, 0.25)
    one = Plan(
        strategy="spatial",
        batch_size=6,
        assignments=tuple(
            Assignment(rank=rank, node=f"node-{rank}", device="cpu", samples=6, replica=0, share=share)
            for rank, share in enumerate(shares)
        ),
    )
    plan = in_columns(one, 2)
    assert plan.columns == 2
    assert [a.share for a in plan.assignments] == [0.3125, 0.1875, 0.3125, 0.1875]
    assert in_columns(plan, 2) == plan


def test_columns_require_the_spatial_strategy() -> None:
    with refused(InvalidInput):
        RunConfig(task="digits", strategy="filter", columns=2)
    with refused(InvalidInput):
        RunConfig(task="digits", columns=2)
    with refused(InvalidInput):
        RunConfig(task="digits", strategy="spatial", columns=2, elastic=True)
    with refused(InvalidInput):
        RunConfig(task="digits", strategy="spatial", columns=0)


@pytest.mark.slow
def test_nodes_must_fill_whole_rows(tmp_path: Path) -> None:
    config = RunConfig(task=TINY, strategy="spatial", columns=2, local_nodes="1,1,1", output=tmp_path / "run")
    with refused(EvenerError):
        perform(config, quiet=True)


VOLUMES = {"image": "1x5x7x4", "samples": "24", "width": "3", "depth": "1", "classes": "3"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "columns", "shares", "strategy"),
    [("1,1,1", 1, "3,0,2", "spatial"), ("1,1,1,1", 2, "3,1,2,2", "spatial"), ("1,1,1", 1, "3,1,2", "filter")],
)
def test_divided_volumes_equal_one_process(
    tmp_path: Path, nodes: str, columns: int, shares: str, strategy: str
) -> None:
    settings = RunConfig(
        task="synthetic", option=VOLUMES, batch_size=6, epochs=1,
        precision="fp64", seed=3, local_nodes="1", output=tmp_path / "alone",
    )  # fmt: skip
    perform(settings, quiet=True)
    divided = replace(settings, strategy=strategy, columns=columns, shares=shares, local_nodes=nodes)
    perform(replace(divided, output=tmp_path / "divided"), quiet=True)
    assert_same_weights(tmp_path / "alone", tmp_path / "divided")


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "columns", "shares"), [("1,1", 2, "2,1"), ("1,1,1,1", 2, "3,1,2,2")])
def test_grid_of_ranks_equals_one_process(tmp_path: Path, nodes: str, columns: int, shares: str) -> None:
    alone = RunConfig(task=TINY, precision="fp64", seed=3, local_nodes="1", output=tmp_path / "alone")
    perform(alone, quiet=True)
    grid = replace(
        alone, strategy="spatial", columns=columns, shares=shares, local_nodes=nodes, output=tmp_path / "grid"
    )
    record = perform(grid, quiet=True)
    assert record.plan.columns == columns
    assert record.plan.check is not None
    assert_same_weights(tmp_path / "alone", tmp_path / "grid")


def assert_same_weights(alone: Path, divided: Path) -> None:
    one, other = (load_file(folder / "model.safetensors") for folder in (alone, divided))
    assert one.keys() == other.keys()
    assert max(float((one[name].double() - other[name].double()).abs().max()) for name in one) < 1e-10
