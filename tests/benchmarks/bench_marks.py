"""Policies by the minutes of a simulated person who answers about pairs and marks unsafe moments.

`python tests/benchmarks/bench_marks.py --out docs/results/marks.csv` runs tasks x minutes x seeds
as people are asked by default, about the policy's own episodes, λ by the share of unsafe ones, at
most `max_unsafe_rate`, or by the learned limit. Each pair has its unsafe moments marked
(`marked_pairs`; by the share, every second query is a grid as soon as marks decide), or has no
marks, so that more of them fit into the same minutes (`pairs`). Then the true cost judges fresh
episodes of the deterministic policy, for a certificate of that rate: for 0.05 none of 60 may be
unsafe. A row for each is added to the file; what has a row is not run again. Whoever errs has 5 %
of the answers flipped, marks 2 % of an episode late and off by up to as much, and a tenth of the
unsafe stretches missed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal

import tyro
from bench_minutes import PER_MARKED_PAIR, SECONDS
from script_runs import add_row, rows_there, summary_of

from pbcrl_script_utils.run import made_by

CERTIFICATE = "certificate_episodes", "certificate_unsafe"
MEASURES = (
    *("cost_limit", "return_stochastic", "true_cost_stochastic", "true_cost_stochastic_interval"),
    *("violation_rate_stochastic", "return_last_fifth", "true_cost_last_fifth", "multiplier"),
    *("step_auroc_evaluation", "queries_used", "wall_seconds"),
    *CERTIFICATE,
)
JOB = "env", "asked", "minutes", "errors", "max_unsafe_rate", "seed"
COLUMNS = "commit", *JOB, *MEASURES, "command"
Asked = Literal["marked_pairs", "pairs"]
FIRST = 8
"""Pairs, or so, before marks decide; until then there are no grids."""


@dataclass(frozen=True)
class Args:
    out: str
    """CSV file to add rows to"""
    env_ids: tuple[str, ...] = ("DrivingBlockedRoad-v0", "DrivingLaneChange-v0")
    """tasks"""
    asked: tuple[Asked, ...] = ("marked_pairs",)
    """what about, see above"""
    minutes: tuple[int, ...] = (10, 30, 100)
    """of the person"""
    errors: tuple[int, ...] = (0, 1)
    """whether the person errs, 0 or 1"""
    max_unsafe_rate: float = 0.05
    """of episodes; 0.35 is P(C > d) of log-normal costs whose mean is d"""
    learned: bool = False
    """whether λ goes by the learned limit instead; then there is no rate, and no certificate"""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    workers: int = 1
    """runs at a time"""


def main(args: Args) -> None:
    out, lock = Path(args.out), Lock()
    rate = "" if args.learned else args.max_unsafe_rate
    unjudged = dict.fromkeys(CERTIFICATE, "") if args.learned else {}
    constraint = ["learned"] if args.learned else ["rate", "--max-unsafe-rate", str(rate)]
    done = rows_there(out, JOB)

    def run(job: tuple[str, Asked, int, int, int]) -> None:
        env_id, asked, minutes, errors, seed = job
        marks = asked == "marked_pairs"
        queries = int(60 * minutes / (PER_MARKED_PAIR if marks else SECONDS["pairs"]))
        if marks and not args.learned:
            left = 60 * minutes - FIRST * PER_MARKED_PAIR
            queries = int(FIRST + 2 * left / (PER_MARKED_PAIR + SECONDS["grids"]))
        words = ["ppo_lag_pbcrl.py", "--env-id", env_id, "--seed", str(seed), "--threads", "1"]
        words += ["--marks"] if marks else []
        words += ["--online-queries", str(queries)]
        words += ["--constraint", *constraint, "--eval-episodes", "400"]
        if errors:
            words += ["--preference-noise", "0.05", "--safety-noise", "0.05"]
        summary = summary_of(words, certify=not args.learned)
        if summary is None:
            return
        row = {
            "commit": made_by(__file__)["commit"] or "",
            **dict(zip(JOB, (env_id, asked, minutes, errors, rate, seed), strict=True)),
            **{name: (unjudged | summary)[name] for name in MEASURES},
            "command": "python cleanrl_scripts/" + " ".join(words),
        }
        row = {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}
        with lock:
            add_row(out, COLUMNS, row)
        print({name: row[name] for name in COLUMNS[1:-1]}, flush=True)

    jobs = [
        (env_id, asked, minutes, errors, seed)
        for seed in args.seeds
        for asked in args.asked
        for minutes in args.minutes
        for errors in args.errors
        for env_id in args.env_ids
        if (env_id, asked, str(minutes), str(errors), str(rate), str(seed)) not in done
    ]
    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(run, jobs))


if __name__ == "__main__":
    main(tyro.cli(Args))
