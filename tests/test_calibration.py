import math

import numpy as np
import pytest
from scipy.optimize import minimize

from pbcrl.calibration import calibrate_limit
from pbcrl.errors import LabelError

NAN = math.nan


def labelled(size=300, *, scale=0.5, limit=7.0, seed=0):
    """Costs, and labels that are safe with probability σ(-scale (cost - limit))."""
    rng = np.random.default_rng(seed)
    cost = rng.gamma(3.0, 3.0, size)
    return cost, (rng.random(size) > 1 / (1 + np.exp(-scale * (cost - limit)))).astype(float)


def test_one_safe_episode_at_0_and_one_unsafe_at_1():
    """Smoothed, they are unsafe with probability 1/3 and 2/3: a b = a (1 - b) = ln 2."""
    assert calibrate_limit([0, 1], [1, 0]) == pytest.approx((2 * math.log(2), 0.5))


def test_two_costs_are_fitted_exactly_even_if_a_limit_separates_their_labels():
    """Three safe at 2 and two unsafe at 4: probabilities 1/5 and 3/4, logits -ln 4 and ln 3."""
    scale, limit = calibrate_limit([2, 2, 4, 2, 4], [1, 1, 0, 1, 0])
    assert scale == pytest.approx((math.log(3) + math.log(4)) / 2)
    assert limit == pytest.approx(2 + math.log(4) / scale)


@pytest.mark.parametrize("newest", [False, True])
def test_it_is_the_minimum_that_a_general_optimiser_finds(newest):
    cost, safe = labelled()
    weights = np.linspace(0.1, 2.0, len(cost)) if newest else np.ones(len(cost))
    unsafe, m, n = 1 - safe, weights @ safe, weights @ (1 - safe)
    target = np.where(unsafe == 1, (n + 1) / (n + 2), 1 / (m + 2))

    def loss(parameters):
        p = 1 / (1 + np.exp(-parameters[0] * (cost - parameters[1])))
        return -weights @ (target * np.log(p) + (1 - target) * np.log(1 - p))

    found = minimize(loss, [1.0, cost.mean()], method="Nelder-Mead", options={"xatol": 1e-9})
    assert calibrate_limit(cost, safe, weights=weights) == pytest.approx(found.x, rel=1e-4)


def test_many_labels_give_the_scale_and_the_limit_that_they_were_made_with():
    scale, limit = calibrate_limit(*labelled(40_000))
    assert scale == pytest.approx(0.5, rel=0.05)
    assert limit == pytest.approx(7.0, abs=0.1)


def test_a_weight_of_2_is_a_label_seen_twice_and_no_label_or_weight_is_none():
    cost, safe = labelled(30)
    twice = calibrate_limit(np.tile(cost, 2), np.tile(safe, 2))
    assert calibrate_limit(cost, safe, weights=np.full(30, 2.0)) == pytest.approx(twice)
    more = np.append(cost, [1e6, -1e6]), np.append(safe, [NAN, 1.0])
    weights = np.append(np.ones(30), [1.0, 0.0])
    assert calibrate_limit(*more, weights=weights) == calibrate_limit(cost, safe)


def test_the_newest_labels_move_the_limit_to_where_they_lie():
    """Old labels say 2, as many new ones say 6: the limit follows the weights."""
    cost = np.tile(np.arange(9.0), 2)
    safe = np.concatenate([np.arange(9) <= 2, np.arange(9) <= 6]).astype(float)
    even, new = (
        calibrate_limit(cost, safe, weights=np.repeat([old, 1.0], 9)).limit for old in (1.0, 0.05)
    )
    assert even == pytest.approx(4.5, abs=0.1)
    assert 6 < new < 7


@pytest.mark.parametrize(("factor", "shift"), [(1e-6, 0.0), (1e6, 0.0), (1.0, 1e4)])
def test_the_limit_moves_with_the_unit_and_the_origin_of_the_costs(factor, shift):
    cost, safe = labelled()
    scale, limit = calibrate_limit(cost, safe)
    moved = calibrate_limit(factor * cost + shift, safe)
    assert moved == pytest.approx((scale / factor, factor * limit + shift), rel=1e-6)


def test_a_limit_far_outside_the_costs_is_found_too():
    cost = np.concatenate([np.linspace(0, 1, 500), [1.5]])
    found = calibrate_limit(cost, np.append(np.ones(500), 0.0))
    assert found.scale > 0
    assert found.limit > 1


@pytest.mark.parametrize(
    ("safe", "message"),
    [
        ([1, 1, 1], "got 3 safe and 0 unsafe; label more"),
        ([0, 0, NAN], "got 0 safe and 2 unsafe"),
        ([NAN] * 3, "got 0 safe and 0 unsafe"),
        ([0, 1, 1], "unsafe episodes should cost more, .* slope is -"),
    ],
)
def test_labels_without_a_limit_are_refused(safe, message):
    with pytest.raises(LabelError, match=message):
        calibrate_limit([1.0, 2.0, 3.0], safe)


def test_equal_costs_have_no_limit_between_them():
    with pytest.raises(LabelError, match="slope is 0 per standard deviation"):
        calibrate_limit([2.0, 2.0], [0, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 2.0], [1.0]), r"the shapes \(2,\), \(1,\) and \(2,\)"),
        (([[1.0]], [[1.0]]), r"one cost, one label and one weight: got the shapes \(1, 1\)"),
        (([1.0, NAN], [1, 0]), "must be finite"),
        (([1.0, 2.0], [1, 0.5]), r"1 \(safe\), 0 \(unsafe\) or NaN \(none\), got 0\.5"),
    ],
)
def test_what_is_no_cost_and_no_label_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        calibrate_limit(*arguments)
    with pytest.raises(ValueError, match="weights >= 0"):
        calibrate_limit([1.0, 2.0], [1, 0], weights=[1, -1])
