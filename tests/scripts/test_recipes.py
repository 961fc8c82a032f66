"""Recipes: the values that `--help` shows for a task are those that are run."""

import dataclasses
import re

import pytest

import pbcrl_envs
from pbcrl_script_utils import recipes
from pbcrl_script_utils.args import check_args, slow_multiplier, with_lengths
from pbcrl_script_utils.collect import collection_steps
from pbcrl_script_utils.labels import check_labels
from pbcrl_script_utils.launch import parse
from pbcrl_script_utils.recipes import recipe_lines, recipe_of

from .conftest import load_edited
from .runs import small_ppo_lag

SCRIPTS = "ppo_lag", "ppo_lag_pbcrl", "ppo_lag_rlsf"
GOAL, LANE, TOY = "SafetyPointGoal1-v0", "DrivingLaneChange-v0", "PointHazards-v0"
TASKS = (
    *(f"SafetyPoint{name}1-v0" for name in ("Goal", "Push", "Button")),
    *(f"Safety{name}Velocity-v1" for name in ("HalfCheetah", "Walker2d", "Humanoid")),
    *("DrivingBlockedRoad-v0", LANE, TOY),
)


def help_of(script, capsys, *words):
    """What `--help` prints: the recipe's lines, and the default of each argument."""
    with pytest.raises(SystemExit) as ended:
        parse(script.Args, [*words, "--help"])
    assert ended.value.code == 0
    # In a box of lines, or of dashes where the output's encoding has no lines.
    above, options = re.split(r"^\W* options \W*$", capsys.readouterr().out, flags=re.MULTILINE)
    lines = [line.strip() for line in above.splitlines() if " instead of " in line]
    inside = "\n".join(line.strip("│| ") for line in options.splitlines())
    found = re.findall(r"^--([a-z][a-z0-9-]*)(.*?)(?=^--|\Z)", inside, re.MULTILINE | re.DOTALL)
    defaults = {}
    for name, text in found:
        if values := re.findall(r"\(default: (.*?)\)", " ".join(text.split())):
            defaults[name.replace("-", "_")] = values[-1]
    return lines, defaults


def shown(value):
    """A value as `--help` has it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.fixture(autouse=True)
def _terminal_of_100_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("words", [[], ["--env-id", "Mine-v0"], ["--env-id=m:Mine-v0"]], ids=str)
def test_the_help_for_no_env_or_one_without_a_recipe_shows_the_defaults_of_the_file(
    scripts, capsys, words
):
    script = scripts.ppo_lag_pbcrl
    lines, defaults = help_of(script, capsys, *words)
    assert lines == []
    fields = [field for field in dataclasses.fields(script.Args) if field.name != "env_id"]
    assert fields
    for field in fields:
        assert defaults[field.name] == shown(field.default)
    if words:
        env_id = words[-1].removeprefix("--env-id=")
        assert parse(script.Args, words) == script.Args(env_id=env_id)


def test_the_help_for_a_task_shows_its_recipe_and_that_is_what_is_run(scripts, capsys):
    script = scripts.ppo_lag_pbcrl
    lines, defaults = help_of(script, capsys, "--env-id", GOAL)
    args = parse(script.Args, ["--env-id", GOAL])
    fields = [field for field in dataclasses.fields(script.Args) if field.name != "env_id"]
    of_file = {field.name: field.default for field in fields}
    changed = {name for name in of_file if getattr(args, name) != of_file[name]}
    assert {line.split()[0] for line in lines} == changed
    assert len(lines) == len(changed)
    assert "num_envs 100 instead of 20" in lines
    assert "total_timesteps 6,000,000 instead of 1,000,000" in lines
    assert "constraint accept instead of rate" in lines
    for name in changed:
        value, default = getattr(args, name), of_file[name]
        written = [f"{one:,}" if type(one) is int else shown(one) for one in (value, default)]
        assert f"{name} {written[0]} instead of {written[1]}" in lines
        assert defaults[name] == shown(value)


def test_no_task_is_guessed(scripts, capsys):
    for name in SCRIPTS:
        with pytest.raises(SystemExit) as ended:
            parse(getattr(scripts, name).Args, ["--num-envs", "7"])
        assert ended.value.code == 2
        assert "--env-id" in capsys.readouterr().err


def test_the_help_fits_into_the_terminal(scripts, capsys):
    for name in SCRIPTS:
        with pytest.raises(SystemExit):
            parse(getattr(scripts, name).Args, ["--env-id", LANE, "--help"])
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_what_is_given_counts_more_than_a_recipe_and_is_not_listed(scripts):
    for name in SCRIPTS:
        script = getattr(scripts, name)
        plain = parse(script.Args, ["--env-id", GOAL])
        given = parse(script.Args, ["--num-envs", "7", "--env-id", GOAL, "--eval_episodes=25"])
        assert given == dataclasses.replace(plain, num_envs=7, eval_episodes=25)
        before, after = map(recipe_lines, (plain, given))
        gone = [line for line in before if line not in after]
        assert [line.split()[0] for line in gone] == ["num_envs", "eval_episodes"]
        assert set(after) < set(before)


def test_a_run_prints_its_recipe_at_the_start(scripts, tmp_path, capsys):
    args = small_ppo_lag(scripts, tmp_path, eval_episodes=100, total_timesteps=400)
    scripts.ppo_lag.train(args)
    first, heading, *lines = capsys.readouterr().out.splitlines()
    assert first == f"== PPO-Lag on {TOY}; files in {tmp_path / 'run'}"
    assert heading.strip() == "its recipe (pbcrl_script_utils/recipes.py):"
    listed = [line.strip() for line in lines if " instead of " in line]
    assert listed == ["eval_episodes 100 instead of 50"]
    other = small_ppo_lag(
        scripts, tmp_path, env_id="TestToy-v0", cost_limit=5, run_name="b", total_timesteps=400
    )
    scripts.ppo_lag.train(other)
    assert " instead of " not in capsys.readouterr().out


@pytest.mark.parametrize("by_people", [False, True])
@pytest.mark.parametrize("env_id", TASKS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_recipe_is_made_of_arguments_that_the_script_takes(scripts, name, env_id, by_people):
    recipe = recipe_of(env_id, script=name, by_people=by_people)
    args_type = getattr(scripts, name).Args
    assert 1 <= len(recipe) <= 6 + 3 * by_people  # who has three of their own
    assert recipe.keys() <= {field.name for field in dataclasses.fields(args_type)}
    args = args_type(env_id=env_id, **recipe)
    check_args(args)
    if name == "ppo_lag_pbcrl":
        check_labels(with_lengths(args))


def test_a_copy_of_a_script_has_its_recipes(tmp_path):
    copy = load_edited(
        "ppo_lag_pbcrl",
        tmp_path / "copied",
        ("seed: utils.NonNegativeInt = 0", "seed: utils.NonNegativeInt = 7"),
    )
    for words, queries in (
        (["--env-id", GOAL], (0, 20_000)),
        (["--env-id", "mine:Road-v0", "--label-folder", "q"], (0, 150)),
        (["--env-id", "mine:Road-v0"], (0, 20_000)),
    ):
        args = parse(copy.Args, words)
        assert (args.offline_queries, args.online_queries, args.seed) == (*queries, 7)


@pytest.mark.parametrize("words", [["1e6"], ["1000000"], ["1_000_000"], ["1.0e6"]], ids=str)
def test_a_million_steps_can_be_written_in_any_way(scripts, words):
    args = parse(scripts.ppo_lag.Args, ["--env-id", "Mine-v0", "--total-timesteps", *words])
    assert args.total_timesteps == 1_000_000
    assert type(args.total_timesteps) is int


def test_only_whole_numbers_are_read_as_such(scripts, capsys):
    words = ["--env-id", "Mine-v0", "--run-name", "1e3", "--multiplier-cap", "2.5e0"]
    args = parse(scripts.ppo_lag.Args, words)
    assert (args.run_name, args.multiplier_cap) == ("1e3", 2.5)
    with pytest.raises(SystemExit):
        parse(scripts.ppo_lag.Args, ["--env-id", "Mine-v0", "--num-envs", "1.5"])
    assert "a whole number is needed, got 1.5" in capsys.readouterr().err


def test_lengths_that_are_left_open_give_some_250_iterations(scripts):
    def lengths(**options):
        args = with_lengths(scripts.ppo_lag.Args(env_id="Mine-v0", **options))
        return args.num_steps, args.minibatch_size, args.num_iterations

    assert lengths() == (200, 1_000, 250)  # a million steps
    assert lengths(total_timesteps=50_000) == (100, 500, 25)
    assert lengths(total_timesteps=100_000_000) == (1_000, 5_000, 5_000)
    assert lengths(num_steps=50, minibatch_size=30) == (50, 30, 1_000)
    assert lengths(num_envs=1, total_timesteps=1_000) == (100, 25, 10)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"total_timesteps": 500_000}, None),
        ({"total_timesteps": 50_000}, "λ will move some 25 times, once per iteration, and"),
        ({"total_timesteps": 50_000, "multiplier_lr": 0.0}, None),  # a constant λ
    ],
)
def test_a_multiplier_that_cannot_find_its_place_is_warned_of(scripts, options, shown):
    said = slow_multiplier(with_lengths(scripts.ppo_lag.Args(env_id="Mine-v0", **options)))
    assert said is None if shown is None else shown in said


def test_a_multiplier_that_follows_batches_moves_in_labelling_rounds_alone(scripts):
    args = scripts.ppo_lag_pbcrl.Args(env_id="Mine-v0", constraint="accept", num_steps=1_000)
    said = slow_multiplier(args)  # 50 iterations are ten rounds
    assert "λ will move some 10 times, once per labelling round" in said
    for always in ("learned", "rate"):  # a model judges every episode
        assert slow_multiplier(dataclasses.replace(args, constraint=always)) is None


def test_people_change_what_is_asked_and_not_how_the_policy_learns():
    for env_id in TASKS:
        plain, people = (
            recipe_of(env_id, script="ppo_lag_pbcrl", by_people=by_people)
            for by_people in (False, True)
        )
        changed = {name for name in people if people[name] != plain.get(name)}
        assert not changed & {"lr_decay", "learning_rate", "hidden_sizes", "minibatch_size"}


def test_no_other_env_has_a_recipe():
    known = {env_id for table in (recipes._OF_ALL, recipes._OF_PBCRL) for env_id in table}
    assert known == set(TASKS)
    others = {task.env_id for task in pbcrl_envs.TASKS.values()} - known
    for name in (*SCRIPTS, "mine"):
        for env_id in (*others, "Mine-v0", "", f"m:{GOAL}"):
            assert recipe_of(env_id, script=name) == {}


def test_a_recipe_is_found_by_an_id_that_names_the_package_too():
    found = recipe_of(f"pbcrl_envs:{GOAL}", script="ppo_lag")
    assert found == recipe_of(GOAL, script="ppo_lag") != {}


def test_a_label_folder_chooses_the_recipe_of_people(scripts, capsys):
    script = scripts.ppo_lag_pbcrl
    budgets = []
    for words in (
        ["--label-folder", "questions", "--env-id", "mine:Road-v0"],
        ["--env-id", "mine:Road-v0", "--label_folder=questions"],
        ["--env-id", LANE, "--label-folder=q", "--online-queries", "70"],
        ["--env-id", "mine:Road-v0"],
    ):
        args = parse(script.Args, words)
        budgets.append((args.offline_queries, args.online_queries))
    assert budgets == [(0, 150), (0, 150), (0, 70), (0, 20_000)]
    lines, defaults = help_of(script, capsys, "--label-folder", "q")
    assert lines == ["online_queries 150 instead of 20,000"]
    assert (defaults["offline_queries"], defaults["online_queries"]) == ("0", "150")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"offline_queries": 350}, 3 * 350 * 200),
        ({"offline_queries": 60}, 100_000),
        ({"offline_queries": 18_000}, 500_000),
    ],
)
def test_three_episodes_are_collected_per_offline_query(scripts, options, steps):
    args = scripts.ppo_lag_pbcrl.Args(env_id="Mine-v0", total_timesteps=500_000, **options)
    assert collection_steps(args, 200) == steps


def test_only_who_can_be_labelled_by_people_has_a_recipe_of_people():
    for name in ("ppo_lag", "ppo_lag_rlsf"):
        assert recipe_of(TOY, script=name, by_people=True) == recipe_of(TOY, script=name)
