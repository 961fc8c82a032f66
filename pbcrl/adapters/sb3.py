"""A cost, learned or true, in Stable-Baselines3, whose algorithms know a single reward and no cost.

`PreferenceCostVecEnv` reports reward - λ · cost, each divided by its scale, so that PPO, SAC and
the others train under it unchanged; `MultiplierCallback` moves λ. Does not depend on the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, final

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import NormalizeObservation
from numpy.typing import NDArray

from pbcrl.cost_model import LearnedCost
from pbcrl.lagrange import LagrangeMultiplier
from pbcrl.recorder import NORMALISED, BoolArray, cost_array, finished_trajectories
from pbcrl.scaling import SignalScale
from pbcrl.trajectory import Trajectory
from pbcrl.vector_recorder import RecordTrajectories
from pbcrl.wrappers import PreferenceCostVectorWrapper

try:
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize
except ImportError as error:
    raise ImportError(
        f"pbcrl.adapters.sb3 needs Stable-Baselines3, but {error}; pip install 'pbcrl[sb3]'"
    ) from error


_FORGET = 5e-4  # share of the newest step in the scale: some 2,000 of them count


@final
class PreferenceCostVecEnv(VecEnvWrapper):
    r"""Reports the reward minus λ times the cost, in units of their scale; records episodes.

    .. math:: \frac{1}{1 + λ} \left(\frac{r_t}{σ_r} - λ\, \frac{c_t}{σ_c}\right)
        \qquad \text{(Eq. 12, `eq:lagrange`, step by step)}

    c_t is the learned cost c_ψ(s_t, a_t), or the env's own if there is no cost model. σ_r and σ_c
    are a `SignalScale`, which takes note of every step, this one included: multiplying all rewards
    or all costs by a constant changes nothing. Unlike in the paper the sum is divided by 1 + λ, so
    that the critic's targets keep their size while λ moves. λ = 0 reduces to r_t / σ_r.

    s_t is the observation before the step: in the step that ends an episode it is none of the next
    one's, which Stable-Baselines3 returns there. The model scores all envs at once in the main
    process, since the workers of a `SubprocVecEnv` would keep copies of weights that are
    fine-tuned here. Each info holds, in their own units, what `PreferenceCostWrapper` puts there:
    `cost`, the learned one; `true_cost`, if the env reports a cost; `trajectory`, at an episode's
    last step. Without a cost model `cost` is the env's own, too.

    Put it outside `DummyVecEnv` or `SubprocVecEnv` and inside all that changes observations or
    rewards, such as `VecNormalize` and `VecFrameStack`. A `Monitor` around the single envs, as
    `make_vec_env` puts it, logs the reward of the env; a `VecMonitor` outside, the one reported
    here.

    `MultiplierCallback` has λ and the scale saved with the model.

    Args:
        venv: A vector env of single envs that `PreferenceCostWrapper` takes.
        cost_model: Scores the steps; it is not copied, so that fine-tuning has effect here. None
            for the env's own `info["cost"]`, whose limit `MultiplierCallback` is told.
        multiplier: λ, read at every step; it is not copied either.
        gamma: Discount of the algorithm, for the scale.

    Raises:
        TypeError: If `cost_model` is no `LearnedCost`, or `multiplier` no `LagrangeMultiplier`.
        ValueError: If a space has no fixed length or does not fit the cost model, if the time limit
            of the envs is not the horizon of the cost model, if `gamma` is not in [0, 1], or if
            the envs normalise their observations.
    """

    def __init__(
        self,
        venv: VecEnv,
        cost_model: LearnedCost | None,
        multiplier: LagrangeMultiplier,
        *,
        gamma: float = 0.99,
    ) -> None:
        if not isinstance(multiplier, LagrangeMultiplier):
            raise TypeError(
                f"multiplier is an object that a callback moves, got {multiplier!r}; pass a "
                "LagrangeMultiplier(), whose value starts at `initial`"
            )
        _require_raw(venv)
        super().__init__(venv)
        self.cost_model = cost_model
        self.multiplier = multiplier
        self.scale = SignalScale(venv.num_envs, gamma, forget=_FORGET)
        self._inner = _GymnasiumView(venv)
        self._costs: RecordTrajectories | PreferenceCostVectorWrapper
        if cost_model is None:
            self._costs = RecordTrajectories(self._inner, needs_cost=True)
        else:
            self._costs = PreferenceCostVectorWrapper(self._inner, cost_model)
        self._actions: NDArray[Any] | None = None

    def reset(self) -> Any:
        """Start an episode in every env; unfinished ones are dropped.

        Raises:
            NonFiniteError: If an observation holds NaN or an infinity.
        """
        obs, _ = self._costs.reset()
        self.scale.reset()
        self.reset_infos = self.venv.reset_infos
        return obs

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keep the actions; `step_wait` passes them on."""
        self._actions = actions

    def step_wait(self) -> Any:
        """Step all envs, with Box actions clipped to their bounds.

        Returns:
            obs, of the next episode where one ended; priced rewards, float32 (N,); dones, bool
            (N,); a list of N infos.

        Raises:
            NonFiniteError, MissingCostError, ResetNeeded, ValueError: As
                `PreferenceCostVectorWrapper.step`, or `RecordTrajectories.step` with `needs_cost`;
                NonFiniteError, too, as `SignalScale.update`, and ValueError, if an episode ended
                without `terminal_observation` in its info.
        """
        obs, rewards, terminated, truncated, arrays = self._costs.step(self._actions)
        if self.cost_model is None:
            arrays["cost"] = arrays["true_cost"]
        infos = []
        for i, info in enumerate(self._inner.infos):
            reported = {key: arrays[key][i] for key in _REPORTED if key in arrays}
            if reported.get("trajectory", info) is None:  # another env's episode ended
                del reported["trajectory"]
            infos.append({**info, **reported})
        done, price = terminated | truncated, self.multiplier.value
        signals = torch.from_numpy(np.stack([rewards, arrays["cost"]]).astype(np.float64))  # (2, N)
        scale = self.scale.update(signals[:, None], torch.from_numpy(done)[None])
        reward, cost = (signals / scale[:, 0]).numpy()
        return obs, ((reward - price * cost) / (1 + price)).astype(np.float32), done, infos


@final
class MultiplierCallback(BaseCallback):
    """Moves λ after each rollout in which an episode ended, by the mean cost of those.

    Learned costs are scored again then, in case the model has been fine-tuned. Stable-Baselines3
    computes advantages before it calls back, so the new λ and the new weights count from the next
    rollout on; an off-policy replay buffer keeps the rewards of its old steps.
    `rollout/learned_cost` (with a cost model), `rollout/true_cost` (if the envs report one) and
    `rollout/multiplier` are logged, both costs as means per episode.

    λ and the scale are in what the model's `save` writes, as its attribute `priced_by`: when a
    loaded model is trained on, under a multiplier that has not been moved yet, they go on from
    there.

    Args:
        envs: What the model is trained on, or what the wrappers around that hold.
        limit: d, highest mean episode cost that is safe, where the envs price their own cost; None
            with a cost model, whose limit is its `learned_limit`.
        on_episodes: Called with these episodes before λ moves, such as to ask about them and to
            fine-tune the cost model.

    Raises:
        ValueError: If there is both a limit and a cost model, or neither; when training starts, if
            the model trains on other envs.
    """

    def __init__(
        self,
        envs: PreferenceCostVecEnv,
        *,
        limit: float | None = None,
        on_episodes: Callable[[Sequence[Trajectory]], object] | None = None,
    ) -> None:
        super().__init__()
        if (limit is None) == (envs.cost_model is None):
            raise ValueError(
                "the envs' own cost needs a limit, a learned one has its own, got "
                f"limit={limit} and cost_model={envs.cost_model}; pass one of the two"
            )
        self._envs = envs
        self._limit = limit
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
        self._go_on()

    def _go_on(self) -> None:
        """From λ and the scale of a loaded model; the present ones are saved with it from now."""
        model: Any = self.model
        multiplier, scale = self._envs.multiplier, self._envs.scale
        before, scale_before = getattr(model, "priced_by", (multiplier, scale))
        if before is not multiplier and not multiplier.state_dict()["updates"]:
            multiplier.load_state_dict(before.state_dict())
            # The sums are of episodes that are not gone on with, maybe of another number of envs.
            sums = scale.state_dict()["sums"]
            scale.load_state_dict({**scale_before.state_dict(), "sums": sums})
        model.priced_by = multiplier, scale

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
        means = {}
        if all(episode.costs is not None for episode in episodes):
            means["true_cost"] = float(np.mean([episode.true_cost for episode in episodes]))
        if self._envs.cost_model is None:
            cost, limit = means["true_cost"], self._limit
        else:
            cost = means["learned_cost"] = float(self._envs.cost_model.score(episodes).mean())
            limit = self._envs.cost_model.learned_limit
        assert limit is not None  # the constructor has seen to it
        multiplier = self._envs.multiplier.update(cost, limit=limit)
        for name, mean in means.items():
            self.logger.record(f"rollout/{name}", mean)
        self.logger.record("rollout/multiplier", multiplier)


def _require_raw(venv: VecEnv) -> None:
    inside = []
    # Batches that have no single envs cannot tell.
    with suppress(AttributeError, NotImplementedError):
        if any(venv.env_is_wrapped(NormalizeObservation)):
            inside.append("NormalizeObservation")
    while isinstance(venv, VecEnvWrapper):
        if isinstance(venv, VecNormalize) and venv.norm_obs:
            inside.append("VecNormalize")
        venv = venv.venv
    if inside:
        raise ValueError(NORMALISED.format(inside=inside[0], outside="VecNormalize"))


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
                    value = self.infos[i][name]
                    values[i] = cost_array(value, ()) if name == "cost" else value
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
