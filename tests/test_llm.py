"""A cost head on language models: its loss, its scores, TRL's shapes, the multiplier's callback."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="pbcrl.llm.cost_head needs transformers")

from pbcrl import Label, pbci_loss
from pbcrl.errors import LabelError
from pbcrl.llm.cost_head import cost_function, fit_cost_head, score
from pbcrl.llm.text import TextPair, helpfulness

from .language import ENCODERS, FAMILIES, byte_tokenizer, cost_head

TOKENIZER = byte_tokenizer()
each_family = pytest.mark.parametrize("family", [*FAMILIES, *ENCODERS])


def pairs(count, seed=0):
    """Responses of letters, where each b is a cost of 1 and more than 3 are unsafe."""
    rng = np.random.default_rng(seed)
    texts = ["".join(rng.choice(["a", "b"], 8, p=[1 - p, p])) for p in rng.random(2 * count)]
    costs = [text.count("b") for text in texts]

    def label(i, j):
        preference = 0.5 if costs[i] == costs[j] else float(costs[i] < costs[j])
        return Label(preference, float(costs[i] <= 3), float(costs[j] <= 3))

    return [
        TextPair("p: ", texts[2 * i], texts[2 * i + 1], label(2 * i, 2 * i + 1))
        for i in range(count)
    ]


# -- The loss --------------------------------------------------------------------------------


def test_safe_rlhfs_cost_loss_is_ours_without_dead_zone_and_with_the_safety_term_doubled():
    """Its three terms, written from its description: safer, and the sign of each of the two."""
    rng = torch.Generator().manual_seed(0)
    safer, other = torch.randn(2, 64, generator=rng)
    safer_sign, other_sign = torch.randint(0, 2, (2, 64), generator=rng) * 2.0 - 1  # +1 unsafe
    theirs = -(
        F.logsigmoid(other - safer)
        + F.logsigmoid(safer_sign * safer)
        + F.logsigmoid(other_sign * other)
    ).mean()
    ours = pbci_loss(
        safer,
        other,
        torch.ones(64),
        (safer_sign < 0).float(),
        (other_sign < 0).float(),
        dead_zone=0,
        snr_weight=0,
    )
    torch.testing.assert_close(ours.preference + 2 * ours.safety, theirs)


@pytest.mark.parametrize("family", FAMILIES)  # encoders' key biases have no gradient but noise
def test_a_step_follows_the_gradient_of_the_whole_batch_whatever_the_chunks(family):
    """Pair and variance terms do not split over chunks, so averaging chunks would be wrong."""
    data = pairs(12)
    models = [cost_head(family) for _ in range(2)]
    before = copy.deepcopy(models[0].state_dict())
    for model, chunk_size in zip(models, (5, 24), strict=True):
        fit_cost_head(
            model,
            TOKENIZER,
            data,
            rng=np.random.default_rng(0),
            lr=1e-3,
            epochs=1,
            batch_size=12,
            chunk_size=chunk_size,
            snr_weight=0.1,
        )
    moved = 0.0
    for name, weight in models[0].state_dict().items():
        torch.testing.assert_close(weight, models[1].state_dict()[name], atol=2e-5, rtol=0)
        moved = max(moved, float((weight - before[name]).abs().max()))
    assert moved > 5e-4


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])]
)
def test_a_cost_head_learns_who_is_safer_and_who_is_safe(family):
    model, train, test = cost_head(family), pairs(160), pairs(60, seed=1)
    history = fit_cost_head(
        model, TOKENIZER, train, rng=np.random.default_rng(0), lr=3e-3, epochs=12, batch_size=32
    )
    assert history[-1] < 0.6 * history[0]
    costs = [
        score(model, TOKENIZER, [p.prompt for p in test], [getattr(p, k) for p in test])
        for k in ("first", "second")
    ]
    strict = [i for i, p in enumerate(test) if p.label.preference != 0.5]
    right = [(costs[0][i] < costs[1][i]) == (test[i].label.preference == 1) for i in strict]
    assert np.mean(right) > 0.8
    safe = np.array([[p.label.first_safe, p.label.second_safe] for p in test]).T
    assert np.mean((np.stack(costs) <= 0) == safe) > 0.8


@pytest.mark.slow
def test_a_reward_model_is_a_cost_head_on_helpfulness():
    data = [
        TextPair(p.prompt, p.first, p.second, Label(*[np.nan] * 3), 1 - p.label.preference)
        for p in pairs(160)
    ]  # costly is helpful
    model = cost_head("llama")
    fit_cost_head(
        model,
        TOKENIZER,
        helpfulness(data),
        rng=np.random.default_rng(0),
        snr_weight=0,
        lr=3e-3,
        epochs=12,
        batch_size=32,
    )
    few, many = score(model, TOKENIZER, ["p: "] * 2, ["aaabaaaa", "babbbabb"])
    assert many > few + 1


@pytest.mark.slow
def test_safety_labels_alone_set_the_limit():
    data = [
        TextPair(p.prompt, p.first, None, Label(np.nan, p.label.first_safe, np.nan))
        for p in pairs(160)
    ]
    model = cost_head("llama")
    fit_cost_head(
        model, TOKENIZER, data, rng=np.random.default_rng(0), lr=3e-3, epochs=12, batch_size=32
    )
    few, many = score(model, TOKENIZER, ["p: "] * 2, ["aaaaabaa", "babbbabb"])
    assert few < 0 < many


# -- Scores ----------------------------------------------------------------------------------


@each_family
def test_a_score_is_what_the_model_says_of_a_text_alone_whatever_the_padding(family):
    model = cost_head(family).eval()
    texts = ["a", "ab", "a longer response than the others, by far"]
    with torch.no_grad():
        expected = [
            model(**TOKENIZER(f"p: {text}", return_tensors="pt")).logits.item() for text in texts
        ]
    assert np.ptp(expected) > 5e-3
    for side in ("left", "right"):
        found = score(model, byte_tokenizer(side), ["p: "] * 3, texts)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@each_family
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_that_is_too_long_loses_its_beginning_and_the_response_is_read(family, side):
    """A token is a byte: of 50 + 6 + 6, the last 40 are read."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.truncation_side = side
    model, prompt, responses = cost_head(family), 50 * "x" + "where?", ["safe..", "unsafe"]
    found = score(model, tokenizer, [prompt] * 2, responses, max_length=40)
    expected = score(model, tokenizer, [28 * "x" + "where?"] * 2, responses)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert abs(found[0] - found[1]) > 1e-3
    assert tokenizer.truncation_side == side


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_that_is_too_long_is_learned_from_as_if_it_began_later(side):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.truncation_side = side
    weights = []
    for prompt in (50 * "x" + "p: ", 29 * "x" + "p: "):  # 8 tokens are the response's
        model = cost_head("llama")
        data = [TextPair(prompt, p.first, p.second, p.label) for p in pairs(8)]
        rng = np.random.default_rng(0)
        fit_cost_head(model, tokenizer, data, rng=rng, lr=1e-3, max_length=40)
        weights.append(model.state_dict())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=0, atol=0)


def test_what_begins_a_text_stays_when_a_prompt_is_cut_off():
    """As Llama's tokenizer, which puts one token in front: it and the last 9 are read."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    model = cost_head("llama")
    found = score(model, tokenizer, ["a long prompt: "], ["yes"], max_length=10)
    expected = score(model, tokenizer, ["ompt: "], ["yes"])  # 1 + 6 + 3 tokens
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_response_that_is_too_long_is_not_cut_off_silently():
    model, rng = cost_head("llama"), np.random.default_rng(0)
    rule = "response is read whole, but 1 of 2 have more than max_length=10 tokens"
    with pytest.warns(UserWarning, match=rule):
        found = score(model, TOKENIZER, ["p: "] * 2, ["ten tokens", "11 tokens.."], max_length=10)
    np.testing.assert_allclose(found[1:], score(model, TOKENIZER, [""], ["1 tokens.."]), rtol=1e-5)
    alone = [TextPair("p: ", "11 tokens..", None, Label(np.nan, 1.0, np.nan))]
    with pytest.warns(UserWarning, match="1 of 1 have more"):
        fit_cost_head(model, TOKENIZER, alone, rng=rng, max_length=10, snr_weight=0)


@each_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_scores_of_half_precision_are_float32_and_near_those_of_float32(family, dtype):
    model = cost_head(family)
    prompts, texts = ["p: "] * 3, ["a", "ab", "a longer response than the others, by far"]
    expected = score(model, TOKENIZER, prompts, texts)
    found = score(model.to(dtype), TOKENIZER, prompts, texts)
    assert expected.dtype == found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=0.05)
    function = cost_function(model, TOKENIZER)
    assert function(prompts=prompts, completions=texts) == found.tolist()


@each_family
def test_a_score_survives_saving_and_loading(family, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = cost_head(family)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["ab", "bba  b"]
    np.testing.assert_allclose(
        score(again, tokenizer, ["p: "] * 2, texts),
        score(model, TOKENIZER, ["p: "] * 2, texts),
        rtol=1e-5,
    )


def test_scores_come_in_the_shape_of_trls_reward_functions():
    model = cost_head("llama")
    function = cost_function(model, TOKENIZER)
    found = function(prompts=["p: "] * 2, completions=["a", "bb"], completion_ids=[[1], [2, 2]])
    assert function.__name__ == "cost"
    assert found == score(model, TOKENIZER, ["p: "] * 2, ["a", "bb"]).tolist()
    with pytest.raises(TypeError, match="a cost is that of texts, got list"):
        function(prompts=[[{"role": "user"}]], completions=["a"])


def right_after_a_fit(family, device, *, bf16):
    """Share of held-out responses that a cost head judges right, fitted as docs/llm.md has it."""
    train, held_out = pairs(256), pairs(100, seed=1)
    model, rng = cost_head(family).to(device), np.random.default_rng(0)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
        fit_cost_head(model, TOKENIZER, train, rng=rng, lr=3e-3, epochs=8, batch_size=32)
        assert torch.is_autocast_enabled(device) == bf16
    assert all(part.dtype == torch.float32 for part in model.parameters())
    texts = [pair.prompt for pair in held_out], [pair.first for pair in held_out]
    unsafe = np.array([pair.label.first_safe == 0 for pair in held_out])
    return ((score(model, TOKENIZER, *texts) > 0) == unsafe).mean()


@pytest.mark.parametrize("bf16", [False, True])
def test_a_fit_under_autocast_learns_as_one_without(bf16):
    """Autocast keeps copies of the weights; a fit must compute with those of each step."""
    assert right_after_a_fit("gpt2", "cpu", bf16=bf16) > 0.9


# -- What is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_weights_that_a_step_would_not_move_are_not_trained(dtype):
    """At 0.02, bfloat16 has a number every 2**-13 = 1.2e-4; a step of AdamW is 2e-5."""
    model, rng = cost_head("llama").to(dtype), np.random.default_rng(0)
    with pytest.raises(ValueError, match=rf"rounds away, got .*{dtype}.*; call model\.float\(\)"):
        fit_cost_head(model, TOKENIZER, pairs(4), rng=rng)
    before = [weight.clone() for weight in model.float().parameters()]
    with torch.autocast("cpu", dtype=dtype):
        fit_cost_head(model, TOKENIZER, pairs(4), rng=rng)
    moved = [
        (new != old).float().mean() for new, old in zip(model.parameters(), before, strict=True)
    ]
    assert np.mean(moved) > 0.9
    model.to(dtype).requires_grad_(False)  # as an adapter's: what is frozen may be what it is
    model.score.float().requires_grad_(True)
    model.score.register_forward_pre_hook(lambda _, args: tuple(arg.float() for arg in args))
    fit_cost_head(model, TOKENIZER, pairs(4), rng=rng)
    assert model.model.embed_tokens.weight.dtype == dtype


def test_what_cannot_be_scored_or_learned_is_refused():
    model, rng = cost_head("llama"), np.random.default_rng(0)
    no_labels = [TextPair("p", "a", "b", Label(*[np.nan] * 3))]
    for nothing in ([], no_labels):
        with pytest.raises(LabelError, match=f"none of {len(nothing)} pairs has one"):
            fit_cost_head(model, TOKENIZER, nothing, rng=rng)
    with pytest.raises(ValueError, match=r"lr must lie in \(0, inf\), got 0"):
        fit_cost_head(model, TOKENIZER, pairs(2), rng=rng, lr=0)
    with pytest.raises(ValueError, match=r"safety_weight must lie in"):
        fit_cost_head(model, TOKENIZER, pairs(2), rng=rng, safety_weight=-1)
    with pytest.raises(ValueError, match="a text that is scored has a token"):
        score(model, TOKENIZER, [""], [""])
    with pytest.raises(ValueError, match="1 prompts and 2 responses; repeat a prompt"):
        score(model, TOKENIZER, ["p"], ["a", "b"])
    assert score(model, TOKENIZER, [], []).shape == (0,)
    with pytest.raises(ValueError, match="num_labels=2"):
        score(
            cost_head("llama").__class__(_with(model.config, num_labels=2)), TOKENIZER, ["p"], ["a"]
        )
    with pytest.raises(ValueError, match="of a model of type 'fnet' does, by the padding"):
        score(cost_head("fnet"), TOKENIZER, ["p"], ["a"])
    unpadded = copy.deepcopy(TOKENIZER)
    unpadded.pad_token = None
    with pytest.raises(ValueError, match=r"set tokenizer\.pad_token"):
        score(model, unpadded, ["p"], ["a"])
    other = copy.deepcopy(TOKENIZER)
    other.pad_token = other.eos_token
    with pytest.raises(ValueError, match=r"must be that of the tokenizer: got 0 .* and 1"):
        score(model, other, ["p"], ["a"])


def _with(config, **changes):
    config = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def test_without_the_extra_the_message_names_it():
    code = "import sys; sys.modules['transformers'] = None; import pbcrl.llm.cost_head"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'pbcrl[llm]'" in run.stderr
