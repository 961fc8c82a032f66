import math
import threading

import numpy as np
import pytest

from pbcrl.buffer import PreferenceBuffer
from pbcrl.errors import BudgetError, StorageError
from pbcrl.feedback import FeedbackLoop
from pbcrl.label.folder_oracle import FolderOracle, read_clips, read_labelled
from pbcrl.label.replay import Replay
from pbcrl.label.store import (
    LabelStore,
    hold_folder,
    read_pairs_to_come,
    tell_pairs_to_come,
)
from pbcrl.trajectory import BatchLabel, GridLabel, Label, Query, Trajectory

from .damage import full_disk
from .people import answer, query_of, questions

NAN = math.nan


def episode(value):
    return Trajectory(np.full((3, 2), value), np.full((3, 1), -value), np.ones(3))


def query(first, second):
    return Query(episode(first), episode(second))


def test_an_answer_is_collected_once_under_the_number_of_its_query(tmp_path):
    oracle = FolderOracle(tmp_path)
    numbers = oracle.submit([query(1, 2), query(3, 4)])
    assert oracle.collect() == {}
    answer(tmp_path, 2, Label(1, 1, 0))
    assert oracle.collect() == {numbers[1]: Label(1, 1, 0)}
    assert oracle.collect() == {}
    assert (oracle.queries_used, oracle.num_open) == (2, 1)


def test_a_query_in_the_folder_shows_both_trajectories_and_no_true_cost(tmp_path):
    FolderOracle(tmp_path).submit([query(1, 2)])
    found = query_of(tmp_path, 1)
    np.testing.assert_array_equal(found.first.obs, np.ones((3, 2)))
    np.testing.assert_array_equal(found.second.actions, np.full((3, 1), -2))
    assert found.first.costs is None


def test_a_query_that_an_earlier_process_asked_is_not_asked_again(tmp_path):
    FolderOracle(tmp_path, budget=2).submit([query(1, 2), query(3, 4)])
    answer(tmp_path, 1, Label(0, NAN, 1))
    again = FolderOracle(tmp_path, budget=2)
    assert again.queries_used == 2
    numbers = again.submit([query(3, 4), query(1, 2)])
    assert questions(tmp_path) == [1, 2]
    ((number, label),) = again.collect().items()
    assert (number, label.preference, label.second_safe) == (numbers[1], 0, 1)
    assert math.isnan(label.first_safe)


def test_a_budget_belongs_to_a_run_and_the_answers_to_all_of_them(tmp_path):
    first = FolderOracle(tmp_path, budget=2, run="seed 0")
    first.submit([query(1, 2)])
    answer(tmp_path, 1, Label(1, 1, 0))
    first.close()
    second = FolderOracle(tmp_path, budget=2, run="seed 1")
    assert second.queries_used == 0
    with pytest.raises(BudgetError, match=r"budget of 2 .* 2 are left, 3 were asked"):
        second.submit([query(1, 2), query(3, 4), query(5, 6)])
    assert questions(tmp_path) == [1]
    assert second.label([query(1, 2)]) == [Label(1, 1, 0)]  # at once, and nobody is asked again
    assert second.queries_used == 1
    second.close()
    assert FolderOracle(tmp_path, budget=2, run="seed 0").queries_used == 1


def test_questions_that_nobody_waits_for_come_after_those_of_the_run_that_waits(tmp_path):
    def order_after(run, asks):
        oracle = FolderOracle(tmp_path, run=run)
        oracle.submit([query(one, 9) for one in asks])
        found = [question.id for question in oracle.store.open_for("Ada")]
        oracle.close()
        return found

    assert order_after("killed", [1, 2, 3]) == [1, 2, 3]
    assert order_after("waiting", [3, 4]) == [3, 4, 1, 2]
    assert order_after("killed", [2]) == [1, 2, 3, 4]  # resumed: what it asks again is its own
    assert FolderOracle(tmp_path, run="killed").queries_used == 3


def test_a_correction_holds_until_the_answer_is_collected_and_then_for_later_runs(tmp_path):
    oracle = FolderOracle(tmp_path)
    oracle.submit([query(1, 2)])
    answer(tmp_path, 1, Label(1, 1, 1))
    answer(tmp_path, 1, Label(0, 1, 1))
    assert [label.preference for label in oracle.collect().values()] == [0]
    answer(tmp_path, 1, Label(0.5, 1, 1))
    assert oracle.collect() == {}
    oracle.close()
    assert FolderOracle(tmp_path, run="later").label([query(1, 2)]) == [Label(0.5, 1, 1)]


def test_waiting_for_people_ends_with_the_last_answer_in_the_order_of_the_queries(tmp_path):
    said = []
    oracle = FolderOracle(tmp_path, poll_seconds=0.01, say=said.append)

    def person():
        while len(questions(tmp_path)) < 2:
            pass
        answer(tmp_path, 2, Label(0, 0, 1))
        answer(tmp_path, 1, Label(1, 1, 1))

    thread = threading.Thread(target=person)
    thread.start()
    assert oracle.label([query(1, 2), query(3, 4)]) == [Label(1, 1, 1), Label(0, 0, 1)]
    thread.join()
    assert oracle.num_open == 0
    where = f"the page: python -m pbcrl.label {tmp_path}"
    assert said == [f"waiting for people: 0 of 2 answered, about 1 min to go; {where}"]


def test_who_waits_is_told_the_minutes_by_the_pace_of_people_as_soon_as_it_is_known(tmp_path):
    """Before that 40 pairs for two people take 80 * 7 seconds, then 76 * 30."""
    said = []
    oracle = FolderOracle(tmp_path, annotators=2, say=said.append)
    oracle.submit([query(2 * i, 2 * i + 1) for i in range(40)])
    oracle.collect(wait=0.01)
    for number, seconds in enumerate((10.0, 30.0, 30.0, 90.0), start=1):
        oracle.store.answer(number, Label(1, 1, 1), annotator="Ada", seconds=seconds)
    oracle.collect(wait=0.01)
    assert [line.split(";")[0] for line in said] == [
        "waiting for people: 0 of 40 answered, about 10 min to go",
        "waiting for people: 0 of 40 answered, about 38 min to go",
    ]


def test_who_waits_is_told_the_minutes_of_what_the_run_may_still_ask_too(tmp_path):
    """Of 150 pairs 9 are asked, for two people each: 18 * 7 seconds, and 282 * 7 more."""
    said = []
    oracle = FolderOracle(tmp_path, annotators=2, budget=150, say=said.append)
    assert read_pairs_to_come(tmp_path) == 150
    oracle.submit([query(2 * i, 2 * i + 1) for i in range(9)])
    assert read_pairs_to_come(tmp_path) == 141
    oracle.collect(wait=0.01)
    assert said[0].split(";")[0] == (
        "waiting for people: 0 of 9 answered, about 3 min to go, 35 with the 141 questions to come"
    )
    oracle.close()
    again = FolderOracle(tmp_path, budget=150)  # knows what it has asked
    assert read_pairs_to_come(tmp_path) == 141
    again.close()
    FolderOracle(tmp_path).close()  # has no bound
    assert read_pairs_to_come(tmp_path) is None


def test_a_full_disk_leaves_the_page_without_the_number_and_nobody_else_is_told(tmp_path):
    held = hold_folder(tmp_path, by="oracle")
    tell_pairs_to_come(held, 7)
    with full_disk(0):
        tell_pairs_to_come(held, 6)
        assert read_pairs_to_come(tmp_path) is None
        held.close()
    assert read_pairs_to_come(tmp_path) is None


@pytest.mark.parametrize("told", [b"-3", b"many", b"9" * 5_000, "٣".encode()])
def test_nothing_odd_in_the_lock_is_taken_for_a_number_of_pairs(tmp_path, told):
    (tmp_path / ".oracle.lock").write_bytes(told)
    assert read_pairs_to_come(tmp_path) in (None, 999_999_999)


def test_the_page_s_command_names_the_env_s_own_module_after_a_restart_too(tmp_path):
    def play_again(one):
        return Replay("not_installed_skater:Skater-v0", seed=int(one.obs[0, 0]))

    folder = tmp_path / "who said so"
    for asks in (play_again, None):  # a later process knows by the folder alone
        said = []
        oracle = FolderOracle(folder, show=asks, say=said.append)
        oracle.submit([query(1, 2)])
        oracle.collect(wait=0.01)
        oracle.close()
        command = f"python -m pbcrl.label '{folder}' --env-id not_installed_skater:Skater-v0"
        assert [line.split("the page: ")[1] for line in said] == [command]


def test_a_wait_that_is_over_brings_what_was_answered(tmp_path):
    oracle = FolderOracle(tmp_path, poll_seconds=0.01)
    first, second = oracle.submit([query(1, 2), query(3, 4)])
    answer(tmp_path, 1, Label(1, 1, 1))
    assert oracle.collect(wait=0.02) == {first: Label(1, 1, 1)}
    answer(tmp_path, 2, Label(1, 1, 1))
    assert oracle.collect(wait=math.inf) == {second: Label(1, 1, 1)}
    assert oracle.collect(wait=math.inf) == {}  # nothing is open


def test_two_people_make_one_label_and_it_is_not_there_before_both_have_answered(tmp_path):
    oracle = FolderOracle(tmp_path, annotators=2)
    (number,) = oracle.submit([query(1, 2)])
    answer(tmp_path, 1, Label(1, 1, 0), annotator="Ada")
    assert oracle.collect() == {}
    answer(tmp_path, 1, Label(0.5, 1, 1), annotator="Bob")
    label = oracle.collect()[number]
    assert (label.preference, label.first_safe) == (0.75, 1)
    assert math.isnan(label.second_safe)


def test_an_answer_of_one_is_not_enough_for_a_later_run_that_wants_two(tmp_path):
    FolderOracle(tmp_path).submit([query(1, 2)])
    answer(tmp_path, 1, Label(1, 1, 0), annotator="Ada")
    oracle = FolderOracle(tmp_path, annotators=2, run="another")
    oracle.submit([query(3, 4)])
    assert oracle.collect() == {}  # now the oracle knows what was answered
    (number,) = oracle.submit([query(1, 2)])
    assert oracle.collect() == {}
    answer(tmp_path, 1, Label(1, 1, 0), annotator="Bob")
    assert oracle.collect() == {number: Label(1, 1, 0)}


def test_nobody_cannot_answer(tmp_path):
    with pytest.raises(ValueError, match="annotators must be >= 1, got 0"):
        FolderOracle(tmp_path, annotators=0)


# -- Batches -----------------------------------------------------------------------------------


def batch(*values):
    return [episode(value) for value in values]


@pytest.mark.parametrize("given", [1, 0, NAN])
def test_a_batch_is_judged_by_people_and_counts_as_half_as_many_queries(tmp_path, given):
    oracle = FolderOracle(tmp_path, budget=2)
    number = oracle.submit_batch(batch(1, 2, 3))
    assert (oracle.queries_used, oracle.num_open) == (2, 1)
    answer(tmp_path, 1, BatchLabel(given))
    assert repr(oracle.collect()) == repr({number: BatchLabel(float(given))})
    with pytest.raises(BudgetError, match="0 are left, 1 were asked"):
        oracle.submit_batch(batch(1, 2))
    with pytest.raises(ValueError, match="got none"):
        oracle.submit_batch([])


def test_a_batch_is_no_pair_even_of_two(tmp_path):
    oracle = FolderOracle(tmp_path)
    oracle.submit([query(1, 2)])
    oracle.submit_batch(batch(1, 2))
    assert questions(tmp_path) == [1, 2]
    answer(tmp_path, 1, Label(1, 1, 0))
    answer(tmp_path, 2, BatchLabel(1))
    assert len(oracle.collect()) == 2
    assert read_labelled(tmp_path)[2] == [Label(1, 1, 0)]


def test_a_grid_is_answered_clip_by_clip_and_counts_as_one_query(tmp_path):
    oracle = FolderOracle(tmp_path, budget=2)
    thread = threading.Timer(0.1, answer, (tmp_path, 1, GridLabel((1.0, 0.0, 1.0))))
    thread.start()
    assert oracle.label_grids([batch(1, 2, 3)]) == [GridLabel((1.0, 0.0, 1.0))]
    thread.join()
    assert (oracle.queries_used, oracle.num_open) == (1, 0)
    assert oracle.label_grids([batch(1, 2, 3)]) == [GridLabel((1.0, 0.0, 1.0))]  # known by now
    assert read_labelled(tmp_path)[2] == []
    with pytest.raises(BudgetError, match="1 are left, 2 were asked"):
        oracle.label_grids([batch(*range(5)), batch(6, 7)])
    for many in ([], batch(*range(13))):
        with pytest.raises(ValueError, match=f"1 to 12 trajectories, got {len(many)}"):
            oracle.label_grids([many])


def test_a_training_loop_goes_on_while_people_judge_a_batch_and_shows_no_second_one(tmp_path):
    """The answer comes rounds later, also if the process was killed in between."""

    def begin():
        oracle = FolderOracle(tmp_path / "asked", budget=8)
        draws = np.random.default_rng(0)
        return FeedbackLoop(oracle, PreferenceBuffer(), rng=draws, folder=tmp_path / "run")

    loop = begin()
    loop.add(batch(1, 2, 3, 4))
    answers = loop.round(2, batch=4)
    assert (answers.batch_shown, answers.batch, loop.queries_asked, loop.num_open) == (
        True,
        None,
        2,
        1,
    )
    loop.add(batch(5, 6, 7, 8))
    answers = loop.round(4, batch=4)  # two pairs
    assert (answers.batch_shown, len(answers.pairs), loop.queries_asked) == (False, 0, 4)
    state = loop.state_dict()
    loop.close()
    loop.oracle.close()

    again = begin()
    again.load_state_dict(state)
    answer(tmp_path / "asked", 1, BatchLabel(0))
    answer(tmp_path / "asked", 2, Label(1, 1, 1))
    answers = again.round(4, batch=4)
    assert (len(answers.pairs), answers.batch, answers.batch_shown) == (1, BatchLabel(0), False)
    assert again.round(4, batch=4).batch is None
    assert (again.num_open, again.num_labels) == (1, 2)


# -- The folder --------------------------------------------------------------------------------


def test_all_that_was_ever_answered_can_be_learned_from(tmp_path):
    """A trajectory that several queries show comes once, so that a buffer knows it again."""
    FolderOracle(tmp_path).submit([query(1, 2), query(3, 4), query(4, 1), query(2, 2), query(5, 6)])
    for number, preference in enumerate([1, 0.5, 0.25, 0.5], start=1):
        answer(tmp_path, number, Label(preference, 1, 0))
    trajectories, pairs, labels = read_labelled(tmp_path)
    assert [trajectory.obs[0, 0] for trajectory in trajectories] == [1, 2, 3, 4, 2]
    assert pairs.tolist() == [[0, 1], [2, 3], [3, 0], [1, 4]]  # a pair has two members
    assert labels == [Label(preference, 1, 0) for preference in (1, 0.5, 0.25, 0.5)]
    buffer = PreferenceBuffer()
    buffer.add_trajectories(trajectories)
    buffer.add_labels(pairs, labels)
    assert buffer.num_contradictions == 3  # 1, 2 and 4 were called safe and unsafe


def test_what_was_answered_about_grids_is_read_as_clips(tmp_path):
    store = LabelStore(tmp_path, create=True)
    store.ask([("grid", batch(1, 2, 3)), ("pair", batch(4, 5)), ("grid", batch(3))])
    for number, label in enumerate([GridLabel((1, NAN, 0)), Label(1, 1, 0), GridLabel((1,))], 1):
        answer(tmp_path, number, label)
    found = [(clip.trajectory.obs[0, 0], clip.safe) for clip in read_clips(tmp_path)]
    assert found == [(1, 1), (3, 0), (3, 1)]


def test_a_folder_without_answers_has_nothing_to_learn_from(tmp_path):
    FolderOracle(tmp_path).submit([query(1, 2)])
    trajectories, pairs, labels = read_labelled(tmp_path)
    assert (trajectories, pairs.shape, labels) == ([], (0, 2), [])
    assert read_clips(tmp_path) == []


def test_how_a_trajectory_is_played_again_is_kept_with_it(tmp_path):
    oracle = FolderOracle(tmp_path, show=lambda one: Replay("Toy-v0", seed=int(one.obs[0, 0])))
    oracle.submit([query(1, 2)])
    store = LabelStore(tmp_path)
    first, second = store.question(1).members
    found = [Replay.from_bytes(store.replay(digest)) for digest in (first, second)]
    assert [(one.env_id, one.seed) for one in found] == [("Toy-v0", 1), ("Toy-v0", 2)]


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="must be writable"):
        FolderOracle(tmp_path / "file" / "folder")


def test_a_second_oracle_is_refused_so_that_a_budget_is_spent_once(tmp_path):
    oracle = FolderOracle(tmp_path, budget=4)
    oracle.submit([query(1, 2), query(3, 4)])
    with pytest.raises(StorageError, match=r"has one oracle at a time, but another .* wait until"):
        FolderOracle(tmp_path, budget=4)
    oracle.close()
    assert FolderOracle(tmp_path, budget=4).queries_used == 2


def test_a_folder_with_fewer_queries_than_a_state_knows_is_refused(tmp_path):
    oracle = FolderOracle(tmp_path / "one")
    oracle.submit([query(1, 2), query(3, 4)])
    state = oracle.state_dict()
    again = FolderOracle(tmp_path / "other")
    again.submit([query(1, 2)])
    with pytest.raises(StorageError, match=r"2 were in .*, but 1 are there; restore the others"):
        again.load_state_dict(state)
