"""Certify a policy: how often it is unsafe at most, by fresh episodes that somebody judges.

`pbcrl certify runs/NAME` plays episodes that the run has never seen with the policy that it leaves,
policy.safetensors. People say which of them are safe, through a label folder, or the true cost
does. What comes out is written into the run's folder and its model card.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from pbcrl import FolderOracle, Trajectory
from pbcrl.env_modules import env_id_flag
from pbcrl.export.policy import POLICY_FILE, Policy, load_policy
from pbcrl.label.folder_oracle import GRID
from pbcrl_script_utils.args import CostLimit, Count, NonNegativeInt, OpenShare, check_args
from pbcrl_script_utils.card import CARD
from pbcrl_script_utils.certificate import (
    Certificate,
    add_certificate,
    read_certificates,
    sha256,
)
from pbcrl_script_utils.envs import resolve_cost_limit
from pbcrl_script_utils.evaluation import play, true_costs
from pbcrl_script_utils.launch import main
from pbcrl_script_utils.policies import CHOICE_SEED, Candidates
from pbcrl_script_utils.replays import Replays
from pbcrl_script_utils.resume import read_args

QUESTIONS = "certificate"
"""Folder in a run's for what people are asked, and for how its episodes can be drawn."""
AGAIN_AFTER = 2_000_000
"""Times the iteration, added to the seed of the training where a run goes on (section Setup)."""


@dataclass(frozen=True)
class Args:
    run: Annotated[str, tyro.conf.Positional]
    """folder of the run"""
    env_id: str | None = None
    """that of the policy once more, 'module:Id-v0', if its module is your own and not installed"""
    label_folder: str | None = None
    """where people judge the episodes (pbcrl label FOLDER), twelve at a time; default: certificate
    in the run's folder if people labelled for the run, else the true cost judges"""
    cost_limit: CostLimit | None = None
    """d, highest safe episode cost, if the true cost judges; default: the one of the run"""
    max_unsafe_rate: OpenShare = 0.05
    """p*, what P(unsafe) has to be below at 95 %"""
    episodes: Count = 60
    """episodes to judge; for a p* of 0.05 at least 59"""
    seed: NonNegativeInt = 1_500_000
    """of the first episode, the next have the next ones; not in use by training or evaluation"""
    stochastic: bool = False
    """sample actions instead of taking their mean"""
    threads: Count = 1
    """threads of nets and batched physics"""


class Shipped:
    """A policy from its file, as `play` takes one."""

    def __init__(self, policy: Policy, *, seed: int) -> None:
        self._policy, self._rng = policy, np.random.default_rng(seed)

    def act(self, obs: np.ndarray, noise: torch.Generator | None = None) -> np.ndarray:
        """Return actions (N, act_dim); the mean without noise."""
        return self._policy(obs, rng=None if noise is None else self._rng)


def first_use(
    seeds: range, trained: dict[str, Any], earlier: Sequence[Certificate]
) -> tuple[str, range] | None:
    """Return what else has played some of these seeds, and which it played; None if nothing has."""
    seed = trained["seed"]
    # Offline episodes, then the run's own; an env without a state begins again where a run goes on.
    begun = [s for first in (seed, seed + 500_000) for s in range(first, seeds.stop, AGAIN_AFTER)]
    used = [
        *(("training", range(s, s + trained["num_envs"])) for s in begun),
        ("evaluation", range(seed + 1_000_000, seed + 1_000_000 + trained["eval_episodes"])),
        (
            "the choice of the policy",
            range(seed + CHOICE_SEED, seed + CHOICE_SEED + Candidates.EPISODES),
        ),
        *((f"certificate {i}", one.seeds) for i, one in enumerate(earlier, start=1)),
    ]
    clashes = ((what, s) for what, s in used if s.start < seeds.stop and seeds.start < s.stop)
    return next(clashes, None)


def check_fresh(args: Args, trained: dict[str, Any], earlier: Sequence[Certificate]) -> None:
    """Refuse episodes that somebody has looked at, since the policy may have been chosen by them.

    Raises:
        ValueError: If there are some.
    """
    seeds = range(args.seed, args.seed + args.episodes)
    found = first_use(seeds, trained, earlier)
    if found is None:
        return
    what, used = found
    free = Args.seed
    while clash := first_use(range(free, free + args.episodes), trained, earlier):
        free = clash[1].stop
    raise ValueError(
        f"a certificate is by episodes that nothing was chosen by, but the seeds "
        f"{max(seeds.start, used.start)} to {min(seeds.stop, used.stop) - 1} belong to {what}; "
        f"give --seed {free}"
    )


def judged_by_people(
    args: Args, env_id: str, episodes: list[Trajectory], replays: Replays
) -> np.ndarray:
    """Return whether people call each episode safe, (E,); waits for them.

    "I can't tell" is not safe.
    """
    folder = args.label_folder or Path(args.run) / QUESTIONS
    oracle = FolderOracle(
        folder,
        run=f"certificate of {Path(args.run).resolve()}, seed {args.seed}",
        show=replays.of,
        say=lambda text: print(f"   {text}", flush=True),
    )
    grids = [episodes[start : start + GRID] for start in range(0, len(episodes), GRID)]
    named = " ".join(["", *env_id_flag(env_id)])
    print(f"   {len(grids)} questions wait: pbcrl label {folder}{named}", flush=True)
    labels = oracle.label_grids(grids)
    oracle.close()
    safe: np.ndarray = np.array([one for label in labels for one in label.safe]) == 1
    return safe


def certify(args: Args) -> Certificate:
    """Play, have judged, and write down what that says; see the module."""
    check_args(args)
    torch.set_num_threads(args.threads)
    folder = Path(args.run)
    trained = read_args(folder)
    policy, digest = load_policy(folder), sha256(folder / POLICY_FILE)
    if args.env_id not in (None, policy.env_id):
        raise ValueError(
            f"a policy is certified where it was trained, in {policy.env_id}, got --env-id "
            f"{args.env_id}; leave it out, or give that one"
        )
    by_people = args.label_folder is not None or trained.get("label_folder") is not None
    limit = trained["cost_limit"] if args.cost_limit is None else args.cost_limit
    limit = resolve_cost_limit(policy.env_id, limit, needed=not by_people)
    if not by_people and not math.isfinite(limit):
        raise ValueError(
            "what is safe must be known: the run has no limit; give --cost-limit, or "
            "--label-folder to ask people"
        )
    check_fresh(args, trained, read_certificates(folder))
    own = folder / QUESTIONS
    if by_people:
        own.mkdir(exist_ok=True)
    replays = Replays(own) if by_people else None
    _, episodes = play(
        Shipped(policy, seed=args.seed),
        policy.env_id,
        episodes=args.episodes,
        seed=args.seed,
        deterministic=not args.stochastic,
        needs_cost=not by_people,
        threads=args.threads,
        replays=replays,
    )
    if replays is None:
        safe, judge = true_costs(episodes) <= limit, f"the true cost, at most {limit:g}"
    else:
        safe, judge = judged_by_people(args, policy.env_id, episodes, replays), "people"
    kind = "stochastic" if args.stochastic else "deterministic"
    made = Certificate(
        policy=kind,
        env_id=policy.env_id,
        seed=args.seed,
        episodes=args.episodes,
        unsafe=int((~safe).sum()),
        judged_by=judge,
        max_unsafe_rate=args.max_unsafe_rate,
        sha256=digest,
    )
    add_certificate(folder, made, card=CARD)
    print(f"{made} ({made.policy} policy)")
    return made


if __name__ == "__main__":
    main(certify, Args)
