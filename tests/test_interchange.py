"""Trajectories go to the formats of Minari and DSRL and come back bit by bit."""

import io
import json
import shutil
import sys

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from pbcrl import Trajectory
from pbcrl.errors import CorruptFileError, MismatchError, NonFiniteError, StorageError

h5py = pytest.importorskip("h5py")
minari = pytest.importorskip("minari")

from pbcrl.data.dsrl import from_dsrl, to_dsrl  # noqa: E402
from pbcrl.data.minari import from_minari, open_minari, to_minari  # noqa: E402
from pbcrl.label.replay import Replay  # noqa: E402

from .damage import little_memory  # noqa: E402

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
    with pytest.raises(
        MismatchError, match=r"bad\.hdf5 lacks actions, rewards, terminals, timeouts; "
    ):
        from_dsrl(path)
    to_dsrl(episodes(), path)
    with h5py.File(path, "r+") as file:
        del file["rewards"]
        file["rewards"] = np.zeros((14, 2))
    with pytest.raises(CorruptFileError, match=r"rewards of a trajectory must have shape \(T,\)"):
        from_dsrl(path)


# -- Files from elsewhere --------------------------------------------------------------------------


def change(path, **arrays):
    """Put other arrays into an HDF5 file, or none in their place."""
    with h5py.File(path, "r+") as file:
        for name, array in arrays.items():
            del file[name]
            if array is not None:
                file[name] = array


def test_a_d4rl_file_without_next_observations_has_episodes_without_outcome(tmp_path):
    to_dsrl(episodes(), tmp_path / "walk.hdf5")
    change(tmp_path / "walk.hdf5", next_observations=None, costs=None)
    found = from_dsrl(tmp_path / "walk.hdf5")
    assert [len(one) for one in found] == [4, 1, 7, 2]
    assert {(one.costs, one.rewards, one.terminated, one.final_obs) for one in found} == {
        (None, None, None, None)
    }
    np.testing.assert_array_equal(found[2].obs, episodes()[2].obs)


def test_a_d4rl_file_without_timeouts_is_told_what_it_lacks(tmp_path):
    to_dsrl(episodes(), tmp_path / "walk.hdf5")
    change(tmp_path / "walk.hdf5", timeouts=None)
    with pytest.raises(
        MismatchError, match=r"walk\.hdf5 lacks timeouts; add .* a time limit ended"
    ):
        from_dsrl(tmp_path / "walk.hdf5")


@pytest.mark.parametrize("name", ["rewards", "costs", "terminals", "timeouts"])
def test_numbers_in_a_column_are_read_as_those_in_a_row(tmp_path, name):
    path = tmp_path / "walk.hdf5"
    to_dsrl(episodes(), path)
    with h5py.File(path, "r") as file:
        column = file[name][()][:, None]
    change(path, **{name: column})
    assert_equal(from_dsrl(path), episodes())
    change(path, **{name: np.concatenate([column, column], axis=1)})
    with pytest.raises(CorruptFileError, match=name):
        from_dsrl(path)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"terminals": np.full(14, 0.5)}, "its terminals are not one 0 or 1 per step"),
        ({"timeouts": np.full(14, np.nan)}, "its timeouts are not one 0 or 1 per step"),
        ({"timeouts": np.zeros(13)}, "its arrays have the shapes"),
        ({"actions": 1.0}, "its arrays have the shapes"),
        ({"terminals": 1.0}, "its arrays have the shapes"),
        ({"observations": np.array([b"text"] * 14)}, "observations is no array of numbers"),
        ({"next_observations": np.zeros((14, 9))}, "final_obs must be an observation like the"),
    ],
)
def test_arrays_that_make_no_episodes_are_refused_by_name(tmp_path, arrays, said):
    to_dsrl(episodes(), tmp_path / "walk.hdf5")
    change(tmp_path / "walk.hdf5", **arrays)
    with pytest.raises(CorruptFileError, match=said):
        from_dsrl(tmp_path / "walk.hdf5")


def test_an_array_that_lies_in_another_file_is_not_read(tmp_path):
    to_dsrl(episodes(), tmp_path / "other.hdf5")
    for name, put in {
        "linked": lambda file: file.__setitem__(
            "rewards", h5py.ExternalLink(str(tmp_path / "other.hdf5"), "rewards")
        ),
        "external": lambda file: file.create_dataset(
            "rewards", (14,), np.float32, external=[(str(tmp_path / "other.hdf5"), 0, 56)]
        ),
    }.items():
        to_dsrl(episodes(), tmp_path / f"{name}.hdf5")
        change(tmp_path / f"{name}.hdf5", rewards=None)
        with h5py.File(tmp_path / f"{name}.hdf5", "r+") as file:
            put(file)
        with pytest.raises(StorageError, match=r"lacks rewards|rewards lies in another file"):
            from_dsrl(tmp_path / f"{name}.hdf5")


def huge_hdf5(path):
    """Two GiB of zeros that a file does not hold."""
    with h5py.File(path, "r+") as file:
        group = file.get("episode_0", file)
        del group["rewards"]
        group.create_dataset("rewards", (2**29,), np.float32)


def honest_dsrl(folder):
    to_dsrl(episodes(), folder / "walk.hdf5")


def honest_minari(folder):
    spaces = {"observation_space": Box(-np.inf, np.inf, (3,)), "action_space": Box(-9, 9, (2,))}
    written = to_minari(episodes(), f"{folder.name}/random-v0", **spaces)
    shutil.copytree(written.storage.data_path, folder / "data")


def honest_replay(folder):
    state = {"position": np.arange(6.0), "seed": np.array(3)}
    replay = Replay("Walk-v0", state=state, before=np.zeros((3, 2), np.float32))
    (folder / "replay").write_bytes(replay.to_bytes())


FOREIGN = {
    "dsrl": (honest_dsrl, lambda folder: from_dsrl(folder / "walk.hdf5")),
    "minari": (honest_minari, lambda folder: from_minari(open_minari(folder / "data"))),
    "replay": (honest_replay, lambda folder: Replay.from_bytes((folder / "replay").read_bytes())),
}


def damaged(data, rng):
    """A file in which something is flipped, overwritten, cut off, doubled or claimed."""
    start = int(rng.integers(len(data)))
    end = min(len(data), start + int(rng.choice([1, 2, 4, 8, 100])))
    flipped = bytes([data[start] ^ 1 << int(rng.integers(8))])
    number = int(rng.choice([0, 1, 2**31, 2**40, 2**63])).to_bytes(8, "little")
    numbers = str(rng.choice(["-1", "1e9", "9" * 12, "null", "[]", '"x"'])).encode()
    return [
        data[:start] + flipped + data[start + 1 :],
        data[:start] + b"\xff" * (end - start) + data[end:],
        data[:start] + number + data[start + 8 :],
        data[:start] + numbers + data[end:],
        data[:start],
        data[:end] + data[start:],
    ][int(rng.integers(6))]


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # damage may be said
@pytest.mark.parametrize("cases", [60, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_damaged_file_of_another_format_is_refused_by_name_and_takes_little_memory(
    tmp_path, kind, cases
):
    write, read = FOREIGN[kind]
    rng, refusals = np.random.default_rng([*kind.encode()]), list[Exception]()
    (tmp_path / "good").mkdir()
    write(tmp_path / "good")
    read(tmp_path / "good")
    for case in range(cases):
        folder = tmp_path / str(case)
        shutil.copytree(tmp_path / "good", folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        path = files[int(rng.integers(len(files)))]
        path.write_bytes(damaged(path.read_bytes(), rng))
        try:
            with little_memory(512):
                read(folder)
        except (StorageError, NonFiniteError) as error:
            refusals.append(error)
        shutil.rmtree(folder)
    assert len(refusals) > cases / 10
    assert not any(isinstance(error.__cause__, MemoryError) for error in refusals)


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
@pytest.mark.parametrize("kind", ["dsrl", "minari"])
def test_what_a_small_file_claims_is_not_allocated(tmp_path, kind):
    write, read = FOREIGN[kind]
    write(tmp_path)
    (path,) = tmp_path.rglob("*.hdf5") if kind == "dsrl" else tmp_path.glob("data/*.hdf5")
    huge_hdf5(path)
    assert path.stat().st_size < 100_000
    with (
        pytest.raises(CorruptFileError, match=r"rewards its arrays claim 214748\d{4} bytes"),
        little_memory(512),
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("total_episodes", 10**12, "1000000000000 episodes, of which 4 are there"),
        ("total_episodes", -1, "-1 episodes, of which 4 are there"),
        ("total_episodes", None, "its description makes no sense"),
        (
            "action_space",
            '{"type": "Discrete", "dtype": "int64", "start": 0, "n": 1000000000000}',
            "claim",
        ),
        ("observation_space", '{"type": "Walk"}', "its description makes no sense"),
    ],
)
def test_what_a_minari_dataset_claims_is_not_believed(tmp_path, name, value, said):
    honest_minari(tmp_path)
    about = json.loads((tmp_path / "data" / "metadata.json").read_text())
    assert name in about
    (tmp_path / "data" / "metadata.json").write_text(json.dumps(about | {name: value}))
    with pytest.raises(CorruptFileError, match=said):
        from_minari(open_minari(tmp_path / "data"))
    with pytest.raises(StorageError, match=r"has none; download it, or correct the name"):
        from_minari("walk/nowhere-v0")


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_a_replay_that_claims_gibibytes_takes_none():
    """A MiB of an archive is a GiB of zeros."""
    file = io.BytesIO()
    np.savez_compressed(file, **{"state/position": np.zeros(2**28 + 2**17, np.uint8)})
    data = file.getvalue()
    assert len(data) < 2**20
    with pytest.raises(CorruptFileError, match="more than the 268435456 bytes"), little_memory(512):
        Replay.from_bytes(data)
