"""Scripts are loaded from their files: they are run, not imported, so no package holds them."""

import importlib.util
import math
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from pbcrl import Trajectory, TrajectoryWriter
from pbcrl_envs.toy import PointHazardsEnv
from pbcrl_script_utils.args import RunArgs

SCRIPTS = Path(__file__).parents[2] / "cleanrl_scripts"

SMALL = {
    "num_envs": 4,
    "num_steps": 100,
    "update_epochs": 2,
    "minibatch_size": 200,
    "hidden_sizes": (16,),
    "eval_episodes": 4,
    "threads": 1,
}
"""Arguments of a run on the toy that takes about a second."""


def load(name: str, path: Path | None = None) -> ModuleType:
    """Load a script as `name`, by default the one of that name in the folder of scripts."""
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))  # as if one of them had been started
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path or SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_edited(name: str, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """Load a copy of a script, in a new folder, in which pieces of its text were replaced."""
    text = (SCRIPTS / f"{name}.py").read_text()
    for old, new in changes:
        if old not in text:
            pytest.skip(f"{name}.py has been edited: it has no {old!r}")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.mkdir()
    path = folder / f"{name}.py"  # the script's name is part of a run
    path.write_text(text)
    return load(f"{name}_of_{folder.name}", path)


@pytest.fixture
def save_every(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many iterations of a run lie between two checkpoints; small runs have few."""
    return lambda number: monkeypatch.setattr(RunArgs, "checkpoint_interval", number)


@pytest.fixture(scope="session")
def scripts() -> SimpleNamespace:
    names = "ppo_lag", "ppo_lag_pbcrl", "ppo_lag_rlsf", "evaluate"
    return SimpleNamespace(**{name: load(name) for name in names})


class OtherCost(gym.Wrapper):
    """The toy, move for move, with a true cost that has nothing to do with the hazards."""

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        info["cost"] = 3.0 * float(obs[0] > 0)
        return obs, reward, terminated, truncated, info


class NoCost(gym.Wrapper):
    """The toy without a cost."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return obs, {name: value for name, value in info.items() if name != "cost"}

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        del info["cost"]
        return obs, reward, terminated, truncated, info


class Faulty(gym.Wrapper):
    """The toy, of which one number is wrong in one step of each env."""

    episode = -1

    def __init__(self, env, what, number, *, episode, step):
        super().__init__(env)
        self.what, self.number, self.when = what, number, (episode, step)

    def reset(self, **kwargs):
        self.steps, self.episode = 0, self.episode + 1
        return self.env.reset(**kwargs)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        if (self.episode, self.steps) == self.when:
            if self.what == "obs":
                obs = np.array([obs[0], self.number, *obs[2:]], np.float32)
            elif self.what == "reward":
                reward = self.number
            else:
                info["cost"] = self.number
        return obs, reward, terminated, truncated, info


class Raising(gym.Wrapper):
    """The toy, which looks something up in its fifth step that is not there."""

    steps = 0

    def step(self, action):
        self.steps += 1
        return {}["wind"] if self.steps == 5 else self.env.step(action)


class Diverging(gym.Wrapper):
    """The toy, whose every other episode breaks off after 30 steps as if its physics had failed."""

    def __init__(self, env):
        super().__init__(env)
        self.episode = -1

    def reset(self, **kwargs):
        self.episode += 1
        self.steps = 0
        return self.env.reset(**kwargs)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        if self.episode % 2 == 0 and self.steps == 30:
            return obs, 0.0, False, True, info | {"diverged": True}
        return obs, reward, terminated, truncated, info


class Falling(gym.Wrapper):
    """The toy, but an episode ends where the point comes near the right wall."""

    def step(self, action):
        obs, reward, _, truncated, info = self.env.step(action)
        return obs, reward, bool(obs[0] > 0.9), truncated, info


class Unseeded(gym.Wrapper):
    """The toy with its own source of randomness."""

    def reset(self, **kwargs):
        return self.env.reset(**{**kwargs, "seed": secrets.randbits(30)})


def blind(**kwargs):
    """The toy without a way to draw it."""
    env = PointHazardsEnv(**kwargs)
    env.metadata = {"render_modes": []}
    return env


VARIANTS = {
    "TestToy-v0": PointHazardsEnv,
    "TestToyOtherCost-v0": lambda **kw: OtherCost(PointHazardsEnv(**kw)),
    "TestToyNoCost-v0": lambda **kw: NoCost(PointHazardsEnv(**kw)),
    "TestToyDiverging-v0": lambda **kw: Diverging(PointHazardsEnv(**kw)),
    "TestToyFalling-v0": lambda **kw: Falling(PointHazardsEnv(**kw)),
    "TestToyBlind-v0": blind,
    "TestToyUnseeded-v0": lambda **kw: Unseeded(PointHazardsEnv(**kw)),
    "TestToyHuge-v0": lambda **kw: Faulty(
        PointHazardsEnv(**kw), "reward", 1e38, episode=1, step=3
    ),  # finite and absurd
    "TestToyRaising-v0": lambda **kw: Raising(PointHazardsEnv(**kw)),
    "TestToyBroken-v0": lambda **kw: Faulty(
        PointHazardsEnv(**kw), "reward", math.nan, episode=0, step=3
    ),
}


@pytest.fixture(autouse=True, scope="session")
def _variants_of_the_toy():
    for env_id, make in VARIANTS.items():
        gym.register(env_id, entry_point=make, max_episode_steps=100)
    gym.register("TestToyEndless-v0", entry_point=PointHazardsEnv)
    yield
    for env_id in [*VARIANTS, "TestToyEndless-v0"]:
        del gym.registry[env_id]


def random_episodes(env_id: str, count: int) -> list[Trajectory]:
    """Play `count` episodes of a drifting random driver on one env of the toy."""
    env = gym.make(env_id)
    rng = np.random.default_rng(0)
    episodes = []
    for seed in range(count):
        obs, _ = env.reset(seed=seed)
        drift = rng.uniform(-1, 1, 2)
        rows, actions, costs, over = [], [], [], False
        while not over:
            action = np.clip(drift + rng.normal(size=2), -1, 1).astype(np.float32)
            rows.append(obs)
            actions.append(action)
            obs, _, terminated, truncated, info = env.step(action)
            costs.append(info["cost"])
            over = terminated or truncated
        episodes.append(Trajectory(np.array(rows), np.array(actions), np.array(costs)))
    return episodes


def write_dataset(path: Path, env_id: str, episodes: list[Trajectory]) -> Path:
    with TrajectoryWriter(
        path, env_id=env_id, obs_shape=(4,), act_dim=2, horizon=100, rng=np.random.default_rng(0)
    ) as writer:
        for episode in episodes:
            writer.add(episode)
    return path


@pytest.fixture(scope="session")
def toy_episodes() -> list[Trajectory]:
    return random_episodes("TestToy-v0", 60)


@pytest.fixture(scope="session")
def toy_dataset(tmp_path_factory, toy_episodes) -> Path:
    folder = tmp_path_factory.mktemp("datasets") / "toy"
    return write_dataset(folder, "PointHazards-v0", toy_episodes)
