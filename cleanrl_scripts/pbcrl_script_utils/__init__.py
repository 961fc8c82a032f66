"""What the training scripts share and no algorithm cares about.

Arguments and their ranges, envs by id, run folders, checkpoints, evaluation, and who labels.
"""

from pbcrl_script_utils.args import (
    Bound,
    CostLimit,
    Count,
    EpisodeBatch,
    Finite,
    NonNegative,
    NonNegativeInt,
    OpenShare,
    Positive,
    RunArgs,
    Seconds,
    Share,
    check_args,
    with_lengths,
)
from pbcrl_script_utils.card import write_card
from pbcrl_script_utils.checkpoint import Checkpoint, has_state
from pbcrl_script_utils.collect import Collector, offline_episodes
from pbcrl_script_utils.datasets import open_dataset
from pbcrl_script_utils.envs import (
    action_bounds,
    flat_dims,
    horizon_of,
    make_envs,
    outcomes,
    resolve_cost_limit,
    start_episodes,
)
from pbcrl_script_utils.evaluation import Judge, evaluate, report_pretrained
from pbcrl_script_utils.labels import check_labels, make_oracle
from pbcrl_script_utils.launch import main
from pbcrl_script_utils.monitor import LabelMonitor
from pbcrl_script_utils.policies import Candidates, DeadEnd, choose_policy, save_agent
from pbcrl_script_utils.replays import RecordStarts, Replays
from pbcrl_script_utils.rollout import Rollout
from pbcrl_script_utils.run import Run

__all__ = [
    "Bound",
    "Candidates",
    "Checkpoint",
    "Collector",
    "CostLimit",
    "Count",
    "DeadEnd",
    "EpisodeBatch",
    "Finite",
    "Judge",
    "LabelMonitor",
    "NonNegative",
    "NonNegativeInt",
    "OpenShare",
    "Positive",
    "RecordStarts",
    "Replays",
    "Rollout",
    "Run",
    "RunArgs",
    "Seconds",
    "Share",
    "action_bounds",
    "check_args",
    "check_labels",
    "choose_policy",
    "evaluate",
    "flat_dims",
    "has_state",
    "horizon_of",
    "main",
    "make_envs",
    "make_oracle",
    "offline_episodes",
    "open_dataset",
    "outcomes",
    "report_pretrained",
    "resolve_cost_limit",
    "save_agent",
    "start_episodes",
    "with_lengths",
    "write_card",
]
