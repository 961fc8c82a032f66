"""`evaluate.py --upstream` up to the real package; `make parity` tests it to the end."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pbcrl.storage import save_tensors

from .conftest import SCRIPTS, load


def small_run(folder, *, env_id):
    """What `evaluate.py` reads of a run, with an agent that has learned nothing."""
    script = load("ppo_lag")
    args = script.Args(env_id=env_id, hidden_sizes=(8,))
    agent = script.Agent(script.utils.make_envs(env_id, 1), args)
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps({"script": "ppo_lag", **vars(args)}))
    shutil.copy(SCRIPTS / "ppo_lag.py", folder)
    path, meta = folder / "agent.safetensors", {"env_id": env_id}
    save_tensors(path, kind="agent", tensors=agent.state_dict(), meta=meta)
    return folder


THEIRS = """
import sys
import numpy as np, torch
_, policy, output, *words = sys.argv[1:]
obs = torch.linspace(-1, 1, 40).reshape(10, 4)
std = list(map(float, words[words.index("--std") + 1 :])) if "--std" in words else []
with torch.no_grad():
    means = np.concatenate([torch.jit.load(policy)(row[None]) for row in obs])
np.savez(output, returns=means.sum(1), costs=np.array([float("--episodes=2" in words), *std]))
"""


@pytest.mark.filterwarnings("ignore:.*torch.jit.load:DeprecationWarning")
def test_actions_are_handed_over_in_the_units_of_the_env(scripts, tmp_path, monkeypatch):
    """Humanoid's have bounds of ±0.4: means and noise were once 2.5 times too large."""
    interpreter, handed = tmp_path / "python", {}
    interpreter.touch()

    def run(command, **_):
        handed["std"] = list(map(float, command[command.index("--std") + 1 :]))
        handed["mean"] = torch.jit.load(command[2])
        np.savez(command[3], returns=np.zeros(2), costs=np.zeros(2))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(scripts.evaluate.subprocess, "run", run)
    folder = small_run(tmp_path / "run", env_id="SafetyHumanoidVelocity-v1")
    trained = json.loads((folder / "args.json").read_text())
    agent, env_id, _ = scripts.evaluate.load_agent(folder, trained, None, trusted=False)
    args = scripts.evaluate.Args(str(folder), upstream_python=str(interpreter), stochastic=True)
    scripts.evaluate.play_upstream(args, agent, env_id)
    obs = torch.randn(5, len(agent.obs_mean))
    np.testing.assert_allclose(handed["mean"](obs), agent.act(obs.numpy()), atol=1e-6)
    np.testing.assert_allclose(handed["std"], np.full(17, 0.4 * np.exp(-0.5)), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_policy_that_is_handed_over_is_the_agents_with_its_noise(scripts, tmp_path, stochastic):
    """In the place of the other environment's interpreter stands one that says what it got."""
    (tmp_path / "theirs.py").write_text(THEIRS)
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "theirs.py"} "$@"\n')
    interpreter.chmod(0o755)
    run = small_run(tmp_path / "run", env_id="PointHazards-v0")
    args = scripts.evaluate.Args(
        str(run), episodes=2, upstream_python=str(interpreter), stochastic=stochastic
    )
    trained = json.loads((run / "args.json").read_text())
    agent, env_id, _ = scripts.evaluate.load_agent(run, trained, None, trusted=False)
    torch.nn.init.normal_(agent.mean[-1].weight)
    agent.update_normalizer(3 * torch.randn(50, 4) + 1)
    acted, (has_episodes, *std) = scripts.evaluate.play_upstream(args, agent, env_id)
    ours = agent.act(torch.linspace(-1, 1, 40).reshape(10, 4).numpy())
    np.testing.assert_allclose(acted, ours.sum(axis=1), atol=1e-5)
    assert has_episodes
    np.testing.assert_allclose(std, np.exp([-0.5, -0.5]) if stochastic else [], rtol=1e-6)


def test_an_interpreter_that_is_not_there_is_named_with_what_builds_it(scripts, tmp_path):
    run = small_run(tmp_path / "run", env_id="PointHazards-v0")
    missing = tmp_path / "bin" / "python"
    args = scripts.evaluate.Args(
        str(run), episodes=2, threads=1, upstream=True, upstream_python=str(missing)
    )
    with pytest.raises(
        ValueError,
        match=f"none at {re.escape(str(missing))}; name one with --upstream-python, or install it",
    ):
        scripts.evaluate.evaluate(args)
