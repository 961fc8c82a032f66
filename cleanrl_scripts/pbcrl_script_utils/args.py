"""The scripts' arguments: those that no algorithm cares about, and the ranges of all of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

import torch
from tyro.constructors import PrimitiveConstructorSpec

from pbcrl_script_utils.datasets import minari_folder

_HDF5 = b"\x89HDF\r\n\x1a\n"  # how its files begin
_ITERATIONS = 250  # wanted
_FEWEST_MOVES = 40  # of λ: a factor of e⁴, at the step size by default


@dataclass(frozen=True)
class Range:
    """Which numbers an argument takes."""

    rule: str
    """In words, as an error has it."""
    holds: Callable[[Any], bool]


def _whole(words: list[str]) -> int:
    """1e6 counts steps as well as 1000000 does."""
    value = float(words[0])
    if not value.is_integer():
        raise ValueError(f"a whole number is needed, got {words[0]}")
    return int(value)


_WHOLE = PrimitiveConstructorSpec(
    nargs=1,
    metavar="INT",
    instance_from_str=_whole,
    is_instance=lambda value: isinstance(value, int),
    str_from_instance=lambda value: [str(value)],
)

Count = Annotated[int, Range("at least 1", lambda value: value >= 1), _WHOLE]
NonNegativeInt = Annotated[int, Range(">= 0", lambda value: value >= 0), _WHOLE]
Finite = Annotated[float, Range("finite", math.isfinite)]
Positive = Annotated[float, Range("> 0 and finite", lambda value: 0 < value < math.inf)]
NonNegative = Annotated[float, Range(">= 0 and finite", lambda value: 0 <= value < math.inf)]
Bound = Annotated[float, Range("> 0 (inf is no bound)", lambda value: value > 0)]
Share = Annotated[float, Range("in [0, 1]", lambda value: 0 <= value <= 1)]
OpenShare = Annotated[float, Range("in (0, 1)", lambda value: 0 < value < 1)]
EpisodeBatch = Annotated[int, Range("at least 10", lambda value: value >= 10), _WHOLE]
CostLimit = Annotated[float, Range(">= 0 (inf is unconstrained)", lambda value: value >= 0)]
Seconds = Annotated[float, Range(">= 0 (inf is until all is answered)", lambda value: value >= 0)]


@dataclass(frozen=True)
class RunArgs:
    """What scripts that train in envs take: where a run lies, how it is computed and shown."""

    eval_episodes: Count = 50
    """episodes of the final evaluation, stochastic and again deterministic"""
    capture_video: NonNegativeInt = 0
    """episodes to film, with the deterministic policy, as mp4 in the run's folder"""
    track: bool = False
    """log to Weights & Biases as well, if wandb is installed; WANDB_PROJECT names the project"""
    threads: Count = 1
    """threads of nets, trees and batched physics; with other counts nets round differently"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where the policy and its critics are"""
    resume: str | None = None
    """folder of a run to go on with; it keeps its own arguments. One that is finished goes on if a
    larger --total-timesteps is given"""
    runs_dir: str = "runs"
    """folder of all runs"""
    run_name: str | None = None
    """folder of this run; default: made of env, script, seed and time"""

    recipes: ClassVar[str] = ""
    """Whose recipes suit: the script that this one is, or was copied from."""
    checkpoint_interval: ClassVar[int] = 10
    """Iterations between two checkpoints."""


def with_lengths(args: Any) -> Any:
    """Return arguments with the lengths that were left open: of a rollout, and of its minibatches.

    λ is moved once per iteration, and needs some hundred moves to find its place: so the number of
    steps is such that there are about 250 iterations, but each has at least 100 steps per env.
    """
    if args.num_steps == 0 and args.num_envs > 0:
        wanted = round(args.total_timesteps / (_ITERATIONS * args.num_envs))
        args = replace(args, num_steps=min(max(wanted, 100), 1_000))
    if args.minibatch_size == 0:
        args = replace(args, minibatch_size=max(args.batch_size // 4, 1))
    return args


def check_args(args: Any) -> None:
    """Refuse arguments out of their range, before anything is made or trained.

    Raises:
        ValueError: If one is; or if the name of the run is a path, or PyTorch finds no GPU.
    """
    hints = get_type_hints(type(args), include_extras=True)
    for name in (field.name for field in fields(args)):
        value = getattr(args, name)
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        for found in ranges_of(hints[name]):
            if not all(isinstance(one, int | float) and found.holds(one) for one in values):
                raise ValueError(
                    f"--{name.replace('_', '-')} must be {found.rule}, got {value!r}; "
                    "--help says what it is"
                )
    given = {field.name: getattr(args, field.name) for field in fields(args)}
    run_name = given.get("run_name")
    if run_name is not None and (Path(run_name).name != run_name or run_name == ".."):
        raise ValueError(
            f"--run-name is the name of a folder in --runs-dir, got {run_name!r}; give the folder "
            "above it as --runs-dir"
        )
    if "num_steps" in given and args.minibatch_size > args.batch_size:
        raise ValueError(
            f"--minibatch-size must be at most num_envs * num_steps = {args.batch_size}, the size "
            f"of a rollout, got {args.minibatch_size}; lower it"
        )
    if "multiplier_cap" in given:
        lr, start, cap = (given[f"multiplier_{name}"] for name in ("lr", "initial", "cap"))
        if start > cap:
            raise ValueError(
                "λ starts at --multiplier-initial, which must be at most --multiplier-cap, got "
                f"{start:g} and {cap:g}; give --multiplier-initial {cap:g}, or raise "
                "--multiplier-cap"
            )
        if start == 0 < lr:
            raise ValueError(
                "λ moves by factors, so --multiplier-initial must be > 0 where it moves, got 0; "
                "give a small one, such as 0.03, or keep λ at 0 by --multiplier-lr 0"
            )
    if given.get("device") == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda needs a GPU that PyTorch can use, but torch.cuda.is_available() is "
            f"false with torch {torch.__version__}; install a CUDA build of PyTorch and a driver, "
            "or leave out --device"
        )
    if given.get("track") and find_spec("wandb") is None:
        raise ValueError(
            "--track logs to Weights & Biases, but wandb is not installed; pip install wandb, or "
            "leave out --track"
        )
    path = given.get("save_trajectories")
    if path is not None and args.resume is None and (Path(path) / "manifest.safetensors").exists():
        raise ValueError(
            f"--save-trajectories names a new folder, but {path} holds a dataset; choose another, "
            "or remove it"
        )
    dataset = given.get("dataset")
    if dataset is not None and not _is_dataset(dataset):
        what = "is none of these" if Path(dataset).exists() else "does not exist"
        raise ValueError(
            "--dataset names a folder of episodes, a local Minari dataset or a DSRL file, but "
            f"{dataset} {what}; correct the path, or wait until the run that writes it has begun"
        )


def _is_dataset(name: str) -> bool:
    """Whether something of the right kind is there; whether it can be read, its reader says."""
    path = Path(name)
    if path.is_file():  # DSRL's are HDF5
        with path.open("rb") as file:
            return file.read(len(_HDF5)) == _HDF5
    return (path / "manifest.safetensors").exists() or minari_folder(name) is not None


def slow_multiplier(
    args: Any, horizon: int | None = None, *, moved: tuple[int, int] | None = None
) -> str | None:
    """Say if λ moves too seldom in a run to find its place, however much everything costs.

    Args:
        args: Of a script, `with_lengths`.
        horizon: Time limit of the episodes, in steps; None if each iteration plays whole ones.
        moved: After the run: in how many iterations λ could move, and of how many.
    """
    moves = _moves(args, horizon, args.num_iterations) if moved is None else moved[0]
    if args.multiplier_lr == 0 or moves >= _FEWEST_MOVES:  # at 0 it is to stay as it is
        return None
    if moved is None:
        some = f"some {moves} times, once per {_pace(args, horizon)[2]}"
        said = f"λ will move {({0: 'never', 1: 'once'}).get(moves, some)}"
    else:
        said = f"λ could move in {moves or 'none'} of {moved[1]} iterations"
    fewer = ", or fewer --num-steps" if hasattr(args, "num_steps") else ""
    return (
        f"{said}, and needs {_FEWEST_MOVES} moves or more to find its place; give "
        f"{long_enough(args, horizon)}{fewer}"
    )


def long_enough(args: Any, horizon: int | None = None) -> str:
    """The flag for a run in which λ moves often enough; arguments as of `slow_multiplier`.

    Twice as long as this one if it should have been enough already: labels may have failed to come.
    """
    iterations = bisect_left(
        range(10**12), _FEWEST_MOVES, key=lambda number: _moves(args, horizon, number)
    )
    return longer(args, iterations if iterations > args.num_iterations else 2 * args.num_iterations)


def _moves(args: Any, horizon: int | None, iterations: int) -> int:
    """How often λ moves if all episodes last to their time limit."""
    first, gap, _ = _pace(args, horizon)
    return 0 if iterations < first else int((iterations - first) // gap) + 1


def _pace(args: Any, horizon: int | None) -> tuple[float, float, str]:
    """Iterations to the first move of λ, from one move to the next, and what comes with each."""
    first, gap, when = 1.0, 1.0, "iteration"
    if horizon is not None and args.num_steps < horizon:  # episodes start out of step (`envs.py`)
        first, gap = horizon / args.num_steps, max(1.0, horizon / args.batch_size)
        when = "episode" if gap > 1 else when
    # Other constraints are measured in every iteration: in envs a model judges all fresh episodes.
    if getattr(args, "constraint", None) == ("accept" if hasattr(args, "num_envs") else "rate"):
        every = args.finetune_interval
        first, gap, when = max(first, every), max(gap, every), "labelling round"
    return first, gap, when


def longer(args: Any, iterations: int) -> str:
    """The flag for a run of that many iterations of the same length."""
    if not hasattr(args, "total_timesteps"):
        return f"--num-iterations {iterations}"
    return f"--total-timesteps {iterations * args.batch_size}"


def ranges_of(hint: Any) -> Iterator[Range]:
    """The ranges in a type: of itself, of its elements, or of what it is if it is not None."""
    yield from (extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Range))
    for part in get_args(hint):
        if part is not Ellipsis and not isinstance(part, str):
            yield from ranges_of(part)
