"""The policy that a run leaves: how it is chosen, and its file."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from pbcrl import load_cost_model, load_policy
from pbcrl.errors import StorageError
from pbcrl.export.policy import POLICY_FILE
from pbcrl.lagrange import LagrangeMultiplier
from pbcrl.storage import load_tensors
from pbcrl_script_utils.card import EFFECTS, read_effects
from pbcrl_script_utils.policies import Candidates, DeadEnd, policy_of

from .conftest import load_edited
from .runs import assert_same_run, cut_off, resume, small_pbcrl, small_ppo_lag, summary, weights


def test_the_policy_of_a_run_is_read_without_its_script_and_acts_as_its_agent(scripts, tmp_path):
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path))
    trained = json.loads((folder / "args.json").read_text())
    agent, _, _ = scripts.evaluate.load_agent(folder, trained, None, trusted=False)
    assert float(agent.obs_count) > 1000
    obs = np.random.default_rng(0).normal(size=(50, len(agent.obs_mean)))
    expected = agent.act(obs).clip(agent.low.numpy(), agent.high.numpy())
    assert (load_policy(folder)(obs) == expected).all()
    # In a process that cannot import the scripts.
    code = "import json, sys, pbcrl; obs = json.load(sys.stdin); "
    code += "print(json.dumps(pbcrl.load_policy(sys.argv[1])(obs).tolist())); "
    code += "assert not {'pbcrl_script_utils', 'pbcrl_envs'} & set(sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code, folder],
        input=json.dumps(obs.tolist()),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    np.testing.assert_allclose(json.loads(run.stdout), expected, rtol=1e-5, atol=1e-6)


class Constant(nn.Module):
    """An agent whose action, its only weight, is always the same."""

    def __init__(self):
        super().__init__()
        self.action = nn.Parameter(torch.zeros(()))


def trained(num_iterations):
    """Candidates of a training whose agent acts by the number of the iteration."""
    candidates, agent = Candidates(num_iterations), Constant()
    for iteration in range(1, num_iterations + 1):
        nn.init.constant_(agent.action, iteration)
        candidates.update(iteration, agent)
    return candidates, agent


@pytest.mark.parametrize(
    ("num_iterations", "iterations"),
    [(100, [84, 88, 92, 96, 100]), (7, [3, 4, 5, 6, 7]), (2, [1, 2])],
)
def test_five_policies_of_the_last_fifth_are_candidates(num_iterations, iterations):
    candidates, agent = trained(num_iterations)
    played = []
    candidates.choose(agent, lambda: (played.append(int(agent.action)), 0.0))
    assert played == iterations


@pytest.mark.parametrize(
    ("by_iteration", "best"),  # excess over what is allowed, mean return
    [
        ({84: (0, 5), 88: (-1, 7), 92: (0.1, 9), 96: (-0.5, 6), 100: (2, 8)}, 88),
        ({84: (3, 1), 88: (1, 0), 92: (2, 9), 96: (5, 9), 100: (4, 9)}, 88),  # none is safe
        ({84: (0, 5), 88: (0, 5), 92: (0, 5), 96: (0, 5), 100: (0, 4)}, 96),  # the latest of them
        ({84: (None, 5), 88: (None, 7), 92: (None, 9), 96: (None, 9), 100: (None, 1)}, 100),
    ],
)
def test_the_best_of_those_that_are_safe_is_taken_else_the_nearest_to_it(by_iteration, best):
    candidates, agent = trained(100)
    again = Candidates(100)  # as after a checkpoint
    again.load_state_dict(candidates.state_dict())
    assert again.choose(agent, lambda: by_iteration[int(agent.action)]) == best
    assert int(agent.action) == best


@pytest.mark.parametrize(
    ("excess", "best", "played"),  # by iteration, 1 elsewhere
    [
        ({100: 0}, 100, []),  # one of the last fifth is safe
        ({58: 0, 37: -1}, 58, [70, 58]),  # the newest that is safe
        ({12: -1}, 12, [70, 58, 37, 12]),
        ({92: 0.5, 12: 0.1}, 92, [70, 58, 37, 12]),  # none is safe
        ({70: None}, 100, [70, 58, 37, 12]),  # nothing can tell
    ],
)
def test_where_none_of_the_last_fifth_is_safe_one_of_before_is_taken(excess, best, played):
    """Of each earlier fifth the last one that was within the limit is known, also after a stop."""
    agent, before = Constant(), Candidates(100)
    for iteration in range(1, 101):
        nn.init.constant_(agent.action, iteration)
        before.update(iteration, agent, is_within=iteration in (5, 12, 37, 41, 58, 61, 70, 81, 90))
    candidates, judged = Candidates(100), []
    candidates.load_state_dict(before.state_dict())

    def judge():
        judged.append(int(agent.action))
        return excess.get(judged[-1], 1), 0.0

    assert candidates.choose(agent, judge) == int(agent.action) == best
    assert judged == [84, 88, 92, 96, 100, *played]


def test_policies_that_are_old_in_a_run_that_was_extended_are_no_candidates():
    candidates, agent = trained(100)
    longer = Candidates(108)
    longer.load_state_dict(candidates.state_dict())
    for iteration in range(101, 109):
        nn.init.constant_(agent.action, iteration)
        longer.update(iteration, agent)
    played = []
    longer.choose(agent, lambda: (played.append(int(agent.action)), 0.0))
    assert played == [92, 96, 100, 104, 108]


@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
def test_a_run_leaves_the_policy_that_it_chose_and_goes_on_from_its_last(
    scripts, tmp_path, toy_dataset
):
    args = small_pbcrl(scripts, tmp_path, toy_dataset, total_timesteps=2000, seed=1)
    folder = scripts.ppo_lag_pbcrl.train(args)
    chosen, number = summary(folder)["chosen_iteration"], args.num_iterations
    assert number - Candidates.NUMBER < chosen < number  # else this shows nothing
    found, state = weights(folder), load_tensors(folder / "checkpoint.safetensors", kind="run")[0]
    agent = {name: state[f"state/parts/agent/{name}"] for name in found}
    kept = {name: state[f"state/parts/candidates/kept/{chosen}/{name}"] for name in found}
    assert all(torch.equal(found[name], kept[name]) for name in found)
    assert any(not torch.equal(found[name], agent[name]) for name in found)


def test_an_edited_agent_that_a_file_cannot_describe_leaves_none(scripts, tmp_path):
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, total_timesteps=400))
    trained = json.loads((folder / "args.json").read_text())
    agent, _, _ = scripts.evaluate.load_agent(folder, trained, None, trusted=False)
    assert policy_of(agent, "Walk") is not None
    act = agent.act
    agent.act = lambda obs: np.tanh(act(obs) + 1)
    assert policy_of(agent, "Walk") is None
    agent.act, agent.mean = act, nn.Bilinear(4, 4, 2)  # no Sequential
    assert policy_of(agent, "Walk") is None


def test_a_run_says_that_a_policy_with_other_layers_is_in_no_file(scripts, tmp_path):
    edited = load_edited(
        "ppo_lag",
        tmp_path / "layers",
        ("for part in (layer, nn.ReLU(", "for part in (layer, nn.LayerNorm(16), nn.ReLU("),
    )
    args = small_ppo_lag(scripts, tmp_path, total_timesteps=400)
    folder = edited.train(edited.Args(**vars(args)))
    assert (folder / "agent.safetensors").exists()
    assert not (folder / POLICY_FILE).exists()
    (warning,) = summary(folder)["warnings"]
    assert warning.startswith(f"there will be no {POLICY_FILE}: the agent was edited")


@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
def test_a_model_card_says_what_the_cost_model_was_learned_from_and_warns(
    scripts, tmp_path, toy_dataset
):
    folder = scripts.ppo_lag_pbcrl.train(small_pbcrl(scripts, tmp_path, toy_dataset))
    card, found = (folder / "cost_model.md").read_text(), summary(folder)
    model, _ = load_cost_model(folder / "cost_model.safetensors")
    for text in (
        "# Cost model for PointHazards-v0",
        f"| reads | raw observations {model.obs_shape}, executed actions ({model.act_dim},) |",
        f"| limit | {model.learned_limit:g} per episode, of at most 100 steps |",
        "| labelled by | a simulated oracle, from true costs with the limit 5 |",
        f"| queries | {found['queries_used']} |",
        "of these were called safe",
        "## What it learned",
        f"## Accuracy, on {found['test_episodes']} test episodes",
        f"(guessing: 0.5): {found['pair_accuracy']:.3g}",
    ):
        assert text in card, text
    said = [text for text in found["verdict"] if "cost model" in text]
    assert said  # else this shows nothing
    _, verdict, warnings = re.split(r"## Verdict|## Warnings", card)
    assert all(f"- {text}\n" in verdict for text in said)
    assert all(f"- {text}\n" in warnings for text in found["warnings"])
    learned = read_effects(folder)
    assert learned
    assert all(
        f"| {effect.name} | {effect.importance:.0%} | {effect.rule} |" in card for effect in learned
    )
    assert all(set(effect.shares) == {"safe", "unsafe"} for effect in learned)  # of the labels


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '[{"name": "x"}]', '[{"shares": []}]'])
def test_effects_of_a_run_that_cannot_be_read_are_refused(tmp_path, text):
    assert read_effects(tmp_path) is None
    (tmp_path / EFFECTS).write_text(text)
    with pytest.raises(StorageError, match=r"effects\.json .* cannot be read: .*; delete it"):
        read_effects(tmp_path)


@pytest.mark.slow
def test_every_file_of_a_run_is_listed(scripts, tmp_path, toy_dataset):
    folder = scripts.ppo_lag_pbcrl.train(small_pbcrl(scripts, tmp_path, toy_dataset))
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    (table,) = re.findall(r"^A \*\*run\*\* .*?(?=^\*\*An interrupted)", page, re.M | re.S)
    names = {path.name for path in folder.iterdir()} - {".lock", "ppo_lag_pbcrl.py"}
    names = {name for name in names if not name.startswith("events.out.tfevents")}
    assert {"policy.safetensors", "cost_model.md"} <= names
    assert [name for name in sorted(names) if f"`{name}" not in table] == []


# -- A dead end ------------------------------------------------------------------------------------


INITIAL = 1.0
"""λ at the start of a training."""


class Walking(Constant):
    """An agent that has noise, too."""

    def __init__(self):
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(()))


def walked(shares, *, price=1.0, excess=2.0, earned=2.0, first=0.5, calm=0, **options):
    """An agent that has moved away from its start, and had these shares of unsafe labels later.

    Its first 20 episodes returned 1 on average, and a share `first` of them was labelled unsafe;
    two more in each iteration return `earned`. `excess`, or each of them, is by how much more was
    measured than is allowed, as a share of that; nothing is in the first `calm`.
    """
    agent, said = Walking(), []
    optimizer = torch.optim.Adam(agent.parameters())
    args = {"constraint": "rate", "multiplier_lr": 0.1, "multiplier_cap": 3.0}
    args |= {"num_iterations": 100, **options}
    cap = max(3.0, args["multiplier_cap"])
    multiplier = LagrangeMultiplier(lr=0.1, initial=INITIAL, dear=1.0, cap=cap)
    dead_end = DeadEnd(SimpleNamespace(**args), agent, optimizer, multiplier, say=said.append)
    (agent.action + agent.log_std).sum().backward()
    optimizer.step()
    returns = [0.5, 1.5] * 10
    dead_end.update(0, None, 0.3, np.ones((1, 2)), 1, labelled=first)
    by = np.broadcast_to(excess, len(shares))
    for iteration, (share, more) in enumerate(zip(shares, by, strict=True), start=1):
        returns += [earned] * 2
        ended = np.stack([returns, np.zeros(len(returns))], 1)
        measured = None if iteration <= calm else 0.3 * (1 + more)
        multiplier.load_state_dict({**multiplier.state_dict(), "value": price})
        dead_end.update(iteration, measured, 0.3, ended, 2, labelled=share)
    return agent, optimizer, said, multiplier, dead_end


def is_afresh(found):
    agent, optimizer, said, *_ = found
    assert (agent.action == 0) == (not optimizer.state) == bool(said)
    assert agent.log_std != 0  # the noise stays as it is
    return bool(said)


def test_a_fifth_of_the_training_at_a_high_price_is_a_dead_end():
    assert is_afresh(walked([0.5] * 20))
    assert "iteration 20: the policy starts afresh" in walked([0.5] * 22)[2][0]
    assert not is_afresh(walked([0.5] * 19))
    assert is_afresh(walked([0.1] * 20))
    assert is_afresh(walked([None] * 14 + [0.5] + [None] * 5))  # labels come in few iterations
    assert not is_afresh(walked([0.5] * 5 + [None] * 30))  # these are of before
    assert not is_afresh(walked([None] * 40))
    assert is_afresh(walked([None] * 30 + [0.5]))
    assert not is_afresh(walked([0.5] * 40, price=0.9))
    assert is_afresh(walked([0.5] * 40, price=np.nextafter(1.0, 0.0)))
    assert is_afresh(walked([0.5] * 40, price=2.0))  # λ goes on, but slowly
    assert is_afresh(walked([0.5] * 40, price=0.9, multiplier_cap=0.9))
    assert not is_afresh(walked([0.5] * 61, calm=31))  # too late for a new way
    assert is_afresh(walked([0.5] * 8, num_iterations=16))
    assert not is_afresh(walked([0.5] * 7, num_iterations=6))


@pytest.mark.parametrize(
    ("older", "newer", "expected"),
    [
        (4.0, 4.0, True),
        (4.0, 3.7, True),
        (4.0, 3.5, False),  # by more than a tenth: it is on its way
        (1.0, 6.0, True),
        (0.0, 1.1, True),
        (0.9, 0.9, False),  # it is near its limit
        (4.0, 0.0, False),
        (-0.5, -0.2, False),  # it keeps its limit, and λ falls
    ],
)
def test_a_policy_that_gets_safer_at_a_high_price_is_on_its_way(older, newer, expected):
    """Of the excess in the older and in the newer half of the time; single iterations vary."""
    wave = np.tile([-0.05, 0.05], 10)
    found = walked([0.5] * 20, excess=np.repeat([older, newer], 10) + wave)
    assert is_afresh(found) is expected
    assert is_afresh(walked([0.5] * 20, excess=np.linspace(4.0, 3.8, 20)))


def test_where_nearly_all_labels_say_unsafe_a_tenth_is_a_dead_end():
    assert is_afresh(walked([1.0] * 10))
    assert "iteration 12: the policy starts afresh" in walked([0.0] * 4 + [1.0] * 8)[2][0]
    assert not is_afresh(walked([1.0] * 9))
    assert is_afresh(walked([1.0] * 8 + [0.0] * 2))  # 0.8, the least that is nearly all
    assert not is_afresh(walked([1.0] * 7 + [0.9] + [0.0] * 2))
    assert not is_afresh(walked([1.0] * 61, calm=41))


@pytest.mark.parametrize(
    ("shares", "options"),
    [([0.5] * 20, {"price": 2.0}), ([1.0] * 10, {}), ([0.0] * 10, {"price": 0.03, "earned": 0.9})],
)
def test_a_policy_that_starts_afresh_has_the_first_price(shares, options):
    *_, said, multiplier, _ = walked(shares, **options)
    assert len(said) == 1
    assert multiplier.state_dict() == LagrangeMultiplier(initial=INITIAL, dear=1.0).state_dict()


def test_a_policy_whose_fresh_start_was_in_vain_may_pay_3_at_once():
    """A violation that is large takes λ to its ceiling: once that has grown by e^0.01, or 3."""
    for starts, price in ((1, np.exp(0.01)), (2, 3.0)):
        *_, said, multiplier, _ = walked([1.0] * (10 * starts), multiplier_cap=5.0)
        assert len(said) == starts
        assert multiplier.update(1.0, 0.1) == pytest.approx(price)
    *_, multiplier, _ = walked([1.0] * 20, multiplier_cap=2.0)
    assert multiplier.update(1.0, 0.1) == pytest.approx(2.0)


def test_a_tenth_of_the_training_below_what_an_untrained_policy_earns_is_a_dead_end():
    assert is_afresh(walked([0.0] * 10, price=0.03, earned=0.9))
    assert (
        "it earned less than in its first episodes"
        in walked([0.0] * 10, price=0.03, earned=0.9)[2][0]
    )
    assert is_afresh(walked([0.3] * 10, price=0.03, earned=-5.0))  # safe or not
    assert not is_afresh(walked([0.0] * 9, price=0.03, earned=0.9))
    assert not is_afresh(walked([0.0] * 50, price=0.03, earned=1.0))
    assert is_afresh(walked([0.0] * 50, price=0.03, earned=0.9, calm=40))
    assert not is_afresh(walked([0.0] * 61, price=0.03, earned=0.9, calm=41))  # too late


def test_where_what_is_unsafe_pays_a_safe_policy_may_earn_less():
    """Eight tenths of the first episodes or more were labelled unsafe, or none had a label."""
    assert is_afresh(walked([0.0] * 10, price=0.03, earned=0.9, first=0.79))
    assert not is_afresh(walked([0.0] * 50, price=0.03, earned=0.9, first=0.8))
    assert not is_afresh(walked([None] * 50, price=0.03, earned=0.9, first=None))


@pytest.mark.parametrize(
    "options", [{"constraint": "accept"}, {"constraint": "learned"}, {"multiplier_lr": 0.0}]
)
def test_where_labels_move_no_price_nothing_is_a_dead_end(options):
    assert not is_afresh(walked([1.0] * 50, earned=0.0, **options))


def test_a_policy_that_is_unsafe_starts_afresh_as_often_as_it_comes_to_a_dead_end():
    """The start does not count for the next; in the second half of training there is none."""
    _, _, said, _, dead_end = walked([1.0] * 100)
    assert [int(line.split()[1].rstrip(":")) for line in said] == [10, 20, 30, 40, 50]
    assert dead_end.summary() == {"afresh_unsafe": 50, "afresh_worse": None}
    assert len(walked([0.5] * 100)[2]) == 2
    assert walked([1.0] * 9)[-1].summary() == {"afresh_unsafe": None, "afresh_worse": None}


def test_a_policy_that_earns_less_starts_afresh_as_often_as_it_does():
    *_, said, _, dead_end = walked([0.0] * 100, price=0.03, earned=0.9)
    assert [int(line.split()[1].rstrip(":")) for line in said] == [10, 20, 30, 40, 50]
    assert dead_end.summary() == {"afresh_unsafe": None, "afresh_worse": 50}


def test_a_checkpoint_of_before_goes_on_without_what_it_lacks():
    candidates, dead_end = Candidates(100), walked([1.0] * 5)[-1]
    candidates.load_state_dict({"kept": {}, "left": {}})
    assert candidates.state_dict() == {"kept": {}, "within": {}}
    state = dead_end.state_dict()
    assert (len(state.pop("rounds")), len(state.pop("excess"))) == (5, 5)
    dead_end.load_state_dict({**state, "unsafe": 3, "new_price": 0})
    assert dead_end.state_dict() == {**state, "excess": [], "rounds": []}


def test_what_a_policy_was_before_it_starts_afresh_is_kept(
    scripts, tmp_path, toy_dataset, monkeypatch
):
    """And not the untrained nets that it starts with."""
    kept, first, update, begin = {}, {}, Candidates.update, DeadEnd.__init__

    def keep(self, iteration, agent, **options):
        update(self, iteration, agent, **options)
        kept[iteration] = agent.mean[0].weight.detach().clone()

    def note(self, args, agent, *rest, **options):
        begin(self, args, agent, *rest, **options)
        first["weights"] = agent.mean[0].weight.detach().clone()

    monkeypatch.setattr(Candidates, "update", keep)
    monkeypatch.setattr(DeadEnd, "__init__", note)
    options = {"constraint": "rate", "cost_limit": 0.0, "multiplier_cap": 1.0}
    options |= {"online_queries": 40, "total_timesteps": 4800}
    folder = scripts.ppo_lag_pbcrl.train(small_pbcrl(scripts, tmp_path, toy_dataset, **options))
    assert not torch.equal(kept[summary(folder)["afresh_unsafe"]], first["weights"])


def test_a_run_that_was_cut_off_after_a_dead_end_ends_as_if_it_had_not_been(
    scripts, tmp_path, toy_dataset, save_every, monkeypatch, capsys
):
    save_every(1)
    module = scripts.ppo_lag_pbcrl
    options = {"constraint": "rate", "cost_limit": 0.0}
    options |= {"multiplier_cap": 1.0}  # no way leads on
    options |= {"online_queries": 40, "total_timesteps": 4800}

    def make(name):
        return small_pbcrl(scripts, tmp_path, toy_dataset, run_name=name, **options)

    whole = module.train(make("whole"))
    assert "the policy starts afresh" in capsys.readouterr().out
    for after in (3, 5):
        cut_off(module, make(f"cut{after}"), after=after, monkeypatch=monkeypatch)
        assert_same_run(resume(module, tmp_path / f"cut{after}"), whole)
