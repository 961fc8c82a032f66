"""The policy that a run leaves: one of the last fifth, by the cost model, and its file."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from pbcrl import Answers, LearnedCost, Trajectory
from pbcrl.constraint import Constraint
from pbcrl.errors import UnsupportedError
from pbcrl.export.policy import POLICY_FILE, Policy
from pbcrl.storage import save_tensors
from pbcrl_script_utils.evaluation import play
from pbcrl_script_utils.run import Run

CHOICE_SEED = 1_400_000
"""Plus a run's own: of the episodes by which its policy is chosen."""


def policy_of(agent: Any, env_id: str) -> Policy | None:
    """Return the policy of a script's agent; it may share its memory.

    None if the agent was edited and acts otherwise than a `Policy` does.
    """
    names = "obs_mean", "obs_var", "low", "high"
    try:
        policy = Policy(
            _in_units_of_the_action(agent),
            log_std=agent.log_std + agent.half_range.log(),
            env_id=env_id,
            **{name: getattr(agent, name) for name in names},
        )
    except (AttributeError, TypeError, UnsupportedError, ValueError):
        return None
    # Without this a file would silently leave out an edited `act` or `normalize`.
    mean, std = (x.cpu().numpy() for x in (agent.obs_mean, agent.obs_var.sqrt()))
    obs = mean + std * np.random.default_rng(0).normal(size=(8, len(mean))).astype(np.float32)
    low, high = (x.cpu().numpy() for x in (agent.low, agent.high))
    acts_alike = np.allclose(policy(obs), agent.act(obs).clip(low, high), rtol=1e-4, atol=1e-5)
    return policy if acts_alike else None


def _in_units_of_the_action(agent: Any) -> nn.Sequential:
    """The net of the mean, its last layer rescaled from half ranges about the middle."""
    if bool((agent.half_range == 1).all()) and not bool(agent.middle.any()):
        net: nn.Sequential = agent.mean
        return net
    *layers, last = agent.mean
    rescaled = nn.Linear(last.in_features, last.out_features, device=last.weight.device)
    rescaled.weight.data = last.weight.data * agent.half_range[:, None]
    rescaled.bias.data = last.bias.data * agent.half_range + agent.middle
    return nn.Sequential(*layers, rescaled)


def save_agent(run: Run, agent: Any, env_id: str) -> None:
    """Write the agent, which training and evaluate.py go on with, and its policy, for all else."""
    path, meta = run.folder / "agent.safetensors", {"env_id": env_id}
    save_tensors(path, kind="agent", tensors=agent.state_dict(), meta=meta)
    policy = policy_of(agent, env_id)
    if policy is None:
        run.warn(
            f"there will be no {POLICY_FILE}: the agent was edited, and has layers or ways to act "
            "that this file cannot hold (pbcrl/export/policy.py); evaluate.py plays it still"
        )
        return
    policy.save(run.folder / POLICY_FILE)


class Candidates:
    """Policies of the last fifth of the training, of which one is left at the end.

    A policy that is trained against a limit swings about it, and the last one is any of them. So
    the last `NUMBER`, evenly spread, each play `EPISODES` fresh episodes, half of them with mean
    actions. Of those that the constraint calls safe the one of the highest return is taken; if
    there are none, the one nearest to it. Neither labels nor true costs have a part in it: the cost
    model judges. The best of several is partly the luckiest: evaluations and certificates play
    other episodes.
    """

    NUMBER = 5
    EPISODES = 20

    def __init__(self, num_iterations: int) -> None:
        spacing = max(1, num_iterations // (5 * self.NUMBER))
        self._last = num_iterations
        self._wanted = range(num_iterations, 0, -spacing)[: self.NUMBER]
        self._kept: dict[int, dict[str, Tensor]] = {}  # by iteration

    def update(self, iteration: int, agent: nn.Module) -> None:
        """Take note of the agent at the end of an iteration."""
        if iteration in self._wanted:
            self._kept[iteration] = copy.deepcopy(agent.state_dict())

    def choose(self, agent: nn.Module, judge: Callable[[], tuple[float | None, float]]) -> int:
        """Leave the agent with the weights of the best; return the iteration that they are of.

        Args:
            agent: Whose weights are put in.
            judge: Plays it; returns by how much it is above what is allowed, None if nothing can
                tell, and its mean return. The last one is taken if nothing can tell of any.
        """
        best, best_key = self._last, (False, -math.inf)
        for iteration, state in self._kept.items():
            agent.load_state_dict(state)
            excess, mean_return = judge()
            if excess is not None:
                key = excess <= 0, mean_return if excess <= 0 else -excess
                if key >= best_key:  # the later one, if they are equal
                    best, best_key = iteration, key
        agent.load_state_dict(self._kept[best])
        return best

    def state_dict(self) -> dict[str, Any]:
        """All of them."""
        return {"kept": dict(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; those of a shorter run are no candidates."""
        self._kept = {n: kept for n, kept in state["kept"].items() if n in self._wanted}


def choose_policy(
    run: Run,
    agent: Any,
    args: Any,
    candidates: Candidates,
    cost_model: LearnedCost,
    constraint: Constraint,
) -> dict[str, int]:
    """Choose among the candidates of a run by fresh episodes; return what its summary has of it."""

    def judge() -> tuple[float | None, float]:
        returns, episodes = list[float](), list[Trajectory]()
        for deterministic in (True, False):
            new, played = play(
                agent,
                args.env_id,
                episodes=Candidates.EPISODES // 2,
                seed=args.seed + CHOICE_SEED,
                deterministic=deterministic,
                needs_cost=False,
                threads=args.threads,
            )
            returns += new.tolist()
            episodes += played
        rule, learned = copy.deepcopy(constraint), cost_model.score(episodes)  # it has a memory
        measured, allowed = rule.measure(Answers(), learned, cost_model.learned_limit)
        return None if measured is None else measured - allowed, float(np.mean(returns))

    with run.phase("choose among the policies of the last fifth", stage="choose"):
        chosen = candidates.choose(agent, judge)
        run.say(f"   that of iteration {chosen} of {args.num_iterations}")
    return {"chosen_iteration": chosen}
