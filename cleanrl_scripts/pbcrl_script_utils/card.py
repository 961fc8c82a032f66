"""The model card of a run, and what its cost follows, as files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from pbcrl import LearnedCost, PreferenceBuffer
from pbcrl.card import main_effects, model_card
from pbcrl.effects import Effect, Threshold
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
    "true_cost_at_limit_evaluation": "true cost at which the learned cost is at its limit, on the "
    "episodes of the evaluation",
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
    effects = main_effects(cost_model, buffer, names=names_of(envs))
    if effects is not None:
        saved = json.dumps([asdict(effect) for effect in effects], default=np.ndarray.tolist)
        write_atomically(folder / EFFECTS, saved.encode())
    text = _text(args, summary, cost_model, buffer, effects)
    write_atomically(folder / CARD, text.encode())


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
    buffer: PreferenceBuffer,
    effects: Sequence[Effect] | None,
) -> str:
    made_by = args["made_by"]
    number, measured = summary["test_episodes"], {k: summary[k] for k in _MEASURES}
    known = {k: v for k, v in measured.items() if v is not None}
    accuracy = [f"- {_MEASURES[k]}: {v:.3g}" for k, v in known.items()]
    # What a summary has as null is undefined.
    numbers = {k: float("nan") if v is None else v for k, v in summary.items()}
    commit = f", commit {made_by['commit']}" if made_by["commit"] else ""
    return model_card(
        cost_model,
        buffer,
        title=f"Cost model for {args['env_id']}",
        about={
            "env": f"`{args['env_id']}`",
            "labelled by": _labeller(args, summary["cost_limit"]),
            "queries": f"{summary['queries_used']:,}",
            "made by": f"pbcrl {made_by['pbcrl']}{commit}: `{made_by['command']}`",
        },
        sections={
            f"Accuracy, on {number} test episodes": accuracy
            or ["Not known: it takes true costs on both sides of a known limit."],
            "Verdict": [f"- {text}" for text in cost_model_verdicts(numbers)] or ["None."],
        },
        warnings=summary["warnings"],
        found=effects,
    )


def _labeller(args: Mapping[str, Any], limit: float | None) -> str:
    if args["label_folder"] is not None:
        return f"people, {args['label_annotators']} per question"
    noise = args["preference_noise"], args["safety_noise"]
    shown = "" if noise == (0, 0) else f"; {noise[0]:.0%} and {noise[1]:.0%} of answers flipped"
    return f"a simulated oracle, from true costs with the limit {limit:g}{shown}"
