"""Whatever network hypothesis draws: any division of it gives what one process gives, with the bytes predicted."""

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

Layers = list[nn.Module]


replicas = st.builds(lambda shares: Replica(shares=tuple(shares)), st.lists(st.integers(1, 5), min_size=1, max_size=3))


@pytest.mark.parametrize("division", ["spatial", "sharded", "filter", "channel"])
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(model=networks(), ranks=st.lists(replicas, min_size=1, max_size=2), size=st.tuples(*[st.integers(5, 9)] * 2))
def test_any_network_equals_serial_in_any_arrangement(
    division: DivisionName, model: nn.Sequential, ranks: list[Replica], size: tuple[int, int]
) -> None:
    assume(runs_alone(model, size))
    arrangement = Arrangement(division=division, replicas=tuple(ranks))
    expected = train(model.double(), (3, 3, *size), 1e-3)
    samples = [4 - len(ranks), 1][: len(ranks)]
    parts = together(arrangement.size, lambda group: hold_against(group, expected, arrangement, samples))
    close(gradient_of_inputs(parts, arrangement), expected.input_grads, "gradient of the inputs")
