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
functions, `pbcrl.effects` says what a cost follows, `pbcrl.card` writes it down, `pbcrl.selection`
chooses queries, `pbcrl.recorder` and `pbcrl.spaces` are what the wrappers are made of,
`pbcrl.storage` writes files, `pbcrl.lagrange` and `pbcrl.oracle` have more of their kind,
`pbcrl.llm.text` and `pbcrl.llm.cost_head` are for language models.
"""

# No import that another module could stand in for: under `python -m pbcrl.label`, Python looks for
# modules in the working directory until `pbcrl.label.__main__` stops it.
import importlib

TYPE_CHECKING = False  # as `typing` has it

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pbcrl import metrics as metrics
    from pbcrl._names import *
    from pbcrl._names import __all__ as __all__
else:
    del TYPE_CHECKING

    # At the first use of a name, and not before: PyTorch takes seconds, which `pbcrl --version` and
    # `pbcrl label --help` need not wait.
    def __getattr__(name: str) -> object:
        names = vars(importlib.import_module("pbcrl._names"))
        globals().update({one: names[one] for one in names.get("__all__", ())})
        if name == "__all__" and name in names:
            return names[name]
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module 'pbcrl' has no attribute {name!r}")

    def __dir__() -> list[str]:
        __getattr__("metrics")
        return sorted(globals())
