import math

import numpy as np
import pytest

from pbcrl.errors import BudgetError, MissingCostError, UnsupportedError
from pbcrl.label.function_oracle import FunctionOracle
from pbcrl.oracle import (
    TEACHERS,
    DelayedOracle,
    SyntheticOracle,
    Teacher,
    make_teacher,
    num_queries,
)
from pbcrl.trajectory import BatchLabel, GridLabel, Label, Query, Trajectory


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
    teacher = Teacher(preference_noise=preference_noise, safety_noise=safety_noise)
    oracle = SyntheticOracle(5, teacher=teacher, rng=rng())
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
    teacher = Teacher(preference_noise=1, safety_noise=1)
    oracle = SyntheticOracle(5, teacher=teacher, rng=rng())
    assert oracle.label([query(1, 9), query(4, 4)]) == [Label(0, 0, 1), Label(0.5, 0, 0)]


def test_the_same_seed_gives_the_same_noise():
    queries = [query(1, 9)] * 50
    first, second, other = (
        SyntheticOracle(5, teacher=Teacher(preference_noise=0.5), rng=rng(seed)).label(queries)
        for seed in (1, 1, 2)
    )
    assert first == second != other


def test_noise_without_a_generator_is_refused():
    with pytest.raises(
        ValueError, match=r"label noise is random: pass rng=np\.random\.default_rng"
    ):
        SyntheticOracle(5, teacher=Teacher(safety_noise=0.1))


def test_a_refused_batch_leaves_the_stream_of_noise_where_it_was():
    slips = Teacher(preference_noise=0.5)
    refused, fresh = (SyntheticOracle(5, teacher=slips, rng=rng()) for _ in range(2))
    with pytest.raises(MissingCostError):
        refused.label([query(1, 9)] * 7 + [Query(episode(1), episode())])
    queries = [query(1, 9)] * 50
    assert refused.label(queries) == fresh.label(queries)


# -- Teachers --------------------------------------------------------------------------------


def label(teacher, first, second):
    """The answer of a teacher without chance to two episodes with these step costs, at limit 5."""
    return SyntheticOracle(5, teacher=teacher).label([Query(episode(*first), episode(*second))])[0]


def shares(teacher, first, second, num=4000):
    """Share of 1 among `num` answers: preference, first safe, second safe."""
    oracle = SyntheticOracle(5, teacher=teacher, rng=rng())
    labels = oracle.label([query(first, second)] * num)
    return np.mean([(x.preference, x.first_safe, x.second_safe) for x in labels], axis=0)


def test_a_boltzmann_teacher_prefers_by_the_logistic_function_of_the_cost_difference():
    """At beta = ln 3 / 2 a difference of 2 is told right 3 times in 4; so is a distance to d."""
    teacher = Teacher(beta=math.log(3) / 2)
    preference, first_safe, second_safe = shares(teacher, 3, 5)
    four_sigma = 4 * math.sqrt(0.25 * 0.75 / 4000)
    assert preference == pytest.approx(0.75, abs=four_sigma)
    assert first_safe == pytest.approx(0.75, abs=four_sigma)
    assert second_safe == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 4000))


def test_infinite_rationality_is_the_exact_teacher():
    rational = SyntheticOracle(5, teacher=Teacher(beta=1e6), rng=rng())
    queries = [query(a, b) for a in range(10) for b in range(10) if a != 5 != b]
    assert rational.label(queries) == SyntheticOracle(5).label(queries)


def test_a_huge_cost_does_not_overflow_a_boltzmann_teacher():
    oracle = SyntheticOracle(5, teacher=Teacher(beta=10.0), rng=rng())
    assert oracle.label([query(0, 1e9), query(1e9, 0)]) == [Label(1, 1, 0), Label(0, 0, 1)]


def test_a_skipping_teacher_gives_no_answer_when_neither_is_any_good():
    skips = Teacher(skip_above=8)
    answer = label(skips, [9], [8.5])
    assert np.isnan([answer.preference, answer.first_safe, answer.second_safe]).all()
    assert label(skips, [9], [8]) == Label(0, 0, 0)  # the bound itself is still good enough
    assert label(skips, [1], [20]) == Label(1, 1, 0)


def test_a_skipped_query_has_been_paid_for():
    oracle = SyntheticOracle(5, budget=1, teacher=Teacher(skip_above=0))
    oracle.label([query(1, 2)])
    assert oracle.queries_used == 1
    with pytest.raises(BudgetError):
        oracle.label([query(1, 2)])


def test_costs_within_the_equal_margin_are_a_tie_and_their_safety_is_judged_all_the_same():
    equal = Teacher(equal_margin=2)
    assert label(equal, [4], [6]) == Label(0.5, 1, 0)
    assert label(equal, [3], [6]) == Label(1, 1, 0)


def test_a_myopic_teacher_remembers_the_end_best_but_judges_safety_by_the_whole():
    """With γ = 1/2 costs of 8 first and 3 last weigh 8/4 = 2 and 3."""
    early, late = [8, 0, 0], [0, 0, 3]
    assert label(Teacher(discount=0.5), early, late) == Label(1, 0, 1)
    assert label(Teacher(), early, late) == Label(0, 0, 1)


def test_a_myopic_teacher_skips_and_ties_by_what_is_remembered():
    teacher = Teacher(discount=0.5, equal_margin=0.25, skip_above=4)
    assert label(teacher, [8, 0], [0, 4]) == Label(0.5, 0, 1)
    assert math.isnan(label(teacher, [8, 1], [0, 5]).preference)


@pytest.mark.parametrize(
    ("name", "teacher"),
    [
        ("perfect", Teacher()),
        ("beta", Teacher(beta=0.6)),
        ("mistake", Teacher(preference_noise=0.1, safety_noise=0.1)),
        ("skip", Teacher(skip_above=10)),
        ("equal", Teacher(equal_margin=2.5)),
        ("myopic", Teacher(discount=0.95)),
    ],
)
def test_the_margins_of_the_named_teachers_scale_with_the_cost_once(name, teacher):
    assert make_teacher(name, cost_scale=5, horizon=100) == teacher


def test_every_teacher_has_a_name_and_no_other_is_accepted():
    assert len({make_teacher(name, cost_scale=5, horizon=100) for name in TEACHERS}) == 6
    with pytest.raises(ValueError, match=r"one of perfect, beta, .* got 'lazy'"):
        make_teacher("lazy", cost_scale=5, horizon=100)


def test_with_limit_0_a_margin_needs_another_scale_and_a_memory_does_not():
    for name in ("beta", "skip", "equal"):
        with pytest.raises(ValueError, match=f"'{name}' need .* scale > 0, got 0; .* standard dev"):
            make_teacher(name, cost_scale=0, horizon=100)
    assert make_teacher("myopic", cost_scale=0, horizon=1000).discount == 0.995


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0}, "beta > 0 .* got 0 and 1.0"),
        ({"beta": math.nan}, "beta > 0"),
        ({"discount": 1.5}, r"discount in \(0, 1\], got inf and 1.5"),
        ({"discount": 0}, "discount"),
        ({"skip_above": -1}, "skip_above is a true episode cost and must be >= 0, got -1"),
        ({"equal_margin": math.nan}, "equal_margin .* got nan"),
    ],
)
def test_a_teacher_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Teacher(**options)


# -- Submit and collect ----------------------------------------------------------------------


def test_what_is_submitted_is_collected_once_under_its_number():
    oracle = SyntheticOracle(5)
    first = oracle.submit([query(1, 2), query(2, 1)])
    second = oracle.submit([query(3, 7)])
    assert oracle.queries_used == 3
    assert len({*first, *second}) == 3
    assert oracle.collect() == {
        first[0]: Label(1, 1, 1),
        first[1]: Label(0, 1, 1),
        second[0]: Label(1, 1, 0),
    }
    assert oracle.collect() == {}


def test_numbers_stay_different_when_queries_are_labelled_in_between():
    oracle = SyntheticOracle(5)
    (first,) = oracle.submit([query(1, 2)])
    oracle.label([query(2, 1)])
    (second,) = oracle.submit([query(2, 1)])
    assert oracle.collect() == {first: Label(1, 1, 1), second: Label(0, 1, 1)}


def test_a_delayed_answer_comes_that_many_collects_late():
    oracle = DelayedOracle(SyntheticOracle(5), rounds=2)
    (number,) = oracle.submit([query(1, 2)])
    assert [oracle.collect() for _ in range(4)] == [{}, {}, {number: Label(1, 1, 1)}, {}]
    assert oracle.label([query(2, 1)]) == [Label(0, 1, 1)]
    assert oracle.queries_used == 2


def test_a_negative_delay_is_refused():
    with pytest.raises(ValueError, match="must be >= 0, got -1"):
        DelayedOracle(SyntheticOracle(5), rounds=-1)


# -- Arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [-1, math.nan, math.inf])
def test_a_limit_that_no_episode_cost_can_be_compared_with_is_refused(limit):
    with pytest.raises(ValueError, match=f"must be finite and >= 0, got {limit}; it is the hig"):
        SyntheticOracle(limit)


@pytest.mark.parametrize("noise", [-0.1, 1.1, math.nan])
def test_a_noise_that_is_no_probability_is_refused_by_name(noise):
    with pytest.raises(ValueError, match=f"preference_noise is a probability, got {noise}"):
        Teacher(preference_noise=noise)
    with pytest.raises(ValueError, match=f"safety_noise is a probability, got {noise}"):
        Teacher(safety_noise=noise)


def test_a_negative_budget_is_refused():
    with pytest.raises(ValueError, match="budget must be >= 0, got -1; None is no bound"):
        SyntheticOracle(5, budget=-1)


# -- Going on --------------------------------------------------------------------------------


def noisy_and_late():
    teacher = Teacher(preference_noise=0.3, safety_noise=0.3)
    return DelayedOracle(SyntheticOracle(5, teacher=teacher, budget=60, rng=rng(1)), rounds=2)


def test_an_oracle_goes_on_where_another_was_with_answers_under_way():
    def ask(oracle, rounds):
        found = []
        for i in rounds:
            oracle.submit([query(i, 7)] * 3)
            found.append(oracle.collect())
        return found

    whole, before, after = noisy_and_late(), noisy_and_late(), noisy_and_late()
    expected = ask(whole, range(12))
    found = ask(before, range(5))
    after.load_state_dict(before.state_dict())
    found += ask(after, range(5, 12))
    assert found == expected
    assert after.queries_used == whole.queries_used == 36


# -- Batches ---------------------------------------------------------------------------------


def batch(*costs):
    return [episode(cost) for cost in costs]


def judged(oracle, *costs):
    """What an oracle says of a batch: 1, 0 or NaN."""
    number = oracle.submit_batch(batch(*costs))
    label = oracle.collect()[number]
    assert isinstance(label, BatchLabel)
    return label.safe


@pytest.mark.parametrize(
    ("costs", "safe"), [((0, 0, 15), 1), ((0, 0, 15.01), 0), ((5,), 1), ((6,), 0)]
)
def test_a_batch_is_safe_if_its_mean_cost_is_at_most_the_limit(costs, safe):
    assert judged(SyntheticOracle(5), *costs) == safe


def test_the_share_of_the_limit_is_for_pairs_alone():
    """A fifth of an episode may cost a fifth of its limit, 1; a batch shows whole episodes."""
    oracle = SyntheticOracle(5, share=0.2)
    assert oracle.label([query(1, 1.01)]) == [Label(1.0, 1.0, 0.0)]
    assert judged(oracle, 4, 6) == 1
    for share in (0, 1.01, -1):
        with pytest.raises(
            ValueError, match=rf"share of its .* limit in \(0, 1\], got share={share}"
        ):
            SyntheticOracle(5, share=share)


@pytest.mark.parametrize(("size", "queries"), [(1, 1), (2, 1), (19, 10), (20, 10)])
def test_two_episodes_of_a_batch_count_as_one_query(size, queries):
    oracle = SyntheticOracle(5, budget=queries)
    judged(oracle, *range(size))
    assert oracle.queries_used == queries == num_queries(size)
    with pytest.raises(BudgetError, match="0 are left, 1 were asked"):
        oracle.submit_batch(batch(1))
    assert oracle.queries_used == queries


def test_a_grid_is_judged_one_by_one_as_pairs_are_and_counts_as_one_query():
    teacher = Teacher(skip_above=9)
    oracle = SyntheticOracle(10, share=0.5, teacher=teacher, budget=1)
    number = oracle.submit_grid(batch(0, 5, 5.01, 9.5))
    assert repr(oracle.collect()) == repr({number: GridLabel((1.0, 1.0, 0.0, math.nan))})
    assert oracle.queries_used == 1
    with pytest.raises(BudgetError, match="0 are left, 1 were asked"):
        oracle.submit_grid(batch(1))
    for many in ([], batch(*range(13))):
        with pytest.raises(ValueError, match=f"1 to 12 trajectories, got {len(many)}"):
            oracle.submit_grid(many)
    with pytest.raises(MissingCostError):
        SyntheticOracle(5).submit_grid([episode(1), episode()])
    late = DelayedOracle(SyntheticOracle(5), rounds=1)
    number = late.submit_grid(batch(1, 6))
    assert late.collect() == {}
    assert late.collect() == {number: GridLabel((1.0, 0.0))}


def test_a_batch_without_true_costs_or_without_episodes_is_refused_and_not_counted():
    oracle = SyntheticOracle(5)
    with pytest.raises(MissingCostError):
        oracle.submit_batch([episode(1), episode()])
    with pytest.raises(ValueError, match="has episodes, got none"):
        oracle.submit_batch([])
    assert (oracle.queries_used, oracle.collect()) == (0, {})


def test_safety_noise_flips_the_judgement_of_a_batch_as_often_as_that_of_an_episode():
    oracle = SyntheticOracle(5, teacher=Teacher(safety_noise=0.3), rng=rng())
    safe = [judged(oracle, 0, 1) for _ in range(2000)]
    assert np.mean(safe) == pytest.approx(0.7, abs=0.03)


def test_a_batch_is_skipped_if_every_episode_of_it_would_be():
    oracle = SyntheticOracle(5, teacher=Teacher(skip_above=8))
    assert math.isnan(judged(oracle, 9, 10))
    assert judged(oracle, 8, 10) == 0
    assert oracle.queries_used == 2


def test_batches_and_queries_draw_from_one_stream_that_a_state_continues():
    def noisy():
        return SyntheticOracle(5, teacher=Teacher(safety_noise=0.5), rng=rng())

    whole, cut, again = noisy(), noisy(), noisy()
    for oracle in (whole, cut):
        oracle.submit_batch(batch(1, 2))
        oracle.submit([query(1, 2)])
    again.load_state_dict(cut.state_dict())
    assert again.collect() == whole.collect()
    for _ in range(20):
        assert judged(again, 3) == judged(whole, 3)
        assert again.label([query(3, 7)]) == whole.label([query(3, 7)])
    assert again.submit([query(1, 2)]) == whole.submit([query(1, 2)])
    assert again.collect() == whole.collect()


def test_oracles_that_are_not_asked_about_batches_say_so(tmp_path):
    function = FunctionOracle(lambda _: Label(1, 1, 1), tmp_path / "log.jsonl")
    for oracle in (function, DelayedOracle(function, rounds=1)):
        with pytest.raises(UnsupportedError, match=r"2 were shown to a \w+Oracle; constrain"):
            oracle.submit_batch(batch(1, 2))
        assert oracle.queries_used == 0


def test_the_answer_about_a_batch_is_delayed_as_those_about_pairs_are():
    delayed = DelayedOracle(SyntheticOracle(5), rounds=1)
    number = delayed.submit_batch(batch(1, 2))
    assert [delayed.collect(), delayed.collect()] == [{}, {number: BatchLabel(1)}]


def test_a_teacher_marks_what_costs_misses_some_and_begins_and_ends_wrong():
    """Costs in steps 20 to 29 and 60 to 69; a third is missed, ends are up to 5 % off."""
    costs = np.zeros(100)
    costs[20:30] = costs[60:70] = 1
    one = Trajectory(np.zeros((100, 1)), np.zeros((100, 1)), costs)
    exact = SyntheticOracle(5, marks=True).label([Query(one, one)])[0]
    assert exact.first_unsafe == exact.second_unsafe == ((20, 30), (60, 70))
    teacher = Teacher(mark_error=0.05, missed=1 / 3)
    oracle = SyntheticOracle(5, marks=True, teacher=teacher, rng=np.random.default_rng(0))
    found = [label.first_unsafe for label in oracle.label([Query(one, one)] * 600)]
    assert abs(np.mean([len(one) for one in found]) - 4 / 3) < 0.06
    starts = [start for one in found for start, _ in one if start < 40]
    assert (min(starts), max(starts)) == (15, 25)
    assert abs(np.mean(starts) - 20) < 0.5
    late = SyntheticOracle(5, marks=True, teacher=Teacher(mark_lag=0.025))
    assert late.label([Query(one, one)])[0].first_unsafe == ((23, 33), (63, 73))
