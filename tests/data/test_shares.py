"""Shares of a data set: nothing lost or doubled, sizes in proportion, and every share with the classes of the whole."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evener.data.shares import class_balanced_shares
from evener.records.errors import InvalidValue
from support.refusals import refused

LABELS = st.lists(st.integers(0, 5), max_size=80).map(lambda labels: np.array(labels, np.int64))
WEIGHTS = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


@given(labels=LABELS, weights=WEIGHTS, seed=st.integers(0, 2**32))
def test_every_sample_goes_to_exactly_one_node(labels: np.ndarray, weights: list[int], seed: int) -> None:
    shares = class_balanced_shares(labels, weights, seed)
    assert len(shares) == len(weights)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(labels)))
    for share in shares:
        assert share.dtype == np.int64
        assert share.tolist() == sorted(share.tolist())


@given(labels=LABELS, weights=WEIGHTS, seed=st.integers(0, 2**32))
def test_sizes_and_class_counts_are_within_one_of_proportional(
    labels: np.ndarray, weights: list[int], seed: int
) -> None:
    for share, weight in zip(class_balanced_shares(labels, weights, seed), weights, strict=True):
        part = Fraction(weight, sum(weights))
        assert len(share) in (math.floor(len(labels) * part), math.ceil(len(labels) * part))
        for label in np.unique(labels):
            exact = int((labels == label).sum()) * part
            assert (labels[share] == label).sum() in (math.floor(exact), math.ceil(exact))


def test_rare_classes_are_dealt_so_that_sizes_stay_equal() -> None:
    shares = class_balanced_shares(np.arange(12), [1, 1, 1, 1, 1, 1], seed=0)
    assert [len(share) for share in shares] == [2] * 6


def test_uneven_nodes_get_the_same_mix_of_classes() -> None:
    labels = np.array([0] * 100 + [1] * 40 + [2] * 20)
    shares = class_balanced_shares(labels, [4, 1, 0, 5], seed=3)
    assert [np.bincount(labels[share], minlength=3).tolist() for share in shares] == [
        [40, 16, 8],
        [10, 4, 2],
        [0, 0, 0],
        [50, 20, 10],
    ]


def test_seed_decides_which_samples_a_node_gets_but_not_how_many() -> None:
    labels = np.random.default_rng(0).integers(0, 7, 500)
    first, again, other = (class_balanced_shares(labels, [2, 3], seed) for seed in (1, 1, 2))
    assert [share.tolist() for share in first] == [share.tolist() for share in again]
    assert [share.tolist() for share in first] != [share.tolist() for share in other]
    assert [len(share) for share in first] == [len(share) for share in other]


def test_share_is_a_random_choice_within_each_class() -> None:
    share = class_balanced_shares(np.zeros(1000, np.int64), [1, 1], seed=0)[0]
    assert 200 < (share < 500).sum() < 300


def test_labels_can_be_of_any_sortable_type() -> None:
    shares = class_balanced_shares(np.array(["cat", "dog", "cat", "dog"]), [1, 1], seed=0)
    assert [sorted(index % 2 for index in share) for share in shares] == [[0, 1], [0, 1]]


def test_labels_must_be_one_for_each_sample() -> None:
    with refused(InvalidValue):
        class_balanced_shares(np.zeros((3, 2)), [1], seed=0)


def test_weights_without_a_positive_value_are_refused() -> None:
    with refused(InvalidValue):
        class_balanced_shares(np.zeros(3), [0, 0], seed=0)
