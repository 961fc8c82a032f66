import copy
import math
import warnings

import numpy as np
import pytest

from pbcrl.buffer import PreferenceBuffer, draw_pairs
from pbcrl.data.label_log import LabelLog, read_labels
from pbcrl.errors import (
    BudgetError,
    LabelError,
    MismatchError,
    MissingCostError,
    StorageError,
    UnsupportedError,
)
from pbcrl.feedback import FeedbackLoop
from pbcrl.label.folder_oracle import FolderOracle
from pbcrl.label.function_oracle import FunctionOracle
from pbcrl.oracle import DelayedOracle, ReplayOracle, SyntheticOracle, Teacher
from pbcrl.selection import entropy, novelty
from pbcrl.trajectory import Label, Trajectory

from .damage import full_disk
from .people import answer, questions


def episode(cost):
    """Two steps, of which the first costs `cost`; its observations say so."""
    return Trajectory(np.full((2, 1), cost), np.zeros((2, 1)), np.array([cost, 0.0]))


def episodes(*costs):
    return [episode(cost) for cost in costs]


def buffer_of(*costs):
    buffer = PreferenceBuffer()
    buffer.add_trajectories(episodes(*costs))
    return buffer


def rng(seed=0):
    return np.random.default_rng(seed)


def costs_of(buffer, positions):
    """The costs of both members of labelled pairs, (B, 2)."""
    pairs = buffer.labelled_pairs[positions]
    return [[buffer.trajectories[i].true_cost for i in pair] for pair in pairs.tolist()]


# -- Offline ---------------------------------------------------------------------------------


def test_offline_labels_are_those_of_distinct_pairs_in_the_order_of_the_log(tmp_path):
    buffer = buffer_of(0, 3, 6, 9)
    loop = FeedbackLoop(SyntheticOracle(5), buffer, rng=rng(), folder=tmp_path)
    assert loop.label(buffer, 4) == 4
    assert len({frozenset(pair) for pair in buffer.labelled_pairs.tolist()}) == 4
    np.testing.assert_array_equal(buffer.labelled_pairs, draw_pairs(4, 4, rng=rng()))
    expected = [
        Label(float(first < second), float(first <= 5), float(second <= 5))
        for first, second in costs_of(buffer, range(4))
    ]
    assert read_labels(tmp_path / "labels.jsonl") == expected


def test_no_more_is_asked_than_there_are_pairs_without_a_label():
    buffer = buffer_of(1, 2, 3)
    loop = FeedbackLoop(SyntheticOracle(5), buffer, rng=rng())
    assert [loop.label(buffer, 2), loop.label(buffer, 7), loop.label(buffer, 7)] == [2, 1, 0]
    assert len({frozenset(pair) for pair in buffer.labelled_pairs.tolist()}) == 3
    assert loop.queries_used == loop.num_labels == 3
    assert loop.queries_asked == 0  # online


def test_pairs_can_be_compared_without_safety_labels(tmp_path):
    """As segments are: the limit is not one of theirs."""
    buffer = buffer_of(1, 2, 9)
    loop = FeedbackLoop(SyntheticOracle(5), buffer, rng=rng(), folder=tmp_path)
    assert loop.label(buffer, 9, safety=False) == 3
    first, second = np.array(costs_of(buffer, range(3))).T
    np.testing.assert_array_equal(buffer.labels[:, 0], first < second)
    assert np.isnan(buffer.labels[:, 1:]).all()
    logged = read_labels(tmp_path / "labels.jsonl")
    assert [one.preference for one in logged] == buffer.labels[:, 0].tolist()
    assert all(math.isnan(one.first_safe) for one in logged)


def test_offline_episodes_are_judged_by_their_mean_cost(tmp_path):
    """2, 4 and 6 cost 4 on average, which counts as 2 queries; 4, 6 and 8 cost 6."""
    loop = FeedbackLoop(SyntheticOracle(5, budget=5), buffer_of(), rng=rng(), folder=tmp_path)
    assert loop.judge(episodes(2, 4, 6)) is True
    assert loop.judge(episodes(4, 6, 8)) is False
    assert (loop.queries_used, loop.queries_asked, loop.num_labels) == (4, 0, 2)
    logged = read_labels(tmp_path / "labels.jsonl")
    assert [one.first_safe for one in logged] == [1.0, 0.0]
    with pytest.raises(BudgetError):
        loop.judge(episodes(1, 2, 3))
    assert loop.num_labels == 2


def test_one_log_has_the_labels_of_a_validation_buffer_too(tmp_path):
    buffer, valid = buffer_of(1, 2, 3), buffer_of(4, 5, 6)
    loop = FeedbackLoop(SyntheticOracle(5), buffer, rng=rng(), folder=tmp_path)
    assert (loop.label(valid, 2), loop.label(buffer, 3)) == (2, 3)
    assert (len(valid), len(buffer)) == (2, 3)
    assert len(read_labels(tmp_path / "labels.jsonl")) == 5


# -- Online ----------------------------------------------------------------------------------


def test_due_counts_all_online_queries_so_that_a_poor_round_is_made_up_for():
    """3 are due, but 2 episodes make 1 pair; next time 4 are due, and 3 of 4 episodes' 6 pairs."""
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2))
    assert loop.ask(3) == 1
    loop.add(episodes(3, 4))
    loop.add(episodes(5, 6))
    assert loop.ask(4) == 3
    assert loop.ask(4) == 0
    assert loop.queries_asked == 4


def test_answers_are_labels_at_the_end_of_the_buffer():
    buffer = buffer_of(8, 9)
    loop = FeedbackLoop(SyntheticOracle(5), buffer, rng=rng())
    loop.label(buffer, 1)
    loop.add(episodes(1, 7))
    loop.ask(1)
    assert loop.num_open == 1
    (position,) = loop.collect()
    assert position == 1
    assert sorted(costs_of(buffer, [1])[0]) == [1, 7]
    first_is_safer = costs_of(buffer, [1]) == [[1, 7]]
    assert buffer.labels[1].tolist() == ([1, 1, 0] if first_is_safer else [0, 0, 1])
    assert (loop.num_open, loop.num_labels, len(loop.collect())) == (0, 2, 0)


def test_episodes_that_were_not_compared_are_forgotten_when_others_were_asked_about():
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2, 3, 4))
    assert loop.ask(0) == 0  # nothing is due: all are kept
    assert loop.ask(1) == 1
    assert len(loop.buffer.trajectories) == 2
    assert loop.ask(2) == 0  # the other two are gone
    loop.add(episodes(5))
    assert loop.ask(2) == 0
    loop.add(episodes(6))
    assert loop.ask(2) == 1
    assert [t.true_cost for t in loop.buffer.trajectories[2:]] == [5, 6]


def test_an_answer_may_come_rounds_late_and_nothing_waits_for_it():
    loop = FeedbackLoop(DelayedOracle(SyntheticOracle(5), rounds=2), PreferenceBuffer(), rng=rng())
    found = []
    for i in range(4):
        loop.add(episodes(i, i + 1))
        loop.ask(i + 1)
        found.append(loop.collect().tolist())
    assert found == [[], [], [0], [1]]
    assert (loop.queries_asked, loop.num_open) == (4, 2)


def test_a_person_s_answers_come_in_any_order(tmp_path):
    oracle = FolderOracle(tmp_path / "asked")
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng(), folder=tmp_path)
    for i in range(3):
        loop.add(episodes(2 * i, 2 * i + 1))
        loop.ask(i + 1)
    answer(tmp_path / "asked", 3, Label(0.5, 1, 1))
    assert {*costs_of(loop.buffer, loop.collect())[0]} == {4, 5}
    answer(tmp_path / "asked", 1, Label(1, math.nan, 1))
    assert {*costs_of(loop.buffer, loop.collect())[0]} == {0, 1}
    assert loop.num_open == 1
    labels = [Label(0.5, 1.0, 1.0), Label(1.0, math.nan, 1.0)]
    assert repr(read_labels(tmp_path / "labels.jsonl")) == repr(labels)


def test_when_the_budget_ends_the_loop_asks_what_is_left_and_warns_once():
    loop = FeedbackLoop(SyntheticOracle(5, budget=2), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2, 3))
    with pytest.warns(RuntimeWarning, match="3 online queries are due, but 2 were asked .* budget"):
        assert loop.ask(3) == 2
    assert len(loop.collect()) == 2
    loop.add(episodes(4, 5))
    assert loop.ask(4) == 0  # and no second warning
    assert len(loop.buffer.trajectories) == 3


def test_compared_episodes_are_on_disk_a_dataset_per_question(tmp_path):
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    for i in range(2):
        loop.add(episodes(10 * i, 10 * i + 1, 10 * i + 2))
        loop.ask(i + 1)
    assert sorted(path.name for path in (tmp_path / "online").iterdir()) == ["0001", "0002"]
    assert all(not t.obs.flags.writeable for t in loop.buffer.trajectories)  # memory-mapped
    assert len(loop.buffer.trajectories) == 4


def test_pairs_are_chosen_by_the_selection():
    class Model:
        num_members = 1

        def member_scores(self, trajectories):
            return np.array([[t.obs[0, 0] for t in trajectories]])

    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), select=entropy)
    loop.add(episodes(0, 9, 4, 4.5))
    with pytest.raises(ValueError, match=r"there is no model; pass model="):
        loop.ask(1)
    assert loop.ask(1, model=Model()) == 1
    assert sorted(t.true_cost for t in loop.buffer.trajectories) == [4, 4.5]  # hardest to order


# -- Batches ---------------------------------------------------------------------------------


def accept(loop, batch, *, due):
    """Show a batch; return how many queries that were and the answer."""
    asked = loop.ask_batch(batch, due=due)
    assert loop.accepted() is None  # before `collect`
    loop.collect()
    return asked, loop.accepted()


def test_a_batch_shows_the_newest_episodes_and_counts_as_half_as_many_queries():
    """Costs 9, 1, 4: the newest two have a mean of 2.5, all three one of 4.7."""
    loop = FeedbackLoop(SyntheticOracle(3), PreferenceBuffer(), rng=rng())
    loop.add(episodes(9, 1, 4))
    assert accept(loop, 2, due=1) == (1, True)
    assert loop.accepted() is None  # an answer is told once
    assert (loop.queries_asked, loop.queries_used, loop.num_labels) == (1, 1, 1)
    loop.add(episodes(8, 9, 1))
    assert accept(loop, 3, due=3) == (2, False)
    assert (loop.queries_asked, len(loop.buffer)) == (3, 0)


def test_with_a_segment_length_pairs_are_segments_and_batches_are_whole_episodes():
    """Episodes of 2 steps make two segments of 1; d = 5 is one of the sum, half of it of a step."""
    buffer = PreferenceBuffer()
    loop = FeedbackLoop(SyntheticOracle(5, share=0.5), buffer, rng=rng(), segment_length=1)
    loop.add(episodes(1, 3, 8))
    assert accept(loop, 2, due=9) == (1, False)  # 5.5 > 5
    assert loop.ask(9) == 8
    loop.collect()
    assert {len(shown) for shown in buffer.trajectories} == {1}
    costs = np.array(costs_of(buffer, range(8)))
    assert {0.0, 1.0, 3.0, 8.0} >= set(costs.flat)
    np.testing.assert_array_equal(buffer.labels[:, 1:], costs <= 2.5)
    with pytest.raises(ValueError, match="at least 1 step, got segment_length=0"):
        FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), segment_length=0)


def test_episodes_of_a_batch_may_be_compared_but_are_not_judged_twice():
    loop = FeedbackLoop(SyntheticOracle(3), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2))
    assert accept(loop, 2, due=9) == (1, True)
    assert accept(loop, 2, due=9) == (0, None)
    loop.add(episodes(3))
    assert accept(loop, 2, due=9) == (0, None)  # only one is new
    assert loop.ask(4) == 3  # three pairs of three episodes, one query being spent on the batch
    loop.add(episodes(4))
    assert accept(loop, 2, due=9) == (0, None)
    loop.add(episodes(5))
    assert accept(loop, 2, due=9) == (1, False)


def test_while_the_answer_about_a_batch_is_on_its_way_no_other_one_is_shown():
    oracle = DelayedOracle(SyntheticOracle(3), rounds=1)
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2))
    assert accept(loop, 2, due=9) == (1, None)
    loop.add(episodes(8, 9))
    assert (loop.num_open, accept(loop, 2, due=9)) == (1, (0, True))
    assert accept(loop, 2, due=9) == (1, None)
    assert accept(loop, 2, due=9) == (0, False)


def test_a_batch_that_is_not_due_is_not_shown():
    loop = FeedbackLoop(SyntheticOracle(3), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2, 3))
    assert accept(loop, 3, due=1) == (0, None)
    assert loop.queries_used == 0
    assert accept(loop, 3, due=2) == (2, True)


def test_a_batch_without_an_answer_counts_and_one_beyond_the_budget_does_not():
    oracle = SyntheticOracle(3, budget=2, teacher=Teacher(skip_above=5))
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng())
    loop.add(episodes(8, 9, 7))
    assert accept(loop, 3, due=9) == (2, None)
    assert (loop.queries_asked, loop.num_labels) == (2, 1)
    loop.add(episodes(1))
    with pytest.warns(RuntimeWarning, match="9 online queries are due, but 2 were asked .* budget"):
        assert accept(loop, 1, due=9) == (0, None)
    assert accept(loop, 1, due=9) == (0, None)  # and no second warning
    assert (loop.queries_asked, loop.num_labels) == (2, 1)


def test_the_log_has_the_answer_about_a_batch_before_those_about_pairs(tmp_path):
    loop = FeedbackLoop(SyntheticOracle(3), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    loop.add(episodes(1, 1))
    loop.ask_batch(2, due=2)
    loop.ask(2)
    loop.collect()
    labels = [Label(math.nan, 1.0, math.nan), Label(0.5, 1.0, 1.0)]
    assert repr(read_labels(tmp_path / "labels.jsonl")) == repr(labels)


def test_an_answer_about_a_batch_that_does_not_fit_on_the_disk_is_an_error(tmp_path):
    """Nothing is lost by it: once there is space, the next call has the answer."""
    loop = FeedbackLoop(SyntheticOracle(3), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    loop.add(episodes(1, 2))
    loop.ask_batch(2, due=1)
    size = (tmp_path / "labels.jsonl").stat().st_size
    with full_disk(size + 20), pytest.raises(StorageError, match="free disk space"):
        loop.collect()
    assert read_labels(tmp_path / "labels.jsonl") == []
    assert loop.accepted() is None
    loop.collect()
    assert loop.accepted() is True


def test_an_oracle_that_is_not_asked_about_batches_is_named_and_nothing_is_spent():
    loop = FeedbackLoop(ReplayOracle([Label(1, 1, 1)]), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2))
    with pytest.raises(UnsupportedError, match="shown to a ReplayOracle"):
        loop.ask_batch(2, due=1)
    assert (loop.queries_asked, loop.ask(1)) == (0, 1)


def test_answers_about_an_earlier_round_are_late():
    loop = FeedbackLoop(DelayedOracle(SyntheticOracle(5), rounds=1), PreferenceBuffer(), rng=rng())
    assert loop.num_late(np.array([], dtype=np.int64)) == 0
    loop.add(episodes(1, 2, 3))
    loop.ask(2)
    loop.collect()
    loop.add(episodes(4, 5))
    loop.ask(3)
    assert loop.num_late(loop.collect()) == 2
    assert loop.num_late(loop.collect()) == 0


# -- Faults ----------------------------------------------------------------------------------


def test_labels_that_do_not_fit_on_the_disk_are_kept_for_the_next_call(tmp_path):
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    loop.add(episodes(1, 2, 3))
    loop.ask(3)
    log = tmp_path / "labels.jsonl"
    with full_disk(log.stat().st_size + 20), pytest.raises(StorageError, match="free disk space"):
        loop.collect()
    assert len(loop.buffer) == len(read_labels(log)) == 0
    assert loop.collect().tolist() == [0, 1, 2]
    assert len(read_labels(log)) == 3


def test_episodes_that_do_not_fit_on_the_disk_stay_in_memory(tmp_path):
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    loop.add(episodes(1, 2))
    with full_disk(100), pytest.raises(StorageError, match="free disk space"):
        loop.ask(1)
    assert loop.collect().tolist() == [0]


def test_a_query_that_cannot_be_written_is_asked_when_there_is_space_again(tmp_path):
    oracle = FolderOracle(tmp_path / "asked")
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng(), folder=tmp_path)
    loop.add(episodes(1, 2))
    with full_disk(100), pytest.raises(StorageError, match="free disk space"):
        loop.ask(1)
    assert (len(loop.buffer.trajectories), loop.queries_asked) == (0, 0)
    assert loop.ask(1) == 1
    assert [t.true_cost for t in loop.buffer.trajectories] == [1, 2]


def test_an_oracle_that_somebody_else_asks_too_is_refused():
    oracle = SyntheticOracle(5)
    loop = FeedbackLoop(oracle, buffer_of(1, 2), rng=rng())
    oracle.submit(loop.buffer.queries(np.array([[0, 1]])))
    with pytest.raises(LabelError, match=r"asked by the loop alone, but it answered queries \[0\]"):
        loop.collect()


def test_an_episode_without_true_costs_is_refused_by_the_oracle_that_needs_them():
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng())
    loop.add([Trajectory(np.zeros((1, 1)), np.zeros((1, 1)))] * 2)
    with pytest.raises(MissingCostError):
        loop.ask(1)
    assert (len(loop.buffer.trajectories), loop.queries_asked, loop.num_open) == (0, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda loop: FeedbackLoop(loop.oracle, [], rng=rng()),
            "go into a PreferenceBuffer, got l",
        ),
        (lambda loop: FeedbackLoop(loop.oracle, loop.buffer, rng=0), r"got 0; pass np\.random"),
        (lambda loop: loop.label([], 3), "go into a PreferenceBuffer, got list"),
        (lambda loop: loop.label(loop.buffer, 2.5), r"num_queries .*, got 2\.5; round it down"),
        (
            lambda loop: loop.add(episode(1)),
            "a sequence of Trajectory, got Trajectory; pass a list",
        ),
        (lambda loop: loop.add([None]), "a sequence of Trajectory, got NoneType"),
        (lambda loop: loop.ask("3"), "due is a number of queries, got '3'"),
    ],
)
def test_a_wrong_type_is_named(wrong, message):
    loop = FeedbackLoop(SyntheticOracle(5), buffer_of(1, 2), rng=rng())
    with pytest.raises(TypeError, match=message):
        wrong(loop)


def test_a_negative_number_of_queries_is_refused():
    loop = FeedbackLoop(SyntheticOracle(5), buffer_of(1, 2), rng=rng())
    with pytest.raises(ValueError, match="due is a number of queries and must be >= 0, got -1"):
        loop.ask(-1)


# -- Killed and resumed ----------------------------------------------------------------------

NOISE = Teacher(preference_noise=0.3, safety_noise=0.3)
ROUND = ["add", "ask", "collect"]
CALLS = ["label valid", "label", *ROUND * 4]
JUDGED = ["label valid", "label", *["add", "ask batch", "ask", "collect", "accepted"] * 4]


def synthetic(_):
    return SyntheticOracle(5, teacher=NOISE, budget=40, rng=rng(7))


def late(folder):
    return DelayedOracle(synthetic(folder), rounds=2)


def replayed(_):
    return DelayedOracle(
        ReplayOracle([Label(float(i % 2), 1, float(i % 3 == 0)) for i in range(40)]), rounds=1
    )


def short(_):
    """Its budget ends in mid-loop."""
    return SyntheticOracle(5, teacher=NOISE, budget=14, rng=rng(7))


class Session:
    """A small run of toy trajectories, all of whose state is in `state_dict` or on disk."""

    def __init__(self, make_oracle, folder, *, in_memory=False, calls=CALLS):
        self.calls = calls
        self.rng, self.buffer, self.valid = rng(3), buffer_of(*range(6)), buffer_of(6, 7, 8)
        self.loop = FeedbackLoop(
            make_oracle(folder),
            self.buffer,
            rng=self.rng,
            folder=None if in_memory else folder,
            select=novelty,
        )
        self.step, self.found = 0, []

    def run(self, until):
        for call in self.calls[self.step : until]:
            number = (self.step - 2) * 4 // (len(self.calls) - 2) + 1
            if call == "label valid":
                self.loop.label(self.valid, 2)
            elif call == "label":
                self.loop.label(self.buffer, 8)
            elif call == "add":
                self.loop.add(episodes(*self.rng.uniform(0, 10, 4)))
            elif call == "ask batch":
                self.found.append(self.loop.ask_batch(3, due=4 * number))
            elif call == "accepted":
                self.found.append(self.loop.accepted())
            elif call == "ask":
                self.found.append(self.loop.ask((2 if self.calls is CALLS else 4) * number))
            else:
                self.found.append(self.loop.collect().tolist())
            self.step += 1

    def state_dict(self):
        return {
            "loop": self.loop.state_dict(),
            "rng": self.rng.bit_generator.state,
            "step": self.step,
            "found": list(self.found),
        }

    def load_state_dict(self, state):
        self.loop.load_state_dict(state["loop"])
        self.rng.bit_generator.state = state["rng"]
        self.step, self.found = state["step"], list(state["found"])

    def end(self):
        """Everything that another run must agree with, to the last bit."""
        self.loop.close()
        pairs, labels = self.buffer.labelled_pairs, self.buffer.labels
        trajectories = [
            x.tobytes() for t in self.buffer.trajectories for x in (t.obs, t.actions, t.costs)
        ]
        counts = self.loop.queries_asked, self.loop.num_open, self.loop.queries_used
        return (
            (pairs.tolist(), labels.tobytes(), trajectories, counts, self.found),
            (self.loop.num_labels, self.rng.bit_generator.state),
        )


@pytest.fixture
def budget_may_end():
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*online queries are due", category=RuntimeWarning
        )
        yield


@pytest.mark.usefixtures("budget_may_end")
@pytest.mark.parametrize("in_memory", [False, True], ids=["on disk", "in memory"])
@pytest.mark.parametrize(
    ("make_oracle", "calls"),
    [
        *((oracle, CALLS) for oracle in (synthetic, late, replayed, short)),
        *((oracle, JUDGED) for oracle in (synthetic, late, short)),
    ],
)
def test_a_run_that_is_interrupted_between_any_two_calls_ends_the_same(
    tmp_path, make_oracle, calls, in_memory
):
    """It goes on for up to two calls after its state was taken, which are lost; their labels come
    again."""

    def begin(folder):
        return Session(make_oracle, folder, in_memory=in_memory, calls=calls)

    whole = begin(tmp_path / "whole")
    whole.run(len(calls))
    expected = whole.end()
    for step in range(2, len(calls)):
        folder = tmp_path / str(step)
        cut = begin(folder)
        cut.run(step)
        state = copy.deepcopy(cut.state_dict())
        cut.run(step + step % 3)
        cut.loop.close()
        again = begin(folder)
        again.load_state_dict(state)
        assert again.loop.state_dict().keys() == state["loop"].keys()
        again.run(len(calls))
        assert again.end() == expected
        if not in_memory:
            log = (folder / "labels.jsonl").read_bytes()
            assert log == (tmp_path / "whole" / "labels.jsonl").read_bytes()


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_run_that_is_killed_before_its_first_state_gets_its_labels_again(tmp_path, step):
    whole, cut = (Session(synthetic, tmp_path / name) for name in ("whole", "cut"))
    whole.run(len(CALLS))
    cut.run(step)
    cut.loop.close()
    again = Session(synthetic, tmp_path / "cut")
    again.run(len(CALLS))
    assert again.end() == whole.end()
    logs = [(tmp_path / name / "labels.jsonl").read_bytes() for name in ("whole", "cut")]
    assert logs[0] == logs[1]


def test_labels_that_come_again_and_differ_are_refused(tmp_path):
    cut = Session(synthetic, tmp_path)
    cut.run(2)
    cut.loop.close()
    buffer = buffer_of(*range(10, 16))
    again = FeedbackLoop(SyntheticOracle(5), buffer, rng=rng(3), folder=tmp_path)
    with pytest.raises(
        MismatchError, match=r"gets the labels that it got before, but Label\(.* now"
    ):
        again.label(buffer, 10)
    assert len(buffer) == 0
    assert len(read_labels(tmp_path / "labels.jsonl")) == 10


def test_a_log_that_is_shorter_than_the_state_knows_is_refused(tmp_path):
    cut = Session(synthetic, tmp_path)
    cut.run(5)
    state = cut.state_dict()
    cut.loop.close()
    path = tmp_path / "labels.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in (lines[:-1], lines[:1], []):
        path.write_bytes(b"".join(kept))
        again = Session(synthetic, tmp_path)
        with pytest.raises(
            StorageError, match=r"12 were in .*labels\.jsonl, but .* are there; rest"
        ):
            again.load_state_dict(state)
        again.loop.close()


def test_another_buffer_than_the_state_s_is_refused(tmp_path):
    cut = Session(synthetic, tmp_path)
    cut.run(5)
    state = cut.state_dict()
    cut.loop.close()
    for buffer in (buffer_of(1, 2), cut.buffer):
        again = FeedbackLoop(synthetic(None), buffer, rng=rng(), folder=tmp_path)
        with pytest.raises(MismatchError, match=r"with the 6 trajectories .* put the same ones"):
            again.load_state_dict(state["loop"])
        again.close()


def test_trajectories_that_come_into_the_buffer_between_questions_are_refused_by_the_state():
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2))
    loop.ask(1)
    loop.state_dict()
    loop.buffer.add_trajectories(episodes(3))
    with pytest.raises(ValueError, match="but 1 came later; add them earlier"):
        loop.state_dict()


def test_a_person_is_asked_nothing_twice_and_what_came_in_another_order_lies_beside_the_log(
    tmp_path,
):
    """Three queries, of which the state knows one; the last is answered first after the restart."""
    asked, draws = tmp_path / "asked", rng(1)

    def begin():
        oracle = FolderOracle(asked, budget=3)
        return FeedbackLoop(oracle, PreferenceBuffer(), rng=draws, folder=tmp_path / "run")

    def ask(loop, number):
        loop.add(episodes(2 * number, 2 * number + 1))
        loop.ask(number)

    loop = begin()
    ask(loop, 1)
    state, drawn = loop.state_dict(), draws.bit_generator.state
    ask(loop, 2)
    ask(loop, 3)
    answer(asked, 2, Label(0, 0, 1))
    answer(asked, 3, Label(1, 1, 0))
    assert len(loop.collect()) == 2
    loop.close()
    loop.oracle.close()

    again = begin()
    again.load_state_dict(state)
    assert again.num_open == 1
    answer(asked, 1, Label(0.5, 1, 1))
    assert again.collect().tolist() == [0]
    draws.bit_generator.state = drawn
    ask(again, 2)
    ask(again, 3)
    assert len(again.collect()) == 2
    assert questions(asked) == [1, 2, 3]
    labels = [Label(0.5, 1, 1), Label(0, 0, 1), Label(1, 1, 0)]
    assert read_labels(tmp_path / "run" / "labels.jsonl") == labels
    assert read_labels(tmp_path / "run" / "labels_unused.jsonl") == labels[1:]


def test_a_function_answers_open_queries_after_a_restart(tmp_path):
    def never(_):
        raise ConnectionError("no line")

    def begin(ask):
        oracle = FunctionOracle(ask, tmp_path / "bought.jsonl", budget=1)
        return FeedbackLoop(oracle, PreferenceBuffer(), rng=rng(), folder=tmp_path)

    loop = begin(never)
    loop.add(episodes(1, 2))
    loop.ask(1)
    state = loop.state_dict()
    loop.close()
    loop.oracle.close()
    again = begin(lambda _: Label(0.5, 1, 1))
    again.load_state_dict(state)
    found = []
    while not found:
        found = again.collect().tolist()
    assert found == [0]
    assert again.queries_used == 1


def test_late_answers_of_a_folder_are_late_once_more_after_a_restart(tmp_path):
    asked = tmp_path / "asked"

    def begin():
        oracle = DelayedOracle(FolderOracle(asked), rounds=1)
        return FeedbackLoop(oracle, PreferenceBuffer(), rng=rng(), folder=tmp_path)

    loop = begin()
    loop.add(episodes(1, 2))
    loop.ask(1)
    answer(asked, 1, Label(0.5, 1, 1))
    assert len(loop.collect()) == 0
    state = loop.state_dict()
    del loop  # with its oracle: that ends the locks
    again = begin()
    again.load_state_dict(state)
    assert [len(again.collect()) for _ in range(2)] == [0, 1]


def test_unused_labels_are_set_aside_for_a_run_that_goes_on_with_other_episodes(tmp_path):
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    state = loop.state_dict()
    loop.add(episodes(1, 9))
    loop.ask(1)
    loop.collect()
    loop.close()
    again = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    again.load_state_dict(state)
    assert again.set_unused_labels_aside() == 1
    again.add(episodes(3, 4))
    again.ask(1)
    again.collect()
    assert again.set_unused_labels_aside() == 0
    (label,) = read_labels(tmp_path / "labels.jsonl")
    assert (label.first_safe, label.second_safe) == (1, 1)
    assert len(read_labels(tmp_path / "labels_unused.jsonl")) == 1


def test_two_loops_do_not_share_a_folder(tmp_path):
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    with pytest.raises(StorageError, match="one writer at a time"):
        FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    loop.close()
    LabelLog(tmp_path / "labels.jsonl").close()
