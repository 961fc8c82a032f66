"""The proving ground as a table: all its tasks alike, whatever kind of env they are."""

from __future__ import annotations

from typing import NamedTuple

from pbcrl_envs.proving import highway
from pbcrl_envs.proving.base import Policy
from pbcrl_envs.proving.envs import ALL, SEALED
from pbcrl_envs.proving.ice import Ice


class Entry(NamedTuple):
    """One task: an env, its limit, and two scripted policies on batches of observations."""

    env_id: str
    """Gymnasium id, registered by `import pbcrl_envs`."""
    horizon: int
    """Steps after which an episode is truncated."""
    limit: float
    """d: highest mean episode cost that is still safe."""
    safe: Policy
    """Keeps the limit."""
    reckless: Policy
    """Has more return than `safe`, and breaks the limit."""
    sealed: bool
    """Whether it is for results alone."""


def _own(name: str) -> Entry:
    task = Ice if name == "Ice" else ALL[name]
    sealed = name == "Ice" or name in SEALED
    env_id = f"Proving{name}-v0"
    return Entry(env_id, task.horizon, task.cost_limit, task.safe, task.reckless, sealed)


GROUND: dict[str, Entry] = {
    **{name: _own(name) for name in (*ALL, "Ice")},
    "Merge": Entry(
        "DrivingMerge-v0", 100, 8.0, highway.merge_safe, highway.merge_reckless, sealed=False
    ),
    "Highway": Entry(
        "DrivingHighway-v0", 200, 10.0, highway.highway_safe, highway.highway_reckless, sealed=True
    ),
}
"""By name. Merge and Highway need the extra `driving` to be made, though not to be listed."""
