"""Laws of the vector wrapper, over any lengths of episodes."""

import numpy as np
import pytest

pytest.importorskip(
    "gymnasium", "1.1", reason="vector envs say when they reset themselves since Gymnasium 1.1"
)

from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from hypothesis import given, settings
from hypothesis import strategies as st

from pbcrl.cost_model import CostModel
from pbcrl.recorder import finished_trajectories
from pbcrl.wrappers import PreferenceCostVectorWrapper

from .counters import Counter
from .every_space import boxes

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
law = settings(derandomize=True, deadline=None, max_examples=40)


@pytest.mark.parametrize("mode", MODES)
@law
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 14))
def test_the_vector_wrapper_hands_out_every_episode_of_any_lengths(mode, lengths, num_steps):
    """Also of one step. s_t = (t, offset of the episode), so that a row tells where it is from."""
    make = [lambda length=length: TimeLimit(Counter(99), length) for length in lengths]
    envs = PreferenceCostVectorWrapper(
        SyncVectorEnv(make, autoreset_mode=mode), CostModel(*boxes(2, 1))
    )
    envs.reset(seed=0)
    found = []
    for step in range(num_steps):
        action = np.full((len(lengths), 1), step / 100, np.float32)
        found += finished_trajectories(envs.step(action)[-1])
    # A NEXT_STEP env spends one more step on each reset.
    reset = mode is AutoresetMode.NEXT_STEP
    expected = [(num_steps + reset) // (length + reset) for length in lengths]
    assert len(found) == sum(expected)
    for trajectory in found:
        assert trajectory.obs[:, 0].tolist() == list(range(len(trajectory)))
        assert len(set(trajectory.obs[:, 1])) == 1
        np.testing.assert_allclose(np.diff(trajectory.actions[:, 0]), 0.01, atol=1e-6)
        np.testing.assert_array_equal(trajectory.costs, trajectory.actions[:, 0])
    assert sorted(map(len, found)) == sorted(
        length for length, times in zip(lengths, expected, strict=True) for _ in range(times)
    )
    envs.close()


class Fragile(Counter):
    broken = False

    def step(self, action):
        if self.broken:
            raise RuntimeError("the simulator fell over")
        return super().step(action)


@pytest.mark.parametrize("mode", MODES)
@law
@given(st.integers(1, 12), st.integers(1, 3))
def test_an_env_that_raises_in_mid_episode_costs_the_unfinished_episodes_only(mode, after, length):
    """After a reset every episode is whole again, and the earlier ones are as they were."""
    singles = [Counter(length), Fragile(3)]
    envs = SyncVectorEnv([lambda env=env: env for env in singles], autoreset_mode=mode)
    envs = PreferenceCostVectorWrapper(envs, CostModel(*boxes(2, 1)))
    found, action = [], np.zeros((2, 1), np.float32)
    for seed in range(2):
        envs.reset(seed=seed)
        for _ in range(after):
            found += finished_trajectories(envs.step(action)[-1])
        singles[1].broken = True
        with pytest.raises(RuntimeError, match="fell over"):  # noqa: PT012 - now or after a reset
            envs.step(action)
            envs.step(action)
        singles[1].broken = False
        with pytest.raises(ResetNeeded, match="after an error"):
            envs.step(action)
    reset = mode is AutoresetMode.NEXT_STEP
    assert len(found) == 2 * sum((after + reset) // (steps + reset) for steps in (length, 3))
    for trajectory in found:
        assert trajectory.obs[:, 0].tolist() == list(range(len(trajectory)))
        assert len(trajectory) in (length, 3)
        assert len(set(trajectory.obs[:, 1])) == 1
    envs.close()
