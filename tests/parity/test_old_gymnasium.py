"""`pbcrl` on the real package, under the Gymnasium that it needs."""

import numpy as np

from tests.parity import plan


def test_a_cost_is_learned_from_preferences_on_the_real_package(real):
    made = real(**plan.LEARNING_JOB)
    np.testing.assert_allclose(made["recorded_costs"], made["true_costs"])
    safe = made["true_costs"] <= made["limit"]
    assert 0 < safe.mean() < 1
    assert ((made["learned_costs"] <= 0) == safe).mean() > 0.8
