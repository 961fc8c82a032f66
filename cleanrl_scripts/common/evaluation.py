"""What a trained policy is worth: episodes in fresh envs, and learned against true costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from common.envs import action_bounds, horizon_of, make_envs, require_cost
from common.run import Run
from common.video import film
from pbcrl import LearnedCost, Trajectory
from pbcrl.metrics import bias, cost_model_report
from pbcrl.recorder import TrajectoryRecorder, discarded_envs, step_costs
from pbcrl.storage import write_atomically


class Policy(Protocol):
    """Any script's agent."""

    def act(self, obs: np.ndarray, noise: torch.Generator | None = None) -> np.ndarray:
        """Return actions (N, act_dim) for raw observations (N, obs_dim); the mean without noise."""
        ...


@dataclass(frozen=True)
class Judge:
    """A learned cost, as far as reports need it."""

    score: Callable[[Sequence[Trajectory]], np.ndarray]
    """Learned episode costs, (E,)."""
    learned_limit: float
    """Highest of them that is judged safe."""
    verdict: Callable[[Sequence[Trajectory]], np.ndarray] | None = None
    """What is judged safe if at most 0, (E,), where that is not the cost minus the limit."""
    cost_model: LearnedCost | None = None
    """For the cost of single steps, under films."""

    @classmethod
    def of(cls, cost_model: LearnedCost) -> Judge:
        """A cost model as it is now."""
        return cls(cost_model.score, cost_model.learned_limit, cost_model=cost_model)

    def report(self, episodes: Sequence[Trajectory], limit: float) -> dict[str, float]:
        """Compare learned with true episode costs; the learner never sees these numbers."""
        true = np.array([episode.true_cost for episode in episodes])
        learned = self.score(episodes)
        found = cost_model_report(learned, true, limit, learned_limit=self.learned_limit)
        if self.verdict is not None:
            judged = cost_model_report(self.verdict(episodes), true, limit)
            found |= {k: judged[k] for k in ("accuracy", "balanced_accuracy", "pair_accuracy")}
        return found


def play(
    policy: Policy, env_id: str, *, episodes: int, seed: int, deterministic: bool
) -> tuple[np.ndarray, list[Trajectory]]:
    """Play one episode in each of `episodes` seeded envs, with a progress bar.

    Returns:
        Returns, (episodes,), and trajectories with true costs. An episode that is discarded
        is played again.
    """
    envs = make_envs(env_id, episodes)
    low, high = action_bounds(envs)
    noise = None if deterministic else torch.Generator().manual_seed(seed)
    recorder = TrajectoryRecorder(episodes)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    trajectories: list[Trajectory | None] = [None] * episodes
    obs, _ = envs.reset(seed=seed)
    title = "deterministic" if deterministic else "stochastic"
    total = horizon_of(envs)  # steps; more if an episode is played again
    with tqdm(total=total, desc=f"   {title}", leave=False, mininterval=1, delay=2) as bar:
        while running.any():
            executed = np.clip(policy.act(obs, noise), low, high)
            next_obs, reward, terminated, truncated, infos = envs.step(executed)
            done = terminated | truncated
            costs = require_cost(step_costs(infos, episodes, done), env_id)
            discarded = discarded_envs(infos, episodes)
            finished = recorder.record(obs, executed, costs, done, discarded=discarded)
            returns += reward * running
            returns[discarded & running] = 0.0
            whole = done & ~discarded
            for i, trajectory in zip(np.flatnonzero(whole), finished, strict=True):
                trajectories[i] = trajectories[i] or trajectory
            running &= ~whole
            obs = next_obs
            bar.update()
    envs.close()
    return returns, [trajectory for trajectory in trajectories if trajectory is not None]


def evaluate(
    run: Run,
    policy: Policy,
    args: Any,
    limit: float,
    ended: np.ndarray,
    judge: Judge | None = None,
    test: Sequence[Trajectory] = (),
) -> dict[str, Any]:
    """Play the final policy, film it if asked, and return what every summary has.

    Args:
        run: Says what it does; `test_costs.csv` goes into its folder.
        policy: The agent.
        args: Needs `env_id`, `seed`, `eval_episodes` and `capture_video`.
        limit: d.
        ended: Return and true cost of all training episodes, (E, 2).
        judge: The learned cost, if there is one.
        test: Episodes that it is tested on; those just played if there are none.
    """
    seed = args.seed + 1_000_000
    with run.phase(f"evaluation, twice {args.eval_episodes} episodes", stage="evaluate"):
        (returns, episodes), (noisy_returns, noisy) = (
            play(
                policy,
                args.env_id,
                episodes=args.eval_episodes,
                seed=seed,
                deterministic=deterministic,
            )
            for deterministic in (True, False)
        )
    if args.capture_video > 0:
        folder = run.folder / "videos"
        bounds = action_bounds(make_envs(args.env_id, 1))
        title = f"films of {args.capture_video} episodes in {folder}"
        with run.phase(title, stage="film"):
            film(
                args.env_id,
                lambda obs: np.clip(policy.act(obs[None])[0], *bounds),
                episodes=args.capture_video,
                seed=seed,
                folder=folder,
                cost_model=None if judge is None else judge.cost_model,
            )
    true_cost = float(np.mean([episode.true_cost for episode in episodes]))
    last_tenth = ended[-max(1, len(ended) // 10) :]
    summary: dict[str, Any] = {
        "return": float(returns.mean()),
        "true_cost": true_cost,
        "cost_limit": limit,
        "bias": bias(true_cost, limit) if np.isfinite(limit) else None,
        "return_stochastic": float(noisy_returns.mean()),
        "true_cost_stochastic": float(np.mean([episode.true_cost for episode in noisy])),
        "return_last_tenth": float(last_tenth[:, 0].mean()) if len(ended) else None,
        "true_cost_last_tenth": float(last_tenth[:, 1].mean()) if len(ended) else None,
    }
    if judge is not None:
        compared = test or [*episodes, *noisy]
        summary |= {
            "learned_cost": float(judge.score(episodes).mean()),
            "learned_limit": judge.learned_limit,
            **judge.report(compared, limit),
            "test_episodes": len(compared),
        }
        save_costs(run.folder, compared, judge.score(compared))
    return summary


def save_costs(folder: Path, episodes: Sequence[Trajectory], learned: np.ndarray) -> None:
    """Write true and learned costs of the test episodes to `test_costs.csv`."""
    rows = [f"{e.true_cost:.9g},{cost:.9g}\n" for e, cost in zip(episodes, learned, strict=True)]
    text = "true_cost,learned_cost\n" + "".join(rows)
    write_atomically(folder / "test_costs.csv", text.encode())


def interval(values: np.ndarray) -> float:
    """Half-width of the normal 95 % interval of the mean."""
    return float(1.96 * values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else np.nan
