import math

import numpy as np
import pytest

from pbcrl.errors import BudgetError, MissingCostError
from pbcrl.oracle import ReplayOracle, SyntheticOracle
from pbcrl.trajectory import Label, Query, Trajectory


def episode(*costs):
    """An episode with these true step costs; `episode()` is one that recorded none."""
    steps = max(len(costs), 1)
    array = np.array(costs) if costs else None
    return Trajectory(np.zeros((steps, 1)), np.zeros((steps, 1)), array)


def query(first, second):
    return Query(episode(first), episode(second))


def rng(seed=0):
    return np.random.default_rng(seed)


# -- Exact labels ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "label"),
    [
        (3, 7, Label(1, 1, 0)),  # the cheaper one is preferred
        (7, 3, Label(0, 0, 1)),
        (4, 4, Label(0.5, 1, 1)),
        (9, 9, Label(0.5, 0, 0)),
        (5, 5.5, Label(1, 1, 0)),  # a cost equal to the limit is safe
        (0, 5, Label(1, 1, 1)),
    ],
)
def test_labels_at_limit_5_follow_from_the_true_costs(first, second, label):
    assert SyntheticOracle(5).label([query(first, second)]) == [label]


def test_an_episode_is_judged_by_its_undiscounted_sum():
    late, early = episode(0, 0, 0, 6), episode(5, 0, 0, 0)
    assert SyntheticOracle(5).label([Query(late, early)]) == [Label(0, 0, 1)]


def test_with_limit_0_only_a_costless_episode_is_safe():
    assert SyntheticOracle(0).label([query(0, 0.001)]) == [Label(1, 1, 0)]


def test_answers_come_in_the_order_of_the_queries_and_are_counted():
    oracle = SyntheticOracle(5)
    labels = oracle.label([query(1, 2), query(2, 1), query(1, 1)])
    assert [label.preference for label in labels] == [1, 0, 0.5]
    assert oracle.queries_used == 3
    assert oracle.label([]) == []
    assert oracle.queries_used == 3


# -- Budget ----------------------------------------------------------------------------------


def test_a_budget_can_be_spent_to_the_last_query_and_no_further():
    oracle = SyntheticOracle(5, budget=3)
    oracle.label([query(1, 2)] * 2)
    with pytest.raises(BudgetError, match=r"budget of 3 queries .* 1 are left, 2 were asked"):
        oracle.label([query(1, 2)] * 2)
    assert oracle.queries_used == 2  # nothing was spent by asking too much
    oracle.label([query(1, 2)])
    assert oracle.queries_used == 3
    with pytest.raises(BudgetError, match="0 are left, 1 were asked; ask fewer, or raise"):
        oracle.label([query(1, 2)])


def test_an_episode_without_costs_is_refused_and_nothing_is_spent():
    oracle = SyntheticOracle(5, budget=2)
    with pytest.raises(MissingCostError, match=r"needs the true cost .* costs=None; record an env"):
        oracle.label([query(1, 2), Query(episode(1), episode())])
    assert oracle.queries_used == 0


# -- Noise -----------------------------------------------------------------------------------


def flips(preference_noise, safety_noise, num=4000):
    """Which labels of `num` queries with the exact answer (1, 1, 0) were flipped, bool (num, 3)."""
    oracle = SyntheticOracle(
        5, preference_noise=preference_noise, safety_noise=safety_noise, rng=rng()
    )
    labels = oracle.label([query(1, 9)] * num)
    rows = np.array([(x.preference, x.first_safe, x.second_safe) for x in labels])
    return rows != [1, 1, 0]


@pytest.mark.parametrize(("preference_noise", "safety_noise"), [(0.3, 0.1), (0.05, 0.3), (0, 0.5)])
def test_each_kind_of_label_is_flipped_at_its_own_rate(preference_noise, safety_noise):
    rates = flips(preference_noise, safety_noise).mean(axis=0)
    expected = np.array([preference_noise, safety_noise, safety_noise])
    four_sigma = 4 * np.sqrt(expected * (1 - expected) / 4000)
    assert (np.abs(rates - expected) <= four_sigma).all()


def test_the_three_labels_of_a_query_are_flipped_independently():
    correlation = np.corrcoef(flips(0.3, 0.3), rowvar=False)
    assert np.abs(correlation[~np.eye(3, dtype=bool)]).max() < 4 / math.sqrt(4000)


def test_certain_noise_inverts_every_label_but_a_tie():
    oracle = SyntheticOracle(5, preference_noise=1, safety_noise=1, rng=rng())
    assert oracle.label([query(1, 9), query(4, 4)]) == [Label(0, 0, 1), Label(0.5, 0, 0)]


def test_the_same_seed_gives_the_same_noise():
    queries = [query(1, 9)] * 50
    first, second, other = (
        SyntheticOracle(5, preference_noise=0.5, rng=rng(seed)).label(queries) for seed in (1, 1, 2)
    )
    assert first == second != other


def test_noise_without_a_generator_is_refused():
    with pytest.raises(
        ValueError, match=r"label noise is random: pass rng=np\.random\.default_rng"
    ):
        SyntheticOracle(5, safety_noise=0.1)


def test_a_refused_batch_leaves_the_stream_of_noise_where_it_was():
    refused, fresh = (SyntheticOracle(5, preference_noise=0.5, rng=rng()) for _ in range(2))
    with pytest.raises(MissingCostError):
        refused.label([query(1, 9)] * 7 + [Query(episode(1), episode())])
    queries = [query(1, 9)] * 50
    assert refused.label(queries) == fresh.label(queries)


# -- Arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [-1, math.nan, math.inf])
def test_a_limit_that_no_episode_cost_can_be_compared_with_is_refused(limit):
    with pytest.raises(ValueError, match=f"must be finite and >= 0, got {limit}; it is the hig"):
        SyntheticOracle(limit)


@pytest.mark.parametrize("noise", [-0.1, 1.1, math.nan])
def test_a_noise_that_is_no_probability_is_refused_by_name(noise):
    with pytest.raises(ValueError, match=f"preference_noise is a probability, got {noise}"):
        SyntheticOracle(5, preference_noise=noise, rng=rng())
    with pytest.raises(ValueError, match=f"safety_noise is a probability, got {noise}"):
        SyntheticOracle(5, safety_noise=noise, rng=rng())


def test_a_negative_budget_is_refused():
    with pytest.raises(ValueError, match="budget must be >= 0, got -1; None is no bound"):
        SyntheticOracle(5, budget=-1)


# -- Replay ----------------------------------------------------------------------------------


def test_a_replay_gives_the_recorded_labels_in_order_whatever_the_trajectories():
    recorded = [Label(1, 1, 0), Label(0, 0, 0), Label(0.5, 1, 1)]
    oracle = ReplayOracle(recorded)
    assert oracle.label([query(9, 9), Query(episode(), episode())]) == recorded[:2]
    assert oracle.queries_used == 2
    assert oracle.label([query(0, 0)]) == recorded[2:]


def test_a_replay_that_runs_out_refuses_and_spends_nothing():
    oracle = ReplayOracle([Label(1, 1, 0), Label(0, 0, 0)])
    oracle.label([query(1, 2)])
    with pytest.raises(BudgetError, match="2 labels, 3 queries; repeat the run with the arguments"):
        oracle.label([query(1, 2)] * 2)
    assert oracle.queries_used == 1
    assert oracle.label([query(1, 2)]) == [Label(0, 0, 0)]


def test_a_replay_keeps_its_labels_when_the_given_list_changes():
    recorded = [Label(1, 1, 0)]
    oracle = ReplayOracle(recorded)
    recorded.clear()
    assert oracle.label([query(1, 2)]) == [Label(1, 1, 0)]
