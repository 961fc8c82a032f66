"""Questions and answers of people on disk: what is kept, who is asked what, and what is refused."""

import csv
import io
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from contextlib import closing

import numpy as np
import pytest

import pbcrl.label.server  # noqa: F401 - while root may read Python's own modules
from pbcrl.data.label_log import query_digest, trajectory_digest
from pbcrl.errors import CorruptFileError, FormatVersionError, LabelError, StorageError
from pbcrl.label.__main__ import main
from pbcrl.label.export import COLUMNS, agreement, disagreements, export, table
from pbcrl.label.standing import combined
from pbcrl.label.store import ConflictError, LabelStore, hold_folder
from pbcrl.trajectory import BatchLabel, GridLabel, Label, Query, Trajectory

from .damage import full_disk, read_only
from .power_cut import PowerCut

NAN = math.nan
SAFE, UNSAFE = Label(1, 1, 1), Label(0.5, 0, 0)


def episode(value):
    return Trajectory(np.full((3, 2), value), np.full((3, 1), -value), np.ones(3))


def asked(folder, count, *, wanted=1):
    """A store with so many questions about pairs."""
    store = LabelStore(folder, create=True)
    pairs = [("pair", (episode(2 * i), episode(2 * i + 1))) for i in range(count)]
    store.ask(pairs, wanted=wanted)
    return store


# -- Events ------------------------------------------------------------------------------------


def test_an_event_that_is_sent_again_is_added_once(tmp_path):
    store = asked(tmp_path, 1)
    first = store.answer(1, SAFE, annotator="Ada", token="t1", seconds=2.5)
    assert store.answer(1, SAFE, annotator="Ada", token="t1", seconds=2.5) == first
    assert store.num_events == 1
    store.undo(annotator="Ada", token="t2")
    assert store.undo(annotator="Ada", token="t2") == 1
    assert (store.num_events, store.labels()) == (2, {})


def test_a_token_that_named_another_event_before_is_refused(tmp_path):
    store = asked(tmp_path, 2)
    store.answer(1, SAFE, annotator="Ada", token="t")
    for attempt in (
        lambda: store.answer(2, SAFE, annotator="Ada", token="t"),
        lambda: store.answer(1, UNSAFE, annotator="Ada", token="t"),
        lambda: store.answer(1, SAFE, annotator="Bob", token="t"),
        lambda: store.skip(1, annotator="Ada", token="t"),
        lambda: store.undo(annotator="Ada", token="t"),
    ):
        with pytest.raises(LabelError, match="a token names one event, but t came with another"):
            attempt()
    assert (store.num_events, store.labels()) == (1, {1: SAFE})


def test_undo_goes_back_over_any_number_of_answers_and_corrections(tmp_path):
    store = asked(tmp_path, 2)
    first = store.answer(1, SAFE, annotator="Ada")
    store.answer(2, SAFE, annotator="Ada")
    store.answer(1, UNSAFE, annotator="Ada", replaces=first)
    assert store.labels() == {1: UNSAFE, 2: SAFE}
    assert store.undo(annotator="Ada") == 1
    assert store.labels() == {1: SAFE, 2: SAFE}  # what was corrected stands again
    assert [store.undo(annotator="Ada") for _ in range(3)] == [2, 1, None]
    assert store.labels() == {}
    assert store.num_events == 6  # and all of it is on record


def test_answers_that_come_at_once_are_held_once_each(tmp_path):
    """As threads of the page's server: doubled ones stood again after they were taken back."""
    store, errors = asked(tmp_path, 90), []

    def work(first):
        try:
            for number in range(first, 91, 3):
                store.answer(number, SAFE, annotator=f"p{first}")
            for _ in range(15):
                store.undo(annotator=f"p{first}")
        except Exception as error:  # a thread's own would be lost
            errors.append(error)

    people = [threading.Thread(target=work, args=(first,)) for first in (1, 2, 3)]
    for person in people:
        person.start()
    for person in people:
        person.join()
    assert not errors
    assert sorted(store.labels()) == list(range(1, 46))
    assert LabelStore(tmp_path).labels() == store.labels()


def test_undo_takes_back_one_s_own_answers_only(tmp_path):
    store = asked(tmp_path, 2)
    store.answer(1, SAFE, annotator="Ada")
    store.answer(2, SAFE, annotator="Bob")
    assert store.undo(annotator="Ada") == 1
    assert store.labels() == {2: SAFE}


def test_an_answer_that_was_given_elsewhere_in_the_meantime_is_not_overwritten(tmp_path):
    one, other = asked(tmp_path, 1), LabelStore(tmp_path)  # two windows
    event = one.answer(1, SAFE, annotator="Ada")
    with pytest.raises(ConflictError, match="Ada has answered question 1 elsewhere"):
        other.answer(1, UNSAFE, annotator="Ada")
    assert other.labels() == {1: SAFE}
    other.answer(1, UNSAFE, annotator="Ada", replaces=event)
    assert one.labels() == {1: UNSAFE}


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (Label(1, 0, 1), "left is safer, yet it is unsafe and right is safe: that cannot be"),
        (Label(0, 1, 0), "right is safer, yet it is unsafe and left is safe: that cannot be"),
        (Label(1, 1, 0, (), ()), "right is unsafe, yet each of its steps is safe: mark the unsafe"),
        (
            Label(0, 0, 1, (), None),
            "left is unsafe, yet each of its steps is safe: mark the unsafe",
        ),
    ],
)
def test_an_answer_that_contradicts_itself_is_asked_back(tmp_path, label, message):
    store = asked(tmp_path, 1)
    with pytest.raises(LabelError, match=message):
        store.answer(1, label, annotator="Ada")
    assert store.num_events == 0


def test_a_safe_episode_may_have_unsafe_moments_and_one_that_nobody_can_tell_none(tmp_path):
    """The limit may be above 0."""
    store = asked(tmp_path, 1)
    given = Label(0.5, 1.0, NAN, ((0, 1),), ())
    store.answer(1, given, annotator="Ada")
    assert repr(store.labels()) == repr({1: given})


def test_what_cannot_be_an_answer_is_refused(tmp_path):
    store = asked(tmp_path, 1)
    store.ask([("batch", [episode(1), episode(2)]), ("grid", [episode(1), episode(2)])])
    for number, options, error, message in [
        (4, {}, LabelError, "has no question 4; it has 3"),
        (2, {}, LabelError, "about a batch and answered by a BatchLabel, got Label"),
        (3, {}, LabelError, "about a grid and answered by a GridLabel, got Label"),
        (1, {"annotator": "  "}, ValueError, "1 to 60 printable characters"),
        (1, {"annotator": "A\x1b[2J"}, ValueError, "1 to 60 printable characters"),
        (1, {"annotator": "A" * 61}, ValueError, "1 to 60 printable characters"),
        (1, {"token": "no; DROP"}, ValueError, "1 to 64 letters"),
        (1, {"seconds": -1.0}, ValueError, "between 0 and 1e7 seconds"),
        (1, {"seconds": NAN}, ValueError, "between 0 and 1e7 seconds"),
        (1, {"replaces": 7}, ConflictError, "elsewhere in the meantime"),
    ]:
        with pytest.raises(error, match=message):
            store.answer(number, SAFE, **({"annotator": "Ada"} | options))
    with pytest.raises(LabelError, match="about a pair and answered by a Label, got BatchLabel"):
        store.answer(1, BatchLabel(1), annotator="Ada")
    with pytest.raises(LabelError, match="shows 2 clips, but the answer is about 3"):
        store.answer(3, GridLabel((1, 1, 0)), annotator="Ada")
    assert store.num_events == 0


@pytest.mark.parametrize(
    ("safe", "error", "message"),
    [
        ((), ValueError, r"of its trajectories, got \(\)"),
        ((1, 0.5), ValueError, r"got \(1, 0\.5\)"),
        ((1, None), TypeError, "is made of numbers"),
    ],
)
def test_what_is_no_label_of_a_grid_is_refused(safe, error, message):
    with pytest.raises(error, match=message):
        GridLabel(safe)


def test_a_grid_s_answer_is_kept_corrected_and_put_off_like_any_other(tmp_path):
    store = LabelStore(tmp_path, create=True)
    (number,) = store.ask([("grid", [episode(1), episode(2), episode(3)])])
    store.skip(number, annotator="Ada")
    first = store.event_of(number, "Ada")
    given = GridLabel((1.0, 0.0, NAN))
    store.answer(number, given, annotator="Ada", replaces=first.id)
    store.close()
    again = LabelStore(tmp_path)
    assert repr(again.labels()) == repr({number: given})
    again.undo(annotator="Ada")
    assert again.labels() == {}
    with sqlite3.connect(again.path) as db:
        db.execute("UPDATE events SET many = '[1.0, 1.0, 1.0]' WHERE many IS NOT NULL")
    again.close()
    with pytest.raises(CorruptFileError, match="does not match its crc32"):
        LabelStore(tmp_path)


def test_several_people_s_label_is_their_mean_preference_and_what_most_say_of_safety():
    labels = [Label(1, 1, NAN), Label(0.5, 0, NAN), Label(NAN, 0, 1)]
    found = combined(labels)
    assert (found.preference, found.first_safe, found.second_safe) == (0.75, 0, 1)
    tie = combined([Label(NAN, 1, NAN), Label(NAN, 0, NAN)])
    assert all(math.isnan(value) for value in (tie.preference, tie.first_safe, tie.second_safe))


@pytest.mark.parametrize(
    ("said", "safe"), [((1, 1, 0), 1), ((0, NAN), 0), ((1, 0), NAN), ((NAN, NAN), NAN)]
)
def test_several_people_s_answer_about_a_batch_is_what_most_of_them_say(said, safe):
    assert repr(combined([BatchLabel(one) for one in said])) == repr(BatchLabel(float(safe)))


def test_several_people_s_answer_about_a_grid_is_what_most_of_them_say_of_each():
    said = [(1, 1, 0, NAN), (1, 0, 0, NAN), (0, NAN, 0, NAN)]
    found = combined([GridLabel(one) for one in said])
    assert repr(found) == repr(GridLabel((1.0, NAN, 0.0, NAN)))


def test_a_step_is_marked_by_several_people_if_most_of_them_mark_it():
    """Of three who marked, two mark step 1, all of them step 2, one step 5; the fourth did not."""
    said = [((1, 3),), ((1, 3), (5, 6)), ((2, 4),), None]
    found = combined([Label(NAN, 0, NAN, one) for one in said])
    assert (found.first_unsafe, found.second_unsafe) == (((1, 3),), None)
    nothing = combined([Label(NAN, 1, NAN, ()), Label(NAN, 1, NAN, ((0, 1),))])
    assert nothing.first_unsafe == ()  # a tie
    apart = combined([Label(NAN, 0, NAN, ((1, 2),)), Label(NAN, 0, NAN, ((0, 1),))])
    assert apart.first_unsafe is None  # unsafe, and nobody knows where


def test_marked_steps_are_kept_with_the_answer_about_a_pair(tmp_path):
    store = LabelStore(tmp_path, create=True)
    (number,) = store.ask([("pair", [episode(1), episode(2)])])
    steps = len(episode(1))
    for outside in (((0, steps + 1),), ((steps, steps + 1),)):
        with pytest.raises(ValueError, match=f"of {steps} steps"):
            store.answer(number, Label(NAN, 0, NAN, outside), annotator="ann")
    given = Label(1.0, 1.0, 0.0, (), ((0, steps),))
    store.answer(number, given, annotator="ann")
    store.close()
    assert LabelStore(tmp_path).labels() == {number: given}


def test_training_on_the_mean_preference_is_training_on_all_of_them():
    """Cross-entropy is linear in the label."""
    rng = np.random.default_rng(0)
    for logit in rng.normal(size=5):
        p = 1 / (1 + np.exp(-logit))

        def loss(label, p=p):
            return -(label * np.log(p) + (1 - label) * np.log(1 - p))

        given = rng.choice([0.0, 0.5, 1.0], 7)
        mean = combined([Label(one, NAN, NAN) for one in given]).preference
        assert loss(mean) == pytest.approx(np.mean([loss(one) for one in given]))


@pytest.mark.parametrize("seed", range(5))
def test_what_stands_is_what_the_views_of_the_file_say_after_any_events(tmp_path, seed):
    """Two stores on one folder read each event once; SQL looks at all of them each time."""
    rng = random.Random(seed)
    stores = [asked(tmp_path, 5, wanted=2), LabelStore(tmp_path)]
    for step in range(80):
        store, name = rng.choice(stores), rng.choice(["Ada", "Bob", "Eve"])
        number, what = rng.randint(1, 5), rng.choice(["answer", "answer", "skip", "undo"])
        before = store.event_of(number, name)
        label = rng.choice([SAFE, UNSAFE, Label(NAN, 1, 0)])
        if what == "undo":
            store.undo(annotator=name)
        elif what == "skip":
            store.skip(number, annotator=name, replaces=before and before.id)
        else:
            store.answer(number, label, annotator=name, replaces=before and before.id)
        if step == 40:  # another run wants more people for some
            stores[0].ask([("pair", (episode(0), episode(1)))], wanted=3)
    with sqlite3.connect(stores[0].path) as db:
        current = db.execute(
            "SELECT id, query, annotator, kind FROM current ORDER BY id"
        ).fetchall()
        is_open = db.execute(
            "SELECT q.id FROM queries q WHERE wanted > (SELECT count(*) FROM current c "
            "WHERE c.query = q.id AND c.kind = 'answer')"
        ).fetchall()
    for store in (*stores, LabelStore(tmp_path)):
        assert [event[:4] for event in store.events()] == current
        assert [event[:4] for event in store.events(annotator="Ada")] == [
            row for row in current if row[2] == "Ada"
        ]
        assert store.num_open() == len(is_open)
        assert store.labels().keys() == {1, 2, 3, 4, 5} - {number for (number,) in is_open}
        given = [e.label for e in store.events() if (e.query, e.kind) == (5, "answer")]
        if 5 in store.labels():
            assert repr(store.labels()[5]) == repr(combined(given))


# -- Whose turn it is --------------------------------------------------------------------------


def test_two_people_at_once_are_never_asked_the_same_unless_it_is_wanted(tmp_path):
    one, other = asked(tmp_path, 6), LabelStore(tmp_path)
    seen = []
    while question := one.next_for("Ada"):
        seen.append(question.id)
        if rival := other.next_for("Bob"):
            seen.append(rival.id)
            other.answer(rival.id, SAFE, annotator="Bob")
        one.answer(question.id, SAFE, annotator="Ada")
    assert sorted(seen) == [1, 2, 3, 4, 5, 6]
    assert other.next_for("Bob") is None


def test_a_question_that_wants_two_people_goes_to_two_and_not_to_a_third(tmp_path):
    store = asked(tmp_path, 1, wanted=2)
    assert [store.next_for(name) is not None for name in ("Ada", "Bob", "Eve")] == [1, 1, 0]
    store.answer(1, SAFE, annotator="Ada")
    assert store.next_for("Ada") is None
    assert (store.num_open(), store.labels()) == (1, {})
    store.answer(1, SAFE, annotator="Bob")
    assert (store.num_open(), store.labels()) == (0, {1: SAFE})


def test_two_windows_of_one_person_get_different_questions_and_each_its_own_again(tmp_path):
    store = asked(tmp_path, 3)
    turns = [store.next_for("Ada", tab=tab).id for tab in "abab"]  # a page that is loaded again
    assert turns == [1, 2, 1, 2]


def test_who_takes_an_answer_back_has_the_question_to_themselves(tmp_path):
    store = asked(tmp_path, 2)
    store.answer(store.next_for("Ada").id, SAFE, annotator="Ada")
    assert store.next_for("Ada").id == 2
    store.claim(store.undo(annotator="Ada"), "Ada")
    assert store.next_for("Bob").id == 2  # which Ada does not look at any more
    assert store.next_for("Ada").id == 1


def test_a_question_of_somebody_who_has_gone_comes_to_others_after_a_while(tmp_path):
    store = asked(tmp_path, 1)
    store.next_for("Ada")
    assert store.next_for("Bob") is None
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE claims SET time = time - 901")
    assert store.next_for("Bob").id == 1
    store.answer(1, SAFE, annotator="Ada")  # late, and kept all the same
    assert store.labels() == {1: SAFE}


MONTH = 30 * 86_400.0


@pytest.fixture
def clocks(monkeypatch):
    """The clock of the wall, which may be set, and that of the processor, which may not."""
    now = {"wall": 1.8e9, "ticks": 1000.0}
    monkeypatch.setattr(time, "time", lambda: now["wall"])
    monkeypatch.setattr(time, "monotonic", lambda: now["ticks"])
    return now


@pytest.mark.parametrize("jump", [MONTH, -MONTH, -1.0])
def test_a_clock_that_is_set_neither_keeps_a_question_for_ever_nor_gives_it_away(
    tmp_path, clocks, jump
):
    store = asked(tmp_path, 1)
    assert store.next_for("Ada").id == 1
    clocks["wall"] += jump
    clocks["ticks"] += 1
    assert store.next_for("Bob") is None
    clocks["ticks"] += 899
    assert store.next_for("Ada").id == 1  # a sign of life
    clocks["ticks"] += 899
    assert store.next_for("Bob") is None
    clocks["ticks"] += 2
    assert store.next_for("Bob").id == 1


@pytest.mark.parametrize(("jump", "wait"), [(-MONTH, 901), (MONTH, 0), (600, 301)])
def test_a_question_that_an_earlier_process_kept_is_free_after_a_while_whatever_the_clock_says(
    tmp_path, clocks, jump, wait
):
    """Of a clock that was ahead one cannot tell how old a claim is: it counts as new."""
    store = asked(tmp_path, 1)
    store.next_for("Ada")
    store.close()
    clocks["wall"] += jump
    later = LabelStore(tmp_path)
    if wait:
        assert later.next_for("Bob") is None
        clocks["ticks"] += wait
    assert later.next_for("Bob").id == 1


def test_what_was_put_off_comes_after_all_others(tmp_path):
    store = asked(tmp_path, 3)
    store.skip(1, annotator="Ada")
    store.skip(2, annotator="Ada")
    assert [question.id for question in store.open_for("Ada")] == [3, 1, 2]
    assert [question.id for question in store.open_for("Bob")] == [1, 2, 3]
    assert (store.num_open(), store.labels()) == (3, {})


def test_what_was_put_off_and_is_looked_at_again_is_kept_for_who_looks(tmp_path):
    """The page asks what is next every few seconds, as its sign of life."""
    store = asked(tmp_path, 2)
    store.skip(1, annotator="Ada")
    store.claim(1, "Ada")
    assert store.next_for("Ada").id == 1
    assert store.next_for("Bob").id == 2


def test_what_the_run_that_asked_last_waits_for_comes_before_what_an_earlier_one_has_left(tmp_path):
    """Also after a restart of the earlier one, which asks for its own again."""
    pairs = [("pair", (episode(2 * i), episode(2 * i + 1))) for i in range(5)]
    store, page = LabelStore(tmp_path, create=True), LabelStore(tmp_path)
    store.ask(pairs[:3], run="killed")
    store.ask(pairs[2:], run="waiting")
    page.skip(4, annotator="Ada")

    def order():
        return [question.id for question in page.open_for("Ada")]

    assert order() == [3, 5, 4, 1, 2]
    assert page.next_for("Ada").id == 3
    assert page.progress("Ada", most=2)[2:5] == (5, 2, [page.question(3), page.question(5)])
    store.ask(pairs[1:2], run="killed")
    assert order() == [3, 1, 2, 5, 4]  # the third is under way, and both have asked it
    assert store.asked("waiting") == [page.question(number) for number in (3, 4, 5)]


# -- For other programs ------------------------------------------------------------------------


def labelled(folder):
    store = asked(folder, 3, wanted=2)
    members = [episode(1), episode(2), episode(3)]
    store.ask([("batch", members), ("grid", members)], wanted=2)
    pairs = {
        "Ada": [Label(1, 1, 0), Label(0.5, 1, 1), Label(0, 0, 1)],
        "=Bob": [Label(1, 1, 0), Label(0, 1, 1), Label(NAN, 0, NAN)],
    }
    given = {
        "Ada": [*pairs["Ada"], BatchLabel(1), GridLabel((1, 0, NAN))],
        "=Bob": [*pairs["=Bob"], BatchLabel(0), GridLabel((1, 1, 0))],
    }
    for name, labels in given.items():
        for number, label in enumerate(labels, start=1):
            store.answer(number, label, annotator=name, seconds=1.5)
    return store


def test_people_s_agreement_is_told_and_where_they_disagree(tmp_path, capsys):
    store = labelled(tmp_path)
    found = agreement(store)
    # Safety, items that both rate: 1 1, 0 0, 1 1, 1 1, 0 0: all alike.
    assert found["alpha_safety"] == found["kappa_safety_=Bob_Ada"] == 1
    # Preferences 1 1 and 0.5 0: 1 - (0.5 / 4) / (sum of pairs / 12), in squared distances.
    pairs = 2 * (2 * 0.25 + 2 * 1 + 0.25)  # 1-0.5 twice, 1-0 twice, 0.5-0 once, both ways
    assert found["alpha_preference"] == pytest.approx(1 - (2 * 0.25 / 4) / (pairs / 12))
    # Of the grid 1 1 and 0 1: 1 - (1 of 2 items) / (3 of 6 pairs of ratings).
    assert found["alpha_grid"] == pytest.approx(1 - (2 / 4) / (2 * 3 * 1 / (4 * 3)))
    assert [name[:6] for name, _ in disagreements(store)] == ["000002", "000004", "000005"]
    main([str(tmp_path), "--agreement"])
    shown = capsys.readouterr().out
    assert "alpha_safety                     1.000" in shown
    assert "   Ada: preference 0.5, first safe 1, second safe 1\n" in shown
    assert "   Ada: safe 1\n   =Bob: safe 0\n" in shown
    assert "   Ada: safe 1 0 nan\n   =Bob: safe 1 1 0\n" in shown


def test_of_marks_each_step_is_told_and_exported(tmp_path):
    store = asked(tmp_path, 1, wanted=2)
    store.answer(1, Label(0.5, 0, 1, ((0, 1),), ()), annotator="Ada")
    store.answer(1, Label(0.5, 0, 1, ((0, 2),), ()), annotator="Bob")
    # Of 2 * 3 steps one differs; of 12 ratings 3 are unsafe.
    assert len(store.trajectory(store.question(1).members[0])) == 3
    wanted = 1 - (1 / 6) / (2 * 3 * 9 / (12 * 11))
    assert agreement(store)["alpha_marks"] == pytest.approx(wanted)
    assert disagreements(store) == []  # no two people mark the same to the step
    assert [row["first_unsafe"] for row in table(store)] == ["0:1", "0:2"]
    assert [row["second_unsafe"] for row in table(store)] == ["none", "none"]


def test_answers_are_exported_with_name_and_time(tmp_path):
    store = labelled(tmp_path)
    main([str(tmp_path), "--export", str(tmp_path / "labels.csv")])
    rows = list(csv.DictReader(io.StringIO((tmp_path / "labels.csv").read_text())))
    assert len(rows) == len(table(store)) == 10
    first = rows[0]
    assert (first["annotator"], first["preference"], first["seconds"]) == ("Ada", "1.0", "1.5")
    assert rows[5]["annotator"] == "'=Bob"  # a spreadsheet must not run it
    assert rows[0]["batch_safe"] == rows[0]["grid_safe"] == ""
    assert (rows[4]["grid_safe"], rows[9]["grid_safe"]) == ("1 0 ?", "1 1 0")
    batch = [rows[3][name] for name in ("preference", "first_safe", "second_safe", "batch_safe")]
    assert batch == ["", "", "", "1.0"]
    with pytest.raises(ValueError, match=r"to \.csv or \.parquet"):
        export(store, tmp_path / "labels.xlsx")


def test_without_pyarrow_the_export_names_the_extra_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'pbcrl\[parquet\]', or export to \.csv"):
        export(labelled(tmp_path), tmp_path / "labels.parquet")
    assert not (tmp_path / "labels.parquet").exists()


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_pandas_reads_what_is_exported(tmp_path, ending):
    pandas = pytest.importorskip("pandas", reason="needs the extra `benchmark`")
    pytest.importorskip(
        "pyarrow.parquet",
        reason="needs the extra `parquet`, and that NumPy 2",
        exc_type=ImportError,
    )
    store, path = labelled(tmp_path), tmp_path / f"labels.{ending}"
    assert export(store, path) == 10
    found = pandas.read_csv(path) if ending == "csv" else pandas.read_parquet(path)
    assert tuple(found.columns) == COLUMNS
    expected = pandas.DataFrame(table(store))
    if ending == "csv":  # which has nothing for None, and no formulas
        expected["annotator"] = expected["annotator"].replace("=Bob", "'=Bob")
        expected["second"] = expected["second"].fillna(np.nan)
        expected["grid_safe"] = expected["grid_safe"].fillna(np.nan)
        for marked in ("first_unsafe", "second_unsafe"):
            expected[marked] = np.nan
    pandas.testing.assert_frame_equal(found, expected, check_dtype=False)
    assert pandas.to_datetime(found["time"]).is_monotonic_increasing
    digests = [query_digest(Query(episode(2 * i), episode(2 * i + 1))) for i in range(3)]
    pairs = found[found["kind"] == "pair"]
    assert pairs["question"].str.split("-").str[1].unique().tolist() == digests
    assert pairs["first"].unique().tolist() == [trajectory_digest(episode(i)) for i in (0, 2, 4)]


# -- The file ----------------------------------------------------------------------------------


def test_a_folder_without_a_store_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"a label folder holds labels\.sqlite, but .* has none"):
        LabelStore(tmp_path)
    with pytest.raises(SystemExit, match=r"there is no folder .*nowhere"):
        main([str(tmp_path / "nowhere")])


def test_a_damaged_store_is_refused_by_name(tmp_path):
    store = asked(tmp_path, 40)
    store.close()
    path = tmp_path / "labels.sqlite"
    good = path.read_bytes()
    for bad in (
        b"no database" * 100,
        good[: len(good) // 2],
        good[:4096] + bytes(len(good) - 4096),
    ):
        path.write_bytes(bad)
        with pytest.raises(CorruptFileError, match=r"labels\.sqlite is damaged"):
            LabelStore(tmp_path)


def test_another_program_s_database_and_another_version_are_refused(tmp_path):
    with sqlite3.connect(tmp_path / "labels.sqlite") as db:
        db.execute("CREATE TABLE mine (number INTEGER)")
    with pytest.raises(CorruptFileError, match="its application id is 0x0"):
        LabelStore(tmp_path)
    store = asked(tmp_path / "ours", 1)
    store.close()
    with sqlite3.connect(store.path) as db:
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(FormatVersionError, match=r"reads version 2 of label stores, but .* 9"):
        LabelStore(tmp_path / "ours")


VERSION_1 = """
CREATE TABLE trajectories (digest TEXT PRIMARY KEY, arrays BLOB NOT NULL, replay BLOB);
CREATE TABLE queries (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL CHECK (kind IN ('pair', 'batch')),
    members TEXT NOT NULL, wanted INTEGER NOT NULL CHECK (wanted >= 1), time REAL NOT NULL);
CREATE TABLE asked (
    run TEXT NOT NULL, query INTEGER NOT NULL REFERENCES queries, PRIMARY KEY (run, query));
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, token TEXT NOT NULL UNIQUE,
    query INTEGER NOT NULL REFERENCES queries, annotator TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('answer', 'skip', 'undo')),
    preference REAL, first_safe REAL, second_safe REAL,
    undone INTEGER UNIQUE REFERENCES events, seconds REAL, time REAL NOT NULL,
    crc32 INTEGER NOT NULL);
CREATE TABLE claims (
    query INTEGER NOT NULL REFERENCES queries, annotator TEXT NOT NULL, tab TEXT NOT NULL,
    time REAL NOT NULL, PRIMARY KEY (query, annotator, tab));
CREATE INDEX events_of_query ON events (query, annotator);
CREATE VIEW standing AS SELECT * FROM events WHERE kind != 'undo'
    AND id NOT IN (SELECT undone FROM events WHERE undone IS NOT NULL);
CREATE VIEW current AS SELECT * FROM standing WHERE id IN
    (SELECT max(id) FROM standing GROUP BY query, annotator);
PRAGMA application_id = 0x7062636C;
PRAGMA user_version = 1;
"""


def test_a_store_from_before_there_were_grids_is_taken_over_with_all_answers(tmp_path):
    newer = asked(tmp_path / "newer", 2)
    newer.answer(1, SAFE, annotator="Ada", seconds=2.0)
    newer.close()
    path = tmp_path / "older" / "labels.sqlite"
    path.parent.mkdir()
    with sqlite3.connect(path) as db:
        db.executescript(VERSION_1)
        db.execute("ATTACH ? AS newer", (str(newer.path),))
        for name in ("trajectories", "queries", "asked"):
            db.execute(f"INSERT INTO {name} SELECT * FROM newer.{name}")
        names = "id, token, query, annotator, kind, preference, first_safe, second_safe, undone, "
        names += "seconds, time, crc32"
        # The sum over the columns of then, which is that of now where there is no grid.
        db.execute(f"INSERT INTO events ({names}) SELECT {names} FROM newer.events")
        db.commit()
    with sqlite3.connect(path) as db:
        row = db.execute(f"SELECT {names} FROM events").fetchone()
    assert row[-1] == zlib.crc32(json.dumps(row[1:-1]).encode())
    store = LabelStore(path.parent)
    assert store.labels() == {1: SAFE}
    (number,) = store.ask([("grid", [episode(1), episode(2)])])
    store.answer(number, GridLabel((1.0, 0.0)), annotator="Ada")
    store.answer(2, UNSAFE, annotator="Ada")
    store.close()
    again = LabelStore(path.parent)
    assert again.labels() == {1: SAFE, 2: UNSAFE, number: GridLabel((1.0, 0.0))}
    with pytest.raises(StorageError), again._db.transaction() as db:  # references still hold
        db.execute("INSERT INTO asked VALUES ('run', 99)")


@pytest.mark.parametrize(
    ("name", "added"),
    [
        (
            "trigger invents",
            "CREATE TRIGGER invents AFTER INSERT ON events BEGIN "
            "UPDATE events SET first_safe = 0 WHERE id = new.id; END",
        ),
        ("view current", "DROP VIEW current; CREATE VIEW current AS SELECT * FROM events"),
        ("table mine", "CREATE TABLE mine (number INTEGER)"),
        ("index mine", "CREATE UNIQUE INDEX mine ON events (query)"),
        ("view current", "DROP VIEW current"),
        ("table events", "ALTER TABLE events ADD COLUMN more TEXT"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_store_with_a_trigger_a_view_or_a_table_of_its_own_is_refused(
    tmp_path, name, added, version
):
    path = tmp_path / "labels.sqlite"
    asked(tmp_path, 1).close()
    if version == 1:
        path.unlink()
        with sqlite3.connect(path) as db:
            db.executescript(VERSION_1)
    with sqlite3.connect(path) as db:
        db.executescript(added)
    before = path.read_bytes()
    with pytest.raises(CorruptFileError, match=f"the {name} is not as this package makes it"):
        LabelStore(tmp_path)
    assert path.read_bytes() == before


def removed(folder):
    for path in folder.glob("labels.sqlite*"):
        path.unlink()


def replaced(folder):
    os.replace(folder / "backup", folder / "labels.sqlite")


def replaced_with_its_log(folder):
    removed(folder)
    replaced(folder)


@pytest.mark.parametrize("happens", [removed, replaced, replaced_with_its_log])
def test_a_store_that_is_removed_or_replaced_while_it_is_open_takes_no_answer_and_keeps_all(
    tmp_path, happens
):
    store = asked(tmp_path, 4)
    store.answer(1, SAFE, annotator="Ada")
    with sqlite3.connect(store.path) as db, sqlite3.connect(tmp_path / "backup") as backup:
        db.backup(backup)
    store.answer(2, SAFE, annotator="Ada")
    happens(tmp_path)
    for attempt in (
        lambda: store.answer(3, SAFE, annotator="Ada"),
        lambda: store.skip(3, annotator="Ada"),
        lambda: store.undo(annotator="Ada"),
        lambda: store.next_for("Ada"),
        store.labels,
        lambda: store.ask([("pair", (episode(8), episode(9)))]),
    ):
        with pytest.raises(StorageError, match=r"was removed or replaced; all .* is in .*labels-2"):
            attempt()
    if happens is not removed:
        assert LabelStore(tmp_path).labels() == {1: SAFE}  # which is not mixed with our log
    (saved,) = tmp_path.glob("labels-2*.sqlite")
    store.close()
    os.replace(saved, store.path)
    again = LabelStore(tmp_path)
    assert again.labels() == {1: SAFE, 2: SAFE}
    assert again.trajectory(again.question(3).members[0])


def overwritten(folder):
    shutil.copyfile(folder / "backup", folder / "labels.sqlite")


def restored(folder):
    names = "backup", "labels.sqlite"
    with sqlite3.connect(folder / names[0]) as backup, sqlite3.connect(folder / names[1]) as db:
        backup.backup(db)


@pytest.mark.parametrize(
    ("happens", "message"),
    [(overwritten, "was overwritten; all"), (restored, "put back to an earlier state .* all")],
)
@pytest.mark.parametrize("log", ["is long", "is short"])
def test_a_backup_that_is_put_back_into_an_open_store_is_noticed_and_no_answer_is_lost(
    tmp_path, happens, message, log
):
    store = asked(tmp_path, 4)
    store.answer(1, SAFE, annotator="Ada")
    store.close()
    shutil.copyfile(store.path, tmp_path / "backup")
    store = LabelStore(tmp_path)
    store.answer(2, UNSAFE, annotator="Ada")
    if log == "is short":  # all is in the file
        with sqlite3.connect(store.path) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        store._db._contents = None
        store._db.sync_fully()
    happens(tmp_path)
    for attempt in (lambda: store.answer(3, SAFE, annotator="Ada"), store.labels):
        with pytest.raises(StorageError, match=rf"{message} that was acknowledged is in .*labels-"):
            attempt()
    (kept,) = tmp_path.glob("labels-*.jsonl")
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(line["question"][:6], line["first_safe"]) for line in lines] == [
        ("000001", 1.0),
        ("000002", 0.0),
    ]
    store.close()
    removed(tmp_path)
    overwritten(tmp_path)  # once more, with nobody at work
    assert LabelStore(tmp_path).labels() == {1: SAFE}


def test_no_answer_is_lost_when_a_process_opens_the_store_twice_and_another_leaves(
    tmp_path,
):
    """POSIX: who closes a file takes back all locks of its process, those of SQLite among them."""
    store = asked(tmp_path, 2)
    LabelStore(tmp_path).close()
    leave = "import sys; from pbcrl.label.store import LabelStore; LabelStore(sys.argv[1]).close()"
    subprocess.run([sys.executable, "-c", leave, tmp_path], check=True)
    store.answer(1, SAFE, annotator="Ada")
    tell = "import sys; from pbcrl.label.store import LabelStore; "
    tell += "print([*LabelStore(sys.argv[1]).labels()])"
    told = subprocess.run([sys.executable, "-c", tell, tmp_path], capture_output=True, check=True)
    assert told.stdout == b"[1]\n"


def test_a_store_that_nobody_holds_any_more_is_closed_at_once(tmp_path):
    store = asked(tmp_path, 1)
    is_open = store.close
    assert is_open.alive
    del store
    assert not is_open.alive


def test_a_long_log_comes_into_the_file_and_other_processes_are_not_alarmed(tmp_path):
    """Each answer writes some 20 kB to the log, of which 4 MiB are kept."""
    stores = [asked(tmp_path, 300), LabelStore(tmp_path)]
    before = stores[0].path.stat().st_mtime_ns
    largest = 0
    for number in range(1, 301):
        stores[number % 2].answer(number, SAFE, annotator="Ada")
        largest = max(largest, (tmp_path / "labels.sqlite-wal").stat().st_size)
    assert largest < 5e6
    assert stores[0].path.stat().st_mtime_ns > before
    assert [len(store.labels()) for store in stores] == [300, 300]


def test_an_answer_that_is_written_while_its_store_is_replaced_is_not_acknowledged(tmp_path):
    store = asked(tmp_path, 1)
    shutil.copy(store.path, tmp_path / "backup")
    writing = store._db.transaction()
    writing.__enter__().execute("DELETE FROM asked")
    replaced(tmp_path)
    with pytest.raises(StorageError, match="was removed or replaced"):
        writing.__exit__(None, None, None)


def test_a_store_whose_folder_is_gone_is_saved_as_soon_as_there_is_one(tmp_path):
    store = asked(tmp_path / "folder", 2)
    store.answer(1, SAFE, annotator="Ada")
    shutil.rmtree(tmp_path / "folder")
    with pytest.raises(StorageError, match=r"cannot be saved .* make the folder again"):
        store.labels()
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="all that was acknowledged is in"):
        store.labels()
    (saved,) = (tmp_path / "folder").iterdir()
    os.replace(saved, store.path)
    assert LabelStore(tmp_path / "folder").labels() == {1: SAFE}


def test_a_store_that_was_moved_and_moved_back_is_used_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = asked("folder", 2)
    (tmp_path / "folder").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="was removed or replaced"):
        store.labels()
    (tmp_path / "elsewhere").rename(tmp_path / "folder")
    monkeypatch.chdir("/")  # it is still the same file
    store.answer(1, SAFE, annotator="Ada")
    assert store.labels() == {1: SAFE}


def test_a_trajectory_that_was_changed_is_found(tmp_path):
    store = asked(tmp_path, 1)
    first, second = store.question(1).members
    with sqlite3.connect(store.path) as db:
        db.execute(
            "UPDATE trajectories SET arrays = (SELECT arrays FROM trajectories WHERE digest = ?)"
            " WHERE digest = ?",
            (second, first),
        )
    with pytest.raises(CorruptFileError, match=f"trajectory {first} is not what was written"):
        store.trajectory(first)


def test_an_answer_for_which_there_is_no_space_is_not_acknowledged(tmp_path):
    store = asked(tmp_path, 1)
    with full_disk(1000), pytest.raises(StorageError, match="free disk space"):
        store.answer(1, SAFE, annotator="Ada")
    assert store.labels() == {}
    store.answer(1, SAFE, annotator="Ada")
    assert store.labels() == {1: SAFE}


def test_answers_in_a_read_only_folder_are_exported_and_their_agreement_told(tmp_path, capsys):
    """Its log, which holds all of them, is not gone into the store yet."""
    store = labelled(tmp_path / "folder")
    shutil.copytree(tmp_path / "folder", tmp_path / "while it is open")
    store.close()
    with read_only(tmp_path / "while it is open") as folder:
        with tempfile.TemporaryDirectory() as elsewhere:
            main([str(folder), "--export", f"{elsewhere}/labels.csv"])
        main([str(folder), "--agreement"])
    shown = capsys.readouterr().out
    assert "10 answers in" in shown
    assert "alpha_safety                     1.000" in shown


def test_a_read_only_folder_is_named(tmp_path):
    asked(tmp_path / "folder", 1).close()
    with read_only(tmp_path / "folder") as folder, pytest.raises(StorageError, match="must be wri"):
        LabelStore(folder)


# -- Kills and power cuts ----------------------------------------------------------------------

HOOK = """
#define _GNU_SOURCE
#include <dlfcn.h>
typedef int (*sync_t)(int);
static void (*hook)(int) = 0;
void set_sync_hook(void (*given)(int)) { hook = given; }
static int synced(const char *name, int fd) {
    int status = ((sync_t)dlsym(RTLD_NEXT, name))(fd);
    if (hook && status == 0) hook(fd);
    return status;
}
int fsync(int fd) { return synced("fsync", fd); }
int fdatasync(int fd) { return synced("fdatasync", fd); }
"""
ANSWERING = """
import ctypes, os, sys
library, folder = sys.argv[1:3]
recorder = os.fsync.__self__
hook = ctypes.CFUNCTYPE(None, ctypes.c_int)(recorder.on_fsync)
recorder.fsync = lambda descriptor: None  # of files elsewhere
ctypes.CDLL(library).set_sync_hook(hook)
from pbcrl.label.store import LabelStore
from pbcrl.trajectory import GridLabel, Label
store = LabelStore(folder)
while question := store.next_for("Ada"):
    for token in ("answer", "undo", "again") if question.id % 5 == 0 else ("answer",):
        token = f"{token}-{question.id}"
        if token.startswith("undo"):
            store.undo(annotator="Ada", token=token)
        else:
            marked = Label(0.25, 0, 1, first_unsafe=((0, 1),))
            label = GridLabel((0.0, 1.0, float("nan"))) if question.kind == "grid" else marked
            store.answer(question.id, label, annotator="Ada", token=token)
        print(token, flush=True)
"""


@pytest.fixture(scope="session")
def sync_library(tmp_path_factory):
    """Tells a Python function of each sync by C code, as SQLite is."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a power cut of SQLite is simulated with a C compiler, on Linux")
    path = tmp_path_factory.mktemp("library") / "sync.so"
    (path.parent / "sync.c").write_text(HOOK)
    command = [compiler, "-shared", "-fPIC", "-o", path, path.parent / "sync.c", "-ldl"]
    subprocess.run(command, check=True)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 20))]
)
def test_after_a_power_cut_every_acknowledged_answer_is_there_once(tmp_path, sync_library, seed):
    """The process dies at a random sync; of what was not synced, the disk may hold anything."""
    rng = random.Random(seed)
    folder = tmp_path / "disk"
    with closing(LabelStore(folder, create=True)) as store:
        for i in range(20):
            pair = episode(2 * i), episode(2 * i + 1)
            grid = episode(i), episode(i + 1), episode(i + 2)
            store.ask([("pair", pair), ("grid", grid)])
    disk = PowerCut(folder, scratch=tmp_path / "scratch")
    env = disk.env(at=rng.randrange(2, 60)) | {"LD_PRELOAD": str(sync_library)}
    done = subprocess.run(
        [sys.executable, "-c", ANSWERING, sync_library, folder],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    acknowledged = done.stdout.split()
    disk.cut(rng)
    store = LabelStore(folder)
    with sqlite3.connect(store.path) as db:
        found = [token for (token,) in db.execute("SELECT token FROM events ORDER BY id")]
    # What was under way when the power failed may be there besides.
    assert found[: len(acknowledged)] == acknowledged
    assert len(found) - len(acknowledged) <= 1
    assert len(store.questions()) == 40
    labels = store.labels()
    assert labels.keys() >= {int(t.split("-")[1]) for t in found if "again" in t}
    for number, label in labels.items():
        if store.question(number).kind == "grid":
            assert repr(label) == "GridLabel(safe=(0.0, 1.0, nan))"
        else:
            assert label.first_unsafe == ((0, 1),)


@pytest.mark.parametrize("seconds", [8, np.int64(8), np.float32(8)])
def test_whole_seconds_are_read_as_they_were_written(tmp_path, seconds):
    """SQLite keeps 8 as 8.0, another text to the checksum."""
    asked(tmp_path, 1).answer(1, Label(1, 1, 0), annotator="Ada", seconds=seconds)
    ((*_, found, _),) = LabelStore(tmp_path).events()
    assert found == 8.0


# -- At the terminal ---------------------------------------------------------------------------


@pytest.fixture
def type_answers(monkeypatch, capsys):
    """Answer at the terminal by typing a text; return what was shown."""

    def run(folder, text):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        main([str(folder), "--terminal", "--annotator", "Ada"])
        return capsys.readouterr().out

    return run


def test_a_person_answers_at_the_terminal_and_goes_on_where_it_was_left(tmp_path, type_answers):
    store = asked(tmp_path, 3)
    shown = type_answers(tmp_path, "y\nx\nn\n\n\ny\nq\n")  # x is no answer and is asked again
    assert "3 open questions" in shown
    assert store.labels() == {1: Label(1, 1, 0)}  # the half answer is not kept
    assert "2 open questions" in type_answers(tmp_path, "\n\n=\n\nn\ny\n\n\n")
    labels = store.labels()
    assert labels[2].preference == 0.5
    assert math.isnan(labels[2].first_safe)
    assert labels[3] == Label(0, 0, 1)


def test_at_the_terminal_one_may_put_off_and_take_back(tmp_path, type_answers):
    store = asked(tmp_path, 2)
    type_answers(tmp_path, "s\ny\ny\n1\n\nu\ny\ny\n=\n\ny\ny\n2\n\n")
    assert [store.labels()[n].preference for n in (1, 2)] == [0, 0.5]


def test_at_the_terminal_nothing_can_be_taken_back_before_anything_was_answered(
    tmp_path, type_answers
):
    asked(tmp_path, 1)
    assert "there is nothing to take back" in type_answers(tmp_path, "u\nq\n")


def test_a_batch_is_asked_about_at_the_terminal(tmp_path, type_answers):
    store = LabelStore(tmp_path, create=True)
    store.ask([("batch", [episode(1), episode(2), episode(3)])])
    assert "episodes of 3, 3, 3 steps" in type_answers(tmp_path, "n\n")
    assert store.labels() == {1: BatchLabel(0)}


@pytest.mark.parametrize(
    ("given", "safe"),
    [("\n", (1, 1, 1)), ("2\n", (1, 0, 1)), ("4\nx\n3?, 1\n", (0, 1, NAN))],
)
def test_a_grid_is_asked_about_at_the_terminal(tmp_path, type_answers, given, safe):
    """Clip 4 is none, and x no number: both are asked again."""
    store = LabelStore(tmp_path, create=True)
    store.ask([("grid", [episode(1), episode(2), episode(3)])])
    assert "which of 1 to 3 are unsafe?" in type_answers(tmp_path, given)
    assert repr(store.labels()) == repr({1: GridLabel(tuple(map(float, safe)))})


@pytest.mark.parametrize(
    ("given", "preference"), [("", 0), ("2", 0), ("=", 0.5), ("?", NAN), ("1\n", 0)]
)
def test_at_the_terminal_the_only_one_that_is_safe_is_safer_unless_said_otherwise(
    tmp_path, type_answers, given, preference
):
    """The first is unsafe: that it is safer cannot be, and is asked again."""
    store = asked(tmp_path, 1)
    assert "2 is safer, then" in type_answers(tmp_path, f"n\ny\n{given}\n\n")
    assert repr(store.labels()) == repr({1: Label(float(preference), 0.0, 1.0)})


def test_the_terminal_says_what_counts_as_unsafe_and_what_has_no_clip(tmp_path, type_answers):
    asked(tmp_path, 1)
    assert "nobody has written down what counts as unsafe" in type_answers(tmp_path, "q\n")
    (tmp_path / "intro.md").write_text("Falling is **unsafe**.\n\x1b[2J", encoding="utf-8")
    shown = type_answers(tmp_path, "q\n")
    assert "Falling is **unsafe**.\n\\x1b[2J" in shown
    assert "2 has no clip; pbcrl label without --terminal draws what can be drawn" in shown


def test_the_terminal_shows_no_file_that_a_link_leads_to(tmp_path, type_answers):
    asked(tmp_path, 1)
    (tmp_path / "intro.md").symlink_to(__file__)
    with pytest.raises(SystemExit, match=r"intro\.md: it is a link"):
        type_answers(tmp_path, "q\n")


def test_unsafe_moments_are_typed_at_the_terminal(tmp_path, type_answers):
    """Of three steps none is the fifth, and one line is about both: both are asked again."""
    store = asked(tmp_path, 1)
    shown = type_answers(tmp_path, "n\nn\n2\n0:5 /\n0:1\n2:3 0:1 /\n")
    assert "that cannot be: unsafe stretches lie within their trajectory" in shown
    assert shown.count("that cannot be") == 2
    assert store.labels() == {1: Label(0, 0, 0, ((0, 1), (2, 3)), None)}


def test_a_second_annotator_s_command_is_refused(tmp_path):
    asked(tmp_path, 1)
    with (
        hold_folder(tmp_path, by="annotator"),
        pytest.raises(SystemExit, match="one annotator at a time, but another one is at work"),
    ):
        main([str(tmp_path), "--terminal"])


def test_a_folder_s_name_reaches_the_terminal_without_its_control_codes(tmp_path, type_answers):
    folder = tmp_path / "\x1b[2Jfolder"
    asked(folder, 1)
    shown = type_answers(folder, "q\n")
    assert "\x1b" not in shown
    assert r"\x1b[2Jfolder" in shown


def test_a_look_at_whether_a_run_is_at_work_turns_away_no_run(tmp_path):
    looking = hold_folder(tmp_path, by="oracle")
    threading.Timer(0.1, looking.close).start()
    hold_folder(tmp_path, by="oracle", patience=300).close()
    with (
        hold_folder(tmp_path, by="oracle"),
        pytest.raises(StorageError, match="one oracle at a time, but another one is at work"),
    ):
        hold_folder(tmp_path, by="oracle", patience=0.1)
