"""What teachers and ways to choose queries are worth: cost models of the toy, a small fixed budget.

`make queries` prints two tables, means and standard deviations over seeds. Episodes are played by
scripted drivers of different caution, so that nothing has to be trained but cost models.
Every teacher labels the same pairs; every selection starts from the same pairs, and adds to them
round by round what it chooses by the ensemble trained so far.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode

import pbcrl_envs
from pbcrl.buffer import PreferenceBuffer, draw_pairs
from pbcrl.cost_model import CostModel
from pbcrl.dead_zone import DeadZone
from pbcrl.ensemble import CostModelEnsemble
from pbcrl.metrics import cost_model_report
from pbcrl.oracle import TEACHERS, SyntheticOracle, make_teacher
from pbcrl.selection import SELECTIONS
from pbcrl.trainer import CostModelTrainer
from pbcrl.trajectory import Trajectory
from pbcrl_envs.toy.point_hazards import HAZARDS

ENV_ID = "PointHazards-v0"
HORIZON = 100
MEASURES = "pair_accuracy", "balanced_accuracy", "type_ii_rate", "violation_gap", "w2_scaled"


@dataclass(frozen=True)
class Args:
    seeds: int = 5
    """how many of every row"""
    first_seed: int = 0
    """the lowest of them"""
    pool: int = 1000
    """episodes to choose pairs from"""
    test_episodes: int = 1000
    """held-out episodes, labelled by nobody"""
    rounds: int = 5
    """rounds of choosing and training, for the selections"""
    queries: int = 400
    """queries for training, in all rounds together"""
    valid_queries: int = 80
    """queries on other episodes, at random, by the same teacher, that decide when to stop"""
    members: int = 3
    """cost models of the ensemble, for the selections"""
    max_epochs: int = 30
    """most passes over the pairs per training"""
    patience: int = 12
    """validations without a new best at which training stops"""
    lr: float = 1e-2
    """Adam's step size"""
    batch_size: int = 32
    """pairs per gradient step"""


def play(count: int, rng: np.random.Generator) -> list[Trajectory]:
    """Play one episode with each of `count` drivers, from reckless to cautious."""
    envs = gym.make_vec(ENV_ID, count, autoreset_mode=AutoresetMode.SAME_STEP)
    caution, noise = rng.uniform(0, 2, (count, 1)), rng.uniform(0.1, 0.5, (count, 1))
    obs, _ = envs.reset(seed=int(rng.integers(2**31 - count)))
    rows = []
    for _ in range(HORIZON):
        towards = obs[:, 2:] / (np.linalg.norm(obs[:, 2:], axis=1, keepdims=True) + 1e-6)
        away = obs[:, None, :2] - HAZARDS  # (N, hazards, 2)
        distance = np.linalg.norm(away, axis=2, keepdims=True)
        push = (away / distance * np.clip((0.4 - distance) / 0.15, 0, 1)).sum(axis=1)
        action = towards + caution * push + noise * rng.normal(size=(count, 2))
        action = np.clip(action, -1, 1).astype(np.float32)
        before = obs
        obs, _, _, _, info = envs.step(action)
        rows.append((before.copy(), action, info["cost"].copy()))
    envs.close()
    all_obs, actions, costs = (np.stack(column, axis=1) for column in zip(*rows, strict=True))
    return [Trajectory(all_obs[i], actions[i], costs[i]) for i in range(count)]


def new_model(members: int, pool: list[Trajectory], seed: int) -> CostModel | CostModelEnsemble:
    torch.manual_seed(seed)
    sizes = {"hidden_sizes": (32, 32), "output_scale": HORIZON**-0.5, "horizon": HORIZON}
    spaces = gym.spaces.Box(-np.inf, np.inf, (4,)), gym.spaces.Box(-1, 1, (2,))
    models = [CostModel(*spaces, **sizes) for _ in range(members)]
    model = models[0] if members == 1 else CostModelEnsemble(models)
    model.fit_input_scale(pool)
    return model


def measure(
    args: Args, teacher: str, selection: str, seed: int, *, members: int, rounds: int
) -> dict[str, float]:
    """One seed: let the teacher label rounds of chosen pairs, then compare with the true costs."""
    limit = pbcrl_envs.cost_limit(ENV_ID)
    assert limit is not None
    rng = np.random.default_rng(seed)
    pool, validation, test = (play(n, rng) for n in (args.pool, 100, args.test_episodes))
    answers = make_teacher(teacher, cost_scale=limit, horizon=HORIZON)
    oracle = SyntheticOracle(limit, teacher=answers, rng=np.random.default_rng([seed, 1]))
    train, valid = PreferenceBuffer(), PreferenceBuffer()
    valid.add_trajectories(validation)
    pairs = draw_pairs(len(validation), args.valid_queries, rng=rng)
    valid.add_labels(pairs, oracle.label(valid.queries(pairs)))
    train.add_trajectories(pool)
    model, seconds = new_model(members, pool, seed), 0.0
    for i in range(rounds):
        select = SELECTIONS["uniform" if i == 0 else selection]
        pairs = select(pool, args.queries // rounds, asked=train, model=model, rng=rng)
        train.add_labels(pairs, oracle.label(train.queries(pairs)))
        model = new_model(members, pool, seed)
        trainer = CostModelTrainer(
            model,
            rng=np.random.default_rng([seed, 2]),
            dead_zone=DeadZone(1.0, lr=0.0),
            lr=args.lr,
            batch_size=args.batch_size,
        )
        start = time.process_time()
        trainer.pretrain(train, valid, max_epochs=args.max_epochs, patience=args.patience)
        seconds = time.process_time() - start
    true = np.array([episode.true_cost for episode in test])
    report = cost_model_report(model.score(test), true, limit)
    return {**{key: report[key] for key in MEASURES}, "seconds": seconds}


def main(args: Args) -> None:
    torch.set_num_threads(1)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    print(f"{ENV_ID}, {args.seeds} seeds, {args.queries} + {args.valid_queries} queries, mean ± sd")
    for title, names in [("teacher", TEACHERS), ("selection", tuple(SELECTIONS))]:
        print(f"\n| {title} | " + " | ".join((*MEASURES, "CPU s of the last fit")) + " |")
        print("|---" * (len(MEASURES) + 2) + "|")
        for name in names:
            found = [
                measure(args, name, "uniform", seed, members=1, rounds=1)
                if title == "teacher"
                else measure(args, "perfect", name, seed, members=args.members, rounds=args.rounds)
                for seed in seeds
            ]
            cells = []
            for key in (*MEASURES, "seconds"):
                values = np.array([row[key] for row in found])
                values = values[np.isfinite(values)]  # W2 of a model that learned nothing
                digits = 3 if key in MEASURES[:4] else 2
                cells.append(f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}")
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
