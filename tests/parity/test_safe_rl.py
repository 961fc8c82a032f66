"""OmniSafe and FSRL train under a learned cost, on the Gymnasium that they need."""

import re

import numpy as np
import pytest

from tests.parity import plan


def test_ppo_lag_of_omnisafe_trains_on_the_learned_cost_in_the_place_of_the_true_one(real):
    made = real(**plan.OMNISAFE_JOB)
    per_epoch = made["learned_costs"].reshape(2, 4)  # episodes
    np.testing.assert_allclose(
        made["logged_costs"], [per_epoch[0].mean(), per_epoch.mean()], rtol=1e-4
    )
    assert not np.allclose(made["learned_costs"], made["true_costs"])
    assert made["learned_costs"].min() > made["limit"]
    first, second = made["multipliers"]
    assert second > first > 0.001  # where OmniSafe starts it


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "needs a name of its own, but OmniSafe has Learned-v0; choose another"),
        (1, "one env at a time is stepped here, got vector_env_nums=2; leave it at 1"),
        (2, r"needs the cost of every step, but No-cost-v0 reports the keys \[\]; wrap it in"),
        (3, r"the action_space of Discrete-v0 is Discrete\(2\); wrap the env"),
    ],
)
def test_what_omnisafe_cannot_train_on_is_refused(number, said, real):
    assert re.search(said, str(real(**plan.OMNISAFE_JOB)["said"][number]))


def test_ppo_lag_of_fsrl_trains_on_the_cost_that_the_wrapper_reports(real):
    made = real(**plan.FSRL_JOB)
    assert len(made["learned_costs"]) == 4
    np.testing.assert_allclose(made["logged_cost"], made["learned_costs"].sum(), rtol=1e-4)
    assert made["price"] > 0
