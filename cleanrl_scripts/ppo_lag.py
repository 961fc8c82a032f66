"""PPO-Lagrangian on the true cost: the oracle of the paper, and the source of offline trajectories.

`--cost-limit inf` is unconstrained PPO. `--save-trajectories FOLDER` keeps a uniform sample of the
run's episodes for `ppo_lag_pbcrl.py --dataset FOLDER`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from checkpoints import (
    envs_state,
    load_checkpoint,
    restore_envs,
    resumed,
    save_checkpoint,
    take_up,
)
from film import check_film, film
from run_io import (
    Run,
    action_bounds,
    flat_dims,
    horizon_of,
    main,
    make_envs,
    require_cost,
    require_positive,
    resolve_cost_limit,
)
from torch import Tensor, nn

from pbcrl import (
    MULTIPLIER_RULES,
    LagrangeMultiplier,
    NonFiniteError,
    Trajectory,
    TrajectoryRecorder,
    TrajectoryWriter,
    bias,
    diverged_envs,
    save_tensors,
    step_costs,
)

# -- Args ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    env_id: str = "SafetyPointButton1-v0"
    """any Gymnasium id whose env reports info['cost']; 'module:Id-v0' imports `module` first"""
    cost_limit: float | None = None
    """d, highest safe episode cost (undiscounted); default: the task's own; inf is unconstrained"""
    seed: int = 0
    """of everything random; same seed and CPU, same numbers"""
    total_timesteps: int = 1_000_000
    """env steps of training, rounded up to whole iterations"""
    save_trajectories: str | None = None
    """folder to write a uniform sample of the run's episodes to"""
    max_trajectories: int = 10_000
    """most episodes to keep there"""

    num_envs: int = 20
    """environments stepped together"""
    num_steps: int = 1_000
    """env steps per env and iteration"""
    epochs: int = 10
    """passes over the rollout per iteration"""
    minibatch_size: int = 2_000
    """env steps per gradient step"""
    lr: float = 3e-4
    """Adam's step size, actor and critics"""
    lr_decay: float = 0.0
    """share of lr that is lost over the run, linearly, in [0, 1]; 1 ends near 0"""
    max_grad_norm: float = 1.0
    """gradient norm to clip at, for the actor and for both critics together"""
    hidden_sizes: tuple[int, ...] = (256, 256, 256)
    """widths of the hidden layers of the actor and of each critic"""
    gamma: float = 0.99
    """discount per step, in the advantages and critics only"""
    gae_lambda: float = 0.95
    """λ of generalised advantage estimation"""
    clip: float = 0.2
    """clipping range of the probability ratio"""
    target_kl: float = 0.02
    """mean KL per epoch, in nats, at which the actor stops for this iteration; critics go on"""
    bound_coef: float = 0.0
    """weight of the squared distance of the mean action to its bounds; far outside them every
    sample is clipped to the same action, and nothing more is learned"""
    initial_log_std: float = -0.5
    """log standard deviation of the Gaussian policy at the start, in units of the action"""
    multiplier_rule: Literal["adam", "ascent", "softplus", "pid"] = "adam"
    """how λ follows the mean episode cost, see pbcrl/lagrange.py; ascent is the paper's"""
    multiplier_lr: float = 0.02
    """step size of the multiplier, per iteration in which an episode ended; for ascent and pid also
    per unit of episode cost"""
    multiplier_initial: float = 0.01
    """λ at the start"""

    eval_episodes: int = 50
    """episodes of the final evaluation, deterministic and again stochastic"""
    capture_video: int = 0
    """episodes to film, with the deterministic policy, as mp4 in the run's folder"""
    torch_threads: int = 2
    """threads of PyTorch; other counts round differently"""
    checkpoint_interval: int = 10
    """iterations between two checkpoints, from which a run that was cut off goes on"""
    resume: str | None = None
    """folder of a run that was cut off, to go on with it; it keeps its own arguments"""
    runs_dir: str = "runs"
    """folder of all runs"""
    run_name: str | None = None
    """folder of this run; default: made of env, script, seed and time"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return -(-self.total_timesteps // self.batch_size)

    def lr_at(self, iteration: int) -> float:
        """Adam's step size in iteration 1, 2, ..."""
        return self.lr * (1 - self.lr_decay * (iteration - 1) / self.num_iterations)


# -- Agent -----------------------------------------------------------------------------------------


def mlp(sizes: list[int], *, last_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        last = i == len(sizes) - 2
        layer = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(layer.weight, last_gain if last else 2**0.5)
        nn.init.zeros_(layer.bias)
        layers += [layer] if last else [layer, nn.ReLU()]
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
        z = (actions - mean) / self.log_std.exp()
        log_density: Tensor = -(0.5 * z**2 + self.log_std + 0.5 * np.log(2 * np.pi))
        return log_density.sum(-1)

    def values(self, normalized_obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.critic_r(normalized_obs).squeeze(-1), self.critic_c(normalized_obs).squeeze(-1)


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Tensor:
    """Return advantages (T, N): a time limit bootstraps V(s'), only a termination is worth 0.

    `next_values` is V of the true next state, the final one where an episode ended; `done` is
    terminated or truncated and cuts the sum over time.
    """
    delta = rewards + gamma * next_values * ~terminated - values
    carry = gamma * lam * (~done).to(delta.dtype)
    advantages = torch.empty_like(delta)
    running = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        running = delta[t] + carry[t] * running
        advantages[t] = running
    return advantages


def check_finite(name: str, values: np.ndarray, step: int) -> None:
    if not np.isfinite(values).all():
        bad = np.unique(np.argwhere(~np.isfinite(values))[:, 0]).tolist()
        raise NonFiniteError(
            f"{name} must be finite, but rows {bad} held NaN or an infinity at step {step} of the "
            "rollout; check the env with pbcrl_envs.check_cost_env, or lower the policy's --lr"
        )


# -- Evaluation ------------------------------------------------------------------------------------


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


def train(args: Args) -> Path:
    # -- Setup -------------------------------------------------------------------------------------
    args = resumed(args, script="ppo_lag")
    counts = "total_timesteps", "num_envs", "num_steps", "epochs", "minibatch_size", "eval_episodes"
    require_positive(args, *counts, "checkpoint_interval", "max_trajectories", "torch_threads")
    if not 0 <= args.lr_decay <= 1:
        raise ValueError(
            f"--lr-decay must be in [0, 1], got {args.lr_decay}; 0 keeps --lr constant"
        )
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)  # initial weights
    rng = np.random.default_rng(args.seed)
    noise = torch.Generator().manual_seed(args.seed)
    envs = make_envs(args.env_id, args.num_envs)
    limit = resolve_cost_limit(args.env_id, args.cost_limit)
    if args.capture_video > 0:
        check_film(args.env_id)
    obs_dim, act_dim = flat_dims(envs)
    low, high = action_bounds(envs)
    lowest, highest = torch.as_tensor(low), torch.as_tensor(high)
    agent = Agent(
        obs_dim, act_dim, hidden_sizes=args.hidden_sizes, initial_log_std=args.initial_log_std
    )
    actor = [*agent.mean.parameters(), agent.log_std]
    critics = [*agent.critic_r.parameters(), *agent.critic_c.parameters()]
    optimizer_actor = torch.optim.Adam(actor, lr=args.lr, fused=True)
    optimizer_critics = torch.optim.Adam(critics, lr=args.lr, fused=True)
    multiplier = MULTIPLIER_RULES[args.multiplier_rule](
        lr=args.multiplier_lr, initial=args.multiplier_initial
    )
    if np.isinf(limit):
        multiplier = LagrangeMultiplier(initial=0.0)
    writer_rng = np.random.default_rng([args.seed, 1])  # of its own: saving changes no training
    writer = args.save_trajectories and TrajectoryWriter(
        args.save_trajectories,
        env_id=args.env_id,
        obs_shape=(obs_dim,),
        act_dim=act_dim,
        horizon=horizon_of(envs),
        capacity=args.max_trajectories,
        rng=writer_rng,
        resume=args.resume is not None,
        overwrite=args.resume is not None,
    )
    if writer and args.resume is not None:
        take_up(writer)
    recorder = TrajectoryRecorder(args.num_envs) if writer else None

    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(*shape, obs_dim)
    actions = torch.zeros(*shape, act_dim)
    rewards, costs = torch.zeros(shape), torch.zeros(shape)
    terminated = torch.zeros(shape, dtype=torch.bool)
    done = torch.zeros(shape, dtype=torch.bool)
    next_values = torch.zeros(2, *shape)
    episode_return, episode_cost = np.zeros(args.num_envs), np.zeros(args.num_envs)
    ended: list[tuple[float, float]] = []  # (return, true cost) of all episodes, in order
    iteration, num_recorded = 0, 0

    total = args.num_iterations * args.batch_size
    with Run(args, script="ppo_lag", total=total) as run, writer or nullcontext():
        run.say(f"== PPO-Lag on {args.env_id}, true cost limit {limit:g}; files in {run.folder}")

        def save() -> None:
            path = run.folder / "agent.safetensors"
            sizes = {"obs_dim": obs_dim, "act_dim": act_dim, "hidden_sizes": args.hidden_sizes}
            meta = {"env_id": args.env_id, **sizes, "multiplier": multiplier.state_dict()}
            save_tensors(path, kind="agent", tensors=agent.state_dict(), meta=meta)

        def checkpoint() -> dict[str, Any]:
            return {
                "iteration": iteration,
                "agent": agent.state_dict(),
                "optimizer_actor": optimizer_actor.state_dict(),
                "optimizer_critics": optimizer_critics.state_dict(),
                "multiplier": multiplier.state_dict(),
                "rng": rng.bit_generator.state,
                "noise": noise.get_state(),
                "envs": envs_state(envs),
                "next_obs": next_obs,
                "episode_return": episode_return,
                "episode_cost": episode_cost,
                "ended": np.array(ended).reshape(-1, 2),
                "recorder": recorder and recorder.get_state(),
                "num_recorded": num_recorded,
                "writer_rng": writer_rng.bit_generator.state,
                "run": run.get_state(),
            }

        state = load_checkpoint(run.folder) if args.resume is not None else None
        if state is not None:
            iteration = state["iteration"]
            agent.load_state_dict(state["agent"])
            optimizer_actor.load_state_dict(state["optimizer_actor"])
            optimizer_critics.load_state_dict(state["optimizer_critics"])
            multiplier.load_state_dict(state["multiplier"])
            rng.bit_generator.state = state["rng"]
            noise.set_state(state["noise"])
            ended = [(row[0], row[1]) for row in state["ended"].tolist()]
            num_recorded = state["num_recorded"]
            writer_rng.bit_generator.state = state["writer_rng"]
        if state is not None and state["envs"] is not None:
            restore_envs(envs, state["envs"])
            next_obs = state["next_obs"]
            episode_return, episode_cost = state["episode_return"], state["episode_cost"]
            if recorder:
                recorder.set_state(state["recorder"])
        else:  # at the start, or envs whose state nobody knows: their episodes begin anew
            next_obs, _ = envs.reset(seed=args.seed + 2_000_000 * iteration)
        check_finite("observations", next_obs, 0)
        if args.resume is not None:
            run.set_state(state and state["run"], step=iteration * args.batch_size)
            run.say(f"   going on after iteration {iteration} of {args.num_iterations}")
        run.begin_stage("train")
        run.start_progress(iteration * args.batch_size)
        first = iteration + 1
        try:
            for iteration in range(first, args.num_iterations + 1):
                for optimizer in (optimizer_actor, optimizer_critics):
                    optimizer.param_groups[0]["lr"] = args.lr_at(iteration)
                # -- 1. Roll out ---------------------------------------------------------------
                final_obs: list[np.ndarray] = []
                perturbation = torch.randn(*shape, act_dim, generator=noise)
                std = agent.log_std.detach().exp()
                newly_ended, num_diverged = len(ended), 0
                for t in range(args.num_steps):
                    obs[t] = torch.as_tensor(next_obs, dtype=torch.float32)
                    with torch.no_grad():
                        actions[t] = agent.mean(agent.normalize(obs[t])) + std * perturbation[t]
                    check_finite("actions", actions[t].numpy(), t)
                    executed = np.clip(actions[t].numpy(), low, high)
                    next_obs, reward, terminal, truncated, infos = envs.step(executed)
                    is_done = terminal | truncated
                    diverged = diverged_envs(infos, args.num_envs)
                    true_cost = require_cost(step_costs(infos, args.num_envs, is_done), args.env_id)
                    check_finite("observations", next_obs, t)
                    check_finite("rewards", reward, t)
                    check_finite("costs", true_cost, t)
                    rewards[t], costs[t] = torch.as_tensor(reward), torch.as_tensor(true_cost)
                    terminated[t], done[t] = torch.as_tensor(terminal), torch.as_tensor(is_done)
                    if recorder and writer:
                        for trajectory in recorder.record(
                            obs[t].numpy(), executed, true_cost, is_done, diverged=diverged
                        ):
                            # After a resume some are in the dataset already.
                            if num_recorded == writer.seen:
                                writer.add(trajectory)
                            elif num_recorded >= args.max_trajectories:
                                writer_rng.integers(num_recorded + 1)  # as the writer drew then
                            num_recorded += 1
                    episode_return += reward
                    episode_cost += true_cost
                    if is_done.any():
                        final_obs += list(infos["final_obs"][is_done])
                        check_finite("observations", np.stack(final_obs), t)
                        whole = is_done & ~diverged
                        num_diverged += int(diverged.sum())
                        ended += zip(episode_return[whole], episode_cost[whole], strict=True)
                        episode_return[is_done] = episode_cost[is_done] = 0.0

                # -- 4. Advantages -------------------------------------------------------------
                flat_obs = agent.normalize(obs.flatten(0, 1))  # (T * N, obs_dim)
                with torch.no_grad():
                    values = torch.stack(agent.values(flat_obs)).view(2, *shape)
                    old_log_prob = agent.log_prob(agent.mean(flat_obs), actions.flatten(0, 1))
                    last = torch.as_tensor(next_obs, dtype=torch.float32)
                    next_values[:, :-1] = values[:, 1:]
                    next_values[:, -1] = torch.stack(agent.values(agent.normalize(last)))
                    if final_obs:
                        final = torch.as_tensor(np.stack(final_obs), dtype=torch.float32)
                        next_values[:, done] = torch.stack(agent.values(agent.normalize(final)))
                adv_r, adv_c = (
                    gae(
                        signal,
                        values[k],
                        next_values[k],
                        terminated,
                        done,
                        gamma=args.gamma,
                        lam=args.gae_lambda,
                    )
                    for k, signal in enumerate([rewards, costs])
                )
                targets = (torch.stack([adv_r, adv_c]) + values).view(2, -1)
                adv_r = (adv_r - adv_r.mean()) / (adv_r.std() + 1e-8)
                # Only centred: the size of the true cost is meaningful beside its limit.
                adv_c = adv_c - adv_c.mean()
                # Eq. 41, divided by 1 + λ so that the step size does not grow with λ.
                adv = (adv_r - multiplier.value * adv_c).flatten() / (1 + multiplier.value)

                # -- 5. Policy -----------------------------------------------------------------
                flat_actions = actions.flatten(0, 1)
                actor_goes_on, actor_epochs, kl, clipped = True, 0, 0.0, 0.0
                for _ in range(args.epochs):
                    kl_sum = torch.zeros(())
                    for rows in minibatches(args.batch_size, args.minibatch_size, rng):
                        batch_obs = flat_obs[rows]
                        if actor_goes_on:
                            mean = agent.mean(batch_obs)
                            log_prob = agent.log_prob(mean, flat_actions[rows])
                            log_ratio = log_prob - old_log_prob[rows]
                            ratio = log_ratio.exp()
                            surrogate = torch.minimum(
                                ratio * adv[rows],
                                ratio.clamp(1 - args.clip, 1 + args.clip) * adv[rows],
                            )
                            loss = -surrogate.mean()  # Eq. 40
                            if args.bound_coef > 0:
                                outside = mean - mean.clamp(lowest, highest)
                                loss = loss + args.bound_coef * outside.square().sum(-1).mean()
                            optimizer_actor.zero_grad()
                            torch.autograd.backward(loss)
                            nn.utils.clip_grad_norm_(actor, args.max_grad_norm)
                            optimizer_actor.step()
                            with torch.no_grad():
                                kl_sum += (ratio - 1 - log_ratio).sum()
                                clipped = float(((ratio - 1).abs() > args.clip).float().mean())
                        value_r, value_c = agent.values(batch_obs)
                        loss_r = 0.5 * (value_r - targets[0, rows]).square().mean()  # Eq. 43
                        loss_c = 0.5 * (value_c - targets[1, rows]).square().mean()  # Eq. 44
                        optimizer_critics.zero_grad()
                        torch.autograd.backward(loss_r + loss_c)
                        nn.utils.clip_grad_norm_(critics, args.max_grad_norm)
                        optimizer_critics.step()
                    if actor_goes_on:
                        actor_epochs += 1
                        kl = float(kl_sum) / args.batch_size
                        actor_goes_on = kl <= args.target_kl
                value_loss = float((loss_r + loss_c).detach())
                agent.update_normalizer(obs.flatten(0, 1))

                # -- 6. Dual ascent ------------------------------------------------------------
                fresh = np.array(ended[newly_ended:]).reshape(-1, 2)
                mean_return, mean_cost = fresh.mean(axis=0) if len(fresh) else (None, None)
                multiplier.update(mean_cost, limit)

                # -- 7. Log --------------------------------------------------------------------
                metrics = {
                    "return": mean_return,
                    "true_cost": mean_cost,
                    "multiplier": multiplier.value,
                    "episodes": len(fresh),
                    "diverged": num_diverged,
                    "kl": kl,
                    "actor_epochs": actor_epochs,
                    "clip_fraction": clipped,
                    "value_loss": value_loss,
                    "explained_variance_r": explained_variance(values[0], targets[0]),
                    "explained_variance_c": explained_variance(values[1], targets[1]),
                    "policy_std": float(agent.log_std.detach().exp().mean()),
                }
                run.log(iteration * args.batch_size, metrics)
                if iteration % args.checkpoint_interval == 0 or iteration == args.num_iterations:
                    save()
                    save_checkpoint(run.folder, checkpoint())
        except BaseException:  # also Ctrl-C
            save()
            if writer:
                run.say(f"keeping the episodes so far in {args.save_trajectories}")
            raise

        # -- Evaluation ----------------------------------------------------------------------------
        train_seconds = run.end_stage()
        with run.phase(f"evaluation, {args.eval_episodes} episodes", stage="evaluate"):
            seeds = {"episodes": args.eval_episodes, "seed": args.seed + 1_000_000}
            returns, episodes = play(agent, args.env_id, deterministic=True, **seeds)
            noisy_returns, noisy = play(agent, args.env_id, deterministic=False, **seeds)
        if args.capture_video > 0:
            with run.phase(
                f"films of {args.capture_video} episodes in {run.folder / 'videos'}", stage="film"
            ):
                film(
                    args.env_id,
                    lambda obs: act(agent, obs, low, high),
                    episodes=args.capture_video,
                    seed=args.seed + 1_000_000,
                    folder=run.folder / "videos",
                )
        eval_cost = float(np.mean([episode.true_cost for episode in episodes]))
        env_steps = iteration * args.batch_size
        tail = np.array(ended[-max(1, len(ended) // 10) :]).reshape(-1, 2)
        summary: dict[str, Any] = {
            "return": float(returns.mean()),
            "true_cost": eval_cost,
            "cost_limit": limit,
            "bias": bias(eval_cost, limit) if np.isfinite(limit) else None,
            "return_stochastic": float(noisy_returns.mean()),
            "true_cost_stochastic": float(np.mean([episode.true_cost for episode in noisy])),
            "return_last_tenth": float(tail[:, 0].mean()) if len(tail) else None,
            "true_cost_last_tenth": float(tail[:, 1].mean()) if len(tail) else None,
            "multiplier": multiplier.value,
            "env_steps": env_steps,
            "wall_seconds": run.wall_seconds,
            "stage_seconds": run.stage_seconds,
            "steps_per_second": env_steps / train_seconds,
        }
        if writer:
            writer.close()  # first: a run with a summary is finished
        run.finish(summary)
    envs.close()
    return run.folder


def minibatches(total: int, size: int, rng: np.random.Generator) -> Iterator[Tensor]:
    order = torch.from_numpy(rng.permutation(total))
    yield from torch.split(order, size)


def explained_variance(values: Tensor, targets: Tensor) -> float:
    residual = targets.flatten() - values.flatten()
    return float(1 - residual.var() / (targets.var() + 1e-8))


if __name__ == "__main__":
    main(train, Args)
