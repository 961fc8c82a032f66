import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from pbcrl.data.label_log import LabelLog
from pbcrl.errors import BudgetError, StorageError
from pbcrl.label.function_oracle import FunctionOracle
from pbcrl.trajectory import Label, Query, Trajectory


def episode(value):
    return Trajectory(np.full((3, 1), value), np.zeros((3, 1)))


def query(first, second):
    return Query(episode(first), episode(second))


def safer(query):
    return Label(float(query.first.obs[0, 0] < query.second.obs[0, 0]), 1.0, 1.0)


def test_a_function_s_answers_come_in_order_and_from_then_on_out_of_the_log(tmp_path):
    queries = [query(1, 2), query(3, 2), query(1, 2)]
    expected = [Label(1, 1, 1), Label(0, 1, 1), Label(1, 1, 1)]
    oracle = FunctionOracle(safer, tmp_path / "log", budget=2)
    assert oracle.label(queries) == expected
    assert oracle.queries_used == 2
    oracle.close()

    def never(_):
        raise AssertionError("it was answered before")

    again = FunctionOracle(never, tmp_path / "log", budget=2)
    assert again.label(queries) == expected


def test_a_slow_function_does_not_hold_up_collect(tmp_path):
    answer_now = threading.Event()

    def slow(query):
        answer_now.wait()
        return safer(query)

    oracle = FunctionOracle(slow, tmp_path / "log")
    numbers = oracle.submit([query(1, 2), query(2, 1)])
    assert oracle.collect() == {}
    assert oracle.queries_used == 2  # noted before it is answered
    answer_now.set()
    answers = {}
    while len(answers) < 2:
        answers |= oracle.collect()
    assert answers == dict(zip(numbers, [Label(1, 1, 1), Label(0, 1, 1)], strict=True))


def test_collect_waits_as_long_as_it_is_told_to_while_something_is_open(
    tmp_path,
):
    answer_now = threading.Event()

    def slow(query):
        answer_now.wait()
        return safer(query)

    oracle = FunctionOracle(slow, tmp_path / "log")
    numbers = oracle.submit([query(1, 2), query(2, 1)])
    assert oracle.collect(wait=0.01) == {}
    answer_now.set()
    expected = dict(zip(numbers, [Label(1, 1, 1), Label(0, 1, 1)], strict=True))
    assert oracle.collect(wait=math.inf) == expected
    assert oracle.collect(wait=math.inf) == {}


def test_waiting_for_some_answers_keeps_the_others_for_collect(tmp_path):
    oracle = FunctionOracle(safer, tmp_path / "log")
    (number,) = oracle.submit([query(1, 2)])
    assert oracle.label([query(2, 1)]) == [Label(0, 1, 1)]
    assert oracle.collect() == {number: Label(1, 1, 1)}


def test_an_error_of_the_function_is_raised_and_its_query_stays_unanswered(tmp_path):
    def broken(_):
        raise ConnectionError("no line")

    oracle = FunctionOracle(broken, tmp_path / "log", budget=1)
    with pytest.raises(ConnectionError, match="no line"):
        oracle.label([query(1, 2)])
    oracle.close()
    again = FunctionOracle(safer, tmp_path / "log", budget=1)
    assert again.label([query(1, 2)]) == [Label(1, 1, 1)]


def test_a_function_is_not_asked_beyond_the_budget(tmp_path):
    oracle = FunctionOracle(safer, tmp_path / "log", budget=1)
    with pytest.raises(BudgetError, match="1 are left, 2 were asked"):
        oracle.submit([query(1, 2), query(2, 3)])
    assert oracle.collect() == {}


def test_an_answer_that_is_no_label_is_named_and_the_query_is_asked_again(tmp_path):
    answers = iter([None, Label(1, 1, 0)])
    oracle = FunctionOracle(lambda _: next(answers), tmp_path / "log", budget=1)
    (number,) = oracle.submit([query(1, 2)])
    with pytest.raises(TypeError, match=r"returns a Label, but .* returned None; return Label\("):
        all(oracle.collect() == {} for _ in itertools.count())
    found = {}
    while not found:
        found = oracle.collect()
    assert found == {number: Label(1, 1, 0)}
    assert oracle.queries_used == 1


def test_a_second_process_is_refused_before_it_asks_anything(tmp_path):
    oracle = FunctionOracle(safer, tmp_path / "log")
    with pytest.raises(StorageError, match=r"one writer at a time, but another one has .*log"):
        FunctionOracle(safer, tmp_path / "log")
    oracle.close()
    FunctionOracle(safer, tmp_path / "log").close()


def test_a_log_with_fewer_queries_than_a_state_knows_is_refused(tmp_path):
    oracle = FunctionOracle(safer, tmp_path / "log")
    oracle.label([query(1, 2), query(2, 3)])
    state = oracle.state_dict()
    oracle.load_state_dict(state)
    other = FunctionOracle(safer, tmp_path / "other")
    with pytest.raises(StorageError, match=r"2 were in .*other, but 0 are there; restore"):
        other.load_state_dict(state)


# -- Killed --------------------------------------------------------------------------------------


ASKING = """
import sys, time
import numpy as np
from pbcrl.label.function_oracle import FunctionOracle
from pbcrl.trajectory import Label, Query, Trajectory

def ask(query):
    first, second = query.first.obs[0, 0], query.second.obs[0, 0]
    with open(sys.argv[2], "ab", buffering=0) as bill:  # what the oracle charges
        bill.write(b"%d %d\\n" % (first, second))
    time.sleep(0.002)
    return Label(float(first < second), 1.0, 0.0)

episodes = [Trajectory(np.full((3, 1), float(i)), np.zeros((3, 1))) for i in range(40)]
queries = [Query(episodes[i], episodes[i + 1]) for i in range(39)]
oracle = FunctionOracle(ask, sys.argv[1], budget=39)
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
    log, bill = tmp_path / "log", tmp_path / "bill"
    rng = np.random.default_rng(0)
    kills = 0
    while True:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", ASKING, str(log), str(bill)],
            stdout=subprocess.PIPE,
            text=True,
        )
        charged = len(bill.read_bytes().splitlines()) if bill.exists() else 0
        until = charged + int(rng.integers(1, 12))
        while process.poll() is None:
            if kills < 3 and bill.exists() and len(bill.read_bytes().splitlines()) >= until:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.001)
        output, _ = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
    assert output.split() == ["39", "39.0"]
    assert len(bill.read_bytes().splitlines()) <= 39 + kills
    assert None not in LabelLog(log).answers.values()
