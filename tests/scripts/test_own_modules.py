"""A user's env may import modules of any name, those of the scripts' folders included."""

import os
import subprocess
import sys

import pytest

from .conftest import SCRIPTS
from .runs import rows

ENV = '''
import gymnasium as gym
import numpy as np

import common
import evaluate
import paper
import utils


class Own(gym.Env):
    """A step with an action above 0 costs the sum of what the user's modules hold."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def observe(self):
        return self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        numbers = common.NUMBER, evaluate.NUMBER, paper.NUMBER, utils.NUMBER
        cost = sum(numbers) * float(action[0] > 0)
        return self.observe(), float(action[0]), False, False, {"cost": cost}


gym.register("Own-v0", entry_point=Own, max_episode_steps=5)
'''
MODULES = {"common": 2, "evaluate": 0, "paper": 4, "utils": 7}
SMALL = """
    --env-id my_env:Own-v0 --cost-limit 30 --total-timesteps 120 --num-envs 2 --num-steps 20
    --minibatch-size 20 --update-epochs 1 --hidden-sizes 8 --eval-episodes 2 --threads 1
    --run-name run
"""
PBCRL = """
    --offline-queries 40 --online-queries 6
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "folder"),
    [("ppo_lag", "", "installed"), ("ppo_lag_pbcrl", PBCRL, ".")],
)
def test_an_env_gets_its_own_modules_whatever_their_names_are(tmp_path, script, options, folder):
    """Beside it, or as packages that are installed."""
    (tmp_path / "my_env.py").write_text(ENV)
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, number in MODULES.items():
        (tmp_path / folder / f"{name}.py").write_text(f"NUMBER = {number}\n")
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *SMALL.split(), *options.split()]
    path = os.pathsep.join([str(tmp_path / folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "runs" / "run")
    assert [row["env_steps"] for row in found] == [40, 80, 120]
    for row in found:  # 2 + 4 + 7 per costly step of its 8 episodes
        assert row["episodes"] == 8
        assert 0 < row["true_cost"] * 8 == pytest.approx(13 * round(row["true_cost"] * 8 / 13))
