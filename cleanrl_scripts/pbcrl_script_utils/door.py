"""What is said of a task before the first iteration, or after it, because it cannot be learned so.

What cannot be meant is an error elsewhere: arguments out of range (`args.py`), an env that does not
fit (`envs.py`), rewards, costs and observations that are not finite (`pbcrl.RecordTrajectories`).
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np

from pbcrl.lagrange import KEPT, MOST_EXCESS
from pbcrl_script_utils.args import long_enough
from pbcrl_script_utils.rollout import Rollout

_ITERATIONS_AVERAGED = round(1 / (1 - KEPT))
_MOST_TIMES_THE_LIMIT = round(1 + MOST_EXCESS)


def horizon_by_id(args: Any) -> int | None:
    """Return the time limit of the env of a script's arguments; None without one."""
    if not hasattr(args, "num_steps"):
        return None
    return gym.spec(args.env_id.rpartition(":")[2]).max_episode_steps


def endless_episodes(args: Any, horizon: int) -> str | None:
    """Say if no episode can be over by its time limit before the run is.

    Args:
        args: Of a script that trains in envs, `with_lengths`.
        horizon: Time limit, in steps.
    """
    played = args.num_iterations * args.num_steps
    if played >= horizon:  # the first episodes of all envs but one may be cut, and do not count
        return None
    return (
        f"an episode lasts up to {horizon} steps, but each of the {args.num_envs} envs plays "
        f"{played} in this run: λ may never move, and nothing may be labelled; give "
        f"{long_enough(args, horizon)}, or fewer --num-envs"
    )


def unmeasurable_limit(args: Any, horizon: int, limit: float) -> str | None:
    """Say if λ, where it follows the true cost itself, cannot measure whether that is at its limit.

    Args:
        args: Of a script that trains in envs, `with_lengths`.
        horizon: Time limit, in steps.
        limit: d; NaN if it is not known, inf if there is none.
    """
    if hasattr(args, "constraint") or args.multiplier_lr == 0:  # a learned cost has its own scale
        return None
    if limit == 0:
        return (
            "by a limit of 0 no episode may cost anything: λ never falls below where it started, "
            "and ends at its cap if costs go on; where a little cost is acceptable, give it as "
            "--cost-limit, or set a price by --multiplier-lr 0 and --multiplier-initial"
        )
    episodes = args.batch_size / horizon
    # An iteration with one that costs 1 is then worse than it counts.
    if not 0 < limit * episodes * _MOST_TIMES_THE_LIMIT < 1:
        return None
    wanted = math.ceil(horizon / (limit * _MOST_TIMES_THE_LIMIT * args.num_envs))
    return (
        f"by a limit of {limit:g}, one in {1 / limit:.0f} episodes may cost 1, but an iteration "
        f"has about {episodes:.2g} of them: λ, which follows the mean of some "
        f"{_ITERATIONS_AVERAGED} iterations, hardly sees such costs; give --num-steps {wanted} or "
        "more, or more --num-envs, and as many more --total-timesteps"
    )


def constant_reward(rollout: Rollout, iteration: int) -> str | None:
    """Say if all rewards of the first iteration are the same, so that there is nothing to learn.

    Not if episodes end by themselves, with a reward per step: then it matters when they do.
    """
    rewards = rollout.rewards
    if iteration != 1 or np.ptp(rewards) > 0 or (rewards[0, 0] != 0 and rollout.terminated.any()):
        return None
    return (
        f"a policy learns from rewards that differ, but all {rewards.size} of the first iteration "
        f"are {rewards[0, 0]:g}; check the env's reward, or let it say, too, how near the goal is"
    )
