"""Learn a cost and its limit from preferences, and constrain a policy by them (PbCRL).

The names that one needs, in the order in which data flows through them; each can be used alone:

- A `Trajectory` is a whole episode; a `Query` shows two of them, and a `Label` is the answer. A
  `BatchLabel` is the answer about many that are shown at once, `GridLabel` about each of them.
  `Marks` say which steps of one are unsafe.
- `RecordTrajectories` hands out the episodes of any Gymnasium vector env as they end;
  `finished_trajectories` reads them from its infos, or from those of the wrappers that follow.
- `PreferenceCostWrapper` and `PreferenceCostVectorWrapper` put the learned cost into `info["cost"]`
  of any Gymnasium env, and record too.
- `TreeCost` is a learned cost c(s, a) of boosted trees, `CostModel` one of a network, for images
  too, `CostModelEnsemble` several of these; `LearnedCost` is what all offer, and `load_cost_model`
  reads any of them from a file.
- `TreeTrainer` and `CostModelTrainer` fit them by `pbci_loss` (`preference_loss`, `safety_loss` and
  `snr_loss`, whose values are a `PbCILoss`) with a `DeadZone`; `Trainer` is what both offer.
- `LagrangeMultiplier` prices the learned cost while a policy is trained, once reward and cost have
  been divided by their `SignalScale`.
- An `Oracle` answers queries: `SyntheticOracle` from true costs, `FolderOracle` by a person,
  `FunctionOracle` by a function.
- `PreferenceBuffer` keeps labelled pairs of trajectories, or of segments (`cut_segments`);
  `draw_pairs` chooses which to ask about. A `FeedbackLoop` is all of this in two calls per
  iteration of a training loop; `Answers` is what a round of it brings.
- By these or by the learned cost, a `Constraint` says what moves the multiplier: `LearnedLimit`,
  `UnsafeRate` or `Acceptance`.
- `TrajectoryWriter` and `TrajectoryDataset` keep trajectories on disk.
- `load_policy` reads the policy of a run.
- `PbcrlError` is the base of all errors of `pbcrl.errors`.

All else is in its module: `pbcrl.metrics` compares learned with true costs, `pbcrl.epic` as
functions, `pbcrl.effects` says what a cost follows, `pbcrl.selection` chooses queries,
`pbcrl.recorder` and `pbcrl.spaces` are what the wrappers are made of, `pbcrl.storage` writes files,
`pbcrl.lagrange` and `pbcrl.oracle` have more of their kind, `pbcrl.llm.text` and
`pbcrl.llm.cost_head` are for language models.
"""

from pbcrl import metrics as metrics
from pbcrl.errors import PbcrlError
from pbcrl.trajectory import BatchLabel, GridLabel, Label, Marks, Query, Trajectory, cut_segments
from pbcrl.recorder import finished_trajectories
from pbcrl.vector_recorder import RecordTrajectories
from pbcrl.wrappers import PreferenceCostVectorWrapper, PreferenceCostWrapper
from pbcrl.cost_model import CostModel, LearnedCost
from pbcrl.trees import TreeCost
from pbcrl.ensemble import CostModelEnsemble, load_cost_model
from pbcrl.losses import PbCILoss, pbci_loss, preference_loss, safety_loss, snr_loss
from pbcrl.dead_zone import DeadZone
from pbcrl.trainer import CostModelTrainer, Trainer
from pbcrl.tree_trainer import TreeTrainer
from pbcrl.lagrange import LagrangeMultiplier
from pbcrl.scaling import SignalScale
from pbcrl.oracle import Oracle, SyntheticOracle
from pbcrl.label.function_oracle import FunctionOracle
from pbcrl.label.folder_oracle import FolderOracle
from pbcrl.buffer import PreferenceBuffer, draw_pairs
from pbcrl.feedback import Answers, FeedbackLoop
from pbcrl.constraint import Acceptance, Constraint, LearnedLimit, UnsafeRate
from pbcrl.data.dataset import TrajectoryDataset, TrajectoryWriter
from pbcrl.export.policy import load_policy

__version__ = "0.1.0"

__all__ = [
    "Acceptance",
    "Answers",
    "BatchLabel",
    "Constraint",
    "CostModel",
    "CostModelEnsemble",
    "CostModelTrainer",
    "DeadZone",
    "FeedbackLoop",
    "FolderOracle",
    "FunctionOracle",
    "GridLabel",
    "Label",
    "LagrangeMultiplier",
    "LearnedCost",
    "LearnedLimit",
    "Marks",
    "Oracle",
    "PbCILoss",
    "PbcrlError",
    "PreferenceBuffer",
    "PreferenceCostVectorWrapper",
    "PreferenceCostWrapper",
    "Query",
    "RecordTrajectories",
    "SignalScale",
    "SyntheticOracle",
    "Trainer",
    "Trajectory",
    "TrajectoryDataset",
    "TrajectoryWriter",
    "TreeCost",
    "TreeTrainer",
    "UnsafeRate",
    "cut_segments",
    "draw_pairs",
    "finished_trajectories",
    "load_cost_model",
    "load_policy",
    "pbci_loss",
    "preference_loss",
    "safety_loss",
    "snr_loss",
]
