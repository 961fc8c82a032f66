"""Learn a cost and its limit from preferences, and constrain a policy by them (PbCRL).

The pieces, in the order in which data flows through them; each can be used alone:

- `PreferenceCostWrapper`, `PreferenceCostVectorWrapper` put the learned cost into `info["cost"]` of
  any Gymnasium env and hand out each finished `Trajectory` (`finished_trajectories`), with
  observations and actions as rows (`obs_rows`, `action_rows`).
- An `Oracle` turns each `Query` into a `Label`: `SyntheticOracle` from true costs, like a `Teacher`
  with this or that weakness; a person through a `FolderOracle`; a function by a `FunctionOracle`,
  which logs all that it answers; `ReplayOracle` gives earlier labels again.
- `PreferenceBuffer` keeps labelled pairs of trajectories, or of segments (`cut_segments`);
  `draw_pairs` and the `SELECTIONS` choose which to ask about; a `FeedbackLoop` is all of this in
  three calls per iteration of a training loop.
- `CostModel` is c_ψ(s, a), `CostModelEnsemble` several of them, `LearnedCost` what both offer;
  `CostModelTrainer` fits either by `pbci_loss` with a `DeadZone`.
- A `Multiplier` prices the learned cost while a policy is trained: `LagrangeMultiplier` by Adam,
  `AscentMultiplier`, `SoftplusMultiplier` and `PIDMultiplier` by other rules.
- `cost_model_report` and its parts compare learned with true episode costs, `epic_distance` learned
  with true step costs.
- `save_tensors`, `TrajectoryWriter`, `TrajectoryDataset`, `LabelLog` keep everything on disk;
  what is wrong with a file is a `StorageError`, as all states worth catching are a `PbcrlError`.
"""

from pbcrl.errors import (
    BudgetError,
    CorruptFileError,
    FormatVersionError,
    LabelError,
    MismatchError,
    MissingCostError,
    NonFiniteError,
    PbcrlError,
    StorageError,
)
from pbcrl.trajectory import Label, PairBatch, Query, Trajectory, cut_segments
from pbcrl.spaces import act_dim_of, action_rows, obs_rows, obs_shape_of
from pbcrl.losses import PbCILoss, pbci_loss, preference_loss, safety_loss, snr_loss
from pbcrl.dead_zone import DeadZone
from pbcrl.lagrange import (
    MULTIPLIER_RULES,
    AscentMultiplier,
    LagrangeMultiplier,
    Multiplier,
    PIDMultiplier,
    SoftplusMultiplier,
)
from pbcrl.cost_model import CostModel, LearnedCost
from pbcrl.ensemble import CostModelEnsemble, load_cost_model
from pbcrl.oracle import (
    TEACHERS,
    DelayedOracle,
    Oracle,
    ReplayOracle,
    SyntheticOracle,
    Teacher,
    make_teacher,
)
from pbcrl.buffer import PreferenceBuffer, draw_pairs
from pbcrl.function_oracle import FunctionOracle
from pbcrl.folder_oracle import FolderOracle
from pbcrl.selection import SELECTIONS, Selection
from pbcrl.feedback import FeedbackLoop
from pbcrl.trainer import CostModelTrainer, Evaluation
from pbcrl.recorder import TrajectoryRecorder, diverged_envs, finished_trajectories, step_costs
from pbcrl.wrappers import PreferenceCostVectorWrapper, PreferenceCostWrapper
from pbcrl.distributions import (
    conditional_value_at_risk,
    cvar_error,
    skewness,
    tail_quantile_error,
    w2_scaled,
    w2_zscored,
    wasserstein2,
)
from pbcrl.metrics import (
    accuracy,
    auroc,
    balanced_accuracy,
    base_rate,
    bias,
    cost_model_report,
    expected_calibration_error,
    pair_accuracy,
    preference_calibration_error,
    safety_calibration_error,
    spearman,
    type_ii_rate,
    violation_gap,
)
from pbcrl.epic import epic_distance
from pbcrl.storage import load_tensors, save_tensors
from pbcrl.label_log import LabelLog, query_digest, read_labels
from pbcrl.dataset import TrajectoryDataset, TrajectoryWriter

__version__ = "0.1.0"

__all__ = [
    "MULTIPLIER_RULES",
    "SELECTIONS",
    "TEACHERS",
    "AscentMultiplier",
    "BudgetError",
    "CorruptFileError",
    "CostModel",
    "CostModelEnsemble",
    "CostModelTrainer",
    "DeadZone",
    "DelayedOracle",
    "Evaluation",
    "FeedbackLoop",
    "FolderOracle",
    "FormatVersionError",
    "FunctionOracle",
    "Label",
    "LabelError",
    "LabelLog",
    "LagrangeMultiplier",
    "LearnedCost",
    "MismatchError",
    "MissingCostError",
    "Multiplier",
    "NonFiniteError",
    "Oracle",
    "PIDMultiplier",
    "PairBatch",
    "PbCILoss",
    "PbcrlError",
    "PreferenceBuffer",
    "PreferenceCostVectorWrapper",
    "PreferenceCostWrapper",
    "Query",
    "ReplayOracle",
    "Selection",
    "SoftplusMultiplier",
    "StorageError",
    "SyntheticOracle",
    "Teacher",
    "Trajectory",
    "TrajectoryDataset",
    "TrajectoryRecorder",
    "TrajectoryWriter",
    "accuracy",
    "act_dim_of",
    "action_rows",
    "auroc",
    "balanced_accuracy",
    "base_rate",
    "bias",
    "conditional_value_at_risk",
    "cost_model_report",
    "cut_segments",
    "cvar_error",
    "diverged_envs",
    "draw_pairs",
    "epic_distance",
    "expected_calibration_error",
    "finished_trajectories",
    "load_cost_model",
    "load_tensors",
    "make_teacher",
    "obs_rows",
    "obs_shape_of",
    "pair_accuracy",
    "pbci_loss",
    "preference_calibration_error",
    "preference_loss",
    "query_digest",
    "read_labels",
    "safety_calibration_error",
    "safety_loss",
    "save_tensors",
    "skewness",
    "snr_loss",
    "spearman",
    "step_costs",
    "tail_quantile_error",
    "type_ii_rate",
    "violation_gap",
    "w2_scaled",
    "w2_zscored",
    "wasserstein2",
]
