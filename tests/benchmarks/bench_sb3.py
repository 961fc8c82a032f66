"""PPO of Stable-Baselines3 on the toy: unconstrained, and under a cost learned from labels.

Prints a row per seed and method: return and true cost of the last policy, deterministic, and the
last λ. The cost model is pretrained on whole episodes of scripted drivers, from reckless to
cautious, and goes on learning from labels of the policy's episodes; λ follows the mean learned cost
to the learned limit. The true costs reach the simulated oracle and this table only.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

import pbcrl_envs
from pbcrl import (
    CostModel,
    CostModelTrainer,
    FeedbackLoop,
    PreferenceBuffer,
    SyntheticOracle,
    Trajectory,
)
from pbcrl.adapters.sb3 import MultiplierCallback, PreferenceCostVecEnv
from pbcrl.lagrange import PIDMultiplier
from pbcrl_envs.toy.point_hazards import HAZARDS

TOY, HORIZON = "PointHazards-v0", 100


@dataclass(frozen=True)
class Args:
    seeds: int = 3
    """how many of each method"""
    first_seed: int = 0
    """the lowest of them"""
    total_timesteps: int = 400_000
    """env steps of each policy's training"""
    num_envs: int = 50
    """environments stepped together; an iteration is an episode of each"""
    offline_queries: int = 4_500
    """pairs of drivers' episodes, a tenth of them for validation"""
    online_queries: int = 1_000
    """pairs of the policy's episodes, spread evenly over the training"""
    finetune_interval: int = 5
    """iterations between two labelling rounds"""
    methods: tuple[Literal["unconstrained", "constrained"], ...] = ("unconstrained", "constrained")
    """which of them to run"""
    workers: int = 2
    """trainings at a time"""


@dataclass(frozen=True)
class Result:
    """Of a trained policy, means of 100 episodes."""

    episode_return: float
    true_cost: float
    multiplier: float
    """λ at the end; 0 without a constraint"""


def drive(count: int, rng: np.random.Generator) -> list[Trajectory]:
    """Return an episode of each of `count` scripted drivers, from reckless to cautious."""
    envs = gym.make_vec(TOY, count, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    caution, noise = rng.uniform(0, 2, (count, 1)), rng.uniform(0.1, 0.5, (count, 1))
    obs, _ = envs.reset(seed=int(rng.integers(2**31 - count)))
    rows = []
    for _ in range(HORIZON):
        goal, away = obs[:, 2:], obs[:, None, :2] - HAZARDS  # (N, 2), (N, hazards, 2)
        distance = np.linalg.norm(away, axis=2, keepdims=True)
        push = (away / distance * np.clip((0.4 - distance) / 0.15, 0, 1)).sum(axis=1)
        towards = goal / (np.linalg.norm(goal, axis=1, keepdims=True) + 1e-6)
        actions = towards + caution * push + noise * rng.normal(size=(count, 2))
        before, actions = obs.copy(), np.clip(actions, -1, 1).astype(np.float32)
        obs, *_, infos = envs.step(actions)
        rows.append((before, actions, infos["cost"].copy()))
    arrays = [np.stack(column, axis=1) for column in zip(*rows, strict=True)]
    return [Trajectory(*episode) for episode in zip(*arrays, strict=True)]


def make_agent(envs: Any, seed: int) -> PPO:
    """Return PPO with the toy's settings: short episodes, hence a small discount."""
    return PPO(
        "MlpPolicy",
        envs,
        n_steps=HORIZON,
        batch_size=500,
        gamma=0.95,
        learning_rate=1e-3,
        # Ways round a disc have corners, for which two layers of 64 tanh units are hardly enough.
        policy_kwargs={
            "net_arch": [128, 128],
            "activation_fn": torch.nn.ReLU,
            "log_std_init": -0.5,
        },
        seed=seed,
        device="cpu",
    )


def unconstrained(args: Args, seed: int) -> Result:
    """Train on the reward alone."""
    agent = make_agent(make_vec_env(TOY, args.num_envs, seed=seed), seed)
    agent.learn(args.total_timesteps)
    return evaluate(agent, multiplier=0.0)


def constrained(args: Args, seed: int) -> Result:
    """Train under a cost and a limit learned from labels."""
    rng, limit = np.random.default_rng(seed), pbcrl_envs.cost_limit(TOY)
    assert limit is not None
    model = CostModel.for_env(gym.make(TOY))
    train, valid = PreferenceBuffer(), PreferenceBuffer()
    train.add_trajectories(drive(1_000, rng))
    valid.add_trajectories(drive(200, rng))
    feedback = FeedbackLoop(SyntheticOracle(limit), train, rng=rng)
    num_valid = args.offline_queries // 10
    feedback.label_all([(train, args.offline_queries - num_valid), (valid, num_valid)])
    model.fit_input_scale(train.trajectories)
    trainer = CostModelTrainer(model, lr=3e-3, batch_size=32, rng=rng)
    trainer.pretrain(train, valid, max_epochs=20, patience=40)

    # Priced from the start, or driving straight through the hazards is all that is learned; but
    # not dearly: a policy that starts at λ = 1 stands still, and hardly learns another thing.
    multiplier = PIDMultiplier(lr=0.006, proportional=10.0, initial=0.4)
    envs = PreferenceCostVecEnv(make_vec_env(TOY, args.num_envs, seed=seed), model, multiplier)
    iterations, iteration = args.total_timesteps // (HORIZON * args.num_envs), 0

    def on_episodes(episodes: Sequence[Trajectory]) -> None:
        nonlocal iteration
        iteration += 1
        feedback.add(episodes)
        if iteration % args.finetune_interval == 0:
            due = args.online_queries * iteration // iterations
            trainer.finetune(train, num_new=len(feedback.round(due, model=model).pairs))
        if iteration % 10 == 0:
            costs, learned = [one.true_cost for one in episodes], model.score(episodes)
            print(
                f"   seed {seed}, iteration {iteration} of {iterations}: true cost "
                f"{np.mean(costs):.1f}, learned cost {learned.mean():.2f}, learned limit "
                f"{model.learned_limit:.2f}, λ {multiplier.value:.2f}",
                flush=True,
            )

    agent = make_agent(envs, seed)
    agent.learn(args.total_timesteps, callback=MultiplierCallback(envs, on_episodes=on_episodes))
    return evaluate(agent, multiplier=multiplier.value)


def evaluate(agent: PPO, *, multiplier: float) -> Result:
    """Play 100 episodes of the deterministic policy, the same for all."""
    envs = make_vec_env(TOY, 100, seed=10_000)
    obs, rewards, costs = envs.reset(), 0.0, 0.0
    for _ in range(HORIZON):
        actions, _ = agent.predict(obs, deterministic=True)  # type: ignore[arg-type]
        obs, reward, _, infos = envs.step(actions)
        rewards += float(reward.mean())
        costs += float(np.mean([info["cost"] for info in infos]))
    return Result(rewards, costs, multiplier)


METHODS = {"unconstrained": unconstrained, "constrained": constrained}


def run(args: Args, method: str, seed: int) -> Result:
    """Train and evaluate one policy, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    result = METHODS[method](args, seed)
    print(f"   seed {seed}, {method}: {result}", flush=True)
    return result


def main(args: Args) -> dict[tuple[str, int], Result]:
    """Run all, print the table and return it."""
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    jobs: list[tuple[str, int]] = [(method, seed) for seed in seeds for method in args.methods]
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        futures = {job: pool.submit(run, args, *job) for job in jobs}
        results = {job: future.result() for job, future in futures.items()}
    print(f"{TOY}, limit {pbcrl_envs.cost_limit(TOY):g}, {args.total_timesteps:,} steps")
    print(f"{'method':<16}{'seed':>4}{'return':>9}{'true cost':>11}{'λ':>7}")
    for (method, seed), found in sorted(results.items()):
        print(
            f"{method:<16}{seed:>4}{found.episode_return:>9.2f}{found.true_cost:>11.2f}"
            f"{found.multiplier:>7.2f}",
            flush=True,
        )
    return results


if __name__ == "__main__":
    main(tyro.cli(Args))
