"""Stable-Baselines3 under a learned cost, against the library itself."""

import copy
import importlib
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch

from pbcrl import (
    CostModel,
    LagrangeMultiplier,
    PreferenceBuffer,
    PreferenceCostWrapper,
    SignalScale,
    SyntheticOracle,
    TreeCost,
    TreeTrainer,
    draw_pairs,
    finished_trajectories,
)
from pbcrl.errors import MissingCostError, NonFiniteError

sb3 = pytest.importorskip("stable_baselines3", reason="needs the extra `sb3`")
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.vec_env import (  # noqa: E402
    DummyVecEnv,
    SubprocVecEnv,
    VecEnvWrapper,
    VecMonitor,
    VecNormalize,
)

import pbcrl_envs  # noqa: E402
from pbcrl.adapters.sb3 import MultiplierCallback, PreferenceCostVecEnv  # noqa: E402

TOY = "PointHazards-v0"
HORIZON, LIMIT = 100, pbcrl_envs.cost_limit(TOY)


def random_model(seed=0, horizon=HORIZON):
    """Costs of both signs that depend on every number of (s, a)."""
    torch.manual_seed(seed)
    space = gym.spaces.Box(-np.inf, np.inf, (4,))
    model = CostModel(space, gym.spaces.Box(-1, 1, (2,)), horizon=horizon)
    torch.nn.init.normal_(model.net[-1].weight)
    return model


def toy(model, *, num_envs=3, price=0.5):
    venv = make_vec_env(TOY, num_envs, seed=0)
    return PreferenceCostVecEnv(venv, model, LagrangeMultiplier(initial=price, cap=20.0))


def play_an_episode(envs):
    for _ in range(HORIZON):
        envs.step(np.ones((envs.num_envs, 2), np.float32))


class Script(gym.Env):
    """Rewards and costs of a list, whatever the action."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, *steps):
        self.steps = steps

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):  # noqa: ARG002
        reward, cost = self.steps[self.time]
        self.time += 1
        ended = self.time == len(self.steps)
        return np.zeros(1, np.float32), reward, ended, False, {"cost": cost}


class InUnits(gym.Wrapper):
    """The toy with other units of reward and cost."""

    def __init__(self, reward, cost):
        super().__init__(gym.make(TOY))
        self.units = reward, cost

    def step(self, action):
        obs, reward, *ends, info = self.env.step(action)
        return obs, self.units[0] * reward, *ends, {**info, "cost": self.units[1] * info["cost"]}


def test_priced_rewards_by_hand():
    """γ = .5, λ = 1. Sums of rewards 4, 4, cost 0, 3; in the next episode 8 and 1.

    σ_r = 4, 4, sqrt((16 + 16 + 64) / 3) and σ_c = 1 (no cost yet), sqrt(9 / 2), sqrt(10 / 3).
    """
    venv = DummyVecEnv([lambda: Script((4.0, 0.0), (2.0, 3.0))])
    envs = PreferenceCostVecEnv(venv, None, LagrangeMultiplier(), gamma=0.5)
    envs.reset()
    action = np.zeros((1, 1), np.float32)
    found = [envs.step(action)[1].item() for _ in range(2)]
    venv.envs[0].steps = ((8.0, 1.0), (0.0, 0.0))
    found.append(envs.step(action)[1].item())
    expected = [1 - 0, 2 / 4 - 3 / 4.5**0.5, 8 / 32**0.5 - 1 / (10 / 3) ** 0.5]
    assert found == pytest.approx([priced / 2 for priced in expected])


def test_every_step_is_priced_by_the_observation_before_it_and_ends_of_episodes_are_too():
    model, rng = random_model(), np.random.default_rng(0)
    envs, plain = toy(model, price=0.5), make_vec_env(TOY, 3, seed=0)
    obs, plain_obs = envs.reset(), plain.reset()
    num_ended, scale = 0, SignalScale(3, 0.99, forget=5e-4)
    for _ in range(2 * HORIZON + 10):
        actions = rng.uniform(-1, 1, (3, 2)).astype(np.float32)
        before = obs.copy()
        obs, rewards, dones, infos = envs.step(actions)
        plain_obs, plain_rewards, plain_dones, plain_infos = plain.step(actions)
        expected = model.step_cost(before, actions)
        np.testing.assert_array_equal([info["cost"] for info in infos], expected)
        np.testing.assert_array_equal(
            [info["true_cost"] for info in infos], [info["cost"] for info in plain_infos]
        )
        signals = torch.from_numpy(np.stack([plain_rewards, expected])[:, None])
        reward, cost = signals[:, 0] / scale.update(signals, torch.from_numpy(dones[None]))[:, 0]
        np.testing.assert_allclose(rewards, (reward - 0.5 * cost) / 1.5, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(obs, plain_obs)
        np.testing.assert_array_equal(dones, plain_dones)
        num_ended += dones.sum()
        for info, end in zip(infos, dones, strict=True):
            assert ("trajectory" in info) == ("terminal_observation" in info) == end
    assert num_ended == 6


def test_episodes_are_those_that_the_wrapper_of_single_envs_records():
    model, rng = random_model(), np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (2 * HORIZON, 2)).astype(np.float32)
    envs = PreferenceCostVecEnv(
        DummyVecEnv([lambda: gym.make(TOY)]), model, LagrangeMultiplier(lr=0, initial=0)
    )
    single = PreferenceCostWrapper(gym.make(TOY), model)
    envs.seed(7)
    envs.reset()
    single.reset(seed=7)
    found, expected = [], []
    for action in actions:
        *_, (info,) = envs.step(action[None])
        found += finished_trajectories(info)
        *_, ended, info = single.step(action)
        expected += finished_trajectories(info)
        if ended:
            single.reset()
    assert len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.obs, theirs.obs)
        np.testing.assert_array_equal(ours.actions, theirs.actions)
        np.testing.assert_array_equal(ours.costs, theirs.costs)


def test_fine_tuning_has_effect_on_the_envs_of_subprocesses():
    model = random_model()
    venv = SubprocVecEnv([lambda: gym.make(f"pbcrl_envs:{TOY}")] * 2)
    envs = PreferenceCostVecEnv(venv, model, LagrangeMultiplier())
    try:
        envs.reset()
        *_, infos = envs.step(np.ones((2, 2), np.float32))
        assert all(info["cost"] != 0 for info in infos)
        torch.nn.init.zeros_(model.net[-1].weight)
        *_, infos = envs.step(np.ones((2, 2), np.float32))
        assert [info["cost"] for info in infos] == [0, 0]
    finally:
        envs.close()


def test_ppo_moves_the_multiplier_by_the_mean_learned_cost_of_each_rollout():
    model = random_model()
    envs = toy(model, num_envs=4)
    envs.multiplier = LagrangeMultiplier()
    rounds = []
    callback = MultiplierCallback(envs, on_episodes=rounds.append)
    # 400 steps of each env in all, in rollouts of 50: an episode ends in every other one.
    agent = sb3.PPO("MlpPolicy", envs, n_steps=50, batch_size=100, n_epochs=1, seed=0, device="cpu")
    agent.learn(1600, callback=callback)
    assert [len(episodes) for episodes in rounds] == [4, 4, 4, 4]
    expected = LagrangeMultiplier()
    for episodes in rounds:
        expected.update(float(model.score(episodes).mean()), model.learned_limit)
    assert envs.multiplier.value == pytest.approx(expected.value)
    assert envs.multiplier.value != 1.0


def test_ppo_trains_under_trees_that_are_fitted_to_its_own_episodes():
    pytest.importorskip("lightgbm", reason="needs the extra `trees`")
    model, rng = TreeCost.for_env(gym.make(TOY)), np.random.default_rng(0)
    trainer, buffer, above = TreeTrainer(model, rng=rng, rounds=10), PreferenceBuffer(), []

    def on_episodes(episodes):
        new = buffer.add_trajectories(episodes)
        pairs = new[draw_pairs(len(new), 6, rng=rng)]
        buffer.add_labels(pairs, SyntheticOracle(LIMIT).label(buffer.queries(pairs)))
        trainer.update(buffer, np.arange(len(buffer) - 6, len(buffer)))
        above.append((float(model.score(episodes).mean()), model.learned_limit))

    envs = toy(model, num_envs=8)
    envs.multiplier = LagrangeMultiplier()
    agent = sb3.PPO("MlpPolicy", envs, n_steps=100, batch_size=400, seed=0, device="cpu")
    agent.learn(1600, callback=MultiplierCallback(envs, on_episodes=on_episodes))
    assert model.num_trees > 0
    assert len(above) == 2
    expected = LagrangeMultiplier()
    for cost, limit in above:
        expected.update(cost, limit)
    assert envs.multiplier.value == pytest.approx(expected.value)
    _, _, _, infos = envs.step(np.ones((8, 2), np.float32))
    assert len({info["cost"] for info in infos}) > 1


def test_a_monitor_around_the_single_envs_logs_their_own_reward():
    envs, plain = toy(random_model(), num_envs=1, price=3.0), make_vec_env(TOY, 1, seed=0)
    envs.reset()
    plain.reset()
    total = 0.0
    for _ in range(HORIZON):
        *_, (info,) = envs.step(np.ones((1, 2), np.float32))
        total += plain.step(np.ones((1, 2), np.float32))[1].item()
    assert info["episode"]["r"] == pytest.approx(total, abs=1e-3)


def test_without_a_cost_model_the_env_s_own_cost_is_priced_and_its_mean_meets_the_limit():
    """Two episodes of cost 3 against a limit of 4: e = -1 / 4, twice."""
    venv = DummyVecEnv([lambda: Script((4.0, 0.0), (2.0, 3.0))])
    envs, rounds = PreferenceCostVecEnv(venv, None, LagrangeMultiplier()), []
    agent = sb3.PPO("MlpPolicy", envs, n_steps=2, batch_size=2, n_epochs=1, seed=0, device="cpu")
    agent.learn(4, callback=MultiplierCallback(envs, limit=4.0, on_episodes=rounds.append))
    assert [[episode.true_cost for episode in episodes] for episodes in rounds] == [[3.0], [3.0]]
    by_hand = LagrangeMultiplier()
    by_hand.update(3.0, 4.0)
    assert envs.multiplier.value == by_hand.update(3.0, 4.0)
    assert agent.logger.name_to_value.get("rollout/learned_cost") is None
    envs.reset()
    infos = [envs.step(np.zeros((1, 1), np.float32))[3][0] for _ in range(2)]
    assert [(info["cost"], info["true_cost"]) for info in infos] == [(0, 0), (3, 3)]


@pytest.mark.parametrize(("factor", "tolerance"), [(1024.0, 0.0), (1000.0, 1e-3)])
@pytest.mark.parametrize("of", ["reward", "cost"])
def test_the_units_of_reward_and_of_cost_and_limit_change_nothing(of, factor, tolerance):
    """1,024 times as large, to the last bit; 1,000 times, which rounds otherwise, nearly."""

    def train(unit):
        reward, cost = (unit, 1.0) if of == "reward" else (1.0, unit)
        venv = make_vec_env(lambda: InUnits(reward, cost), 2, seed=0)
        envs = PreferenceCostVecEnv(venv, None, LagrangeMultiplier())
        agent = sb3.PPO("MlpPolicy", envs, n_steps=100, batch_size=50, seed=0, device="cpu")
        agent.learn(600, callback=MultiplierCallback(envs, limit=0.5 * cost))
        return envs.multiplier.value, agent.policy.state_dict()

    (price, weights), (other_price, other) = train(1.0), train(factor)
    assert price != 1.0
    assert other_price == pytest.approx(price, rel=tolerance / 1000)
    for name, tensor in weights.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=tolerance)


def test_a_training_goes_on_from_the_states_of_multiplier_and_scale():
    """Other episodes than before, which begin at the reset, and the same as without a break."""
    envs, rng = toy(random_model()), np.random.default_rng(0)
    envs.reset()
    for _ in range(HORIZON + 10):
        envs.step(rng.uniform(-1, 1, (3, 2)).astype(np.float32))
    envs.multiplier.update(3.0)
    again = toy(random_model())
    again.multiplier.load_state_dict(envs.multiplier.state_dict())
    again.scale.load_state_dict(envs.scale.state_dict())
    fresh, rewards = toy(random_model()), []
    for one in (envs, again, fresh):
        one.seed(7)
        one.reset()
        rewards.append([one.step(np.ones((3, 2), np.float32))[1] for _ in range(20)])
    np.testing.assert_array_equal(rewards[0], rewards[1])
    assert not np.allclose(rewards[0], rewards[2])


def test_a_saved_model_takes_its_multiplier_and_scale_along(tmp_path):
    """The first two λ are of one training, the third of a loaded model with fewer envs."""
    model, costs, scales = random_model(), [], []

    def note(envs):
        def on_episodes(episodes):
            costs.append(float(model.score(episodes).mean()))
            scales.append(envs.scale.state_dict()["rollouts"])

        return MultiplierCallback(envs, on_episodes=on_episodes)

    envs = toy(model)
    agent = sb3.PPO("MlpPolicy", envs, n_steps=HORIZON, batch_size=100, seed=0, device="cpu")
    agent.learn(2 * 3 * HORIZON, callback=note(envs))
    agent.save(tmp_path / "agent")
    again = toy(model, num_envs=2)
    loaded = sb3.PPO.load(tmp_path / "agent", env=VecNormalize(again, norm_reward=False))
    loaded.learn(2 * HORIZON, callback=note(again), reset_num_timesteps=False)
    expected = LagrangeMultiplier(initial=0.5, cap=20.0)
    for cost in costs:
        expected.update(cost)
    assert again.multiplier.state_dict() == expected.state_dict()
    assert expected.state_dict()["updates"] == 3
    assert scales == [HORIZON, 2 * HORIZON, 3 * HORIZON]
    own = toy(model)  # one that has been moved is left as it is
    own.multiplier.update(3.0)
    value = own.multiplier.value
    callback = MultiplierCallback(own)
    callback.init_callback(sb3.PPO.load(tmp_path / "agent", env=own))
    callback.on_training_start({}, {})
    assert own.multiplier.value == value


def test_sac_learns_with_normalised_observations_around_raw_ones_that_are_scored():
    model, rounds = random_model(), []
    venv = DummyVecEnv([lambda: gym.make(TOY)])
    envs = PreferenceCostVecEnv(venv, model, LagrangeMultiplier(initial=0.5))
    outside = VecNormalize(VecMonitor(envs), norm_reward=False)
    agent = sb3.SAC("MlpPolicy", outside, learning_starts=150, batch_size=32, seed=0, device="cpu")
    before = copy.deepcopy(agent.actor.state_dict())
    agent.learn(210, callback=MultiplierCallback(envs, on_episodes=rounds.append))
    assert [len(episodes) for episodes in rounds] == [1, 1]
    (episode,) = rounds[0]
    assert np.abs(episode.obs[:, :2]).max() <= 1  # raw: within the arena
    after = agent.actor.state_dict()
    assert any(not torch.equal(after[name], before[name]) for name in before)


class Strict(gym.Env):
    """Refuses actions out of its bounds, to which RescaleAction rounds 1 up and -1 down."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Box(np.float32([-0.3, -0.7]), np.float32([7.0, 0.1]))
    seen: ClassVar[list] = []

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.seen.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {"cost": 0.0}


@pytest.fixture
def recipe(monkeypatch):
    """The functions of the page, and two envs."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    gym.register("Strict-v0", entry_point=Strict, max_episode_steps=20)
    gym.register("Unlimited-v0", entry_point=Strict)
    yield importlib.import_module("bench_sb3").recipe()
    del gym.registry["Strict-v0"], gym.registry["Unlimited-v0"]


def test_the_recipe_of_the_page_never_leaves_the_bounds_of_actions(recipe):
    """Of 100 Gaussian actions some lie at each bound."""
    recipe["train"]("Strict-v0", 100, limit=1.0)
    for low, high, played in zip(
        Strict.action_space.low, Strict.action_space.high, np.transpose(Strict.seen), strict=True
    ):
        assert (played.min(), played.max()) == pytest.approx((low, high))


def test_the_recipe_of_the_page_needs_a_time_limit(recipe):
    with pytest.raises(ValueError, match="Unlimited-v0 has no time limit; register it with max_"):
        recipe["train"]("Unlimited-v0", 200, limit=1.0)


@pytest.mark.nightly
def test_the_recipe_of_the_page_keeps_a_limit_that_reward_alone_breaks(monkeypatch):
    """Told the true cost on Cruise, whose scripted reckless policy costs 186."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    bench = importlib.import_module("bench_sb3")
    (row,) = bench.main(bench.Args(tasks=("Cruise",), methods=("told",), seeds=(3,)))
    assert row["true_cost"] <= row["limit"] == 20
    assert row["return"] > 170  # of the scripted safe policy's 189


@pytest.mark.parametrize("space", ["Dict", "image", "Discrete"])
def test_observations_of_every_kind_are_scored(space):
    class Walk(gym.Env):
        observation_space = {
            "Dict": gym.spaces.Dict(
                {"a": gym.spaces.Box(-9, 9, (2,)), "b": gym.spaces.Discrete(3)}
            ),
            "image": gym.spaces.Box(0, 255, (40, 40, 3), np.uint8),
            "Discrete": gym.spaces.Discrete(5),
        }[space]
        action_space = gym.spaces.Discrete(3)

        def reset(self, *, seed=None, options=None):  # noqa: ARG002
            super().reset(seed=seed)
            self.observation_space.seed(seed)
            self.time = 0
            return self.observation_space.sample(), {}

        def step(self, action):  # noqa: ARG002
            self.time += 1
            return self.observation_space.sample(), 1.0, self.time == 4, False, {}

    model = CostModel(Walk.observation_space, Walk.action_space, horizon=4)
    envs = PreferenceCostVecEnv(DummyVecEnv([Walk, Walk]), model, LagrangeMultiplier(initial=1.0))
    agent = sb3.PPO(
        "MultiInputPolicy" if space == "Dict" else "CnnPolicy" if space == "image" else "MlpPolicy",
        envs,
        n_steps=8,
        batch_size=8,
        n_epochs=1,
        seed=0,
        device="cpu",
    )
    rounds = []
    agent.learn(32, callback=MultiplierCallback(envs, on_episodes=rounds.append))
    assert [len(episodes) for episodes in rounds] == [4, 4]
    for episode in (*rounds[0], *rounds[1]):
        assert episode.costs is None
        assert len(episode) == 4


# -- Bad input -------------------------------------------------------------------------------------


def test_a_model_of_another_horizon_is_refused():
    with pytest.raises(ValueError, match=r"as many steps as it was learned on: 50, but .* 100"):
        toy(random_model(horizon=50))


def test_a_model_of_another_space_is_refused():
    venv = make_vec_env("Pendulum-v1", 1)
    with pytest.raises(ValueError, match="the cost model must fit the env"):
        PreferenceCostVecEnv(venv, random_model(horizon=None), LagrangeMultiplier())


def test_a_number_as_multiplier_is_refused():
    with pytest.raises(TypeError, match=r"an object that a callback moves, got 0\.5; pass a"):
        PreferenceCostVecEnv(make_vec_env(TOY, 1), random_model(), 0.5)


def test_envs_that_hide_the_last_observation_are_refused():
    class Hides(VecEnvWrapper):
        def reset(self):
            return self.venv.reset()

        def step_wait(self):
            obs, rewards, dones, infos = self.venv.step_wait()
            for info in infos:
                info.pop("terminal_observation", None)
            return obs, rewards, dones, infos

    envs = PreferenceCostVecEnv(
        Hides(make_vec_env(TOY, 2, seed=0)), random_model(), LagrangeMultiplier()
    )
    envs.reset()
    with pytest.raises(ValueError, match=r"terminal_observation, but env 0 .* keys .*let the env"):
        play_an_episode(envs)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (np.array([0.7]), r"must be one number per env and step, got shape \(1,\)"),
        (None, "must be one number per env and step, got shape .* dtype object"),
        (-1, "must be >= 0, got"),
    ],
)
def test_a_cost_that_is_not_one_number_from_0_on_is_refused_by_name(cost, message):
    model = CostModel.for_env(Script())
    venv = DummyVecEnv([lambda: Script((1, 0.5)), lambda: Script((1, cost))])
    envs = PreferenceCostVecEnv(venv, model, LagrangeMultiplier())
    envs.reset()
    with pytest.raises(ValueError, match=message):
        envs.step(np.zeros((2, 1), np.float32))


def test_costs_of_any_type_are_exact_beside_those_of_other_envs():
    costs = [0, 0.7, True, np.int8(3), np.float32(0.5)]
    venv = DummyVecEnv([lambda cost=cost: Script((1, cost)) for cost in costs])
    envs = PreferenceCostVecEnv(venv, CostModel.for_env(Script()), LagrangeMultiplier())
    envs.reset()
    *_, infos = envs.step(np.zeros((5, 1), np.float32))
    assert [info["true_cost"] for info in infos] == [0, np.float32(0.7), 1, 3, 0.5]


def test_normalised_observations_are_refused_inside():
    single = gym.wrappers.NormalizeObservation
    for venv, name in [
        (make_vec_env(TOY, 2, wrapper_class=single), "NormalizeObservation"),
        (VecMonitor(VecNormalize(DummyVecEnv([lambda: gym.make(TOY)]))), "VecNormalize"),
    ]:
        with pytest.raises(ValueError, match=f"drifts.* {name} is inside.*put VecNormalize out"):
            PreferenceCostVecEnv(venv, random_model(), LagrangeMultiplier())
    only_rewards = VecNormalize(make_vec_env(TOY, 2), norm_obs=False)
    PreferenceCostVecEnv(only_rewards, random_model(), LagrangeMultiplier())


def test_an_env_that_is_wrapped_already_is_refused_where_its_first_episode_ends():
    model = CostModel.for_env(gym.make(TOY))  # untrained: all costs are 0
    envs = PreferenceCostVecEnv(
        DummyVecEnv([lambda: PreferenceCostWrapper(gym.make(TOY), model)]),
        model,
        LagrangeMultiplier(),
    )
    envs.reset()
    with pytest.raises(ValueError, match="an env takes one preference-cost wrapper"):
        play_an_episode(envs)


def test_a_bad_action_is_named():
    envs = toy(random_model())
    envs.reset()
    with pytest.raises(NonFiniteError, match="action must be finite, got nan"):
        envs.step(np.full((3, 2), np.nan, np.float32))


def test_a_callback_for_other_envs_is_refused():
    model = random_model()
    agent = sb3.PPO("MlpPolicy", toy(model), n_steps=8, batch_size=8, device="cpu")
    with pytest.raises(ValueError, match=r"the envs that the model trains on.*make the model with"):
        agent.learn(24, callback=MultiplierCallback(toy(model)))


@pytest.mark.parametrize("limit", [None, 5.0])
def test_a_limit_goes_with_the_env_s_own_cost_and_with_no_other(limit):
    venv, model = make_vec_env(TOY, 1), random_model() if limit else None
    envs = PreferenceCostVecEnv(venv, model, LagrangeMultiplier())
    with pytest.raises(ValueError, match=rf"needs a limit, a learned one has .* limit={limit} and"):
        MultiplierCallback(envs, limit=limit)


def test_envs_without_a_cost_are_refused_where_theirs_is_to_be_priced():
    venv = make_vec_env("Pendulum-v1", 1)
    envs = PreferenceCostVecEnv(venv, None, LagrangeMultiplier())
    envs.reset()
    with pytest.raises(MissingCostError, match="the true cost of every step is needed here"):
        envs.step(np.zeros((1, 1), np.float32))
