"""PPO-Lagrangian on the true cost: the oracle that PbCRL is compared with, and its data collector.

The limit d on the mean episode cost is known here. `ppo_lag_pbcrl.py` is this script with a learned
cost in the place of the true one; `diff` shows the method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

from pbcrl import MULTIPLIER_RULES  # true cost
from pbcrl.recorder import discarded_envs, step_costs  # true cost
from pbcrl_script_utils.args import check_args, main, resumed
from pbcrl_script_utils.checkpoint import Checkpoint, check_weights, has_state
from pbcrl_script_utils.collect import Collector  # true cost
from pbcrl_script_utils.envs import (
    Episodes,
    action_bounds,
    check_rollout,
    flat_dims,
    make_envs,
    require_cost,
    resolve_cost_limit,
    start_episodes,
)
from pbcrl_script_utils.evaluation import evaluate  # true cost
from pbcrl_script_utils.policies import save_agent  # PbCRL: SafePolicy
from pbcrl_script_utils.run import Run
from pbcrl_script_utils.video import check_film

# -- Args ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    env_id: str = "SafetyPointButton1-v0"
    """any Gymnasium id whose env reports info['cost']; 'module:Id-v0' imports `module` first"""
    cost_limit: float | None = None
    """d, highest safe episode cost; default: the task's own; inf is unconstrained"""  # true cost
    seed: int = 0
    """of everything random; same seed and CPU, same numbers"""
    total_timesteps: int = 1_000_000
    """env steps of policy training, rounded up to whole iterations"""

    num_envs: int = 20
    """environments stepped together"""
    num_steps: int = 1_000
    """env steps per env and iteration"""
    update_epochs: int = 10
    """passes over the rollout per iteration"""
    minibatch_size: int = 2_000
    """env steps per gradient step"""
    learning_rate: float = 3e-4
    """Adam's step size, actor and critics"""
    lr_decay: float = 0.0
    """share of learning_rate that is lost over the run, linearly, in [0, 1]; 1 ends near 0"""
    max_grad_norm: float = 1.0
    """gradient norm to clip at, for the actor and for both critics together"""
    hidden_sizes: tuple[int, ...] = (256, 256, 256)
    """widths of the hidden layers of the actor and of each critic"""
    gamma: float = 0.99
    """discount per step, in the advantages and critics only"""
    gae_lambda: float = 0.95
    """λ of generalised advantage estimation"""
    clip_coef: float = 0.2
    """clipping range of the probability ratio"""
    target_kl: float = 0.02
    """mean KL per epoch, in nats, at which the actor stops for this iteration; critics go on"""
    bound_coef: float = 0.0
    """weight of the squared distance of the mean action to its bounds; far outside them every
    sample is clipped to the same action, and nothing more is learned"""
    initial_log_std: float = -0.5
    """log standard deviation of the Gaussian policy at the start, in units of the action"""
    multiplier_rule: Literal["adam", "ascent", "softplus", "pid"] = "adam"  # PbCRL: by constraint
    """how λ follows the mean episode cost, see pbcrl/lagrange.py; ascent is the paper's"""
    multiplier_lr: float = 0.02  # true cost
    """step size of the multiplier, per iteration in which an episode ended; for ascent and pid also
    per unit of episode cost"""
    multiplier_initial: float = 0.01
    """λ at the start"""
    multiplier_cap: float = math.inf
    """highest λ; at 3 cost has three quarters of the weight"""
    multiplier_warmup: float = 0.0
    """share of the run before λ is first moved: the reward is learned first, almost alone"""
    multiplier_proportional: float = 5.0
    """proportional part of pid, in updates: it adds as much to λ as that many of them would"""

    # -- Method --------------------------------------------------------------------------------
    save_trajectories: str | None = None
    """folder to write a uniform sample of the run's episodes to"""
    max_trajectories: int = 10_000
    """most episodes to keep there"""

    # -- Run -----------------------------------------------------------------------------------
    eval_episodes: int = 50
    """episodes of the final evaluation, deterministic and again stochastic"""
    capture_video: int = 0
    """episodes to film, with the deterministic policy, as mp4 in the run's folder"""
    print_interval: int = 0
    """iterations between two lines of a table on the terminal; 0: the progress bar alone"""
    track: bool = False
    """log to Weights & Biases as well, if wandb is installed; WANDB_PROJECT names the project"""
    torch_threads: int = 2
    """threads of PyTorch; other counts round differently"""
    bf16: bool = False
    """compute the hidden layers in bfloat16 while learning: faster where the hardware has it"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where the policy and its critics are"""
    checkpoint_interval: int = 10
    """iterations between two checkpoints, from which a run that was cut off goes on"""
    resume: str | None = None
    """folder of a run that was cut off, to go on with it; it keeps its own arguments"""
    extend_to: int | None = None
    """with --resume of a finished run: env steps that it is to have in all, more than it has"""
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


# -- Net: edit me ----------------------------------------------------------------------------------


def mlp(sizes: list[int], *, last_gain: float) -> nn.Sequential:
    """Return [hidden layers, last layer]: only the hidden ones are computed in bf16, if asked."""
    layers = [nn.Linear(fan_in, fan_out) for fan_in, fan_out in pairwise(sizes)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, last_gain if layer is layers[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    hidden = [part for layer in layers[:-1] for part in (layer, nn.ReLU(inplace=True))]
    return nn.Sequential(nn.Sequential(*hidden), layers[-1])


# -- Agent -----------------------------------------------------------------------------------------


class Agent(nn.Module):
    """Gaussian policy and two critics, for reward and cost, on running-normalised observations."""

    low: Tensor
    high: Tensor
    obs_mean: Tensor
    obs_var: Tensor
    obs_count: Tensor

    def __init__(self, envs: VectorEnv[Any, Any, Any], args: Args) -> None:
        super().__init__()
        self.bf16 = args.bf16
        obs_dim, act_dim = flat_dims(envs)
        low, high = map(torch.as_tensor, action_bounds(envs))
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self.mean = mlp([obs_dim, *args.hidden_sizes, act_dim], last_gain=0.01)
        self.log_std = nn.Parameter(torch.full((act_dim,), args.initial_log_std))
        self.critic_r = mlp([obs_dim, *args.hidden_sizes, 1], last_gain=1.0)
        self.critic_c = mlp([obs_dim, *args.hidden_sizes, 1], last_gain=1.0)
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

    def output(self, net: nn.Sequential, obs: Tensor) -> Tensor:
        """Apply a net to normalised observations while learning: hidden layers in bf16 if asked."""
        if self.bf16:
            with torch.autocast(obs.device.type, torch.bfloat16):
                hidden: Tensor = net[0](obs)
        else:
            hidden = net[0](obs)
        output: Tensor = net[1](hidden.float())
        return output

    def log_prob(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log π(a | s), (B,), and the mean action, (B, act_dim), of normalised obs."""
        mean = self.output(self.mean, obs)
        z = (actions - mean) / self.log_std.exp()
        constant = self.log_std.sum() + 0.5 * math.log(2 * math.pi) * len(self.log_std)
        return -0.5 * z.square().sum(-1) - constant, mean

    @torch.no_grad()
    def values(self, obs: Tensor) -> Tensor:
        """Return both critics' values of raw observations (..., obs_dim), (2, ...), on the CPU.

        In float32 with `--bf16`, too: advantages are small differences of values.
        """
        parts = self.normalize(obs.flatten(0, -2)).split(2_000)  # which stay in the caches
        nets = self.critic_r, self.critic_c
        values = torch.cat([torch.cat([net(part) for net in nets], 1) for part in parts])
        return values.t().reshape(2, *obs.shape[:-1]).cpu()

    @torch.no_grad()
    def act(self, obs: np.ndarray, noise: torch.Generator | None = None) -> np.ndarray:
        """Return actions (N, act_dim) for raw observations (N, obs_dim); the mean without noise."""
        x = torch.as_tensor(obs, dtype=torch.float32, device=self.log_std.device)
        action = self.mean(self.normalize(x)).cpu()
        if noise is not None:
            action += self.log_std.exp().cpu() * torch.randn(action.shape, generator=noise)
        actions: np.ndarray = action.numpy()
        return actions


# -- Losses: edit me -------------------------------------------------------------------------------


class Batch(NamedTuple):
    """A rollout, or a minibatch of one, to learn from."""

    obs: Tensor  # normalised, (B, obs_dim)
    actions: Tensor  # as sampled, before clipping to the bounds, (B, act_dim)
    log_prob: Tensor  # of the policy that acted, (B,)
    adv: Tensor  # A of Eq. 41, (B,)
    target_r: Tensor  # of the reward critic, (B,)
    target_c: Tensor  # of the cost critic, (B,)


def losses(agent: Agent, mb: Batch, args: Args) -> tuple[Tensor, Tensor, Tensor]:
    """Return the policy's loss, the critics', and log(π / π_old), (B,): edit me.

    Ordinary autograd: whatever `mlp` and `Agent` are made of, this is what trains them.
    """
    log_prob, mean = agent.log_prob(mb.obs, mb.actions)
    log_ratio = log_prob - mb.log_prob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy = -torch.min(ratio * mb.adv, clipped * mb.adv).mean()  # Eq. 40
    if args.bound_coef > 0:
        outside = mean - mean.clamp(agent.low, agent.high)
        policy = policy + args.bound_coef * outside.square().sum(-1).mean()
    return policy, value_loss(agent, mb), log_ratio.detach()


def value_loss(agent: Agent, mb: Batch) -> Tensor:
    """Return the loss of both critics, Eqs. 43 and 44."""
    error_r = agent.output(agent.critic_r, mb.obs).squeeze(-1) - mb.target_r
    error_c = agent.output(agent.critic_c, mb.obs).squeeze(-1) - mb.target_c
    return 0.5 * (error_r.square().mean() + error_c.square().mean())


# -- PPO -------------------------------------------------------------------------------------------


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
    """Return advantages (..., T, N): a time limit bootstraps V(s'), only a termination is worth 0.

    `next_values` is V of the true next state, the final one where an episode ended; `done` (T, N)
    is terminated or truncated and cuts the sum over time.
    """
    delta = rewards + gamma * next_values * ~terminated - values
    carry = gamma * lam * (~done).to(delta.dtype)
    advantages = torch.empty_like(delta)
    running = torch.zeros_like(delta[..., 0, :])
    for t in reversed(range(len(done))):
        running = delta[..., t, :] + carry[t] * running
        advantages[..., t, :] = running
    return advantages


def explained_variance(values: Tensor, targets: Tensor) -> float:
    return float(1 - (targets - values).var() / (targets.var() + 1e-8))


def update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    args: Args,
    rng: np.random.Generator,
) -> dict[str, float]:
    """Train on a rollout for all epochs; the actor stops at `target_kl`, the critics go on."""
    critics = [*agent.critic_r.parameters(), *agent.critic_c.parameters()]
    of_critics = {id(p) for p in critics}
    actor = [p for p in agent.parameters() if id(p) not in of_critics]
    actor_epochs, stopped, kl, clip_fraction = 0, False, 0.0, 0.0
    for _ in range(args.update_epochs):
        log_ratios = []
        order = torch.from_numpy(rng.permutation(len(batch.obs))).to(batch.obs.device)
        parts = (x[order].split(args.minibatch_size) for x in batch)  # once: faster than one by one
        for mb in map(Batch, *parts):
            if stopped:
                loss = value = value_loss(agent, mb)
            else:
                policy, value, log_ratio = losses(agent, mb, args)
                loss = policy + value
                log_ratios.append(log_ratio)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(critics, args.max_grad_norm)
            nn.utils.clip_grad_norm_(actor, args.max_grad_norm)  # without gradients: nothing
            optimizer.step()
        if not stopped:
            log_ratio = torch.cat(log_ratios)
            kl = float((log_ratio.exp() - 1 - log_ratio).mean())
            clip_fraction = float(((log_ratio.exp() - 1).abs() > args.clip_coef).float().mean())
            actor_epochs += 1
            stopped = kl > args.target_kl
    return {
        "kl": kl,
        "actor_epochs": actor_epochs,
        "clip_fraction": clip_fraction,
        "value_loss": float(value.detach()),
    }


# -- Training --------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Loose numbers of a run, as far as its future depends on them."""

    next_obs: np.ndarray  # s_t of all envs, (N, obs_dim)
    iteration: int = 0


def train(args: Args) -> Path:
    # -- Setup -------------------------------------------------------------------------------------
    args = resumed(args, script="ppo_lag")  # true cost
    check_args(args)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)  # initial weights
    rng = np.random.default_rng(args.seed)
    env_seed = args.seed  # true cost
    noise = torch.Generator().manual_seed(env_seed)
    envs = make_envs(args.env_id, args.num_envs)
    low, high = action_bounds(envs)
    limit = resolve_cost_limit(args.env_id, args.cost_limit)  # PbCRL: people need none
    if args.capture_video > 0:
        check_film(args.env_id)
    agent = Agent(envs, args).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    gains = {"proportional": args.multiplier_proportional}  # PbCRL: by constraint
    multiplier = MULTIPLIER_RULES[args.multiplier_rule](  # PbCRL: by constraint
        lr=args.multiplier_lr,  # PbCRL: by constraint
        initial=args.multiplier_initial if math.isfinite(limit) else 0.0,  # PbCRL: by constraint
        cap=args.multiplier_cap,  # PbCRL: by constraint
        **(gains if args.multiplier_rule == "pid" else {}),  # PbCRL: by constraint
    )  # PbCRL: by constraint
    episodes = Episodes(args.num_envs)
    progress = Progress(next_obs=np.zeros((args.num_envs, len(agent.obs_mean))))
    shape = args.num_steps, args.num_envs
    obs = np.zeros((*shape, len(agent.obs_mean)), np.float32)
    actions = np.zeros((*shape, len(low)), np.float32)
    executed = np.zeros_like(actions)  # clipped to the bounds
    rewards, costs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    terminated, truncated = np.zeros(shape, bool), np.zeros(shape, bool)

    with Run(args, script=__file__, cost_limit=limit) as run:
        run.say(f"== PPO-Lag on {args.env_id}; files in {run.folder}")  # true cost
        # -- Method --------------------------------------------------------------------------------
        run.say(f"   true cost limit {limit:g}")
        collector = Collector(args, envs) if args.save_trajectories else None

        # -- Checkpoint ----------------------------------------------------------------------------
        def save() -> None:
            if collector:  # true cost
                collector.writer.flush()  # true cost
            check_weights(agent=agent)  # true cost
            save_agent(run.folder, agent, args.env_id)

        run.on_error(save)
        checkpoint = Checkpoint(
            run.folder,
            args,
            run=run,
            agent=agent,
            optimizer=optimizer,
            multiplier=multiplier,
            envs=envs,
            episodes=episodes,
            collector=collector,  # true cost
            progress=progress,
            rng=rng,
            noise=noise,
        )
        loaded = args.resume is not None and checkpoint.load()

        # -- Start ---------------------------------------------------------------------------------
        if not loaded or not has_state(envs):  # envs without a state start their episodes again
            seed = env_seed + 2_000_000 * progress.iteration
            progress.next_obs = start_episodes(envs, seed=seed, num_steps=args.num_steps)
            episodes.restart()
            if collector:  # true cost
                collector.restart()  # true cost

        for iteration in run.iterations(progress):
            # -- 1. Roll out -----------------------------------------------------------------------
            final_obs, num_discarded = [], 0
            # Few rows are not worth sharing; a thread that waits for more holds up the envs.
            torch.set_num_threads(1)
            for t in range(args.num_steps):
                obs[t] = progress.next_obs
                actions[t] = agent.act(obs[t], noise)
                executed[t] = actions[t].clip(low, high)
                progress.next_obs, rewards[t], terminated[t], truncated[t], infos = envs.step(
                    executed[t]
                )
                done = terminated[t] | truncated[t]
                discarded = discarded_envs(infos, args.num_envs)
                true_cost = step_costs(infos, args.num_envs, done)  # true cost
                unless = rewards[t] if math.isinf(limit) else None  # true cost
                true_cost = require_cost(true_cost, args.env_id, unless=unless)  # true cost
                costs[t] = np.nan_to_num(true_cost)  # true cost
                if collector:  # true cost
                    rows = obs[t], executed[t], true_cost, done, rewards[t]  # true cost
                    ending = terminated[t], infos.get("final_obs"), discarded  # true cost
                    collector.record(*rows, *ending)  # true cost
                episodes.step(rewards[t], true_cost, done, discarded=discarded)
                if done.any():
                    final_obs.append(np.stack(infos["final_obs"][done]))
                    num_discarded += int(discarded.sum())
            torch.set_num_threads(args.torch_threads)
            check_rollout(observations=obs, rewards=rewards, costs=costs)
            new = episodes.take()
            mean_return, mean_cost = new.mean(axis=0) if len(new) else (None, None)
            run.lap("rollout")

            # -- 4. Advantages ---------------------------------------------------------------------
            device = args.device
            values = agent.values(torch.from_numpy(obs).to(device))  # (2, T, N)
            next_values = torch.empty_like(values)
            next_values[:, :-1] = values[:, 1:]
            last = torch.as_tensor(progress.next_obs, dtype=torch.float32, device=device)
            next_values[:, -1] = agent.values(last)
            is_done = torch.from_numpy(terminated | truncated)
            if final_obs:
                final = torch.as_tensor(np.concatenate(final_obs), dtype=torch.float32)
                next_values[:, is_done] = agent.values(final.to(device))
            signals = torch.from_numpy(np.stack([rewards, costs]))
            ends = torch.from_numpy(terminated), is_done
            gamma, lam = args.gamma, args.gae_lambda
            adv_r, adv_c = gae(signals, values, next_values, *ends, gamma=gamma, lam=lam)
            target_r, target_c = adv_r + values[0], adv_c + values[1]
            adv_r = (adv_r - adv_r.mean()) / (adv_r.std() + 1e-8)
            # Only centred: the size of the true cost means something beside its limit.  # true cost
            adv_c = adv_c - adv_c.mean()  # true cost
            # Eq. 41, divided by 1 + λ so that the step size does not grow with λ.
            adv = (adv_r - multiplier.value * adv_c) / (1 + multiplier.value)

            # -- 5. Policy -------------------------------------------------------------------------
            optimizer.param_groups[0]["lr"] = args.learning_rate * (
                1 - args.lr_decay * (iteration - 1) / args.num_iterations
            )
            flat_obs = torch.from_numpy(obs).flatten(0, 1).to(device)
            flat_actions = torch.from_numpy(actions).flatten(0, 1).to(device)
            normalized = agent.normalize(flat_obs)
            with torch.no_grad():  # as precise as in the epochs, or ratios would not start at 1
                parts = zip(normalized.split(2_000), flat_actions.split(2_000), strict=True)
                log_prob = torch.cat([agent.log_prob(*part)[0] for part in parts])
            targets = (x.flatten().to(device) for x in (adv, target_r, target_c))
            batch = Batch(normalized, flat_actions, log_prob, *targets)
            learned = update(agent, optimizer, batch, args, rng)
            agent.update_normalizer(flat_obs)
            run.lap("update")

            # -- 6. Dual ascent --------------------------------------------------------------------
            is_warm = iteration > args.multiplier_warmup * args.num_iterations
            has_cost = is_warm and math.isfinite(limit)
            multiplier.update(mean_cost if has_cost else None, limit)

            # -- 7. Log ----------------------------------------------------------------------------
            metrics = {
                "return": mean_return,
                "true_cost": mean_cost,
                "multiplier": multiplier.value,
                "episodes": len(new),
                "discarded": num_discarded,
                **learned,
                "explained_variance_r": explained_variance(values[0], target_r),
                "explained_variance_c": explained_variance(values[1], target_c),
                "policy_std": float(agent.log_std.detach().exp().mean()),
            }
            run.log(iteration * args.batch_size, metrics)
            check_weights(agent=agent)  # true cost
            if iteration % args.checkpoint_interval == 0 or iteration == args.num_iterations:
                save()
                checkpoint.save()

        # -- Evaluation ----------------------------------------------------------------------------
        if collector:  # true cost
            collector.close()  # first: a run with a summary is finished  # true cost
        summary = evaluate(run, agent, args, limit, episodes.ended)  # true cost
        run.finish({**summary, "multiplier": multiplier.value})
    envs.close()
    return run.folder


if __name__ == "__main__":
    main(train, Args)
