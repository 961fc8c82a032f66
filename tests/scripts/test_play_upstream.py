"""`evaluate.py --upstream` up to the real package; `make parity` tests it to the end."""

import json
import re

import numpy as np
import pytest
import torch

from pbcrl import save_tensors
from tests.scripts.conftest import load


def test_the_policy_that_plays_upstream_is_the_agents(scripts):
    torch.manual_seed(0)
    agent = scripts.evaluate.Agent(5, 2, hidden_sizes=(8, 8))
    obs = torch.randn(50, 5)
    agent.update_normalizer(3 * obs + 1)
    policy = load("play_upstream").Policy(agent.state_dict(), noise=None)
    expected = agent.mean(agent.normalize(obs)).detach().numpy()
    for row, action in zip(obs.numpy(), expected, strict=True):
        np.testing.assert_allclose(policy(row), action, atol=1e-6)


def test_its_noise_has_the_agents_spread(scripts):
    agent = scripts.evaluate.Agent(5, 2, hidden_sizes=(8,), initial_log_std=-1.0)
    noise = torch.Generator().manual_seed(0)
    policy = load("play_upstream").Policy(agent.state_dict(), noise=noise)
    actions = np.array([policy(np.zeros(5)) for _ in range(2000)])
    np.testing.assert_allclose(actions.std(axis=0), np.exp(-1), rtol=0.1)


def small_run(scripts, folder, *, env_id, obs_dim, act_dim, **meta):
    """What `evaluate.py` reads of a run, with an agent that has learned nothing."""
    agent = scripts.evaluate.Agent(obs_dim, act_dim, hidden_sizes=(8,))
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps({"cost_limit": None}))
    meta |= {"env_id": env_id, "obs_dim": obs_dim, "act_dim": act_dim, "hidden_sizes": [8]}
    path = folder / "agent.safetensors"
    save_tensors(path, kind="agent", tensors=agent.state_dict(), meta=meta)
    return folder


def test_an_interpreter_that_is_not_there_is_named_with_what_builds_it(scripts, tmp_path):
    run = small_run(scripts, tmp_path / "run", env_id="PointHazards-v0", obs_dim=4, act_dim=2)
    missing = tmp_path / "bin" / "python"
    args = scripts.evaluate.Args(
        str(run), episodes=2, torch_threads=1, upstream=True, upstream_python=str(missing)
    )
    with pytest.raises(ValueError, match=f"none at {re.escape(str(missing))}; build it by `make"):
        scripts.evaluate.evaluate(args)
