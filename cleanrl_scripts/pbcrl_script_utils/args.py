"""The scripts' arguments: parsed, checked before anything is made, restored by `--resume`."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import tyro
from gymnasium.error import DependencyNotInstalled

from pbcrl.errors import PbcrlError, StorageError
from pbcrl.storage import write_atomically
from pbcrl_script_utils.datasets import minari_folder
from pbcrl_script_utils.defaults import defaults_of
from pbcrl_script_utils.run import command_of

ArgsT = TypeVar("ArgsT")

SHOWN = {"print_interval", "track"}
"""Arguments that decide what is shown of a run; one that is resumed may have others."""

INTERRUPTED = 130
"""Exit status of a run that Ctrl-C ended, as shells have it."""

_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "at least 1": (
        "total_timesteps collect_timesteps num_envs num_steps update_epochs minibatch_size "
        "eval_episodes episodes checkpoint_interval torch_threads hidden_sizes cost_hidden_sizes "
        "cost_batch_size pretrain_epochs validate_every patience finetune_interval finetune_epochs "
        "queries segment_length label_annotators classifier_steps classifier_batch_size "
        "classifier_hidden_sizes buffer_size hash_bits max_trajectories batch_size num_iterations "
        "max_new_tokens max_length chunk_size cost_pairs",
        lambda value: value >= 1,
    ),
    "> 0 and finite": (
        "learning_rate cost_lr finetune_lr multiplier_lr classifier_lr clip_coef",
        lambda value: 0 < value < math.inf,
    ),
    "> 0 (inf is no bound)": (
        "max_grad_norm target_kl max_std multiplier_cap",
        lambda value: value > 0,
    ),
    "in [0, 1]": (
        "gamma gae_lambda lr_decay multiplier_warmup preference_noise safety_noise",
        lambda value: 0 <= value <= 1,
    ),
    ">= 0 and finite": (
        "bound_coef multiplier_initial multiplier_floor multiplier_proportional "
        "dead_zone dead_zone_lr snr_weight capture_video seed offline_queries online_queries "
        "kl_coef safety_weight cost_epochs print_interval",
        lambda value: 0 <= value < math.inf,
    ),
    "in (0, 1)": ("max_unsafe_rate", lambda value: 0 < value < 1),
    "at least 10": ("accept_batch", lambda value: value >= 10),
    "finite": ("initial_log_std", math.isfinite),
    ">= 0 (inf is unconstrained)": ("cost_limit", lambda value: value >= 0),
    ">= 0 (inf is until all is answered)": ("label_wait", lambda value: value >= 0),
}


def check_args(args: Any) -> None:
    """Refuse arguments out of their range, before anything is made or trained.

    Raises:
        ValueError: If one is; or if the name of the run is a path, or PyTorch finds no GPU.
    """
    given = dataclasses.asdict(args)
    for rule, (names, holds) in _RULES.items():
        for name in names.split():
            value = given.get(name)
            values = value if isinstance(value, tuple) else () if value is None else (value,)
            if not all(isinstance(each, int | float) and holds(each) for each in values):
                raise ValueError(f"--{name.replace('_', '-')} must be {rule}, got {value!r}")
    run_name = given.get("run_name")
    if run_name is not None and (Path(run_name).name != run_name or run_name == ".."):
        raise ValueError(
            f"--run-name is the name of a folder in --runs-dir, got {run_name!r}; give the folder "
            "above it as --runs-dir"
        )
    if "num_steps" in given and args.minibatch_size > args.batch_size:
        raise ValueError(
            f"--minibatch-size must be at most num_envs * num_steps = {args.batch_size}, the size "
            f"of a rollout, got {args.minibatch_size}"
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
    if dataset is not None and not Path(dataset).exists() and minari_folder(dataset) is None:
        raise ValueError(
            "--dataset names a folder of episodes, a local Minari dataset or a DSRL file, but "
            f"{dataset} does not exist"
        )


def resumed(args: ArgsT, *, script: str) -> ArgsT:
    """Return the arguments of the run to go on with, or `args` if `--resume` is not given.

    Raises:
        StorageError: If the folder holds no run of this script.
        ValueError: If that run is finished and `--extend-to` does not say how to go on, or the
            reverse, or other arguments are given along with `--resume`.
    """
    given = dataclasses.asdict(args)  # type: ignore[call-overload]
    extend_to = given.pop("extend_to", None)  # not every script has it
    if given["resume"] is None:
        if extend_to is not None:
            raise ValueError("--extend-to goes on with a finished run; name it by --resume")
        return args
    folder = Path(given["resume"])
    stored = read_args(folder)
    if stored.pop("script", None) != script:
        raise StorageError(
            f"--resume takes a run of {script}.py, {folder} holds one of another script; use that"
        )
    stored.pop("made_by", None)
    if extend_to is None and is_finished(folder):
        raise ValueError(
            f"--resume takes a run that was cut off, but {folder} is finished; extend it by "
            "--extend-to, or start another"
        )
    defaults = dataclasses.asdict(type(args)())  # type: ignore[call-overload]
    if "extend_to" in defaults:
        stored.setdefault("extend_to", None)  # of a run from before there was one
    stored = {name: tuple(v) if isinstance(v, list) else v for name, v in stored.items()}
    stored |= {name: given[name] for name in SHOWN if name in given}
    if unknown := sorted(set(stored) ^ set(defaults)):
        raise StorageError(
            f"{folder} was written by another version of {script}.py, which differs in "
            f"{', '.join(unknown)}; start a new run"
        )
    clashing = [n for n in given if given[n] not in (defaults[n], stored[n]) and n != "resume"]
    if clashing:
        raise ValueError(
            f"a resumed run keeps its arguments, but {', '.join(sorted(clashing))} differ from "
            f"those in {folder}; leave them out, or start a new run"
        )
    total = stored.get("total_timesteps", 0)
    if extend_to is not None:
        stored |= _extended(stored, extend_to)
    place = {"resume": str(folder), "runs_dir": str(folder.parent), "run_name": folder.name}
    again: ArgsT = dataclasses.replace(args, **(stored | place))  # type: ignore[type-var]
    if extend_to is not None:
        _check_extension(folder, again, before=total)
    return again


def _check_extension(folder: Path, args: Any, *, before: int) -> None:
    if not is_finished(folder):
        raise ValueError(
            f"--extend-to goes on with a finished run, but {folder} was cut off; finish it by "
            "--resume alone first"
        )
    done = -(-before // args.batch_size) * args.batch_size  # whole iterations
    if args.extend_to <= done:
        raise ValueError(
            f"--extend-to counts all env steps of the run, and {folder} has {done:,} already, got "
            f"{args.extend_to:,}; give more"
        )


def _extended(stored: Mapping[str, Any], extend_to: int) -> dict[str, Any]:
    """The arguments of a longer run, with labels as often as before and the same offline data."""
    total, changed = stored["total_timesteps"], {"extend_to": extend_to}
    changed["total_timesteps"] = extend_to
    if "online_queries" in stored:
        changed["online_queries"] = stored["online_queries"] * extend_to // total
        changed["collect_timesteps"] = stored["collect_timesteps"] or total
    return changed


def note_extension(folder: Path, changed: Mapping[str, Any]) -> None:
    """Turn a finished run into one that was cut off, with other arguments.

    Done once its checkpoint has been read, and not before: what cannot be extended stays finished.

    Args:
        folder: The run's.
        changed: The arguments of `_extended`.

    Raises:
        StorageError: If it cannot be written.
    """
    if not is_finished(folder):
        return  # noted already: the extension was cut off
    text = json.dumps({**read_args(folder), **changed}, indent=2)
    # In this order: at every moment it is a finished run, or one that was cut off.
    (folder / "summary.json").rename(folder / "summary_before.json")
    write_atomically(folder / "args.json", f"{text}\n".encode())


def read_args(folder: Path) -> dict[str, Any]:
    """Read `args.json` of a run.

    Raises:
        StorageError: If there is none, or it is not readable.
    """
    try:
        stored = json.loads((folder / "args.json").read_text())
        if not isinstance(stored, dict):
            raise ValueError(f"it holds {type(stored).__name__}, not an object")
    except (OSError, ValueError) as error:
        raise StorageError(
            f"a run's folder holds args.json, but {folder} has none that can be read ({error}); "
            "give the folder that the training script named, or start a new run"
        ) from error
    return stored


def is_finished(folder: Path) -> bool:
    """Whether a run has written its summary; an empty or torn file is no summary."""
    try:
        return bool(json.loads((folder / "summary.json").read_text()))
    except (OSError, ValueError):
        return False


def _parsed(args_type: type[ArgsT], words: list[str]) -> ArgsT:
    """Parse a command line; what a training script does by default depends on what is given."""
    script = str(sys.modules[args_type.__module__].__file__)
    shown = command_of(script)  # in the help
    # evaluate.py has none, and a resumed run keeps its own arguments.
    if not hasattr(args_type, "total_timesteps") or "--resume" in words:
        return tyro.cli(args_type, args=words, prog=shown)
    line = "\0".join(words)
    found = re.findall(r"(?:^|\0)--env[-_]id[=\0]([^\0]*)", line)
    asks = re.search(r"(?:^|\0)--label[-_]folder[=\0]", line) is not None
    by_people = asks and hasattr(args_type, "label_folder")
    env_id = found[-1] if found else str(getattr(args_type, "env_id", ""))
    default = args_type(**defaults_of(env_id, script=Path(script).stem, by_people=by_people))
    return tyro.cli(args_type, args=words, default=default, prog=shown)


def main(train: Callable[[Any], Any], args_type: type[Any], argv: list[str] | None = None) -> None:
    """Parse the arguments and train; errors that a user can fix are one line, not a traceback."""
    words = sys.argv[1:] if argv is None else argv
    # 1e6 counts steps as well as 1000000 does.
    words = [str(int(float(w))) if re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d+", w) else w for w in words]
    args = _parsed(args_type, words)
    try:
        train(args)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (
        ArithmeticError,
        DependencyNotInstalled,
        LookupError,
        MemoryError,
        OSError,
        PbcrlError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        if os.environ.get("PBCRL_TRACEBACK"):
            raise
        said = str(error) or "no message"
        if isinstance(error, ArithmeticError | LookupError | MemoryError | TypeError):
            said = f"{type(error).__name__}: {said}"
        sys.exit(f"error: {said}\n(PBCRL_TRACEBACK=1 shows where)")
