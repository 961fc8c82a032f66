"""The learned cost in Stable-Baselines3, whose algorithms know a single reward and no cost.

`PreferenceCostVecEnv` reports reward - λ · learned cost, so that PPO, SAC and the others train
under it unchanged; `MultiplierCallback` moves λ. Does not depend on the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from pbcrl.cost_model import LearnedCost
from pbcrl.lagrange import LagrangeMultiplier
from pbcrl.recorder import BoolArray, finished_trajectories
from pbcrl.trajectory import Trajectory
from pbcrl.wrappers import PreferenceCostVectorWrapper

try:
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
except ImportError as error:
    raise ImportError(
        f"pbcrl.adapters.sb3 needs Stable-Baselines3, but {error}; pip install 'pbcrl[sb3]'"
    ) from error


@final
class PreferenceCostVecEnv(VecEnvWrapper):
    r"""Reports reward - λ c_ψ(s_t, a_t), and records finished episodes.

    .. math:: r_t - λ\, c_ψ(s_t, a_t)        (Eq. 12, `eq:lagrange`, step by step)

    s_t is the observation before the step: in the step that ends an episode it is none of the next
    one's, which Stable-Baselines3 returns there. The model scores all envs at once in the main
    process, since the workers of a `SubprocVecEnv` would keep copies of weights that are
    fine-tuned here. Each info holds what `PreferenceCostWrapper` puts there: `cost`, the learned
    one; `true_cost`, if the env reports a cost; `trajectory`, at an episode's last step. λ = 0
    reduces to the reward of the env.

    Put it outside `DummyVecEnv` or `SubprocVecEnv` and inside all that changes observations or
    rewards, such as `VecNormalize` and `VecFrameStack`. A `Monitor` around the single envs, as
    `make_vec_env` puts it, logs the reward of the env; a `VecMonitor` outside, the one reported
    here.

    Args:
        venv: A vector env of single envs that `PreferenceCostWrapper` takes.
        cost_model: Scores the steps; it is not copied, so that fine-tuning has effect here.
        multiplier: λ, read at every step; it is not copied either.

    Raises:
        TypeError: If `cost_model` is no `LearnedCost`, or `multiplier` no `LagrangeMultiplier`.
        ValueError: If a space has no fixed length or does not fit the cost model, or if the time
            limit of the envs is not the horizon of the cost model.
    """

    def __init__(
        self, venv: VecEnv, cost_model: LearnedCost, multiplier: LagrangeMultiplier
    ) -> None:
        if not isinstance(multiplier, LagrangeMultiplier):
            raise TypeError(
                f"multiplier is an object that a callback moves, got {multiplier!r}; pass a "
                "LagrangeMultiplier(), whose value starts at `initial`"
            )
        super().__init__(venv)
        self.cost_model = cost_model
        self.multiplier = multiplier
        self._inner = _GymnasiumView(venv)
        self._costs = PreferenceCostVectorWrapper(self._inner, cost_model)
        self._actions: NDArray[Any] | None = None

    def reset(self) -> Any:
        """Start an episode in every env; unfinished ones are dropped.

        Raises:
            NonFiniteError: If an observation holds NaN or an infinity.
        """
        obs, _ = self._costs.reset()
        self.reset_infos = self.venv.reset_infos
        return obs

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keep the actions; `step_wait` passes them on."""
        self._actions = actions

    def step_wait(self) -> Any:
        """Step all envs, with Box actions clipped to their bounds.

        Returns:
            obs, of the next episode where one ended; rewards minus λ times the learned cost,
            float32 (N,); dones, bool (N,); a list of N infos.

        Raises:
            NonFiniteError, MissingCostError, ResetNeeded, ValueError: As
                `PreferenceCostVectorWrapper.step`; ValueError, too, if an episode ended without
                `terminal_observation` in its info.
        """
        obs, rewards, terminated, truncated, arrays = self._costs.step(self._actions)
        infos = []
        for i, info in enumerate(self._inner.infos):
            reported = {key: arrays[key][i] for key in _REPORTED if key in arrays}
            if reported.get("trajectory", info) is None:  # another env's episode ended
                del reported["trajectory"]
            infos.append({**info, **reported})
        penalised = rewards - self.multiplier.value * arrays["cost"]
        return obs, penalised.astype(np.float32), terminated | truncated, infos


@final
class MultiplierCallback(BaseCallback):
    """Moves λ after each rollout in which an episode ended, by the mean learned cost of those.

    They are scored again then, in case the model has been fine-tuned. Stable-Baselines3 computes
    advantages before it calls back, so the new λ and the new weights count from the next rollout
    on; an off-policy replay buffer keeps the rewards of its old steps. `rollout/learned_cost`,
    `rollout/true_cost` (if the envs report one) and `rollout/multiplier` are logged, both costs as
    means per episode.

    Args:
        envs: What the model is trained on, or what the wrappers around that hold.
        on_episodes: Called with these episodes before λ moves, such as to ask about them and to
            fine-tune the cost model.

    Raises:
        ValueError: When training starts, if the model trains on other envs.
    """

    def __init__(
        self,
        envs: PreferenceCostVecEnv,
        *,
        on_episodes: Callable[[Sequence[Trajectory]], object] | None = None,
    ) -> None:
        super().__init__()
        self._envs = envs
        self._on_episodes = on_episodes
        self._finished: list[Trajectory] = []

    def _on_training_start(self) -> None:
        envs: Any = self.training_env
        while envs is not self._envs:
            if not isinstance(envs, VecEnvWrapper):
                raise ValueError(
                    "the callback moves the multiplier of the envs that the model trains on, but "
                    f"{self._envs} is not among the wrappers of {self.training_env}; make the "
                    "model with it"
                )
            envs = envs.venv
        self._finished = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            self._finished += finished_trajectories(info)
        return True

    def _on_rollout_end(self) -> None:
        if not self._finished:
            return
        episodes, self._finished = self._finished, []
        if self._on_episodes is not None:
            self._on_episodes(episodes)
        model = self._envs.cost_model
        learned_cost = float(model.score(episodes).mean())
        multiplier = self._envs.multiplier.update(learned_cost, limit=model.learned_limit)
        self.logger.record("rollout/learned_cost", learned_cost)
        if all(episode.costs is not None for episode in episodes):
            true_costs = [episode.true_cost for episode in episodes]
            self.logger.record("rollout/true_cost", float(np.mean(true_costs)))
        self.logger.record("rollout/multiplier", multiplier)


_REPORTED = ("cost", "true_cost", "trajectory")


class _GymnasiumView(VectorEnv):
    """A Stable-Baselines3 vector env as one of Gymnasium that resets itself in the same step."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, venv: VecEnv) -> None:
        self._venv = venv
        self.num_envs = venv.num_envs
        self.single_observation_space = venv.observation_space
        self.single_action_space = venv.action_space
        self.observation_space = batch_space(venv.observation_space, venv.num_envs)
        self.action_space = batch_space(venv.action_space, venv.num_envs)
        self.spec = venv.get_attr("spec", 0)[0]
        self.infos: list[dict[str, Any]] = []
        """Of the newest step, as Stable-Baselines3 has them."""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        del seed, options  # Stable-Baselines3 takes both by methods of their own
        return self._venv.reset(), {}

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[Any, NDArray[Any], BoolArray, BoolArray, dict[str, Any]]:
        obs, rewards, done, self.infos = self._venv.step(actions)
        infos: dict[str, Any] = {}
        for name, absent in _READ.items():
            reported = np.array([name in info for info in self.infos])
            if reported.any():
                values = np.full(self.num_envs, absent)
                for i in np.flatnonzero(reported):
                    values[i] = self.infos[i][name]
                infos |= {name: values, f"_{name}": reported}
        if done.any():
            final_obs = np.full(self.num_envs, None)
            for i in np.flatnonzero(done):
                if "terminal_observation" not in self.infos[i]:
                    raise ValueError(
                        "a vector env of Stable-Baselines3 puts the last observation of an episode "
                        f"into its info, as terminal_observation, but env {i} of {self._venv} "
                        f"ended one with the keys {sorted(self.infos[i])}; let the env that resets "
                        "itself report it"
                    )
                final_obs[i] = self.infos[i]["terminal_observation"]
            infos |= {"final_obs": final_obs, "_final_obs": done}
        truncated = np.array([info.get("TimeLimit.truncated", False) for info in self.infos])
        return obs, rewards, done & ~truncated, done & truncated, infos


_READ: dict[str, Any] = {"cost": 0.0, "diverged": False, "partial": False, "trajectory": None}
"""What the envs report in their infos, and what stands for an env that does not."""
