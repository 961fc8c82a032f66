"""PbCRL: learn a cost and its limit from preferences, train PPO-Lagrangian under them (Alg. 1).

Four phases: collect episodes with `ppo_lag.py` (unless `--dataset` names some), have an oracle
label pairs of them, pretrain the cost model, then train the policy while fine-tuning the cost model
on labels of its own fresh episodes. `--dead-zone 0 --snr-weight 0 --dead-zone-lr 0` is PPO-BT.
"""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from checkpoints import (
    cut_labels,
    envs_state,
    load_checkpoint,
    restore_envs,
    resumed,
    save_checkpoint,
)
from film import check_film, film
from run_io import (
    INTERRUPTED,
    Laps,
    Run,
    TimedEnvs,
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
    MULTIPLIER_RULES,
    SELECTIONS,
    CostModel,
    CostModelEnsemble,
    CostModelTrainer,
    DeadZone,
    DelayedOracle,
    FolderOracle,
    Label,
    LabelError,
    LabelLog,
    LearnedCost,
    MismatchError,
    Oracle,
    PbcrlError,
    PreferenceBuffer,
    PreferenceCostVectorWrapper,
    ReplayOracle,
    StorageError,
    SyntheticOracle,
    Trajectory,
    TrajectoryDataset,
    TrajectoryRecorder,
    TrajectoryWriter,
    bias,
    cost_model_report,
    diverged_envs,
    draw_pairs,
    finished_trajectories,
    make_teacher,
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
    """d, highest safe episode cost, known to the oracle only; default: the task's own"""
    seed: int = 0
    """of everything random; same seed and CPU, same numbers"""
    total_timesteps: int = 1_000_000
    """env steps of policy training, rounded up to whole iterations"""

    dataset: str | None = None
    """folder of trajectories to pretrain on; default: collect one with ppo_lag.py and cache it"""
    collect_timesteps: int | None = None
    """env steps of that collection; default: total_timesteps"""
    offline_queries: int = 18_000
    """pairs labelled for pretraining, a tenth of them for validation; 0 learns online alone"""
    online_queries: int = 2_000
    """pairs labelled in policy training, spread evenly over it"""
    replay_labels: str | None = None
    """labels.jsonl of a run with the same arguments: give its labels again instead of buying new"""
    teacher: Literal["perfect", "beta", "mistake", "skip", "equal", "myopic"] = "perfect"
    """how well the simulated oracle answers; docs/labels.md describes each"""
    preference_noise: float | None = None
    """probability that the oracle flips a preference; default: the teacher's"""
    safety_noise: float | None = None
    """probability that the oracle flips a safety label; default: the teacher's"""
    label_folder: str | None = None
    """folder through which a person answers instead (python -m pbcrl.label FOLDER); a run that is
    started again asks nothing there a second time"""
    label_delay: int = 0
    """labelling rounds by which online labels come late"""
    selection: Literal["uniform", "disagreement", "entropy", "near_threshold", "novelty"] = (
        "uniform"
    )
    """how online pairs are chosen from the fresh episodes"""

    cost_hidden_sizes: tuple[int, ...] = (64, 64)
    """widths of the cost model's hidden layers"""
    cost_output: Literal["linear", "tanh", "softplus"] = "linear"
    """what a step may cost: anything, so much at most, or never less than 0 with a learned limit"""
    ensemble_size: int = 1
    """cost models that are trained side by side, each on a bootstrap resample of the labels"""
    pessimism: float = 0.0
    """κ: standard deviations between them that are added to the cost of every step"""
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
    dead_zone: float = 1.0
    """δ in pretraining, and where its adaptation starts; in units of the learned episode cost"""
    dead_zone_lr: float = 1.0
    """step size of δ per labelling round; 0 keeps δ fixed"""
    snr_weight: float = 1e-3
    """ζ, weight of the variance term"""
    max_std: float = 5.0
    """standard deviation of the learned episode costs at which that term saturates"""
    finetune_interval: int = 5
    """K: iterations between two labelling rounds"""
    finetune_epochs: int = 5
    """passes over the newest labels per round, each with as many old ones mixed in"""

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
    multiplier_lr: float = 0.05
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


# -- Offline phases --------------------------------------------------------------------------------


def collect(args: Args, run: Run) -> Path:
    """Return the cached dataset, or start `ppo_lag.py` on the true cost as a child to make it."""
    # Not the multiplier's settings: those here are for a learned cost, standardised.
    shared = """
        env_id seed num_envs num_steps epochs minibatch_size lr lr_decay max_grad_norm hidden_sizes
        gamma gae_lambda clip target_kl bound_coef initial_log_std torch_threads bf16 device
    """
    options = {name: getattr(args, name) for name in shared.split()}
    options["cost_limit"] = resolve_cost_limit(args.env_id, args.cost_limit)
    options["total_timesteps"] = args.collect_timesteps or args.total_timesteps
    # Other arguments make another dataset, so they are part of its name.
    digest = hashlib.sha256(json.dumps(options).encode()).hexdigest()[:8]
    env_name = args.env_id.rsplit(":", 1)[-1].replace("/", "-")
    cached = Path(args.runs_dir) / "datasets"
    cached /= f"{env_name}__{options['total_timesteps']}__{args.seed}__{digest}"
    if cached.exists():
        run.say(f"   using the episodes collected before in {cached}")
        return cached
    episodes = run.folder / "collected"
    options |= {"runs_dir": run.folder, "run_name": "collect", "eval_episodes": 1}
    options["save_trajectories"] = episodes
    command = [sys.executable, str(Path(__file__).with_name("ppo_lag.py"))]
    begun = run.folder / "collect"
    if (begun / "args.json").exists():
        command += ["--resume", str(begun)]
    else:
        for name, value in options.items():
            values = value if isinstance(value, tuple) else (value,)
            if value is not False:
                flag = f"--{name.replace('_', '-')}"
                command += [flag] if value is True else [flag, *map(str, values)]
    if (begun / "summary.json").exists():
        command = [sys.executable, "-c", ""]  # it was the renaming below that was cut off
    child = subprocess.Popen(command)
    try:
        status = child.wait()
    except KeyboardInterrupt:
        child.wait()  # Ctrl-C reached the child too: it is writing down what it has
        if episodes.exists():
            run.say(f"interrupted while collecting: go on with --dataset {episodes}")
        raise
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status != 0:
        raise PbcrlError(f"collecting episodes failed with status {status}; its error is above")
    if cached.exists():  # another run was faster
        return episodes
    cached.parent.mkdir(parents=True, exist_ok=True)
    episodes.rename(cached)
    return cached


def make_oracle(args: Args, budget: int, limit: float, horizon: int) -> Oracle:
    """Return whoever answers: recorded labels, a person, or the true costs."""
    if args.replay_labels is not None:
        return ReplayOracle(recorded_labels(args))
    if args.label_folder is not None:
        return FolderOracle(args.label_folder, budget=budget)
    teacher = make_teacher(args.teacher, cost_scale=limit, horizon=horizon)
    for name in ("preference_noise", "safety_noise"):
        if getattr(args, name) is not None:
            teacher = replace(teacher, **{name: getattr(args, name)})
    rng = np.random.default_rng([args.seed, 1])
    return SyntheticOracle(limit, budget=budget, teacher=teacher, rng=rng)


def recorded_labels(args: Args) -> list[Label]:
    """Read the labels to replay, if they were bought by a run with the same arguments."""
    assert args.replay_labels is not None
    path = Path(args.replay_labels)
    labels = read_labels(path)
    try:
        bought = json.loads((path.parent / "args.json").read_text())
    except (OSError, ValueError) as error:
        raise StorageError(
            f"labels fit the run that bought them only, and its args.json must lie beside {path} "
            f"({error}); replay them from that run's folder"
        ) from error
    # What may differ changes neither the queries nor their order.
    free = {"env_id", "cost_limit", "dataset", "replay_labels", "runs_dir", "run_name"}
    free |= {"capture_video"}
    if bought.get("label_folder") is not None:
        raise MismatchError(
            f"labels given by hand came in no fixed order, so those of {path.parent} cannot be "
            f"replayed; they are still in their folder: --label-folder {bought['label_folder']}"
        )
    now = json.loads(json.dumps(asdict(args)))
    differing = sorted(name for name in now if name not in free and bought.get(name) != now[name])
    if differing:
        raise MismatchError(
            f"labels fit the queries of the run that bought them only, but {', '.join(differing)} "
            f"differ from those in {path.parent}; repeat them"
        )
    return labels


def keep_labels(
    buffer: PreferenceBuffer,
    pairs: np.ndarray,
    labels: list[Label],
    log: LabelLog,
    bought: deque[Label],
) -> np.ndarray:
    """Add labels of pairs of the buffer, on disk before they are used; return their positions.

    Those in `bought`, the oldest first, were on disk when the run went on.
    """
    new = labels[len(bought) :]
    for label in labels[: len(bought)]:
        before = bought.popleft()
        if repr(before) != repr(label):  # NaN is not equal to itself
            raise MismatchError(
                f"a resumed run gets the labels that it got before, but {before} was bought and "
                f"now it is {label}; the envs or the dataset have changed: start the run anew"
            )
    log.append(new)
    buffer.add_labels(pairs, labels)
    return np.arange(len(buffer) - len(pairs), len(buffer))


def keep_trajectories(folder: Path, args: Args, trajectories: list[Trajectory]) -> None:
    """Write trajectories to a dataset of their own, in order."""
    obs_shape, act_dim, _ = trajectories[0].layout
    with TrajectoryWriter(
        folder,
        env_id=args.env_id,
        obs_shape=obs_shape,
        act_dim=act_dim,
        horizon=max(map(len, trajectories)),
        capacity=len(trajectories),
        rng=np.random.default_rng(0),  # draws nothing: all of them fit
        overwrite=True,  # of a run that was cut off behind its checkpoint
    ) as writer:
        for trajectory in trajectories:
            writer.add(trajectory)


def num_possible(wanted: int, num_trajectories: int) -> int:
    return min(wanted, num_trajectories * (num_trajectories - 1) // 2)


def report(cost_model: LearnedCost, episodes: list[Trajectory], limit: float) -> dict[str, float]:
    """Compare learned with true episode costs; the learner never sees these numbers."""
    true = np.array([episode.true_cost for episode in episodes])
    learned_limit = cost_model.learned_limit
    return cost_model_report(cost_model.score(episodes), true, limit, learned_limit=learned_limit)


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
    args = resumed(args, script="ppo_lag_pbcrl")
    counts = "total_timesteps", "num_envs", "num_steps", "epochs", "minibatch_size", "eval_episodes"
    budget = args.offline_queries + args.online_queries
    require_positive(
        args,
        *counts,
        "checkpoint_interval",
        "finetune_epochs",
        "finetune_interval",
        "ensemble_size",
        "patience",
        "validate_every",
        "torch_threads",
    )
    if 0 != args.offline_queries < 20 or args.online_queries < 0 or budget == 0:
        raise ValueError(
            "--offline-queries must be at least 20, a tenth of them for validation, or 0 if there "
            "are --online-queries, and those not negative, got "
            f"{args.offline_queries} and {args.online_queries}"
        )
    if args.pessimism and args.ensemble_size == 1:
        raise ValueError(
            "pessimism is about how far models disagree, but there is one, got --pessimism "
            f"{args.pessimism}; give an --ensemble-size of 2 or more"
        )
    if not 0 <= args.lr_decay <= 1:
        raise ValueError(
            f"--lr-decay must be in [0, 1], got {args.lr_decay}; 0 keeps --lr constant"
        )
    if args.selection == "disagreement" and args.ensemble_size == 1:
        raise ValueError(
            "--selection disagreement needs models that can disagree, but there is one; give an "
            "--ensemble-size of 2 or more, or another selection"
        )
    require_device(args.device)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)  # initial weights
    rng = np.random.default_rng(args.seed)
    # The dataset may come from a run of the same seed: its episodes must not be met again online.
    online_seed = args.seed + 500_000
    noise = torch.Generator().manual_seed(online_seed)
    base_envs = make_envs(args.env_id, args.num_envs)
    limit = resolve_cost_limit(args.env_id, args.cost_limit)
    if args.capture_video > 0:
        check_film(args.env_id)
    total = args.num_iterations * args.batch_size
    oracle = DelayedOracle(
        make_oracle(args, budget, limit, horizon_of(base_envs)), rounds=args.label_delay
    )
    obs_dim, act_dim = flat_dims(base_envs)
    low, high = action_bounds(base_envs)

    with Run(args, script="ppo_lag_pbcrl", total=total) as run:
        run.say(f"== PbCRL on {args.env_id}; files in {run.folder}")
        state = load_checkpoint(run.folder) if args.resume is not None else None
        if args.label_folder is not None or (state is not None and state["envs"] is None):
            # What was asked behind the checkpoint is not asked again, or in another order.
            cut_labels(run.folder / "labels.jsonl", keep=state["num_labels"] if state else 0)
        log = LabelLog(run.folder / "labels.jsonl")
        bought = deque(read_labels(log.path))  # those are asked for again, and are the same
        agent = Agent(
            obs_dim, act_dim, hidden_sizes=args.hidden_sizes, initial_log_std=args.initial_log_std
        )
        multiplier = MULTIPLIER_RULES[args.multiplier_rule](
            lr=args.multiplier_lr, initial=args.multiplier_initial
        )
        members = [
            CostModel(
                obs_dim,
                act_dim,
                hidden_sizes=args.cost_hidden_sizes,
                output_scale=horizon_of(base_envs) ** -0.5,
                output=args.cost_output,
                horizon=horizon_of(base_envs),
            )
            for _ in range(args.ensemble_size)
        ]
        cost_model: LearnedCost = members[0]
        if args.ensemble_size > 1:
            cost_model = CostModelEnsemble(members, pessimism=args.pessimism)
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

        def save_cost_model() -> None:
            cost_model.save(
                run.folder / "cost_model.safetensors",
                env_id=args.env_id,
                dead_zone=trainer.dead_zone.value,
            )

        def save() -> None:
            save_cost_model()
            path = run.folder / "agent.safetensors"
            sizes = {"obs_dim": obs_dim, "act_dim": act_dim, "hidden_sizes": args.hidden_sizes}
            meta = {"env_id": args.env_id, **sizes, "multiplier": multiplier.state_dict()}
            save_tensors(path, kind="agent", tensors=agent.state_dict(), meta=meta)

        test: list[Trajectory] = []
        valid, buffer = PreferenceBuffer(), PreferenceBuffer()
        pretrained: dict[str, float] = {}
        try:
            # -- Phase 1: collect ------------------------------------------------------------------
            path = args.dataset and Path(args.dataset)
            if not path and args.offline_queries:
                title = "phase 1 of 4: collect episodes with PPO-Lag on the true cost"
                with run.phase(title, stage="collect"):
                    path = collect(args, run)
            dataset = TrajectoryDataset(path, env_id=args.env_id) if path else None
            if dataset and dataset.horizon != horizon_of(base_envs):
                raise MismatchError(
                    f"episodes compare by their summed cost, so they must have one time limit: "
                    f"{path} has a horizon of {dataset.horizon} steps, {args.env_id} one of "
                    f"{horizon_of(base_envs)}; collect a dataset anew"
                )

            # -- Phase 2: label --------------------------------------------------------------------
            # Split by trajectory, since splitting by pair would leak. The test episodes are never
            # labelled: they only serve to compare learned with true costs.
            if dataset and len(dataset) < 10:
                raise LabelError(
                    f"10 episodes or more are needed to split them, {path} has {len(dataset)}; "
                    "collect more (--collect-timesteps)"
                )
            if dataset:
                order = rng.permutation(len(dataset))
                num_test = num_valid = max(2, len(dataset) // 10)
                test = [dataset[i] for i in order[:num_test]]
                splits = order[num_test : num_test + num_valid], order[num_test + num_valid :]
            if args.label_folder is not None:
                run.say(f"   answer with: python -m pbcrl.label {args.label_folder}")
            if dataset and args.offline_queries:
                valid_queries = args.offline_queries // 10
                title = f"phase 2 of 4: label pairs of the {len(dataset)} episodes in {path}"
                with run.phase(title, stage="label"):
                    for part, split, wanted in [
                        (valid, splits[0], valid_queries),
                        (buffer, splits[1], args.offline_queries - valid_queries),
                    ]:
                        part.add_trajectories([dataset[i] for i in split])
                        count = num_possible(wanted, len(split))
                        if count < wanted:
                            run.say(f"   {len(split)} episodes make only {count} of {wanted} pairs")
                        drawn = draw_pairs(len(split), count, rng=rng)
                        labels = oracle.label(part.queries(drawn))
                        keep_labels(part, drawn, labels, log, bought)
                    run.say(
                        f"   {len(buffer)} + {len(valid)} queries over {buffer.num_compared} + "
                        f"{valid.num_compared} different episodes for training + validation"
                    )
            num_offline = len(buffer)

            # -- Phase 3: pretrain -----------------------------------------------------------------
            if state is not None:
                pretrained = state["pretrained"]
            elif args.offline_queries:
                with run.phase("phase 3 of 4: pretrain the cost model", stage="pretrain"):
                    cost_model.fit_input_scale(buffer.trajectories)
                    history = trainer.pretrain(
                        buffer,
                        valid,
                        max_epochs=args.pretrain_epochs,
                        patience=args.patience,
                        validate_every=args.validate_every,
                        on_evaluation=lambda steps, e: run.say(
                            f"   {steps:5d} steps: held-out loss {e.selection_loss:.3f}, accuracy "
                            f"of pairs {e.pair_accuracy:.3f}, of safety {e.safety_accuracy:.3f}"
                        ),
                    )
                    if min(history, key=lambda e: e.selection_loss) is history[0]:
                        run.say(
                            "   warning: nothing was learned; every episode lies on the learned "
                            "limit"
                        )
                    save_cost_model()
                    pretrained = report(cost_model, test, limit)
                    run.say(
                        f"   on {len(test)} test episodes: balanced accuracy "
                        f"{pretrained['balanced_accuracy']:.3f} (base rate "
                        f"{pretrained['base_rate']:.3f}), pairs {pretrained['pair_accuracy']:.3f}"
                    )
        except BaseException:  # also Ctrl-C
            if trainer.steps > 0:
                save_cost_model()
            raise

        # -- Phase 4: train the policy -------------------------------------------------------------
        laps = Laps()
        envs = PreferenceCostVectorWrapper(TimedEnvs(base_envs, laps), cost_model)
        learner = Learner(agent, args, low, high)
        shape = (args.num_steps, args.num_envs)
        obs = torch.zeros(*shape, obs_dim)
        actions = torch.zeros(*shape, act_dim)
        executed = torch.zeros(*shape, act_dim)
        rewards, costs = torch.zeros(shape), torch.zeros(shape)
        terminated = torch.zeros(shape, dtype=torch.bool)
        done = torch.zeros(shape, dtype=torch.bool)
        next_values = torch.zeros(2, *shape)
        # The same memory as NumPy sees it, which writes a row in a tenth of the time.
        obs_rows, action_rows, executed_rows, terminated_rows, done_rows = (
            x.numpy() for x in (obs, actions, executed, terminated, done)
        )
        reward_rows, cost_rows = rewards.numpy(), costs.numpy()
        episode_return = np.zeros(args.num_envs)
        ended: list[tuple[float, float]] = []  # (return, true cost) of all episodes, in order
        unlabelled: list[Trajectory] = []  # finished since the last labelling round
        open_pairs: dict[int, np.ndarray] = {}  # asked but not answered, by the oracle's number
        num_rounds = -(-args.num_iterations // args.finetune_interval)
        select = SELECTIONS[args.selection]
        rounds, online_used, untuned, iteration = 0, 0, 0, 0
        adv_c_std = 0.0  # mean over the iterations so far
        warned_of_runaway = False
        online = run.folder / "online"  # episodes that were compared, a dataset per round

        def checkpoint() -> dict[str, Any]:
            return {
                "iteration": iteration,
                "rounds": rounds,
                "online_used": online_used,
                "untuned": untuned,
                "pretrained": pretrained,
                "num_labels": len(valid) + len(buffer),
                "agent": agent.state_dict(),
                "optimizer": learner.optimizer.state_dict(),
                "multiplier": multiplier.state_dict(),
                "adv_c_std": adv_c_std,
                "cost_model": cost_model.state_dict(),
                "trainer": trainer.state_dict(),
                "online_pairs": buffer.labelled_pairs[num_offline:],
                "online_labels": buffer.labels[num_offline:],
                "open_pairs": open_pairs,
                "unlabelled": [(t.obs, t.actions, t.costs) for t in unlabelled],
                "oracle": oracle.state_dict() if args.label_folder is None else None,
                "rng": rng.bit_generator.state,
                "noise": noise.get_state(),
                "envs": envs_state(base_envs),
                "wrapper": envs.get_state(),
                "next_obs": next_obs,
                "episode_return": episode_return,
                "ended": np.array(ended).reshape(-1, 2),
                "run": run.get_state(),
            }

        if state is not None:
            iteration, rounds = state["iteration"], state["rounds"]
            online_used, untuned = state["online_used"], state["untuned"]
            adv_c_std = state["adv_c_std"]
            agent.load_state_dict(state["agent"])
            learner.load_optimizer(state["optimizer"])
            multiplier.load_state_dict(state["multiplier"])
            cost_model.load_state_dict(state["cost_model"])
            trainer.load_state_dict(state["trainer"])
            for number in range(1, rounds + 1):
                if (online / f"{number:04d}").exists():
                    buffer.add_trajectories(list(TrajectoryDataset(online / f"{number:04d}")))
            labels = [Label(*row) for row in state["online_labels"].tolist()]
            buffer.add_labels(state["online_pairs"], labels)
            bought = deque(islice(bought, len(labels), None))  # those are in the buffer by now
            unlabelled = [Trajectory(*arrays) for arrays in state["unlabelled"]]
            open_pairs = state["open_pairs"]
            if args.label_folder is None:
                oracle.load_state_dict(state["oracle"])
            elif open_pairs:  # the folder knows these, and has its own numbers for them
                pairs = np.stack(list(open_pairs.values()))
                numbers = oracle.submit(buffer.queries(pairs))
                open_pairs = dict(zip(numbers, pairs, strict=True))
            rng.bit_generator.state = state["rng"]
            noise.set_state(state["noise"])
            ended = [(row[0], row[1]) for row in state["ended"].tolist()]
        if state is not None and state["envs"] is not None:
            restore_envs(base_envs, state["envs"])
            envs.set_state(state["wrapper"])
            next_obs, episode_return = state["next_obs"], state["episode_return"]
        else:  # at the start, or envs whose state nobody knows: their episodes begin anew
            next_obs, _ = envs.reset(seed=online_seed + 2_000_000 * iteration)
        if args.resume is not None:
            run.set_state(state and state["run"], step=iteration * args.batch_size)
            run.say(f"   going on after iteration {iteration} of {args.num_iterations}")
        if state is None:
            save_checkpoint(run.folder, checkpoint())  # so that nothing is pretrained twice
        run.begin_stage("train")
        run.say("== phase 4 of 4: train the policy and fine-tune the cost model")
        run.start_progress(iteration * args.batch_size)
        first = iteration + 1
        try:
            for iteration in range(first, args.num_iterations + 1):
                learner.set_lr(args.lr_at(iteration))
                laps.begin()
                # -- 1. Roll out -------------------------------------------------------------------
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
                    clipped_action = np.clip(action_rows[t], low, high)
                    laps.end("inference")
                    next_obs, reward, terminal, truncated, infos = envs.step(clipped_action)
                    laps.end("cost_model")
                    is_done = terminal | truncated
                    executed_rows[t] = clipped_action
                    reward_rows[t], cost_rows[t] = reward, infos["cost"]
                    terminated_rows[t], done_rows[t] = terminal, is_done
                    episode_return += reward
                    if is_done.any():
                        final_obs.append(np.stack(infos["final_obs"][is_done]))
                        episodes = finished_trajectories(infos)
                        finished += episodes
                        true_costs = [episode.true_cost for episode in episodes]
                        diverged = diverged_envs(infos, args.num_envs)
                        num_diverged += int(diverged.sum())
                        whole = is_done & ~diverged
                        ended += zip(episode_return[whole], true_costs, strict=True)
                        episode_return[is_done] = 0.0
                if args.online_queries:
                    unlabelled += finished
                torch.set_num_threads(args.torch_threads)
                laps.end("inference")

                # -- 2. Label and fine-tune --------------------------------------------------------
                # A slow oracle delays labels, not training: what has come by now is learned from.
                tuning: dict[str, float] = {}
                answers: dict[int, Label] = {}
                last_one = iteration == args.num_iterations
                if iteration % args.finetune_interval == 0 or last_one:
                    rounds += 1
                    due = args.online_queries * rounds // num_rounds - online_used
                    due = min(num_possible(due, len(unlabelled)), budget - oracle.queries_used)
                    if due > 0:
                        drawn = select(unlabelled, due, asked=buffer, model=cost_model, rng=rng)
                        used, inverse = np.unique(drawn, return_inverse=True)
                        # Read back, they stay on disk, however long the run.
                        keep_trajectories(
                            online / f"{rounds:04d}", args, [unlabelled[i] for i in used]
                        )
                        kept = buffer.add_trajectories(
                            list(TrajectoryDataset(online / f"{rounds:04d}"))
                        )
                        if num_offline == online_used == 0:
                            cost_model.fit_input_scale(buffer.trajectories)
                        pairs = kept[inverse.reshape(-1, 2)]
                        numbers = oracle.submit(buffer.queries(pairs))
                        open_pairs |= zip(numbers, pairs, strict=True)
                        online_used += due
                        unlabelled = []
                    answers = oracle.collect()
                if answers:
                    pairs = np.stack([open_pairs.pop(number) for number in answers])
                    newest = keep_labels(buffer, pairs, list(answers.values()), log, bought)
                    untuned += len(answers)
                    predicted_rate, labelled_rate = trainer.violation_rates(buffer, newest)
                    if np.isfinite(labelled_rate) and trainer.steps:  # there are safety labels
                        trainer.dead_zone.update(predicted_rate, labelled_rate)  # Eq. 11
                    tuning = {
                        "violation_gap": predicted_rate - labelled_rate,
                        "violation_rate": labelled_rate,
                    }
                    if {0.0, 1.0} <= set(buffer.labels[:, 1:].flat):
                        tuning["finetune_loss"] = trainer.finetune(
                            buffer, num_new=untuned, epochs=args.finetune_epochs
                        )
                        untuned = 0
                    else:  # only without pretraining
                        run.say("   all episodes so far are on one side of the limit")

                # -- 3. Relabel --------------------------------------------------------------------
                # Fine-tuning has just moved ψ, so costs noted while stepping are stale.
                if tuning:
                    with torch.no_grad():
                        costs[:] = cost_model(obs, executed)
                learned_costs = cost_model.score(finished)
                laps.end("cost_model")

                # -- 4. Advantages -----------------------------------------------------------------
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
                # The scale of a learned cost is arbitrary, so it is divided out; but by the mean
                # over all iterations, so that the price of cost falls as the cost does.
                adv_c_std += (float(adv_c.std()) - adv_c_std) / iteration
                adv_c = (adv_c - adv_c.mean()) / (adv_c_std + 1e-8)
                # Eq. 41, divided by 1 + λ so that the step size does not grow with λ.
                adv = (adv_r - multiplier.value * adv_c).flatten() / (1 + multiplier.value)

                # -- 5. Policy -----------------------------------------------------------------
                update = learner.update(adv, targets, rng)
                agent.update_normalizer(obs.flatten(0, 1))
                laps.end("update")

                # -- 6. Dual ascent ----------------------------------------------------------------
                fresh = np.array(ended[newly_ended:]).reshape(-1, 2)
                mean_return, mean_cost = fresh.mean(axis=0) if len(fresh) else (None, None)
                mean_learned = float(learned_costs.mean()) if len(fresh) else None
                multiplier.update(mean_learned, limit=cost_model.learned_limit)
                spread = float(learned_costs.std()) if len(fresh) else 0.0
                if spread > 4 * args.max_std and not warned_of_runaway:
                    warned_of_runaway = True
                    run.say(
                        f"   warning: the learned costs are running away: sd {spread:.1f} is above "
                        f"{4 * args.max_std:g}, four times --max-std; lower --snr-weight"
                    )
                unsafe = np.array([episode.true_cost > limit for episode in finished], bool)
                missed = learned_costs[unsafe] <= cost_model.learned_limit

                # -- 7. Log ------------------------------------------------------------------------
                seconds = laps.take()
                metrics = {
                    "return": mean_return,
                    "true_cost": mean_cost,
                    "learned_cost": mean_learned,
                    "learned_limit": cost_model.learned_limit,
                    "learned_cost_std": float(learned_costs.std()) if len(fresh) else None,
                    "multiplier": multiplier.value,
                    "adv_c_std": adv_c_std,
                    "dead_zone": trainer.dead_zone.value,
                    "queries_used": oracle.queries_used,
                    **tuning,
                    "type_ii_rate": float(missed.mean()) if len(missed) else None,
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
                if iteration % args.checkpoint_interval == 0 or last_one or answers:
                    save()
                    save_checkpoint(run.folder, checkpoint())
        except BaseException:  # also Ctrl-C
            save()
            raise
        train_seconds = run.end_stage()
        run.say(f"   done in {train_seconds:.1f} s")

        if online_used < args.online_queries:
            left = args.online_queries - online_used
            run.say(f"   {left} online queries were left over: too few episodes ended")
        if open_pairs:
            run.say(f"   {len(open_pairs)} online queries had no answer when training ended")

        # -- Evaluation ----------------------------------------------------------------------------
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
                    cost_model=cost_model,
                )
        eval_cost = float(np.mean([episode.true_cost for episode in episodes]))
        env_steps = iteration * args.batch_size
        recent = np.array(ended[-max(1, len(ended) // 10) :]).reshape(-1, 2)
        # Without a dataset there are the episodes of the evaluation alone.
        test = test or [*episodes, *noisy]
        held_out = report(cost_model, test, limit)
        true = np.array([episode.true_cost for episode in test])
        run.save_costs(true, cost_model.score(test))
        summary: dict[str, Any] = {
            "return": float(returns.mean()),
            "true_cost": eval_cost,
            "learned_cost": float(cost_model.score(episodes).mean()),
            "learned_limit": cost_model.learned_limit,
            "cost_limit": limit,
            "bias": bias(eval_cost, limit),
            "return_stochastic": float(noisy_returns.mean()),
            "true_cost_stochastic": float(np.mean([episode.true_cost for episode in noisy])),
            "return_last_tenth": float(recent[:, 0].mean()) if len(recent) else None,
            "true_cost_last_tenth": float(recent[:, 1].mean()) if len(recent) else None,
            **held_out,
            "pretrained_balanced_accuracy": pretrained.get("balanced_accuracy"),
            "pretrained_pair_accuracy": pretrained.get("pair_accuracy"),
            "test_episodes": len(test),
            "compared_episodes": buffer.num_compared,
            "dead_zone": trainer.dead_zone.value,
            "multiplier": multiplier.value,
            "queries_used": oracle.queries_used,
            "env_steps": env_steps,
            "wall_seconds": run.wall_seconds,
            "stage_seconds": run.stage_seconds,
            "steps_per_second": env_steps / train_seconds,
        }
        run.finish(summary)
    base_envs.close()
    return run.folder


def explained_variance(values: Tensor, targets: Tensor) -> float:
    residual = targets.flatten() - values.flatten()
    return float(1 - residual.var() / (targets.var() + 1e-8))


if __name__ == "__main__":
    main(train, Args)
