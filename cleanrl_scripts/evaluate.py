"""Play a saved run on freshly seeded envs and say what it returns and costs, with intervals.

`pbcrl evaluate runs/NAME`, or `python evaluate.py runs/NAME`, takes a run of any of the training
scripts, with the `Agent` of the script that made it: a copy of it is in the run's folder.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import tyro

from pbcrl import LearnedCost, Trajectory, load_cost_model
from pbcrl.effects import effects, telling
from pbcrl.env_modules import data_folder_of
from pbcrl.errors import MismatchError, StorageError
from pbcrl.metrics import bias, violation_rate
from pbcrl.spaces import names_of
from pbcrl.storage import check_finite, load_tensors
from pbcrl_envs.upstream import INSTALL
from pbcrl_script_utils.args import CostLimit, Count, NonNegativeInt, check_args
from pbcrl_script_utils.card import read_effects
from pbcrl_script_utils.envs import flat_dims, horizon_of, make_envs, resolve_cost_limit
from pbcrl_script_utils.evaluation import Judge, costly_mean, play, true_costs
from pbcrl_script_utils.launch import main
from pbcrl_script_utils.resume import check_layers, read_args
from pbcrl_script_utils.run import print_groups
from pbcrl_script_utils.verdict import interval, verdict
from pbcrl_script_utils.video import check_film, film

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# -- Args ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    run: Annotated[str, tyro.conf.Positional]
    """folder of the run"""
    env_id: str | None = None
    """where to play; default: where it was trained; another one needs the same spaces. Give
    'module:Id-v0' in any case if the module is your own and not installed"""
    cost_limit: CostLimit | None = None
    """d, highest safe episode cost; default: the one of the run, or the task's own"""
    episodes: Count = 100
    """episodes, each in its own env"""
    seed: NonNegativeInt = 1_000_000
    """of the first env; env i gets seed + i"""
    stochastic: bool = False
    """sample actions instead of taking their mean"""
    capture_video: NonNegativeInt = 0
    """episodes to film, with the deterministic policy, as mp4 in the run's folder"""
    plots: bool = False
    """draw the learned cost, against the true one and by what it follows, into plots/ of the run"""
    trust_script: bool = False
    """run the copy of the script in the run's folder, if it is not the one beside evaluate.py"""
    upstream: bool = False
    """play as many episodes in the real Safety-Gymnasium too, and compare"""
    upstream_python: str = ".venv-parity/bin/python"
    """interpreter of an environment with the real Safety-Gymnasium"""
    threads: Count = 1
    """threads of nets and batched physics"""


# -- Agent -----------------------------------------------------------------------------------------


def script_of(folder: Path, name: str, *, trusted: bool) -> ModuleType:
    """Load the script that made a run: whoever changed its net plays the net that was trained.

    Raises:
        StorageError: If the folder has no copy of it, or one that differs from the script here and
            is not trusted: a folder that came from somebody else may hold any code.
    """
    kept, ours = folder / f"{name}.py", Path(__file__).with_name(f"{name}.py")
    if not kept.is_file():
        raise StorageError(
            f"a run's folder holds the script that made it, but {folder} has no {kept.name}; "
            "restore it, or train again"
        )
    same = ours.is_file() and kept.read_bytes() == ours.read_bytes()
    if not (same or trusted):
        raise StorageError(
            f"a run is played by the script that made it, but {kept} is not the {ours.name} here; "
            "--trust-script runs that copy: look at it first if the folder is not yours"
        )
    spec = importlib.util.spec_from_file_location(f"{name}_of_run", ours if same else kept)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def load_agent(
    folder: Path, trained: dict[str, Any], env_id: str | None, *, trusted: bool
) -> tuple[Any, str, int]:
    """Return the agent of a run, where to play it, and the time limit there.

    Raises:
        StorageError: If the run cannot be read.
        MismatchError: If the env has other spaces than the one it was trained in.
    """
    check_layers(folder, trained)
    path = folder / "agent.safetensors"
    tensors, meta = load_tensors(path, kind="agent")
    check_finite(path, tensors)
    env_id = env_id or str(meta["env_id"])
    script = script_of(folder, trained["script"], trusted=trusted)
    names = {field.name for field in fields(script.Args)}
    args = script.Args(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in trained.items() if k in names}
    )
    envs = make_envs(env_id, 1)
    agent, horizon = script.Agent(envs, args), horizon_of(envs)
    envs.close()
    try:
        agent.load_state_dict(tensors)
    except RuntimeError as error:
        raise MismatchError(
            f"{env_id} has (obs_dim, act_dim) = {flat_dims(envs)}, and an agent for it does not "
            f"fit the weights, which were trained on {meta['env_id']}; play it there "
            f"({str(error).splitlines()[-1].strip()})"
        ) from error
    return agent, env_id, horizon


# -- The real Safety-Gymnasium ---------------------------------------------------------------------


def play_upstream(args: Args, agent: Any, env_id: str) -> tuple[np.ndarray, np.ndarray]:
    """Play the policy in the real Safety-Gymnasium; return the episodes' returns and costs."""
    # Unresolved: the interpreter of a virtual environment is a link, and the link is what counts.
    python = Path(args.upstream_python).absolute()
    if not python.exists():
        raise ValueError(
            "--upstream needs a Python with the real Safety-Gymnasium, whose Gymnasium this "
            f"environment cannot have; there is none at {python}; name one with --upstream-python, "
            f"or {INSTALL}"
        )
    if data := data_folder_of(python):
        raise ValueError(
            f"--upstream runs no program that lies with data, but {python} is in {data}, which "
            "holds a run, labels or a dataset; work elsewhere, or name another --upstream-python"
        )
    with TemporaryDirectory() as folder:
        policy, output = Path(folder) / "policy.pt", Path(folder) / "episodes.npz"
        agent.requires_grad_(False)  # weights become constants of the traced function

        def mean_action(obs: torch.Tensor) -> Any:
            return agent.middle + agent.half_range * agent.mean(agent.normalize(obs))

        example = torch.zeros(1, len(agent.obs_mean))
        with warnings.catch_warnings():
            # Its successor, torch.export, writes files that an older PyTorch may not read.
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(torch.jit.trace(mean_action, example), str(policy))
        command = [str(python), str(Path(__file__).with_name("play_upstream.py"))]
        command += [str(policy), str(output), f"--env-id={env_id}"]
        command += [f"--episodes={args.episodes}", f"--seed={args.seed}"]
        if args.stochastic:
            std = agent.half_range * agent.log_std.detach().exp()  # in the action's own units
            command += ["--std", *map(str, std.tolist())]
        child = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if child.returncode != 0:
            lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
            raise RuntimeError(
                f"the real Safety-Gymnasium must play {env_id}, but {python} failed: "
                f"{lines[-1].removeprefix('error: ')}"
            )
        with np.load(output, allow_pickle=False) as episodes:
            return episodes["returns"], episodes["costs"]


def costly_episode_cost(folder: Path, costs: np.ndarray) -> float:
    """What an episode with a cost costs on average: here or, if none has one, in the run."""
    summary = folder / "summary.json"
    if (costs > 0).any() or not summary.exists():
        return costly_mean(costs)
    return float(json.loads(summary.read_text()).get("costly_episode_cost") or math.nan)


def labels_of(folder: Path) -> dict[str, int]:
    """How many labels of a finished run say safe, and how many unsafe, if it has a summary."""
    summary = folder / "summary.json"
    found = json.loads(summary.read_text()) if summary.exists() else {}
    return {key: found[key] for key in ("safe_labels", "unsafe_labels") if key in found}


# -- Evaluation ------------------------------------------------------------------------------------


def evaluate(args: Args) -> None:
    check_args(args)
    torch.set_num_threads(args.threads)
    folder = Path(args.run)
    trained = read_args(folder)
    agent, env_id, horizon = load_agent(folder, trained, args.env_id, trusted=args.trust_script)
    given = trained["cost_limit"] if env_id == trained["env_id"] else None
    given = given if args.cost_limit is None else args.cost_limit
    by_people = trained.get("label_folder") is not None
    limit = resolve_cost_limit(env_id, given, needed=not by_people)
    if args.capture_video > 0:
        check_film(env_id)
    cost_model: LearnedCost | None = None
    if (folder / "cost_model.safetensors").exists():
        cost_model, _ = load_cost_model(folder / "cost_model.safetensors")
        try:
            cost_model.check_horizon(horizon)
        except ValueError as error:
            print(f"   without the learned cost: {error}")
            cost_model = None
    if args.plots and cost_model is None:
        raise ValueError(
            f"--plots draws a learned cost, but {folder} has none for this env; give a run of "
            "ppo_lag_pbcrl.py"
        )
    returns, episodes = play(
        agent,
        env_id,
        episodes=args.episodes,
        seed=args.seed,
        deterministic=not args.stochastic,
        needs_cost=math.isfinite(limit) and not by_people,
        threads=args.threads,
    )
    true = true_costs(episodes)
    limited = np.isfinite(limit) and not np.isnan(true).any()
    kind = "stochastic" if args.stochastic else "deterministic"
    result = {
        "env_id": env_id,
        "episodes": args.episodes,
        "policy": kind,
        "return": float(returns.mean()),
        "return_interval": interval(returns),
        "true_cost": float(true.mean()),
        "true_cost_interval": interval(true),
        "cost_limit": limit,
        "bias": bias(float(true.mean()), limit) if limited else None,
        "violation_rate": violation_rate(true, limit) if limited else None,
        "costly_episodes": int((true > 0).sum()) if limited else None,
        "costly_episode_cost": costly_episode_cost(folder, true) if limited else None,
    }
    if cost_model is not None:
        result["learned_cost"] = float(cost_model.score(episodes).mean())
        result["learned_limit"] = cost_model.learned_limit
        result |= labels_of(folder)
        result |= Judge.of(cost_model).report(episodes, limit)
    if args.upstream:
        their_returns, their_costs = play_upstream(args, agent, env_id)
        for name, ours, theirs in [
            ("return", returns, their_returns),
            ("true_cost", true, their_costs),
        ]:
            result[f"upstream_{name}"] = float(theirs.mean())
            result[f"upstream_{name}_interval"] = interval(theirs)
            result[f"{name}_difference"] = float(ours.mean() - theirs.mean())
            both = np.hypot(interval(ours), interval(theirs))  # of independent means
            result[f"{name}_difference_interval"] = float(both)
    print("\n".join(verdict(result, flag="--episodes")))
    print_groups(result)
    if args.capture_video > 0:
        films = film(
            env_id,
            lambda obs: np.clip(agent.act(obs[None])[0], agent.low.numpy(), agent.high.numpy()),
            episodes=args.capture_video,
            seed=args.seed,
            folder=folder / "videos",
            cost_model=cost_model,
        )
        print("\n".join(f"   filmed {path}" for path in films))
    if args.plots and cost_model is not None:
        for path in draw_plots(folder, env_id, episodes, cost_model, limit, args.seed):
            print(f"   drawn {path}")


def draw_plots(
    folder: Path,
    env_id: str,
    episodes: list[Trajectory],
    cost_model: LearnedCost,
    limit: float,
    seed: int,
) -> list[Path]:
    """Draw the learned cost beside the true one, as far as the env and the run have it."""
    from pbcrl_script_utils import plots

    true, learned = true_costs(episodes), cost_model.score(episodes)
    # Episodes that cost nothing show little: of those that cost, one in the middle.
    middle = episodes[int(np.argsort(true)[len(true) - 1 - int((true > 0).sum()) // 2])]
    figures = {
        "steps": plots.step_costs(middle, cost_model, f"{env_id}, one episode"),
        "plane": plots.plane(env_id, cost_model, seed=seed),
        "effects": draw_effects(folder, env_id, episodes, cost_model, limit),
    }
    if np.isfinite(limit) and np.isfinite(true).all():
        costs = true, learned, limit, cost_model.learned_limit
        figures["calibration"] = plots.calibration(*costs, env_id)
        figures["tail"] = plots.tail(*costs, env_id)
    paths = (plots.save(one, folder / "plots" / f"{name}.png") for name, one in figures.items())
    return [path for path in paths if path is not None]


def draw_effects(
    folder: Path, env_id: str, episodes: list[Trajectory], cost_model: LearnedCost, limit: float
) -> Figure | None:
    """Draw what the learned cost follows, over steps of episodes that are safe and that are not.

    They are the labelled ones; the played ones where the run has not ended, or had no labels.
    """
    from pbcrl_script_utils import plots

    if len(cost_model.obs_shape) != 1:
        return None  # pixels have no names
    title = f"What the learned cost of {env_id} follows"
    labelled = read_effects(folder)
    if labelled is not None:
        return plots.effects(labelled, title, "labelled episodes, safe as most of the labels say")
    true = true_costs(episodes)
    if math.isfinite(limit) and np.isfinite(true).all():
        safe, note = true <= limit, f"an episode is safe if its true cost is at most {limit:g}"
    else:
        safe = cost_model.score(episodes) <= cost_model.learned_limit
        note = "an episode is safe if its learned cost is at most the learned limit"
    envs = make_envs(env_id, 1)
    names = names_of(envs)
    envs.close()
    rng = np.random.default_rng(0)
    found = effects(cost_model, episodes, rng=rng, safe=safe, names=names)
    return plots.effects(telling(found), title, f"played episodes; {note}")


if __name__ == "__main__":
    main(evaluate, Args)
