"""Play a saved run on freshly seeded envs and say what it returns and costs, with intervals.

`python cleanrl_scripts/evaluate.py runs/NAME` takes a run of `ppo_lag.py` or `ppo_lag_pbcrl.py`.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import torch
import tyro
from film import check_film, film
from run_io import (
    action_bounds,
    flat_dims,
    horizon_of,
    main,
    make_envs,
    print_table,
    require_cost,
    require_positive,
    resolve_cost_limit,
)
from torch import Tensor, nn

from pbcrl import (
    LearnedCost,
    MismatchError,
    StorageError,
    Trajectory,
    TrajectoryRecorder,
    bias,
    cost_model_report,
    diverged_envs,
    load_cost_model,
    load_tensors,
    step_costs,
)

# -- Args ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    run: Annotated[str, tyro.conf.Positional]
    """folder of the run"""
    env_id: str | None = None
    """where to play; default: where it was trained; another one needs the same spaces"""
    cost_limit: float | None = None
    """d, highest safe episode cost; default: the one of the run, or the task's own"""
    episodes: int = 100
    """episodes, each in an env of its own"""
    seed: int = 1_000_000
    """of the first env; env i gets seed + i"""
    stochastic: bool = False
    """sample actions instead of taking their mean"""
    capture_video: int = 0
    """episodes to film, with the deterministic policy, as mp4 in the run's folder"""
    upstream: bool = False
    """play as many episodes in the real Safety-Gymnasium too, and compare"""
    upstream_python: str = ".venv-parity/bin/python"
    """interpreter of an environment with the real Safety-Gymnasium"""
    torch_threads: int = 2
    """threads of PyTorch"""


# -- Agent -----------------------------------------------------------------------------------------


def mlp(sizes: list[int], *, last_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        last = i == len(sizes) - 2
        layer = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(layer.weight, last_gain if last else 2**0.5)
        nn.init.zeros_(layer.bias)
        layers += [layer] if last else [layer, nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Agent(nn.Module):
    """Gaussian policy and two critics, for reward and cost, on running-normalised observations."""

    obs_mean: Tensor
    obs_var: Tensor
    obs_count: Tensor

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        *,
        hidden_sizes: tuple[int, ...] = (256, 256, 256),
        initial_log_std: float = -0.5,
    ) -> None:
        super().__init__()
        self.mean = mlp([obs_dim, *hidden_sizes, act_dim], last_gain=0.01)
        self.log_std = nn.Parameter(torch.full((act_dim,), initial_log_std))
        self.critic_r = mlp([obs_dim, *hidden_sizes, 1], last_gain=1.0)
        self.critic_c = mlp([obs_dim, *hidden_sizes, 1], last_gain=1.0)
        self.register_buffer("obs_mean", torch.zeros(obs_dim))
        self.register_buffer("obs_var", torch.ones(obs_dim))
        self.register_buffer("obs_count", torch.tensor(1e-4, dtype=torch.float64))

    def normalize(self, obs: Tensor) -> Tensor:
        return ((obs - self.obs_mean) / (self.obs_var + 1e-8).sqrt()).clamp(-10, 10)

    @torch.no_grad()
    def update_normalizer(self, obs: Tensor) -> None:
        """Fold a batch into the running moments (Chan et al.), (B, obs_dim)."""
        var, mean = torch.var_mean(obs, dim=0, correction=0)
        total = self.obs_count + len(obs)
        share = len(obs) / float(total)
        delta = mean - self.obs_mean
        self.obs_var.mul_(1 - share).add_(share * var + share * (1 - share) * delta**2)
        self.obs_mean.add_(share * delta)
        self.obs_count.copy_(total)

    def log_prob(self, mean: Tensor, actions: Tensor) -> Tensor:
        return self.log_density(((actions - mean) / self.log_std.exp()).square())

    def log_density(self, z_squared: Tensor) -> Tensor:
        """Return the logarithm of the density where the squared standard scores are these."""
        constant = self.log_std.sum() + 0.5 * np.log(2 * np.pi) * len(self.log_std)
        return z_squared.sum(-1).mul_(-0.5).sub_(constant)


def report(cost_model: LearnedCost, episodes: list[Trajectory], limit: float) -> dict[str, float]:
    """Compare learned with true episode costs; the learner never sees these numbers."""
    true = np.array([episode.true_cost for episode in episodes])
    learned_limit = cost_model.learned_limit
    return cost_model_report(cost_model.score(episodes), true, limit, learned_limit=learned_limit)


@torch.no_grad()
def play(
    agent: Agent, env_id: str, *, episodes: int, seed: int, deterministic: bool
) -> tuple[np.ndarray, list[Trajectory]]:
    """Play one episode in each of `episodes` seeded envs; return returns and trajectories."""
    envs = make_envs(env_id, episodes)
    low, high = action_bounds(envs)
    noise = torch.Generator().manual_seed(seed)
    recorder = TrajectoryRecorder(episodes)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    trajectories: list[Trajectory | None] = [None] * episodes
    obs, _ = envs.reset(seed=seed)
    while running.any():
        action = agent.mean(agent.normalize(torch.as_tensor(obs, dtype=torch.float32)))
        if not deterministic:
            action += agent.log_std.exp() * torch.randn(action.shape, generator=noise)
        executed = np.clip(action.numpy(), low, high)
        next_obs, reward, terminated, truncated, infos = envs.step(executed)
        done = terminated | truncated
        costs = require_cost(step_costs(infos, episodes, done), env_id)
        diverged = diverged_envs(infos, episodes)
        finished = recorder.record(obs, executed, costs, done, diverged=diverged)
        returns += reward * running
        returns[diverged & running] = 0.0  # such an episode is played again
        whole = done & ~diverged
        for i, trajectory in zip(np.flatnonzero(whole), finished, strict=True):
            trajectories[i] = trajectories[i] or trajectory
        running &= ~whole
        obs = next_obs
    envs.close()
    return returns, [trajectory for trajectory in trajectories if trajectory is not None]


@torch.no_grad()
def act(agent: Agent, obs: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the deterministic policy's action in one observation, clipped to its bounds."""
    mean: Tensor = agent.mean(agent.normalize(torch.as_tensor(obs, dtype=torch.float32)))
    action: np.ndarray = np.clip(mean.numpy(), low, high)
    return action


def interval(values: np.ndarray) -> float:
    """Half-width of the normal 95 % interval of the mean."""
    return float(1.96 * values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else np.nan


def difference_interval(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Half-width of the normal 95 % interval of the difference of two independent means."""
    return float(np.hypot(interval(ours), interval(theirs)))


def play_upstream(args: Args, env_id: str) -> tuple[np.ndarray, np.ndarray]:
    """Play the policy in the real Safety-Gymnasium; return the episodes' returns and costs."""
    # Unresolved: the interpreter of a virtual environment is a link, and the link is what counts.
    python = Path(args.upstream_python).absolute()
    if not python.exists():
        raise ValueError(
            "--upstream needs a Python with the real Safety-Gymnasium, whose Gymnasium this "
            f"environment cannot have; there is none at {python}; build it by `make parity-env`, "
            "or name another with --upstream-python"
        )
    with TemporaryDirectory() as folder:
        output = Path(folder) / "episodes.npz"
        command = [str(python), str(Path(__file__).with_name("play_upstream.py"))]
        command += [str(Path(args.run) / "agent.safetensors"), str(output), f"--env-id={env_id}"]
        command += [f"--episodes={args.episodes}", f"--seed={args.seed}"]
        command += ["--stochastic"] * args.stochastic
        child = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if child.returncode != 0:
            lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
            raise RuntimeError(
                f"the real Safety-Gymnasium must play {env_id}, but {python} failed: "
                f"{lines[-1].removeprefix('error: ')}"
            )
        with np.load(output, allow_pickle=False) as episodes:
            return episodes["returns"], episodes["costs"]


def evaluate(args: Args) -> None:
    require_positive(args, "episodes", "torch_threads")
    torch.set_num_threads(args.torch_threads)
    folder = Path(args.run)
    try:
        trained = json.loads((folder / "args.json").read_text())
    except (OSError, ValueError) as error:
        raise StorageError(
            f"a run's folder holds args.json, {folder} has none that can be read ({error}); "
            "give the folder that the training script named"
        ) from error
    tensors, meta = load_tensors(folder / "agent.safetensors", kind="agent")
    env_id = args.env_id or meta["env_id"]
    same_task = env_id == meta["env_id"]
    given = trained["cost_limit"] if args.cost_limit is None and same_task else args.cost_limit
    limit = resolve_cost_limit(env_id, given)
    envs = make_envs(env_id, 1)
    found = flat_dims(envs)
    low, high = action_bounds(envs)
    time_limit = horizon_of(envs)
    envs.close()
    if found != (meta["obs_dim"], meta["act_dim"]):
        raise MismatchError(
            f"{env_id} has (obs_dim, act_dim) = {found}, the agent was trained on "
            f"{meta['env_id']} with {(meta['obs_dim'], meta['act_dim'])}; play it there"
        )
    agent = Agent(meta["obs_dim"], meta["act_dim"], hidden_sizes=tuple(meta["hidden_sizes"]))
    agent.load_state_dict(tensors)
    if args.capture_video > 0:
        check_film(env_id)
    returns, episodes = play(
        agent, env_id, episodes=args.episodes, seed=args.seed, deterministic=not args.stochastic
    )
    true = np.array([episode.true_cost for episode in episodes])
    result = {
        "env_id": env_id,
        "episodes": args.episodes,
        "policy": "stochastic" if args.stochastic else "deterministic",
        "return": float(returns.mean()),
        "return_interval": interval(returns),
        "true_cost": float(true.mean()),
        "true_cost_interval": interval(true),
        "cost_limit": limit,
        "bias": bias(float(true.mean()), limit) if np.isfinite(limit) else None,
    }
    cost_model: LearnedCost | None = None
    if (folder / "cost_model.safetensors").exists():
        cost_model, _ = load_cost_model(folder / "cost_model.safetensors")
        try:
            cost_model.check_horizon(time_limit)
        except ValueError as error:
            print(f"   without the learned cost: {error}")
            cost_model = None
    if cost_model is not None:
        result["learned_cost"] = float(cost_model.score(episodes).mean())
        result["learned_limit"] = cost_model.learned_limit
        result |= report(cost_model, episodes, limit)
    if args.upstream:
        their_returns, their_costs = play_upstream(args, env_id)
        result["upstream_return"] = float(their_returns.mean())
        result["upstream_return_interval"] = interval(their_returns)
        result["return_difference"] = float(returns.mean() - their_returns.mean())
        result["return_difference_interval"] = difference_interval(returns, their_returns)
        result["upstream_true_cost"] = float(their_costs.mean())
        result["upstream_true_cost_interval"] = interval(their_costs)
        result["true_cost_difference"] = float(true.mean() - their_costs.mean())
        result["true_cost_difference_interval"] = difference_interval(true, their_costs)
    print_table(result)
    if args.capture_video > 0:
        films = film(
            env_id,
            lambda obs: act(agent, obs, low, high),
            episodes=args.capture_video,
            seed=args.seed,
            folder=folder / "videos",
            cost_model=cost_model,
        )
        print("\n".join(f"   filmed {path}" for path in films))


if __name__ == "__main__":
    main(evaluate, Args)
