import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pbcrl import CostModel, errors
from pbcrl.epic import epic_distance

from .every_space import boxes

# Those of the toy, which older versions of Gymnasium do not have.
HAZARDS = np.array([(x, y) for x in (-0.45, 0.45) for y in (-0.45, 0.45)])
HAZARD_RADIUS = 0.25

law = settings(derandomize=True, deadline=None, max_examples=20)
seeds = st.integers(0, 1000)
discounts = st.sampled_from([0.0, 0.5, 0.99, 1.0])


def batch(seed=0, n=300, obs_dim=3, act_dim=2):
    """A coverage batch: states, actions and next states that depend on both."""
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(n, obs_dim, generator=generator)
    actions = torch.randn(n, act_dim, generator=generator)
    drift = torch.randn(act_dim, obs_dim, generator=generator)
    next_obs = 0.9 * obs + 0.3 * actions @ drift
    return obs, actions, next_obs


def random_cost(seed, obs_dim=3, act_dim=2):
    """A smooth, crooked cost of (s, a, s')."""
    generator = torch.Generator().manual_seed(seed)
    inwards = torch.randn(2 * obs_dim + act_dim, 8, generator=generator)
    outwards = torch.randn(8, generator=generator)
    return lambda s, a, s2: torch.sin(torch.cat([s, a, s2], dim=1) @ inwards) @ outwards


def distance(first, second, transitions=None, **options):
    options = {"generator": torch.Generator().manual_seed(1), "num_samples": 16, **options}
    return epic_distance(first, second, *(transitions or batch()), **options)


def potential(s):
    return 3 * torch.cos(2 * s[:, 0]) + s[:, 1] * s[:, 2]


# -- Invariances -------------------------------------------------------------------------------


@law
@given(seeds, discounts)
def test_scaling_shifting_and_shaping_a_cost_leaves_it_the_same(seed, discount):
    cost = random_cost(seed)

    def shaped(s, a, s2):
        return 7 * cost(s, a, s2) + 4 + discount * potential(s2) - potential(s)

    assert distance(cost, shaped, discount=discount) == pytest.approx(0, abs=1e-5)


def test_shaping_with_another_discount_is_seen():
    cost = random_cost(0)

    def shaped(s, a, s2):
        return cost(s, a, s2) + 0.5 * potential(s2) - potential(s)

    assert distance(cost, shaped, discount=1.0) > 0.1


@law
@given(seeds, discounts)
def test_the_opposite_cost_is_at_distance_1(seed, discount):
    cost = random_cost(seed)
    opposite = distance(cost, lambda *row: -2 * cost(*row), discount=discount)
    assert opposite == pytest.approx(1, abs=1e-6)


@law
@given(seeds, discounts)
def test_the_distance_is_symmetric_and_obeys_the_triangle_inequality(seed, discount):
    a, b, c = (random_cost(seed + k) for k in range(3))
    ab, bc, ac = (distance(x, y, discount=discount) for x, y in ((a, b), (b, c), (a, c)))
    assert ab == pytest.approx(distance(b, a, discount=discount), abs=1e-9)
    assert ac <= ab + bc + 1e-9


def test_unrelated_costs_are_at_distance_1_over_root_2():
    """Pure noise of the state and of the action; 3,000 transitions leave about 1 % of chance."""
    found = distance(
        lambda s, _a, _s2: torch.sin(50 * s[:, 0]),
        lambda _s, a, _s2: torch.sin(50 * a[:, 0]),
        batch(n=3000),
    )
    assert found == pytest.approx(1 / math.sqrt(2), abs=0.02)


# -- Numbers -----------------------------------------------------------------------------------


def test_in_a_single_state_it_is_the_correlation_over_the_actions():
    """Costs (1, 0, 0, 0) and (0, 1, 0, 0) correlate with -1/3: sqrt((4 / 3) / 2)."""
    state, actions = torch.zeros(4, 1), torch.arange(4.0)[:, None]
    found = distance(
        lambda _s, a, _s2: (a[:, 0] == 0).float(),
        lambda _s, a, _s2: (a[:, 0] == 1).float(),
        (state, actions, state),
    )
    assert found == pytest.approx(math.sqrt(2 / 3))


def test_it_agrees_with_summing_a_table_over_all_states_and_actions():
    """4 states, 3 actions, all 48 transitions; canonical form by its definition, in NumPy."""
    rng = np.random.default_rng(0)
    gamma, tables = 0.9, rng.normal(size=(2, 4, 3, 4))
    canonical = []
    for table in tables:  # R(s, a, s') + E[γ R(s', A, S') - R(s, A, S') - γ R(S, A, S')]
        mean = table.mean(axis=(1, 2))
        shaped = table + gamma * mean[None, None, :] - mean[:, None, None] - gamma * mean.mean()
        canonical.append(shaped.ravel())
    expected = math.sqrt((1 - np.corrcoef(canonical)[0, 1]) / 2)
    s, a, s2 = (torch.tensor(axis.ravel())[:, None] for axis in np.indices((4, 3, 4)))
    first, second = (
        lambda s, a, s2, table=table: torch.tensor(table)[s[:, 0], a[:, 0], s2[:, 0]]
        for table in tables
    )
    found = distance(first, second, (s, a, s2), discount=gamma, num_samples=20_000)
    assert found == pytest.approx(expected, abs=0.005)


def inside(position):
    gaps = position[:, None, :2] - torch.tensor(HAZARDS, dtype=torch.float32)
    return (gaps.norm(dim=2) < HAZARD_RADIUS).any(dim=1).float()


def toy_batch(n=2000):
    generator = torch.Generator().manual_seed(0)
    obs = 2 * torch.rand(n, 2, generator=generator) - 1
    actions = 2 * torch.rand(n, 2, generator=generator) - 1
    return obs, actions, (obs + 0.1 * actions).clamp(-1, 1)


def test_being_in_a_hazard_and_arriving_in_one_are_the_same_cost():
    found = distance(
        lambda s, _a, _s2: inside(s), lambda _s, _a, s2: inside(s2), toy_batch(), discount=1.0
    )
    assert found == pytest.approx(0, abs=1e-6)


def test_a_cost_model_fitted_to_the_hazards_comes_close_to_them():
    torch.manual_seed(0)
    model = CostModel(*boxes(2, 2), output_scale=1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    obs, actions, next_obs = toy_batch()

    def learned(s, a, _s2):
        return model(s, a)

    def true(s, a, _s2):
        return inside((s + 0.1 * a).clamp(-1, 1))

    distances = []
    for _ in range(2):
        for _ in range(150):
            optimizer.zero_grad()
            (model(obs, actions) - inside(next_obs)).square().mean().backward()
            optimizer.step()
        distances.append(distance(learned, true, toy_batch(500), num_samples=64))
    assert distances[1] < distances[0] < 1 / math.sqrt(2)
    assert distances[1] < 0.4


# -- Degenerate and wrong input ----------------------------------------------------------------


@pytest.mark.parametrize(
    "constant",
    [
        lambda s, _a, _s2: torch.full((len(s),), 0.3),
        lambda s, _a, s2: potential(s2) - potential(s) + 0.3,
    ],
)
def test_a_cost_that_is_nothing_but_shaping_has_no_distance(constant):
    with pytest.warns(RuntimeWarning, match="undefined, because a cost is constant, apart from"):
        assert math.isnan(distance(random_cost(0), constant))


def test_a_batch_of_one_transition_or_of_unequal_sizes_is_refused():
    cost, (obs, actions, next_obs) = random_cost(0), batch()
    for rows in ((obs[:1], actions[:1], next_obs[:1]), (obs, actions, next_obs[1:])):
        with pytest.raises(ValueError, match=r"two or more transitions .* got \d+, \d+ and \d+"):
            distance(cost, cost, rows)


def test_a_cost_that_does_not_return_one_finite_number_per_row_is_refused():
    with pytest.raises(ValueError, match=r"one number per row, \(300,\), got \(300, 2\)"):
        distance(random_cost(0), lambda _s, a, _s2: a)
    with pytest.raises(errors.NonFiniteError, match=r"also in new combinations, got 300 NaN"):
        distance(random_cost(0), lambda _s, a, _s2: a[:, 0] / 0.0)


@pytest.mark.parametrize(
    ("option", "match"),
    [({"discount": 1.5}, "discount must lie in"), ({"num_samples": 0}, "num_samples must lie in")],
)
def test_options_out_of_range_are_refused(option, match):
    with pytest.raises(ValueError, match=match):
        distance(random_cost(0), random_cost(1), **option)
