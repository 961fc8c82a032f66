"""PPO-Lag of OmniSafe 0.5.0 and ours, in turns and at equal work; part of `make bench`.

Both have one critic for the cost and one for the reward, 64x64 nets, gradient steps on 64 env steps
at a time, 40 passes over each rollout and no KL stop, so that every rollout of 20,000 steps takes
12,500 gradient steps of three nets. OmniSafe steps `--omnisafe-envs` environments (its default is
one), ours the script's 20. Rates are those from the second iteration on.
Needs the environment of `make parity-env`.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tyro
from script_runs import phases, print_phases, rate, run_script

WORKER = Path(__file__).with_name("omnisafe_rates.py")


@dataclass(frozen=True)
class Args:
    omnisafe_python: str = ".venv-parity/bin/python"
    """interpreter that has OmniSafe"""
    env_id: str = "SafetyPointGoal1-v0"
    """task to run"""
    steps: int = 20_000
    """env steps per iteration"""
    iterations: int = 2
    """iterations of OmniSafe per round; the first is warm-up and not counted"""
    our_iterations: int = 4
    """iterations of ours per round, likewise"""
    rounds: int = 2
    """turns of each; medians are compared"""
    update_epochs: int = 40
    """passes over each rollout"""
    minibatch_size: int = 64
    """env steps per gradient step"""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """widths of the hidden layers of all nets"""
    threads: int = 2
    """threads of PyTorch, of both"""
    num_envs: int = 20
    """environments of ours"""
    omnisafe_envs: int = 1
    """environments of OmniSafe, each in a separate process if there are several"""
    sky: bool = True
    """Safety-Gymnasium's own sky, which makes its resets slow; --no-sky is as fast as it can be"""


def omnisafe(args: Args) -> dict[str, float]:
    """Run the worker; return its rate and its seconds."""
    job = asdict(args) | {"num_envs": args.omnisafe_envs}
    command = [args.omnisafe_python, str(WORKER), json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"error: OmniSafe failed\n{done.stdout[-2000:]}{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(args: Args) -> None:
    if not Path(args.omnisafe_python).exists():
        raise SystemExit(
            f"error: OmniSafe is compared with, but there is no {args.omnisafe_python}; "
            "build its environment with `make parity-env`"
        )
    print(
        f"{args.env_id}: {args.steps} steps per iteration, {args.update_epochs} passes of "
        f"{args.minibatch_size}, nets {args.hidden_sizes}, {args.threads} threads of "
        f"{os.cpu_count()} cores, no KL stop"
    )
    rates, tables = [], []
    for _ in range(args.rounds):
        theirs = omnisafe(args)
        rows = run_script(
            "ppo_lag.py",
            *("--env-id", args.env_id),
            *("--total-timesteps", args.steps * args.our_iterations),
            *("--num-envs", args.num_envs, "--num-steps", args.steps // args.num_envs),
            *("--update-epochs", args.update_epochs, "--minibatch-size", args.minibatch_size),
            *("--hidden-sizes", *args.hidden_sizes, "--target-kl", "inf"),
            *("--threads", args.threads, "--eval-episodes", 1),
        )
        rates.append((theirs["rate"], rate(rows)))
        tables.append(phases(rows))
        steps = args.steps * (args.iterations - 1)
        print(
            f"   OmniSafe {theirs['rate']:6,.0f} steps/s (us per env step: rollout "
            f"{theirs['seconds_rollout'] / steps * 1e6:,.0f}, update "
            f"{theirs['seconds_update'] / steps * 1e6:,.0f})   ours {rate(rows):6,.0f} steps/s = "
            f"{rate(rows) / theirs['rate']:.1f} times",
            flush=True,
        )
    print_phases([f"ours, round {i + 1}" for i in range(args.rounds)], tables)
    theirs_rate, our_rate = np.median(np.array(rates), axis=0)
    print(
        f"median: OmniSafe {theirs_rate:,.0f}, ours {our_rate:,.0f} steps/s: "
        f"{our_rate / theirs_rate:.1f} times as fast"
    )


if __name__ == "__main__":
    main(tyro.cli(Args))
