"""The policies that a run leaves, and which of them is called safe."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pbcrl import load_cost_model, load_policy
from pbcrl.errors import StorageError
from pbcrl.export.policy import POLICY_FILE, SAFE_POLICY_FILE, Policy
from pbcrl_script_utils.policies import SafePolicy, policy_of

from .conftest import load_edited
from .runs import rows, small_pbcrl, small_ppo_lag, summary


def test_the_policy_of_a_run_is_read_without_its_script_and_acts_as_its_agent(scripts, tmp_path):
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path))
    trained = json.loads((folder / "args.json").read_text())
    agent, _, _ = scripts.evaluate.load_agent(folder, trained, None, trusted=False)
    assert float(agent.obs_count) > 1000
    obs = np.random.default_rng(0).normal(size=(50, len(agent.obs_mean)))
    expected = agent.act(obs).clip(agent.low.numpy(), agent.high.numpy())
    assert (load_policy(folder)(obs) == expected).all()
    # In a process that cannot import the scripts.
    code = "import json, sys, pbcrl; obs = json.load(sys.stdin); "
    code += "print(json.dumps(pbcrl.load_policy(sys.argv[1])(obs).tolist())); "
    code += "assert not {'pbcrl_script_utils', 'pbcrl_envs'} & set(sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code, folder],
        input=json.dumps(obs.tolist()),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    np.testing.assert_allclose(json.loads(run.stdout), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
def test_the_safe_policy_is_the_one_of_the_highest_return_in_rounds_that_labels_call_safe(
    scripts, tmp_path, toy_dataset
):
    options = {"total_timesteps": 3200, "finetune_interval": 1, "online_queries": 80}
    options["constraint"] = (
        "learned"  # by which a policy is called safe if most of its episodes are
    )
    args = small_pbcrl(scripts, tmp_path, toy_dataset, **options)
    folder = scripts.ppo_lag_pbcrl.train(args)
    safe = [row for row in rows(folder) if row["unsafe_rate"] <= 0.5]
    assert 0 < len(safe) < len(rows(folder))  # else this shows nothing
    best = max(safe, key=lambda row: row["return"])
    found = summary(folder)
    assert found["safe_policy_iteration"] * 400 == best["env_steps"]
    assert found["safe_policy_return"] == pytest.approx(best["return"])
    assert (folder / SAFE_POLICY_FILE).exists()

    # Where no policy is called safe there is none.
    args = replace(args, constraint="rate", max_unsafe_rate=1e-9, run_name="strict")
    folder = scripts.ppo_lag_pbcrl.train(args)
    assert min(row["unsafe_rate"] for row in rows(folder)) > 0
    assert summary(folder)["safe_policy_iteration"] is None
    assert not (folder / SAFE_POLICY_FILE).exists()


def test_the_safe_policy_is_played_in_place_of_the_last_one(scripts, tmp_path, capsys):
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, total_timesteps=400))
    args = scripts.evaluate.Args(str(folder), episodes=3, safe_policy=True, threads=1)
    with pytest.raises(StorageError, match="labels called no policy of this run safe"):
        scripts.evaluate.evaluate(args)

    trained = json.loads((folder / "args.json").read_text())
    agent, _, _ = scripts.evaluate.load_agent(folder, trained, None, trusted=False)
    obs = np.random.default_rng(0).normal(size=(50, len(agent.obs_mean)))
    last = agent.act(obs)
    with torch.no_grad():
        agent.mean[-1].bias.add_(0.3)
    policy_of(agent, "Walk").save(folder / SAFE_POLICY_FILE)
    safe, _, _ = scripts.evaluate.load_agent(folder, trained, None, trusted=False)
    assert (safe.act(obs) == last).all()
    scripts.evaluate.load_safe_policy(folder, policy_of(safe, "Walk"))
    np.testing.assert_allclose(safe.act(obs), last + 0.3, rtol=1e-5, atol=1e-6)

    scripts.evaluate.evaluate(args)
    assert "deterministic safe policy, 3 episodes" in capsys.readouterr().out


def test_an_edited_agent_that_a_file_cannot_describe_leaves_none(scripts, tmp_path):
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, total_timesteps=400))
    trained = json.loads((folder / "args.json").read_text())
    agent, _, _ = scripts.evaluate.load_agent(folder, trained, None, trusted=False)
    assert policy_of(agent, "Walk") is not None
    act = agent.act
    agent.act = lambda obs: np.tanh(act(obs) + 1)
    assert policy_of(agent, "Walk") is None
    agent.act, agent.mean = act, nn.Bilinear(4, 4, 2)  # no Sequential
    assert policy_of(agent, "Walk") is None


def test_a_run_says_that_a_policy_with_other_layers_is_in_no_file(scripts, tmp_path):
    edited = load_edited(
        "ppo_lag",
        tmp_path / "layers",
        ("for part in (layer, nn.ReLU(", "for part in (layer, nn.LayerNorm(16), nn.ReLU("),
    )
    args = small_ppo_lag(scripts, tmp_path, total_timesteps=400)
    folder = edited.train(edited.Args(**vars(args)))
    assert (folder / "agent.safetensors").exists()
    assert not (folder / POLICY_FILE).exists()
    (warning,) = summary(folder)["warnings"]
    assert warning.startswith(f"there will be no {POLICY_FILE}: the agent was edited")


def constant(action):
    """A policy whose action is always the same."""
    net = nn.Sequential(nn.Linear(1, 1))
    nn.init.zeros_(net[0].weight)
    nn.init.constant_(net[0].bias, action)
    names = {"obs_mean": 0.0, "obs_var": 1.0, "log_std": 0.0, "low": -9.0, "high": 9.0}
    return Policy(net, **{n: torch.tensor([v]) for n, v in names.items()}, env_id="Walk")


def test_what_labels_call_unsafe_or_say_nothing_of_is_never_kept(tmp_path):
    kept, ended = SafePolicy(), np.zeros((0, 2))
    rounds = [  # action, mean return of the round, unsafe
        (1.0, 5.0, 0.4),
        (2.0, 9.0, 0.6),  # unsafe
        (3.0, 8.0, None),  # no labels
        (4.0, 8.0, float("nan")),
        (5.0, 4.0, 0.0),  # safer, but worth less
        (6.0, 6.0, 0.5),
    ]
    found = []
    for i, (action, mean_return, unsafe) in enumerate(rounds, 1):
        new = np.array([[mean_return - 1, 0.0], [mean_return + 1, 99.0]])
        ended = np.concatenate([ended, new])
        kept.update(constant(action), ended, iteration=i, unsafe=unsafe, allowed=0.5)
        again = SafePolicy()  # as after a checkpoint
        again.load_state_dict(kept.state_dict())
        kept = again
        kept.save(tmp_path)
        found.append(load_policy(tmp_path / SAFE_POLICY_FILE)([0.0]).item())
    assert found == [1, 1, 1, 1, 1, 6]
    assert (kept.iteration, kept.mean_return) == (6, 6.0)


def test_a_kept_policy_does_not_follow_the_one_that_goes_on_learning(tmp_path):
    kept, policy = SafePolicy(), constant(1.0)
    kept.update(policy, np.zeros((1, 2)), iteration=1, unsafe=0.0, allowed=0.5)
    for tensor in policy.state_dict()["tensors"].values():
        tensor.fill_(7.0)
    kept.save(tmp_path)
    assert load_policy(tmp_path / SAFE_POLICY_FILE)([0.0]) == 1


def test_a_round_in_which_no_episode_ended_chooses_nothing():
    kept = SafePolicy()
    kept.update(constant(1.0), np.zeros((0, 2)), iteration=1, unsafe=0.0, allowed=0.5)
    assert kept.iteration is None


@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
def test_a_model_card_says_what_the_cost_model_was_learned_from_and_warns(
    scripts, tmp_path, toy_dataset
):
    folder = scripts.ppo_lag_pbcrl.train(small_pbcrl(scripts, tmp_path, toy_dataset))
    card, found = (folder / "cost_model.md").read_text(), summary(folder)
    model, _ = load_cost_model(folder / "cost_model.safetensors")
    for text in (
        "# Cost model for PointHazards-v0",
        f"| reads | raw observations {model.obs_shape}, executed actions ({model.act_dim},) |",
        f"| limit | {model.learned_limit:g} per episode, of at most 100 steps |",
        "| labelled by | a simulated oracle, from true costs with the limit 5 |",
        f"| queries | {found['queries_used']}, over",
        "## What it learned",
        f"## Accuracy, on {found['test_episodes']} test episodes",
        f"(guessing: 0.5): {found['pair_accuracy']:.3g}",
    ):
        assert text in card, text
    said = [text for text in found["verdict"] if "cost model" in text]
    assert said  # else this shows nothing
    assert all(f"- {text}" in card for text in said + found["warnings"])


@pytest.mark.slow
def test_every_file_of_a_run_is_listed_and_the_safe_policy_is_named_at_the_end(
    scripts, tmp_path, toy_dataset, capsys
):
    """By a limit that nothing exceeds, so that labels call some policy safe."""
    options = {"constraint": "rate", "cost_limit": 1e3, "max_unsafe_rate": 0.9}
    args = small_pbcrl(scripts, tmp_path, toy_dataset, **options)
    folder = scripts.ppo_lag_pbcrl.train(args)
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    (table,) = re.findall(r"^A \*\*run\*\* .*?(?=^\*\*An interrupted)", page, re.M | re.S)
    names = {path.name for path in folder.iterdir()} - {".lock", "ppo_lag_pbcrl.py"}
    names = {name for name in names if not name.startswith("events.out.tfevents")}
    assert {"policy.safetensors", "policy_safe.safetensors", "cost_model.md"} <= names
    assert [name for name in sorted(names) if f"`{name}" not in table] == []
    said = capsys.readouterr().out
    assert f"evaluate.py {folder} --safe-policy" in said
