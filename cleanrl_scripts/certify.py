"""Certify a policy: how often it is unsafe at most, by fresh episodes that somebody judges.

`pbcrl certify runs/NAME` plays episodes that the run has never seen with the policy that it leaves,
policy.safetensors. People say which of them are safe, through a label folder, or the true cost
does. What comes out is written into the run's folder and its model card.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from pbcrl import FolderOracle, Trajectory, TrajectoryDataset, TrajectoryWriter
from pbcrl.env_modules import env_id_flag
from pbcrl.errors import StorageError
from pbcrl.export.policy import POLICY_FILE, Policy, load_policy
from pbcrl.label.store import INTRO, read_intro
from pbcrl.oracle import GRID
from pbcrl.storage import FolderLock, make_folder, sync_folder, write_atomically
from pbcrl_script_utils.args import CostLimit, Count, NonNegativeInt, OpenShare, check_args
from pbcrl_script_utils.card import CARD
from pbcrl_script_utils.certificate import (
    CERTIFICATES,
    CONFIDENCE,
    Certificate,
    read_certificates,
    sha256,
    show_certificates,
    write_certificates,
)
from pbcrl_script_utils.envs import resolve_cost_limit
from pbcrl_script_utils.evaluation import play, true_costs
from pbcrl_script_utils.launch import main
from pbcrl_script_utils.policies import CHOICE_SEED, Candidates
from pbcrl_script_utils.replays import Replays
from pbcrl_script_utils.resume import is_finished, read_args
from pbcrl_script_utils.run import command_of

QUESTIONS = "certificate"
"""Folder in a run's for what people are asked, and for the episodes that they are asked about."""
AGAIN_AFTER = 2_000_000
"""Times the iteration, added to the seed of the training where a run goes on (section Setup)."""


@dataclass(frozen=True)
class Args:
    run: Annotated[str, tyro.conf.Positional]
    """folder of the run"""
    env_id: str | None = None
    """that of the policy once more, 'module:Id-v0', if its module is your own and not installed"""
    label_folder: str | None = None
    """where people judge the episodes (pbcrl label FOLDER), twelve at a time; default: certificate
    in the run's folder if people labelled for the run, else the true cost judges"""
    cost_limit: CostLimit | None = None
    """d, highest safe episode cost, if the true cost judges; default: the one of the run"""
    max_unsafe_rate: OpenShare | None = None
    """p*, what P(unsafe) has to be below at 95 %; default: that of the run if it was trained with
    --constraint rate, else 0.05"""
    episodes: Count | None = None
    """episodes to judge; default: 60, or more if p* takes more, in grids of twelve"""
    seed: NonNegativeInt = 1_500_000
    """of the first episode, the next have the next ones; not in use by training or evaluation"""
    stochastic: bool = False
    """sample actions instead of taking their mean"""
    threads: Count = 1
    """threads of nets and batched physics"""


class Shipped:
    """A policy from its file, as `play` takes one."""

    def __init__(self, policy: Policy, *, seed: int) -> None:
        self._policy, self._rng = policy, np.random.default_rng(seed)

    def act(self, obs: np.ndarray, noise: torch.Generator | None = None) -> np.ndarray:
        """Return actions (N, act_dim); the mean without noise."""
        return self._policy(obs, rng=None if noise is None else self._rng)


def judging_limit(args: Args, trained: dict[str, Any], env_id: str) -> float | None:
    """Return the highest episode cost that is safe; None if people judge.

    Raises:
        MissingCostError, ValueError: If there is none, or one for which there is no use.
    """
    if args.label_folder is not None or trained.get("label_folder") is not None:
        if args.cost_limit is None:
            return None
        asked = "they labelled for this run" if args.label_folder is None else "--label-folder"
        raise ValueError(
            f"a cost limit is for the true cost, but people judge ({asked}), got --cost-limit "
            f"{args.cost_limit:g}; leave it out"
        )
    given = trained["cost_limit"] if args.cost_limit is None else args.cost_limit
    limit = resolve_cost_limit(env_id, given)
    if not math.isfinite(limit):
        raise ValueError(
            "what is safe must be known: the run has no limit; give --cost-limit, or "
            "--label-folder to ask people"
        )
    return limit


def request(
    args: Args, trained: dict[str, Any], policy: Policy, *, sha256: str, limit: float | None
) -> Certificate:
    """Return the certificate that is asked for, before anything is judged."""
    rate = args.max_unsafe_rate
    if rate is None:
        rate = trained["max_unsafe_rate"] if trained.get("constraint") == "rate" else 0.05
    enough = math.log(1 - CONFIDENCE) / math.log1p(-rate)  # episodes, if none is unsafe
    return Certificate(
        policy="stochastic" if args.stochastic else "deterministic",
        env_id=policy.env_id,
        seed=args.seed,
        episodes=args.episodes or max(60, math.ceil(enough / GRID) * GRID),
        unsafe=None,
        judged_by="people" if limit is None else f"the true cost, at most {limit:g}",
        max_unsafe_rate=rate,
        sha256=sha256,
        label_folder=args.label_folder and str(Path(args.label_folder).resolve()),
    )


def check_begun(folder: Path, new: Certificate, known: Sequence[Certificate]) -> None:
    """Refuse another certificate of a policy before the one that was begun is finished.

    Else one could look at the answers, and leave out those that say no.

    Raises:
        ValueError: If one was begun.
    """
    for one in known:
        if one.unsafe is None and one.sha256 == new.sha256 and one != new:
            words = ["--seed", one.seed, "--episodes", one.episodes]
            words += ["--max-unsafe-rate", one.max_unsafe_rate]
            words += ["--label-folder", one.label_folder] if one.label_folder else []
            words += ["--stochastic"] if one.policy == "stochastic" else []
            command = command_of("certify", folder, *words, *env_id_flag(one.env_id))
            raise ValueError(
                f"a certificate that was begun is finished before another of the same policy, or "
                f"failures could be left out, but that of the seeds {one.seeds[0]} to "
                f"{one.seeds[-1]} waits for answers; finish it: {command}"
            )


def first_use(
    seeds: range, trained: dict[str, Any], earlier: Sequence[Certificate]
) -> tuple[str, range] | None:
    """Return what else has played some of these seeds, and which it played; None if nothing has."""
    seed = trained["seed"]
    # Offline episodes, then the run's own; an env without a state begins again where a run goes on.
    begun = [s for first in (seed, seed + 500_000) for s in range(first, seeds.stop, AGAIN_AFTER)]
    used = [
        *(("training", range(s, s + trained["num_envs"])) for s in begun),
        ("evaluation", range(seed + 1_000_000, seed + 1_000_000 + trained["eval_episodes"])),
        (
            "the choice of the policy",
            range(seed + CHOICE_SEED, seed + CHOICE_SEED + Candidates.EPISODES),
        ),
        *((f"certificate {i}", one.seeds) for i, one in enumerate(earlier, start=1)),
    ]
    clashes = ((what, s) for what, s in used if s.start < seeds.stop and seeds.start < s.stop)
    return next(clashes, None)


def check_fresh(new: Certificate, trained: dict[str, Any], earlier: Sequence[Certificate]) -> None:
    """Refuse episodes that somebody has looked at, since the policy may have been chosen by them.

    Raises:
        ValueError: If there are some.
    """
    found = first_use(new.seeds, trained, earlier)
    if found is None:
        return
    what, used = found
    free = Args.seed
    while clash := first_use(range(free, free + new.episodes), trained, earlier):
        free = clash[1].stop
    raise ValueError(
        f"a certificate is by episodes that nothing was chosen by, but the seeds "
        f"{max(new.seeds.start, used.start)} to {min(new.seeds.stop, used.stop) - 1} belong to "
        f"{what}; give --seed {free}"
    )


def kept_episodes(args: Args, policy: Policy, new: Certificate, path: Path) -> list[Trajectory]:
    """Return the episodes to judge, played once: an env may play others the next time.

    They are in a dataset, with how they can be drawn.
    """
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        make_folder(partial)
        replays = Replays(partial)
        episodes = fresh_episodes(args, policy, new, replays=replays)
        with TrajectoryWriter(
            partial,
            env_id=new.env_id,
            obs_shape=episodes[0].obs.shape[1:],
            act_dim=episodes[0].actions.shape[1],
            horizon=max(map(len, episodes)),
            capacity=new.episodes,
            rng=np.random.default_rng(0),  # draws nothing: all are kept
            overwrite=True,
        ) as writer:
            for one in episodes:
                writer.add(one)
        replays.sync()
        replays.close()
        partial.rename(path)
        sync_folder(path.parent)
    return TrajectoryDataset(path, env_id=new.env_id)[:]


def fresh_episodes(
    args: Args, policy: Policy, new: Certificate, *, replays: Replays | None = None
) -> list[Trajectory]:
    """Play the episodes of a certificate; with true costs, if nobody is to see them."""
    _, episodes = play(
        Shipped(policy, seed=args.seed),
        new.env_id,
        episodes=new.episodes,
        seed=args.seed,
        deterministic=not args.stochastic,
        needs_cost=replays is None,
        threads=args.threads,
        replays=replays,
    )
    return episodes


def take_rule(folder: Path, trained: dict[str, Any]) -> None:
    """Copy what counts as unsafe from where people labelled for the run, if nothing says it yet."""
    if read_intro(folder):
        return
    labelled = trained.get("label_folder")
    if rule := "" if labelled is None else read_intro(labelled):
        write_atomically(folder / INTRO, rule.encode())
    else:
        print(f"   nobody has written down what counts as unsafe: {folder / INTRO} may say it")


def judged_by_people(
    args: Args,
    trained: dict[str, Any],
    new: Certificate,
    episodes: list[Trajectory],
    replays: Replays,
) -> np.ndarray:
    """Return whether people call each episode safe, (E,); waits for them.

    "I can't tell" is not safe.
    """
    folder = Path(args.label_folder or Path(args.run) / QUESTIONS)
    oracle = FolderOracle(
        folder,
        run=f"certificate of {Path(args.run).resolve()}, seed {args.seed}",
        show=replays.of,
        say=lambda text: print(f"   {text}", flush=True),
    )
    with closing(oracle), closing(replays):
        take_rule(folder, trained)
        grids = [episodes[start : start + GRID] for start in range(0, len(episodes), GRID)]
        named = " ".join(["", *env_id_flag(new.env_id)])
        print(f"   {len(grids)} questions wait: pbcrl label {folder}{named}", flush=True)
        labels = oracle.label_grids(grids)
    safe: np.ndarray = np.array([one for label in labels for one in label.safe]) == 1
    return safe


def certify(args: Args) -> Certificate:
    """Play, have judged, and write down what that says; see the module.

    What was asked for before is not played again. Where people judge, it goes on with the answers
    that are there, corrected ones too; what the true cost has said is said once more.
    """
    check_args(args)
    torch.set_num_threads(args.threads)
    folder = Path(args.run)
    trained = read_args(folder)
    with FolderLock(folder):  # no training meanwhile, and no other certificate
        if not is_finished(folder):
            raise StorageError(
                f"a certificate is about the policy that a run leaves at its end, but {folder} has "
                "no summary.json: it was cut off; go on with it by --resume first"
            )
        file = folder / POLICY_FILE
        policy, digest = load_policy(folder), sha256(file)
        if args.env_id not in (None, policy.env_id):
            raise ValueError(
                f"a policy is certified where it was trained, in {policy.env_id}, got --env-id "
                f"{args.env_id}; leave it out, or give that one"
            )
        limit = judging_limit(args, trained, policy.env_id)
        new = request(args, trained, policy, sha256=digest, limit=limit)
        known = read_certificates(folder)
        check_begun(folder, new, known)
        same = [one for one in known if one.begun == new]
        if not same:
            check_fresh(new, trained, known)
        before = same[-1] if same and same[-1] != new else None
        place = folder / QUESTIONS / f"{new.policy}-{new.seed}-{new.episodes}-{digest[:12]}"
        if before is not None and (limit is not None or not place.exists()):
            made = before
        elif limit is not None:
            safe = true_costs(fresh_episodes(args, policy, new)) <= limit
            made = replace(new, unsafe=int((~safe).sum()))
        else:
            episodes = kept_episodes(args, policy, new, place)
            if not same:  # before anybody sees them, so that what was seen cannot be left out
                write_certificates(folder, [*known, new])
            safe = judged_by_people(args, trained, new, episodes, Replays(place))
            made = replace(new, unsafe=int((~safe).sum()))
        # Before it is written: the bound may fail.
        said = f"{made} ({made.policy} policy, judged by {made.judged_by})"
        if made != before:
            known = [*(one for one in known if one != new), made]
            write_certificates(folder, known)
        if file.exists() and sha256(file) == digest:
            show_certificates(folder / CARD, [one for one in known if one.sha256 == digest])
        else:
            said += f", of a policy that is no longer there: {POLICY_FILE} has changed meanwhile"
        if before is not None and made != before:
            print(f"   answers were corrected, both results stay in {CERTIFICATES}: {before}")
        print(said)
    return made


if __name__ == "__main__":
    main(certify, Args)
