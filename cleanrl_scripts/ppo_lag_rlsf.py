"""RLSF, the paper's baseline: a binary cost per state from labelled segments, PPO-Lagrangian on it.

A classifier tells the states of safe segments from those of unsafe ones. What it takes for unsafe
costs 1, and the sum is held under the true limit d, which this method is told. Only novel episodes
are shown to the oracle (Reddy et al., "Safety through feedback in constrained RL", 2024).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from checkpoints import envs_state, load_checkpoint, restore_envs, resumed, save_checkpoint
from film import check_film, film
from run_io import (
    Laps,
    Run,
    action_bounds,
    flat_dims,
    horizon_of,
    main,
    make_envs,
    require_cost,
    require_device,
    require_positive,
    resolve_cost_limit,
)
from torch import Tensor, nn

from pbcrl import (
    LabelLog,
    LagrangeMultiplier,
    MismatchError,
    NonFiniteError,
    Query,
    SyntheticOracle,
    Teacher,
    Trajectory,
    TrajectoryDataset,
    TrajectoryRecorder,
    bias,
    cost_model_report,
    diverged_envs,
    read_labels,
    save_tensors,
    step_costs,
)

# -- Args ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    env_id: str = "SafetyPointButton1-v0"
    """any Gymnasium id whose env reports info['cost']; 'module:Id-v0' imports `module` first"""
    cost_limit: float | None = None
    """d, highest safe episode cost, for the oracle and for the learner; default: the task's own"""
    seed: int = 0
    """of everything random; same seed and CPU, same numbers"""
    total_timesteps: int = 1_000_000
    """env steps of training, rounded up to whole iterations"""
    queries: int = 20_000
    """most labels to buy"""
    segment_length: int | None = None
    """steps that are judged together; default: whole episodes, as in the paper's comparison"""
    safety_noise: float = 0.0
    """probability that the oracle flips a label"""
    dataset: str | None = None
    """folder of trajectories, a tenth of which learned and true costs are compared on, as by
    ppo_lag_pbcrl.py; default: the episodes of the final evaluation"""

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
    multiplier_lr: float = 0.02
    """step size of the multiplier, per iteration in which an episode ended"""
    multiplier_initial: float = 0.01
    """λ at the start"""

    eval_episodes: int = 50
    """episodes of the final evaluation, deterministic and again stochastic"""
    capture_video: int = 0
    """episodes to film, with the deterministic policy, as mp4 in the run's folder"""
    torch_threads: int = 2
    """threads of PyTorch; other counts round differently"""
    bf16: bool = False
    """compute the hidden layers in bfloat16 while learning: faster where the hardware has it"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where the policy and its critics learn; it acts on the CPU, where the environments are"""
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
        """Adam's step size in an iteration, counted from 1."""
        return self.lr * (1 - self.lr_decay * (iteration - 1) / self.num_iterations)


# -- Agent -----------------------------------------------------------------------------------------


def mlp(sizes: list[int], *, last_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        last = i == len(sizes) - 2
        layer = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(layer.weight, last_gain if last else 2**0.5)
        nn.init.zeros_(layer.bias)
        layers += [layer] if last else [layer, nn.ReLU(inplace=True)]
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
        return self.log_density(((actions - mean) / self.log_std.exp()).square())

    def log_density(self, z_squared: Tensor) -> Tensor:
        """Return the logarithm of the density where the squared standard scores are these."""
        constant = self.log_std.sum() + 0.5 * np.log(2 * np.pi) * len(self.log_std)
        return z_squared.sum(-1).mul_(-0.5).sub_(constant)


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


# -- Labels ----------------------------------------------------------------------------------------


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

    def get_state(self) -> dict[str, Any]:
        return {"states": self.states[: self.filled], "next": self.next}

    def set_state(self, state: dict[str, Any]) -> None:
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


def segments_to_judge(episode: Trajectory, length: int) -> list[Trajectory]:
    """An episode without any cost is judged by one look, any other segment by segment."""
    if episode.true_cost == 0:
        return [episode]
    assert episode.costs is not None
    parts = [slice(start, start + length) for start in range(0, len(episode), length)]
    return [Trajectory(episode.obs[p], episode.actions[p], episode.costs[p]) for p in parts]


def test_episodes(args: Args, horizon: int) -> list[Trajectory]:
    """Return the tenth of the dataset that ppo_lag_pbcrl.py of the same seed keeps for tests."""
    assert args.dataset is not None
    dataset = TrajectoryDataset(args.dataset, env_id=args.env_id)
    if dataset.horizon != horizon:
        raise MismatchError(
            f"episodes compare by their summed cost, so they must have one time limit: "
            f"{args.dataset} has a horizon of {dataset.horizon} steps, {args.env_id} one of "
            f"{horizon}; collect a dataset anew"
        )
    order = np.random.default_rng(args.seed).permutation(len(dataset))
    return [dataset[i] for i in order[: max(2, len(dataset) // 10)]]


def check_finite(name: str, values: np.ndarray, step: int) -> None:
    if not np.isfinite(values).all():
        bad = np.unique(np.argwhere(~np.isfinite(values))[:, 0]).tolist()
        raise NonFiniteError(
            f"{name} must be finite, but rows {bad} held NaN or an infinity at step {step} of the "
            "rollout; check the env with pbcrl_envs.check_cost_env, or lower the policy's --lr"
        )


# -- Learner ---------------------------------------------------------------------------------------


Layers = Sequence[tuple[Tensor, Tensor]]
"""Weights (out, in) and offsets (out,) of a net, each with a `grad`, from the first layer on. Two
nets of equal sizes, side by side as (2, out, in) and (2, out), are computed at once."""


def forward(layers: Layers, x: Tensor, *, bf16: bool = False) -> list[Tensor]:
    """Return what each layer reads, and last what the net puts out: x (B, in) -> (..., B, out).

    With `bf16` the hidden layers are computed in bfloat16. The last one is not: it is small, and
    its rounding would show in the output as it is.
    """
    x = x.bfloat16() if bf16 else x.float()
    twins = layers[0][0].ndim == 3
    read = [x.expand(2, -1, -1) if twins else x]
    for i, (weight, offset) in enumerate(layers):
        last = i == len(layers) - 1
        if bf16 and last:
            read[-1] = read[-1].float()
        elif bf16:
            weight, offset = weight.bfloat16(), offset.bfloat16()
        x = read[-1]
        if twins:
            x = torch.baddbmm(offset.unsqueeze(1), x, weight.mT)
        else:
            x = nn.functional.linear(x, weight, offset)
        read.append(x if last else x.relu_())
    return read


def backward(layers: Layers, read: list[Tensor], grad: Tensor) -> None:
    """Write each layer's gradient, given that of the output, (..., B, out); `read` of `forward`.

    For nets as plain as these that takes half as many operations as autograd, which is what counts
    with small minibatches.
    """
    for i in reversed(range(len(layers))):
        weight, offset = layers[i]
        product = torch.mm if weight.ndim == 2 else torch.bmm
        if read[i].dtype == weight.dtype:
            product(grad.mT, read[i], out=weight.grad)
        else:
            grad = grad.bfloat16()
            weight.grad.copy_(product(grad.mT, read[i]))  # type: ignore[union-attr]
        torch.sum(grad, dim=-2, dtype=offset.dtype, out=offset.grad)
        if i > 0:
            grad = product(grad, weight.to(grad.dtype))
            # What autograd calls for a ReLU: 0 where the layer below put out 0.
            torch.ops.aten.threshold_backward.grad_input(grad, read[i], 0, grad_input=grad)


def clip_norm(gradient: Tensor, largest: float) -> None:
    """Scale a gradient down to a norm; as `nn.utils.clip_grad_norm_`, for one vector."""
    gradient.div_(torch.linalg.vector_norm(gradient).div_(largest).clamp_(min=1))


def in_one_vector(parameters: Iterable[nn.Parameter]) -> tuple[nn.Parameter, Tensor]:
    """Lay parameters out in one vector, and their gradients in another; return both.

    Clipping and Adam then take as long as for a single parameter. With small nets and one by one
    they take longer than the gradients themselves.
    """
    parts = list(parameters)
    vector = nn.Parameter(nn.utils.parameters_to_vector(parts).detach())
    gradient = vector.grad = torch.zeros_like(vector)
    start = 0
    for part in parts:
        place = slice(start, start + part.numel())
        part.data, part.grad = (x[place].view_as(part) for x in (vector.data, gradient))
        start += part.numel()
    return vector, gradient


class Learner:
    """The gradient steps of PPO on one rollout: all epochs, for the actor and both critics.

    On a GPU they move a copy of the agent there, and an epoch is one CUDA graph, launched at once:
    GPU and CPU exchange nothing before it ends. A graph reads and writes the same memory whenever
    it is launched, so the rollout, the order of its rows and the results have their places here.
    The first epochs run without one: what libraries allocate at first use cannot be captured.
    """

    def __init__(self, agent: Agent, args: Args, low: np.ndarray, high: np.ndarray) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.on_gpu = self.device.type == "cuda"
        self.acting = agent  # on the CPU
        self.agent = copy.deepcopy(agent).to(self.device) if self.on_gpu else agent
        self.actor, self.actor_gradient = in_one_vector(
            [*self.agent.mean.parameters(), self.agent.log_std]
        )
        # Twins lie side by side, so that each two of them are one parameter as well.
        nets = self.agent.critic_r, self.agent.critic_c
        twins = list(zip(*(net.parameters() for net in nets), strict=True))
        self.critics, self.critics_gradient = in_one_vector(part for pair in twins for part in pair)
        both: list[Tensor] = []
        for part, _ in twins:
            place = slice(part.storage_offset(), part.storage_offset() + 2 * part.numel())
            both.append(self.critics.data[place].view(2, *part.shape))
            both[-1].grad = self.critics_gradient[place].view(2, *part.shape)
        self.critics_at_once = list(zip(both[::2], both[1::2], strict=True))
        self.actor_layers, *self.critic_layers = (
            [(layer.weight, layer.bias) for layer in net if isinstance(layer, nn.Linear)]
            for net in (self.agent.mean, *nets)
        )
        # Half as many operations, but on a CPU slower ones if they are large.
        self.small = args.minibatch_size < 256
        self.together = self.on_gpu or self.small
        # A graph keeps numbers as they were when it was captured, but reads tensors anew.
        self.lr = torch.tensor(args.lr, device=self.device) if self.on_gpu else args.lr
        self.optimizer = torch.optim.Adam(
            [self.actor, self.critics], lr=self.lr, fused=True, capturable=self.on_gpu
        )
        rows = args.batch_size
        with self.device:
            self.obs = torch.zeros(rows, len(agent.obs_mean))  # normalised
            self.actions = torch.zeros(rows, len(agent.log_std))
            self.old_log_prob, self.adv, self.targets = (
                torch.zeros(shape) for shape in ((rows,), (rows,), (2, rows))
            )
            self.order = torch.zeros(rows, dtype=torch.int64)
            self.kl, self.clipped, self.value_loss = (torch.zeros(()) for _ in range(3))
            self.low, self.high = torch.tensor(low).float(), torch.tensor(high).float()
        if args.bf16:
            self.obs = self.obs.bfloat16()
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self.epochs_before_graphs = 3

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Go on with a state of `optimizer`, and with the weights that the agent has by now."""
        self.optimizer.load_state_dict(state)
        if self.on_gpu:
            self.agent.load_state_dict(self.acting.state_dict())

    def set_lr(self, lr: float) -> None:
        self.lr = self.lr.fill_(lr) if isinstance(self.lr, Tensor) else lr
        self.optimizer.param_groups[0]["lr"] = self.lr

    @torch.no_grad()
    def values(self, obs: Tensor) -> Tensor:
        """Return the critics' values of normalised observations, (2, B) on the CPU.

        In float32 with `--bf16`, too: advantages are small differences of values.
        """
        values = []
        for part in torch.split(obs, 2_000):  # which stay in the caches
            x = part.to(self.device)
            values.append(torch.cat([forward(net, x)[-1] for net in self.critic_layers], dim=1))
        return torch.cat(values).t().cpu()

    @torch.no_grad()
    def take_rollout(self, obs: Tensor, actions: Tensor) -> None:
        """Copy normalised observations, (B, obs_dim), and actions, (B, act_dim), to learn from."""
        self.obs.copy_(obs)
        self.actions.copy_(actions)
        for start in range(0, len(obs), 2_000):
            part = slice(start, start + 2_000)
            # As precise as in the epochs, or ratios would not start at 1.
            mean = forward(self.actor_layers, self.obs[part], bf16=self.args.bf16)[-1]
            self.old_log_prob[part] = self.agent.log_prob(mean, self.actions[part])

    def update(self, adv: Tensor, targets: Tensor, rng: np.random.Generator) -> dict[str, float]:
        """Train on the rollout, with advantages (B,) and targets (2, B); return what to log."""
        self.adv.copy_(adv)
        self.targets.copy_(targets)
        actor_goes_on, actor_epochs, kl = True, 0, 0.0
        threads = torch.get_num_threads()
        if self.small:
            torch.set_num_threads(1)  # to wake another would take longer than what it does
        for _ in range(self.args.epochs):
            self.order.copy_(torch.from_numpy(rng.permutation(len(adv))))
            self.run_epoch(train_actor=actor_goes_on)
            if actor_goes_on:
                actor_epochs += 1
                kl = float(self.kl)
                actor_goes_on = kl <= self.args.target_kl
        torch.set_num_threads(threads)
        if self.on_gpu:
            pairs = zip(self.acting.parameters(), self.agent.parameters(), strict=True)
            for ours, learned in pairs:
                ours.data.copy_(learned.data)
        return {
            "kl": kl,
            "actor_epochs": actor_epochs,
            "clip_fraction": float(self.clipped),
            "value_loss": float(self.value_loss),
        }

    def run_epoch(self, *, train_actor: bool) -> None:
        """Run `epoch`: as it is on the CPU, as a graph on a GPU."""
        if not self.on_gpu:
            self.epoch(train_actor=train_actor)
        elif self.epochs_before_graphs > 0:
            self.epochs_before_graphs -= 1
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.epoch(train_actor=train_actor)
            torch.cuda.current_stream().wait_stream(side)
        else:
            if train_actor not in self.graphs:
                self.graphs[train_actor] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graphs[train_actor]):
                    self.epoch(train_actor=train_actor)
            self.graphs[train_actor].replay()

    @torch.inference_mode()
    def epoch(self, *, train_actor: bool) -> None:
        """Pass once over the rollout, one gradient step per minibatch."""
        args = self.args
        log_ratios = []
        self.actor.grad = self.actor_gradient if train_actor else None  # Adam passes over None
        # Put into order at once: a copy for each minibatch takes longer.
        obs, actions, old_log_prob, adv = (
            torch.split(x.index_select(0, self.order), args.minibatch_size)
            for x in (self.obs, self.actions, self.old_log_prob, self.adv)
        )
        targets = torch.split(self.targets.index_select(1, self.order), args.minibatch_size, dim=1)
        for k in range(len(obs)):
            errors = self.critics_backward(obs[k], targets[k])
            clip_norm(self.critics_gradient, args.max_grad_norm)
            if train_actor:
                rows = obs[k], actions[k], old_log_prob[k], adv[k]
                log_ratios.append(self.actor_backward(*rows))
                clip_norm(self.actor_gradient, args.max_grad_norm)
            self.optimizer.step()
        self.value_loss.copy_(0.5 * torch.cat(errors).square().sum() / len(obs[k]))
        if train_actor:
            log_ratio = torch.cat(log_ratios)
            ratio = log_ratio.exp()
            self.kl.copy_((ratio - 1 - log_ratio).mean())
            self.clipped.copy_(((ratio - 1).abs() > args.clip).float().mean())

    def critics_backward(self, obs: Tensor, targets: Tensor) -> list[Tensor]:
        """Write the gradients of the value losses, Eqs. 43 and 44; return the errors."""
        if self.together:
            parts: list[tuple[Layers, Tensor]] = [(self.critics_at_once, targets)]
        else:
            parts = list(zip(self.critic_layers, targets, strict=True))
        errors = []
        for layers, target in parts:
            read = forward(layers, obs, bf16=self.args.bf16)
            errors.append(read[-1].squeeze(-1) - target)
            backward(layers, read, (errors[-1] / len(obs)).unsqueeze(-1))
        return errors

    def actor_backward(
        self, obs: Tensor, actions: Tensor, old_log_prob: Tensor, adv: Tensor
    ) -> Tensor:
        """Write the gradient of the policy loss, Eq. 40; return log(π / π_old), (B,)."""
        args, log_std = self.args, self.agent.log_std
        read = forward(self.actor_layers, obs, bf16=args.bf16)
        mean = read[-1]
        std = log_std.exp()
        z = (actions - mean).div_(std)
        z_squared = z.square()
        log_ratio = self.agent.log_density(z_squared).sub_(old_log_prob)
        ratio = log_ratio.exp()
        surrogate = ratio * adv
        # Where the clipped one is the smaller, it is constant.
        clipped = ratio.clamp(1 - args.clip, 1 + args.clip).mul_(adv)
        slope = surrogate.masked_fill_(surrogate > clipped, 0.0).div_(-len(adv))
        # The sum over the rows of slope * (z² - 1).
        torch.sub(slope @ z_squared, slope.sum(), out=log_std.grad)
        grad = z.mul_(slope.unsqueeze(-1)).div_(std)
        if args.bound_coef > 0:
            outside = mean - mean.clamp(self.low, self.high)
            grad.add_(outside, alpha=2 * args.bound_coef / len(adv))
        backward(self.actor_layers, read, grad)
        return log_ratio


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
    args = resumed(args, script="ppo_lag_rlsf")
    counts = "total_timesteps", "num_envs", "num_steps", "epochs", "minibatch_size", "eval_episodes"
    sizes = "queries", "classifier_steps", "classifier_batch_size", "buffer_size", "hash_bits"
    require_positive(args, *counts, *sizes, "checkpoint_interval", "torch_threads")
    require_device(args.device)
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
    agent = Agent(
        obs_dim, act_dim, hidden_sizes=args.hidden_sizes, initial_log_std=args.initial_log_std
    )
    learner = Learner(agent, args, low, high)
    multiplier = LagrangeMultiplier(lr=args.multiplier_lr, initial=args.multiplier_initial)
    horizon = horizon_of(envs)
    segment_length = horizon if args.segment_length is None else args.segment_length
    if not 1 <= segment_length <= horizon:
        raise ValueError(
            f"--segment-length must lie in 1..{horizon}, the time limit of {args.env_id}, got "
            f"{segment_length}"
        )
    oracle = SyntheticOracle(
        limit,
        budget=args.queries,
        teacher=Teacher(safety_noise=args.safety_noise),
        rng=np.random.default_rng([args.seed, 1]),
    )
    test = test_episodes(args, horizon) if args.dataset is not None else None
    classifier = mlp([obs_dim, *args.classifier_hidden_sizes, 1], last_gain=1.0)
    optimizer_classifier = torch.optim.Adam(
        classifier.parameters(), lr=args.classifier_lr, fused=True
    )
    good, bad = (RingBuffer(args.buffer_size, obs_dim) for _ in range(2))
    novelty = SimHash(obs_dim, args.hash_bits, np.random.default_rng([args.seed, 2]))
    recorder = TrajectoryRecorder(args.num_envs)

    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(*shape, obs_dim)
    actions = torch.zeros(*shape, act_dim)
    rewards, costs = torch.zeros(shape), torch.zeros(shape)
    terminated = torch.zeros(shape, dtype=torch.bool)
    done = torch.zeros(shape, dtype=torch.bool)
    next_values = torch.zeros(2, *shape)
    # The same memory as NumPy sees it, which writes a row in a tenth of the time.
    obs_rows, action_rows, reward_rows, terminated_rows, done_rows = (
        x.numpy() for x in (obs, actions, rewards, terminated, done)
    )
    laps = Laps()
    episode_return = np.zeros(args.num_envs)
    ended: list[tuple[float, float]] = []  # (return, true cost) of all episodes, in order
    iteration = 0

    total = args.num_iterations * args.batch_size
    with Run(args, script="ppo_lag_rlsf", total=total) as run:
        run.say(f"== RLSF on {args.env_id}, true cost limit {limit:g}; files in {run.folder}")
        log = LabelLog(run.folder / "labels.jsonl")

        @torch.no_grad()
        def logits(states: Tensor) -> Tensor:
            """How unsafe raw states look; none does before both kinds are known."""
            if not (good.filled and bad.filled):
                return torch.full(states.shape[:-1], -1.0)
            unsafe: Tensor = classifier(agent.normalize(states)).squeeze(-1)
            return unsafe

        def score(episodes: list[Trajectory]) -> tuple[np.ndarray, np.ndarray]:
            """Return learned costs, the number of states taken for unsafe, and summed logits."""
            found = [logits(torch.tensor(episode.obs)) for episode in episodes]
            costs = [float((one > 0).sum()) for one in found]
            return np.array(costs), np.array([float(one.sum()) for one in found])

        def save() -> None:
            path = run.folder / "agent.safetensors"
            sizes = {"obs_dim": obs_dim, "act_dim": act_dim, "hidden_sizes": args.hidden_sizes}
            meta = {"env_id": args.env_id, **sizes, "multiplier": multiplier.state_dict()}
            save_tensors(path, kind="agent", tensors=agent.state_dict(), meta=meta)
            meta = {"env_id": args.env_id, "hidden_sizes": args.classifier_hidden_sizes}
            path = run.folder / "classifier.safetensors"
            save_tensors(path, kind="classifier", tensors=classifier.state_dict(), meta=meta)

        def checkpoint() -> dict[str, Any]:
            return {
                "iteration": iteration,
                "agent": agent.state_dict(),
                "optimizer": learner.optimizer.state_dict(),
                "multiplier": multiplier.state_dict(),
                "classifier": classifier.state_dict(),
                "optimizer_classifier": optimizer_classifier.state_dict(),
                "good": good.get_state(),
                "bad": bad.get_state(),
                "hashes_seen": np.array(sorted(novelty.seen), np.int64),
                "oracle": oracle.state_dict(),
                "rng": rng.bit_generator.state,
                "noise": noise.get_state(),
                "envs": envs_state(envs),
                "next_obs": next_obs,
                "episode_return": episode_return,
                "ended": np.array(ended).reshape(-1, 2),
                "recorder": recorder.get_state(),
                "run": run.get_state(),
            }

        state = load_checkpoint(run.folder) if args.resume is not None else None
        if state is not None:
            iteration = state["iteration"]
            agent.load_state_dict(state["agent"])
            learner.load_optimizer(state["optimizer"])
            multiplier.load_state_dict(state["multiplier"])
            classifier.load_state_dict(state["classifier"])
            optimizer_classifier.load_state_dict(state["optimizer_classifier"])
            good.set_state(state["good"])
            bad.set_state(state["bad"])
            novelty.seen = set(state["hashes_seen"].tolist())
            oracle.load_state_dict(state["oracle"])
            rng.bit_generator.state = state["rng"]
            noise.set_state(state["noise"])
            ended = [(row[0], row[1]) for row in state["ended"].tolist()]
        if state is not None and state["envs"] is not None:
            restore_envs(envs, state["envs"])
            next_obs, episode_return = state["next_obs"], state["episode_return"]
            recorder.set_state(state["recorder"])
        else:  # at the start, or envs whose state nobody knows: their episodes begin anew
            next_obs, _ = envs.reset(seed=args.seed + 2_000_000 * iteration)
        check_finite("observations", next_obs, 0)
        # Those behind the checkpoint are asked for again, and are the same.
        num_bought = len(read_labels(log.path)) - oracle.queries_used
        if args.resume is not None:
            run.set_state(state and state["run"], step=iteration * args.batch_size)
            run.say(f"   going on after iteration {iteration} of {args.num_iterations}")
        run.begin_stage("train")
        run.start_progress(iteration * args.batch_size)
        first = iteration + 1
        try:
            for iteration in range(first, args.num_iterations + 1):
                learner.set_lr(args.lr_at(iteration))
                laps.begin()
                # -- 1. Roll out ---------------------------------------------------------------
                final_obs: list[np.ndarray] = []
                finished: list[Trajectory] = []
                perturbation = torch.randn(*shape, act_dim, generator=noise)
                perturbation *= agent.log_std.detach().exp()
                newly_ended, num_diverged = len(ended), 0
                # Few rows are not worth sharing; a thread that waits for more holds up the envs.
                torch.set_num_threads(1)
                for t in range(args.num_steps):
                    obs_rows[t] = next_obs
                    with torch.no_grad():
                        actions[t] = agent.mean(agent.normalize(obs[t])) + perturbation[t]
                    check_finite("actions", action_rows[t], t)
                    executed = np.clip(action_rows[t], low, high)
                    laps.end("inference")
                    next_obs, reward, terminal, truncated, infos = envs.step(executed)
                    laps.end("env")
                    is_done = terminal | truncated
                    diverged = diverged_envs(infos, args.num_envs)
                    true_cost = require_cost(step_costs(infos, args.num_envs, is_done), args.env_id)
                    check_finite("observations", next_obs, t)
                    check_finite("rewards", reward, t)
                    check_finite("costs", true_cost, t)
                    reward_rows[t] = reward
                    terminated_rows[t], done_rows[t] = terminal, is_done
                    episodes = recorder.record(
                        obs_rows[t], executed, true_cost, is_done, diverged=diverged
                    )
                    episode_return += reward
                    if is_done.any():
                        final_obs.append(np.stack(infos["final_obs"][is_done]))
                        check_finite("observations", final_obs[-1], t)
                        whole = is_done & ~diverged
                        num_diverged += int(diverged.sum())
                        finished += episodes
                        true_costs = [episode.true_cost for episode in episodes]
                        ended += zip(episode_return[whole], true_costs, strict=True)
                        episode_return[is_done] = 0.0
                torch.set_num_threads(args.torch_threads)
                laps.end("inference")

                # -- 2. Label and train the classifier -----------------------------------------
                num_novel = 0
                for episode in finished:
                    if not novelty.is_novel(agent.normalize(torch.as_tensor(episode.obs))):
                        continue
                    num_novel += 1
                    segments = segments_to_judge(episode, segment_length)
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
                    unsafe = torch.cat([torch.zeros(half), torch.ones(half)])
                    for _ in range(args.classifier_steps):
                        states = torch.cat([kind.sample(half, rng) for kind in (good, bad)])
                        logit = classifier(agent.normalize(states)).squeeze(-1)
                        loss = nn.functional.binary_cross_entropy_with_logits(logit, unsafe)
                        optimizer_classifier.zero_grad()
                        torch.autograd.backward(loss)
                        optimizer_classifier.step()
                    classifier_loss = float(loss.detach())

                # -- 3. Relabel ----------------------------------------------------------------
                costs[:] = (logits(obs) > 0).float()
                learned_costs, _ = score(finished)
                laps.end("cost_model")

                # -- 4. Advantages -------------------------------------------------------------
                flat_obs = agent.normalize(obs.flatten(0, 1))  # (T * N, obs_dim)
                learner.take_rollout(flat_obs, actions.flatten(0, 1))
                values = learner.values(flat_obs).view(2, *shape)
                last = torch.as_tensor(next_obs, dtype=torch.float32)
                next_values[:, :-1] = values[:, 1:]
                next_values[:, -1] = learner.values(agent.normalize(last))
                if final_obs:
                    final = torch.as_tensor(np.concatenate(final_obs), dtype=torch.float32)
                    next_values[:, done] = learner.values(agent.normalize(final))
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
                # Only centred: a count of unsafe states has a size, and the true limit beside it.
                adv_c = adv_c - adv_c.mean()
                # Eq. 41, divided by 1 + λ so that the step size does not grow with λ.
                adv = (adv_r - multiplier.value * adv_c).flatten() / (1 + multiplier.value)

                # -- 5. Policy -----------------------------------------------------------------
                update = learner.update(adv, targets, rng)
                agent.update_normalizer(obs.flatten(0, 1))
                laps.end("update")

                # -- 6. Dual ascent ------------------------------------------------------------
                fresh = np.array(ended[newly_ended:]).reshape(-1, 2)
                mean_return, mean_cost = fresh.mean(axis=0) if len(fresh) else (None, None)
                mean_learned = float(learned_costs.mean()) if len(fresh) else None
                multiplier.update(mean_learned, limit)

                # -- 7. Log --------------------------------------------------------------------
                seconds = laps.take()
                metrics = {
                    "return": mean_return,
                    "true_cost": mean_cost,
                    "learned_cost": mean_learned,
                    "learned_cost_std": float(learned_costs.std()) if len(fresh) else None,
                    "multiplier": multiplier.value,
                    "queries_used": oracle.queries_used,
                    "novel_episodes": num_novel,
                    "good_states": good.filled,
                    "bad_states": bad.filled,
                    "classifier_loss": classifier_loss,
                    "episodes": len(fresh),
                    "diverged": num_diverged,
                    "kl": update["kl"],
                    "actor_epochs": update["actor_epochs"],
                    "clip_fraction": update["clip_fraction"],
                    "value_loss": update["value_loss"],
                    "explained_variance_r": explained_variance(values[0], targets[0]),
                    "explained_variance_c": explained_variance(values[1], targets[1]),
                    "policy_std": float(agent.log_std.detach().exp().mean()),
                    "seconds_env": seconds["env"],
                    "seconds_inference": seconds["inference"],
                    "seconds_cost_model": seconds["cost_model"],
                    "seconds_update": seconds["update"],
                }
                run.log(iteration * args.batch_size, metrics)
                if iteration % args.checkpoint_interval == 0 or iteration == args.num_iterations:
                    save()
                    save_checkpoint(run.folder, checkpoint())
        except BaseException:  # also Ctrl-C
            save()
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
        compared = [*episodes, *noisy] if test is None else test
        true = np.array([episode.true_cost for episode in compared])
        learned, summed_logits = score(compared)
        held_out = cost_model_report(learned, true, limit, learned_limit=limit)
        # By its authors a trajectory is judged by the sum of its logits, not by the learned cost.
        judged = cost_model_report(summed_logits, true, limit)
        for key in "accuracy", "balanced_accuracy", "pair_accuracy":
            held_out[key] = judged[key]
        run.save_costs(true, learned)
        env_steps = iteration * args.batch_size
        tail = np.array(ended[-max(1, len(ended) // 10) :]).reshape(-1, 2)
        summary: dict[str, Any] = {
            "return": float(returns.mean()),
            "true_cost": eval_cost,
            "learned_cost": float(score(episodes)[0].mean()),
            "learned_limit": limit,
            "cost_limit": limit,
            "bias": bias(eval_cost, limit),
            "return_stochastic": float(noisy_returns.mean()),
            "true_cost_stochastic": float(np.mean([episode.true_cost for episode in noisy])),
            "return_last_tenth": float(tail[:, 0].mean()) if len(tail) else None,
            "true_cost_last_tenth": float(tail[:, 1].mean()) if len(tail) else None,
            **held_out,
            "test_episodes": len(compared),
            "multiplier": multiplier.value,
            "queries_used": oracle.queries_used,
            "env_steps": env_steps,
            "wall_seconds": run.wall_seconds,
            "stage_seconds": run.stage_seconds,
            "steps_per_second": env_steps / train_seconds,
        }
        run.finish(summary)
    envs.close()
    return run.folder


def explained_variance(values: Tensor, targets: Tensor) -> float:
    residual = targets.flatten() - values.flatten()
    return float(1 - residual.var() / (targets.var() + 1e-8))


if __name__ == "__main__":
    main(train, Args)
