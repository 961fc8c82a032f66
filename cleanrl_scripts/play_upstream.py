"""Play a saved policy in the real Safety-Gymnasium; `evaluate.py --upstream` starts this.

It runs in the environment that `make parity-env` builds, whose Gymnasium the other scripts cannot
use, and needs only PyTorch, NumPy, `pbcrl` and `pbcrl_envs.upstream` there.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch

from pbcrl import PbcrlError
from pbcrl_envs import upstream


def play(args: argparse.Namespace) -> None:
    policy, std = torch.jit.load(args.policy), torch.tensor(args.std)
    env = upstream.make(args.env_id)
    noise = torch.Generator().manual_seed(args.seed)
    low, high = env.action_space.low, env.action_space.high  # type: ignore[attr-defined]
    returns, costs = np.zeros(args.episodes), np.zeros(args.episodes)
    for i in range(args.episodes):
        obs, _ = env.reset(seed=args.seed + i)
        over = False
        while not over:
            with torch.no_grad():
                action = policy(torch.as_tensor(obs, dtype=torch.float32)[None])[0]
            if len(std):
                action += std * torch.randn(action.shape, generator=noise)
            action = np.clip(action.numpy(), low, high)
            obs, reward, terminated, truncated, info = env.step(action)
            returns[i] += reward
            costs[i] += info["cost"]
            over = terminated or truncated
    np.savez(args.output, returns=returns, costs=costs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", help="TorchScript from (1, obs_dim) to the mean (1, act_dim)")
    parser.add_argument("output", help=".npz file for the returns and costs of the episodes")
    parser.add_argument("--env-id", required=True)
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True, help="of the first episode")
    parser.add_argument("--std", type=float, nargs="*", default=[], help="of the noise, (act_dim,)")
    torch.set_num_threads(1)
    try:
        play(parser.parse_args())
    except (PbcrlError, ImportError, ValueError) as error:
        sys.exit(f"error: {error}")
