"""ppo_lag_llm.py: its token tasks, a real model's folder and file, resume, what it refuses."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from pbcrl.errors import LabelError
from pbcrl_script_utils.args import slow_multiplier

from ..language import byte_tokenizer, tiny_config, transformers
from .conftest import load
from .runs import cut_off, metrics, resume, rows, summary

TINY = {
    "num_iterations": 4,
    "batch_size": 16,
    "minibatch_size": 8,
    "max_new_tokens": 6,
    "offline_queries": 30,
    "cost_epochs": 1,
    "eval_episodes": 16,
    "checkpoint_interval": 1,
}


@pytest.fixture(scope="module")
def script():
    return load("ppo_lag_llm")


@pytest.fixture
def make_args(script, tmp_path):
    def make(name="run", **changes):
        return script.Args(**{**TINY, "runs_dir": str(tmp_path), "run_name": name, **changes})

    return make


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request, tmp_path_factory):
    """The folder of a real model, as far as a script can tell."""
    folder = tmp_path_factory.mktemp(request.param)
    transformers.set_seed(0)
    config = tiny_config(request.param)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    row = {"is_response_0_safe": True, "is_response_1_safe": False}
    row |= {"better_response_id": 1, "safer_response_id": 0, "response_0": "No."}
    lines = [{**row, "prompt": f"{'How? ' * (i % 3)}{i}", "response_1": "So."} for i in range(12)]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# -- Pieces ----------------------------------------------------------------------------------


def test_exact_values_have_no_advantage_and_nothing_follows_the_end(script):
    """Reward 1 with every token; V(s_t) is the number of tokens that are still to come."""
    is_written = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    rewards = is_written.float()
    values = torch.tensor([[4.0, 3, 2, 1], [2, 1, 7, 7]])
    found = script.gae(rewards, values, is_written, 1.0, 0.95)
    torch.testing.assert_close(found, torch.zeros(2, 4))
    late = torch.tensor([[0.0, 0, 0, 1], [0, 1, 0, 0]])  # at the last token, no value known
    found = script.gae(late, torch.zeros(2, 4), is_written, 1.0, 0.5)
    torch.testing.assert_close(found, torch.tensor([[0.125, 0.25, 0.5, 1], [0.5, 1, 0, 0]]))


@pytest.fixture(scope="module")
def written(script, model):
    """A rollout of a real model, with prompts of different lengths."""
    tokenizer = byte_tokenizer("left")
    policy = script.load_model(transformers.AutoModelForCausalLM, str(model), tokenizer, "cpu")
    args = script.Args(max_new_tokens=40)
    noise = torch.Generator().manual_seed(0)
    prompts = ["a", "a longer prompt", "abc"] * 20
    return policy, tokenizer, prompts, script.respond(policy, tokenizer, prompts, args, noise)


def test_a_response_ends_with_its_end_token_and_is_padding_from_there(written):
    _, tokenizer, _, rollout = written
    tokens = rollout.tokens[:, -40:]
    ended = 0
    for row, is_written in zip(tokens, rollout.is_written, strict=True):
        length = int(is_written.sum())
        assert is_written[:length].all()
        is_end = row == tokenizer.eos_token_id
        assert not is_end[: length - 1].any()
        if length < 40:
            ended += 1
            assert is_end[length - 1]
            assert (row[length:] == tokenizer.pad_token_id).all()
    assert 0 < ended < 60
    assert (rollout.attended[:, -40:] == rollout.is_written).all()


def test_probabilities_of_a_batch_are_those_of_each_response_alone(script, written):
    """Padding on the left, the cache while sampling and the pass while learning agree."""
    policy, tokenizer, prompts, rollout = written
    together = script.log_probs(policy, rollout)
    for i in (0, 1, 2):
        ids = tokenizer(prompts[i])["input_ids"]
        response = rollout.tokens[i, -40:][rollout.is_written[i]]
        alone = torch.cat([torch.tensor(ids), response]).unsqueeze(0)
        with torch.no_grad():
            log_prob = policy(input_ids=alone).logits.log_softmax(-1)[0, len(ids) - 1 : -1]
        expected = log_prob.gather(1, response.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(together[i, : len(response)], expected, atol=1e-4, rtol=0)
        assert (together[i, len(response) :] == 0).all()


# -- Runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["after", "announced"])
@pytest.mark.parametrize(
    "method",
    [
        {"cost": "true"},
        {"online_queries": 8, "finetune_interval": 2},
        {"constraint": "accept"},
        {"constraint": "rate", "online_queries": 8, "finetune_interval": 2},
    ],
    ids=["oracle", "adapted", "accept", "rate"],
)
def test_the_token_tasks_train(script, make_args, task, method):
    folder = script.train(make_args(task=task, **method))
    lines, found = rows(folder), summary(folder)
    assert len(lines) == 4
    assert found["env_id"] == f"tokens-{task}"
    assert found["episodes"] == 16
    assert all(0 <= line["true_cost"] <= 6 * 16 for line in lines)
    learned = method.get("cost") != "true"
    assert (lines[0]["learned_cost"] is not None) == learned
    assert (folder / "cost_model" / "model.safetensors").exists() == learned
    moved = [a["multiplier"] != b["multiplier"] for a, b in pairwise(lines)]
    is_rate = method.get("constraint") == "rate"  # which is moved in labelling rounds
    assert moved == ([True, False, True] if is_rate else [True] * 3)
    times = 2 if is_rate else 4
    said = slow_multiplier(make_args(task=task, **method))
    assert said.startswith(f"λ will move some {times} times, once per ")
    assert any(f"λ could move in {times} of 4 iterations" in line for line in found["verdict"])
    if method.get("constraint") == "accept":
        assert {line["rejected"] for line in lines} <= {0.0, 1.0}


def test_a_folder_and_a_file_train_a_real_model(script, make_args, model, data):
    folder = script.train(make_args(model=str(model), data=str(data), max_length=64))
    found = summary(folder)
    assert np.isfinite([found["return"], found["mean_learned_cost"]]).all()
    assert found["true_cost"] is None
    assert found["verdict"] == [
        "no true cost is known, and labels alone can tell whether the limit is met "
        "(stochastic policy, 16 episodes)",
        "λ could move in 4 of 4 iterations, and needs 40 moves or more to find its place; give "
        "--num-iterations 40",
    ]
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "policy")
    before = transformers.AutoModelForCausalLM.from_pretrained(model)
    pairs = zip(again.parameters(), before.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(("budget", "used"), [(7, [2, 4, 7]), (1, [0, 0, 1])])
def test_labels_are_spread_over_the_rounds_and_never_more_than_the_budget(
    script, make_args, budget, used
):
    """Three rounds, in the second, fourth and sixth of seven iterations; 30 pairs before."""
    method = {"num_iterations": 7, "finetune_interval": 2, "online_queries": budget}
    found = [row["queries_used"] - 30 for row in rows(script.train(make_args(**method)))]
    assert found == [0, used[0], used[0], used[1], used[1], used[2], used[2]]


def test_a_fitted_cost_model_is_used_as_it_is(script, make_args):
    fitted = script.train(make_args("fitted")) / "cost_model"
    args = make_args("again", cost_model=str(fitted), offline_queries=0)
    weights = [
        folder / "model.safetensors" for folder in (fitted, script.train(args) / "cost_model")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_critics_that_would_read_other_tokens_are_refused(script, make_args, model):
    """The folder's tokens are bytes, the policy's are words."""
    with pytest.raises(ValueError, match="numbers 7 of them differently"):
        script.train(make_args(cost_model=str(model), task="announced"))


def test_a_prompt_and_its_response_must_fit_into_the_model(script, make_args, model, data):
    rule = r"--max-length \+ --max-new-tokens = 2500 \+ 6, must fit into the (256|2048) tokens"
    with pytest.raises(ValueError, match=rule):
        script.train(make_args(model=str(model), data=str(data), max_length=2_500))


def test_cost_pairs_are_the_first_rows_of_the_file(script, make_args, model, data, tmp_path):
    """Fitted to five rows of twelve is fitted to a file that has no more."""
    short = tmp_path / "short.jsonl"
    short.write_text("".join(data.read_text().splitlines(keepends=True)[:5]))
    options = {"model": str(model), "max_length": 64, "num_iterations": 1}
    some = script.train(make_args("some", data=str(data), cost_pairs=5, **options))
    alone = script.train(make_args("alone", data=str(short), **options))
    for name in ("cost_model", "reward_model"):
        files = [folder / name / "model.safetensors" for folder in (some, alone)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_an_empty_prompt_is_refused(script, written):
    policy, tokenizer, _, _ = written
    noise = torch.Generator().manual_seed(0)
    for prompts in ([""], ["a", ""]):
        with pytest.raises(ValueError, match="a prompt must have a token, got an empty one"):
            script.respond(policy, tokenizer, prompts, script.Args(), noise)


def test_a_file_that_does_not_say_who_is_more_helpful_fits_no_reward_model(
    script, make_args, model, tmp_path
):
    path = tmp_path / "chosen.jsonl"
    path.write_text(json.dumps({"prompt": "How?", "chosen": "No.", "rejected": "So."}) + "\n")
    with pytest.raises(LabelError, match="does not say it of any pair; give --reward-model"):
        script.train(make_args(model=str(model), data=str(path), max_length=64))


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(script, make_args, after, monkeypatch):
    """The multiplier, the fine-tuned cost, the oracle and the order of everything are kept."""
    method = {"online_queries": 8, "finetune_interval": 2, "constraint": "accept"}
    whole = script.train(make_args("whole", **method))
    args = make_args("cut", **method)
    cut_off(script, args, after=after, monkeypatch=monkeypatch)
    folder = resume(script, whole.parent / "cut")
    assert metrics(folder) == metrics(whole)
    assert summary(folder) == summary(whole)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "somewhere"}, "--model DIR and --data FILE go together"),
        ({"data": "rows.jsonl"}, "--model DIR and --data FILE go together"),
        ({"model": "m", "data": "d", "cost": "true"}, "as in the token tasks alone"),
        ({"model": "m", "data": "d", "online_queries": 9}, "as in the token tasks alone"),
        ({"constraint": "rate"}, "--constraint rate is moved by labels; give --online-queries"),
        ({"reward_model": "r"}, "--reward-model is for --model"),
        ({"cost": "true", "cost_model": "c"}, "--cost-model is not for --cost true"),
        ({"offline_queries": 0}, "got --offline-queries 0; give some"),
        ({"cost_model": "nowhere"}, "nowhere has no config.json; nothing is downloaded here"),
        ({"model": "nowhere", "data": "d"}, "nowhere has no config.json; nothing is downloaded"),
        ({"online_queries": 9}, "--online-queries are pairs .* rollouts, 0 at most, got 9"),
        ({"online_queries": 17, "finetune_interval": 2}, "16 at most, got 17"),
        ({"batch_size": 1}, "--batch-size must be at least 2, .* standard deviation, got 1"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"kl_coef": -1.0}, "--kl-coef must be >= 0"),
    ],
)
def test_what_means_nothing_is_refused_before_a_folder_is_made(
    script, make_args, tmp_path, changes, match
):
    with pytest.raises(ValueError, match=match):
        script.train(make_args(**changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_the_oracle_ends_at_its_limit(script, tmp_path):
    """Without any label: what PPO-Lag on tokens is worth where the cost is known."""
    args = script.Args(cost="true", runs_dir=str(tmp_path), run_name="run", seed=0)
    found = summary(script.train(args))
    assert found["true_cost"] == pytest.approx(found["cost_limit"], rel=0.25)
    assert found["return"] > 4
