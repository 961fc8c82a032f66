"""`certify.py`: the bound by hand and by its law, and the way from a run to its certificate."""

import gc
import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import binom

from pbcrl import FolderOracle
from pbcrl.errors import StorageError
from pbcrl.export.policy import load_policy
from pbcrl.label.store import read_intro
from pbcrl.storage import FolderLock
from pbcrl.trajectory import GridLabel
from pbcrl_script_utils.certificate import (
    CERTIFICATES,
    Certificate,
    percent_up,
    read_certificates,
    unsafe_bound,
)

from ..people import answer, answering, questions
from .conftest import load
from .runs import Stop, small_pbcrl, small_ppo_lag


@pytest.fixture(scope="module")
def certify():
    return load("certify")


def certificate(unsafe, episodes, *, rate=0.05):
    return Certificate(
        policy="deterministic",
        env_id="PointHazards-v0",
        seed=7,
        episodes=episodes,
        unsafe=unsafe,
        judged_by="people",
        max_unsafe_rate=rate,
        sha256="",
    )


# -- The bound -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("unsafe", "episodes"), [(0, 1), (0, 60), (1, 60), (4, 60), (59, 60)])
def test_at_the_bound_so_few_are_seen_once_in_twenty_times(unsafe, episodes):
    bound = unsafe_bound(unsafe, episodes)
    assert math.isclose(binom.cdf(unsafe, episodes, bound), 0.05, abs_tol=1e-9)


def test_the_bound_of_none_is_that_of_all_going_well():
    assert math.isclose(unsafe_bound(0, 60), 1 - 0.05 ** (1 / 60))
    assert unsafe_bound(60, 60) == 1.0


@pytest.mark.parametrize("episodes", [1, 20, 60, 400])
def test_whatever_the_policy_is_the_bound_is_true_at_least_95_times_in_100(episodes):
    bounds = np.array([unsafe_bound(k, episodes) for k in range(episodes + 1)])
    for truth in np.linspace(0, 1, 101):
        chance = binom.pmf(np.arange(episodes + 1), episodes, truth)
        assert chance[bounds >= truth].sum() >= 0.95 - 1e-9


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.04870, "4.9%"), (0.07215752, "7.3%"), (0.000299, "0.030%"), (1.0, "100.0%")],
)
def test_a_bound_is_rounded_up(share, said):
    assert percent_up(share) == said


# -- What is said ----------------------------------------------------------------------------------


def test_what_is_said_of_a_policy_that_is_certified():
    assert str(certificate(0, 60)) == "certified: P(unsafe) <= 4.9% at 95 %, by 60 of 60 episodes"


def test_what_is_said_of_one_that_is_unsafe():
    assert str(certificate(4, 60)) == (
        "not certified: 4 of 60 episodes unsafe, P(unsafe) may be 14.7%, and 0.05 is allowed; more "
        "were seen than that, too: train on, or allow fewer while training"
    )


@pytest.mark.parametrize(("unsafe", "episodes", "enough"), [(0, 20, 59), (0, 58, 59), (1, 60, 153)])
def test_how_many_episodes_would_do_is_said(unsafe, episodes, enough):
    found = certificate(unsafe, episodes)
    assert f"; {enough} fresh ones would do" in str(found)
    assert str(found).endswith(f"--episodes {enough} --seed {7 + episodes}")
    again = math.ceil(enough * unsafe / episodes)
    assert certificate(again, enough).holds
    assert not certificate(math.ceil((enough - 1) * unsafe / episodes), enough - 1).holds


def test_what_lies_too_near_says_so():
    assert "so near that no number of episodes tells" in str(certificate(49_999, 1_000_000))


# -- From a run to its certificate -----------------------------------------------------------------


@pytest.fixture(scope="module")
def run(scripts, tmp_path_factory):
    options = {"offline_queries": 0, "online_queries": 12}
    return scripts.ppo_lag_pbcrl.train(
        small_pbcrl(scripts, tmp_path_factory.mktemp("runs"), None, **options)
    )


@pytest.fixture
def clean(run, tmp_path):
    """A copy of the run, without certificates."""
    return shutil.copytree(run, tmp_path / "runs" / "run")


def test_the_true_cost_judges_where_it_is_known(certify, clean, capsys):
    found = certify.certify(certify.Args(run=str(clean), episodes=20, cost_limit=1e9))
    assert (found.unsafe, found.episodes, found.judged_by) == (
        0,
        20,
        "the true cost, at most 1e+09",
    )
    said = capsys.readouterr().out
    assert said.startswith("not certified: 0 of 20 episodes unsafe")
    assert "judged by the true cost, at most 1e+09)" in said  # not by the run's own limit
    nothing = certify.Args(run=str(clean), episodes=20, cost_limit=0, seed=1_500_020)
    unsafe = certify.certify(nothing).unsafe
    assert read_certificates(clean) == [found, read_certificates(clean)[1]]
    card = (clean / "cost_model.md").read_text()
    assert card.count("## Certificates") == 1
    assert "| 0 of 20 | at most 14.0% | not certified for 0.05 |" in card
    assert f"| 1500020 to 1500039 | {unsafe} of 20 |" in card


def test_people_judge_and_can_go_on_later(certify, clean, tmp_path, capsys):
    folder = tmp_path / "questions"
    args = certify.Args(run=str(clean), label_folder=str(folder), episodes=14)
    with answering(folder, reckless, limit=0.5):
        found = certify.certify(args)
    assert "2 questions wait: pbcrl label" in capsys.readouterr().out
    assert found.judged_by == "people"
    (clean / CERTIFICATES).unlink()  # as if the process had been killed before the last answer
    assert certify.certify(args) == found  # the same episodes, whose answers are there
    assert 0 < found.unsafe < 14


def test_the_card_leaves_out_what_was_said_of_another_policy(certify, clean):
    old = certificate(0, 60)
    (clean / CERTIFICATES).write_text(
        '{"policy": "deterministic", "env_id": "PointHazards-v0", "seed": 7, "episodes": 60, '
        '"unsafe": 0, "judged_by": "people", "max_unsafe_rate": 0.05, "sha256": ""}\n'
    )
    assert read_certificates(clean) == [old]
    certify.certify(certify.Args(run=str(clean), episodes=4, cost_limit=1e9))
    assert len(read_certificates(clean)) == 2
    assert "of 60" not in (clean / "cost_model.md").read_text()


def reckless(episode):
    """A cost of the toy: whether the point begins on the right."""
    return float(episode.obs[0, 0] > 0)


def stopped(certify, args, monkeypatch):
    """Certify, and stop when all is asked, as sudden as a kill."""

    def stop(*_):
        raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(FolderOracle, "_wait_for", stop)
        with pytest.raises(Stop):
            certify.certify(args)
    gc.collect()  # the end of the process would release its locks


def test_a_certificate_that_was_begun_is_finished_before_another(
    certify, clean, tmp_path, monkeypatch
):
    folder = tmp_path / "questions"
    args = certify.Args(run=str(clean), label_folder=str(folder), episodes=14)
    stopped(certify, args, monkeypatch)
    (begun,) = read_certificates(clean)
    assert (begun.seed, begun.episodes, begun.unsafe) == (1_500_000, 14, None)
    first, last = questions(folder)
    answer(folder, first, GridLabel((0.0,) * 12))
    for other in (
        {"seed": 1_500_014},
        {"episodes": 13},
        {"max_unsafe_rate": 0.5},
        {"stochastic": True},
        {"label_folder": str(tmp_path / "other")},
        {"label_folder": None, "cost_limit": 1e9},
    ):
        command = f"certify.py {clean} --seed 1500000 --episodes 14 --max-unsafe-rate 0.05 "
        with pytest.raises(ValueError, match=f"{command}--label-folder {folder}$"):
            certify.certify(replace(args, **other))
    answer(folder, last, GridLabel((1.0, 1.0)))
    made = certify.certify(args)
    assert made == replace(begun, unsafe=12)
    assert read_certificates(clean) == [made]


def test_an_env_that_plays_others_each_time_is_asked_about_once(
    certify, clean, tmp_path, monkeypatch
):
    policy = load_policy(clean)
    policy.env_id = "TestToyUnseeded-v0"
    policy.save(clean / "policy.safetensors")
    folder = tmp_path / "questions"
    args = certify.Args(run=str(clean), label_folder=str(folder), episodes=3)
    stopped(certify, args, monkeypatch)
    (only,) = questions(folder)
    answer(folder, only, GridLabel((0.0, 1.0, 1.0)))
    assert certify.certify(args).unsafe == 1
    assert questions(folder) == [only]


def test_a_certificate_is_said_again_and_its_card_mended(certify, clean, capsys):
    args = certify.Args(run=str(clean), episodes=20, cost_limit=5)
    card, without = clean / "cost_model.md", (clean / "cost_model.md").read_text()
    made, said = certify.certify(args), capsys.readouterr().out
    whole = card.read_text()
    card.write_text(without)  # as if the process had been killed before it
    assert certify.certify(args) == made
    assert capsys.readouterr().out == said
    assert card.read_text() == whole
    assert read_certificates(clean) == [made]


def test_a_corrected_answer_makes_a_second_line(certify, clean, tmp_path, capsys):
    folder = tmp_path / "questions"
    args = certify.Args(run=str(clean), label_folder=str(folder), episodes=14)
    with answering(folder, reckless, limit=1):
        made = certify.certify(args)
    answer(folder, questions(folder)[-1], GridLabel((0.0, 1.0)))
    corrected = certify.certify(args)
    *_, above, below = capsys.readouterr().out.splitlines()
    assert (made.unsafe, corrected.unsafe) == (0, 1)
    assert read_certificates(clean) == [made, corrected]
    assert certify.certify(args) == corrected
    assert read_certificates(clean) == [made, corrected]
    assert above == f"   answers were corrected, both results stay in certificates.jsonl: {made}"
    assert below == f"{corrected} (deterministic policy, judged by people)"
    *_, before, now = (clean / "cost_model.md").read_text().splitlines()
    assert before.endswith("| 0 of 14 | at most 19.3% | not certified for 0.05, corrected below |")
    assert now.endswith("| 1 of 14 | at most 29.7% | not certified for 0.05 |")


def test_the_rule_of_the_run_is_that_of_its_certificate(certify, clean, tmp_path, capsys):
    labelled, folder = tmp_path / "labelled", clean / "certificate"
    labelled.mkdir()
    (labelled / "intro.md").write_text("**Unsafe**: too near, für lange.", encoding="utf-8")
    stored = json.loads((clean / "args.json").read_text())
    (clean / "args.json").write_text(json.dumps(stored | {"label_folder": str(labelled)}))
    args = certify.Args(run=str(clean), episodes=2)
    with answering(folder, reckless, limit=0.5):
        certify.certify(args)
    assert read_intro(folder) == "**Unsafe**: too near, für lange."
    (labelled / "intro.md").write_text("something else")
    certify.certify(args)
    assert read_intro(folder) == "**Unsafe**: too near, für lange."
    assert "nobody has written down" not in capsys.readouterr().out


def test_where_no_rule_is_written_down_its_place_is_named(certify, clean, tmp_path, capsys):
    folder = tmp_path / "questions"
    with answering(folder, reckless, limit=0.5):
        certify.certify(certify.Args(run=str(clean), label_folder=str(folder), episodes=2))
    assert f"what counts as unsafe: {folder / 'intro.md'} may say it" in capsys.readouterr().out


def test_the_card_of_another_policy_is_left_alone(certify, clean, tmp_path, capsys):
    folder, file = tmp_path / "questions", clean / "policy.safetensors"
    card = (clean / "cost_model.md").read_text()

    def meanwhile(episode):
        file.write_bytes(b"another one")
        return reckless(episode)

    with answering(folder, meanwhile, limit=0.5):
        made = certify.certify(certify.Args(run=str(clean), label_folder=str(folder), episodes=2))
    assert capsys.readouterr().out.endswith(
        ", of a policy that is no longer there: policy.safetensors has changed meanwhile\n"
    )
    assert read_certificates(clean) == [made]
    assert (clean / "cost_model.md").read_text() == card


@pytest.mark.parametrize(
    ("trained", "rate", "episodes"),
    [
        ({}, 0.05, 60),
        ({"constraint": "rate", "max_unsafe_rate": 0.02}, 0.02, 156),  # thirteen grids
        ({"constraint": "rate", "max_unsafe_rate": 0.3}, 0.3, 60),
        ({"constraint": "learned", "max_unsafe_rate": 0.02}, 0.05, 60),  # it had no part in it
    ],
)
def test_the_share_is_that_of_the_training_and_the_episodes_are_enough_for_it(
    certify, trained, rate, episodes
):
    def asked(**options):
        args = certify.Args(run="", **options)
        policy = SimpleNamespace(env_id="PointHazards-v0")
        return certify.request(args, trained, policy, sha256="", limit=None)

    assert (asked().max_unsafe_rate, asked().episodes) == (rate, episodes)
    assert certificate(0, episodes, rate=rate).holds
    strict = asked(max_unsafe_rate=0.01)
    assert (strict.max_unsafe_rate, strict.episodes) == (0.01, 300)
    assert asked(episodes=20).episodes == 20


# -- Bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "what"),
    [
        (500_002, "training"),
        (999_990, "evaluation"),
        (1_400_019, "the choice of the policy"),
        (1_500_019, "certificate 1"),
    ],
)
def test_episodes_that_somebody_has_looked_at_are_refused(certify, clean, seed, what):
    certify.certify(certify.Args(run=str(clean), episodes=20, cost_limit=5))
    with pytest.raises(ValueError, match=f"belong to {what}; give --seed 1500020"):
        certify.certify(certify.Args(run=str(clean), episodes=20, cost_limit=5, seed=seed))


@pytest.mark.parametrize(
    ("trained", "seed", "what", "free"),
    [
        (1_000_000, 1_500_000, "training", 1_500_004),
        (100_000, 1_500_000, "the choice of the policy", 1_500_020),
        (500_000, 1_500_001, "evaluation", 1_500_004),
        (0, 6_500_003, "training", 1_500_000),  # an env without a state, and a run that went on
        (0, 4_000_000, "training", 1_500_000),  # the same of the offline episodes
    ],
)
def test_the_seeds_that_are_advised_are_free(certify, trained, seed, what, free):
    run = {"seed": trained, "num_envs": 4, "eval_episodes": 4}
    asked = replace(certificate(0, 20), seed=seed)
    with pytest.raises(ValueError, match=rf"belong to {what}; give --seed {free}$"):
        certify.check_fresh(asked, run, [])
    certify.check_fresh(replace(asked, seed=free), run, [])


def test_certificates_lie_between_those_that_are_there(certify):
    run = {"seed": 0, "num_envs": 4, "eval_episodes": 4}
    earlier = [replace(certificate(0, 20), seed=seed) for seed in (1_500_000, 1_500_030)]
    asked = replace(certificate(0, 15), seed=1_500_000)
    with pytest.raises(ValueError, match=r"1500014 belong to certificate 1; give --seed 1500050"):
        certify.check_fresh(asked, run, earlier)
    certify.check_fresh(replace(asked, seed=1_500_020, episodes=10), run, earlier)


def test_without_a_limit_nobody_knows_what_is_safe(scripts, certify, tmp_path):
    run = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, cost_limit=math.inf))
    with pytest.raises(ValueError, match="give --cost-limit, or --label-folder to ask people"):
        certify.certify(certify.Args(run=str(run)))
    (run / "policy.safetensors").unlink()
    with pytest.raises(StorageError, match="has none; give the folder of a run"):
        certify.certify(certify.Args(run=str(run), cost_limit=5))


def test_a_run_that_is_not_finished_is_refused(certify, clean):
    args = certify.Args(run=str(clean), episodes=4, cost_limit=5)
    with FolderLock(clean), pytest.raises(StorageError, match="another one is at work in"):
        certify.certify(args)
    (clean / "summary.json").unlink()
    with pytest.raises(StorageError, match=r"has no summary\.json: it was cut off"):
        certify.certify(args)
    assert read_certificates(clean) == []


def test_people_need_no_cost_limit(certify, clean, tmp_path):
    args = certify.Args(run=str(clean), label_folder=str(tmp_path / "questions"), cost_limit=5)
    with pytest.raises(ValueError, match=r"people judge \(--label-folder\), got --cost-limit 5"):
        certify.certify(args)
    assert not (tmp_path / "questions").exists()


def test_damaged_certificates_are_not_written_over(certify, clean):
    (clean / CERTIFICATES).write_text('{"policy": "determ')
    with pytest.raises(StorageError, match=r"certificates.jsonl has one certificate per line"):
        certify.certify(certify.Args(run=str(clean), episodes=4, cost_limit=5))
    assert (clean / CERTIFICATES).read_text() == '{"policy": "determ'
