"""RLSF, the paper's baseline: a binary cost per state from labelled segments, PPO-Lagrangian on it.

A classifier tells the states of safe segments from those of unsafe ones. What it takes for unsafe
costs 1, and the sum is held under the true limit d, which this method is told. Only novel episodes
are shown to the oracle (Reddy et al., "Safety through feedback in constrained RL", 2024).
`diff ppo_lag.py ppo_lag_rlsf.py` shows the method: the sections Args, Method, 2, 3 and 6, and what
of it is set up, saved and reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

import pbcrl
import pbcrl_script_utils as utils
from pbcrl.data.label_log import LabelLog
from pbcrl.errors import StorageError
from pbcrl.oracle import Teacher
from pbcrl.storage import save_tensors

# -- Args ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Args(utils.RunArgs):
    recipes: ClassVar[str] = "ppo_lag_rlsf"  # of pbcrl_script_utils/recipes.py, for copies as well
    env_id: str
    """any Gymnasium id whose env reports info['cost']; 'module:Id-v0' imports `module` first"""
    cost_limit: utils.NonNegative | None = None
    """d, highest safe episode cost, told to oracle and learner; default: the task's own"""
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
    queries: utils.NonNegativeInt = 20_000
    """most labels to buy"""
    segment_length: utils.Count | None = None
    """steps that are judged together; default: whole episodes, as in the paper's comparison"""
    safety_noise: utils.Share = 0.0
    """probability that the oracle flips a label"""
    dataset: str | None = None
    """trajectories as of ppo_lag_pbcrl.py, a tenth of which learned and true costs are compared on,
    as there; default: the episodes of the final evaluation"""
    classifier_hidden_sizes: tuple[utils.Count, ...] = (64, 64)
    """widths of the classifier's hidden layers"""
    classifier_lr: utils.Positive = 1e-3
    """Adam's step size for the classifier"""
    classifier_steps: utils.Count = 100
    """gradient steps of the classifier per iteration"""
    classifier_batch_size: utils.Count = 4_000
    """states per gradient step, half of them good and half bad"""
    buffer_size: utils.Count = 200_000
    """newest states to keep of each kind"""
    hash_bits: utils.Count = 12
    """bits of the hash by which an episode is novel; more of them call more episodes novel"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return -(-self.total_timesteps // self.batch_size)


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


class RingBuffer:
    """The newest `size` states of one kind."""

    def __init__(self, size: int, obs_dim: int) -> None:
        self.states = torch.zeros(size, obs_dim)
        self.filled, self.next = 0, 0

    def add(self, states: Tensor) -> None:
        size = len(self.states)
        rows = (self.next + torch.arange(len(states))) % size
        self.states[rows[-size:]] = states[-size:]
        self.next = (self.next + len(states)) % size
        self.filled = min(self.filled + len(states), size)

    def state_dict(self) -> dict[str, Any]:
        return {"states": self.states[: self.filled], "next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.filled, self.next = len(state["states"]), state["next"]
        self.states[: self.filled] = state["states"]

    def sample(self, count: int, rng: np.random.Generator) -> Tensor:
        return self.states[torch.from_numpy(rng.integers(self.filled, size=count))]


class SimHash:
    """The sides of random planes on which states lie; remembers all that it has seen."""

    def __init__(self, obs_dim: int, bits: int, rng: np.random.Generator) -> None:
        self.planes = torch.as_tensor(rng.normal(size=(obs_dim, bits)), dtype=torch.float32)
        self.powers = 2 ** torch.arange(bits)
        self.seen: set[int] = set()

    def is_novel(self, states: Tensor) -> bool:
        """Whether any of the normalised states, (T, obs_dim), has a hash that is new."""
        hashes = set(((states @ self.planes > 0).long() @ self.powers).tolist())
        novel = not hashes <= self.seen
        self.seen |= hashes
        return novel

    def state_dict(self) -> dict[str, Any]:
        return {"seen": np.array(sorted(self.seen), np.int64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = set(state["seen"].tolist())


def segments_to_judge(episode: pbcrl.Trajectory, length: int) -> list[pbcrl.Trajectory]:
    """An episode without any cost is judged by one look, any other segment by segment."""
    if episode.true_cost == 0:
        return [episode]
    assert episode.costs is not None
    parts = [slice(start, start + length) for start in range(0, len(episode), length)]
    return [pbcrl.Trajectory(episode.obs[p], episode.actions[p], episode.costs[p]) for p in parts]


# -- Training --------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Loose numbers of a run, as far as its future depends on them."""

    next_obs: np.ndarray  # s_t of all envs, (N, obs_dim)
    iteration: int = 0
    ended: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))  # return, true cost (E, 2)


def train(args: Args) -> Path:
    # -- Setup -------------------------------------------------------------------------------------
    args = utils.with_lengths(args)
    utils.check_args(args)
    env_seed = args.seed
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)  # initial weights
    rng = np.random.default_rng(args.seed)
    noise = torch.Generator().manual_seed(env_seed)
    envs = utils.make_envs(args.env_id, args.num_envs, threads=args.threads)
    limit = utils.resolve_cost_limit(args.env_id, args.cost_limit)
    low, high, *_ = utils.action_bounds(envs)
    agent = Agent(envs, args).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    multiplier = pbcrl.LagrangeMultiplier(
        lr=args.multiplier_lr, initial=args.multiplier_initial, cap=args.multiplier_cap
    )
    rollout = utils.Rollout(args.num_steps, envs)
    scale = pbcrl.SignalScale(args.num_envs, args.gamma)
    progress = Progress(next_obs=rollout.obs[0].copy())
    horizon = utils.horizon_of(envs)
    length = horizon if args.segment_length is None else args.segment_length
    if length > horizon:
        raise ValueError(
            f"--segment-length must lie in 1..{horizon}, the time limit of {args.env_id}, got "
            f"{length}; lower it"
        )

    with utils.Run(args, script=__file__, cost_limit=limit) as run:
        run.begin("RLSF")
        # -- Method --------------------------------------------------------------------------------
        run.say(f"   true cost limit {limit:g}")
        test: list[pbcrl.Trajectory] = []
        if args.dataset is not None:  # the tenth that ppo_lag_pbcrl.py of this seed tests on
            split = np.random.default_rng(args.seed)
            test, _, _ = utils.open_dataset(
                args.dataset, args.env_id, envs, rng=split, warn=run.warn
            )
        oracle = pbcrl.SyntheticOracle(
            limit,
            budget=args.queries,
            teacher=Teacher(safety_noise=args.safety_noise),
            rng=np.random.default_rng([args.seed, 1]),
        )
        log = LabelLog(run.folder / "labels.jsonl")
        obs_dim = len(agent.obs_mean)
        classifier = mlp([obs_dim, *args.classifier_hidden_sizes, 1], last_gain=1.0)
        classifier.to(args.device)
        classifier_optimizer = torch.optim.Adam(
            classifier.parameters(), lr=args.classifier_lr, fused=True
        )
        good, bad = (RingBuffer(args.buffer_size, obs_dim) for _ in range(2))
        novelty = SimHash(obs_dim, args.hash_bits, np.random.default_rng([args.seed, 2]))
        envs = pbcrl.RecordTrajectories(envs, needs_cost=True)

        @torch.no_grad()
        def logits(states: np.ndarray) -> Tensor:
            """How unsafe raw states look; none does before both kinds are known."""
            if not (good.filled and bad.filled):
                return torch.full(states.shape[:-1], -1.0)
            x = agent.normalize(torch.tensor(states, device=args.device))
            unsafe: Tensor = classifier(x).squeeze(-1).cpu()
            return unsafe

        def count(judged: Sequence[pbcrl.Trajectory]) -> np.ndarray:
            """Learned costs: the number of states taken for unsafe."""
            return np.array([float((logits(one.obs) > 0).sum()) for one in judged])

        def sums(judged: Sequence[pbcrl.Trajectory]) -> np.ndarray:
            """By its authors a trajectory is judged by the sum of its logits."""
            return np.array([float(logits(one.obs).sum()) for one in judged])

        # -- Checkpoint ----------------------------------------------------------------------------
        def keep() -> None:
            sizes = {"env_id": args.env_id, "hidden_sizes": args.classifier_hidden_sizes}
            path, tensors = run.folder / "classifier.safetensors", classifier.state_dict()
            save_tensors(path, kind="classifier", tensors=tensors, meta=sizes)
            utils.save_agent(run, agent, args.env_id)

        checkpoint = utils.Checkpoint(run, args, keep=keep)
        checkpoint.add(progress=progress, agent=agent, optimizer=optimizer, multiplier=multiplier)
        checkpoint.add(scale=scale)
        checkpoint.add(envs=envs, classifier=classifier, classifier_optimizer=classifier_optimizer)
        checkpoint.add(good=good, bad=bad, novelty=novelty, oracle=oracle)
        checkpoint.add(rng=rng, noise=noise, torch=torch.default_generator)
        loaded = args.resume is not None and checkpoint.load()

        # Labels behind the checkpoint are asked for again, and are the same.
        num_bought = len(log.labels) - oracle.queries_used
        if num_bought < 0:
            raise StorageError(
                f"a run goes on with every label that it bought: {oracle.queries_used} were in "
                f"{log.path}, but {len(log.labels)} are there; restore it from a copy, or start a "
                "new run"
            )
        if loaded and num_bought and not utils.has_state(envs):  # of episodes that are gone
            log.cut(oracle.queries_used, unused=run.folder / "labels_unused.jsonl")
            num_bought = 0

        if not loaded or not utils.has_state(envs):  # envs without a state begin again
            seed = env_seed + 2_000_000 * progress.iteration
            progress.next_obs = utils.start_episodes(envs, seed=seed, num_steps=args.num_steps)
            scale.reset()  # its sums are of episodes that were dropped
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

            # -- 2. Label and train the classifier -------------------------------------------------
            num_novel = 0
            for episode in finished:
                states = torch.tensor(episode.obs, device=args.device)
                if not novelty.is_novel(agent.normalize(states).cpu()):
                    continue
                num_novel += 1
                segments = segments_to_judge(episode, length)
                if oracle.queries_used + len(segments) > args.queries:
                    continue  # not even half of an episode is shown if the rest is not
                labels = oracle.label([pbcrl.Query(segment, segment) for segment in segments])
                log.append(labels[num_bought:])
                num_bought = max(0, num_bought - len(labels))
                for segment, label in zip(segments, labels, strict=True):
                    kind = good if label.first_safe else bad
                    kind.add(torch.as_tensor(segment.obs))
            classifier_loss = None
            if good.filled and bad.filled:
                half = max(1, args.classifier_batch_size // 2)
                unsafe = torch.cat([torch.zeros(half), torch.ones(half)]).to(args.device)
                for _ in range(args.classifier_steps):
                    states = torch.cat([kind.sample(half, rng) for kind in (good, bad)])
                    logit = classifier(agent.normalize(states.to(args.device))).squeeze(-1)
                    loss = nn.functional.binary_cross_entropy_with_logits(logit, unsafe)
                    classifier_optimizer.zero_grad()
                    loss.backward()
                    classifier_optimizer.step()
                classifier_loss = float(loss.detach())

            # -- 3. Score with the model as it is now ----------------------------------------------
            rollout.costs[:] = (logits(rollout.obs) > 0).float()
            learned = count(finished)  # (E,)
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
            adv_r, adv_c = gae(signals, values, next_values, *ends, gamma=gamma, lam=lam)
            target_r, target_c = adv_r + values[0], adv_c + values[1]
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
            mean_learned = float(learned.mean()) if len(learned) else None
            multiplier.update(mean_learned, limit)

            # -- 7. Log ----------------------------------------------------------------------------
            missed = learned[new[:, 1] > limit] <= limit
            metrics = {
                "return": mean_return,
                "true_cost": mean_cost,
                "learned_cost": mean_learned,
                "learned_cost_std": float(learned.std()) if len(learned) else None,
                "queries_used": oracle.queries_used,
                "type_ii_rate": float(missed.mean()) if len(missed) else None,
                "novel_episodes": num_novel,
                "good_states": good.filled,
                "bad_states": bad.filled,
                "classifier_loss": classifier_loss,
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
        judge = utils.Judge(count, limit, sums, lambda obs, _: logits(obs).numpy())
        summary = utils.evaluate(run, agent, args, limit, progress.ended, judge, test)
        run.finish({**summary, "queries_used": oracle.queries_used, "multiplier": multiplier.value})
    envs.close()
    return run.folder


if __name__ == "__main__":
    utils.main(train, Args)
