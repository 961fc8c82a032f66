"""RLSF, the paper's baseline: a binary cost per state from labelled segments, PPO-Lagrangian on it.

A classifier tells the states of safe segments from those of unsafe ones. What it takes for unsafe
costs 1, and the sum is held under the true limit d, which this method is told. Only novel episodes
are shown to the oracle (Reddy et al., "Safety through feedback in constrained RL", 2024).
`diff ppo_lag.py ppo_lag_rlsf.py` shows the method: sections 2, 3 and 6, and what is marked RLSF.
"""

from __future__ import annotations

import math
from collections.abc import Sequence  # RLSF
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

from pbcrl import MULTIPLIER_RULES, Query, SyntheticOracle, Trajectory  # RLSF
from pbcrl.data.label_log import LabelLog  # RLSF
from pbcrl.errors import StorageError  # RLSF
from pbcrl.oracle import Teacher  # RLSF
from pbcrl.recorder import TrajectoryRecorder, discarded_envs, step_costs  # RLSF
from pbcrl.storage import save_tensors  # RLSF
from pbcrl_script_utils.args import check_args, main, resumed
from pbcrl_script_utils.checkpoint import Checkpoint, check_weights, has_state
from pbcrl_script_utils.datasets import open_dataset  # RLSF
from pbcrl_script_utils.envs import (
    Episodes,
    action_bounds,
    check_rollout,
    check_segment_length,  # RLSF
    flat_dims,
    horizon_of,  # RLSF
    make_envs,
    require_cost,
    resolve_cost_limit,
    start_episodes,
)
from pbcrl_script_utils.evaluation import Judge, evaluate  # RLSF
from pbcrl_script_utils.policies import save_agent  # PbCRL: SafePolicy
from pbcrl_script_utils.run import Run
from pbcrl_script_utils.video import check_film

# -- Args ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    env_id: str = "SafetyPointButton1-v0"
    """any Gymnasium id whose env reports info['cost']; 'module:Id-v0' imports `module` first"""
    cost_limit: float | None = None
    """d, highest safe episode cost, told to oracle and learner; default: the task's own"""  # RLSF
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
    multiplier_lr: float = 0.02  # RLSF
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
    queries: int = 20_000
    """most labels to buy"""
    segment_length: int | None = None
    """steps that are judged together; default: whole episodes, as in the paper's comparison"""
    safety_noise: float = 0.0
    """probability that the oracle flips a label"""
    dataset: str | None = None
    """trajectories as of ppo_lag_pbcrl.py, a tenth of which learned and true costs are compared on,
    as there; default: the episodes of the final evaluation"""
    classifier_hidden_sizes: tuple[int, ...] = (64, 64)
    """widths of the classifier's hidden layers"""
    classifier_lr: float = 1e-3
    """Adam's step size for the classifier"""
    classifier_steps: int = 100
    """gradient steps of the classifier per iteration"""
    classifier_batch_size: int = 4_000
    """states per gradient step, half of them good and half bad"""
    buffer_size: int = 200_000
    """newest states to keep of each kind"""
    hash_bits: int = 12
    """bits of the hash by which an episode is novel; more of them call more episodes novel"""

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


def segments_to_judge(episode: Trajectory, length: int) -> list[Trajectory]:
    """An episode without any cost is judged by one look, any other segment by segment."""
    if episode.true_cost == 0:
        return [episode]
    assert episode.costs is not None
    parts = [slice(start, start + length) for start in range(0, len(episode), length)]
    return [Trajectory(episode.obs[p], episode.actions[p], episode.costs[p]) for p in parts]


# -- Training --------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Loose numbers of a run, as far as its future depends on them."""

    next_obs: np.ndarray  # s_t of all envs, (N, obs_dim)
    iteration: int = 0


def train(args: Args) -> Path:
    # -- Setup -------------------------------------------------------------------------------------
    args = resumed(args, script="ppo_lag_rlsf")  # RLSF
    check_args(args)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)  # initial weights
    rng = np.random.default_rng(args.seed)
    env_seed = args.seed  # RLSF
    noise = torch.Generator().manual_seed(env_seed)
    envs = make_envs(args.env_id, args.num_envs)
    check_segment_length(args.segment_length, envs, args.env_id)  # RLSF
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
        run.say(f"== RLSF on {args.env_id}; files in {run.folder}")  # RLSF
        # -- Method --------------------------------------------------------------------------------
        run.say(f"   true cost limit {limit:g}")
        horizon = horizon_of(envs)
        length = horizon if args.segment_length is None else args.segment_length
        test: list[Trajectory] = []
        if args.dataset is not None:  # the tenth that ppo_lag_pbcrl.py of this seed tests on
            split = np.random.default_rng(args.seed)
            test, _, _ = open_dataset(args.dataset, args.env_id, envs, rng=split, warn=run.warn)
        teacher = Teacher(safety_noise=args.safety_noise)
        oracle_rng = np.random.default_rng([args.seed, 1])
        oracle = SyntheticOracle(limit, budget=args.queries, teacher=teacher, rng=oracle_rng)
        log = LabelLog(run.folder / "labels.jsonl")
        obs_dim = len(agent.obs_mean)
        classifier = mlp([obs_dim, *args.classifier_hidden_sizes, 1], last_gain=1.0)
        classifier.to(args.device)
        classifier_optimizer = torch.optim.Adam(
            classifier.parameters(), lr=args.classifier_lr, fused=True
        )
        good, bad = (RingBuffer(args.buffer_size, obs_dim) for _ in range(2))
        novelty = SimHash(obs_dim, args.hash_bits, np.random.default_rng([args.seed, 2]))
        recorder = TrajectoryRecorder(args.num_envs)

        @torch.no_grad()
        def logits(states: np.ndarray) -> Tensor:
            """How unsafe raw states look; none does before both kinds are known."""
            if not (good.filled and bad.filled):
                return torch.full(states.shape[:-1], -1.0)
            x = agent.normalize(torch.tensor(states, device=args.device))
            unsafe: Tensor = classifier(x).squeeze(-1).cpu()
            return unsafe

        def count(judged: Sequence[Trajectory]) -> np.ndarray:
            """Learned costs: the number of states taken for unsafe."""
            return np.array([float((logits(one.obs) > 0).sum()) for one in judged])

        def sums(judged: Sequence[Trajectory]) -> np.ndarray:
            """By its authors a trajectory is judged by the sum of its logits."""
            return np.array([float(logits(one.obs).sum()) for one in judged])

        # -- Checkpoint ----------------------------------------------------------------------------
        def save() -> None:
            check_weights(agent=agent, classifier=classifier)  # RLSF
            sizes = {"env_id": args.env_id, "hidden_sizes": args.classifier_hidden_sizes}  # RLSF
            path, tensors = run.folder / "classifier.safetensors", classifier.state_dict()  # RLSF
            save_tensors(path, kind="classifier", tensors=tensors, meta=sizes)  # RLSF
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
            classifier=classifier,  # RLSF
            classifier_optimizer=classifier_optimizer,  # RLSF
            good=good,  # RLSF
            bad=bad,  # RLSF
            novelty=novelty,  # RLSF
            recorder=recorder,  # RLSF
            oracle=oracle,  # RLSF
            progress=progress,
            rng=rng,
            noise=noise,
        )
        loaded = args.resume is not None and checkpoint.load()

        # -- Method --------------------------------------------------------------------------------
        # Labels behind the checkpoint are asked for again, and are the same.
        num_bought = len(log.labels) - oracle.queries_used
        if num_bought < 0:
            raise StorageError(
                f"a run goes on with every label that it bought: {oracle.queries_used} were in "
                f"{log.path}, but {len(log.labels)} are there; restore it from a copy, or start a "
                "new run"
            )
        if loaded and num_bought and not has_state(envs):  # of episodes that do not come again
            log.cut(oracle.queries_used, unused=run.folder / "labels_unused.jsonl")
            num_bought = 0

        # -- Start ---------------------------------------------------------------------------------
        if not loaded or not has_state(envs):  # envs without a state start their episodes again
            seed = env_seed + 2_000_000 * progress.iteration
            progress.next_obs = start_episodes(envs, seed=seed, num_steps=args.num_steps)
            episodes.restart()
            recorder.drop_unfinished()  # RLSF

        for iteration in run.iterations(progress):
            # -- 1. Roll out -----------------------------------------------------------------------
            final_obs, num_discarded = [], 0
            finished: list[Trajectory] = []  # RLSF
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
                true_cost = step_costs(infos, args.num_envs, done)  # RLSF
                true_cost = require_cost(true_cost, args.env_id)  # RLSF
                rows = obs[t], executed[t], true_cost, done  # RLSF
                finished += recorder.record(*rows, discarded=discarded)  # RLSF
                episodes.step(rewards[t], true_cost, done, discarded=discarded)
                if done.any():
                    final_obs.append(np.stack(infos["final_obs"][done]))
                    num_discarded += int(discarded.sum())
            torch.set_num_threads(args.torch_threads)
            check_rollout(observations=obs, rewards=rewards, costs=costs)
            new = episodes.take()
            mean_return, mean_cost = new.mean(axis=0) if len(new) else (None, None)
            run.lap("rollout")

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
                labels = oracle.label([Query(segment, segment) for segment in segments])
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

            # -- 3. Relabel ------------------------------------------------------------------------
            costs[:] = (logits(obs) > 0).float()
            learned_costs = count(finished)
            run.lap("cost_model")

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
            # RLSF: only centred, as a count of unsafe states means something beside the true limit.
            adv_c = adv_c - adv_c.mean()  # RLSF
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
            mean_learned = float(learned_costs.mean()) if len(finished) else None
            is_warm = iteration > args.multiplier_warmup * args.num_iterations
            multiplier.update(mean_learned if is_warm else None, limit)
            is_unsafe = np.array([episode.true_cost > limit for episode in finished], bool)
            missed = learned_costs[is_unsafe] <= limit

            # -- 7. Log ----------------------------------------------------------------------------
            metrics = {
                "return": mean_return,
                "true_cost": mean_cost,
                "learned_cost": mean_learned,  # RLSF
                "learned_cost_std": float(learned_costs.std()) if len(finished) else None,  # RLSF
                "queries_used": oracle.queries_used,  # RLSF
                "type_ii_rate": float(missed.mean()) if len(missed) else None,  # RLSF
                "novel_episodes": num_novel,  # RLSF
                "good_states": good.filled,  # RLSF
                "bad_states": bad.filled,  # RLSF
                "classifier_loss": classifier_loss,  # RLSF
                "multiplier": multiplier.value,
                "episodes": len(new),
                "discarded": num_discarded,
                **learned,
                "explained_variance_r": explained_variance(values[0], target_r),
                "explained_variance_c": explained_variance(values[1], target_c),
                "policy_std": float(agent.log_std.detach().exp().mean()),
            }
            run.log(iteration * args.batch_size, metrics)
            check_weights(agent=agent, classifier=classifier)  # RLSF
            if iteration % args.checkpoint_interval == 0 or iteration == args.num_iterations:
                save()
                checkpoint.save()

        # -- Evaluation ----------------------------------------------------------------------------
        judge = Judge(count, limit, sums, lambda obs, _: logits(obs).numpy())  # RLSF
        summary = evaluate(run, agent, args, limit, episodes.ended, judge, test)  # RLSF
        summary["queries_used"] = oracle.queries_used  # RLSF
        run.finish({**summary, "multiplier": multiplier.value})
    envs.close()
    return run.folder


if __name__ == "__main__":
    main(train, Args)
