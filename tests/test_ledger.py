import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from pbcrl.errors import BudgetError, CorruptFileError, FormatVersionError, StorageError
from pbcrl.journal import Journal
from pbcrl.ledger import BudgetLedger, FunctionOracle, query_digest
from pbcrl.trajectory import Label, Query, Trajectory

from .damage import full_disk, with_flipped_bits

SAFE, UNSAFE = Label(1.0, 1.0, 0.0), Label(0.5, math.nan, 0.0)


def episode(value):
    return Trajectory(np.full((3, 1), value), np.zeros((3, 1)))


def query(first, second):
    return Query(episode(first), episode(second))


# -- Digest ----------------------------------------------------------------------------------


def test_a_query_is_known_by_what_it_shows_and_by_its_order():
    assert query_digest(query(1, 2)) == query_digest(query(1, 2))
    assert len({query_digest(query(a, b)) for a in range(3) for b in range(3)}) == 9
    assert len(query_digest(query(1, 2))) == 32


def test_true_costs_do_not_make_another_query():
    obs, actions = np.zeros((2, 1)), np.zeros((2, 1))
    free, dear = (Trajectory(obs, actions, np.full(2, cost)) for cost in (0, 9))
    assert query_digest(Query(free, free)) == query_digest(Query(dear, free))


def test_the_same_numbers_in_another_shape_are_another_query():
    flat, tall = (
        Trajectory(np.zeros(shape), np.zeros((shape[0], 1))) for shape in ((2, 3), (3, 2))
    )
    assert query_digest(Query(flat, flat)) != query_digest(Query(tall, tall))


# -- Ledger ----------------------------------------------------------------------------------


def test_a_ledger_is_continued_with_all_that_was_asked_and_answered(tmp_path):
    path = tmp_path / "made" / "ledger.jsonl"
    ledger = BudgetLedger(path)
    ledger.ask(["a", "b", "c"])
    ledger.answer("b", UNSAFE)
    ledger.answer("a", SAFE)
    ledger.close()
    again = BudgetLedger(path)
    assert repr(again.answers) == repr({"a": SAFE, "b": UNSAFE, "c": None})
    assert (again.queries_used, again.num_unanswered) == (3, 1)


def test_a_budget_counts_different_queries_of_all_processes(tmp_path):
    BudgetLedger(tmp_path / "ledger", budget=3).ask(["a", "b", "a"])
    ledger = BudgetLedger(tmp_path / "ledger", budget=3)
    ledger.ask(["b", "a"])  # costs nothing
    with pytest.raises(BudgetError, match=r"budget of 3 .* 1 are left, 2 were asked"):
        ledger.ask(["a", "c", "d"])
    assert ledger.queries_used == 2
    ledger.close()
    ledger = BudgetLedger(tmp_path / "ledger", budget=3)
    assert ledger.queries_used == 2
    ledger.ask(["c"])


def test_what_was_not_asked_cannot_be_answered(tmp_path):
    with pytest.raises(BudgetError, match="only what was asked can be answered, but b was not"):
        BudgetLedger(tmp_path / "ledger").answer("b", SAFE)


def test_a_line_is_readable_json(tmp_path):
    ledger = BudgetLedger(tmp_path / "ledger")
    ledger.ask(["a"])
    ledger.answer("a", UNSAFE)
    header, *lines = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert header == {"format": "pbcrl-ledger", "version": 1}
    assert all(line.pop("crc32") for line in lines)
    assert lines == [
        {"query": "a"},
        {"query": "a", "preference": 0.5, "first_safe": None, "second_safe": 0.0},
    ]


def test_a_torn_last_line_is_dropped_with_a_warning_wherever_it_tore(tmp_path):
    path = tmp_path / "ledger"
    ledger = BudgetLedger(path)
    ledger.ask(["a"])
    ledger.answer("a", SAFE)
    ledger.close()
    good = path.read_bytes()
    last_line = good.rindex(b"\n", 0, -1) + 1
    for length in range(last_line + 1, len(good)):
        path.write_bytes(good[:length])
        with pytest.warns(UserWarning, match=rf"last {length - last_line} bytes .* are dropped"):
            assert BudgetLedger(path).answers == {"a": None}
        assert BudgetLedger(path).answers == {"a": None}


def test_a_flipped_bit_is_detected(tmp_path):
    path = tmp_path / "ledger"
    ledger = BudgetLedger(path)
    ledger.ask(["a", "b"])
    ledger.answer("a", SAFE)
    ledger.close()
    good = path.read_bytes()
    for damaged in with_flipped_bits(good[:-1], step=7):
        path.write_bytes(damaged + b"\n")
        with pytest.raises((CorruptFileError, FormatVersionError)):
            BudgetLedger(path)


def test_a_text_of_another_kind_is_not_continued(tmp_path):
    path = tmp_path / "notes"
    for text in ("dear diary", '{"format": "diary", "version": 1}\n', "dear diary\n"):
        path.write_text(text)
        with pytest.raises(CorruptFileError):
            BudgetLedger(path)
        assert path.read_text() == text


def test_a_second_process_is_refused_before_it_asks_anything(tmp_path):
    ledger = BudgetLedger(tmp_path / "ledger")
    with pytest.raises(StorageError, match=r"one writer at a time, but another one has .*ledger"):
        BudgetLedger(tmp_path / "ledger")
    ledger.close()
    BudgetLedger(tmp_path / "ledger").ask(["a"])
    with pytest.raises(StorageError, match="was closed"):
        ledger.ask(["b"])
    assert ledger.queries_used == 0


@pytest.mark.parametrize(
    "entry", [{}, {"query": "a", "preference": 10**400, "first_safe": 1.0, "second_safe": 1.0}]
)
def test_a_line_that_is_neither_question_nor_answer_is_named(tmp_path, entry):
    journal = Journal(tmp_path / "ledger", kind="pbcrl-ledger")
    journal.append([{"query": "a"}, entry], sync=False)
    journal.close()
    with pytest.raises(CorruptFileError, match="line 3 is no question and no answer"):
        BudgetLedger(tmp_path / "ledger")


def test_what_does_not_fit_on_the_disk_is_not_asked(tmp_path):
    ledger = BudgetLedger(tmp_path / "ledger")
    before = ledger.path.read_bytes()
    with full_disk(len(before) + 20), pytest.raises(StorageError, match="free disk space"):
        ledger.ask(["a"])
    assert ledger.path.read_bytes() == before
    assert ledger.queries_used == 0


ASKING = """
import sys, time
import numpy as np
from pbcrl import BudgetLedger, FunctionOracle, Label, Query, Trajectory

def ask(query):
    first, second = query.first.obs[0, 0], query.second.obs[0, 0]
    with open(sys.argv[2], "ab", buffering=0) as bill:  # what the oracle charges
        bill.write(b"%d %d\\n" % (first, second))
    time.sleep(0.002)
    return Label(float(first < second), 1.0, 0.0)

episodes = [Trajectory(np.full((3, 1), float(i)), np.zeros((3, 1))) for i in range(40)]
queries = [Query(episodes[i], episodes[i + 1]) for i in range(39)]
oracle = FunctionOracle(ask, BudgetLedger(sys.argv[1], budget=39))
oracle.submit(queries)
answers = {}
while len(answers) < 39:
    answers |= oracle.collect()
    time.sleep(0.001)
print(oracle.queries_used, sum(label.preference for label in answers.values()))
"""


@pytest.mark.slow
def test_a_process_killed_at_any_moment_pays_for_no_answer_twice(tmp_path):
    """Killed again and again, it has each answer in the end; at most the one that was under way
    when it was killed is asked again, and none that it had noted."""
    ledger, bill = tmp_path / "ledger", tmp_path / "bill"
    rng = np.random.default_rng(0)
    kills = 0
    while True:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", ASKING, str(ledger), str(bill)],
            stdout=subprocess.PIPE,
            text=True,
        )
        charged = len(bill.read_bytes().splitlines()) if bill.exists() else 0
        until = charged + int(rng.integers(1, 12))
        while process.poll() is None:
            if kills < 8 and bill.exists() and len(bill.read_bytes().splitlines()) >= until:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.001)
        output, _ = process.communicate(timeout=60)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
    assert kills >= 3
    assert output.split() == ["39", "39.0"]
    assert len(bill.read_bytes().splitlines()) <= 39 + kills
    assert BudgetLedger(ledger).num_unanswered == 0


# -- Function oracle -------------------------------------------------------------------------


def safer(query):
    return Label(float(query.first.obs[0, 0] < query.second.obs[0, 0]), 1.0, 1.0)


def test_a_function_s_answers_come_in_order_and_from_then_on_out_of_the_ledger(tmp_path):
    queries = [query(1, 2), query(3, 2), query(1, 2)]
    expected = [Label(1, 1, 1), Label(0, 1, 1), Label(1, 1, 1)]
    oracle = FunctionOracle(safer, BudgetLedger(tmp_path / "ledger", budget=2))
    assert oracle.label(queries) == expected
    assert oracle.queries_used == 2
    oracle.ledger.close()

    def never(_):
        raise AssertionError("it was answered before")

    again = FunctionOracle(never, BudgetLedger(tmp_path / "ledger", budget=2))
    assert again.label(queries) == expected


def test_a_slow_function_does_not_hold_up_collect(tmp_path):
    answer_now = threading.Event()

    def slow(query):
        answer_now.wait()
        return safer(query)

    oracle = FunctionOracle(slow, BudgetLedger(tmp_path / "ledger"))
    numbers = oracle.submit([query(1, 2), query(2, 1)])
    assert oracle.collect() == {}
    assert oracle.ledger.num_unanswered == 2  # noted before it is answered
    answer_now.set()
    answers = {}
    while len(answers) < 2:
        answers |= oracle.collect()
    assert answers == dict(zip(numbers, [Label(1, 1, 1), Label(0, 1, 1)], strict=True))


def test_waiting_for_some_answers_keeps_the_others_for_collect(tmp_path):
    oracle = FunctionOracle(safer, BudgetLedger(tmp_path / "ledger"))
    (number,) = oracle.submit([query(1, 2)])
    assert oracle.label([query(2, 1)]) == [Label(0, 1, 1)]
    assert oracle.collect() == {number: Label(1, 1, 1)}


def test_an_error_of_the_function_is_raised_and_its_query_stays_unanswered(tmp_path):
    def broken(_):
        raise ConnectionError("no line")

    oracle = FunctionOracle(broken, BudgetLedger(tmp_path / "ledger", budget=1))
    with pytest.raises(ConnectionError, match="no line"):
        oracle.label([query(1, 2)])
    oracle.ledger.close()
    again = FunctionOracle(safer, BudgetLedger(tmp_path / "ledger", budget=1))
    assert again.label([query(1, 2)]) == [Label(1, 1, 1)]


def test_a_function_is_not_asked_beyond_the_budget(tmp_path):
    oracle = FunctionOracle(safer, BudgetLedger(tmp_path / "ledger", budget=1))
    with pytest.raises(BudgetError, match="1 are left, 2 were asked"):
        oracle.submit([query(1, 2), query(2, 3)])
    assert oracle.collect() == {}
