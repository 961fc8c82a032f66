import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    Sequence,
    Text,
    Tuple,
)
from gymnasium.spaces.utils import flatten, flatten_space
from gymnasium.vector.utils import concatenate, create_empty_array

from pbcrl.spaces import act_dim_of, action_rows, input_names, names_of, obs_rows, obs_shape_of
from pbcrl.trees import TreeCost

from .every_space import ACTION_SPACES, IMAGES, OBS_SPACES, Wander

EVERY_SPACE = OBS_SPACES | ACTION_SPACES
each_space = pytest.mark.parametrize("space", EVERY_SPACE.values(), ids=EVERY_SPACE)


def samples(space, count):
    space.seed(0)
    return [space.sample() for _ in range(count)]


def batch_of(space, values):
    """As a vector env hands them out."""
    return concatenate(space, values, create_empty_array(space, len(values)))


@each_space
def test_rows_are_laid_out_as_gymnasium_flattens_them(space):
    for sample in samples(space, 20):
        np.testing.assert_array_equal(
            obs_rows(space, sample)[0], flatten(space, sample).astype(np.float32)
        )


@each_space
def test_rows_of_a_batch_are_those_of_its_samples(space):
    values = samples(space, 5)
    rows = obs_rows(space, batch_of(space, values), num_envs=5)
    np.testing.assert_array_equal(rows, np.concatenate([obs_rows(space, v) for v in values]))


@each_space
def test_rows_are_copies(space):
    rows = obs_rows(space, value := samples(space, 1)[0])
    before = rows.copy()
    for array in [value] if isinstance(value, np.ndarray) else []:
        array[...] = 0 if array.any() else 1
    np.testing.assert_array_equal(rows, before)


@each_space
def test_the_width_of_a_row_is_that_of_gymnasiums_flat_space(space):
    shape = obs_shape_of(space)
    assert (int(np.prod(shape)),) == flatten_space(space).shape
    assert obs_rows(space, samples(space, 1)[0]).reshape(1, *shape).shape == (1, *shape)


@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
def test_action_rows_are_float32_of_the_announced_width(space):
    rows = action_rows(space, batch_of(space, samples(space, 3)), num_envs=3)
    assert rows.dtype == np.float32
    assert rows.shape == (3, act_dim_of(space))


def test_discrete_numbers_count_from_their_start():
    np.testing.assert_array_equal(obs_rows(Discrete(3, start=5), 6), [[0, 1, 0]])
    np.testing.assert_array_equal(
        action_rows(Discrete(2, start=-1), np.array([-1, 0]), num_envs=2), [[1, 0], [0, 1]]
    )


def test_each_entry_of_a_multi_discrete_table_is_one_hot():
    space = MultiDiscrete([[2, 3], [1, 2]])
    np.testing.assert_array_equal(action_rows(space, [[1, 2], [0, 0]]), [[0, 1, 0, 0, 1, 1, 1, 0]])


def test_a_single_number_is_a_row_of_one():
    assert obs_shape_of(Box(-1, 1, (), np.float32)) == (1,)
    np.testing.assert_array_equal(obs_rows(Box(-1, 1, (), np.float32), 0.5), [[0.5]])


def test_an_image_is_a_box_of_bytes_with_three_axes():
    assert {name: obs_shape_of(space) for name, space in OBS_SPACES.items() if name in IMAGES} == {
        name: OBS_SPACES[name].shape for name in IMAGES
    }
    assert obs_shape_of(Box(0, 255, (8, 8), np.uint8)) == (64,)
    assert obs_shape_of(Box(0, 1, (8, 8, 3), np.float32)) == (192,)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(np.uint8, np.uint8), (np.int64, np.float32), (np.float16, np.float32), (bool, np.float32)],
)
def test_bytes_stay_bytes_and_other_numbers_become_float32(dtype, kept):
    space = Box(0, 1, (4,), dtype)
    assert obs_rows(space, np.ones(4, dtype)).dtype == kept
    assert action_rows(space, np.ones(4, dtype)).dtype == np.float32


def test_numbers_in_an_observation_of_bytes_are_not_cut_off():
    with pytest.raises(ValueError, match="obs of a uint8 space must be uint8, got int64, which"):
        obs_rows(Box(0, 255, (2,), np.uint8), np.array([3, 256]))


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (Discrete(3), 3, r"action must lie in Discrete\(3\), got 3 \(int64\); check the output"),
        (Discrete(3), -1, r"action must lie in Discrete\(3\), got -1 "),
        (Discrete(3, start=2), 1, r"got 1 "),
        (Discrete(3), 1.0, r"got 1.0 \(float64\)"),
        (
            Discrete(3),
            np.array([1]),
            r"have the shape \(\) of its space, got \(1,\); check the",
        ),
        (MultiDiscrete([2, 3]), [2, 0], r"action must lie in MultiDiscrete.*, got \[2 0\]"),
        (MultiDiscrete([2, 3]), [0, -1], r"got \[ 0 -1\]"),
        (MultiDiscrete([2, 3]), [0], r"have the shape \(2,\) of its space, got \(1,\)"),
        (MultiBinary(2), [0, 2], r"action must lie in MultiBinary\(2\), got \[0 2\]"),
        (Box(0, 1, (2, 2)), np.zeros(4), r"have the shape \(2, 2\) of its space, got \(4,\)"),
    ],
)
def test_an_action_that_is_not_of_its_space_is_refused(space, value, message):
    with pytest.raises(ValueError, match=message):
        action_rows(space, value)


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (
            Dict(a=Discrete(2), b=Discrete(2)),
            {"a": 0},
            r"parts \['a', 'b'\] of its space, got",
        ),
        (
            Tuple([Discrete(2)]),
            (0, 1),
            r"the parts \[0\] of its space, got \[0, 1\]; fix",
        ),
        (Dict(a=Tuple([Discrete(2)])), {"a": (7,)}, r"^obs\['a'\]\[0\] must lie in Discrete\(2\)"),
    ],
)
def test_the_part_of_an_observation_that_does_not_fit_is_named(space, value, message):
    with pytest.raises(ValueError, match=message):
        obs_rows(space, value)


def test_the_env_whose_number_is_out_of_range_is_named():
    with pytest.raises(
        ValueError, match=r"obs must lie in Discrete\(3\), got 9 \(int64\) in env 1"
    ):
        obs_rows(Discrete(3), np.array([0, 9, 1]), num_envs=3)


@pytest.mark.parametrize(
    "space", [Text(5), Sequence(Discrete(2)), Graph(Box(0, 1, (2,)), None)], ids=repr
)
def test_a_space_without_a_fixed_length_is_refused_by_name_wherever_it_is(space):
    kind = type(space).__name__
    with pytest.raises(ValueError, match=rf"but observation is {kind}.*put TransformObservation"):
        obs_shape_of(space)
    nested = Dict(a=Tuple([Discrete(2), space]))
    with pytest.raises(ValueError, match=rf"but observation\['a'\]\[1\] is {kind}"):
        obs_shape_of(nested)
    with pytest.raises(ValueError, match=rf"but action is {kind}.*put TransformAction inside"):
        act_dim_of(space)


def test_an_action_of_several_parts_is_refused():
    with pytest.raises(ValueError, match=r"must be a Box, Discrete, .*got Dict.*TransformAction"):
        act_dim_of(Dict(a=Discrete(2)))


def test_a_space_without_any_number_is_refused():
    with pytest.raises(ValueError, match=r"at least one number, but the observation space is Dict"):
        obs_shape_of(Dict())
    with pytest.raises(ValueError, match=r"but the action space is Box.* give it a constant"):
        act_dim_of(Box(0, 1, (0,)))


# -- Names ---------------------------------------------------------------------------------------


def names_in(space):
    """Of an observation of `space`, without the action's."""
    names = input_names(space, Box(-1, 1, (1,)))
    assert names[-1] == "action[0]"
    return list(names[:-1])


@pytest.mark.parametrize(
    ("space", "names"),
    [
        (Box(-1, 1, (2,)), ["obs[0]", "obs[1]"]),
        (Box(-1, 1, ()), ["obs[0]"]),
        (Box(-1, 1, (2, 2)), ["obs[0]", "obs[1]", "obs[2]", "obs[3]"]),
        (Discrete(3), ["obs=0", "obs=1", "obs=2"]),
        (Discrete(2, start=-1), ["obs=-1", "obs=0"]),
        (MultiBinary(2), ["obs[0]", "obs[1]"]),
        (MultiDiscrete([2, 3]), ["obs[0]=0", "obs[0]=1", "obs[1]=0", "obs[1]=1", "obs[1]=2"]),
        (Dict(gear=Discrete(2), speed=Box(-1, 1, (1,))), ["gear=0", "gear=1", "speed"]),
        (Dict(lidar=Box(0, 1, (3,))), ["lidar[0]", "lidar[1]", "lidar[2]"]),
        (Dict(body=Dict(arm=Box(0, 1, (1,)), leg=Discrete(1))), ["body.arm", "body.leg=0"]),
        (Tuple([Box(0, 1, (1,)), Discrete(2)]), ["obs.0", "obs.1=0", "obs.1=1"]),
        (Dict(a=Tuple([Box(0, 1, (2,))])), ["a.0[0]", "a.0[1]"]),
    ],
    ids=str,
)
def test_numbers_are_named_by_their_keys_their_categories_or_their_place(space, names):
    assert names_in(space) == names


def test_the_numbers_of_an_action_come_last():
    assert input_names(Box(-1, 1, (1,)), Box(-1, 1, (2,))) == ("obs[0]", "action[0]", "action[1]")
    assert input_names(Box(-1, 1, (1,)), Discrete(2)) == ("obs[0]", "action=0", "action=1")
    assert input_names(Box(-1, 1, (1,)), MultiBinary(1)) == ("obs[0]", "action[0]")


@each_space
def test_each_number_of_every_space_has_a_name_of_its_own(space):
    names = names_in(space)
    assert len(names) == len(set(names)) == flatten_space(space).shape[0]


@pytest.mark.parametrize(
    "space",
    [Discrete(4), Discrete(4, start=3), MultiDiscrete([3, 2]), MultiDiscrete([[3, 2], [2, 4]])],
    ids=str,
)
def test_a_category_is_1_where_the_value_is_what_its_name_says(space):
    for sample in samples(space, 20):
        (row,) = obs_rows(space, sample)
        said = [name for name, x in zip(names_in(space), row, strict=True) if x == 1]
        assert [int(name.split("=")[1]) for name in said] == np.ravel(sample).tolist()


@pytest.mark.parametrize(
    "space",
    [
        Dict(obs=Dict(x=Box(-1, 1, (1,))), x=Box(-1, 1, (1,))),
        Dict({"a.b": Box(-1, 1, (1,)), "a": Dict(b=Box(-1, 1, (1,)))}),
        Dict({"a[0]": Box(-1, 1, (1,)), "a": Box(-1, 1, (2,))}),
        Dict({"action[0]": Box(-1, 1, (1,))}),
    ],
    ids=["a part called obs", "a dot in a key", "an index in a key", "a key like an action"],
)
def test_names_differ_whatever_the_keys_of_a_dict_are(space):
    names = input_names(space, Box(-1, 1, (1,)))
    assert len(set(names)) == len(names)


def test_better_names_replace_those_of_the_observation_alone():
    spaces = Box(-1, 1, (2,)), Discrete(2)
    assert input_names(*spaces, ["x", "y"]) == ("x", "y", "action=0", "action=1")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["x"], "2, got 1, 1 of them different"),
        (["x", "y", "z"], "2, got 3, 3 of them different"),
        (["x", "x"], "2, got 2, 1 of them different"),
        ([], "2, got 0, 0 of them different"),
    ],
)
def test_names_that_do_not_fit_the_observation_are_refused(names, found):
    with pytest.raises(
        ValueError, match=f"observation_names of the env are one per number.*: {found}"
    ):
        input_names(Box(-1, 1, (2,)), Discrete(2), names)


class Named(Wander):
    observation_names = ("x", "y")


def named(cls=Named):
    return cls(Box(-1, 1, (2,)), Box(-1, 1, (1,)), 5)


def test_an_env_names_its_own_observation_through_wrappers_that_keep_it():
    expected = ("x", "y", "action[0]")
    assert names_of(named()) == expected
    assert names_of(gym.wrappers.TimeLimit(named(), 3)) == expected
    assert names_of(named(Wander)) == ("obs[0]", "obs[1]", "action[0]")


def test_flattening_keeps_the_names_of_a_dict():
    space = Dict(speed=Box(0, 9, (1,)), lidar=Box(0, 1, (3,)), gear=Discrete(2))
    env = gym.wrappers.FlattenObservation(Wander(space, Box(-1, 1, (1,)), 5))
    expected = input_names(space, Box(-1, 1, (1,)))
    assert names_of(env) == expected
    row = env.reset(seed=0)[0]
    assert len(row) == len(expected) - 1
    model = TreeCost.for_env(env)
    assert model.names == expected


def test_names_are_the_same_in_other_processes():
    envs = gym.vector.AsyncVectorEnv([named, named])
    try:
        assert names_of(envs) == ("x", "y", "action[0]")
    finally:
        envs.close()


@pytest.mark.parametrize(
    ("names", "error", "match"),
    [
        ("xy", TypeError, "observation_names of the env are a sequence of texts, .*got 'xy'"),
        ([1, 2], TypeError, "sequence of texts, .*got 1"),
        (lambda: ["x", "y"], TypeError, "sequence of texts"),
        (["x", "y\n|"], ValueError, "one line each"),
        (["x", "action[0]"], ValueError, "all different: 3, got 3, 2 of them different"),
    ],
)
def test_names_that_are_no_names_are_refused(names, error, match):
    with pytest.raises(error, match=match):
        input_names(Box(-1, 1, (2,)), Box(-1, 1, (1,)), names)


def test_trees_refuse_an_image_by_its_key():
    space = Dict(front=Dict(cam=Box(0, 255, (8, 8, 3), np.uint8)), speed=Box(0, 9, (2,)))
    with pytest.raises(ValueError, match=r"part 'front\.cam' is an image"):
        TreeCost(space, Discrete(2))
    TreeCost(Dict(bits=Box(0, 255, (4,), np.uint8), speed=Box(0, 9, (2,))), Discrete(2))


def test_names_of_what_a_wrapper_has_changed_do_not_count():
    env = gym.wrappers.FlattenObservation(named())  # of the same shape: nothing has changed
    assert names_of(env) == ("x", "y", "action[0]")
    env = gym.wrappers.ClipAction(named())
    assert names_of(env) == ("x", "y", "action[0]")

    class Doubled(gym.ObservationWrapper):
        observation_space = Box(-2, 2, (2,))

        def observation(self, obs):
            return 2 * obs

    assert names_of(Doubled(named())) == ("obs[0]", "obs[1]", "action[0]")


def test_a_list_of_an_env_that_does_not_fit_is_refused():
    class Wrong(Named):
        observation_names = ("x",)

    with pytest.raises(
        ValueError, match="2, got 1, 1 of them different; leave them out, or mend the list"
    ):
        names_of(named(Wrong))


def test_a_vector_env_has_the_names_of_its_envs():
    vector = pytest.importorskip("gymnasium", "1.1").vector
    assert names_of(vector.SyncVectorEnv([named, named])) == ("x", "y", "action[0]")

    class Batched(vector.VectorEnv):
        num_envs, observation_names = 2, ("x", "y")
        single_observation_space, single_action_space = Box(-1, 1, (2,)), Box(-1, 1, (1,))

    assert names_of(Batched()) == ("x", "y", "action[0]")

    changed = vector.VectorWrapper(Batched())
    assert names_of(changed) == ("x", "y", "action[0]")
    changed.single_observation_space = Box(-2, 2, (2,))
    assert names_of(changed) == ("obs[0]", "obs[1]", "action[0]")
