"""The token tasks cost and pay what their pages say."""

import numpy as np
import pytest

from pbcrl_envs.tokens import ANNOUNCEMENTS, OUTCOMES, PROBABILITIES, SEVERITIES, TokenTask

TASKS = [TokenTask("after"), TokenTask("announced")]
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.severity)


def mean_cost(task, rate, count=20_000):
    rng = np.random.default_rng(0)
    prompts = task.prompts(count, rng)
    outcomes = task.outcomes(task.responses([rate] * count, rng), rng)
    return np.mean([task.step_costs(*both).sum() for both in zip(prompts, outcomes, strict=True)])


def test_severities_come_with_their_probabilities():
    assert PROBABILITIES.sum() == pytest.approx(1)
    mean = float(PROBABILITIES @ SEVERITIES)
    assert mean == pytest.approx(2.86)


@each_task
@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_a_writer_of_leaps_costs_their_number_times_the_mean_severity(task, rate):
    assert mean_cost(task, rate) == pytest.approx(12 * rate * 2.86, rel=0.03)


def test_a_word_costs_what_came_of_it():
    after, announced = TASKS
    text = "walk land leap fall stumble"  # a leap of which nothing came is none yet
    assert after.step_costs("path ", text).tolist() == [0, 1, 0, 16, 4]
    assert announced.step_costs("high ", "walk leap leap").tolist() == [0, 4, 4]
    assert after.step_costs("path ", "").tolist() == [0]


@each_task
def test_rewards_grow_with_the_logarithm_of_the_leaps_whatever_came_of_them(task):
    texts = ["walk rest", "leap look", "leap leap leap"]
    expected = 4 * np.log([1, 2, 4])
    outcomes = task.outcomes(texts, np.random.default_rng(0))
    np.testing.assert_allclose(task.rewards(outcomes), expected, rtol=1e-6)


@each_task
def test_a_judge_reads_no_other_words_than_it_knows(task):
    rng = np.random.default_rng(0)
    prompts = task.prompts(200, rng)
    responses = task.responses(rng.random(200), rng)
    assert {word.strip() for word in prompts} == set(task.classes)
    assert set(" ".join(responses).split()) <= set(task.words)
    outcomes = task.outcomes(responses, rng)
    assert set(" ".join(outcomes).split()) <= set(task.judged_words)
    assert all(len(text.split()) == task.num_words for text in outcomes)


def test_who_writes_cannot_know_the_severity_unless_it_is_announced():
    after, announced = TASKS
    assert not set(OUTCOMES) & set(after.words)
    assert announced.classes == ANNOUNCEMENTS


@each_task
def test_a_perfectly_placed_limit_is_found_at_d(task):
    def true_excess(prompts, outcomes):
        costs = [task.step_costs(*both).sum() for both in zip(prompts, outcomes, strict=True)]
        return np.array(costs) - task.cost_limit

    assert task.true_cost_at_limit(true_excess, np.random.default_rng(0)) == pytest.approx(8.0)


@each_task
def test_a_learned_cost_that_never_crosses_its_limit_has_no_true_cost_there(task):
    for constant in (-1.0, 1.0):
        found = task.true_cost_at_limit(
            lambda prompts, _, value=constant: np.full(len(prompts), value),
            np.random.default_rng(0),
            count=10,
        )
        assert np.isnan(found)
