"""How episodes can be played again: beside the dataset, and as long as that is there."""

import random
import shutil

import gymnasium as gym
import numpy as np
import pytest

from pbcrl.data.dataset import REPLAYS, TrajectoryDataset
from pbcrl.label.replay import Replay, replay_frames
from pbcrl.storage import StorageError
from pbcrl.trajectory import Trajectory
from pbcrl_script_utils.replays import NoteStart, Replays

from ..damage import full_disk
from .runs import cut_off, resume, small_ppo_lag


def episode(value):
    return Trajectory(np.full((3, 2), value), np.full((3, 1), -value))


def noted(folder, count):
    """So many episodes; number i began with seed i."""
    folder.mkdir(exist_ok=True)
    file = Replays(folder)
    episodes = [episode(i) for i in range(count)]
    file.add(episodes, [Replay("Toy-v0", seed=i) for i in range(count)])
    return file, episodes


def seeds(file, episodes):
    """None where nothing is known."""
    return [found and found.seed for found in map(file.of, episodes)]


def test_what_was_noted_is_found_again_and_nothing_is_noted_twice(tmp_path):
    file, episodes = noted(tmp_path, 3)
    file.close()
    size = (tmp_path / REPLAYS).stat().st_size
    again, _ = noted(tmp_path, 3)
    assert seeds(again, [*episodes, episode(7)]) == [0, 1, 2, None]
    assert (tmp_path / REPLAYS).stat().st_size == size
    assert again.include(tmp_path / "nowhere") is False


@pytest.mark.parametrize(
    "kind", [np.random.RandomState, lambda seed: np.random.Generator(np.random.MT19937(seed))]
)
def test_an_env_with_another_kind_of_generator_is_stepped_and_shown_as_curves(kind):
    """The first episode can be played again by its seed; the next have no seed."""
    env = NoteStart(gym.make("Pendulum-v1"))
    env.reset(seed=3)
    assert env.start == {"seed": 3}
    env.unwrapped._np_random = kind(1)
    env.unwrapped.reset = lambda **_: (np.zeros(3, np.float32), {})
    env.reset()
    assert env.start is None


@pytest.mark.parametrize("seed", range(20))
def test_what_a_kill_or_a_power_cut_leaves_of_the_file_is_whole_records(tmp_path, seed):
    """A part of what was written, zeros in the place of the rest, a flipped bit: never another."""
    rng = random.Random(seed)
    file, episodes = noted(tmp_path, 5)
    file.close()
    path = tmp_path / REPLAYS
    whole = path.read_bytes()
    end = rng.randrange(len(whole))
    flipped = bytes([whole[end] ^ 1 << rng.randrange(8)])
    path.write_bytes(
        whole[:end]
        + rng.choice([b"", bytes(len(whole) - end), flipped + whole[end + 1 :], bytes(1000)])
    )
    reader = Replays(tmp_path)
    found = seeds(reader, episodes)
    kept = [one for one in found if one is not None]
    assert kept == list(range(len(kept)))
    assert found[len(kept) :] == [None] * (5 - len(kept))
    reader.close()
    again, _ = noted(tmp_path, 5)  # a run that goes on
    assert seeds(again, episodes) == [0, 1, 2, 3, 4]
    assert path.read_bytes() == whole


def test_a_full_disk_is_named_and_leaves_no_half_record(tmp_path):
    file, episodes = noted(tmp_path, 1)
    more = [episode(9)], [Replay("Toy-v0", seed=9)]
    size = (tmp_path / REPLAYS).stat().st_size
    with full_disk(size + 50), pytest.raises(StorageError, match=r"replays\.bin must be writable"):
        file.add(*more)
    file.add(*more)  # there is space again
    file.close()
    assert seeds(Replays(tmp_path), [*episodes, *more[0]]) == [0, 9]


def test_a_dataset_that_was_cut_off_resumed_copied_and_moved_can_still_be_played_again(
    scripts, tmp_path, save_every, monkeypatch
):
    save_every(2)
    module, path = scripts.ppo_lag, tmp_path / "episodes"
    args = small_ppo_lag(
        scripts,
        tmp_path,
        total_timesteps=4_000,
        save_trajectories=str(path),
        max_trajectories=10,
    )
    cut_off(module, args, after=5, monkeypatch=monkeypatch)
    resume(module, tmp_path / "run")
    shutil.copytree(path, tmp_path / "copy")
    shutil.rmtree(path)
    (tmp_path / "copy").rename(tmp_path / "moved")
    dataset = TrajectoryDataset(tmp_path / "moved")
    assert dataset.seen == 40
    file = Replays(tmp_path)
    assert file.include(tmp_path / "moved")
    assert None not in map(file.of, dataset)
    frames = list(replay_frames(file.of(dataset[-1]), dataset[-1], every=50))
    assert [frame.shape for frame, _ in frames] == [(240, 240, 3)] * 3
