"""The model card: what a cost model was learned from, how good it is, and what it is not for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from pbcrl import LearnedCost, PreferenceBuffer
from pbcrl.effects import Effect, Threshold, effects, telling
from pbcrl.errors import StorageError
from pbcrl.spaces import names_of
from pbcrl.storage import write_atomically
from pbcrl_script_utils.resume import read_args
from pbcrl_script_utils.verdict import cost_model_verdicts

CARD = "cost_model.md"
EFFECTS = "effects.json"
"""What the card lists of the labelled episodes, whole, for `evaluate --plots`."""
_MEASURES = {
    "balanced_accuracy": "balanced accuracy, safe against unsafe (guessing: 0.5)",
    "pair_accuracy": "pairs ordered as by the true cost (guessing: 0.5)",
    "step_auroc": "AUROC of single steps, costly against free (guessing: 0.5)",
    "base_rate": "share of the majority, safe or unsafe",
    "true_cost_at_limit_evaluation": "true cost at which the learned cost is at its limit",
}


def write_card(
    folder: Path, cost_model: LearnedCost, buffer: PreferenceBuffer, envs: VectorEnv
) -> None:
    """Write `cost_model.md`, and `effects.json`, beside the cost model of a finished run.

    Args:
        folder: The run's; it has `args.json` and `summary.json`.
        cost_model: As it is at the end of the run.
        buffer: What it was trained on.
        envs: They name its inputs.

    Raises:
        StorageError: If it cannot be written.
    """
    args, summary = read_args(folder), json.loads((folder / "summary.json").read_text())
    found = _effects(cost_model, buffer, envs)
    if found is not None:
        saved = json.dumps([asdict(effect) for effect in found], default=np.ndarray.tolist)
        write_atomically(folder / EFFECTS, saved.encode())
    learned = _learned(cost_model, found)
    write_atomically(folder / CARD, _text(args, summary, cost_model, learned).encode())


def read_effects(folder: Path) -> list[Effect] | None:
    """Return what the cost of a finished run follows, over the episodes that were labelled.

    Returns:
        As `pbcrl.effects.telling`; None if the run has not ended, reads images, or learned nothing.

    Raises:
        StorageError: If `effects.json` is not as `write_card` has written it.
    """
    path = folder / EFFECTS
    if not path.exists():
        return None
    try:
        return [
            Effect(
                name=one["name"],
                group=one["group"],
                importance=one["importance"],
                spread=one["spread"],
                edges=np.array(one["edges"], float),
                costs=np.array(one["costs"], float),
                thresholds=tuple(Threshold(**threshold) for threshold in one["thresholds"]),
                bins=np.array(one["bins"], float),
                shares={kind: np.array(counts, float) for kind, counts in one["shares"].items()},
            )
            for one in json.loads(path.read_text())
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(
            f"{path} says what a learned cost follows, as training has written it, but cannot be "
            f"read: {error!r}; delete it, and the episodes that are played take its place"
        ) from error


def _text(
    args: Mapping[str, Any],
    summary: Mapping[str, Any],
    cost_model: LearnedCost,
    learned: list[str],
) -> str:
    made_by = args["made_by"]
    limit = summary["cost_limit"]
    number, measured = summary["test_episodes"], {k: summary[k] for k in _MEASURES}
    known = {k: v for k, v in measured.items() if v is not None}
    accuracy = [f"- {_MEASURES[k]}: {v:.3g}" for k, v in known.items()]
    # What a summary has as null is undefined.
    numbers = {k: float("nan") if v is None else v for k, v in summary.items()}
    warnings = [*cost_model_verdicts(numbers), *summary["warnings"]]
    return "\n".join(
        [
            f"# Cost model for {args['env_id']}",
            "",
            "A cost per step, learned from comparisons of episodes. One is safe if",
            "the sum of its costs is at most the limit.",
            "",
            "| | |",
            "|---|---|",
            f"| env | `{args['env_id']}` |",
            f"| reads | raw observations {cost_model.obs_shape}, executed actions "
            f"({cost_model.act_dim},) |",
            f"| limit | {cost_model.learned_limit:g} per episode, {_horizon(cost_model)} |",
            f"| labelled by | {_labeller(args, limit)} |",
            f"| queries | {summary['queries_used']:,}, over {summary['compared_episodes']:,} "
            "different episodes for training |",
            f"| made by | pbcrl {made_by['pbcrl']}, commit {made_by['commit']}: "
            f"`{made_by['command']}` |",
            "",
            "## What it learned",
            "",
            *learned,
            "",
            f"## Accuracy, on {number} test episodes",
            "",
            *(accuracy or ["Not known: it takes true costs on both sides of a known limit."]),
            "",
            "## Warnings",
            "",
            *(f"- {text}" for text in warnings),
            "- It is valid where it has labels: on episodes like those of this run. A policy that "
            "is trained under it looks for what it gets wrong; go on labelling, or check.",
            "- Scores have no unit: compare them with the limit and with each other only.",
            "",
            "## Use",
            "",
            "```python",
            "from pbcrl import PreferenceCostWrapper, load_cost_model",
            "",
            'model, info = load_cost_model("cost_model.safetensors")',
            "env = PreferenceCostWrapper(env, model)  # info['cost']",
            "is_safe = model.score(trajectories) <= model.learned_limit",
            "```",
            "",
        ]
    )


def _effects(
    cost_model: LearnedCost, buffer: PreferenceBuffer, envs: VectorEnv
) -> list[Effect] | None:
    """What the cost follows most; None if it reads images, or was trained on nothing."""
    if len(cost_model.obs_shape) != 1 or not buffer.trajectories:
        return None
    found = effects(
        cost_model,
        buffer.trajectories,
        rng=np.random.default_rng(0),
        safe=buffer.safe_shares,
        names=names_of(envs),
    )
    return telling(found)


def _learned(cost_model: LearnedCost, found: Sequence[Effect] | None) -> list[str]:
    """The inputs that the cost follows most, as a table."""
    if len(cost_model.obs_shape) != 1:
        return ["It reads images, of which no single number says anything."]
    if found is None:
        return ["Not known: it was trained on nothing."]
    rows = [f"| {e.name} | {e.importance:.0%} | {e.rule} |" for e in found]
    if not rows:
        return ["Nothing: no input makes a difference to the cost."]
    return [
        "| input | share | effect |",
        "|---|---|---|",
        *rows,
        "",
        "The share is how far the cost of a step moves, of its spread, if this input alone is "
        "that of another step; for max and min, all sensors of that kind are. Shares overlap.",
    ]


def _horizon(cost_model: LearnedCost) -> str:
    steps = cost_model.horizon
    return "of any length" if steps is None else f"of at most {steps:,} steps"


def _labeller(args: Mapping[str, Any], limit: float | None) -> str:
    if args["label_folder"] is not None:
        return f"people, {args['label_annotators']} per question"
    noise = args["preference_noise"], args["safety_noise"]
    shown = "" if noise == (0, 0) else f"; {noise[0]:.0%} and {noise[1]:.0%} of answers flipped"
    return f"a simulated oracle, from true costs with the limit {limit:g}{shown}"
