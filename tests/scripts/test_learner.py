"""The gradient steps of PPO: the same numbers however they are computed."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

OBS_DIM, ACT_DIM, ROWS = 5, 2, 70
HIGH = np.array([0.5, 2.0])  # float64, as our robots have it
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def rollout():
    """Observations, actions, advantages and targets of 70 steps."""
    rng = torch.Generator().manual_seed(1)
    shapes = (ROWS, OBS_DIM), (ROWS, ACT_DIM), (ROWS,), (2, ROWS)
    return [torch.randn(shape, generator=rng) for shape in shapes]


def make_learner(script, **changes):
    torch.manual_seed(0)
    options = {"num_envs": 7, "num_steps": 10, "minibatch_size": 16, "epochs": 4, "lr": 1e-3}
    args = script.Args(**{**options, "hidden_sizes": (32, 24), "target_kl": np.inf, **changes})
    agent = script.Agent(OBS_DIM, ACT_DIM, hidden_sizes=args.hidden_sizes)
    nn.init.normal_(agent.mean[-1].weight, std=0.2)  # means beyond their bounds, too
    return script.Learner(agent, args, -HIGH, HIGH)


def train(learner, rollout, *, updates=1):
    obs, actions, adv, targets = rollout
    for k in range(updates):
        learner.take_rollout(obs, actions)
        logged = learner.update(adv, targets, np.random.default_rng(k))
    return logged


def weights(agent):
    return nn.utils.parameters_to_vector(agent.parameters()).detach()


def plain_update(agent, args, rollout, rng):
    """PPO as it is written down: a loop with nothing kept, nothing shared and nothing stacked."""
    obs, actions, adv, (target_r, target_c) = rollout
    actor = [*agent.mean.parameters(), agent.log_std]
    critics = [*agent.critic_r.parameters(), *agent.critic_c.parameters()]
    optimizers = [torch.optim.Adam(part, lr=args.lr) for part in (actor, critics)]

    def log_prob(mean, rows):
        policy = torch.distributions.Normal(mean, agent.log_std.exp())
        return policy.log_prob(actions[rows]).sum(-1)

    with torch.no_grad():
        old_log_prob = log_prob(agent.mean(obs), slice(None))
    high = torch.tensor(HIGH, dtype=torch.float32)
    actor_goes_on, kls = True, []
    for _ in range(args.epochs):
        kl_sum = 0.0
        for rows in torch.split(torch.from_numpy(rng.permutation(ROWS)), args.minibatch_size):
            mean = agent.mean(obs[rows])
            log_ratio = log_prob(mean, rows) - old_log_prob[rows]
            ratio = log_ratio.exp()
            clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
            actor_loss = -torch.minimum(ratio * adv[rows], clipped * adv[rows]).mean()
            outside = (mean.abs() - high).clamp(min=0)
            actor_loss = actor_loss + args.bound_coef * outside.square().sum(-1).mean()
            value_r, value_c = (net(obs[rows])[:, 0] for net in (agent.critic_r, agent.critic_c))
            error_r, error_c = value_r - target_r[rows], value_c - target_c[rows]
            critic_loss = 0.5 * error_r.square().mean() + 0.5 * error_c.square().mean()
            losses = actor_loss, critic_loss
            for optimizer, part, loss in zip(optimizers, (actor, critics), losses, strict=True):
                if part is actor and not actor_goes_on:
                    continue
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                nn.utils.clip_grad_norm_(part, args.max_grad_norm)
                optimizer.step()
            kl_sum += float((ratio - 1 - log_ratio).sum().detach())
        if actor_goes_on:
            kls.append(kl_sum / ROWS)
            actor_goes_on = kls[-1] <= args.target_kl
    return kls


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("bound_coef", [0.0, 0.3])
@pytest.mark.parametrize("target_kl", [np.inf, 0.01])
def test_an_update_is_that_of_a_plain_loop(scripts, rollout, target_kl, bound_coef, together):
    learner = make_learner(scripts.ppo_lag, target_kl=target_kl, bound_coef=bound_coef)
    learner.together = together
    agent = copy.deepcopy(learner.agent)
    before = weights(agent)
    logged = train(learner, rollout)
    kls = plain_update(agent, learner.args, rollout, np.random.default_rng(0))
    torch.testing.assert_close(weights(learner.agent), weights(agent), atol=1e-5, rtol=1e-5)
    assert (weights(agent) - before).abs().max() > 0.01
    assert logged["actor_epochs"] == len(kls)
    assert (len(kls) < 4) == (target_kl < 1)  # the KL stop was met
    assert logged["kl"] == pytest.approx(kls[-1], rel=1e-4)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_gradients_are_those_of_autograd(scripts, rollout, together, bf16):
    learner = make_learner(scripts.ppo_lag, bf16=bf16, bound_coef=0.3)
    learner.together = together
    obs, actions, adv, targets = rollout
    old_log_prob = torch.linspace(-4, 1, ROWS)  # ratios on both sides of their bounds
    with torch.no_grad():
        learner.critics_backward(obs, targets)
        ratio = learner.actor_backward(obs, actions, old_log_prob, adv).exp()
    ours = torch.cat([learner.critics_gradient, learner.actor_gradient])
    assert 0.2 < ((ratio - 1).abs() > 0.2).float().mean() < 1

    agent = copy.deepcopy(learner.agent)
    mean = agent.mean(obs)
    ratio = (agent.log_prob(mean, actions) - old_log_prob).exp()
    actor_loss = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    outside = (mean.abs() - torch.tensor(HIGH, dtype=torch.float32)).clamp(min=0)
    actor_loss = actor_loss + 0.3 * outside.square().sum(-1).mean()
    for net, target in zip((agent.critic_r, agent.critic_c), targets, strict=True):
        actor_loss = actor_loss + 0.5 * (net(obs)[:, 0] - target).square().mean()
    agent.zero_grad()
    torch.autograd.backward(actor_loss)
    by_name = {name: part.grad for name, part in agent.named_parameters()}
    gradient = {name: part.grad for name, part in learner.agent.named_parameters()}
    assert len(gradient) == 19
    assert sum(part.numel() for part in gradient.values()) == len(ours)
    for name, part in gradient.items():
        if bf16:
            assert torch.cosine_similarity(part.flatten(), by_name[name].flatten(), dim=0) > 0.99
        else:
            torch.testing.assert_close(part, by_name[name], atol=1e-6, rtol=1e-5)


def test_hidden_layers_alone_are_rounded_to_bfloat16(scripts, rollout):
    forward, x = scripts.ppo_lag.forward, rollout[0]
    net = make_learner(scripts.ppo_lag).agent.critic_r
    layers = [(layer.weight, layer.bias) for layer in net if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        exact, rounded = (forward(layers, x, bf16=bf16)[-1] for bf16 in (False, True))
        torch.testing.assert_close(exact, net(x), atol=1e-6, rtol=1e-6)
        error = (rounded - exact).abs().max() / exact.abs().max()
        assert 1e-5 < error < 2**-6
        by_hand = x.bfloat16()
        for layer in list(net)[:-1]:
            by_hand = copy.deepcopy(layer).bfloat16()(by_hand)
        torch.testing.assert_close(rounded, net[-1](by_hand.float()), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("largest", [0.5, 100.0])
def test_a_gradient_is_clipped_as_pytorch_clips_it(scripts, largest):
    gradient = torch.randn(1_000, generator=torch.Generator().manual_seed(0))
    other = nn.Parameter(torch.zeros(1_000))
    other.grad = gradient.clone()
    nn.utils.clip_grad_norm_(other, largest)
    scripts.ppo_lag.clip_norm(gradient, largest)
    torch.testing.assert_close(gradient, other.grad)


def test_an_update_in_bfloat16_goes_where_that_in_float32_goes(scripts, rollout):
    moved = {}
    for bf16 in (False, True):
        learner = make_learner(scripts.ppo_lag, bf16=bf16, lr=1e-4)
        before = weights(learner.agent)
        train(learner, rollout)
        assert all(weight.dtype == torch.float32 for weight in learner.agent.parameters())
        moved[bf16] = weights(learner.agent) - before
    assert not torch.equal(moved[True], moved[False])
    assert torch.cosine_similarity(moved[True], moved[False], dim=0) > 0.97


@pytest.mark.parametrize("bf16", [False, True])
def test_ratios_start_at_one_in_either_precision(scripts, rollout, bf16):
    """One minibatch per epoch: its ratios are taken before the first step."""
    learner = make_learner(scripts.ppo_lag, bf16=bf16, epochs=1, minibatch_size=ROWS)
    logged = train(learner, rollout)
    assert logged["kl"] == pytest.approx(0, abs=1e-7)
    assert logged["clip_fraction"] == 0


def test_values_are_in_float32_with_bf16_too(scripts, rollout):
    exact, half = (make_learner(scripts.ppo_lag, bf16=bf16) for bf16 in (False, True))
    assert torch.equal(exact.values(rollout[0]), half.values(rollout[0]))


def test_a_learner_goes_on_where_its_state_was_taken(scripts, rollout):
    whole, first = (make_learner(scripts.ppo_lag) for _ in range(2))
    train(whole, rollout, updates=2)
    train(first, rollout)
    second = make_learner(scripts.ppo_lag)
    second.acting.load_state_dict(first.acting.state_dict())
    second.load_optimizer(copy.deepcopy(first.optimizer.state_dict()))
    second.take_rollout(*rollout[:2])
    second.update(*rollout[2:], np.random.default_rng(1))
    assert torch.equal(weights(second.agent), weights(whole.agent))


def test_a_gpu_that_is_not_there_is_refused(scripts):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=r"--device cuda needs a GPU that PyTorch can use.*leave"):
        scripts.ppo_lag.train(scripts.ppo_lag.Args(device="cuda"))


@needs_gpu
@pytest.mark.parametrize("target_kl", [np.inf, 0.01])
def test_captured_epochs_are_those_of_the_cpu(scripts, rollout, target_kl):
    """Three updates of four epochs, the first three of which are not captured."""
    agents = []
    for device in ("cpu", "cuda"):
        learner = make_learner(scripts.ppo_lag, device=device, target_kl=target_kl, bound_coef=0.3)
        learner.set_lr(1e-3)  # read by the graphs, which are captured later
        train(learner, rollout, updates=2)
        learner.set_lr(1e-4)
        train(learner, rollout)
        agents.append(weights(learner.acting))
        assert next(learner.acting.parameters()).device.type == "cpu"
        if device == "cuda":
            assert set(learner.graphs) == ({True} if np.isinf(target_kl) else {True, False})
    torch.testing.assert_close(*agents, atol=1e-3, rtol=1e-3)


@needs_gpu
def test_a_run_on_a_gpu_ends(scripts, tmp_path):
    args = scripts.ppo_lag.Args(
        env_id="PointHazards-v0",
        total_timesteps=4_000,
        num_envs=10,
        num_steps=100,
        minibatch_size=300,
        eval_episodes=2,
        device="cuda",
        bf16=True,
        runs_dir=str(tmp_path),
    )
    assert (scripts.ppo_lag.train(args) / "summary.json").exists()
