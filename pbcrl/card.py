"""A model card: what a learned cost was learned from, what it follows, and what it is not for.

Markdown, for people. The scripts write one beside the cost model of each run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pbcrl.buffer import PreferenceBuffer
from pbcrl.cost_model import LearnedCost
from pbcrl.effects import Effect, effects, telling

_ALWAYS = (
    "It is valid where it has labels: on episodes like those that it was learned from. A policy "
    "that is trained under it looks for what it gets wrong; go on labelling, or check.",
    "Scores have no unit: compare them with the limit and with each other only.",
)


def model_card(
    model: LearnedCost,
    buffer: PreferenceBuffer,
    *,
    title: str = "Cost model",
    about: Mapping[str, str] | None = None,
    sections: Mapping[str, Sequence[str]] | None = None,
    warnings: Sequence[str] = (),
    found: Sequence[Effect] | None = None,
) -> str:
    """Return the card of a cost model, as Markdown.

    Args:
        model: Trees or networks, once trained.
        buffer: What it was trained on.
        title: The heading of the card.
        about: Further rows of the table at its top: name to text.
        sections: Further sections, before the warnings: heading to lines.
        warnings: Further warnings.
        found: What `main_effects` has returned; None calls it.

    Raises:
        ValueError: If the buffer's trajectories do not have the sizes that the model reads.
    """
    for trajectory in buffer.trajectories:
        model._check_sizes(trajectory.obs.shape[1:], trajectory.actions.shape[1])
    if found is None:
        found = main_effects(model, buffer)
    shares = buffer.safe_shares
    num_safe, num_unsafe = int((shares > 0.5).sum()), int((shares < 0.5).sum())
    rows = {
        "reads": f"raw observations {model.obs_shape}, executed actions ({model.act_dim},)",
        "limit": f"{model.learned_limit:g} {_of_what(model, buffer)}",
        "labels": f"{len(buffer):,} pairs of {buffer.num_compared:,} episodes or segments; "
        f"{num_safe:,} of these were called safe, {num_unsafe:,} unsafe",
        **(about or {}),
    }
    texts = {
        "What it learned": _learned(model, found),
        **(sections or {}),
        "Warnings": [f"- {text}" for text in (*warnings, *_ALWAYS)],
        "Use": [
            "```python",
            "from pbcrl import PreferenceCostWrapper, load_cost_model",
            "",
            'model, info = load_cost_model("cost_model.safetensors")',
            "env = PreferenceCostWrapper(env, model)  # info['cost']",
            "is_safe = model.score(trajectories) <= model.learned_limit",
            "```",
        ],
    }
    lines = [
        f"# {title}",
        "",
        "A cost per step, learned from comparisons of episodes. One is safe if",
        "the sum of its costs is at most the limit.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in rows.items()),
    ]
    for heading, text in texts.items():
        lines += ["", f"## {heading}", "", *text]
    return "\n".join([*lines, ""])


def main_effects(
    model: LearnedCost, buffer: PreferenceBuffer, *, names: Sequence[str] | None = None
) -> list[Effect] | None:
    """Return what a cost follows most, on the trajectories that it was trained on.

    Args:
        model: Trees or networks.
        buffer: What it was trained on.
        names: Of its inputs, as `pbcrl.effects.effects` takes them.

    Returns:
        As `pbcrl.effects.telling`; None if the model reads images, or was trained on nothing.
    """
    if len(model.obs_shape) != 1 or not buffer.trajectories:
        return None
    rng = np.random.default_rng(0)  # the same card for the same model
    found = effects(model, buffer.trajectories, rng=rng, safe=buffer.safe_shares, names=names)
    return telling(found)


def _of_what(model: LearnedCost, buffer: PreferenceBuffer) -> str:
    """What the limit is one of."""
    if model.horizon is not None:
        return f"per episode, of at most {model.horizon:,} steps"
    lengths = sorted({len(trajectory) for trajectory in buffer.trajectories})
    if not lengths:
        return "per episode, of any length"
    shown = " to ".join(f"{length:,}" for length in dict.fromkeys((lengths[0], lengths[-1])))
    return f"for what was compared, of {shown} steps"


def _learned(model: LearnedCost, found: Sequence[Effect] | None) -> list[str]:
    """The inputs that the cost follows most, as a table."""
    if len(model.obs_shape) != 1:
        return ["It reads images, of which no single number says anything."]
    if found is None:
        return ["Not known: it was trained on nothing."]
    if not found:
        return ["Nothing: no input makes a difference to the cost."]
    return [
        "| input | share | effect |",
        "|---|---|---|",
        *(f"| {e.name} | {e.importance:.0%} | {e.rule} |" for e in found),
        "",
        "The share is how much the cost of a step changes if this input is replaced by that of "
        "another step, as a part of the cost's spread; for max and min all inputs of the group "
        "are. Shares can add to more than 100 %.",
    ]
