"""`--device cuda` and language models on a GPU: equal to the CPU, and cut off without harm.

Skipped where PyTorch finds no GPU.
"""

import copy
from functools import partial

import numpy as np
import pytest
import torch

from pbcrl.llm.cost_head import score

from ..language import FAMILIES, byte_tokenizer, cost_head
from ..test_llm import right_after_a_fit
from .conftest import load
from .runs import assert_same_run, cut_off, metrics, resume, small_pbcrl, small_ppo_lag, summary
from .test_agent import flat, make_agent, make_args, make_batch, update
from .test_llm_script import TINY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOKENIZER = byte_tokenizer()


# -- The scripts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target_kl", [np.inf, 0.01])
def test_an_update_is_that_of_the_cpu(scripts, target_kl):
    trained = []
    for device in ("cpu", "cuda"):
        args = make_args(scripts.ppo_lag, device=device, target_kl=target_kl, bound_coef=0.3)
        agent = make_agent(scripts.ppo_lag, args)
        update(scripts.ppo_lag, agent, make_batch(scripts.ppo_lag, agent), args)
        trained.append(flat(agent))
    torch.testing.assert_close(*trained, atol=1e-3, rtol=1e-3)


def test_the_first_rollout_is_that_of_the_cpu(scripts, tmp_path):
    """Noise is drawn on the CPU: before the first update, both see the same episodes."""
    first = []
    for device in ("cpu", "cuda"):
        args = small_ppo_lag(scripts, tmp_path, device=device, run_name=device)
        first.append(metrics(scripts.ppo_lag.train(args))[0])
    for key in ("return", "true_cost"):
        assert first[0][key] == pytest.approx(first[1][key], rel=1e-4), key


def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(
    scripts, tmp_path, toy_dataset, save_every, monkeypatch
):
    save_every(1)
    module = scripts.ppo_lag_pbcrl
    make = partial(small_pbcrl, scripts, tmp_path, toy_dataset, device="cuda")
    whole, args = module.train(make(run_name="whole")), make(run_name="cut")
    cut_off(module, args, after=3, monkeypatch=monkeypatch)
    assert_same_run(resume(module, tmp_path / "cut"), whole)


# -- Language models -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_cpu(family):
    model = cost_head(family).eval()
    texts = tuple([f"{word * (i % 7)}{i}" for i in range(20)] for word in ("How? ", "So. "))
    on_cpu = score(model, TOKENIZER, *texts)
    on_gpu = score(copy.deepcopy(model).to("cuda"), TOKENIZER, *texts)
    np.testing.assert_allclose(on_gpu, on_cpu, atol=1e-4)
    alone = [
        score(copy.deepcopy(model).to("cuda"), TOKENIZER, [a], [b])[0]
        for a, b in zip(*texts, strict=True)
    ]
    np.testing.assert_allclose(alone, on_cpu, atol=1e-4)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fit_in_bfloat16_learns_what_a_fit_in_float32_learns(family, bf16):
    assert right_after_a_fit(family, "cuda", bf16=bf16) > 0.9


def test_a_run_of_tokens_that_was_cut_off_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    script = load("ppo_lag_llm")
    options = {**TINY, "device": "cuda", "online_queries": 8, "finetune_interval": 2}
    options["runs_dir"] = str(tmp_path)
    whole = script.train(script.Args(**options, run_name="whole"))
    cut_off(script, script.Args(**options, run_name="cut"), after=3, monkeypatch=monkeypatch)
    folder = resume(script, tmp_path / "cut")
    assert metrics(folder) == metrics(whole)
    assert summary(folder) == summary(whole)
