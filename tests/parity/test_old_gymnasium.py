"""`pbcrl_envs.upstream`, and `pbcrl` on it, under the Gymnasium that the real package needs."""

import re

import numpy as np
import pytest

from tests.parity import plan


def test_a_cost_is_learned_from_preferences_on_the_real_package(real):
    made = real(**plan.LEARNING_JOB)
    np.testing.assert_allclose(made["recorded_costs"], made["true_costs"])
    safe = made["true_costs"] <= made["limit"]
    assert 0 < safe.mean() < 1
    assert ((made["learned_costs"] <= 0) == safe).mean() > 0.8


def test_an_episode_is_the_same_to_the_last_bit_without_the_starry_sky(real):
    starry, plain = real(**plan.SKIES_JOB)["rows"]
    np.testing.assert_array_equal(starry, plain)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("unknown id", "id must be one of Safety-Gymnasium's, got 'SafetyPointGaol1-v0'; did you"),
        ("vector wrapper", "needs gymnasium >= 1.1, .* got gymnasium 0.28.1; wrap the single envs"),
        ("vector check", "needs gymnasium >= 1.1, .* got gymnasium 0.28.1"),
    ],
)
def test_what_cannot_be_had_is_refused_in_words(asked, said, real):
    assert re.search(said, str(real(kind="refusals")[asked]))
