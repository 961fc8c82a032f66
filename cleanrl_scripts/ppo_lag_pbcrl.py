"""PbCRL: learn a cost and its limit from preferences, train PPO-Lagrangian under them (Alg. 1).

Four phases: collect episodes by the reward alone (unless `--dataset` names some), have an oracle
label pairs of them, pretrain the cost model, then train the policy while fine-tuning the cost model
on labels of its own fresh episodes. `--dead-zone 0 --snr-weight 0 --dead-zone-lr 0` is PPO-BT.
`diff ppo_lag.py ppo_lag_pbcrl.py` shows the method: the sections Args, Method, 2, 3 and 6, how 4
scales the cost, and what of all this is set up, saved and reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

import pbcrl
import pbcrl_script_utils as utils

# -- Args ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Args(utils.RunArgs):
    recipes: ClassVar[str] = "ppo_lag_pbcrl"  # of pbcrl_script_utils/recipes.py, for copies as well
    env_id: str
    """any Gymnasium id whose env reports info['cost']; 'module:Id-v0' imports `module` first"""
    cost_limit: utils.NonNegative | None = None
    """d, highest safe episode cost, known to the oracle only; default: the task's own"""
    seed: utils.NonNegativeInt = 0
    """of everything random; same seed and CPU, same numbers"""
    total_timesteps: utils.Count = 1_000_000
    """env steps of policy training, rounded up to whole iterations"""

    num_envs: utils.Count = 20
    """environments stepped together"""
    num_steps: utils.NonNegativeInt = 0
    """env steps per env and iteration; 0: 100 to 1,000, so that there are some 250 iterations"""
    update_epochs: utils.Count = 10
    """passes over the rollout per iteration"""
    minibatch_size: utils.NonNegativeInt = 0
    """env steps per gradient step; 0: a quarter of an iteration's"""
    learning_rate: utils.Positive = 1e-3
    """Adam's step size, actor and critics"""
    lr_decay: utils.Share = 0.9
    """share of learning_rate that is lost over the run, linearly; 1 ends near 0"""
    max_grad_norm: utils.Bound = 1.0
    """gradient norm to clip at, for the actor and for both critics together"""
    hidden_sizes: tuple[utils.Count, ...] = (64, 64)
    """widths of the hidden layers of the actor and of each critic"""
    gamma: utils.Share = 0.99
    """discount per step, in the advantages and critics only"""
    gae_lambda: utils.Share = 0.95
    """λ of generalised advantage estimation"""
    clip_coef: utils.Positive = 0.2
    """clipping range of the probability ratio"""
    target_kl: utils.Bound = 0.02
    """mean KL per epoch, in nats, at which the actor stops for this iteration; critics go on"""
    bound_coef: utils.NonNegative = 0.1
    """weight of the squared distance of the mean action to its bounds, beyond which it learns
    nothing, since every sample is clipped to the same action"""
    multiplier_lr: utils.NonNegative = 0.1
    """change of log λ per update by which λ follows the cost, see pbcrl/lagrange.py; 0 keeps λ"""
    multiplier_initial: utils.NonNegative = 1.0
    """λ at the start, the price of cost: both reward and cost are in units of their own scale"""
    multiplier_cap: utils.Bound = 3.0
    """highest λ"""

    # -- Method --------------------------------------------------------------------------------
    cost_model: Literal["trees", "net"] = "trees"
    """what learns the cost: boosted trees, or the paper's network"""
    constraint: Literal["rate", "learned", "accept"] = "rate"
    """what moves λ, see docs/constraint.md. rate: the share of fresh episodes that the cost model
    calls unsafe, corrected by labels, and by marks the mean, too; learned: the mean learned cost
    (the paper); accept: whether the mean cost of a batch of fresh episodes is within the limit, in
    labelling rounds"""
    max_unsafe_rate: utils.OpenShare = 0.05
    """p*, highest share of unsafe episodes, for --constraint rate"""
    accept_batch: utils.EpisodeBatch = 20
    """episodes in the batch of --constraint accept; two count as one online query"""
    dataset: str | None = None
    """trajectories to pretrain on: a folder of ours, a local Minari dataset by id or folder, or a
    DSRL file; default: collect some by the reward alone and cache them, three per offline query"""
    offline_queries: utils.NonNegativeInt = 0
    """pairs of offline episodes, labelled for pretraining, a tenth of them for validation"""
    online_queries: utils.NonNegativeInt = 20_000
    """labelled in policy training, more of them early, half in its first quarter: pairs, and, by
    marks, as many grids of twelve episodes"""
    finetune_interval: utils.Count = 5
    """K: iterations between two labelling rounds; each of the first K has one"""
    dead_zone: utils.NonNegative | None = None
    """δ in pretraining, and where its adaptation starts, in units of the learned episode cost;
    default: the paper's 1 for a net, 0 for trees, which underestimate no cost"""
    dead_zone_lr: utils.NonNegative = 1.0
    """step size of δ per labelling round; 0 keeps δ fixed"""
    snr_weight: utils.NonNegative = 1e-3
    """ζ, weight of the variance term"""
    preference_noise: utils.Share = 0.0
    """probability that the simulated oracle flips a preference"""
    safety_noise: utils.Share = 0.0
    """probability that the simulated oracle flips a safety label"""
    marks: bool = False
    """whether the simulated oracle marks the steps that cost, too, in each episode of a pair; where
    it flips safety labels, marks are 2 % of an episode late, off by as much, and some are missed"""
    label_folder: str | None = None
    """folder through which people answer instead (python -m pbcrl.label FOLDER); no true cost or
    limit is needed then. Runs share its answers, and ask nothing there a second time"""
    label_annotators: utils.Count = 1
    """people who are to answer each question in that folder"""
    label_wait: utils.Seconds = math.inf
    """seconds that a labelling round, the last one too, waits for people's answers at most; what
    comes later is learned from in a later round"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return -(-self.total_timesteps // self.batch_size)

    def is_round(self, iteration: int) -> bool:
        """Whether labels are bought in this iteration: early, before the policy has one way."""
        k = self.finetune_interval
        return iteration <= k or iteration % k == 0 or iteration == self.num_iterations

    def rests(self, iteration: int) -> bool:
        """Whether a policy has been trained too little for its λ to move: so it learns its task."""
        # Offline labels have told the limit that `learned` goes by.
        has_limit = self.constraint == "learned" and self.offline_queries > 0
        return not has_limit and 10 * (iteration - 1) < self.num_iterations

    def due(self, iteration: int) -> int:
        """Online queries up to an iteration: a policy that still changes shows what others miss."""
        return int(self.online_queries * (iteration / self.num_iterations) ** 0.5)


# -- Net: edit me ----------------------------------------------------------------------------------


def mlp(sizes: list[int], *, last_gain: float) -> nn.Sequential:
    """Return a net with ReLUs between its layers."""
    layers = [nn.Linear(fan_in, fan_out) for fan_in, fan_out in pairwise(sizes)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, last_gain if layer is layers[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    hidden = [part for layer in layers[:-1] for part in (layer, nn.ReLU(inplace=True))]
    return nn.Sequential(*hidden, layers[-1])


# -- Agent -----------------------------------------------------------------------------------------


class Agent(nn.Module):
    """Gaussian policy and two critics, for reward and cost, on running-normalised observations.

    The policy acts in half ranges of the action, about its middle, where the action has bounds.
    """

    initial_log_std = -0.5
    """Of the Gaussian at the start: the deviation is 0.6 half ranges of the action."""
    low: Tensor
    high: Tensor
    middle: Tensor
    half_range: Tensor
    obs_mean: Tensor
    obs_var: Tensor
    obs_count: Tensor

    def __init__(self, envs: VectorEnv[Any, Any, Any], args: Args) -> None:
        super().__init__()
        obs_dim, act_dim = utils.flat_dims(envs)
        for name, number in utils.action_bounds(envs)._asdict().items():
            self.register_buffer(name, torch.as_tensor(number), persistent=False)
        self.mean = mlp([obs_dim, *args.hidden_sizes, act_dim], last_gain=0.01)
        self.log_std = nn.Parameter(torch.full((act_dim,), self.initial_log_std))
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

    @torch.no_grad()
    def keep_trying(self, share: float) -> None:
        """Hold the standard deviation above a share of its first, or what has stopped stays so."""
        self.log_std.clamp_(min=self.initial_log_std + math.log(share))

    def log_prob(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log π(a | s), (B,), up to a constant, and the mean, (B, act_dim), in half ranges.

        Observations are normalised, actions as the env takes them.
        """
        mean: Tensor = self.mean(obs)
        z = ((actions - self.middle) / self.half_range - mean) / self.log_std.exp()
        constant = self.log_std.sum() + 0.5 * math.log(2 * math.pi) * len(self.log_std)
        return -0.5 * z.square().sum(-1) - constant, mean

    @torch.no_grad()
    def values(self, obs: Tensor) -> Tensor:
        """Return both critics' values of raw observations (..., obs_dim), (2, ...), on the CPU."""
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
        actions: np.ndarray = (self.middle.cpu() + self.half_range.cpu() * action).numpy()
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
        low, high = ((bound - agent.middle) / agent.half_range for bound in (agent.low, agent.high))
        outside = mean - mean.clamp(low, high)
        policy = policy + args.bound_coef * outside.square().sum(-1).mean()
    return policy, value_loss(agent, mb), log_ratio.detach()


def value_loss(agent: Agent, mb: Batch) -> Tensor:
    """Return the loss of both critics, Eqs. 43 and 44."""
    error_r: Tensor = agent.critic_r(mb.obs).squeeze(-1) - mb.target_r
    error_c: Tensor = agent.critic_c(mb.obs).squeeze(-1) - mb.target_c
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


# -- Method ----------------------------------------------------------------------------------------


def make_constraint(args: Args) -> pbcrl.Constraint:
    """What moves λ: edit me."""
    if args.constraint == "rate":
        return pbcrl.UnsafeRate(args.max_unsafe_rate)
    if args.constraint == "accept":
        return pbcrl.Acceptance(args.accept_batch)
    return pbcrl.LearnedLimit()


def make_trainer(
    args: Args, envs: VectorEnv[Any, Any, Any], horizon: int, rng: np.random.Generator
) -> pbcrl.Trainer:
    """What learns from labels, and what it trains: edit me."""
    limits: dict[str, Any] = {"output_scale": horizon**-0.5, "horizon": horizon}
    initial = float(args.cost_model == "net") if args.dead_zone is None else args.dead_zone
    dead_zone = pbcrl.DeadZone(initial, lr=args.dead_zone_lr, maximum=max(10.0, initial))
    options: dict[str, Any] = {"dead_zone": dead_zone, "snr_weight": args.snr_weight, "rng": rng}
    if args.cost_model == "trees":
        trees = pbcrl.TreeCost.for_env(envs, **limits)
        return pbcrl.TreeTrainer(trees, threads=args.threads, **options)
    net = pbcrl.CostModel.for_env(envs, **limits)
    return pbcrl.CostModelTrainer(net, **options)


def pretrain(
    args: Args,
    run: utils.Run,
    trainer: pbcrl.Trainer,
    feedback: pbcrl.FeedbackLoop,
    valid: pbcrl.PreferenceBuffer,
) -> None:
    """Phases 2 and 3: buy labels of the offline episodes, fit the cost model."""
    train, num_valid = feedback.buffer, args.offline_queries // 10
    with run.phase("phase 2 of 4: label pairs of the episodes", stage="label"):
        parts = [(valid, num_valid), (train, args.offline_queries - num_valid)]
        on_valid, on_train = feedback.label_all(parts)
        run.say(f"   {on_train} + {on_valid} queries for training + validation, over")
        run.say(f"   {train.num_compared} + {valid.num_compared} different episodes")
    with run.phase("phase 3 of 4: pretrain the cost model", stage="pretrain"):
        trainer.model.fit_input_scale(train.trajectories)
        if args.online_queries and not trainer.can_learn(train):
            run.warn(
                "labels of the offline episodes are all safe, or all unsafe: no limit can be "
                "learned from them; the cost is 0 until the policy's own are of both kinds"
            )
            return
        trainer.pretrain(train, valid, on_evaluation=run.pretrained)
        if np.ptp(trainer.model.score(train.trajectories)) == 0:
            run.warn("nothing was learned in pretraining; all episodes have the same learned cost")


# -- Training --------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Loose numbers of a run, as far as its future depends on them."""

    next_obs: np.ndarray  # s_t of all envs, (N, obs_dim)
    iteration: int = 0
    ended: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))  # return, true cost (E, 2)
    pretrained: dict[str, float] = field(default_factory=dict)  # how good the cost model was then


def train(args: Args) -> Path:
    # -- Setup -------------------------------------------------------------------------------------
    args = utils.with_lengths(args)
    utils.check_args(args)
    env_seed = args.seed + 500_000  # no episode of a dataset of this seed comes again
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)  # initial weights
    rng = np.random.default_rng(args.seed)
    noise = torch.Generator().manual_seed(env_seed)
    envs = utils.make_envs(args.env_id, args.num_envs, threads=args.threads)
    limit = utils.resolve_cost_limit(args.env_id, args.cost_limit, needed=not args.label_folder)
    low, high, *_ = utils.action_bounds(envs)
    agent = Agent(envs, args).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    dear = 1.0 if args.constraint == "rate" else 3.0  # few labels move it, and a model that errs
    multiplier = pbcrl.LagrangeMultiplier(
        lr=args.multiplier_lr, initial=args.multiplier_initial, dear=dear, cap=args.multiplier_cap
    )
    rollout = utils.Rollout(args.num_steps, envs)
    scale, adv_scale = (pbcrl.SignalScale(args.num_envs, gamma) for gamma in (args.gamma, 0.0))
    progress = Progress(next_obs=rollout.obs[0].copy())
    horizon = utils.horizon_of(envs)
    utils.check_labels(args)

    with utils.Run(args, script=__file__, cost_limit=limit) as run:
        run.begin("PbCRL")
        # -- Method --------------------------------------------------------------------------------
        replays = utils.Replays(run.folder) if args.label_folder else None
        oracle = utils.make_oracle(args, run, limit=limit, replays=replays)
        trainer = make_trainer(args, envs, horizon, rng)
        cost_model = trainer.model
        test, *offline = utils.offline_episodes(args, run, envs, replays=replays)
        valid_buffer, buffer = map(pbcrl.PreferenceBuffer, offline)
        feedback = pbcrl.FeedbackLoop(oracle, buffer, rng=rng, folder=run.folder)
        envs = pbcrl.RecordTrajectories(envs, needs_cost=not args.label_folder)
        if replays is not None:
            envs = utils.RecordStarts(envs, args.env_id, replays)
        constraint = make_constraint(args)
        candidates = utils.Candidates(args.num_iterations)
        dead_end = utils.DeadEnd(args, agent, optimizer, multiplier, say=run.say)
        monitor = utils.LabelMonitor(
            run, args, cost_model, feedback, constraint, horizon=horizon, limit=limit
        )

        # -- Checkpoint ----------------------------------------------------------------------------
        def keep() -> None:
            path = run.folder / "cost_model.safetensors"
            cost_model.save(path, env_id=args.env_id, dead_zone=trainer.dead_zone.value)
            utils.save_agent(run, agent, args.env_id)

        checkpoint = utils.Checkpoint(run, args, keep=keep)
        checkpoint.add(progress=progress, agent=agent, optimizer=optimizer, multiplier=multiplier)
        checkpoint.add(scale=scale, adv_scale=adv_scale, dead_end=dead_end)
        checkpoint.add(envs=envs, cost_model=cost_model, trainer=trainer, feedback=feedback)
        checkpoint.add(constraint=constraint, monitor=monitor, candidates=candidates)
        checkpoint.add(rng=rng, noise=noise, torch=torch.default_generator)
        loaded = args.resume is not None and checkpoint.load()

        if not loaded and args.offline_queries:
            pretrain(args, run, trainer, feedback, valid_buffer)
            progress.pretrained = utils.report_pretrained(run, cost_model, test, limit)
        phase = "phase 4 of 4: " if args.offline_queries else ""
        run.say(f"== {phase}train the policy, and the cost model with it")
        if not loaded or not utils.has_state(envs):  # envs without a state begin again
            seed = env_seed + 2_000_000 * progress.iteration
            progress.next_obs = utils.start_episodes(envs, seed=seed, num_steps=args.num_steps)
            scale.reset()  # its sums are of episodes that were dropped
            feedback.set_unused_labels_aside()
        if not loaded:  # so that nothing is pretrained twice
            checkpoint.save()

        for iteration in run.iterations(progress):
            # -- 1. Roll out -----------------------------------------------------------------------
            done = (iteration - 1) / args.num_iterations  # share of the training
            finished, final_obs = list[pbcrl.Trajectory](), list[np.ndarray]()
            # Few rows are not worth sharing; a thread that waits for more holds up the envs.
            torch.set_num_threads(1)
            for t in range(args.num_steps):
                rollout.obs[t] = progress.next_obs
                rollout.actions[t] = agent.act(rollout.obs[t], noise)
                rollout.executed[t] = rollout.actions[t].clip(low, high)
                progress.next_obs, rollout.rewards[t], terminated, truncated, infos = envs.step(
                    rollout.executed[t]
                )
                rollout.terminated[t], rollout.done[t] = terminated, terminated | truncated
                rollout.costs[t] = infos.get("true_cost", 0.0)  # 3 puts a learned cost in its place
                finished += pbcrl.finished_trajectories(infos)
                if rollout.done[t].any():
                    final_obs.append(np.stack(infos["final_obs"][rollout.done[t]]))
                run.stepped(t)
            torch.set_num_threads(args.threads)
            new = utils.outcomes(finished)  # return and true cost, (E, 2)
            progress.ended = np.concatenate([progress.ended, new])
            mean_return, mean_cost = new.mean(axis=0).tolist() if len(new) else (None, None)
            run.rolled_out(rollout, iteration)

            # -- 2. Label and fine-tune ------------------------------------------------------------
            # An oracle may be slow: what has come by the end of --label-wait is learned from.
            answers, tuned = pbcrl.Answers(), dict[str, float]()
            if args.online_queries:
                feedback.add(finished)
            if args.is_round(iteration):
                # In grids people find what the model wrongly calls safe; then it is marked.
                answers = feedback.round(
                    args.due(iteration),
                    model=cost_model,
                    batch=constraint.batch,
                    grids=trainer.fits_marks and args.constraint == "rate",
                    wait=args.label_wait,
                )
                tuned = trainer.update(buffer, answers.pairs)

            # -- 3. Score with the model as it is now ----------------------------------------------
            rollout.costs[:] = cost_model.step_cost(rollout.obs, rollout.executed)
            learned = cost_model.score(finished)  # (E,)
            measured, allowed = constraint.measure(
                answers, learned, cost_model.learned_limit, by_marks=trainer.fits_marks
            )
            is_young = args.rests(iteration)
            if args.constraint != "accept" and is_young:
                measured = None  # λ rests; what is said of a whole batch needs no learned cost
            watched = monitor.update(iteration, answers, finished, learned, measured)
            run.lap("cost_model")

            # -- 4. Advantages ---------------------------------------------------------------------
            values = agent.values(torch.from_numpy(rollout.obs).to(args.device))  # (2, T, N)
            next_values = torch.empty_like(values)
            next_values[:, :-1] = values[:, 1:]
            last = torch.as_tensor(progress.next_obs, dtype=torch.float32, device=args.device)
            next_values[:, -1] = agent.values(last)
            ends = torch.from_numpy(rollout.terminated), torch.from_numpy(rollout.done)
            if final_obs:
                final = torch.as_tensor(np.concatenate(final_obs), dtype=torch.float32)
                next_values[:, ends[1]] = agent.values(final.to(args.device))
            signals = torch.from_numpy(np.stack([rollout.rewards, rollout.costs]))
            signals = signals / scale.update(signals, ends[1])  # so λ does not depend on units
            gamma, lam = args.gamma, args.gae_lambda
            # Learned costs go on after a termination: while all seems to cost, a crash would save.
            ends = torch.stack([ends[0], torch.zeros_like(ends[0])]), ends[1]
            adv_r, adv_c = gae(signals, values, next_values, *ends, gamma=gamma, lam=lam)
            target_r, target_c = adv_r + values[0], adv_c + values[1]
            if args.constraint != "accept" and not trainer.fits_marks:
                # What all episodes share of a learned cost dilutes its price; marks share nothing.
                spread_r, spread_c = adv_scale.update(torch.stack([adv_r, adv_c]), ends[1])
                adv_c = adv_c * (spread_r / spread_c).clamp(min=1.0)
            if is_young:
                # Few labels, and none that says safe: a price would stop the policy.
                adv_c = adv_c * (buffer.is_trainable or buffer.has_many)
            adv = adv_r - multiplier.value * adv_c  # Eq. 41
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)

            # -- 5. Policy -------------------------------------------------------------------------
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - args.lr_decay * done)
            flat_obs = torch.from_numpy(rollout.obs).flatten(0, 1).to(args.device)
            flat_actions = torch.from_numpy(rollout.actions).flatten(0, 1).to(args.device)
            normalized = agent.normalize(flat_obs)
            with torch.no_grad():  # in parts that stay in the caches
                parts = zip(normalized.split(2_000), flat_actions.split(2_000), strict=True)
                log_prob = torch.cat([agent.log_prob(*part)[0] for part in parts])
            targets = (x.flatten().to(args.device) for x in (adv, target_r, target_c))
            batch = Batch(normalized, flat_actions, log_prob, *targets)
            updated = update(agent, optimizer, batch, args, rng)
            agent.keep_trying((1 - done) ** 2)
            agent.update_normalizer(flat_obs)
            run.lap("update")

            # -- 6. Dual ascent --------------------------------------------------------------------
            multiplier.update(measured, allowed)  # None leaves it as it is
            is_within = measured is not None and measured <= allowed
            candidates.update(iteration, agent, is_within=is_within)
            # Where no way leads on, the policy starts afresh; what it was is a candidate still.
            labelled, ended = answers.unsafe_rate, progress.ended
            dead_end.update(iteration, measured, allowed, ended, len(new), labelled=labelled)

            # -- 7. Log ----------------------------------------------------------------------------
            metrics = {
                "return": mean_return,
                "true_cost": mean_cost,
                **watched,
                "measured": measured,
                "allowed": allowed,
                **tuned,
                "dead_zone": trainer.dead_zone.value,
                "multiplier": multiplier.value,
                "episodes": len(new),
                "discarded": int(rollout.done.sum()) - len(new),
                **updated,
                "explained_variance_r": explained_variance(values[0], target_r),
                "explained_variance_c": explained_variance(values[1], target_c),
                "policy_std": float(agent.log_std.detach().exp().mean()),
            }
            run.log(iteration * args.batch_size, metrics)
            checkpoint.after(iteration)

        # -- Evaluation ----------------------------------------------------------------------------
        chosen = utils.choose_policy(run, agent, args, candidates, trainer, constraint)
        keep()
        judge = utils.Judge.of(cost_model)
        summary = utils.evaluate(run, agent, args, limit, progress.ended, judge, test)
        summary |= {**chosen, **monitor.summary(), **dead_end.summary(), **progress.pretrained}
        summary |= {"dead_zone": trainer.dead_zone.value, "multiplier": multiplier.value}
        run.finish(summary)
        utils.write_card(run.folder, cost_model, buffer, envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    utils.main(train, Args)
