import json

import numpy as np
import pytest
import torch

from pbcrl import Trajectory
from pbcrl.data.label_log import read_labels
from pbcrl.storage import load_tensors

from .runs import assert_same_run, rows, small_rlsf


def trajectory(costs):
    steps = np.arange(len(costs), dtype=np.float32)[:, None]
    return Trajectory(steps, -steps, np.array(costs))


def test_a_ring_buffer_keeps_the_newest_states(scripts):
    ring = scripts.ppo_lag_rlsf.RingBuffer(3, 1)
    ring.add(torch.tensor([[1.0], [2.0]]))
    assert ring.filled == 2
    ring.add(torch.tensor([[3.0], [4.0]]))
    assert sorted(ring.states.flatten().tolist()) == [2.0, 3.0, 4.0]
    ring.add(torch.arange(10.0)[:, None])  # more than it holds
    assert sorted(ring.states.flatten().tolist()) == [7.0, 8.0, 9.0]
    sample = ring.sample(200, np.random.default_rng(0))
    assert set(sample.flatten().tolist()) == {7.0, 8.0, 9.0}


def test_an_episode_is_novel_once_and_so_are_states_on_other_sides_of_the_planes(scripts):
    novelty = scripts.ppo_lag_rlsf.SimHash(2, 8, np.random.default_rng(0))
    states = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert novelty.is_novel(states)
    assert not novelty.is_novel(states)
    assert not novelty.is_novel(0.5 * states)  # a plane through the origin sees directions only
    assert novelty.is_novel(-states)
    assert novelty.is_novel(torch.cat([states, torch.tensor([[1.0, -1.0]])]))


def test_an_episode_without_cost_is_one_query_and_any_other_one_per_segment(scripts):
    free, costly = trajectory([0, 0, 0, 0, 0]), trajectory([0, 0, 1, 0, 3])
    assert scripts.ppo_lag_rlsf.segments_to_judge(free, 2) == [free]
    segments = scripts.ppo_lag_rlsf.segments_to_judge(costly, 2)
    assert [len(segment) for segment in segments] == [2, 2, 1]
    assert [segment.true_cost for segment in segments] == [0, 1, 3]
    assert [segment.obs[0, 0] for segment in segments] == [0, 2, 4]


@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
def test_a_run_buys_labels_within_its_budget_and_counts_what_it_takes_for_unsafe(scripts, tmp_path):
    folder = scripts.ppo_lag_rlsf.train(small_rlsf(scripts, tmp_path, queries=7))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["queries_used"] == 7 == len(read_labels(folder / "labels.jsonl"))
    last = rows(folder)[-1]
    assert last["good_states"] > 0
    assert last["bad_states"] > 0
    assert last["good_states"] + last["bad_states"] == 7 * 100
    assert 0 <= last["learned_cost"] <= 100  # a count of an episode's steps
    assert summary["cost_limit"] == 5.0
    tensors, meta = load_tensors(folder / "classifier.safetensors", kind="classifier")
    assert tensors["0.weight"].shape == (meta["hidden_sizes"][0], 4)


@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
def test_before_both_kinds_of_states_are_known_nothing_costs(scripts, tmp_path):
    # An oracle that calls every episode safe.
    folder = scripts.ppo_lag_rlsf.train(small_rlsf(scripts, tmp_path, cost_limit=1e6))
    assert {row["learned_cost"] for row in rows(folder)} == {0.0}
    assert {row["bad_states"] for row in rows(folder)} == {0}
    assert {row["classifier_loss"] for row in rows(folder)} == {None}


@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
def test_it_is_compared_on_the_test_episodes_of_a_pbcrl_run(
    scripts, tmp_path, toy_dataset, toy_episodes
):
    folder = scripts.ppo_lag_rlsf.train(small_rlsf(scripts, tmp_path, dataset=str(toy_dataset)))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test_episodes"] == len(toy_episodes) // 10


@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
def test_the_same_seed_twice_gives_identical_weights_and_metrics(scripts, tmp_path):
    folders = [
        scripts.ppo_lag_rlsf.train(small_rlsf(scripts, tmp_path, run_name=name)) for name in "ab"
    ]
    assert_same_run(*folders)


def test_segments_longer_than_an_episode_are_refused(scripts, tmp_path):
    with pytest.raises(ValueError, match=r"--segment-length must lie in 1\.\.100.*got 101"):
        scripts.ppo_lag_rlsf.train(small_rlsf(scripts, tmp_path, segment_length=101))
