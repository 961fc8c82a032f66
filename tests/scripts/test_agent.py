"""Policy, critics and an update of PPO, whatever somebody has made of `mlp` and `losses`."""

import copy
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pbcrl.errors import StorageError
from pbcrl_script_utils.verdict import plus_minus

from .conftest import load_edited
from .runs import small, summary, weights

ROWS = 70
RELU = "(layer, nn.ReLU(inplace=True))"
TANH = RELU, "(layer, nn.Tanh())"
LAYER_NORM = RELU, "(layer, nn.LayerNorm(layer.out_features), nn.SiLU())"
RETURNED = "return policy, value_loss(agent, mb), log_ratio.detach()"
ENTROPY = RETURNED, RETURNED.replace("policy", "policy - 0.1 * agent.log_std.sum()", 1)


def make_args(script, **changes):
    options = {"env_id": "PointHazards-v0", "num_envs": 7, "num_steps": 10}
    options |= {"minibatch_size": 16, "update_epochs": 4}
    options |= {"learning_rate": 1e-3, "hidden_sizes": (32, 24), "target_kl": np.inf}
    return script.Args(**{**options, **changes})


def make_agent(script, args):
    torch.manual_seed(0)
    envs = script.utils.make_envs("PointHazards-v0", 1)
    agent = script.Agent(envs, args)
    nn.init.normal_(agent.mean[-1].weight, std=0.2)  # means beyond their bounds, too
    return agent.to(args.device)


def make_batch(script, agent):
    """70 steps of the agent, with random advantages and targets."""
    rng = torch.Generator().manual_seed(1)
    obs, noise = torch.randn(ROWS, 4, generator=rng), torch.randn(ROWS, 2, generator=rng)
    numbers = torch.randn(3, ROWS, generator=rng)
    with torch.no_grad():
        actions = agent.log_prob(obs.to(agent.low), noise.to(agent.low))[1].cpu() + noise
        both = obs.to(agent.low), actions.to(agent.low)
        log_prob, _ = agent.log_prob(*both)
    return script.Batch(*both, log_prob, *numbers.to(agent.low))


def update(script, agent, batch, args):
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    return script.update(agent, optimizer, batch, args, np.random.default_rng(0))


def flat(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().cpu()


def plain_update(agent, batch, args):
    """PPO as it is written down, with an optimizer for the actor and one for the critics."""
    rng = np.random.default_rng(0)
    actor = [*agent.mean.parameters(), agent.log_std]
    critics = [*agent.critic_r.parameters(), *agent.critic_c.parameters()]
    optimizers = [torch.optim.Adam(part, lr=args.learning_rate) for part in (actor, critics)]
    goes_on, kls = True, []
    for _ in range(args.update_epochs):
        kl_sum = 0.0
        for rows in torch.split(torch.from_numpy(rng.permutation(ROWS)), args.minibatch_size):
            obs, adv = batch.obs[rows], batch.adv[rows]
            mean = agent.mean(obs)
            policy = torch.distributions.Normal(mean, agent.log_std.exp())
            log_ratio = policy.log_prob(batch.actions[rows]).sum(-1) - batch.log_prob[rows]
            ratio = log_ratio.exp()
            clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            outside = (mean.abs() - 1).clamp(min=0)  # the toy's actions lie in [-1, 1]
            actor_loss = -torch.minimum(ratio * adv, clipped * adv).mean()
            actor_loss = actor_loss + args.bound_coef * outside.square().sum(-1).mean()
            error_r = agent.critic_r(obs)[:, 0] - batch.target_r[rows]
            error_c = agent.critic_c(obs)[:, 0] - batch.target_c[rows]
            critic_loss = 0.5 * error_r.square().mean() + 0.5 * error_c.square().mean()
            losses = actor_loss, critic_loss
            for optimizer, part, loss in zip(optimizers, (actor, critics), losses, strict=True):
                if part is critics or goes_on:
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(part, args.max_grad_norm)
                    optimizer.step()
            kl_sum += float((ratio - 1 - log_ratio).sum().detach())
        if goes_on:
            kls.append(kl_sum / ROWS)
            goes_on = kls[-1] <= args.target_kl
    return kls


@pytest.mark.parametrize("bound_coef", [0.0, 0.3])
@pytest.mark.parametrize("target_kl", [np.inf, 0.01])
@pytest.mark.parametrize("name", ["ppo_lag", "ppo_lag_pbcrl", "ppo_lag_rlsf"])
def test_an_update_is_that_of_a_plain_loop(scripts, name, target_kl, bound_coef):
    script = getattr(scripts, name)
    if RETURNED not in Path(script.__file__).read_text():
        pytest.skip(f"{name}.py has been edited: its losses are not plain PPO's")
    args = make_args(script, target_kl=target_kl, bound_coef=bound_coef, max_grad_norm=0.5)
    agent = make_agent(script, args)
    plain, before, batch = copy.deepcopy(agent), flat(agent), make_batch(script, agent)
    logged = update(script, agent, batch, args)
    kls = plain_update(plain, batch, args)
    torch.testing.assert_close(flat(agent), flat(plain), atol=1e-5, rtol=1e-5)
    assert (flat(agent) - before).abs().max() > 0.01
    assert logged["actor_epochs"] == len(kls)
    assert (len(kls) < 4) == (target_kl < 1)  # the KL stop was met
    assert logged["kl"] == pytest.approx(kls[-1], rel=1e-4)


def test_after_the_kl_stop_the_critics_alone_have_gradients(scripts):
    trained = {}
    for epochs in (1, 4):
        args = make_args(scripts.ppo_lag, target_kl=1e-9, update_epochs=epochs)
        agent = make_agent(scripts.ppo_lag, args)
        update(scripts.ppo_lag, agent, make_batch(scripts.ppo_lag, agent), args)
        trained[epochs] = agent
        of_actor = [agent.log_std.grad, *(p.grad for p in agent.mean.parameters())]
        assert {grad is None for grad in of_actor} == {epochs == 4}
        assert agent.critic_r[-1].weight.grad is not None
    assert torch.equal(flat(trained[1].mean), flat(trained[4].mean))
    assert torch.equal(trained[1].log_std, trained[4].log_std)
    assert not torch.equal(flat(trained[1].critic_c), flat(trained[4].critic_c))


@pytest.mark.parametrize("name", ["ppo_lag", "ppo_lag_pbcrl", "ppo_lag_rlsf"])
def test_the_standard_deviation_stays_above_a_share_of_its_first(scripts, name):
    """A quarter of e^-0.5, of a dimension that is below it."""
    script = getattr(scripts, name)
    agent = make_agent(script, make_args(script))
    with torch.no_grad():
        agent.log_std.copy_(torch.tensor([-4.0, -1.0]))
    agent.keep_trying(0.25)
    assert agent.log_std.tolist() == pytest.approx([-0.5 + math.log(0.25), -1.0])


def by_hand(net, obs, activation):
    """What a net of these layers computes, written out."""
    *hidden, last = [part for part in net if isinstance(part, nn.Linear)]
    for layer in hidden:
        obs = activation(obs @ layer.weight.T + layer.bias)
    return obs @ last.weight.T + last.bias


def normed_silu(x):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * torch.sigmoid(scaled)


@pytest.mark.parametrize(
    ("changes", "activation"),
    [([(RELU, RELU)], torch.relu), ([TANH], torch.tanh), ([LAYER_NORM], normed_silu)],
    ids=["relu", "tanh", "layer-norm-silu"],
)
def test_whatever_mlp_returns_is_the_net_that_learns_and_acts(tmp_path, changes, activation):
    script = load_edited("ppo_lag", tmp_path / f"net-{activation.__name__}", *changes)
    args = make_args(script)
    agent = make_agent(script, args)
    obs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(2))
    agent.update_normalizer(3 * obs + 1)
    with torch.no_grad():
        x = agent.normalize(obs)
        # Before the update LayerNorm's own weights are 1 and 0.
        torch.testing.assert_close(agent.mean(x), by_hand(agent.mean, x, activation))
        before = torch.cat([agent.mean(x), agent.values(obs).T], 1)
    update(script, agent, make_batch(script, agent), args)
    with torch.no_grad():
        learned = [net(x) for net in (agent.mean, agent.critic_r, agent.critic_c)]
    acted = np.concatenate([agent.act(obs.numpy()), agent.values(obs).T], 1)
    np.testing.assert_allclose(acted, torch.cat(learned, 1), atol=1e-6, rtol=0)
    assert (np.abs(acted - before.numpy()).max(axis=0) > 1e-3).all()


@pytest.mark.parametrize("change", [TANH, LAYER_NORM], ids=["tanh", "layer-norm-silu"])
def test_an_edited_script_is_played_by_its_copy_if_one_trusts_it(scripts, tmp_path, change, capsys):
    script = load_edited("ppo_lag", tmp_path / f"played-{len(change[1])}", change)
    folder = script.train(small(script, tmp_path))
    assert (folder / "ppo_lag.py").read_bytes() == Path(script.__file__).read_bytes()
    args = scripts.evaluate.Args(str(folder), episodes=4, threads=1)
    with pytest.raises(StorageError, match=r"run/ppo_lag\.py is not the ppo_lag\.py here; --trust"):
        scripts.evaluate.evaluate(args)
    capsys.readouterr()
    trusting = scripts.evaluate.Args(**{**vars(args), "trust_script": True})
    scripts.evaluate.evaluate(trusting)
    printed = dict(re.findall(r"^   (\w+) +(\S+)", capsys.readouterr().out, re.MULTILINE))
    found = summary(folder)
    assert printed["return"] == plus_minus(found["return"], found["return_interval"]).split()[0]


def test_an_entropy_bonus_is_one_line_and_keeps_the_policy_wide(scripts, tmp_path):
    edited = load_edited("ppo_lag", tmp_path / "entropy", ENTROPY)
    log_std = {}
    for script in (scripts.ppo_lag, edited):
        options = {"learning_rate": 3e-3, "run_name": script.__name__}
        args = small(script, tmp_path, **options)
        log_std[script] = weights(script.train(args))["log_std"]
    assert (log_std[edited] > log_std[scripts.ppo_lag] + 1e-3).all()


def test_ratios_start_at_one(scripts):
    """One minibatch per epoch: its ratios are taken before the first step."""
    args = make_args(scripts.ppo_lag, update_epochs=1, minibatch_size=ROWS)
    agent = make_agent(scripts.ppo_lag, args)
    logged = update(scripts.ppo_lag, agent, make_batch(scripts.ppo_lag, agent), args)
    assert logged["kl"] == pytest.approx(0, abs=1e-7)
    assert logged["clip_fraction"] == 0


# -- Observations ----------------------------------------------------------------------------------


def test_the_normalizer_has_the_moments_of_all_that_it_saw(scripts):
    agent = make_agent(scripts.ppo_lag, make_args(scripts.ppo_lag))
    obs = 3 * torch.randn(500, 4, generator=torch.Generator().manual_seed(0)) + 7
    for part in obs.split([100, 399, 1]):
        agent.update_normalizer(part)
    torch.testing.assert_close(agent.obs_mean, obs.mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(agent.obs_var, obs.var(0, correction=0), atol=1e-3, rtol=1e-3)


# -- GPU -------------------------------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_refused(scripts):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=r"--device cuda needs a GPU that PyTorch can use.*leave"):
        scripts.ppo_lag.train(make_args(scripts.ppo_lag, device="cuda"))
