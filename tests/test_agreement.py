"""Agreement of people, against published examples and an independent implementation."""

import math

import krippendorff
import numpy as np
import pytest

from pbcrl.label.agreement import cohen_kappa, krippendorff_alpha

NAN = math.nan

KRIPPENDORFF_2011 = [  # "Computing Krippendorff's Alpha-Reliability", section C, four observers
    [1, 2, 3, 3, 2, 1, 4, 1, 2, NAN, NAN, NAN],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, NAN, 3],
    [NAN, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, NAN],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, NAN],
]


def test_alpha_is_that_of_krippendorff_s_worked_example():
    assert krippendorff_alpha(KRIPPENDORFF_2011) == pytest.approx(0.743, abs=5e-4)
    interval = krippendorff_alpha(KRIPPENDORFF_2011, distance="interval")
    assert interval == pytest.approx(0.849, abs=5e-4)


def test_alpha_of_a_small_table_by_hand():
    """Two people, four items: 1 1, 1 1, 0 0, 1 0. Coincidences: 1-1 four, 0-0 two, 1-0 two.

    Observed disagreement 2 / 8; expected 2 * 5 * 3 / (8 * 7): alpha is 1 - 0.25 / (30 / 56).
    """
    alpha = krippendorff_alpha([[1, 1, 0, 1], [1, 1, 0, 0]])
    assert alpha == pytest.approx(1 - 0.25 / (30 / 56))


def test_kappa_of_a_table_by_hand():
    """50 items, 20 both yes, 15 both no, 5 and 10 not alike: (0.7 - 0.5) / (1 - 0.5)."""
    first = [1] * 20 + [1] * 5 + [0] * 10 + [0] * 15
    second = [1] * 20 + [0] * 5 + [1] * 10 + [0] * 15
    assert cohen_kappa(first, second) == pytest.approx(0.4)
    assert cohen_kappa([*first, NAN], [*second, 1]) == pytest.approx(0.4)


def test_perfect_agreement_is_1_and_what_chance_gives_is_about_0():
    rng = np.random.default_rng(0)
    ratings = rng.choice([0.0, 0.5, 1.0], 4000)
    for alpha in (
        krippendorff_alpha([ratings, ratings]),
        krippendorff_alpha([ratings, ratings], distance="interval"),
        cohen_kappa(ratings, ratings),
    ):
        assert alpha == pytest.approx(1)
    other = rng.permutation(ratings)
    assert abs(krippendorff_alpha([ratings, other])) < 0.05
    assert abs(cohen_kappa(ratings, other)) < 0.05


def test_where_nothing_can_differ_agreement_is_undefined():
    assert math.isnan(krippendorff_alpha([[1, 1], [1, 1]]))
    assert math.isnan(krippendorff_alpha([[1, NAN], [NAN, 0]]))
    assert math.isnan(cohen_kappa([1, 1], [1, 1]))
    assert math.isnan(cohen_kappa([1, NAN], [NAN, 1]))
    with pytest.raises(ValueError, match=r"shape \(annotators, items\), got \(2,\)"):
        krippendorff_alpha([1, 2])
    with pytest.raises(ValueError, match="both rate the same items"):
        cohen_kappa([1, 2], [1])


@pytest.mark.parametrize("distance", ["nominal", "interval"])
def test_alpha_is_that_of_the_krippendorff_package(distance):
    rng = np.random.default_rng(1)
    for _ in range(20):
        ratings = rng.choice([0.0, 0.5, 1.0, NAN], (rng.integers(2, 6), 30))
        theirs = krippendorff.alpha(ratings, level_of_measurement=distance)
        assert krippendorff_alpha(ratings, distance=distance) == pytest.approx(theirs)
