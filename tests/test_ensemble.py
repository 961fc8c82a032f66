import math

import numpy as np
import pytest
import torch

from pbcrl.cost_model import CostModel
from pbcrl.ensemble import CostModelEnsemble, load_cost_model
from pbcrl.errors import MismatchError
from pbcrl.trajectory import Trajectory

from .every_space import boxes


def constant_model(cost, **options):
    """Every step costs the same."""
    model = CostModel(*boxes(1, 1), hidden_sizes=(), output_scale=1.0, **options)
    torch.nn.init.constant_(model.net[0].bias, cost)
    return model


def episodes(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [Trajectory(rng.normal(size=(n, 1)), rng.normal(size=(n, 1))) for n in lengths]


def random_ensemble(num=3, *, pessimism=0.5, **options):
    torch.manual_seed(0)
    members = [
        CostModel(*boxes(1, 1), hidden_sizes=(8,), output_scale=1.0, **options) for _ in range(num)
    ]
    for member in members:
        torch.nn.init.normal_(member.net[-1].weight)
    return CostModelEnsemble(members, pessimism=pessimism)


class Slope(torch.nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(slope))

    def forward(self, obs, actions):
        return self.slope * obs[..., 0] + actions[..., 0]


# -- Costs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("pessimism", "cost"), [(0.0, 2.0), (1.0, 3.0), (-0.5, 1.5)])
def test_a_step_costs_the_mean_plus_kappa_deviations_of_its_members(pessimism, cost):
    """Members say 1, 3, 1 and 3: mean 2, deviation 1."""
    members = [constant_model(c) for c in (1.0, 3.0, 1.0, 3.0)]
    ensemble = CostModelEnsemble(members, pessimism=pessimism)
    assert ensemble.step_cost(np.zeros((2, 1)), np.zeros((2, 1))).tolist() == [cost, cost]
    assert ensemble.score(episodes(5)).tolist() == [5 * cost]


def test_step_costs_sum_to_the_cost_of_an_episode_under_pessimism():
    ensemble, (episode,) = random_ensemble(), episodes(50)
    steps = ensemble.step_cost(episode.obs, episode.actions)
    assert ensemble.score([episode])[0] == pytest.approx(steps.sum(), rel=1e-5)


def test_pessimism_over_steps_is_at_least_that_over_episodes():
    """The norm of a sum is at most the sum of the norms."""
    given = episodes(50, 50, 50)
    plain, charged = random_ensemble(pessimism=0.0), random_ensemble(pessimism=1.0)
    over_steps = charged.score(given) - plain.score(given)
    over_episodes = plain.member_scores(given).std(axis=0)
    assert (over_steps > over_episodes - 1e-4).all()


def test_member_scores_average_to_the_score_without_pessimism():
    given, ensemble = episodes(30, 4, 11), random_ensemble(pessimism=0.0)
    scores = ensemble.member_scores(given)
    assert scores.shape == (3, 3)
    np.testing.assert_allclose(scores.mean(axis=0), ensemble.score(given), atol=1e-5)
    np.testing.assert_allclose(scores[1], ensemble.members[1].score(given), atol=1e-5)
    assert ensemble.member_scores([]).shape == (3, 0)


def test_an_untrained_ensemble_puts_every_episode_on_the_limit_whatever_its_pessimism():
    ensemble = CostModelEnsemble([CostModel(*boxes(1, 1)), CostModel(*boxes(1, 1))], pessimism=3.0)
    assert ensemble.score(episodes(1, 100)).tolist() == [0, 0]
    assert ensemble.learned_limit == 0


def test_members_share_one_input_scale():
    ensemble = random_ensemble()
    ensemble.fit_input_scale([Trajectory(np.array([[1.0], [3.0]]), np.zeros((2, 1)))])
    assert [member.input_mean[0].item() for member in ensemble.members] == [2, 2, 2]
    assert [member.input_scale[0].item() for member in ensemble.members] == [1, 1, 1]


def test_an_ensemble_is_prorated_as_its_members_are():
    ensemble = random_ensemble(horizon=10)
    ensemble.prorate(30)
    assert [member.horizon for member in (ensemble, *ensemble.members)] == [30] * 4
    ensemble.score(episodes(30))


# -- Files -----------------------------------------------------------------------------------


def test_a_saved_ensemble_comes_back_with_equal_costs_and_its_info(tmp_path):
    path, ensemble, given = tmp_path / "model.safetensors", random_ensemble(), episodes(30, 4)
    ensemble.fit_input_scale(given)
    ensemble.save(path, env_id="Toy-v0")
    for loaded, info in (CostModelEnsemble.load(path), load_cost_model(path)):
        assert info == {"env_id": "Toy-v0"}
        assert (loaded.pessimism, loaded.num_members) == (0.5, 3)
        np.testing.assert_array_equal(loaded.score(given), ensemble.score(given))


def test_a_single_model_and_an_ensemble_are_not_read_as_each_other(tmp_path):
    single, several = tmp_path / "single.safetensors", tmp_path / "several.safetensors"
    CostModel(*boxes(1, 1)).save(single)
    random_ensemble().save(several)
    with pytest.raises(MismatchError, match=r"not an ensemble; read it by CostModel\.load"):
        CostModelEnsemble.load(single)
    with pytest.raises(MismatchError, match="not a single cost model; read it by CostModelEnsembl"):
        CostModel.load(several)
    assert isinstance(load_cost_model(single)[0], CostModel)
    assert isinstance(load_cost_model(several)[0], CostModelEnsemble)


def test_custom_networks_are_given_again_one_per_member(tmp_path):
    path = tmp_path / "model.safetensors"
    members = [CostModel(*boxes(1, 1), net=Slope(slope), output_scale=1.0) for slope in (2.0, 4.0)]
    CostModelEnsemble(members).save(path)
    loaded, _ = CostModelEnsemble.load(path, nets=[Slope(0.0), Slope(0.0)])
    assert loaded.step_cost(np.ones((1, 1)), np.zeros((1, 1))).tolist() == [3]
    with pytest.raises(MismatchError, match="has 2 members, got 1 networks; pass one module per m"):
        CostModelEnsemble.load(path, nets=[Slope(0.0)])
    with pytest.raises(MismatchError, match="those of Slope, got net=none"):
        load_cost_model(path)


# -- Arguments -------------------------------------------------------------------------------


def test_fewer_than_two_different_members_are_refused():
    model = CostModel(*boxes(1, 1))
    for members, found in [
        ([], "got 0 different ones of 0"),
        ([model], "got 1 different ones of 1"),
        ([model, model], "got 1 different ones of 2"),
    ]:
        with pytest.raises(ValueError, match=found):
            CostModelEnsemble(members)


def test_members_that_judge_other_trajectories_are_refused():
    message = r"the same obs_shape, .* got 2 different ones of 2 with .*\(\(1,\), 1, 1\.0, None\)"
    with pytest.raises(ValueError, match=message):
        CostModelEnsemble([CostModel(*boxes(1, 1)), CostModel(*boxes(2, 1))])
    with pytest.raises(ValueError, match=message):
        CostModelEnsemble([CostModel(*boxes(1, 1)), CostModel(*boxes(1, 1), horizon=10)])


@pytest.mark.parametrize("pessimism", [math.nan, math.inf])
def test_pessimism_must_be_a_number(pessimism):
    with pytest.raises(ValueError, match=rf"pessimism must lie in \(-inf, inf\), got {pessimism}"):
        CostModelEnsemble([CostModel(*boxes(1, 1)), CostModel(*boxes(1, 1))], pessimism=pessimism)
