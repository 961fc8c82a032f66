"""PbCRL: learn a cost and its limit from preferences, train PPO-Lagrangian under them (Alg. 1).

Four phases: collect episodes with `ppo_lag.py` (unless `--dataset` names some), have an oracle
label pairs of them, pretrain the cost model, then train the policy while fine-tuning the cost model
on labels of its own fresh episodes. `--dead-zone 0 --snr-weight 0 --dead-zone-lr 0` is PPO-BT.
`diff ppo_lag.py ppo_lag_pbcrl.py` shows the method: sections 2, 3 and 6, and what is marked PbCRL.
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

from pbcrl import (  # PbCRL
    MULTIPLIER_RULES,  # PbCRL
    CostModel,  # PbCRL
    CostModelTrainer,  # PbCRL
    DeadZone,  # PbCRL
    FeedbackLoop,  # PbCRL
    FolderOracle,  # PbCRL
    Oracle,  # PbCRL
    PreferenceBuffer,  # PbCRL
    PreferenceCostVectorWrapper,  # PbCRL
    SyntheticOracle,  # PbCRL
    Trajectory,  # PbCRL
    cut_segments,  # PbCRL
    finished_trajectories,  # PbCRL
)  # PbCRL
from pbcrl.calibration import calibrate_limit  # PbCRL
from pbcrl.lagrange import Multiplier  # PbCRL
from pbcrl.oracle import Teacher, num_queries  # PbCRL
from pbcrl.recorder import discarded_envs  # PbCRL
from pbcrl_script_utils.args import check_args, main, resumed
from pbcrl_script_utils.card import write_card  # PbCRL
from pbcrl_script_utils.checkpoint import Checkpoint, check_weights, has_state
from pbcrl_script_utils.collect import offline_episodes, replay_oracle  # PbCRL
from pbcrl_script_utils.envs import (
    Episodes,
    action_bounds,
    check_rollout,
    check_segment_length,  # PbCRL
    flat_dims,
    horizon_of,  # PbCRL
    make_envs,
    require_cost,
    resolve_cost_limit,
    start_episodes,
)
from pbcrl_script_utils.evaluation import Judge, evaluate, true_costs  # PbCRL
from pbcrl_script_utils.policies import SafePolicy, policy_of, save_agent  # PbCRL
from pbcrl_script_utils.replays import ReplayRecorder, Replays  # PbCRL
from pbcrl_script_utils.run import Run
from pbcrl_script_utils.verdict import LabelWatch  # PbCRL
from pbcrl_script_utils.video import check_film

# -- Args ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    env_id: str = "SafetyPointButton1-v0"
    """any Gymnasium id whose env reports info['cost']; 'module:Id-v0' imports `module` first"""
    cost_limit: float | None = None
    """d, highest safe episode cost, known to the oracle only; default: the task's own"""  # PbCRL
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
    multiplier_rule: Literal["adam", "ascent", "softplus", "pid"] | None = None  # PbCRL
    """how λ follows the mean episode cost, see pbcrl/lagrange.py; ascent is the paper's"""
    multiplier_lr: float | None = None  # PbCRL
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
    constraint: Literal["learned", "rate", "accept"] = "learned"
    """what moves λ, see docs/constraint.md. learned: the mean learned cost, in every iteration (the
    paper); rate: the share of episodes (segments) labelled unsafe, in labelling rounds; accept:
    whether the mean cost of a batch of fresh episodes is within the limit, in labelling rounds.
    Multiplier rule and lr by default: adam 0.05; ascent 2; ascent 0.12, which are steps of ±0.06.
    With softplus lr is 0.12 per iteration in all three"""
    max_unsafe_rate: float = 0.05
    """p*, highest share of unsafe episodes, in (0, 1), for --constraint rate; of unsafe segments,
    with --segment-length"""
    accept_batch: int = 20
    """episodes in the batch of --constraint accept, at least 10; two count as one online query"""
    multiplier_floor: float = 0.0
    """lowest λ, at most multiplier_initial; above 0, a long safe phase does not make cost free"""
    multiplier_anti_windup: bool = False
    """pid: leave the integral as it is while λ is at its cap, or it remembers an unsafe start"""
    dataset: str | None = None
    """trajectories to pretrain on: a folder of ours, a local Minari dataset by id or folder, or a
    DSRL file; default: collect some with ppo_lag.py and cache them"""
    collect_timesteps: int | None = None
    """env steps of that collection; default: total_timesteps"""
    offline_queries: int = 18_000
    """pairs labelled for pretraining, a tenth of them for validation; 0 learns online alone"""
    segment_length: int | None = None
    """steps of the segments that queries show instead of whole episodes, to learn which steps cost.
    With rate and accept all pairs do, and a segment is safe within its share of the limit; with
    learned only the offline ones do, and an eighth of these queries shows batches of accept_batch
    episodes instead, which set the limit. Default: whole episodes"""
    online_queries: int = 2_000
    """pairs labelled in policy training, spread evenly over it"""
    finetune_interval: int = 5
    """K: iterations between two labelling rounds"""
    finetune_epochs: int = 5
    """passes over the newest labels per round, in batches of as many older ones each"""
    finetune_lr: float | None = None
    """Adam's step size for the cost model in fine-tuning; default: cost_lr"""
    finetune_balanced: bool = False
    """draw each batch from all labels instead, safe and unsafe episodes equally often"""
    dead_zone: float = 1.0
    """δ in pretraining, and where its adaptation starts; in units of the learned episode cost"""
    dead_zone_lr: float = 1.0
    """step size of δ per labelling round; 0 keeps δ fixed"""
    snr_weight: float = 1e-3
    """ζ, weight of the variance term"""
    max_std: float = 5.0
    """standard deviation of the learned episode costs at which that term saturates"""
    cost_hidden_sizes: tuple[int, ...] = (64, 64)
    """widths of the cost model's hidden layers"""
    cost_output: Literal["linear", "tanh", "softplus"] = "linear"
    """what a step may cost, see CostModel. linear: any number (the paper); softplus: nothing below
    0, so that no step makes up for a bad one"""
    cost_lr: float = 3e-3
    """Adam's step size for the cost model"""
    cost_batch_size: int = 128
    """pairs per gradient step of the cost model"""
    pretrain_epochs: int = 200
    """most passes over the offline pairs"""
    validate_every: int = 10
    """gradient steps between two validations in pretraining"""
    patience: int = 10
    """validations without a new best at which pretraining stops"""
    preference_noise: float = 0.0
    """probability that the simulated oracle flips a preference"""
    safety_noise: float = 0.0
    """probability that the simulated oracle flips a safety label"""
    label_folder: str | None = None
    """folder through which people answer instead (python -m pbcrl.label FOLDER), by default 100
    queries on 200,000 collected steps, and 50 online. Neither info['cost'] nor --cost-limit is
    needed then, and nothing is learned from them. Runs share a folder's answers, one run at a time,
    and ask nothing there a second time"""
    label_annotators: int = 1
    """people who are to answer each question in that folder"""
    label_wait: float = 0.0
    """seconds that a labelling round, the last one too, waits for people's answers; what comes
    later is learned from in a later round; inf waits for all of them"""
    replay_labels: str | None = None
    """labels.jsonl of a run with the same arguments: give its labels again instead of buying new"""

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


PRETRAINED = "balanced_accuracy", "pair_accuracy", "step_auroc", "true_cost_at_limit"


def check_batches(args: Args, flag: str, *, instead: str) -> None:
    """Refuse a flag that has batches of episodes judged by somebody who cannot.

    Raises:
        ValueError: If so.
    """
    if args.replay_labels is not None:
        raise ValueError(
            f"{flag} shows batches of episodes, which --replay-labels cannot yet; {instead}"
        )


def labels_segments(args: Args) -> bool:
    """Whether all queries show segments; else, if any do, those of pretraining alone."""
    return args.segment_length is not None and args.constraint != "learned"


def check_constraint(args: Args) -> None:
    """Refuse a constraint that no label can move, and segments that nobody would be asked about.

    Raises:
        ValueError: If so.
    """
    if args.segment_length is not None and args.cost_output != "linear":
        raise ValueError(
            "with --segment-length a limit of segments must hold for episodes, or be set "
            "afterwards, which only a linear output can take, got --cost-output "
            f"{args.cost_output}; leave one of them out"
        )
    if args.segment_length is not None and not labels_segments(args):
        check_batches(args, "--segment-length", instead="leave it out")
        if args.offline_queries // 8 < 2 * num_queries(args.accept_batch):
            raise ValueError(
                "segments are compared offline, and an eighth of the queries shows batches of "
                f"{args.accept_batch} episodes to set the limit, at least 2 of them, but "
                f"--offline-queries is {args.offline_queries}; raise it"
            )
    if args.constraint == "learned":
        return
    if not args.online_queries:
        raise ValueError(
            f"--constraint {args.constraint} moves the multiplier by labels of fresh episodes, but "
            "--online-queries is 0; raise it"
        )
    if args.constraint == "rate":
        return
    check_batches(args, "--constraint accept", instead="use --constraint rate")
    due = args.online_queries * args.finetune_interval // args.num_iterations
    if due < num_queries(args.accept_batch):
        raise ValueError(
            f"--accept-batch {args.accept_batch} counts as {num_queries(args.accept_batch)} "
            f"queries, but only {due} are due per labelling round; raise --online-queries or "
            "--finetune-interval, or lower --accept-batch"
        )


def make_multiplier(args: Args) -> Multiplier:
    """Return the multiplier, by the rule and step size given, or those that suit the constraint."""
    rule = args.multiplier_rule or ("adam" if args.constraint == "learned" else "ascent")
    lr = args.multiplier_lr
    if lr is None and rule in ("ascent", "pid"):  # per unit of what moves it
        lr = {"learned": 0.05, "rate": 2.0, "accept": 0.12}[args.constraint]
    elif lr is None and rule == "softplus":  # per iteration; labels move λ once per round
        lr = 0.12 * (1 if args.constraint == "learned" else args.finetune_interval)
    elif lr is None:
        lr = 0.05
    pid = {
        "proportional": args.multiplier_proportional,
        "anti_windup": args.multiplier_anti_windup,
    }
    gains = pid if rule == "pid" else {}
    bounds = {"floor": args.multiplier_floor, "cap": args.multiplier_cap}
    return MULTIPLIER_RULES[rule](lr=lr, initial=args.multiplier_initial, **bounds, **gains)


def make_oracle(
    args: Args, run: Run, limit: float, replays: Replays | None, *, share: float
) -> Oracle:
    """Return whoever answers: recorded labels, people, or the true costs."""
    if args.replay_labels is not None:
        return replay_oracle(args)
    budget = args.offline_queries + args.online_queries
    if args.label_folder is not None:
        return FolderOracle(
            args.label_folder,
            budget=budget,
            run=str(run.folder.resolve()),
            annotators=args.label_annotators,
            show=None if replays is None else replays.of,
            say=lambda text: run.say(f"   {text}"),
        )
    teacher = Teacher(preference_noise=args.preference_noise, safety_noise=args.safety_noise)
    rng = np.random.default_rng([args.seed, 1])
    return SyntheticOracle(limit, share=share, budget=budget, teacher=teacher, rng=rng)


def pretrain(
    args: Args,
    run: Run,
    trainer: CostModelTrainer,
    feedback: FeedbackLoop,
    valid: PreferenceBuffer,
    episodes: list[Trajectory],
) -> None:
    """Phases 2 and 3: buy labels of the offline episodes or segments, fit the cost model to them.

    Unless the labels that are to come online are of segments too, these tell which steps cost, and
    nothing of the limit: that is set by the mean cost of batches of `episodes`, in the order in
    which they were played.
    """
    train, queries, batches = feedback.buffer, args.offline_queries, list[list[Trajectory]]()
    whole = args.segment_length is None
    order_only = not whole and not labels_segments(args)
    with run.phase("phase 2 of 4: label pairs of the episodes", stage="label"):
        if args.label_folder is not None:
            run.say(f"   answer with: python -m pbcrl.label {args.label_folder}")
        if order_only:
            size = args.accept_batch
            batches = [episodes[i : i + size] for i in range(0, len(episodes) - size + 1, size)]
            batches = batches[: queries // 8 // num_queries(size)]
            if len(batches) < 2:
                raise ValueError(
                    f"the limit is set by at least 2 batches of {size} episodes, but there are "
                    f"{len(episodes)} to train on; lower --accept-batch, or collect more "
                    "(--collect-timesteps)"
                )
            queries -= len(batches) * num_queries(size)
        if isinstance(feedback.oracle, FolderOracle):
            feedback.oracle.announce(batches)  # so that people find all questions at once
        num_valid, num_train = feedback.label_all(
            [(valid, queries // 10), (train, queries - queries // 10)], safety=not order_only
        )
        accepted = [feedback.judge(batch) for batch in batches]
        run.say(
            f"   {num_train} + {num_valid} queries over {train.num_compared} + "
            f"{valid.num_compared} different {'episodes' if whole else 'segments'} for training + "
            f"validation{f', and {len(batches)} batches of episodes' if batches else ''}"
        )
    with run.phase("phase 3 of 4: pretrain the cost model", stage="pretrain"):
        trainer.model.fit_input_scale(episodes)
        history = trainer.pretrain(
            train,
            valid,
            max_epochs=args.pretrain_epochs,
            patience=args.patience,
            validate_every=args.validate_every,
            order_only=order_only,
            on_evaluation=lambda steps, e: run.pretrained(
                steps, e.selection_loss, e.pair_accuracy, e.safety_accuracy
            ),
        )
        if min(history, key=lambda e: e.selection_loss) is history[0]:
            run.warn("nothing was learned in pretraining; every episode lies on the learned limit")
        if batches:
            assert isinstance(trainer.model, CostModel)
            means = [float(trainer.model.score(batch).mean()) for batch in batches]
            if {True, False} <= set(accepted):
                limit = calibrate_limit(means, np.array(accepted, dtype=np.float64)).limit
            else:
                limit = max(means) if True in accepted else min(means)
                run.warn(
                    f"all {len(batches)} batches of episodes were on one side of the limit, which "
                    "is put at the nearest of them; collect episodes of more kinds"
                )
            trainer.model.recalibrate(1.0, limit)


# -- Training --------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Loose numbers of a run, as far as its future depends on them."""

    next_obs: np.ndarray  # s_t of all envs, (N, obs_dim)
    iteration: int = 0
    untuned: int = 0  # PbCRL: newest labels that the cost model has not learned from
    adv_c_std: float = 0.0  # PbCRL: mean over the iterations so far
    pretrained: dict[str, float] | None = None  # PbCRL: report of the pretrained cost model


def train(args: Args) -> Path:
    # -- Setup -------------------------------------------------------------------------------------
    args = resumed(args, script="ppo_lag_pbcrl")  # PbCRL
    check_args(args)
    check_constraint(args)  # PbCRL
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)  # initial weights
    rng = np.random.default_rng(args.seed)
    env_seed = args.seed + 500_000  # PbCRL: no episode of a dataset of this seed comes again
    noise = torch.Generator().manual_seed(env_seed)
    envs = make_envs(args.env_id, args.num_envs)
    check_segment_length(args.segment_length, envs, args.env_id)  # PbCRL
    low, high = action_bounds(envs)
    by_people = args.label_folder is not None  # PbCRL
    limit = resolve_cost_limit(args.env_id, args.cost_limit, needed=not by_people)  # PbCRL
    if args.capture_video > 0:
        check_film(args.env_id)
    agent = Agent(envs, args).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    multiplier = make_multiplier(args)  # PbCRL
    episodes = Episodes(args.num_envs)
    progress = Progress(next_obs=np.zeros((args.num_envs, len(agent.obs_mean))))
    shape = args.num_steps, args.num_envs
    obs = np.zeros((*shape, len(agent.obs_mean)), np.float32)
    actions = np.zeros((*shape, len(low)), np.float32)
    executed = np.zeros_like(actions)  # clipped to the bounds
    rewards, costs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    terminated, truncated = np.zeros(shape, bool), np.zeros(shape, bool)

    with Run(args, script=__file__, cost_limit=limit) as run:
        run.say(f"== PbCRL on {args.env_id}; files in {run.folder}")  # PbCRL
        # -- Method --------------------------------------------------------------------------------
        replays = Replays(run.folder) if by_people else None
        length, horizon = args.segment_length, horizon_of(envs)
        cut = length if labels_segments(args) else None  # of all pairs
        share, options = 1.0, dict[str, Any]()
        if cut is not None:
            # A sum of at most 0 is safe, whatever the number of steps.
            share, options = cut / horizon, {"horizon": None, "output_scale": horizon**-0.5}
        oracle = make_oracle(args, run, limit, replays, share=share)
        cost_model = CostModel.for_env(
            envs, hidden_sizes=args.cost_hidden_sizes, output=args.cost_output, **options
        )
        trainer = CostModelTrainer(
            cost_model,
            dead_zone=DeadZone(args.dead_zone, lr=args.dead_zone_lr),
            snr_weight=args.snr_weight,
            max_std=args.max_std,
            lr=args.cost_lr,
            batch_size=args.cost_batch_size,
            bf16=args.bf16,
            rng=rng,
        )
        test, valid, train = offline_episodes(args, run, envs, limit=limit, replays=replays)
        train_pairs, valid_pairs = PreferenceBuffer(), PreferenceBuffer()
        for buffer, part in ((valid_pairs, valid), (train_pairs, train)):
            buffer.add_trajectories(part if length is None else cut_segments(part, length))
            if replays is not None and length is not None:
                replays.add_segments(part, length)
        feedback = FeedbackLoop(oracle, train_pairs, rng=rng, folder=run.folder, segment_length=cut)
        envs = PreferenceCostVectorWrapper(envs, cost_model)
        if replays is not None:
            envs = ReplayRecorder(envs, args.env_id, replays)
        watch, safe_policy = LabelWatch(), SafePolicy()

        # -- Checkpoint ----------------------------------------------------------------------------
        def save() -> None:
            check_weights(agent=agent, cost_model=cost_model)  # PbCRL
            path = run.folder / "cost_model.safetensors"  # PbCRL
            cost_model.save(path, env_id=args.env_id, dead_zone=trainer.dead_zone.value)  # PbCRL
            save_agent(run.folder, agent, args.env_id)
            safe_policy.save(run.folder)  # PbCRL

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
            cost_model=cost_model,  # PbCRL
            trainer=trainer,  # PbCRL
            feedback=feedback,  # PbCRL
            watch=watch,  # PbCRL
            safe_policy=safe_policy,  # PbCRL
            progress=progress,
            rng=rng,
            noise=noise,
        )
        loaded = args.resume is not None and checkpoint.load()

        # -- Method --------------------------------------------------------------------------------
        if not loaded and args.offline_queries:
            pretrain(args, run, trainer, feedback, valid_pairs, train)
            found = Judge.of(cost_model).report(test, limit)
            if math.isfinite(found["pair_accuracy"]):  # else no true cost is known
                progress.pretrained = found
                run.say(
                    f"   on {len(test)} test episodes: balanced accuracy "
                    f"{found['balanced_accuracy']:.3f}, pairs {found['pair_accuracy']:.3f}, step "
                    f"AUROC {found['step_auroc']:.3f}"
                )
        run.say("== phase 4 of 4: train the policy and fine-tune the cost model")

        # -- Start ---------------------------------------------------------------------------------
        if not loaded or not has_state(envs):  # envs without a state start their episodes again
            seed = env_seed + 2_000_000 * progress.iteration
            progress.next_obs = start_episodes(envs, seed=seed, num_steps=args.num_steps)
            episodes.restart()
            feedback.set_unused_labels_aside()  # PbCRL

        if not loaded:  # PbCRL: so that nothing is pretrained twice
            checkpoint.save()  # PbCRL
        for iteration in run.iterations(progress):
            # -- 1. Roll out -----------------------------------------------------------------------
            final_obs, num_discarded = [], 0
            finished: list[Trajectory] = []  # PbCRL
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
                reported = infos.get("true_cost")  # PbCRL
                unless = rewards[t] if by_people else None  # PbCRL
                true_cost = require_cost(reported, args.env_id, unless=unless)  # PbCRL
                costs[t] = infos["cost"]  # PbCRL
                finished += finished_trajectories(infos)  # PbCRL
                episodes.step(rewards[t], true_cost, done, discarded=discarded)
                if done.any():
                    final_obs.append(np.stack(infos["final_obs"][done]))
                    num_discarded += int(discarded.sum())
            torch.set_num_threads(args.torch_threads)
            check_rollout(observations=obs, rewards=rewards, costs=costs)
            new = episodes.take()
            mean_return, mean_cost = new.mean(axis=0) if len(new) else (None, None)
            run.lap("rollout")

            # -- 2. Label and fine-tune ------------------------------------------------------------
            # A slow oracle delays labels, not training: what has come by now is learned from.
            tuning: dict[str, float] = {}
            unsafe_rate, rejected = None, None  # of fresh episodes, by their labels
            if args.online_queries:
                feedback.add(finished)
                if replays is not None and cut is not None:
                    replays.add_segments(finished, cut)
            if iteration % args.finetune_interval == 0 or iteration == args.num_iterations:
                due = args.online_queries * iteration // args.num_iterations
                has_batch = False  # that was shown in this round
                if args.constraint == "accept":
                    has_batch = feedback.ask_batch(args.accept_batch, due=due) > 0
                if feedback.ask(due, model=cost_model) and not trainer.steps:
                    cost_model.fit_input_scale(train_pairs.trajectories)  # no offline stage did
                if isinstance(oracle, FolderOracle):
                    oracle.wait(args.label_wait)
                newest = feedback.collect()
                if args.constraint == "accept":
                    accepted = feedback.accepted()
                    rejected = None if accepted is None else float(not accepted)
                if len(newest):
                    progress.untuned += len(newest)
                    rate = train_pairs.unsafe_rate(newest)
                    unsafe_rate = None if math.isnan(rate) else rate
                    predicted, labelled = trainer.violation_rates(train_pairs, newest)
                    if np.isfinite(labelled) and trainer.steps:  # there are safety labels
                        trainer.dead_zone.update(predicted, labelled)  # Eq. 11
                    tuning = {"violation_gap": predicted - labelled, "violation_rate": labelled}
                if len(newest) and {0.0, 1.0} <= set(train_pairs.labels[:, 1:].flat):
                    tuning["finetune_loss"] = trainer.finetune(
                        train_pairs,
                        num_new=progress.untuned,
                        epochs=args.finetune_epochs,
                        lr=args.finetune_lr,
                        balanced=args.finetune_balanced,
                    )
                    progress.untuned = 0
                elif len(newest):
                    run.warn("at first all episodes were on one side of the limit: no constraint")
                unsafe, allowed, late = unsafe_rate, 0.5, feedback.num_late(newest) > 0
                if args.constraint == "accept":
                    unsafe, late = rejected, rejected is not None and not has_batch
                    # Episodes that began before the run are not shown, and the last round is short.
                    begun = (iteration - args.finetune_interval) * args.num_steps > horizon
                    if rejected is None and begun and iteration % args.finetune_interval == 0:
                        run.warn(
                            f"fewer than {args.accept_batch} episodes were new or had an answer in "
                            "a labelling round, and λ stayed; lower --accept-batch, or raise "
                            "--finetune-interval"
                        )
                elif args.constraint == "rate":
                    allowed = args.max_unsafe_rate
                    if unsafe_rate is None:
                        run.warn("no safety label came in a labelling round, and λ stayed")
                if late and args.constraint != "learned":
                    run.warn("labels came late: λ follows the episodes of older policies")
                # By labels of the policy that is there, not of older ones.
                safe_policy.update(
                    policy_of(agent, args.env_id),
                    episodes.ended,
                    iteration=iteration,
                    unsafe=None if late else unsafe,
                    allowed=allowed,
                )

            # -- 3. Relabel ------------------------------------------------------------------------
            # Fine-tuning has just moved ψ, so costs noted while stepping are stale.
            if tuning:
                with torch.no_grad():
                    costs[:] = cost_model(torch.from_numpy(obs), torch.from_numpy(executed))
            learned_costs = cost_model.score(finished)
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
            # PbCRL: the scale of a learned cost is arbitrary, so it is divided out; but by the mean
            # PbCRL: over all iterations, so that the price of cost falls as the cost does.
            progress.adv_c_std += (float(adv_c.std()) - progress.adv_c_std) / iteration  # PbCRL
            adv_c = (adv_c - adv_c.mean()) / (progress.adv_c_std + 1e-8)  # PbCRL
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
            learned_limit = cost_model.learned_limit
            mean_learned, spread = None, None
            if len(finished):
                mean_learned, spread = float(learned_costs.mean()), float(learned_costs.std())
                most = 4 * args.max_std / share  # of whole episodes
                if spread > most:
                    run.warn(
                        "the learned costs are running away: their sd is above "
                        f"{most:g}, four times --max-std; lower --snr-weight"
                    )
            moved_by = {
                "learned": (mean_learned, learned_limit),
                "rate": (unsafe_rate, args.max_unsafe_rate),
                "accept": (rejected, 0.5),
            }
            is_warm = iteration > args.multiplier_warmup * args.num_iterations
            moved, allowed = moved_by[args.constraint]
            multiplier.update(moved if is_warm else None, allowed)  # None leaves it as it is
            is_unsafe = true_costs(finished) > limit  # none, if no true cost is known
            missed = learned_costs[is_unsafe] <= learned_limit

            # -- 7. Log ----------------------------------------------------------------------------
            metrics = {
                "return": mean_return,
                "true_cost": mean_cost,
                "learned_cost": mean_learned,  # PbCRL
                "learned_limit": learned_limit,  # PbCRL
                "learned_cost_std": spread,  # PbCRL
                "adv_c_std": progress.adv_c_std,  # PbCRL
                "dead_zone": trainer.dead_zone.value,  # PbCRL
                "queries_used": oracle.queries_used,  # PbCRL
                "type_ii_rate": float(missed.mean()) if len(missed) else None,  # PbCRL
                "unsafe_rate": unsafe_rate,  # PbCRL
                "rejected": rejected,  # PbCRL
                **tuning,  # PbCRL
                "multiplier": multiplier.value,
                "episodes": len(new),
                "discarded": num_discarded,
                **learned,
                "explained_variance_r": explained_variance(values[0], target_r),
                "explained_variance_c": explained_variance(values[1], target_c),
                "policy_std": float(agent.log_std.detach().exp().mean()),
            }
            unsafe_rate = tuning.get("violation_rate")  # PbCRL
            if warning := watch.update(unsafe_rate, mean_learned, learned_limit):  # PbCRL
                run.warn(warning)  # PbCRL
            run.log(iteration * args.batch_size, metrics)
            check_weights(agent=agent, cost_model=cost_model)  # PbCRL
            if iteration % args.checkpoint_interval == 0 or iteration == args.num_iterations:
                save()
                checkpoint.save()

        # -- Evaluation ----------------------------------------------------------------------------
        if feedback.num_open or feedback.queries_asked < args.online_queries:  # PbCRL
            asked, due = feedback.queries_asked, args.online_queries  # PbCRL
            run.warn(  # PbCRL
                f"{asked} of {due} online queries were asked, as "  # PbCRL
                f"episodes ended, and {feedback.num_open} have no answer"  # PbCRL
            )  # PbCRL
        judge = Judge.of(cost_model)  # PbCRL
        summary = evaluate(run, agent, args, limit, episodes.ended, judge, test)  # PbCRL
        pretrained = progress.pretrained or {}  # PbCRL
        summary |= {  # PbCRL
            **{f"pretrained_{key}": pretrained.get(key) for key in PRETRAINED},  # PbCRL
            "compared_episodes": train_pairs.num_compared,  # PbCRL
            "dead_zone": trainer.dead_zone.value,  # PbCRL
            "queries_used": oracle.queries_used,  # PbCRL
            "labelled_unsafe_rate": watch.unsafe_rate,  # PbCRL
            "safe_policy_iteration": safe_policy.iteration,  # PbCRL
            "safe_policy_return": safe_policy.mean_return,  # PbCRL
        }  # PbCRL
        run.finish({**summary, "multiplier": multiplier.value})
        write_card(run.folder, cost_model)  # PbCRL
    envs.close()
    return run.folder


if __name__ == "__main__":
    main(train, Args)
