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
    followed: Sequence[Effect] | None = None,
) -> str:
    """Return the card of a cost model, as Markdown.

    Args:
        model: Trees or networks, once trained.
        buffer: What it was trained on.
        title: Its first line.
        about: More rows of its first table, by name.
        sections: More of them by heading, in lines, before the warnings.
        warnings: More of them.
        followed: As `followed_inputs` returns it; None calls it.

    Raises:
        ValueError: If the buffer's trajectories do not have the sizes that the model reads.
    """
    if followed is None:
        followed = followed_inputs(model, buffer)
    shares = buffer.safe_shares
    num_safe, num_unsafe = int((shares > 0.5).sum()), int((shares < 0.5).sum())
    steps = model.horizon
    rows = {
        "reads": f"raw observations {model.obs_shape}, executed actions ({model.act_dim},)",
        "limit": f"{model.learned_limit:g} per episode, "
        + ("of any length" if steps is None else f"of at most {steps:,} steps"),
        "labels": f"{len(buffer):,} pairs of {len(buffer.trajectories):,} episodes or segments; "
        f"{num_safe:,} of these were called safe, {num_unsafe:,} unsafe",
        **(about or {}),
    }
    said = {
        "What it learned": _learned(model, buffer, followed),
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
    for heading, text in said.items():
        lines += ["", f"## {heading}", "", *text]
    return "\n".join([*lines, ""])


def followed_inputs(
    model: LearnedCost, buffer: PreferenceBuffer, *, names: Sequence[str] | None = None
) -> list[Effect]:
    """Return what a cost follows most over its labelled trajectories; nothing of images.

    Args:
        model: Trees or networks.
        buffer: What it was trained on; without a trajectory nothing is known.
        names: Of its inputs, as `pbcrl.effects.effects` takes them.
    """
    if len(model.obs_shape) != 1 or not buffer.trajectories:
        return []
    rng = np.random.default_rng(0)  # the same card for the same model
    found = effects(model, buffer.trajectories, rng=rng, safe=buffer.safe_shares, names=names)
    return telling(found)


def _learned(model: LearnedCost, buffer: PreferenceBuffer, followed: Sequence[Effect]) -> list[str]:
    """The inputs that the cost follows most, as a table."""
    if len(model.obs_shape) != 1:
        return ["It reads images, of which no single number says anything."]
    if not buffer.trajectories:
        return ["Not known: it was trained on nothing."]
    if not followed:
        return ["Nothing: no input makes a difference to the cost."]
    return [
        "| input | share | effect |",
        "|---|---|---|",
        *(f"| {e.name} | {min(e.importance, 1):.0%} | {e.rule} |" for e in followed),
        "",
        "The share is how far the cost of a step moves, of its spread, if this input alone is "
        "that of another step; for max and min, all sensors of that kind are. Shares overlap.",
    ]
