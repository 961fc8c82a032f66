"""Who answers the queries of a script, and which arguments about labels fit together."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from pbcrl import FolderOracle, Oracle, SyntheticOracle
from pbcrl.errors import StorageError
from pbcrl.oracle import Teacher, num_queries
from pbcrl_script_utils.replays import Replays
from pbcrl_script_utils.run import Run

_OF_PEOPLE = ["label_annotators", "label_wait"]
_OF_THE_SIMULATED = ["marks", "preference_noise", "safety_noise"]


def check_labels(args: Any) -> None:
    """Refuse a constraint that no label can move, and arguments that would do nothing.

    Args:
        args: Of `ppo_lag_pbcrl.py`.

    Raises:
        ValueError: If so.
    """
    default = {field.name: field.default for field in fields(args)}
    if args.label_folder is None:
        about, who = _OF_PEOPLE, "people, but the simulated oracle answers (no --label-folder)"
    else:
        about, who = _OF_THE_SIMULATED, "the simulated oracle, but people answer (--label-folder)"
    if idle := [name for name in about if getattr(args, name) != default[name]]:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in idle)
        raise ValueError(f"{flags} would do nothing: about {who}; leave out one or the other")
    if 0 < args.offline_queries < 10:
        raise ValueError(
            "a tenth of --offline-queries says when pretraining stops, so that 10 are the fewest, "
            f"got {args.offline_queries}; use 0 to pretrain on none"
        )
    if args.constraint != "learned" and not args.online_queries:
        raise ValueError(
            f"--constraint {args.constraint} moves the multiplier by labels of fresh episodes, but "
            "--online-queries is 0; raise it, or use --constraint learned"
        )
    before_last = max(0, args.num_iterations - args.finetune_interval)
    due = args.online_queries - args.due(before_last)
    if args.constraint == "accept" and due < num_queries(args.accept_batch):
        raise ValueError(
            f"--accept-batch {args.accept_batch} counts as {num_queries(args.accept_batch)} "
            f"queries, but only {due} are due in the last labelling round; raise --online-queries "
            "or --finetune-interval, or lower --accept-batch"
        )


def make_oracle(args: Any, run: Run, *, limit: float, replays: Replays | None) -> Oracle:
    """Return who answers: people, if there is a `--label-folder`, else the true costs.

    Args:
        args: Of `ppo_lag_pbcrl.py`.
        run: Told what people are waited for.
        limit: d, which the true costs are held to.
        replays: How episodes can be played again, for people to see.
    """
    budget = args.offline_queries + args.online_queries
    if args.label_folder is not None:
        if args.resume is not None and not Path(args.label_folder).exists():
            raise StorageError(
                f"a run goes on with the label folder that it began with, {args.label_folder}, but "
                f"there is none in {Path.cwd()}; go on where the run was begun"
            )
        return FolderOracle(
            args.label_folder,
            budget=budget,
            run=str(run.folder.resolve()),
            annotators=args.label_annotators,
            show=None if replays is None else replays.of,
            say=lambda text: run.say(f"   {text}"),
        )
    teacher = Teacher(
        preference_noise=args.preference_noise,
        safety_noise=args.safety_noise,
        mark_error=0.02 if args.safety_noise else 0,
        mark_lag=0.02 if args.safety_noise else 0,
        missed=min(1.0, 2 * args.safety_noise),
    )
    rng = np.random.default_rng([args.seed, 1])
    return SyntheticOracle(limit, budget=budget, marks=args.marks, teacher=teacher, rng=rng)
