"""The policy that a run leaves, chosen by the cost model, and its file."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from pbcrl import Answers, Trainer, Trajectory
from pbcrl.constraint import Constraint
from pbcrl.errors import UnsupportedError
from pbcrl.export.policy import POLICY_FILE, Policy
from pbcrl.lagrange import LagrangeMultiplier
from pbcrl.storage import save_tensors
from pbcrl_script_utils.evaluation import play
from pbcrl_script_utils.run import Run

CHOICE_SEED = 1_400_000
"""Plus a run's own: of the episodes by which its policy is chosen."""


def policy_of(agent: Any, env_id: str) -> Policy | None:
    """Return the policy of a script's agent; it may share its memory.

    None if the agent was edited and acts otherwise than a `Policy` does.
    """
    names = "obs_mean", "obs_var", "low", "high"
    try:
        policy = Policy(
            _in_units_of_the_action(agent),
            log_std=agent.log_std + agent.half_range.log(),
            env_id=env_id,
            **{name: getattr(agent, name) for name in names},
        )
    except (AttributeError, TypeError, UnsupportedError, ValueError):
        return None
    # Without this a file would silently leave out an edited `act` or `normalize`.
    mean, std = (x.cpu().numpy() for x in (agent.obs_mean, agent.obs_var.sqrt()))
    probes = np.random.default_rng(0).normal(size=(8, len(mean))).astype(np.float32)
    probes[4:] *= 20  # beyond where a normaliser clips
    obs = mean + std * probes
    low, high = (x.cpu().numpy() for x in (agent.low, agent.high))
    acts_alike = np.allclose(policy(obs), agent.act(obs).clip(low, high), rtol=1e-4, atol=1e-5)
    return policy if acts_alike else None


def _in_units_of_the_action(agent: Any) -> nn.Sequential:
    """The net of the mean, its last layer rescaled from half ranges about the middle."""
    if bool((agent.half_range == 1).all()) and not bool(agent.middle.any()):
        net: nn.Sequential = agent.mean
        return net
    *layers, last = agent.mean
    rescaled = nn.Linear(last.in_features, last.out_features, device=last.weight.device)
    rescaled.weight.data = last.weight.data * agent.half_range[:, None]
    rescaled.bias.data = last.bias.data * agent.half_range + agent.middle
    return nn.Sequential(*layers, rescaled)


def save_agent(run: Run, agent: Any, env_id: str) -> None:
    """Write the agent, which training and evaluate.py go on with, and its policy, for all else."""
    path, meta = run.folder / "agent.safetensors", {"env_id": env_id}
    save_tensors(path, kind="agent", tensors=agent.state_dict(), meta=meta)
    policy = policy_of(agent, env_id)
    if policy is None:
        run.warn(
            f"there will be no {POLICY_FILE}: the agent was edited, and has layers or ways to act "
            "that this file cannot hold (pbcrl/export/policy.py); evaluate.py plays it still"
        )
        return
    policy.save(run.folder / POLICY_FILE)


class Candidates:
    """Policies of the training, of which one is left at the end.

    A policy that is trained against a limit swings about it, and the last one is any of them. So
    `NUMBER` of the last fifth, evenly spread, each play `EPISODES` fresh episodes, half of them
    with mean actions. Of those that the constraint calls safe the one of the highest return is
    taken. If there are none, the policy has left the limit for good, as where a price that falls
    leads into a dead end once more. Then one of before is taken: of each earlier fifth the last one
    that was measured within the limit plays, the newest first, until one is safe. A policy that
    started afresh (`DeadEnd`) for being unsafe was not measured so, and is none of them: it earns
    more where it is unsafe unnoticed. If none is safe, the nearest to it of the last fifth stays.
    Neither labels nor true costs have a part in it: the cost model judges.
    The best of several is partly the luckiest: evaluations and certificates play other episodes.
    """

    NUMBER = 5
    EPISODES = 20

    def __init__(self, num_iterations: int) -> None:
        spacing = max(1, num_iterations // (5 * self.NUMBER))
        self._last = num_iterations
        self._wanted = range(num_iterations, 0, -spacing)[: self.NUMBER]
        self._kept: dict[int, dict[str, Tensor]] = {}  # by iteration
        self._within: dict[int, dict[str, Tensor]] = {}  # likewise, at most one of each fifth

    def update(self, iteration: int, agent: nn.Module, *, is_within: bool = False) -> None:
        """Take note of the agent at the end of an iteration.

        Args:
            iteration: From 1 on.
            agent: As it is then.
            is_within: Whether its episodes were measured within what is allowed.
        """
        if iteration in self._wanted:
            self._kept[iteration] = copy.deepcopy(agent.state_dict())
        elif is_within and (fifth := self._fifth(iteration)) < 4:
            others = {n: old for n, old in self._within.items() if self._fifth(n) != fifth}
            self._within = {**others, iteration: copy.deepcopy(agent.state_dict())}

    def _fifth(self, iteration: int) -> int:
        return 5 * (iteration - 1) // self._last

    def choose(self, agent: nn.Module, judge: Callable[[], tuple[float | None, float]]) -> int:
        """Leave the agent with the weights of the best; return the iteration that they are of.

        Args:
            agent: Whose weights are put in.
            judge: Plays it; returns by how much it is above what is allowed, None if nothing can
                tell, and its mean return. The last one is taken if nothing can tell of any.
        """
        best, best_key = (self._last, self._kept[self._last]), (False, -math.inf)
        for iteration, state in self._kept.items():
            agent.load_state_dict(state)
            excess, mean_return = judge()
            if excess is not None:
                key = excess <= 0, mean_return if excess <= 0 else -excess
                if key >= best_key:  # the later one, if they are equal
                    best, best_key = (iteration, state), key
        if not best_key[0]:
            for iteration, state in sorted(self._within.items(), reverse=True):
                agent.load_state_dict(state)
                excess, _ = judge()
                if excess is not None and excess <= 0:
                    best = iteration, state
                    break
        chosen, weights = best
        agent.load_state_dict(weights)
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """All of them."""
        return {"kept": dict(self._kept), "within": dict(self._within)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; those of a shorter run are no candidates."""
        self._kept = {n: kept for n, kept in state["kept"].items() if n in self._wanted}
        self._within = dict(state.get("within", {}))  # older checkpoints have none


class DeadEnd:
    """A policy from which no way leads on starts afresh; the learned cost and the noise stay.

    A price moves a policy step by step, and there may be no way. *Unsafe whatever it pays* is one
    whose λ is dear, 1 or above, for a fifth of the training, while what is measured stays above
    twice what is allowed, and its excess falls by less than a tenth: it grew up under a cost that
    knew little, and goes from one thing that is not known yet to the next. One that is nearer to
    its limit is left to a rising λ. Afresh, under what all labels have told by now, and with λ as
    at first, it may do well where it did not. Where nearly all labels say unsafe, a tenth is
    enough: a pendulum that swings up too fast is too fast for longer if it slows down a little. If
    that was in vain as well, λ may rise to 3 at once. *Worse than untrained* is one that earns less
    than in its first episodes for a tenth of the training: it fled a high price into a corner, and
    stays there when λ has fallen. Where nearly all of those episodes were labelled unsafe, it may
    have to earn less. Either gets its nets' first weights back, as often as it holds, in the first
    half of the training. A policy has the rest for a better way. It applies to `--constraint rate`.

    Args:
        args: Of `ppo_lag_pbcrl.py`.
        agent: Whose first weights are kept; call this before any training.
        optimizer: Whose moments start afresh, too.
        multiplier: λ.
        say: Told why.
    """

    SHARE = 0.8
    """Of labels that say unsafe: nearly all, of which one in ten or so may be wrong."""
    FALLEN = 0.9
    """The newer half of a fifth of the training has less than this share of the older's excess."""
    FAR = 1.0
    """Excess over what is allowed, as a share of it, up to which a policy is near its limit."""
    HIGH = 3.0
    """λ that a policy may have at once after a fresh start that was in vain."""
    UNTRAINED = 20
    """Episodes, the first that ended: what a policy earns that is hardly trained."""

    def __init__(
        self,
        args: Any,
        agent: nn.Module,
        optimizer: Optimizer,
        multiplier: LagrangeMultiplier,
        *,
        say: Callable[[str], object],
    ) -> None:
        self._agent, self._optimizer, self._say = agent, optimizer, say
        self._multiplier = multiplier
        self._applies = args.constraint == "rate" and args.multiplier_lr > 0  # a λ that moves
        self._cap, self._total = args.multiplier_cap, args.num_iterations
        self._dear = min(self._cap, multiplier.dear)
        self._long = max(4, math.ceil(self._total / 10))  # iterations
        weights = agent.named_parameters()
        self._first = {name: w.detach().clone() for name, w in weights if name != "log_std"}
        # Iterations in a row that earn less than untrained, and the last after which a policy
        # started afresh, or 0.
        self._state = {"worse": 0, "after_unsafe": 0, "after_worse": 0}
        # While λ is high, of the newest fifth of the training: the excess over what is allowed, as
        # a share of it; of the newest tenth: iteration and share of unsafe labels.
        self._excess, self._rounds = list[float](), list[tuple[int, float]]()
        self._first_unsafe: float | None = None  # share of the first episodes that have a label

    def update(
        self,
        iteration: int,
        measured: float | None,
        allowed: float,
        ended: NDArray[np.float64],
        num_new: int,
        *,
        labelled: float | None,
    ) -> None:
        """Take note of an iteration, and start afresh if it was one too many.

        Args:
            iteration: From 1 on.
            measured: What moved λ; None if nothing did, which changes nothing.
            allowed: The highest of such figures that does not raise it.
            ended: Return and more of all episodes that have ended, (E, 2).
            num_new: How many of them, the last, in this iteration.
            labelled: Share of the newly labelled episodes that is unsafe; None if there is none.
        """
        if self._first_unsafe is None:
            self._first_unsafe = labelled
        if not self._applies or measured is None:
            return
        self._excess.append(measured / allowed - 1)
        if labelled is not None:
            self._rounds.append((iteration, labelled))
        if self._multiplier.value < self._dear * (1 - 1e-6):  # rounding
            self._excess, self._rounds = [], []
        self._excess = self._excess[-2 * self._long :]
        self._rounds = [one for one in self._rounds if one[0] > iteration - self._long]
        if num_new == 0:
            return
        if self._is_unsafe():
            why = f"λ was at {self._dear:g} or above, in vain"
            self._start(iteration, "unsafe", len(self._excess), why)
        returns = ended[:, 0]
        earns_less = bool(returns[-num_new:].mean() < returns[: self.UNTRAINED].mean())
        was_safe_too = self._first_unsafe is not None and self._first_unsafe < self.SHARE
        self._state["worse"] = self._state["worse"] + 1 if earns_less and was_safe_too else 0
        if self._state["worse"] >= self._long:
            why = "it earned less than in its first episodes"
            self._start(iteration, "worse", self._state["worse"], why)

    def _is_unsafe(self) -> bool:
        """Whether it is unsafe whatever it pays."""
        shares = [share for _, share in self._rounds]
        if len(self._excess) < self._long or not shares:  # without a label nothing new is known
            return False
        if float(np.mean(shares)) >= self.SHARE:
            return True
        if len(self._excess) < 2 * self._long:
            return False
        older, newer = np.reshape(self._excess, (2, self._long)).mean(axis=1).tolist()
        return bool(newer > max(self.FALLEN * older, self.FAR))

    def _start(self, iteration: int, kind: str, count: int, why: str) -> None:
        """Start afresh, unless half of the training is over."""
        if 2 * iteration > self._total:
            return
        with torch.no_grad():
            for name, weights in self._agent.named_parameters():
                if name in self._first:
                    weights.copy_(self._first[name])
        self._optimizer.state.clear()
        was_in_vain = kind == "unsafe" and self._state["after_unsafe"]
        self._multiplier.reset(ceiling=min(self._cap, self.HIGH) if was_in_vain else 0)
        self._state |= {"worse": 0, f"after_{kind}": iteration}
        self._excess, self._rounds = [], []
        self._say(
            f"iteration {iteration}: the policy starts afresh, since for {count} iterations {why}; "
            "the learned cost stays"
        )

    def summary(self) -> dict[str, int | None]:
        """What a run's summary has of it."""
        return {
            f"afresh_{kind}": self._state[f"after_{kind}"] or None for kind in ("unsafe", "worse")
        }

    def state_dict(self) -> dict[str, Any]:
        """What it has counted."""
        lists = {"excess": self._excess, "rounds": self._rounds}
        return {**self._state, "first_unsafe": self._first_unsafe, **lists}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        self._state = {name: state.get(name, 0) for name in self._state}
        self._first_unsafe, self._excess = state["first_unsafe"], list(state.get("excess", ()))
        self._rounds = [(int(at), float(share)) for at, share in state.get("rounds", ())]


def choose_policy(
    run: Run,
    agent: Any,
    args: Any,
    candidates: Candidates,
    trainer: Trainer,
    constraint: Constraint,
) -> dict[str, int]:
    """Choose among the candidates of a run by fresh episodes; return what its summary has of it.

    A constraint on batches, which are labelled, says nothing of them: the last one stays.
    """
    if constraint.batch:
        return {"chosen_iteration": args.num_iterations}

    def judge() -> tuple[float | None, float]:
        returns, episodes = list[float](), list[Trajectory]()
        for deterministic in (True, False):
            new, played = play(
                agent,
                args.env_id,
                episodes=Candidates.EPISODES // 2,
                seed=args.seed + CHOICE_SEED,
                deterministic=deterministic,
                needs_cost=False,
                threads=args.threads,
            )
            returns += new.tolist()
            episodes += played
        rule, cost_model = copy.deepcopy(constraint), trainer.model  # it has a memory
        measured, allowed = rule.measure(
            Answers(),
            cost_model.score(episodes),
            cost_model.learned_limit,
            by_marks=trainer.fits_marks,
        )
        return None if measured is None else measured - allowed, float(np.mean(returns))

    with run.phase("choose among the policies of the training", stage="choose"):
        chosen = candidates.choose(agent, judge)
        run.say(f"   that of iteration {chosen} of {args.num_iterations}")
    return {"chosen_iteration": chosen}
