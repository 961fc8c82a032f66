import io
import json
import math
import sys
import threading

import numpy as np
import pytest

from pbcrl import label
from pbcrl.buffer import PreferenceBuffer
from pbcrl.errors import BudgetError, CorruptFileError, StorageError
from pbcrl.folder_oracle import (
    FolderOracle,
    hold_folder,
    query_names,
    read_labelled,
    read_query,
    write_answer,
)
from pbcrl.trajectory import Label, Query, Trajectory


def episode(value):
    return Trajectory(np.full((3, 2), value), np.full((3, 1), -value), np.ones(3))


def query(first, second):
    return Query(episode(first), episode(second))


def answer(folder, name, **values):
    with open(folder / "answers.jsonl", "a") as file:
        file.write(json.dumps({"query": name, **values}) + "\n")


def test_an_answer_is_collected_once_under_the_number_of_its_query(tmp_path):
    oracle = FolderOracle(tmp_path)
    numbers = oracle.submit([query(1, 2), query(3, 4)])
    assert oracle.collect() == {}
    _, second = query_names(tmp_path)
    answer(tmp_path, second, preference=1, first_safe=1, second_safe=0)
    assert oracle.collect() == {numbers[1]: Label(1, 1, 0)}
    assert oracle.collect() == {}
    assert (oracle.queries_used, oracle.num_open) == (2, 1)


def test_a_query_on_disk_shows_both_trajectories_and_no_true_cost(tmp_path):
    FolderOracle(tmp_path).submit([query(1, 2)])
    (name,) = query_names(tmp_path)
    with np.load(tmp_path / f"{name}.npz") as arrays:
        assert set(arrays) == {"first_obs", "first_actions", "second_obs", "second_actions"}
    found = read_query(tmp_path, name)
    np.testing.assert_array_equal(found.first.obs, np.ones((3, 2)))
    np.testing.assert_array_equal(found.second.actions, np.full((3, 1), -2))
    assert found.first.costs is None


def test_a_query_that_an_earlier_process_asked_is_not_asked_again(tmp_path):
    FolderOracle(tmp_path, budget=2).submit([query(1, 2), query(3, 4)])
    first, _ = query_names(tmp_path)
    answer(tmp_path, first, preference=0)
    again = FolderOracle(tmp_path, budget=2)
    assert again.queries_used == 2
    numbers = again.submit([query(3, 4), query(1, 2)])
    assert len(query_names(tmp_path)) == 2
    ((number, label),) = again.collect().items()
    assert number == numbers[1]
    assert label.preference == 0
    assert math.isnan(label.first_safe)  # left out: not answered


def test_a_budget_counts_what_lies_in_the_folder(tmp_path):
    FolderOracle(tmp_path).submit([query(1, 2)])
    oracle = FolderOracle(tmp_path, budget=2)
    with pytest.raises(BudgetError, match=r"budget of 2 .* 1 are left, 2 were asked"):
        oracle.submit([query(1, 2), query(3, 4), query(5, 6)])
    assert oracle.queries_used == len(query_names(tmp_path)) == 1


def test_the_last_answer_to_a_query_holds(tmp_path):
    oracle = FolderOracle(tmp_path)
    oracle.submit([query(1, 2)])
    (name,) = query_names(tmp_path)
    answer(tmp_path, name, preference=1)
    answer(tmp_path, name, preference=0)
    assert [label.preference for label in oracle.collect().values()] == [0]


def test_a_line_that_is_no_answer_is_named_and_does_not_end_the_run(tmp_path):
    oracle = FolderOracle(tmp_path)
    oracle.submit([query(1, 2)])
    (name,) = query_names(tmp_path)
    for wrong in (
        '{"query": "x", "preference": 7}',
        f'{{"query": "x", "preference": {10**400}}}',
        '{"query": 3}',
        '{"prefer": 1}',
        "yes",
        "[]",
        "null",
        "[" * 10**5,
    ):
        (tmp_path / "answers.jsonl").write_text(wrong + "\n")
        answer(tmp_path, name, preference=1)
        with pytest.warns(RuntimeWarning, match=r"line 1 of .*answers\.jsonl is not .* fix it"):
            assert read_labelled(tmp_path)[2][0].preference == 1
    with pytest.warns(RuntimeWarning, match="line 1"):
        assert len(oracle.collect()) == 1


def test_half_a_line_at_the_end_may_still_be_written(tmp_path):
    oracle = FolderOracle(tmp_path)
    oracle.submit([query(1, 2)])
    (name,) = query_names(tmp_path)
    whole = json.dumps({"query": name, "preference": 1})
    (tmp_path / "answers.jsonl").write_text(whole[:-5])
    assert oracle.collect() == {}
    (tmp_path / "answers.jsonl").write_text(whole)  # a person may end without a line break
    assert len(oracle.collect()) == 1
    write_answer(tmp_path, name, Label(0, 1, 1))
    assert read_labelled(tmp_path)[2] == [Label(0, 1, 1)]


def test_waiting_for_a_person_ends_with_the_last_answer_in_the_order_of_the_queries(tmp_path):
    oracle = FolderOracle(tmp_path, poll_seconds=0.01)

    def person():
        while len(query_names(tmp_path)) < 2:
            pass
        first, second = query_names(tmp_path)
        write_answer(tmp_path, second, Label(0, 1, 0))
        write_answer(tmp_path, first, Label(1, 1, 1))

    thread = threading.Thread(target=person)
    thread.start()
    assert oracle.label([query(1, 2), query(3, 4)]) == [Label(1, 1, 1), Label(0, 1, 0)]
    thread.join()
    assert oracle.num_open == 0


def test_all_that_was_ever_answered_can_be_learned_from(tmp_path):
    """A trajectory that several queries show comes once, so that a buffer knows it again."""
    FolderOracle(tmp_path).submit([query(1, 2), query(3, 4), query(4, 1), query(2, 2), query(5, 6)])
    for name, preference in zip(query_names(tmp_path), [1, 0.5, 0, 0.5], strict=False):
        write_answer(tmp_path, name, Label(preference, 1, 0))
    trajectories, pairs, labels = read_labelled(tmp_path)
    assert [trajectory.obs[0, 0] for trajectory in trajectories] == [1, 2, 3, 4, 2]
    assert pairs.tolist() == [[0, 1], [2, 3], [3, 0], [1, 4]]  # a pair has two members
    assert labels == [Label(preference, 1, 0) for preference in (1, 0.5, 0, 0.5)]
    buffer = PreferenceBuffer()
    buffer.add_trajectories(trajectories)
    buffer.add_labels(pairs, labels)
    assert buffer.num_contradictions == 3  # 1, 2 and 4 were called safe and unsafe


def test_a_folder_without_answers_has_nothing_to_learn_from(tmp_path):
    FolderOracle(tmp_path).submit([query(1, 2)])
    trajectories, pairs, labels = read_labelled(tmp_path)
    assert (trajectories, pairs.shape, labels) == ([], (0, 2), [])


def test_a_query_can_be_drawn_for_the_person_before_it_is_asked(tmp_path):
    def draw(query, path):
        assert not path.with_name(path.name + ".npz").exists()
        path.with_name(path.name + "-first.txt").write_text(f"{query.first.obs[0, 0]:g}")

    FolderOracle(tmp_path, render=draw).submit([query(1, 2)])
    (name,) = query_names(tmp_path)
    assert (tmp_path / f"{name}-first.txt").read_text() == "1"


def test_a_damaged_query_is_refused_by_name(tmp_path):
    FolderOracle(tmp_path).submit([query(1, 2)])
    (name,) = query_names(tmp_path)
    path = tmp_path / f"{name}.npz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CorruptFileError, match=f"{name}.npz is damaged"):
        read_query(tmp_path, name)


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


def test_an_answer_to_an_unknown_query_is_named_once(tmp_path):
    oracle = FolderOracle(tmp_path)
    (number,) = oracle.submit([query(1, 2)])
    answer(tmp_path, "000001-typo", preference=1)
    with pytest.warns(RuntimeWarning, match=r"answers '000001-typo', which .* correct the name"):
        assert oracle.collect() == {}
    answer(tmp_path, *query_names(tmp_path), preference=1, first_safe=1, second_safe=1)
    assert oracle.collect() == {number: Label(1, 1, 1)}  # and no second warning


def test_a_folder_with_fewer_queries_than_a_state_knows_is_refused(tmp_path):
    oracle = FolderOracle(tmp_path)
    oracle.submit([query(1, 2), query(3, 4)])
    state = oracle.state_dict()
    oracle.close()
    (tmp_path / f"{query_names(tmp_path)[0]}.npz").unlink()
    again = FolderOracle(tmp_path)
    with pytest.raises(StorageError, match=r"2 were in .*, but 1 are there; restore the others"):
        again.load_state_dict(state)


# -- At the terminal -------------------------------------------------------------------------


@pytest.fixture
def type_answers(monkeypatch, capsys):
    """Answer at the terminal by typing a text; return what was shown."""

    def run(folder, text):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        label.main([str(folder)])
        return capsys.readouterr().out

    return run


def test_a_person_answers_at_the_terminal_and_goes_on_where_it_was_left(tmp_path, type_answers):
    oracle = FolderOracle(tmp_path)
    numbers = oracle.submit([query(1, 2), query(3, 4), query(5, 6)])
    shown = type_answers(tmp_path, "1\ny\nx\nn\n=\nq\n")  # x is no answer and is asked again
    assert "3 queries without answer" in shown
    assert f"{query_names(tmp_path)[0]}.npz" in shown
    assert oracle.collect() == {numbers[0]: Label(1, 1, 0)}  # the half answer is not kept
    assert "2 queries without answer" in type_answers(tmp_path, "=\n\n\n2\nn\ny\n")
    answers = oracle.collect()
    assert answers[numbers[1]].preference == 0.5
    assert math.isnan(answers[numbers[1]].first_safe)
    assert answers[numbers[2]] == Label(0, 0, 1)


def test_a_folder_that_is_not_there_has_no_questions(tmp_path):
    with pytest.raises(SystemExit, match=r"there is no folder .*nowhere"):
        label.main([str(tmp_path / "nowhere")])


def test_a_second_annotator_is_refused(tmp_path):
    with hold_folder(tmp_path, by="annotator"):
        with pytest.raises(SystemExit, match="one annotator at a time, but another one is at work"):
            label.main([str(tmp_path)])
        FolderOracle(tmp_path)  # the oracle works beside the annotator


def test_a_damaged_query_does_not_keep_the_others_from_being_asked(tmp_path, type_answers):
    oracle = FolderOracle(tmp_path)
    numbers = oracle.submit([query(1, 2), query(3, 4)])
    damaged, _ = query_names(tmp_path)
    (tmp_path / f"{damaged}.npz").write_bytes(b"nothing")
    shown = type_answers(tmp_path, "1\ny\nn\n")
    assert f"{damaged}.npz is damaged" in shown
    assert "this query is left out" in shown
    assert oracle.collect() == {numbers[1]: Label(1, 1, 0)}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("1\nn\ny\n", "1 is safer, yet it is unsafe and 2 is safe"),
        ("2\ny\nn\n", "2 is safer, yet it is unsafe and 1 is safe"),
    ],
)
def test_an_answer_that_contradicts_itself_is_asked_once_more(tmp_path, type_answers, given, shown):
    oracle = FolderOracle(tmp_path)
    (number,) = oracle.submit([query(1, 2)])
    assert shown in type_answers(tmp_path, given + "=\ny\nn\n")
    assert oracle.collect() == {number: Label(0.5, 1, 0)}


def test_a_file_name_reaches_the_terminal_without_its_control_codes(tmp_path, type_answers):
    FolderOracle(tmp_path).submit([query(1, 2)])
    (name,) = query_names(tmp_path)
    (tmp_path / f"{name}-\x1b[2Jfilm.mp4").touch()
    shown = type_answers(tmp_path, "q\n")
    assert "\x1b" not in shown
    assert rf"{name}-\x1b[2Jfilm.mp4" in shown
