"""The names of the top level of `pbcrl`, in reading order; it explains them."""

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
