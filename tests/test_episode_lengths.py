"""Episodes of 1 to 50 steps, from the env through the files and the training to the report."""

import numpy as np
import pytest

from pbcrl import (
    CostModel,
    CostModelTrainer,
    Label,
    PreferenceBuffer,
    PreferenceCostWrapper,
    SyntheticOracle,
    Trajectory,
    TrajectoryDataset,
    TrajectoryWriter,
    draw_pairs,
    finished_trajectories,
)
from pbcrl.metrics import cost_model_report
from pbcrl.recorder import TrajectoryRecorder

from .counters import Counter, assert_same, random_model
from .every_space import boxes

LENGTHS = range(1, 51)


def actions_of(length):
    return np.random.default_rng(length).uniform(-1, 1, (length, 1)).astype(np.float32)


def played(length, model):
    env = PreferenceCostWrapper(Counter(length), model)
    env.reset(seed=length)
    infos = [env.step(action)[-1] for action in actions_of(length)]
    (trajectory,) = finished_trajectories(infos[-1])
    return trajectory, sum(info["cost"] for info in infos)


def bought(trajectories, num_pairs):
    buffer, rng = PreferenceBuffer(), np.random.default_rng(0)
    buffer.add_trajectories(trajectories)
    pairs = draw_pairs(len(trajectories), num_pairs, rng=rng)
    buffer.add_labels(pairs, SyntheticOracle(cost_limit=12.5).label(buffer.queries(pairs)))
    return buffer


def test_episodes_of_1_to_50_steps_are_recorded_stored_scored_and_learned_from(tmp_path):
    model = random_model()
    episodes = [played(length, model)[0] for length in LENGTHS]
    with TrajectoryWriter(
        tmp_path / "data",
        env_id="Counter",
        obs_shape=(2,),
        act_dim=1,
        horizon=50,
        rng=np.random.default_rng(0),
    ) as writer:
        for episode in episodes:
            writer.add(episode)
    stored = TrajectoryDataset(tmp_path / "data")
    assert stored.lengths.tolist() == list(LENGTHS)
    assert_same(list(stored), episodes)

    learned = CostModel(*boxes(2, 1), output_scale=0.3)
    learned.fit_input_scale(stored[:])
    train, valid = bought(stored[::2], 200), bought(stored[1::2], 60)
    trainer = CostModelTrainer(learned, rng=np.random.default_rng(0), lr=1e-2, batch_size=32)
    with pytest.warns(UserWarning, match=r"from 1 to 49 steps, .*fill up ended episodes"):
        trainer.pretrain(train, valid, max_epochs=40)
    trainer.finetune(train, num_new=10, epochs=1)  # warnings are errors: there is no second one
    true_costs = [episode.true_cost for episode in stored]
    report = cost_model_report(learned.score(stored), true_costs, cost_limit=12.5)
    assert report["pair_accuracy"] > 0.8
    assert report["accuracy"] > 0.8


def test_the_score_of_an_episode_is_the_sum_of_what_the_wrapper_reported():
    model = random_model()
    episodes, sums = zip(*[played(length, model) for length in LENGTHS], strict=True)
    np.testing.assert_allclose(model.score(episodes), sums, rtol=1e-4, atol=1e-4)


def test_envs_that_end_after_1_to_50_steps_are_told_apart_by_a_recorder():
    episodes = [played(length, random_model())[0] for length in LENGTHS]
    recorder, found = TrajectoryRecorder(50), []
    for t in range(50):
        running = np.array([t < length for length in LENGTHS])
        row = [min(t, length - 1) for length in LENGTHS]
        obs = np.stack([episode.obs[i] for episode, i in zip(episodes, row, strict=True)])
        actions = np.stack([episode.actions[i] for episode, i in zip(episodes, row, strict=True)])
        costs = np.array([episode.costs[i] for episode, i in zip(episodes, row, strict=True)])
        done = np.array([t == length - 1 for length in LENGTHS])
        found += recorder.record(obs, actions, costs, done, valid=running)
    assert_same(found, episodes)


def test_there_is_no_warning_where_all_episodes_are_of_one_length():
    buffer = PreferenceBuffer()
    buffer.add_trajectories([Trajectory(np.ones((7, 2)), np.ones((7, 1))) for _ in range(4)])
    buffer.add_labels(np.array([[0, 1], [2, 3]]), [Label(1.0, 1.0, 0.0), Label(1.0, 1.0, 0.0)])
    trainer = CostModelTrainer(CostModel(*boxes(2, 1)), rng=np.random.default_rng(0))
    trainer.finetune(buffer, num_new=2, epochs=1)
    assert trainer.steps == 1
