"""The search over random networks once more, longer, with shares of zero and columns."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.oracle.division.rules import DivisionName
from support.compare_divided import close, gradient_of_inputs, hold_against, train
from support.random_networks import networks, runs_alone
from support.thread_ranks import together

shares = st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any).map(tuple)
columns = st.sampled_from([(1.0,), (1.0,), (2.0, 1.0)])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("division", ["spatial", "sharded", "filter", "channel", "hybrid"])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    model=networks(),
    rows=st.lists(st.tuples(shares, columns), min_size=1, max_size=2),
    size=st.tuples(st.integers(3, 11), st.integers(3, 11)),
)
def test_any_network_equals_serial_in_any_arrangement(
    division: DivisionName,
    model: nn.Sequential,
    rows: list[tuple[tuple[float, ...], tuple[float, ...]]],
    size: tuple[int, int],
) -> None:
    assume(runs_alone(model, size))
    wide = division == "spatial"
    replicas = tuple(Replica(shares=own, columns=across if wide else (1.0,)) for own, across in rows)
    arrangement = Arrangement(division=division, replicas=replicas)
    expected = train(model.double(), (3, 3, *size), 1e-3)
    samples = [4 - len(rows), 1][: len(rows)]
    parts = together(arrangement.size, lambda group: hold_against(group, expected, arrangement, samples))
    close(gradient_of_inputs(parts, arrangement), expected.input_grads, "gradient of the inputs")
