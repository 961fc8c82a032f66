"""Trajectories go to the formats of Minari and DSRL and come back bit by bit."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from pbcrl import Trajectory
from pbcrl.errors import CorruptFileError, NonFiniteError, StorageError

h5py = pytest.importorskip("h5py")
minari = pytest.importorskip("minari")

from pbcrl.data.dsrl import from_dsrl, to_dsrl  # noqa: E402
from pbcrl.data.minari import from_minari, to_minari  # noqa: E402

# Minari wants an author, a permalink and so on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari")

NAMES = "obs", "actions", "costs", "rewards", "terminated", "final_obs"


@pytest.fixture(autouse=True)
def _own_root(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def episodes(*, with_costs=True, shape=(3,), dtype=np.float32):
    rng, found = np.random.default_rng(0), []
    for steps, terminated in [(4, True), (1, False), (7, False), (2, True)]:
        obs = (255 * rng.random((steps + 1, *shape))).astype(dtype)
        costs = rng.random(steps) if with_costs else None
        rows = rng.normal(size=(steps, 2)), costs, rng.normal(size=steps)
        found.append(Trajectory(obs[:-1], *rows, terminated, obs[-1]))
    return found


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for name in NAMES:
            one, other = getattr(ours, name), getattr(theirs, name)
            assert (one is None) == (other is None), name
            assert np.asarray(one).dtype == np.asarray(other).dtype
            assert np.array_equal(one, other), name


@pytest.mark.parametrize("with_costs", [True, False])
def test_trajectories_come_back_from_dsrl_as_they_were(tmp_path, with_costs):
    written = episodes(with_costs=with_costs)
    to_dsrl(written, tmp_path / "walk.hdf5")
    assert_equal(from_dsrl(tmp_path / "walk.hdf5"), written)


@pytest.mark.parametrize("with_costs", [True, False])
def test_trajectories_come_back_from_minari_as_they_were(with_costs):
    written = episodes(with_costs=with_costs)
    spaces = {"observation_space": Box(-np.inf, np.inf, (3,)), "action_space": Box(-9, 9, (2,))}
    to_minari(written, "walk/random-v0", **spaces)
    assert_equal(from_minari("walk/random-v0"), written)  # from disk


def test_a_minari_dataset_that_names_its_env_makes_it_again():
    spaces = {"observation_space": Box(-np.inf, np.inf, (3,)), "action_space": Box(-9, 9, (2,))}
    written = to_minari(episodes(), "walk/of-pendulum-v0", **spaces, env="Pendulum-v1")
    assert written.recover_environment().spec.id == "Pendulum-v1"


def test_images_come_back_from_minari_as_they_were():
    written = episodes(shape=(40, 40, 3), dtype=np.uint8)
    spaces = {"observation_space": Box(0, 255, (40, 40, 3), np.uint8)}
    to_minari(written, "camera/random-v0", **spaces, action_space=Box(-9, 9, (2,)))
    assert_equal(from_minari("camera/random-v0"), written)


def test_a_file_of_the_dsrl_schema_made_by_somebody_else_opens(tmp_path):
    """Costs of both kinds of end, and steps after the last end: an episode that was cut off."""
    obs = np.arange(12, dtype=np.float64).reshape(6, 2)
    with h5py.File(tmp_path / "theirs.hdf5", "w") as file:
        file["observations"] = obs
        file["next_observations"] = obs + 0.5
        file["actions"] = np.ones((6, 1))
        file["rewards"] = np.arange(6.0)
        file["costs"] = [0.0, 1, 0, 0, 1, 1]
        file["terminals"] = np.array([0, 1, 0, 0, 0, 0], np.float32)
        file["timeouts"] = np.array([0, 0, 0, 1, 0, 0], bool)
    found = from_dsrl(tmp_path / "theirs.hdf5")
    assert [len(one) for one in found] == [2, 2, 2]
    assert [one.terminated for one in found] == [True, False, False]
    assert [one.true_cost for one in found] == [1, 0, 2]
    assert [one.final_obs.tolist() for one in found] == [[2.5, 3.5], [6.5, 7.5], [10.5, 11.5]]
    assert found[1].rewards.tolist() == [2, 3]


def test_a_dsrl_file_with_a_negative_cost_is_refused(tmp_path):
    to_dsrl(episodes(), tmp_path / "bonus.hdf5")
    with h5py.File(tmp_path / "bonus.hdf5", "r+") as file:
        file["costs"][1] = -1.0
    with pytest.raises(CorruptFileError, match=r"a true cost must be >= 0, got -1.0 at step 1"):
        from_dsrl(tmp_path / "bonus.hdf5")


def test_a_minari_dataset_made_by_somebody_else_opens():
    """Discrete actions, and infos with the reset's cost in front."""
    from minari.data_collector import EpisodeBuffer

    buffer = EpisodeBuffer(
        id=0,
        observations=np.arange(4, dtype=np.float64)[:, None],
        actions=np.array([0, 2, 1]),
        rewards=[1.0, 2.0, 3.0],
        terminations=[False, False, True],
        truncations=[False, False, False],
        infos={"cost": np.array([9.0, 0.0, 1.0, 2.0])},
    )
    spaces = {"observation_space": Box(-9, 9, (1,), np.float64), "action_space": Discrete(3)}
    dataset = minari.create_dataset_from_buffers(
        "theirs/random-v0", [buffer], **spaces, data_format="hdf5", requirements=[]
    )
    (found,) = from_minari(dataset)
    assert found.actions.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert found.costs.tolist() == [0, 1, 2]
    assert (found.obs.ravel().tolist(), found.final_obs.tolist()) == ([0, 1, 2], [3])
    assert (found.rewards.tolist(), found.terminated) == ([1, 2, 3], True)


def minari_dataset_of_actions(name, actions):
    """One episode of 3 steps, in an env whose two actions lie in [-1, 1] and [0, 2]."""
    from minari.data_collector import EpisodeBuffer

    buffer = EpisodeBuffer(
        id=0,
        observations=np.zeros((4, 1), np.float32),
        actions=np.array(actions, np.float32),
        rewards=[1.0, 2.0, 3.0],
        terminations=[False] * 3,
        truncations=[False, False, True],
        infos={},
    )
    bounds = Box(np.array([-1, 0], np.float32), np.array([1, 2], np.float32))
    spaces = {"observation_space": Box(-9, 9, (1,)), "action_space": bounds}
    return minari.create_dataset_from_buffers(
        name, [buffer], **spaces, data_format="hdf5", requirements=[]
    )


def test_actions_from_minari_are_clipped_to_what_the_env_executed_and_that_is_said():
    dataset = minari_dataset_of_actions("theirs/wide-v0", [[-3, 0.5], [0.25, 2], [0.5, 7]])
    with pytest.warns(UserWarning, match=r"2 of 3 actions of theirs/wide-v0 lie outside of Box"):
        (found,) = from_minari(dataset)
    assert found.actions.tolist() == [[-1, 0.5], [0.25, 2], [0.5, 2]]


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_an_action_from_minari_that_is_not_finite_is_refused_and_not_clipped(number):
    dataset = minari_dataset_of_actions("theirs/bad-v0", [[0, 1], [number, 1], [0, 1]])
    with pytest.raises(NonFiniteError, match="actions of a trajectory must be finite"):
        from_minari(dataset)


def test_a_minari_dataset_with_costs_of_another_shape_is_refused():
    from minari.data_collector import EpisodeBuffer

    spaces = {"observation_space": Box(-9, 9, (1,)), "action_space": Box(-1, 1, (1,))}
    for number, shape in enumerate([(3, 2), (2,)]):
        buffer = EpisodeBuffer(
            id=0,
            observations=np.zeros((4, 1), np.float32),
            actions=np.zeros((3, 1), np.float32),
            rewards=[1.0, 2.0, 3.0],
            terminations=[False] * 3,
            truncations=[False, False, True],
            infos={"cost": np.ones(shape)},
        )
        dataset = minari.create_dataset_from_buffers(
            f"theirs/costs-v{number}", [buffer], **spaces, data_format="hdf5", requirements=[]
        )
        with pytest.raises(ValueError, match=r"must be one number per step, .* has 3 steps and"):
            from_minari(dataset)


def test_what_lacks_rewards_cannot_be_exported(tmp_path):
    bare = [Trajectory(one.obs, one.actions, one.costs) for one in episodes()]
    box = Box(-9, 9, (3,))
    for write in (
        lambda given: to_dsrl(given, tmp_path / "walk.hdf5"),
        lambda given: to_minari(given, "a/b-v0", observation_space=box, action_space=box),
    ):
        with pytest.raises(ValueError, match="but 4 of 8 were recorded without them"):
            write(episodes() + bare)
        with pytest.raises(ValueError, match="but 0 of 0 were recorded without them"):
            write([])
    with pytest.raises(ValueError, match=r"actions as rows, here of shape \(2,\), .* got Box"):
        to_minari(episodes(), "a/b-v0", observation_space=box, action_space=box)
    with pytest.raises(ValueError, match="but 4 of 8 have; leave"):
        to_dsrl(episodes() + episodes(with_costs=False), tmp_path / "walk.hdf5")


def test_what_is_no_dsrl_file_is_refused_by_name(tmp_path):
    path = tmp_path / "bad.hdf5"
    with pytest.raises(StorageError, match=f"there is none at {path}"):
        from_dsrl(path)
    path.write_bytes(b"no HDF5")
    with pytest.raises(CorruptFileError, match="it is no HDF5 file"):
        from_dsrl(path)
    with h5py.File(path, "w") as file:
        file["observations"] = np.zeros((2, 1))
    with pytest.raises(CorruptFileError, match="it lacks next_observations, actions, rewards"):
        from_dsrl(path)
    to_dsrl(episodes(), path)
    with h5py.File(path, "r+") as file:
        del file["rewards"]
        file["rewards"] = np.zeros((14, 1))
    with pytest.raises(CorruptFileError, match=r"rewards of a trajectory must have shape \(T,\)"):
        from_dsrl(path)
