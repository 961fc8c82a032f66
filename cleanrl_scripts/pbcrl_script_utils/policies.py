"""The policies that a run leaves: the last one, and the best that labels call safe."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from pbcrl.errors import UnsupportedError
from pbcrl.export.policy import POLICY_FILE, SAFE_POLICY_FILE, Policy
from pbcrl.storage import save_tensors
from pbcrl_script_utils.run import Run


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


class SafePolicy:
    """Keeps the policy of the highest return among those that labels call safe.

    It is chosen in a labelling round, by the labels of the episodes that ended since the round
    before: the policy is the one that played the last of them, its return the mean return of all of
    them. True costs have no part in it. Labels are few per round, and the best of several lucky
    rounds is lucky: evaluate it before it is used.
    """

    def __init__(self) -> None:
        self.iteration: int | None = None
        """In which it was chosen; None as long as no policy was called safe."""
        self.mean_return: float | None = None
        """Of the episodes by which it was chosen."""
        self._num_ended = 0  # as of the last labelling round
        self._state: dict[str, Any] | None = None  # of the `Policy`

    def update(
        self,
        policy: Policy | None,
        ended: np.ndarray,
        *,
        iteration: int,
        unsafe: float | None,
        allowed: float,
    ) -> None:
        """Take note of a labelling round, before the policy is updated.

        Args:
            policy: As it is now; it is copied. None if no file could hold it.
            ended: Return and true cost of all episodes so far, (E, 2); costs are not looked at.
            iteration: The present one.
            unsafe: What labels say of the newest episodes, such as the share of unsafe ones; None
                or NaN if they say nothing, or are about older ones.
            allowed: Highest value of it that is called safe.
        """
        new, self._num_ended = ended[self._num_ended :, 0], len(ended)
        if policy is None or unsafe is None or not unsafe <= allowed or len(new) == 0:
            return
        if self.mean_return is None or new.mean() > self.mean_return:
            self.iteration, self.mean_return = iteration, float(new.mean())
            self._state = copy.deepcopy(policy.state_dict())

    def save(self, folder: Path) -> None:
        """Write it to the run's folder, if there is one."""
        if self._state is not None:
            Policy.from_state(self._state).save(folder / SAFE_POLICY_FILE)

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {name.lstrip("_"): value for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        self.iteration, self.mean_return = state["iteration"], state["mean_return"]
        self._num_ended, self._state = state["num_ended"], state["state"]
