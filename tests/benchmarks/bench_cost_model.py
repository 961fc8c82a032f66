"""How well a cost model judges new episodes, by the number of episodes that it learned from.

`python tests/benchmarks/bench_cost_model.py --dataset FOLDER` takes a folder of `ppo_lag.py
--save-trajectories`, sets a fixed test set aside, and pretrains on nested parts of the rest.

With `--later` it is the gate that a change of the method passes before it becomes a default: the
test episodes are those that were played last, by policies that the model has not seen, and what
counts is the step AUROC and the true mean cost where the learned one meets its limit.
`--online-queries` adds rounds of fine-tuning on the episodes played just before those, as in
training, and says how far each round moves the mean learned cost.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from gymnasium.spaces import Box

import pbcrl_envs
from pbcrl import (
    CostModel,
    CostModelTrainer,
    DeadZone,
    PreferenceBuffer,
    SyntheticOracle,
    Trajectory,
    TrajectoryDataset,
    draw_pairs,
)
from pbcrl.metrics import cost_model_report, step_auroc


@dataclass(frozen=True)
class Args:
    dataset: str
    """folder of trajectories"""
    cost_limit: float | None = None
    """d, known to the oracle only; default: the task's own"""
    sizes: tuple[int, ...] = (500, 1000, 2000)
    """episodes to learn from, a tenth of them for validation"""
    test_episodes: int = 500
    """held-out episodes"""
    queries: int = 18_000
    """labelled pairs, a tenth of them for validation"""
    later: bool = False
    """test on the last episodes that were played, not on a random sample; the dataset must have
    kept all episodes of its run, which are then in order"""
    online_queries: int = 0
    """labelled pairs of the last episodes before the test ones, which nothing else learns from:
    the model is fine-tuned on them in rounds, and judged after the last; with --later"""
    online_episodes: int = 1_200
    """how many episodes these are"""
    rounds: int = 12
    """rounds of fine-tuning, each on as many of these episodes, in the order of play"""
    finetune_lr: float | None = None
    """Adam's step size in these rounds; default: lr"""
    finetune_epochs: int = 5
    """passes over the newest labels per round"""
    finetune_average: float = 0.0
    """share of the earlier ones in an exponential average of the weights after each round, by which
    the model is judged; 0 is the last round's weights"""
    seeds: int = 1
    """seeds 0, 1, ... of every size; the test episodes are the same for all"""
    lr: float = 3e-3
    """Adam's step size"""
    batch_size: int = 128
    """pairs per gradient step"""
    patience: int = 10
    """validations without a new best at which training stops"""
    max_epochs: int = 200
    """most passes over the pairs"""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """widths of the hidden layers"""
    output_scale: float = 0.03
    """factor on the net's output per step"""
    dead_zone: float = 1.0
    """δ"""
    snr_weight: float = 1e-3
    """ζ"""
    bf16: bool = False
    """learn in bfloat16"""
    threads: int = 2
    """threads of PyTorch"""


def finetune(
    args: Args,
    trainer: CostModelTrainer,
    pairs: PreferenceBuffer,
    episodes: list[Trajectory],
    oracle: SyntheticOracle,
    rng: np.random.Generator,
) -> list[float]:
    """Fine-tune in rounds, as training does; return how far each moves the mean learned cost.

    In standard deviations of the learned costs of `episodes`, which are in the order of play.
    """
    model, moves = trainer.model, []
    average = {name: value.clone() for name, value in model.state_dict().items()}
    per_round = len(episodes) // args.rounds
    for number in range(args.rounds):
        played = episodes[number * per_round : (number + 1) * per_round]
        chosen = draw_pairs(per_round, args.online_queries // args.rounds, rng=rng)
        chosen = pairs.add_trajectories(played)[chosen]
        pairs.add_labels(chosen, oracle.label(pairs.queries(chosen)))
        before = model.score(episodes)
        trainer.finetune(
            pairs,
            num_new=len(chosen),
            epochs=args.finetune_epochs,
            lr=args.finetune_lr,
        )
        moves.append(float((model.score(episodes) - before).mean() / before.std()))
        for name, value in model.state_dict().items():
            average[name].mul_(args.finetune_average).add_((1 - args.finetune_average) * value)
    model.load_state_dict(average)
    return moves


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    dataset = TrajectoryDataset(args.dataset)
    limit = pbcrl_envs.cost_limit(dataset.env_id) if args.cost_limit is None else args.cost_limit
    num_online = args.online_episodes if args.online_queries else 0
    if num_online and not args.later:
        raise SystemExit("error: --online-queries needs --later")
    num_aside = args.test_episodes + num_online
    if limit is None or num_aside + max(args.sizes) > len(dataset):
        raise SystemExit(
            f"error: {num_aside} episodes for tests and rounds and {max(args.sizes)} others are "
            f"needed, and a cost limit; {args.dataset} has {len(dataset)} of {dataset.env_id}"
        )
    order = np.random.default_rng(0).permutation(len(dataset))
    if args.later:
        order = np.arange(len(dataset))[::-1]
    test = [dataset[i] for i in order[: args.test_episodes]]
    online = [dataset[i] for i in order[args.test_episodes : num_aside][::-1]]
    true = np.array([episode.true_cost for episode in test])
    unsafe = float((true > limit).mean())
    print(f"{len(dataset)} episodes of {dataset.env_id}, {len(test)} held out, {unsafe:.0%} unsafe")
    for size in args.sizes:
        for seed in range(args.seeds):
            rng = np.random.default_rng(seed)
            torch.manual_seed(seed)
            oracle = SyntheticOracle(limit, budget=args.queries + args.online_queries)
            chosen = rng.permutation(order[num_aside:])[:size]
            buffers: list[PreferenceBuffer] = []
            for rows, queries in (
                (np.sort(chosen[: size // 10]), args.queries // 10),
                (np.sort(chosen[size // 10 :]), args.queries - args.queries // 10),
            ):
                buffer = PreferenceBuffer()
                buffer.add_trajectories([dataset[i] for i in rows])
                count = min(queries, len(rows) * (len(rows) - 1) // 2)
                pairs = draw_pairs(len(rows), count, rng=rng)
                buffer.add_labels(pairs, oracle.label(buffer.queries(pairs)))
                buffers.append(buffer)
            valid, train = buffers
            model = CostModel(
                Box(-np.inf, np.inf, dataset.obs_shape),
                Box(-np.inf, np.inf, (dataset.act_dim,)),
                hidden_sizes=args.hidden_sizes,
                output_scale=args.output_scale,
                horizon=dataset.horizon,
            )
            model.fit_input_scale([dataset[i] for i in chosen[size // 10 :]])
            trainer = CostModelTrainer(
                model,
                rng=rng,
                dead_zone=DeadZone(args.dead_zone, lr=0.0),
                snr_weight=args.snr_weight,
                lr=args.lr,
                batch_size=args.batch_size,
                bf16=args.bf16,
            )
            start = time.perf_counter()
            history = trainer.pretrain(
                train,
                valid,
                max_epochs=args.max_epochs,
                patience=args.patience,
            )
            moves: list[float] = []
            if online:
                moves = finetune(args, trainer, train, online, oracle, rng)
            seconds = time.perf_counter() - start
            learned = model.score(test)
            report = cost_model_report(learned, true, limit, learned_limit=model.learned_limit)
            best = min(range(len(history)), key=lambda i: history[i].selection_loss)
            steps_found = step_auroc(model.step_cost, test)
            print(
                f"{size:5d} episodes, seed {seed}: step AUROC {steps_found:.3f}, "
                f"true cost at the limit {report['true_cost_at_limit']:.1f} +- "
                f"{report['true_cost_at_limit_interval']:.1f}; "
                f"correlation {np.corrcoef(learned, true)[0, 1]:.2f}, AUROC {report['auroc']:.3f}, "
                f"balanced accuracy {report['balanced_accuracy']:.3f}, pairs "
                f"{report['pair_accuracy']:.3f}, W2 scaled {report['w2_scaled']:.1f}, skewness "
                f"{report['skewness_learned']:.1f} (true {report['skewness_true']:.1f}); best of "
                f"{len(history)} validations: {best}, {seconds:.0f} s",
                flush=True,
            )
            if moves:
                print(f"      sd by round: {', '.join(f'{move:+.2f}' for move in moves)}")


if __name__ == "__main__":
    main(tyro.cli(Args))
