"""The paper's experiments as data: which runs a table needs, and what the paper found.

`benchmark.py` makes the runs, `report.py` the tables. Every variant is one command; its options are
those in which it differs from the defaults of its script.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pbcrl_envs
from pbcrl_script_utils.recipes import (
    BLOCK,
    BUTTON,
    CHEETAH,
    GOAL,
    HUMANOID,
    LANE,
    PUSH,
    TOY,
    WALKER,
    recipe_of,
)

SCRIPTS = Path(__file__).parents[1]
"""Folder of the training scripts."""


@dataclass(frozen=True)
class Variant:
    """A method, or an ablation of one."""

    title: str
    """As the tables call it."""
    script: str
    """Without the `.py`."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Flags, without their dashes."""
    episodes: str = "ppo_lag"
    """The variant whose episodes it learns from, or is tested on."""
    without_limit: str | None = None
    """The variant that it is where its cost limit is the task's own."""
    shifted: bool = False
    """Whether its cost limit is not the true one, but only what labels go by."""


@dataclass(frozen=True)
class Table:
    """One table of the paper: its rows are tasks, its columns variants."""

    title: str
    tasks: tuple[str, ...]
    variants: tuple[str, ...]
    metrics: tuple[str, ...]
    """Keys of `report.METRICS`."""
    paper: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """What the paper has, by task and metric, in the order of the variants; empty if nothing."""
    heads: tuple[str, ...] = ()
    """Titles of the variants in this table, if not their own."""

    def head(self, variant: str) -> str:
        if self.heads:
            return self.heads[self.variants.index(variant)]
        return VARIANTS[variant].title


def held(value: float) -> dict[str, object]:
    """Options of a λ that stays at a value, which may be above a recipe's cap."""
    return {"multiplier-lr": 0, "multiplier-initial": value, "multiplier-cap": value}


# The paper's: its network, its dead zone, its constraint.
NET = {"cost-model": "net", "dead-zone": 1.0}
BY_COST = {**NET, "constraint": "learned"}
BT = {**BY_COST, "dead-zone": 0, "dead-zone-lr": 0, "snr-weight": 0}

VARIANTS = {
    "ppo_lag": Variant("PPO-Lag (oracle)", "ppo_lag"),
    "pbcrl": Variant("PbCRL", "ppo_lag_pbcrl", BY_COST),
    "pbcrl_rate": Variant("PbCRL, rate of labels", "ppo_lag_pbcrl", {**NET, "constraint": "rate"}),
    "pbcrl_accept": Variant("PbCRL, acceptance", "ppo_lag_pbcrl", {**NET, "constraint": "accept"}),
    "pbcrl_constant": Variant(
        "PbCRL, constant λ",
        "ppo_lag_pbcrl",
        {**BY_COST, **held(5)},
    ),
    "pbcrl_offline": Variant(
        "PbCRL-Offline",
        "ppo_lag_pbcrl",
        {**BY_COST, "offline-queries": 20_000, "online-queries": 0},
    ),
    "rlsf": Variant("RLSF", "ppo_lag_rlsf", {"queries": 20_000}),
    "ppo_bt": Variant("PPO-BT", "ppo_lag_pbcrl", BT),
    "ppo_bt_online": Variant(
        "PPO-BT, online",
        "ppo_lag_pbcrl",
        {**BT, "offline-queries": 0, "online-queries": 20_000},
    ),
}
"""Methods, on equal budgets of 20,000 queries, and their ablations."""

MANY: Mapping[str, object] = {"offline-queries": 0, "online-queries": 20_000}
FEW: Mapping[str, object] = {"offline-queries": 350, "online-queries": 150}
for _name, _options in (("labels", {}), ("learned", {"constraint": "learned"})):
    _trees, _net = {"cost-model": "trees", **_options}, {**NET, **_options}
    for _variant, _title, _all in (
        (f"trees_{_name}", f"trees, {_name}", {**_trees, **MANY}),
        (f"trees_{_name}_500", f"trees, {_name}, 500 queries", {**_trees, **FEW}),
        (f"net_{_name}_500", f"net, {_name}, 500 queries", {**_net, **FEW}),
    ):
        VARIANTS[_variant] = Variant(f"PbCRL, {_title}", "ppo_lag_pbcrl", _all)

METHODS = "ppo_lag", "pbcrl", "rlsf", "ppo_bt"  # the paper's
DEAD_ZONES, SNR_WEIGHTS = (0, 0.1, 1, 2), (1e-2, 1e-3, 1e-5, 0)
LIMITS, NOISES = (20, 18, 15, 10), (0, 5, 10, 30)


def ablation(name: str, of: str, options: Mapping[str, object], setting: str, **others: Any) -> str:
    """Add a variant that differs from another by a few options; return its name."""
    base = VARIANTS[of]
    VARIANTS[name] = replace(
        base, title=f"{base.title}, {setting}", options={**base.options, **options}, **others
    )
    return name


for _name in ("labels", "learned"):
    ablation(
        f"trees_{_name}_online_500",
        f"trees_{_name}_500",
        {"offline-queries": 0, "online-queries": 500},
        "all online",
    )
DEAD_ZONE = tuple(
    # δ = 1 is PbCRL itself. ζ and the adaptation stay as they are.
    "pbcrl"
    if value == 1
    else ablation(f"dead_zone_{value}", "pbcrl", {"dead-zone": value}, f"δ = {value}")
    for value in DEAD_ZONES
)
SNR = tuple(
    "pbcrl"
    if value == 1e-3
    else ablation(f"snr_{value:g}", "pbcrl", {"snr-weight": value}, f"ζ = {value:g}")
    for value in SNR_WEIGHTS
)
# The oracle labels by a stricter limit; what the policy costs is held against the task's own.
OFFSETS = tuple(
    "ppo_bt"
    if value == 20
    else ablation(
        f"ppo_bt_limit_{value}",
        "ppo_bt",
        {"cost-limit": value},
        f"labels at {value}",
        shifted=True,
    )
    for value in LIMITS
)
UNIFORM = tuple(
    ablation(
        f"{method}_uniform",
        method,
        {"cost-limit": 20},
        "d = 20",
        episodes="ppo_lag_uniform",
        without_limit=method,
    )
    for method in METHODS
)
NOISE = tuple(
    method
    if noise == 0
    else ablation(
        f"{method}_noise_{noise}", method, {"preference-noise": noise / 100}, f"{noise} % noise"
    )
    for method in ("pbcrl", "ppo_bt")
    for noise in NOISES
)
# The recipe's labels, and a price of cost that does not follow them.
CONSTANTS = (0.3, 0.5, 1, 2, 5)
CONSTANT = tuple(
    ablation(
        f"pbcrl_constant_{value}",
        "pbcrl_rate",
        held(value),
        f"constant λ = {value}",
    )
    for value in CONSTANTS
)
DEAD_ZONE_HEADS = tuple(f"δ = {value:g}" for value in DEAD_ZONES)
SNR_HEADS = tuple(f"ζ = {value:g}" for value in SNR_WEIGHTS)
CONSTANT_HEADS = (*(f"constant λ = {value}" for value in CONSTANTS), "PbCRL, rate of labels")
OFFSET_HEADS = ("PbCRL", *(f"PPO-BT, labels at {value}" for value in LIMITS))
NOISE_HEADS = tuple(f"{method}, {noise} %" for method in ("PbCRL", "PPO-BT") for noise in NOISES)
SAFETY_NOISE = tuple(
    method
    if noise == 0
    else ablation(
        f"{method}_safety_noise_{noise}", method, {"safety-noise": noise / 100}, f"{noise} % of ε"
    )
    for method in ("pbcrl", "ppo_bt")
    for noise in NOISES
)

ROBOTS = CHEETAH, WALKER, HUMANOID, GOAL, PUSH, BUTTON

RETURN, COST, LEARNED, ACCURACY = "return", "true_cost", "learned_cost", "accuracy"
OUTCOME = RETURN, COST, "violation_rate", "return_stochastic", "true_cost_stochastic"

TABLES = {
    "results": Table(
        "Results on Safety-Gymnasium's tasks",
        ROBOTS,
        (*METHODS, "pbcrl_accept", "pbcrl_constant"),
        OUTCOME,
        {
            (CHEETAH, RETURN): ("2619 ± 124", "2367 ± 138", "2084 ± 126", "2494 ± 195"),
            (CHEETAH, COST): ("4.82 ± 0.91", "4.66 ± 1.03", "3.26 ± 0.78", "5.58 ± 2.14"),
            (WALKER, RETURN): ("3057 ± 142", "2659 ± 133", "2415 ± 120", "2807 ± 156"),
            (WALKER, COST): ("4.88 ± 1.02", "4.62 ± 0.97", "3.66 ± 0.85", "4.91 ± 1.11"),
            (HUMANOID, RETURN): ("5876 ± 210", "5247 ± 149", "4816 ± 180", "5948 ± 225"),
            (HUMANOID, COST): ("5.03 ± 1.93", "4.85 ± 1.21", "4.05 ± 1.12", "5.89 ± 2.05"),
            (GOAL, RETURN): ("23.50 ± 1.14", "23.41 ± 1.08", "5.78 ± 1.07", "24.26 ± 0.99"),
            (GOAL, COST): ("20.70 ± 1.91", "18.50 ± 2.03", "8.20 ± 2.21", "26.97 ± 2.62"),
            (PUSH, RETURN): ("4.77 ± 0.67", "3.20 ± 0.38", "1.07 ± 0.35", "4.09 ± 0.57"),
            (PUSH, COST): ("36.17 ± 5.00", "34.86 ± 3.13", "20.05 ± 3.56", "41.85 ± 5.65"),
            (BUTTON, RETURN): ("8.96 ± 1.06", "8.73 ± 0.78", "-2.01 ± 0.37", "9.01 ± 1.51"),
            (BUTTON, COST): ("38.25 ± 5.20", "37.51 ± 5.65", "4.26 ± 3.33", "50.78 ± 8.10"),
        },
    ),
    "navigation": Table(
        "Navigation: return, cost, learned cost, accuracy",
        (GOAL, PUSH, BUTTON),
        (*METHODS, "pbcrl_accept", "pbcrl_constant"),
        (RETURN, COST, LEARNED, ACCURACY),
        {
            (GOAL, LEARNED): ("", "0.50 ± 1.26", "89.52 ± 8.07", "0.12 ± 1.36"),
            (GOAL, ACCURACY): ("", "0.87 ± 0.02", "0.83 ± 0.02", "0.85 ± 0.01"),
            (PUSH, LEARNED): ("", "-0.73 ± 0.78", "80.48 ± 9.00", "1.62 ± 0.46"),
            (PUSH, ACCURACY): ("", "0.86 ± 0.03", "0.80 ± 0.02", "0.84 ± 0.02"),
            (BUTTON, LEARNED): ("", "-0.12 ± 0.60", "78.04 ± 4.80", "-0.51 ± 0.95"),
            (BUTTON, ACCURACY): ("", "0.80 ± 0.03", "0.73 ± 0.03", "0.82 ± 0.02"),
        },
    ),
    "w2": Table(
        "W2 of learned and true costs, and |cost - limit|",
        (GOAL, PUSH, BUTTON),
        ("pbcrl", "rlsf", "ppo_bt", "pbcrl_accept"),
        (
            "w2_scaled",
            "w2_offset",
            "w2_shape",
            "w2_raw",
            "w2_zscored",
            "bias",
            "step_auroc",
            "true_cost_at_limit",
        ),
        {
            (GOAL, "w2_scaled"): ("16.8", "68.1", "42.7"),
            (GOAL, "bias"): ("1.5", "11.8", "6.9"),
            (PUSH, "w2_scaled"): ("20.3", "82.4", "36.5"),
            (PUSH, "bias"): ("0.1", "14.9", "6.8"),
            (BUTTON, "w2_scaled"): ("44.3", "165.5", "78.8"),
            (BUTTON, "bias"): ("2.5", "35.7", "10.78"),
        },
    ),
    "driving": Table(
        "Driving",
        (BLOCK, LANE),
        (*METHODS, "pbcrl_rate", "pbcrl_constant"),
        OUTCOME,
        {
            (BLOCK, RETURN): ("39.1 ± 0.1", "36.4 ± 0.3", "31.8 ± 0.3", "38.5 ± 0.6"),
            (BLOCK, COST): ("0.05 ± 0.01", "0.07 ± 0.01", "0.05 ± 0.01", "0.12 ± 0.02"),
            (LANE, RETURN): ("51.6 ± 0.9", "51.4 ± 0.5", "44.9 ± 0.8", "51.5 ± 0.8"),
            (LANE, COST): ("0.01 ± 0.01", "0.08 ± 0.01", "0.06 ± 0.01", "0.14 ± 0.02"),
        },
    ),
    "dead_zone": Table(
        "The dead zone δ",
        (GOAL, PUSH),
        DEAD_ZONE,
        ("w2_scaled", RETURN, COST, ACCURACY),
        {
            (GOAL, "w2_scaled"): ("38.9", "33.5", "16.8", "29.1"),
            (GOAL, RETURN): ("24.55 ± 1.01", "24.79 ± 1.18", "23.41 ± 1.08", "22.51 ± 1.05"),
            (GOAL, COST): ("28.05 ± 2.55", "27.46 ± 1.89", "18.50 ± 2.03", "16.49 ± 2.18"),
            (GOAL, ACCURACY): ("0.84 ± 0.02", "0.85 ± 0.02", "0.87 ± 0.03", "0.88 ± 0.02"),
            (PUSH, "w2_scaled"): ("36.1", "35.8", "20.3", "23.6"),
            (PUSH, RETURN): ("4.15 ± 0.55", "3.81 ± 0.21", "3.20 ± 0.38", "2.96 ± 0.35"),
            (PUSH, COST): ("42.50 ± 5.50", "40.26 ± 2.15", "34.86 ± 3.13", "30.91 ± 1.78"),
            (PUSH, ACCURACY): ("0.83 ± 0.03", "0.85 ± 0.01", "0.86 ± 0.03", "0.86 ± 0.03"),
        },
        heads=DEAD_ZONE_HEADS,
    ),
    "offsets": Table(
        "PPO-BT, labelled by stricter limits than the true one, 20",
        (GOAL,),
        ("pbcrl", *OFFSETS),
        (RETURN, COST),
        {
            (GOAL, RETURN): (
                "23.41 ± 1.08",
                "24.26 ± 0.99",
                "23.86 ± 1.21",
                "23.15 ± 1.05",
                "18.27 ± 1.13",
            ),
            (GOAL, COST): (
                "18.50 ± 2.03",
                "26.97 ± 2.62",
                "24.08 ± 2.87",
                "20.82 ± 2.05",
                "14.02 ± 1.95",
            ),
        },
        heads=OFFSET_HEADS,
    ),
    "snr": Table(
        "The weight ζ of the variance term",
        (GOAL,),
        SNR,
        ("return_mid", "true_cost_mid", "return_last_tenth", "true_cost_last_tenth"),
        {
            (GOAL, "return_mid"): ("3.8 ± 2.2", "22.9 ± 1.5", "22.5 ± 1.3", "22.1 ± 1.1"),
            (GOAL, "true_cost_mid"): ("17.9 ± 8.1", "18.4 ± 2.3", "24.5 ± 2.5", "24.8 ± 2.8"),
            (GOAL, "return_last_tenth"): ("6.5 ± 1.8", "23.4 ± 1.1", "20.6 ± 1.6", "20.7 ± 1.4"),
            (GOAL, "true_cost_last_tenth"): (
                "21.9 ± 5.9",
                "18.5 ± 2.0",
                "19.2 ± 2.2",
                "18.4 ± 2.6",
            ),
        },
        heads=SNR_HEADS,
    ),
    "two_stage": Table(
        "Two stages or one",
        (GOAL, PUSH),
        ("pbcrl_offline", "pbcrl"),
        (RETURN, COST),
        {
            (GOAL, RETURN): ("24.79 ± 1.75", "23.41 ± 1.08"),
            (GOAL, COST): ("22.70 ± 0.84", "18.50 ± 2.03"),
            (PUSH, RETURN): ("3.77 ± 0.67", "3.20 ± 0.38"),
            (PUSH, COST): ("37.48 ± 5.00", "34.86 ± 3.13"),
        },
    ),
    "uniform": Table(
        "One limit, 20, for all robots",
        ROBOTS,
        UNIFORM,
        (RETURN, COST),
        {
            (CHEETAH, RETURN): ("2803", "2565", "2316", "2687"),
            (CHEETAH, COST): ("20.78", "20.25", "14.52", "22.50"),
            (WALKER, RETURN): ("3075", "2790", "2587", "2853"),
            (WALKER, COST): ("19.54", "17.84", "13.87", "20.43"),
            (HUMANOID, RETURN): ("6248", "5761", "5483", "6103"),
            (HUMANOID, COST): ("19.68", "19.20", "17.27", "21.84"),
            (GOAL, RETURN): ("23.50", "23.41", "5.78", "24.26"),
            (GOAL, COST): ("20.70", "18.50", "8.20", "26.97"),
            (PUSH, RETURN): ("1.81", "1.77", "0.73", "1.90"),
            (PUSH, COST): ("19.82", "20.66", "14.42", "28.21"),
            (BUTTON, RETURN): ("2.62", "1.78", "-2.73", "1.97"),
            (BUTTON, COST): ("18.50", "19.10", "3.37", "25.72"),
        },
    ),
    "noise": Table(
        "W2 with flipped preferences",
        (GOAL, BLOCK),
        NOISE,
        ("w2_scaled",),
        {
            (GOAL, "w2_scaled"): ("16.8", "24.5", "36.8", "82.8", "42.7", "53.4", "60.1", "79.6"),
            (BLOCK, "w2_scaled"): ("5.9", "6.9", "7.3", "9.4", "6.0", "6.9", "7.2", "10.2"),
        },
        heads=NOISE_HEADS,
    ),
    # Beyond the paper.
    "safety_noise": Table(
        "W2 with flipped safety labels",
        (GOAL, BLOCK),
        SAFETY_NOISE,
        ("w2_scaled", RETURN, COST),
        heads=NOISE_HEADS,
    ),
    "constant": Table(
        "A constant λ on the driving tasks",
        (BLOCK, LANE),
        (*CONSTANT, "pbcrl_rate"),
        OUTCOME,
        heads=CONSTANT_HEADS,
    ),
    "online": Table(
        "PPO-BT with all queries online", (GOAL,), ("ppo_bt", "ppo_bt_online"), (RETURN, COST)
    ),
    "toy": Table(
        "Every method on the toy",
        (TOY,),
        ("ppo_lag", "pbcrl", "pbcrl_offline", "rlsf", "ppo_bt", "ppo_bt_online"),
        (RETURN, COST, LEARNED, "balanced_accuracy", "w2_scaled", "bias"),
    ),
    "toy_dead_zone": Table(
        "The dead zone δ on the toy",
        (TOY,),
        DEAD_ZONE,
        ("w2_scaled", RETURN, COST, "balanced_accuracy", "type_ii_rate"),
        heads=DEAD_ZONE_HEADS,
    ),
    "toy_snr": Table(
        "The weight ζ on the toy",
        (TOY,),
        SNR,
        ("return_mid", "true_cost_mid", "return_last_tenth", "true_cost_last_tenth"),
        heads=SNR_HEADS,
    ),
    "toy_noise": Table(
        "Flipped preferences on the toy",
        (TOY,),
        NOISE,
        ("w2_scaled", RETURN, COST),
        heads=NOISE_HEADS,
    ),
    "trees": Table(
        "Trees and the paper's network, with 20,000 queries and with 500",
        (BLOCK, LANE, GOAL, PUSH, BUTTON),
        (
            "ppo_lag",
            *("trees_labels", "trees_labels_500", "trees_labels_online_500"),
            *("trees_learned", "trees_learned_500", "trees_learned_online_500"),
            *("pbcrl", "pbcrl_rate", "pbcrl_accept", "net_labels_500", "net_learned_500"),
        ),
        OUTCOME,
    ),
    "smoke": Table(
        "Every method on two tasks, far too short to learn",
        (TOY, GOAL),
        ("ppo_lag", "trees_labels", "pbcrl", "pbcrl_offline", "rlsf", "ppo_bt", "ppo_bt_online"),
        (RETURN, COST, LEARNED, ACCURACY, "w2_scaled", "bias"),
    ),
}
"""Presets of `benchmark.py`, one per table of the paper save those on language models."""

PAPER_QUERIES: dict[str, object] = {"offline-queries": 18_000, "online-queries": 2_000}
"""Those of PbCRL, unless a variant has others."""
QUERIES = "offline-queries", "online-queries", "queries"
SMOKE_OPTIONS: dict[str, dict[str, object]] = {
    TOY: {"total-timesteps": 8_000, "num-envs": 20, "num-steps": 100, "minibatch-size": 500},
    GOAL: {"total-timesteps": 12_000, "num-envs": 6, "num-steps": 1_000},
}
"""Sizes of the smoke preset by task; the queries are these thousandths of the real ones."""
SMOKE_QUERIES = 5


def made_as(env_id: str, variant: str) -> str:
    """Return the variant whose runs stand for this one: a limit that is the task's own is none."""
    row = VARIANTS[variant]
    same = row.options.get("cost-limit") == pbcrl_envs.cost_limit(env_id)
    return row.without_limit if same and row.without_limit is not None else variant


def command_of(script: str, options: Mapping[str, object]) -> list[str]:
    """Return the command that runs a script, without its `.py`, with these options."""
    command = [sys.executable, str(SCRIPTS / f"{script}.py")]
    for name, value in options.items():
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        command += [f"--{name}", *map(str, values)]
    return command


def options_of(table: str, env_id: str, variant: str, *, episodes: str) -> dict[str, object]:
    """Return the options of one run of a table, seed and run folder aside.

    Args:
        table: Key of `TABLES`.
        env_id: One of its tasks.
        variant: Key of `VARIANTS`.
        episodes: Folder of the episodes that PPO-Lag of this task and seed leaves to the others.
    """
    row = VARIANTS[variant]
    # All in words, so that a command says what was run even when a recipe has changed.
    defaults = recipe_of(env_id, script=row.script)
    options: dict[str, object] = {"env-id": env_id, "total-timesteps": 1_000_000}
    options |= {name.replace("_", "-"): value for name, value in defaults.items()}
    if row.script == "ppo_lag_pbcrl":
        options |= PAPER_QUERIES
    options |= row.options
    if variant.endswith("_500") and options.get("constraint") == "accept":
        # So few queries show no batches. This is P(C > d) of log-normal costs whose mean is d.
        options |= {"constraint": "rate", "max-unsafe-rate": 0.35}
        del options["accept-batch"]
    options["save-trajectories" if row.script == "ppo_lag" else "dataset"] = episodes
    if table == "smoke":
        options |= {"hidden-sizes": (32, 32), "update-epochs": 2, "eval-episodes": 2}
        options |= SMOKE_OPTIONS[env_id]
        for name in QUERIES:
            if name in options:
                options[name] = int(str(options[name])) * SMOKE_QUERIES // 1000
        if row.script == "ppo_lag_pbcrl":
            options |= {"finetune-interval": 1}
            if options.get("constraint") == "accept":
                options["accept-batch"] = 10  # of so few queries
    return options
