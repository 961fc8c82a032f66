"""Offline episodes from Minari and DSRL are taken like ours, and refused by name like ours."""

import sys
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

from pbcrl.errors import LabelError, MismatchError, MissingCostError, StorageError

from .runs import assert_same_run, small_pbcrl

pytest.importorskip("h5py", reason="needs the extra `dsrl`")
import h5py

from pbcrl.data.dsrl import to_dsrl
from pbcrl_script_utils.datasets import open_dataset
from pbcrl_script_utils.envs import make_envs

TOY = "PointHazards-v0"


@pytest.fixture
def episodes(toy_episodes):
    outcome = {"terminated": False, "final_obs": np.zeros(4, np.float32)}
    return [replace(one, rewards=np.zeros(len(one)), **outcome) for one in toy_episodes]


def opened(path, *, env_id=TOY, **options):
    """The split, and what was said of it."""
    said, envs = [], make_envs(env_id, 1)
    rng = np.random.default_rng(0)
    split = open_dataset(path, env_id, envs, rng=rng, warn=said.append, **options)
    envs.close()
    return split, said


def dsrl(tmp_path, episodes):
    to_dsrl(episodes, tmp_path / "toy.hdf5")
    return tmp_path / "toy.hdf5"


def cut(episode, steps):
    names = "obs", "actions", "costs", "rewards"
    rows = {name: getattr(episode, name) for name in names}
    return replace(episode, **{k: None if v is None else v[:steps] for k, v in rows.items()})


def test_a_run_is_the_same_on_a_dsrl_file_as_on_our_dataset_of_the_same_episodes(
    scripts, tmp_path, toy_dataset, episodes
):
    ours, theirs = (
        scripts.ppo_lag_pbcrl.train(
            small_pbcrl(scripts, tmp_path, path, total_timesteps=400, run_name=name)
        )
        for name, path in (("ours", toy_dataset), ("theirs", dsrl(tmp_path, episodes)))
    )
    assert_same_run(ours, theirs)


@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_a_minari_dataset_is_split_like_ours_by_its_id_and_by_its_folder(
    tmp_path, monkeypatch, toy_dataset, episodes
):
    pytest.importorskip("minari", reason="needs the extra `minari`")
    from pbcrl.data.minari import to_minari

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = gym.make(TOY)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    to_minari(episodes, "toy/random-v0", **spaces)
    expected, _ = opened(toy_dataset)
    for name in ("toy/random-v0", tmp_path / "toy" / "random-v0"):
        found, said = opened(name)
        assert said == []
        for ours, theirs in zip(expected, found, strict=True):
            assert len(ours) == len(theirs)
            for one, other in zip(ours, theirs, strict=True):
                for array in ("obs", "actions", "costs"):
                    np.testing.assert_array_equal(getattr(one, array), getattr(other, array))


@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_a_minari_dataset_that_names_another_env_is_told(tmp_path, monkeypatch, episodes):
    pytest.importorskip("minari", reason="needs the extra `minari`")
    from pbcrl.data.minari import to_minari

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = gym.make(TOY)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    to_minari(episodes, "toy/other-v0", **spaces, env="Pendulum-v1")
    _, said = opened("toy/other-v0")
    assert said == [f"toy/other-v0 says that its episodes are from Pendulum-v1, not from {TOY}"]


def test_episodes_that_were_cut_off_are_left_out_and_terminated_ones_kept(tmp_path, episodes):
    fallen = [replace(cut(one, 30), terminated=True) for one in episodes[:5]]
    begun = [cut(one, 40) for one in episodes[5:7]]
    split, said = opened(dsrl(tmp_path, fallen + begun + episodes[7:20]))
    assert sum(map(len, split)) == 18
    assert len(said) == 1
    assert said[0].startswith("2 of 20 episodes of")
    assert "cut off before the time limit of 100 steps, and are left out" in said[0]


def test_episodes_that_ended_by_themselves_stay_though_a_file_has_no_last_observations(
    tmp_path, episodes
):
    """They are those that failed: without them the sample would be of the safer ones."""
    fallen = [replace(cut(one, 30), terminated=True) for one in episodes[:5]]
    path = dsrl(tmp_path, fallen + episodes[5:20])
    with h5py.File(path, "a") as file:
        del file["next_observations"]
    split, said = opened(path)
    assert sorted(len(one) for part in split for one in part) == [30] * 5 + [100] * 15
    assert said == []


def test_the_simulated_oracle_needs_costs_and_people_do_not(tmp_path, episodes):
    bare = dsrl(tmp_path, [replace(one, costs=None) for one in episodes])
    with pytest.raises(MissingCostError, match=r"oracle needs .*toy\.hdf5 has none; .* people"):
        opened(bare)
    split, _ = opened(bare, needs_costs=False)
    assert sum(map(len, split)) == len(episodes)


def test_episodes_of_another_horizon_or_env_are_refused(tmp_path, episodes):
    short = dsrl(tmp_path, [cut(one, 50) for one in episodes])
    with pytest.raises(
        MismatchError, match=r"has a horizon of 50 steps, PointHazards-v0 one of 10"
    ):
        opened(short)
    with pytest.raises(
        MismatchError, match=r"\(obs_dim, act_dim\) = \(3, 1\), but .* \(4,\) and .*"
    ):
        opened(short, env_id="Pendulum-v1")


def test_too_few_episodes_and_a_missing_extra_are_named(tmp_path, monkeypatch, episodes):
    few = dsrl(tmp_path, episodes[:9])
    with pytest.raises(LabelError, match=r"10 episodes or more .* has 9"):
        opened(few)
    monkeypatch.setitem(sys.modules, "h5py", None)
    monkeypatch.delitem(sys.modules, "pbcrl.data.dsrl")
    with pytest.raises(StorageError, match=r"need h5py; pip install 'pbcrl\[dsrl\]'"):
        opened(few)
