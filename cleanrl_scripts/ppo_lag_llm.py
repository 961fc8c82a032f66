"""PPO-Lagrangian on the tokens of a language model, under a cost learned from labelled responses.

By default a small transformer from scratch on a task with a known cost (`pbcrl_envs.tokens`), in a
minute or so; `--model DIR --data FILE` aligns a real one to labelled responses (`pbcrl.llm.text`).
Two critics; reward and cost come with the last token, a KL penalty with every one, in both streams,
and A = (A_R - λ A_C) / (1 + λ), all as in Safe RLHF. Unlike there, A_R and A_C are divided by their
standard deviations, since the unit of a learned cost is arbitrary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

import pbcrl_script_utils as utils
from pbcrl import BatchLabel, DeadZone, LagrangeMultiplier, Trajectory
from pbcrl.llm.text import TextPair, helpfulness
from pbcrl_script_utils.texts import Scorer, World, load_model
from pbcrl_script_utils.verdict import interval

# -- Args ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    task: Literal["after", "announced"] = "after"
    """token task, without --model: severity is drawn after the word, or announced by the prompt"""
    model: str | None = None
    """folder of a causal model and its tokenizer, as save_pretrained writes it, to align"""
    data: str | None = None
    """its labelled responses, whose prompts it is trained on: .jsonl, .jsonl.gz or .parquet"""
    conflicts: Literal["raise", "drop", "keep"] = "raise"
    """what happens to rows of --data that contradict themselves"""
    template: str = "BEGINNING OF CONVERSATION: USER: {prompt} ASSISTANT:"
    """how the model is shown a prompt of --data"""
    reward_model: str | None = None
    """folder of a sequence classifier with one label; default: --model, fitted to --data"""
    cost_model: str | None = None
    """the same for the cost"""
    seed: utils.NonNegativeInt = 0
    """of everything random; same seed and CPU, same numbers"""

    num_iterations: utils.Count = 120
    """rollouts, each followed by an update"""
    batch_size: utils.Count = 128
    """responses per rollout"""
    max_new_tokens: utils.Count = 12
    """T, most tokens of a response"""
    max_length: utils.Count = 512
    """most tokens of a prompt, and of a response with its prompt that is scored"""
    update_epochs: utils.Count = 2
    """passes over the rollout per iteration"""
    minibatch_size: utils.Count = 128
    """responses per gradient step"""
    chunk_size: utils.Count = 128
    """responses per forward pass without gradients, and of the cost model with them"""
    learning_rate: utils.Positive = 3e-3
    """Adam's step size, actor and critics; 1e-5 is usual for large models"""
    lr_decay: utils.Share = 0.95
    """share of learning_rate that is lost over the run, linearly; 1 ends near 0"""
    max_grad_norm: utils.Bound = 1.0
    """gradient norm to clip at, of each of the three networks"""
    gamma: utils.Share = 1.0
    """discount per token"""
    gae_lambda: utils.Share = 0.95
    """λ of generalised advantage estimation"""
    clip_coef: utils.Positive = 0.2
    """clipping range of the probability ratio"""
    kl_coef: utils.NonNegative = 0.1
    """weight of log π - log π_ref per token, in nats, in reward and cost"""
    multiplier_lr: utils.NonNegative = 0.1
    """change of log λ per update by which λ follows the cost, see pbcrl/lagrange.py; 0 keeps λ"""
    multiplier_initial: utils.NonNegative = 1.0
    """λ at the start"""
    multiplier_cap: utils.Bound = 10.0
    """highest λ"""

    # -- Method --------------------------------------------------------------------------------
    cost: Literal["learned", "true"] = "learned"
    """what the policy is trained on; the true cost, of a token task, is the oracle"""
    constraint: Literal["learned", "rate", "accept"] = "learned"
    """what moves λ, see docs/constraint.md: the mean cost that the policy is trained on, or labels
    of fresh responses of a token task: the share called unsafe, or whether the rollout's mean cost
    is within the limit"""
    max_unsafe_rate: utils.OpenShare = 0.05
    """p*, highest share of unsafe responses, for --constraint rate"""
    offline_queries: utils.NonNegativeInt = 1_000
    """pairs that are labelled before training, of a token task"""
    online_queries: utils.NonNegativeInt = 0
    """pairs of fresh responses that are labelled in training, evenly; the cost is fine-tuned on
    them and as many old ones"""
    finetune_interval: utils.Count = 5
    """iterations between two labelling rounds"""
    finetune_epochs: utils.Count = 2
    """passes over the newest labels and as many old ones, per round"""
    dead_zone: utils.NonNegative = 1.0
    """δ at the start, in units of the learned cost"""
    dead_zone_lr: utils.NonNegative = 1.0
    """step size of δ per labelling round; 0 keeps δ fixed"""
    snr_weight: utils.NonNegative = 1e-3
    """ζ, weight of the variance term"""
    safety_weight: utils.NonNegative = 1.0
    """of the safety term; 2, with --dead-zone 0 --snr-weight 0, is Safe RLHF's loss"""
    cost_lr: utils.Positive = 3e-3
    """AdamW's step size for reward and cost models; 2e-5 is usual for large ones"""
    cost_batch_size: utils.Count = 32
    """pairs per gradient step of these"""
    cost_pairs: utils.Count | None = None
    """most labelled pairs, from the beginning of --data, that these are fitted to; default: all"""
    cost_epochs: utils.NonNegativeInt = 6
    """passes over the labelled responses before training"""

    # -- Run -----------------------------------------------------------------------------------
    eval_episodes: utils.Count = 1_000
    """responses of the final evaluation"""
    threads: utils.Count = 1
    """threads of PyTorch; for tiny models more only wait for each other"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where all models are"""
    checkpoint_interval: utils.Count = 50
    """iterations between two checkpoints, from which a run that was cut off goes on; there is one
    before training as well. Each holds all models and Adam's moments"""
    resume: str | None = None
    """folder of a run that was cut off, to go on with it; it keeps its own arguments"""
    runs_dir: str = "runs"
    """folder of all runs"""
    run_name: str | None = None
    """folder of this run; default: made of task, script, seed and time"""

    @property
    def env_id(self) -> str:
        return f"tokens-{self.task}" if self.model is None else Path(self.model).resolve().name

    def labelled_by(self, iteration: int) -> int:
        """How many of the fresh pairs are labelled by then, as many in each round."""
        rounds = self.num_iterations // self.finetune_interval
        return self.online_queries * (iteration // self.finetune_interval) // max(rounds, 1)


def check_method(args: Args) -> None:
    """Refuse combinations that mean nothing, before anything is made."""
    if (args.model is None) != (args.data is None):
        raise ValueError("--model DIR and --data FILE go together; give both, or train on --task")
    from_oracle = args.cost == "true" or args.constraint != "learned" or args.online_queries > 0
    if args.model is not None and from_oracle:
        raise ValueError(
            "--cost true, --constraint rate or accept and --online-queries need somebody who "
            "judges fresh responses, as in the token tasks alone; leave out --model and --data"
        )
    if args.constraint == "rate" and args.online_queries == 0:
        raise ValueError("--constraint rate is moved by labels; give --online-queries")
    if (args.model is None and args.reward_model) or (args.cost == "true" and args.cost_model):
        raise ValueError(
            "--reward-model is for --model, since a token task has its reward, and --cost-model is "
            "not for --cost true; leave it out"
        )
    if args.batch_size < 2:
        raise ValueError(
            "--batch-size must be at least 2, since advantages are divided by their standard "
            f"deviation, got {args.batch_size}"
        )
    unfitted = args.cost == "learned" and (args.cost_model is None or args.online_queries > 0)
    if args.model is None and unfitted and args.offline_queries == 0:
        raise ValueError(
            "a cost is fitted to labels from before training, got --offline-queries 0; give some, "
            "or a --cost-model without --online-queries"
        )
    most = args.num_iterations // args.finetune_interval * (args.batch_size // 2)
    if args.online_queries > most:
        raise ValueError(
            "--online-queries are pairs of the --batch-size responses of every "
            f"--finetune-interval-th of --num-iterations rollouts, {most} at most, got "
            f"{args.online_queries}; lower it, or raise --batch-size"
        )


# -- Agent -----------------------------------------------------------------------------------------


class Agent(nn.Module):
    """The policy and two critics, each a whole network."""

    def __init__(self, args: Args, tokenizer: Any) -> None:
        super().__init__()
        kinds = AutoModelForCausalLM, AutoModelForTokenClassification
        policy, reward, cost = args.model, args.reward_model, args.cost_model
        self.policy = load_model(kinds[0], policy, tokenizer, args.device)
        self.critic_r = load_model(kinds[1], reward or policy, tokenizer, args.device)
        self.critic_c = load_model(kinds[1], cost or policy, tokenizer, args.device)


class Rollout(NamedTuple):
    """Prompts, padded on the left to P tokens, and T tokens of responses."""

    tokens: Tensor  # (B, P + T)
    attended: Tensor  # (B, P + T), 0 at padding and after the end of a response
    is_written: Tensor  # bool (B, T), up to and with the end token


def outputs_before(net: Any, rollout: Rollout) -> Tensor:
    """What a network says at each state s_t, before token t is written: (B, T, ·)."""
    positions = (rollout.attended.cumsum(1) - 1).clamp(min=0)
    logits: Tensor = net(
        input_ids=rollout.tokens[:, :-1],
        attention_mask=rollout.attended[:, :-1],
        position_ids=positions[:, :-1],
        use_cache=False,
    ).logits
    return logits[:, -rollout.is_written.shape[1] :].float()


def values_of(critic: Any, rollout: Rollout) -> Tensor:
    """V(s_t), (B, T)."""
    return outputs_before(critic, rollout).squeeze(-1)


def log_probs(policy: Any, rollout: Rollout) -> Tensor:
    """Log π of each written token, (B, T); 0 after the end."""
    written = rollout.tokens[:, -rollout.is_written.shape[1] :]
    all_log_probs = outputs_before(policy, rollout).log_softmax(-1)
    chosen = all_log_probs.gather(-1, written.unsqueeze(-1)).squeeze(-1)
    return chosen * rollout.is_written


@torch.no_grad()
def respond(
    policy: Any, tokenizer: Any, prompts: Sequence[str], args: Args, noise: torch.Generator
) -> Rollout:
    """Sample a response to each prompt, from π itself: temperature 1, nothing left out."""
    options = {"padding": True, "truncation": True, "max_length": args.max_length}
    encoded = tokenizer(list(prompts), return_tensors="pt", **options)
    tokens, attended = encoded["input_ids"], encoded["attention_mask"]
    if not attended.any(1).all():
        raise ValueError("a prompt must have a token, got an empty one; add words to --template")
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    cache, is_written = None, []
    new, position = tokens, (attended.cumsum(1) - 1).clamp(min=0)
    for _ in range(args.max_new_tokens):
        out = policy(
            input_ids=new.to(args.device),
            attention_mask=attended.to(args.device),
            position_ids=position.to(args.device),
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        probability = out.logits[:, -1].float().softmax(-1).cpu()
        new = torch.multinomial(probability, 1, generator=noise)  # (B, 1)
        new[ended] = tokenizer.pad_token_id
        is_written.append(~ended)
        tokens = torch.cat([tokens, new], 1)
        attended = torch.cat([attended, (~ended).long().unsqueeze(1)], 1)
        position = position[:, -1:] + 1
        if tokenizer.eos_token_id is not None:
            ended = ended | (new.squeeze(1) == tokenizer.eos_token_id)
    found = Rollout(tokens, attended, torch.stack(is_written, 1))
    return Rollout(*(part.to(args.device) for part in found))


def in_chunks(function: Any, net: Any, rollout: Rollout, size: int) -> Tensor:
    """Apply `function` of a network without gradients, some responses at a time."""
    with torch.no_grad():
        parts = zip(*(part.split(size) for part in rollout), strict=True)
        return torch.cat([function(net, Rollout(*part)) for part in parts])


# -- Losses: edit me -------------------------------------------------------------------------------


class Batch(NamedTuple):
    """A rollout, or a minibatch of one, to learn from; all but its rollout (B, T)."""

    rollout: Rollout
    log_prob: Tensor  # of the policy that wrote
    adv: Tensor  # (A_R - λ A_C) / (1 + λ)
    target_r: Tensor
    target_c: Tensor

    def rows(self, index: Tensor) -> Batch:
        rollout = Rollout(*(part[index] for part in self.rollout))
        return Batch(rollout, *(part[index] for part in self[1:]))


def losses(agent: Agent, mb: Batch, args: Args) -> tuple[Tensor, Tensor, Tensor]:
    """Return the policy's loss, the critics', and the mean KL to the policy that wrote."""
    is_written, count = mb.rollout.is_written, mb.rollout.is_written.sum()
    log_ratio = log_probs(agent.policy, mb.rollout) - mb.log_prob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy = -(torch.min(ratio * mb.adv, clipped * mb.adv) * is_written).sum() / count
    value = policy.new_zeros(())
    for critic, target in ((agent.critic_r, mb.target_r), (agent.critic_c, mb.target_c)):
        error = values_of(critic, mb.rollout) - target
        value = value + 0.5 * (error.square() * is_written).sum() / count
    kl = ((ratio - 1 - log_ratio) * is_written).sum() / count
    return policy, value, kl.detach()


# -- PPO -------------------------------------------------------------------------------------------


def gae(rewards: Tensor, values: Tensor, is_written: Tensor, gamma: float, lam: float) -> Tensor:
    """Return advantages (B, T): nothing follows the last written token of a response."""
    advantages, running = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    values = values * is_written
    for t in reversed(range(rewards.shape[1])):
        next_value = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
        running = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * running
        advantages[:, t] = running = running * is_written[:, t]
    return advantages


def update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    args: Args,
    rng: np.random.Generator,
) -> dict[str, float]:
    """Train on a rollout for all epochs."""
    found = []
    for _ in range(args.update_epochs):
        order = torch.from_numpy(rng.permutation(len(batch.adv))).to(batch.adv.device)
        for index in order.split(args.minibatch_size):
            policy, value, kl = losses(agent, batch.rows(index), args)
            optimizer.zero_grad()
            (policy + value).backward()
            for net in agent.children():
                nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm)
            optimizer.step()
            found.append([float(value.detach()), float(kl)])
    value_loss, kl_mean = np.mean(found, axis=0)
    return {"value_loss": float(value_loss), "kl": float(kl_mean)}


# -- Method ----------------------------------------------------------------------------------------


class Played(NamedTuple):
    """Responses of the policy, and what they are worth."""

    rollout: Rollout
    prompts: list[str]
    texts: list[str]  # as a judge reads them
    rewards: np.ndarray  # (B,)
    costs: np.ndarray  # that the policy is trained on, (B,)
    true_costs: np.ndarray  # none of --data, (B,) or (0,)
    episodes: list[Trajectory]  # the same per token, for the oracle


@dataclass
class Progress:
    """Loose numbers of a run, as far as its future depends on them."""

    dead_zone: float
    iteration: int = 0
    adv_std: list[float] = field(default_factory=lambda: [0.0, 0.0])  # means over all iterations


# -- Training --------------------------------------------------------------------------------------


def train(args: Args) -> Path:
    # -- Setup -------------------------------------------------------------------------------------
    utils.check_args(args)
    check_method(args)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)  # initial weights
    rng = np.random.default_rng(args.seed)
    noise = torch.Generator().manual_seed(args.seed)
    world = World(args)
    task = world.task
    agent = Agent(args, world.tokenizer)
    reference = copy.deepcopy(agent.policy).requires_grad_(False)  # the policy of the beginning
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate)
    multiplier = LagrangeMultiplier(
        lr=args.multiplier_lr, initial=args.multiplier_initial, cap=args.multiplier_cap
    )
    cost_model = reward_model = None
    if args.cost == "learned":
        cost_model = Scorer.load(args.cost_model or args.model, world.judge_tokenizer, args)
    if task is None:
        reward_model = Scorer.load(args.reward_model or args.model, world.judge_tokenizer, args)
    pbci = {"snr_weight": args.snr_weight, "safety_weight": args.safety_weight}
    limit = task.cost_limit if task is not None and cost_model is None else 0.0
    progress = Progress(dead_zone=args.dead_zone)

    def play(count: int) -> Played:
        """Let the policy respond, and have the responses scored."""
        prompts = world.prompts(count, rng)
        rollout = respond(agent.policy, world.tokenizer, prompts, args, noise)
        texts = world.decode(rollout.tokens, rollout.is_written)
        if reward_model is not None:
            rewards = reward_model(prompts, texts)
        else:
            assert task is not None
            texts = task.outcomes(texts, rng)
            rewards = task.rewards(texts)
        episodes = world.episodes(prompts, texts)
        true = np.array([one.true_cost for one in episodes])
        costs = true if cost_model is None else cost_model(prompts, texts)
        return Played(rollout, prompts, texts, rewards, costs, true, episodes)

    with utils.Run(args, script=__file__) as run:
        run.begin("PPO-Lag")
        models = {"cost_model": cost_model, "reward_model": reward_model}
        checkpoint = utils.Checkpoint(run, args, keep=lambda: None)
        checkpoint.add(progress=progress, agent=agent, optimizer=optimizer, multiplier=multiplier)
        checkpoint.add(**{name: scorer and scorer.model for name, scorer in models.items()})
        checkpoint.add(oracle=world.oracle, rng=rng, noise=noise)

        # -- Method --------------------------------------------------------------------------------
        if not (args.resume is not None and checkpoint.load()):
            if reward_model is not None and args.reward_model is None:
                with run.phase("fit the reward model", stage="reward_model"):
                    pairs = helpfulness(world.pairs[: args.cost_pairs])
                    reward_model.fit(pairs, rng=rng, epochs=args.cost_epochs, snr_weight=0.0)
            if cost_model is not None and args.cost_model is None:
                pairs = world.pairs[: args.cost_pairs]
                with run.phase(f"fit the cost to {len(pairs)} pairs", stage="cost_model"):
                    options = {"epochs": args.cost_epochs, "dead_zone": args.dead_zone, **pbci}
                    cost_model.fit(pairs, rng=rng, **options)
            checkpoint.save()  # so that nothing is fitted twice

        for iteration in run.iterations(progress):
            # -- 1. Roll out -----------------------------------------------------------------------
            new = play(args.batch_size)
            run.lap("rollout")

            # -- 2. Label and fine-tune ------------------------------------------------------------
            tuning: dict[str, float] = {}
            unsafe_rate = rejected = None
            if world.oracle is not None and args.constraint == "accept":
                number = world.oracle.submit_batch(new.episodes)
                answer = world.oracle.collect()[number]
                assert isinstance(answer, BatchLabel)
                rejected = 1 - answer.safe
            newest: list[TextPair] = []
            if count := args.labelled_by(iteration) - args.labelled_by(iteration - 1):
                newest = world.label(new.prompts, new.texts, new.episodes, rng, count)
            if newest:
                labels = [(one.label.first_safe, one.label.second_safe) for one in newest]
                unsafe_rate = tuning["violation_rate"] = 1 - float(np.mean(labels))
            if unsafe_rate is not None and cost_model is not None:
                firsts, seconds = ([getattr(p, k) for p in newest] for k in ("first", "second"))
                costs = cost_model(2 * [pair.prompt for pair in newest], firsts + seconds)
                called_unsafe = float((costs > 0).mean())
                tuning["violation_gap"] = called_unsafe - unsafe_rate
                zone = DeadZone(progress.dead_zone, lr=args.dead_zone_lr)
                progress.dead_zone = zone.update(called_unsafe, unsafe_rate)  # Eq. 11
                old = rng.choice(len(world.pairs), len(newest))
                mixed = [*newest, *(world.pairs[i] for i in old)]
                options = {"epochs": args.finetune_epochs, "dead_zone": progress.dead_zone, **pbci}
                cost_model.fit(mixed, rng=rng, **options)

                # -- 3. Relabel --------------------------------------------------------------------
                new = new._replace(costs=cost_model(new.prompts, new.texts))
            run.lap("cost_model")

            # -- 4. Advantages ---------------------------------------------------------------------
            rollout, is_written = new.rollout, new.rollout.is_written
            log_prob = in_chunks(log_probs, agent.policy, rollout, args.chunk_size)
            log_prob_ref = in_chunks(log_probs, reference, rollout, args.chunk_size)
            penalty = args.kl_coef * (log_prob - log_prob_ref)  # per token
            last = is_written.sum(1, keepdim=True) - 1
            adv, targets = [], []
            for i, (critic, signal, at_end) in enumerate(
                [
                    (agent.critic_r, -penalty, new.rewards),
                    (agent.critic_c, penalty, new.costs),
                ]
            ):
                end = torch.as_tensor(at_end, dtype=torch.float32, device=args.device)
                signal = signal.scatter_add(1, last, end.unsqueeze(1))
                values = in_chunks(values_of, critic, rollout, args.chunk_size)
                raw = gae(signal, values, is_written, args.gamma, args.gae_lambda)
                targets.append(raw + values)
                # The scale of a learned cost is arbitrary, so it is divided out; but by the mean
                # over all iterations, or the price of cost would rise as the cost falls.
                progress.adv_std[i] += (
                    float(raw[is_written].std()) - progress.adv_std[i]
                ) / iteration
                adv.append((raw - raw[is_written].mean()) / (progress.adv_std[i] + 1e-8))
            advantage = (adv[0] - multiplier.value * adv[1]) / (1 + multiplier.value)

            # -- 5. Policy -------------------------------------------------------------------------
            optimizer.param_groups[0]["lr"] = args.learning_rate * (
                1 - args.lr_decay * (iteration - 1) / args.num_iterations
            )
            batch = Batch(rollout, log_prob, advantage, *targets)
            learned = update(agent, optimizer, batch, args, rng)
            run.lap("update")

            # -- 6. Dual ascent --------------------------------------------------------------------
            moved_by: dict[str, tuple[float | None, float]] = {
                "learned": (float(new.costs.mean()), limit),
                "rate": (unsafe_rate, args.max_unsafe_rate),
                "accept": (rejected, 0.5),
            }
            multiplier.update(*moved_by[args.constraint])  # None leaves it as it is

            # -- 7. Log ----------------------------------------------------------------------------
            metrics = {
                "return": float(new.rewards.mean()),
                "true_cost": float(new.true_costs.mean()) if new.episodes else None,
                "learned_cost": float(new.costs.mean()) if cost_model is not None else None,
                "multiplier": multiplier.value,
                "dead_zone": progress.dead_zone if cost_model is not None else None,
                "queries_used": world.oracle.queries_used if world.oracle is not None else None,
                "rejected": rejected,
                **tuning,
                "kl_to_reference": float((log_prob - log_prob_ref).sum(1).mean()),
                "length": float(is_written.sum(1).float().mean()),
                **learned,
            }
            run.log(iteration * args.batch_size, metrics)
            checkpoint.after(iteration)

        # -- Evaluation ----------------------------------------------------------------------------
        parts = [play(args.batch_size) for _ in range(-(-args.eval_episodes // args.batch_size))]
        rewards = np.concatenate([part.rewards for part in parts])
        true = np.concatenate([part.true_costs for part in parts])
        summary: dict[str, Any] = {
            "env_id": args.env_id,
            "policy": "stochastic",
            "episodes": len(rewards),
            "return": float(rewards.mean()),
            "return_interval": interval(rewards),
            "true_cost": float(true.mean()) if task is not None else math.nan,
            "true_cost_interval": interval(true),
            "violation_rate": float((true > task.cost_limit).mean()) if task is not None else None,
            "cost_limit": task.cost_limit if task is not None else math.nan,
            "queries_used": world.oracle.queries_used if world.oracle is not None else None,
        }
        prompts = np.array([prompt.strip() for part in parts for prompt in part.prompts])
        for name in task.classes if task is not None and len(task.classes) > 1 else ():
            costs = true[prompts == name]
            summary[f"true_cost_{name}"] = float(costs.mean()) if len(costs) else None
        if cost_model is not None:
            costs = np.concatenate([part.costs for part in parts])
            summary["mean_learned_cost"] = float(costs.mean())
            summary["dead_zone"] = progress.dead_zone
            if task is not None:
                same_texts = np.random.default_rng(0)  # for all runs
                summary["true_cost_at_limit"] = task.true_cost_at_limit(cost_model, same_texts)
        for name, model, tokenizer in (
            ("policy", agent.policy, world.tokenizer),
            *((n, s.model, s.tokenizer) for n, s in models.items() if s is not None),
        ):
            model.save_pretrained(run.folder / name)
            tokenizer.save_pretrained(run.folder / name)
        run.finish({**summary, "multiplier": multiplier.value})
    return run.folder


if __name__ == "__main__":
    utils.main(train, Args)
