"""The tasks of the proving ground as Gymnasium envs, alone or as a batch."""

from __future__ import annotations

from typing import Any, NoReturn

from gymnasium.vector import AutoresetMode

from pbcrl_envs.batched import BatchedEnv
from pbcrl_envs.checks import check_task
from pbcrl_envs.proving.base import ProvingTask
from pbcrl_envs.proving.development import Crash, Cruise, Gap, Hole, Swing
from pbcrl_envs.proving.sealed import Channel, Kiln, Storage, Thicket, Tow
from pbcrl_envs.single import SingleEnv

DEVELOPMENT: dict[str, type[ProvingTask]] = {
    task.name: task for task in (Cruise, Gap, Hole, Swing, Crash)
}
"""By name: what settings may be chosen on."""
SEALED: dict[str, type[ProvingTask]] = {
    task.name: task for task in (Channel, Kiln, Storage, Thicket, Tow)
}
"""By name: what is for results alone."""
ALL = DEVELOPMENT | SEALED


class ProvingEnv(SingleEnv):
    """One copy of a task of the proving ground; nothing is drawn.

    Args:
        task: Its name.
        render_mode: None.

    Raises:
        ValueError: If there is no such task.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, *, task: str, render_mode: str | None = None) -> None:
        check_task(task, ALL)
        super().__init__(ALL[task](1), render_mode=render_mode, painter=_nothing)


class ProvingVectorEnv(BatchedEnv):
    """N copies of a task of the proving ground; nothing is drawn.

    Args:
        num_envs: N >= 1.
        task: Its name.
        max_episode_steps: Steps after which an episode is truncated; default: the task's horizon.
        autoreset_mode: NEXT_STEP or SAME_STEP, as the member or as its value ("NextStep").
        render_mode: None.

    Raises:
        ValueError: If there is no such task, or another argument is out of its range.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int,
        *,
        task: str,
        max_episode_steps: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
    ) -> None:
        check_task(task, ALL)
        simulation = ALL[task](num_envs)
        super().__init__(
            simulation,
            max_episode_steps=simulation.horizon
            if max_episode_steps is None
            else max_episode_steps,
            autoreset_mode=autoreset_mode,
            render_mode=render_mode,
            painter=_nothing,
        )


def _nothing(_: str) -> NoReturn:
    raise NotImplementedError  # no render mode is offered
