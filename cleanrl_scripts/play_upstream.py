"""Play a saved policy in the real Safety-Gymnasium; `evaluate.py --upstream` starts this.

It runs in the environment that `make parity-env` builds, whose Gymnasium the other scripts cannot
use, and needs only PyTorch, NumPy, `pbcrl` and `pbcrl_envs.upstream` there.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pbcrl import PbcrlError, load_tensors
from pbcrl_envs import upstream


class Policy:
    """The mean action of a saved agent, (act_dim,), and noise around it if it is stochastic."""

    def __init__(self, tensors: dict[str, Tensor], *, noise: torch.Generator | None) -> None:
        self.tensors = tensors
        self.noise = noise
        names = [name for name in tensors if name.startswith("mean.") and name.endswith(".weight")]
        self.layers = sorted(int(name.split(".")[1]) for name in names)

    @torch.no_grad()
    def __call__(self, obs: np.ndarray) -> np.ndarray:
        saved = self.tensors
        x = torch.as_tensor(obs, dtype=torch.float32)
        x = ((x - saved["obs_mean"]) / (saved["obs_var"] + 1e-8).sqrt()).clamp(-10, 10)
        for layer in self.layers:
            x = F.linear(x, saved[f"mean.{layer}.weight"], saved[f"mean.{layer}.bias"])
            x = F.relu(x) if layer != self.layers[-1] else x
        if self.noise is not None:
            x = x + saved["log_std"].exp() * torch.randn(x.shape, generator=self.noise)
        action: np.ndarray = x.numpy()
        return action


def play(args: argparse.Namespace) -> None:
    tensors, _ = load_tensors(args.agent, kind="agent")
    env = upstream.make(args.env_id)
    noise = torch.Generator().manual_seed(args.seed) if args.stochastic else None
    policy = Policy(tensors, noise=noise)
    low, high = env.action_space.low, env.action_space.high  # type: ignore[attr-defined]
    returns, costs = np.zeros(args.episodes), np.zeros(args.episodes)
    for i in range(args.episodes):
        obs, _ = env.reset(seed=args.seed + i)
        over = False
        while not over:
            action = np.clip(policy(obs), low, high)
            obs, reward, terminated, truncated, info = env.step(action)
            returns[i] += reward
            costs[i] += info["cost"]
            over = terminated or truncated
    np.savez(args.output, returns=returns, costs=costs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("agent", help="agent.safetensors of a run")
    parser.add_argument("output", help=".npz file for the returns and costs of the episodes")
    parser.add_argument("--env-id", required=True)
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True, help="of the first episode")
    parser.add_argument("--stochastic", action="store_true")
    torch.set_num_threads(1)
    try:
        play(parser.parse_args())
    except (PbcrlError, ImportError, ValueError) as error:
        sys.exit(f"error: {error}")
