"""What a trained policy is worth: episodes in fresh envs, and learned against true costs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from pbcrl import LearnedCost, RecordTrajectories, Trajectory
from pbcrl.metrics import (
    REPORT,
    bias,
    cost_model_report,
    step_auroc,
    true_cost_at_limit,
    true_cost_at_limit_interval,
    violation_rate,
)
from pbcrl.storage import write_atomically
from pbcrl_script_utils.envs import action_bounds, horizon_of, make_envs, outcomes
from pbcrl_script_utils.replays import RecordStarts, Replays
from pbcrl_script_utils.run import Run
from pbcrl_script_utils.verdict import interval
from pbcrl_script_utils.video import film


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
    step_cost: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    """Learned costs (T,) of obs (T, *obs_shape) and actions (T, act_dim)."""
    cost_model: LearnedCost | None = None
    """For the cost of single steps, under films."""

    @classmethod
    def of(cls, cost_model: LearnedCost) -> Judge:
        """A cost model as it is now."""
        return cls(
            cost_model.score,
            cost_model.learned_limit,
            step_cost=cost_model.step_cost,
            cost_model=cost_model,
        )

    def report(self, episodes: Sequence[Trajectory], limit: float) -> dict[str, float]:
        """Compare learned with true costs; the learner never sees these numbers.

        What the episodes leave undefined is NaN; that is all, where no true cost or limit is known.
        """
        true = true_costs(episodes)
        if math.isnan(limit) or np.isnan(true).any():
            return dict.fromkeys((*REPORT, "step_auroc"), math.nan)
        learned = self.score(episodes)
        with _undefined_is_nan():
            found = cost_model_report(learned, true, limit, learned_limit=self.learned_limit)
            if self.verdict is not None:
                judged = cost_model_report(self.verdict(episodes), true, limit)
                found |= {k: judged[k] for k in ("accuracy", "balanced_accuracy", "pair_accuracy")}
        return found | {"step_auroc": self.step_auroc(episodes)}

    def step_auroc(self, episodes: Sequence[Trajectory]) -> float:
        """`pbcrl.metrics.step_auroc`; NaN without step costs."""
        if any(episode.costs is None for episode in episodes):
            return math.nan
        with _undefined_is_nan():
            return np.nan if self.step_cost is None else step_auroc(self.step_cost, episodes)


@contextmanager
def _undefined_is_nan() -> Iterator[None]:
    """A summary has `null` for what is undefined, and the verdict says what matters of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is undefined", RuntimeWarning)
        yield


PRETRAINED = "balanced_accuracy", "pair_accuracy", "step_auroc", "true_cost_at_limit"
"""What a summary has of the cost model before it was fine-tuned."""


def report_pretrained(
    run: Run, cost_model: LearnedCost, test: Sequence[Trajectory], limit: float
) -> dict[str, float]:
    """Say how good a pretrained cost model is, if it can be told; return it for the summary."""
    found = Judge.of(cost_model).report(test, limit)
    if math.isfinite(found["pair_accuracy"]):  # else no true cost is known
        run.say(
            f"   on {len(test)} test episodes: balanced accuracy {found['balanced_accuracy']:.3f}, "
            f"pairs {found['pair_accuracy']:.3f}, step AUROC {found['step_auroc']:.3f}"
        )
    return {f"pretrained_{key}": found[key] for key in PRETRAINED}


def true_costs(episodes: Sequence[Trajectory]) -> np.ndarray:
    """Their true costs, (E,); NaN where none is known."""
    costs: np.ndarray = outcomes(episodes)[:, 1]
    return costs


def costly_mean(costs: np.ndarray) -> float:
    """Mean of the episode costs above 0; NaN if there are none."""
    costly = costs[costs > 0]
    return float(costly.mean()) if len(costly) else math.nan


def play(
    policy: Policy,
    env_id: str,
    *,
    episodes: int,
    seed: int,
    deterministic: bool,
    needs_cost: bool = True,
    threads: int = 1,
    replays: Replays | None = None,
) -> tuple[np.ndarray, list[Trajectory]]:
    """Play one episode in each of `episodes` seeded envs, with a progress bar.

    Args:
        policy: Any script's agent.
        env_id: As `make_envs` takes it.
        episodes: How many.
        seed: Of the first env; the next have the next ones.
        deterministic: Whether to take the mean action.
        needs_cost: Whether an env without a true cost is refused.
        threads: Of batched physics.
        replays: Told how the episodes can be played again, for people to see.

    Returns:
        Returns, (episodes,), and trajectories with true costs, or without any if the env reports
        none and `needs_cost` is false. An episode that is discarded is played again.
    """
    envs: Any = make_envs(env_id, episodes, threads=threads)
    envs = RecordTrajectories(envs, needs_cost=needs_cost)
    if replays is not None:
        envs = RecordStarts(envs, env_id, replays)
    low, high, *_ = action_bounds(envs)
    noise = None if deterministic else torch.Generator().manual_seed(seed)
    found: list[Trajectory | None] = [None] * episodes
    obs, _ = envs.reset(seed=seed)
    title = "deterministic" if deterministic else "stochastic"
    total = horizon_of(envs)  # steps; more if an episode is played again
    with tqdm(total=total, desc=f"   {title}", leave=False, mininterval=1, delay=2) as bar:
        while None in found:
            obs, *_, infos = envs.step(np.clip(policy.act(obs, noise), low, high))
            if "trajectory" in infos:
                found = [old or new for old, new in zip(found, infos["trajectory"], strict=True)]
            bar.update()
    envs.close()
    played = [trajectory for trajectory in found if trajectory is not None]
    return outcomes(played)[:, 0], played


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
        args: Needs `env_id`, `seed`, `eval_episodes`, `capture_video` and `threads`.
        limit: d; NaN if it is not known, inf if there is none.
        ended: Return and true cost of all training episodes, (E, 2).
        judge: The learned cost, if there is one.
        test: Episodes that it is tested on; those just played if there are none.
    """
    seed = args.seed + 1_000_000
    number = f"{args.eval_episodes} episode{'s' * (args.eval_episodes > 1)}"
    with run.phase(f"evaluation, twice {number}", stage="evaluate"):
        (returns, episodes), (noisy_returns, noisy) = (
            play(
                policy,
                args.env_id,
                episodes=args.eval_episodes,
                seed=seed,
                deterministic=deterministic,
                needs_cost=math.isfinite(limit) and getattr(args, "label_folder", None) is None,
                threads=args.threads,
            )
            for deterministic in (True, False)
        )
    if args.capture_video > 0:
        folder = run.folder / "videos"
        bounds = action_bounds(make_envs(args.env_id, 1))[:2]
        title = f"films of {args.capture_video} episodes in {folder}"
        with run.phase(title, stage="film"):
            films = film(
                args.env_id,
                lambda obs: np.clip(policy.act(obs[None])[0], *bounds),
                episodes=args.capture_video,
                seed=seed,
                folder=folder,
                cost_model=None if judge is None else judge.cost_model,
            )
            run.filmed(films)
    true, noisy_true = true_costs(episodes), true_costs(noisy)
    limited = np.isfinite(limit) and not np.isnan([true, noisy_true]).any()
    last_tenth, last_fifth = (ended[-max(1, len(ended) // part) :] for part in (10, 5))
    recent = np.concatenate([true, noisy_true, last_fifth[:, 1]])
    summary: dict[str, Any] = {
        "eval_episodes": len(episodes),
        "return": float(returns.mean()),
        "return_interval": interval(returns),
        "true_cost": float(true.mean()),
        "true_cost_interval": interval(true),
        "cost_limit": limit,
        "bias": bias(float(true.mean()), limit) if limited else None,
        "violation_rate": violation_rate(true, limit) if limited else None,
        "costly_episodes": int((true > 0).sum()) if limited else None,
        "costly_episode_cost": costly_mean(recent) if limited else None,
        "return_stochastic": float(noisy_returns.mean()),
        "return_stochastic_interval": interval(noisy_returns),
        "true_cost_stochastic": float(noisy_true.mean()),
        "true_cost_stochastic_interval": interval(noisy_true),
        "bias_stochastic": bias(float(noisy_true.mean()), limit) if limited else None,
        "violation_rate_stochastic": violation_rate(noisy_true, limit) if limited else None,
        "costly_episodes_stochastic": int((noisy_true > 0).sum()) if limited else None,
        "return_last_fifth": float(last_fifth[:, 0].mean()) if len(ended) else None,
        "true_cost_last_fifth": float(last_fifth[:, 1].mean()) if len(ended) else None,
        "return_last_tenth": float(last_tenth[:, 0].mean()) if len(ended) else None,
        "true_cost_last_tenth": float(last_tenth[:, 1].mean()) if len(ended) else None,
    }
    if judge is not None:
        played = [*episodes, *noisy]
        learned = judge.score(played)
        costs = learned, np.concatenate([true, noisy_true])
        at_limit = half = math.nan
        if not np.isnan(costs[1]).any():
            with _undefined_is_nan():
                at_limit = true_cost_at_limit(*costs, learned_limit=judge.learned_limit)
                half = true_cost_at_limit_interval(*costs, learned_limit=judge.learned_limit)
        compared = test or played
        summary |= {
            "learned_cost": float(learned[: len(episodes)].mean()),
            "learned_cost_stochastic": float(learned[len(episodes) :].mean()),
            "learned_limit": judge.learned_limit,
            "true_cost_at_limit_evaluation": at_limit,
            "true_cost_at_limit_evaluation_interval": half,
            "step_auroc_evaluation": judge.step_auroc(played),
            **judge.report(compared, limit),
            "test_episodes": len(compared),
        }
        save_costs(run.folder, compared, judge.score(compared))
    return summary


def save_costs(folder: Path, episodes: Sequence[Trajectory], learned: np.ndarray) -> None:
    """Write true and learned costs of the test episodes to `test_costs.csv`, if they are known."""
    if any(episode.costs is None for episode in episodes):
        return
    rows = [f"{e.true_cost:.9g},{cost:.9g}\n" for e, cost in zip(episodes, learned, strict=True)]
    text = "true_cost,learned_cost\n" + "".join(rows)
    write_atomically(folder / "test_costs.csv", text.encode())
