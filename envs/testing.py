"""The contract of an env with costs, as two functions that play an env and name the rule it breaks.

Run one of them on your env before learning on it. Both see episodes end, because most
mistakes hide there. They check the interface alone, not whether the task makes sense.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.spaces.utils import flatten
from gymnasium.vector.utils import iterate

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv


class CostEnvError(Exception):
    """An env breaks the contract of an env with costs."""


def check_cost_env(env: gymnasium.Env[Any, Any], *, max_steps: int = 10_000, seed: int = 0) -> None:
    """Play one episode of random actions, twice, and check every step of it.

    The contract: observations and actions have a fixed length, actions in one part; `reset` gives
    (obs, info); every observation is finite and in its space; every reward is finite;
    `info["cost"]` is there on every step, the last one included, and is a finite number >= 0, of
    one type on all of them and at the reset; the episode ends; the same seed and actions give the
    same episode again.

    One type, since a vector env of Gymnasium gives its array the type of the first env that
    reports: after an `int` 0, a cost of 0.7 becomes 0.

    Args:
        env: Wrapped as it will be trained on, `TimeLimit` included. It is reset, and not closed.
        max_steps: Env steps within which an episode must end, >= 1.
        seed: Of the env and of the random actions.

    Raises:
        CostEnvError: If the env breaks the contract.
        ValueError: If `max_steps` is below 1.
    """
    _check_max_steps(max_steps)
    _check_spaces(env.observation_space, env.action_space)
    env.action_space.seed(seed)
    first_obs, reset_info = _reset(env, seed=seed)
    episode = [_step(env, env.action_space.sample(), number=0)]
    while not episode[-1].ended:
        if len(episode) == max_steps:
            raise CostEnvError(
                f"an episode must end, but {max_steps} random steps saw neither terminated nor "
                "truncated; wrap the env in gymnasium.wrappers.TimeLimit, or raise max_steps"
            )
        episode.append(_step(env, env.action_space.sample(), number=len(episode)))

    costs = {"reset": reset_info["cost"]} if "cost" in reset_info else {}
    _check_types(costs | {f"step {number}": step.cost for number, step in enumerate(episode)})
    _check_same("the first observation", first_obs, _reset(env, seed=seed)[0])
    for number, step in enumerate(episode):
        again = _step(env, step.action, number=number)
        for name in ("obs", "reward", "cost", "ended"):
            _check_same(f"{name} of step {number}", getattr(step, name), getattr(again, name))


def check_cost_vector_env(
    envs: VectorEnv[Any, Any, Any], *, max_steps: int = 10_000, seed: int = 0
) -> None:
    """Play random actions until every env has ended once and been reset, and check every step.

    The contract of a batch of N envs: `metadata["autoreset_mode"]` is NEXT_STEP or SAME_STEP;
    `infos["cost"]` has shape (N,) and one type on every step, floats with a mask `_cost`, and
    holds the cost of the step just taken, also where it ended an episode. In NEXT_STEP the step
    after an end has reward 0, cost 0 and no end. In SAME_STEP the true last observation stands in
    `infos["final_obs"]` where `infos["_final_obs"]` is true. Gymnasium's own `SyncVectorEnv` does
    not keep this contract: it leaves the cost out of a step on which every env resets.

    Args:
        envs: The batch. It is reset, and not closed.
        max_steps: Steps of the batch within which every env must have ended, >= 1.
        seed: Of the envs and of the random actions.

    Raises:
        CostEnvError: If the batch breaks the contract.
        ImportError: If Gymnasium is older than 1.1, whose batches have no such contract.
        ValueError: If `max_steps` is below 1.
    """
    try:
        from gymnasium.vector import AutoresetMode
    except ImportError as error:
        raise ImportError(
            "the check of a batch needs gymnasium >= 1.1, where a batch says how it resets, got "
            f"gymnasium {gymnasium.__version__}; install a newer one, or check single envs"
        ) from error
    _check_max_steps(max_steps)
    _check_spaces(envs.single_observation_space, envs.single_action_space)
    mode = envs.metadata.get("autoreset_mode")
    if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        raise CostEnvError(
            "a batch must reset its envs itself and say how: metadata['autoreset_mode'] must be "
            f"AutoresetMode.NEXT_STEP or AutoresetMode.SAME_STEP, got {mode!r}"
        )
    envs.action_space.seed(seed)
    _check_obs("reset", envs.reset(seed=seed)[0], envs.observation_space)
    ended = np.zeros(envs.num_envs, dtype=np.bool_)  # on the last step
    has_ended = ended.copy()
    first_costs = None
    for number in count():
        if number >= max_steps and not has_ended.all():
            raise CostEnvError(
                f"every env must end an episode within {max_steps} steps of the batch, but "
                f"{int((~has_ended).sum())} of {envs.num_envs} did not; give the batch a time "
                "limit, or raise max_steps"
            )
        obs, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
        where = f"step {number}"
        _check_obs(where, obs, envs.observation_space)
        _check_row_of_numbers(f"rewards of {where}", rewards, envs.num_envs)
        costs = _cost(infos, where)
        _check_row_of_numbers(f"infos['cost'] of {where}", costs, envs.num_envs)
        if "_cost" in infos and costs.dtype.kind in "iu" and envs.num_envs > 1:
            raise CostEnvError(
                "costs of single envs must be floats in the batch, or they may have been cut off "
                f"to the type of the first, got {costs.dtype} on {where} with the mask '_cost'; "
                "report float(cost) in the single env"
            )
        first_costs = costs if first_costs is None else first_costs
        _check_types({"step 0": first_costs, where: costs})
        if (np.asarray(costs) < 0).any():
            raise CostEnvError(
                f"a true cost must be >= 0, got {costs} on {where}; "
                "pay for safety in the reward instead"
            )
        resetting, ended = ended, np.asarray(terminations) | np.asarray(truncations)
        if mode is AutoresetMode.NEXT_STEP:
            stray = resetting & ((rewards != 0) | (costs != 0) | ended)
            if stray.any():
                raise CostEnvError(
                    "in NEXT_STEP the step after an end only resets: reward 0, cost 0, no end; but "
                    f"on {where} env {stray.argmax()} has reward {rewards[stray.argmax()]}, cost "
                    f"{costs[stray.argmax()]}, ended {ended[stray.argmax()]}"
                )
        else:
            _check_final_obs(where, infos, ended, envs)
        if has_ended.all():
            return
        has_ended |= ended


class _Step(NamedTuple):
    action: Any
    obs: Any
    reward: float
    cost: Any  # of the type that the env reports
    ended: bool


def _check_max_steps(max_steps: int) -> None:
    if max_steps < 1:
        raise ValueError(f"max_steps must be >= 1, got {max_steps}")


def _check_spaces(obs_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
    _check_fixed_length("observation", obs_space)
    _check_fixed_length("action", action_space)
    if isinstance(action_space, Dict | Tuple):
        raise CostEnvError(
            "the action space must be a Box, Discrete, MultiDiscrete or MultiBinary, got "
            f"{action_space}; flatten it with a gymnasium wrapper"
        )


def _check_fixed_length(name: str, space: gymnasium.Space[Any]) -> None:
    if isinstance(space, Dict):
        for part in space.spaces.values():
            _check_fixed_length(name, part)
    elif isinstance(space, Tuple):
        for part in space.spaces:
            _check_fixed_length(name, part)
    elif not isinstance(space, Box | Discrete | MultiBinary | MultiDiscrete):
        raise CostEnvError(
            f"the {name} space must be made of Box, Discrete, MultiDiscrete, MultiBinary, Dict and "
            f"Tuple, which have a fixed length, got {space}; turn it into one with a gymnasium "
            "wrapper"
        )


def _reset(env: gymnasium.Env[Any, Any], *, seed: int) -> tuple[Any, dict[str, Any]]:
    answer: object = env.reset(seed=seed)
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
        raise CostEnvError(
            f"reset must return (obs, info) with a dict as info, got {_outline(answer)}"
        )
    _check_obs("reset", answer[0], env.observation_space)
    row = flatten(env.observation_space, answer[0])  # a copy: the env may write into its own
    return row, answer[1]


def _step(env: gymnasium.Env[Any, Any], action: Any, *, number: int) -> _Step:
    where = f"step {number}"
    answer: object = env.step(action)
    if not (isinstance(answer, tuple) and len(answer) == 5 and isinstance(answer[4], dict)):
        raise CostEnvError(
            "step must return (obs, reward, terminated, truncated, info) with a dict as info, got "
            f"{_outline(answer)} on {where}; a separate cost goes into info['cost'], where "
            "pbcrl_envs.upstream.make puts that of the real Safety-Gymnasium"
        )
    obs, reward, terminated, truncated, info = answer
    _check_obs(where, obs, env.observation_space)
    _check_number(f"the reward of {where}", reward)
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            raise CostEnvError(f"{name} must be a bool, got {flag!r} on {where}")
    cost = _cost(info, where)
    _check_number(f"info['cost'] of {where}", cost)
    if cost < 0:
        raise CostEnvError(
            f"a true cost must be >= 0, got {cost} on {where}; pay for safety in the reward instead"
        )
    row = flatten(env.observation_space, obs)
    return _Step(action, row, float(reward), cost, bool(terminated or truncated))


def _cost(info: Mapping[str, Any], where: str) -> Any:
    if "cost" not in info:
        raise CostEnvError(
            f"every step must report its cost, but info has no 'cost' on {where}, only "
            f"{sorted(info)}; report 0.0 on steps without cost, and on the last step too"
        )
    return info["cost"]


def _check_types(costs: Mapping[str, Any]) -> None:
    """Of all costs, by the place where they were reported."""
    dtypes = {where: np.asarray(cost).dtype for where, cost in costs.items()}
    where, first = next(iter(dtypes.items()))
    for other, dtype in dtypes.items():
        if dtype != first:
            raise CostEnvError(
                "costs must have one type on every step and at the reset, or a vector env cuts "
                f"them off to the type of the first, got {first} on {where} and {dtype} on "
                f"{other}; report float(cost) everywhere"
            )


def _check_obs(where: str, obs: object, space: gymnasium.Space[Any]) -> None:
    if isinstance(space, Dict):
        if not isinstance(obs, Mapping) or set(obs) != set(space.spaces):
            raise CostEnvError(
                f"observations must be dicts with the keys {sorted(space.spaces)}, got "
                f"{sorted(obs) if isinstance(obs, Mapping) else _outline(obs)} on {where}"
            )
        for key, part in space.spaces.items():
            _check_obs(f"{where}, part {key!r}", obs[key], part)
        return
    if isinstance(space, Tuple):
        if not isinstance(obs, tuple) or len(obs) != len(space.spaces):
            raise CostEnvError(
                f"observations must be tuples of {len(space.spaces)}, got {_outline(obs)} on "
                f"{where}"
            )
        for number, part in enumerate(space.spaces):
            _check_obs(f"{where}, part {number}", obs[number], part)
        return
    if isinstance(space, Box):
        if not isinstance(obs, np.ndarray) or obs.shape != space.shape:
            raise CostEnvError(
                f"observations must be arrays of shape {space.shape}, got {_outline(obs)} on "
                f"{where}"
            )
        _check_finite(f"the observation of {where}", obs)
    if not space.contains(obs):
        raise CostEnvError(
            f"observations must lie in the observation space {space}, got {obs} of dtype "
            f"{np.asarray(obs).dtype} on {where}; widen the bounds, or cast to the dtype of the "
            "space"
        )


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, Real):
        raise CostEnvError(f"{name} must be a number, got {value!r} of {type(value).__name__}")
    _check_finite(name, np.asarray(value))


def _check_row_of_numbers(name: str, values: Any, num_envs: int) -> None:
    shape = (num_envs,)
    is_array = isinstance(values, np.ndarray) and values.dtype.kind in "fiu"
    if not is_array or np.shape(values) != shape:
        raise CostEnvError(
            f"{name} must be an array of numbers of shape {shape}, got {_outline(values)}"
        )
    _check_finite(name, values)


def _check_finite(name: str, values: Any) -> None:
    if not np.isfinite(values).all():
        raise CostEnvError(f"{name} must be finite, got {values}; find what produced it")


def _check_final_obs(
    where: str, infos: Mapping[str, Any], ended: Any, envs: VectorEnv[Any, Any, Any]
) -> None:
    mask = infos.get("_final_obs", np.zeros_like(ended))
    if not np.array_equal(mask, ended) or (ended.any() and "final_obs" not in infos):
        raise CostEnvError(
            "in SAME_STEP infos['final_obs'] must hold the last observation, and "
            "infos['_final_obs'] be true, exactly where an episode ended: ended "
            f"{ended}, got mask {mask} on {where}; keep the observation from before the reset"
        )
    if not ended.any():
        return
    final_obs = infos["final_obs"]
    if not isinstance(final_obs, np.ndarray):  # Gymnasium's own hold one observation per env
        final_obs = list(iterate(envs.observation_space, final_obs))
    for i in np.flatnonzero(ended):
        place = f"{where}, infos['final_obs'] of env {i}"
        _check_obs(place, final_obs[i], envs.single_observation_space)


def _check_same(name: str, first: Any, again: Any) -> None:
    if not np.array_equal(first, again):
        raise CostEnvError(
            "the same seed and actions must give the same episode, but "
            f"{name} was {first} and then {again}; draw every random number from self.np_random, "
            "and let reset clear all state"
        )


def _outline(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__
