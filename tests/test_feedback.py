import copy
import math
import os
import warnings
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from pbcrl.buffer import PreferenceBuffer, draw_pairs
from pbcrl.constraint import UnsafeRate
from pbcrl.data.label_log import LabelLog, read_labels
from pbcrl.errors import (
    LabelError,
    MismatchError,
    MissingCostError,
    StorageError,
    UnsupportedError,
)
from pbcrl.feedback import Answers, FeedbackLoop
from pbcrl.label.folder_oracle import FolderOracle
from pbcrl.label.function_oracle import FunctionOracle
from pbcrl.oracle import DelayedOracle, SyntheticOracle, Teacher, num_queries
from pbcrl.selection import entropy, novelty
from pbcrl.trajectory import BatchLabel, GridLabel, Label, Query, Trajectory
from pbcrl.trees import UNUSED, TreeCost, Trees

from .damage import full_disk
from .every_space import boxes
from .people import answer, answering, questions


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


def label(loop, buffer, num_queries):
    """Offline, as many of a single buffer."""
    return loop.label_all([(buffer, num_queries)])[0]


def ask(loop, due, **options):
    """A round; return how many queries it asked."""
    before = loop.queries_asked
    loop.round(due, **options)
    return loop.queries_asked - before


# -- Offline ---------------------------------------------------------------------------------


def test_offline_labels_are_those_of_distinct_pairs_in_the_order_of_the_log(tmp_path):
    buffer = buffer_of(0, 3, 6, 9)
    loop = FeedbackLoop(SyntheticOracle(5), buffer, rng=rng(), folder=tmp_path)
    assert label(loop, buffer, 4) == 4
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
    assert [label(loop, buffer, number) for number in (2, 7, 7)] == [2, 1, 0]
    assert len({frozenset(pair) for pair in buffer.labelled_pairs.tolist()}) == 3
    assert loop.queries_used == loop.num_labels == 3
    assert loop.queries_asked == 0  # online


def test_one_log_has_the_labels_of_a_validation_buffer_too(tmp_path):
    buffer, valid = buffer_of(1, 2, 3), buffer_of(4, 5, 6)
    loop = FeedbackLoop(SyntheticOracle(5), buffer, rng=rng(), folder=tmp_path)
    assert loop.label_all([(valid, 2), (buffer, 3)]) == [2, 3]
    assert (len(valid), len(buffer)) == (2, 3)
    assert len(read_labels(tmp_path / "labels.jsonl")) == 5


# -- Online ----------------------------------------------------------------------------------


def test_due_counts_all_online_queries_so_that_a_poor_round_is_made_up_for():
    """3 are due, but 2 episodes make 1 pair; next time 4 are due, and 3 of 4 episodes' 6 pairs."""
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2))
    assert ask(loop, 3) == 1
    loop.add(episodes(3, 4))
    loop.add(episodes(5, 6))
    assert ask(loop, 4) == 3
    assert ask(loop, 4) == 0
    assert loop.queries_asked == 4


def test_answers_are_labels_at_the_end_of_the_buffer():
    buffer = buffer_of(8, 9)
    loop = FeedbackLoop(SyntheticOracle(5), buffer, rng=rng())
    label(loop, buffer, 1)
    loop.add(episodes(1, 7))
    answers = loop.round(1)
    assert answers.pairs.tolist() == [1]
    assert answers.unsafe_rate == 0.5  # one of the two
    assert sorted(costs_of(buffer, [1])[0]) == [1, 7]
    first_is_safer = costs_of(buffer, [1]) == [[1, 7]]
    assert buffer.labels[1].tolist() == ([1, 1, 0] if first_is_safer else [0, 0, 1])
    assert (loop.num_open, loop.num_labels) == (0, 2)
    again = loop.round(1)
    assert (again.pairs.tolist(), again.unsafe_rate) == ([], None)


def test_a_trajectory_in_two_pairs_counts_once_in_the_unsafe_rate():
    """Costs 1, 2 and 9 make three pairs, in which one of three episodes, twice, is unsafe."""
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2, 9))
    assert loop.round(3).unsafe_rate == pytest.approx(1 / 3)


# -- Second looks ----------------------------------------------------------------------------


class Judge:
    """A model that calls unsafe what costs more than a limit, by its observations."""

    def __init__(self, limit):
        self.learned_limit = limit

    def score(self, trajectories):
        return np.array([float(t.obs[0, 0]) for t in trajectories])


class Erring(SyntheticOracle):
    """Calls each of these episodes, by their costs, unsafe the first time that it is shown."""

    def __init__(self, limit, *mistaken):
        super().__init__(limit)
        self.mistaken = set(mistaken)

    def submit(self, queries):
        changed = []
        for query in queries:
            pair = [query.first, query.second]
            for k, one in enumerate(pair):
                if one.true_cost in self.mistaken:
                    self.mistaken.remove(one.true_cost)
                    pair[k] = replace(one, costs=one.costs + 100)
            changed.append(Query(*pair))
        return super().submit(changed)


def taught(oracle):
    """A loop with the labels of an earlier round."""
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng())
    loop.add(episodes(7, 8))
    first = loop.round(1, model=Judge(5))
    assert not first.judged.any()  # nothing had been learned
    return loop


def test_what_the_model_calls_episodes_is_counted_by_what_labels_say():
    """It calls 1, 2 and 3 safe and 4 unsafe, and all are safe."""
    loop = taught(SyntheticOracle(5))
    loop.add(episodes(1, 2, 3, 4))
    answers = loop.round(7, model=Judge(3.5))
    assert answers.judged.tolist() == [[3, 0], [1, 0]]
    assert answers.unsafe_rate == 0


def test_a_pessimistic_ensemble_is_corrected_by_what_it_says_itself():
    """Its mean is right, and it calls a third unsafe on purpose: P is still the true share."""
    model = TreeCost(*boxes(1, 1), horizon=1, num_members=2, pessimism=1.0)
    first = np.zeros((2, 1, 7))
    trees = Trees(
        torch.from_numpy(first).int(),
        torch.full((2, 1, 7), 0.6),
        torch.tensor([-1, *[UNUSED] * 6], dtype=torch.int8).repeat(2, 1, 1),
        torch.tensor([-2, *[UNUSED] * 6], dtype=torch.int8).repeat(2, 1, 1),
        torch.tensor([[[0.0, 2.0, *[0.0] * 6]], [[0.0, -1.0, *[0.0] * 6]]]),
    )
    model.set_trees(trees, torch.tensor([0.75, 0.75]))  # above 0.6 they say 2 and -1: 0.5 in mean
    random, constraint = rng(), UnsafeRate(0.05)
    loop, measured = FeedbackLoop(SyntheticOracle(0.9), PreferenceBuffer(), rng=random), []
    for iteration in range(60):
        states = random.uniform(size=(200, 1)).astype(np.float32)
        fresh = [Trajectory(x[None], np.zeros((1, 1), np.float32), x) for x in states]
        loop.add(fresh)
        answers = loop.round(20 * (iteration + 1), model=model)
        measured.append(constraint.measure(answers, model.score(fresh), model.learned_limit)[0])
    assert (model.score(fresh) > model.learned_limit).mean() > 0.3
    assert abs(np.mean(measured[10:]) - 0.1) < 0.03


def test_an_unsafe_label_that_surprises_counts_once_a_second_look_confirms_it():
    """4 is unsafe, and the model does not know it; then it is shown beside 2, and confirmed."""
    loop = taught(SyntheticOracle(3))
    loop.add(episodes(1, 4))
    answers = loop.round(2, model=Judge(5))
    assert (answers.unsafe_rate, answers.judged.tolist()) == (0.5, [[1, 0], [0, 0]])
    loop.add(episodes(2, 2.5))
    answers = loop.round(3, model=Judge(5))
    ((first, second),) = costs_of(loop.buffer, answers.pairs)
    assert {first, second} in ({4, 2}, {4, 2.5})
    assert (answers.unsafe_rate, answers.judged.tolist()) == (0.0, [[1, 1], [0, 0]])
    assert answers.num_late == 0  # it is beside a fresh one
    loop.add(episodes(1, 2))
    assert 4 not in costs_of(loop.buffer, loop.round(4, model=Judge(5)).pairs)[0]


class OneByOne(SyntheticOracle):
    """Answers one question per round, the oldest of those that are open."""

    def __init__(self, limit):
        super().__init__(limit)
        self.found = {}

    def collect(self, *, wait=0.0):
        self.found |= super().collect(wait=wait)
        return {number: self.found.pop(number) for number in sorted(self.found)[:1]}


def test_late_labels_of_an_episode_are_no_second_look_and_count_it_once():
    """Of three pairs of 1, 2 and 4 two show 4, and both are asked before it is known to be unsafe.

    The model is right on 1, on 2 and on the fresh one, and missed 4, by its second look alone.
    """
    loop = taught(OneByOne(3))
    loop.add(episodes(1, 2, 4))
    rounds = [loop.round(4, model=Judge(5))]
    assert 4 in costs_of(loop.buffer, rounds[0].pairs)[0]
    assert (rounds[0].unsafe_rate, rounds[0].judged.tolist()) == (0.5, [[1, 0], [0, 0]])
    loop.add(episodes(2.2, 2.4))
    rounds += [loop.round(5, model=Judge(5)) for _ in range(3)]
    *earlier, last = rounds
    assert [4 in costs_of(loop.buffer, one.pairs)[0] for one in earlier].count(True) == 2
    assert 4 in costs_of(loop.buffer, last.pairs)[0]
    assert (last.unsafe_rate, last.judged.tolist()) == (0.0, [[1, 1], [0, 0]])
    assert sum(one.judged for one in earlier).tolist() == [[2, 0], [0, 0]]


def test_a_mistake_that_a_second_look_withdraws_moves_nothing():
    loop = taught(Erring(5, 1))
    loop.add(episodes(1, 2))
    answers = loop.round(2, model=Judge(5))
    assert (answers.unsafe_rate, answers.judged.tolist()) == (0.5, [[1, 0], [0, 0]])
    loop.add(episodes(3, 4))
    answers = loop.round(3, model=Judge(5))
    assert 1 in costs_of(loop.buffer, answers.pairs)[0]
    assert (answers.unsafe_rate, answers.judged.tolist()) == (0.0, [[2, 0], [0, 0]])


def test_who_is_hardly_asked_is_asked_about_the_newest_episodes_and_a_checkpoint_has_room():
    """A run of 3M steps by 17 queries had 20,000 short episodes between two, and could not save."""
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng())
    for start in range(0, 20_000, 1_000):
        loop.add(episodes(*range(start, start + 1_000)))
    fresh = loop.state_dict()["fresh"]
    assert sum(part is not None for arrays in fresh for part in arrays) < 25_000  # of 50,000
    loop.round(20)
    assert min(one.true_cost for one in loop.buffer.trajectories) >= 16_000


def test_a_second_look_is_within_the_budget_and_waits_for_a_fresh_episode():
    loop = taught(SyntheticOracle(3))
    loop.add(episodes(4, 5))
    loop.round(2, model=Judge(9))
    assert loop.round(4, model=Judge(9)).pairs.tolist() == []
    loop.add(episodes(1, 2))
    answers = loop.round(3, model=Judge(9))
    assert len(answers.pairs) == 1  # of two that wait
    assert answers.judged.tolist() == [[1, 1], [0, 0]]


def test_surprises_outlive_the_process(tmp_path):
    def loops():
        return FeedbackLoop(SyntheticOracle(3), PreferenceBuffer(), rng=rng(), folder=tmp_path)

    old = loops()
    for due, costs in enumerate([(7, 8), (1, 4)], start=1):
        old.add(episodes(*costs))
        old.round(due, model=Judge(5))
    state = copy.deepcopy(old.state_dict())
    old.close()
    new = loops()
    new.load_state_dict(state)
    new.add(episodes(2, 2.5))
    answers = new.round(3, model=Judge(5))
    assert 4 in costs_of(new.buffer, answers.pairs)[0]
    assert answers.judged.tolist() == [[1, 1], [0, 0]]


# -- Answers ---------------------------------------------------------------------------------


def test_labels_without_a_word_on_safety_give_no_unsafe_rate():
    loop = FeedbackLoop(
        SyntheticOracle(5, teacher=Teacher(skip_above=0)), PreferenceBuffer(), rng=rng()
    )
    loop.add(episodes(1, 2))
    answers = loop.round(1)
    assert (answers.pairs.tolist(), answers.unsafe_rate) == ([0], None)


def test_a_round_in_which_nothing_was_asked_brings_nothing():
    none = Answers()
    assert (none.pairs.shape, none.pairs.dtype) == ((0,), np.int64)
    assert (none.unsafe_rate, none.num_late, none.batch, none.batch_shown) == (None, 0, None, False)


def test_episodes_that_were_not_compared_are_forgotten_when_others_were_asked_about():
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2, 3, 4))
    assert ask(loop, 0) == 0  # nothing is due: all are kept
    assert ask(loop, 1) == 1
    assert len(loop.buffer.trajectories) == 2
    assert ask(loop, 2) == 0  # the other two are gone
    loop.add(episodes(5))
    assert ask(loop, 2) == 0
    loop.add(episodes(6))
    assert ask(loop, 2) == 1
    assert [t.true_cost for t in loop.buffer.trajectories[2:]] == [5, 6]


def test_an_answer_may_come_rounds_late_and_nothing_waits_for_it():
    loop = FeedbackLoop(DelayedOracle(SyntheticOracle(5), rounds=2), PreferenceBuffer(), rng=rng())
    found = []
    for i in range(4):
        loop.add(episodes(i, i + 1))
        found.append(loop.round(i + 1).pairs.tolist())
    assert found == [[], [], [0], [1]]
    assert (loop.queries_asked, loop.num_open) == (4, 2)


def test_a_person_s_answers_come_in_any_order(tmp_path):
    oracle = FolderOracle(tmp_path / "asked")
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng(), folder=tmp_path)
    for i in range(3):
        loop.add(episodes(2 * i, 2 * i + 1))
        loop.round(i + 1)
    answer(tmp_path / "asked", 3, Label(0.5, 1, 1))
    assert {*costs_of(loop.buffer, loop.round(3).pairs)[0]} == {4, 5}
    answer(tmp_path / "asked", 1, Label(1, math.nan, 1))
    assert {*costs_of(loop.buffer, loop.round(3).pairs)[0]} == {0, 1}
    assert loop.num_open == 1
    labels = [Label(0.5, 1.0, 1.0), Label(1.0, math.nan, 1.0)]
    assert repr(read_labels(tmp_path / "labels.jsonl")) == repr(labels)


def test_a_round_waits_for_a_person_as_long_as_it_is_told_to(tmp_path):
    oracle = FolderOracle(tmp_path, poll_seconds=0.01)
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 9))
    with answering(tmp_path, lambda one: float(one.obs[0, 0]), limit=5):
        answers = loop.round(1, wait=math.inf)
    assert (answers.pairs.tolist(), answers.unsafe_rate) == ([0], 0.5)


def test_when_the_budget_ends_the_loop_asks_what_is_left_and_warns_once():
    loop = FeedbackLoop(SyntheticOracle(5, budget=2), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2, 3))
    with pytest.warns(
        RuntimeWarning, match="3 online queries are due, but 2 were asked .* budget"
    ) as found:
        answers = loop.round(3)
    assert found[0].filename == __file__
    assert len(answers.pairs) == loop.queries_asked == 2
    loop.add(episodes(4, 5))
    assert ask(loop, 4) == 0  # and no second warning
    assert len(loop.buffer.trajectories) == 3


def test_compared_episodes_are_on_disk_a_dataset_per_question(tmp_path):
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    for i in range(2):
        loop.add(episodes(10 * i, 10 * i + 1, 10 * i + 2))
        loop.round(i + 1)
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
        loop.round(1)
    assert ask(loop, 1, model=Model()) == 1
    assert sorted(t.true_cost for t in loop.buffer.trajectories) == [4, 4.5]  # hardest to order


# -- Batches ---------------------------------------------------------------------------------


def show(loop, batch, *, due):
    """A round that asks about a batch alone; return how many queries that were and the answer."""
    before = loop.queries_asked
    count = num_queries(batch)
    answers = loop.round(min(due, before + count), batch=batch)
    assert len(answers.pairs) == 0
    asked = loop.queries_asked - before
    assert answers.batch_shown == (asked > 0)
    return asked, answers.batch


SAFE, UNSAFE = BatchLabel(1), BatchLabel(0)


def test_a_batch_shows_the_newest_episodes_and_counts_as_half_as_many_queries():
    """Costs 9, 1, 4: the newest two have a mean of 2.5, all three one of 4.7."""
    loop = FeedbackLoop(SyntheticOracle(3), PreferenceBuffer(), rng=rng())
    loop.add(episodes(9, 1, 4))
    assert show(loop, 2, due=1) == (1, SAFE)
    assert (loop.queries_asked, loop.queries_used, loop.num_labels) == (1, 1, 1)
    loop.add(episodes(8, 9, 1))
    assert show(loop, 3, due=3) == (2, UNSAFE)
    assert loop.round(3).batch is None  # an answer is told once
    assert (loop.queries_asked, len(loop.buffer)) == (3, 0)


def test_with_a_segment_length_pairs_are_segments_and_batches_are_whole_episodes():
    """Episodes of 2 steps make two segments of 1; d = 5 is one of the sum, half of it of a step."""
    buffer = PreferenceBuffer()
    loop = FeedbackLoop(SyntheticOracle(5, share=0.5), buffer, rng=rng(), segment_length=1)
    loop.add(episodes(1, 3, 8))
    answers = loop.round(9, batch=2)
    assert (answers.batch, len(answers.pairs)) == (UNSAFE, 8)  # 5.5 > 5
    assert {len(shown) for shown in buffer.trajectories} == {1}
    costs = np.array(costs_of(buffer, range(8)))
    assert {0.0, 1.0, 3.0, 8.0} >= set(costs.flat)
    np.testing.assert_array_equal(buffer.labels[:, 1:], costs <= 2.5)
    with pytest.raises(ValueError, match="at least 1 step, got segment_length=0"):
        FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), segment_length=0)


def test_episodes_of_a_batch_may_be_compared_but_are_not_judged_twice():
    loop = FeedbackLoop(SyntheticOracle(3), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2))
    assert show(loop, 2, due=1) == (1, SAFE)
    answers = loop.round(1, batch=2)
    assert (answers.batch_shown, answers.batch) == (False, None)
    loop.add(episodes(3))
    answers = loop.round(4, batch=2)  # of which only one is new
    assert (answers.batch_shown, answers.batch) == (False, None)
    assert len(answers.pairs) == 3  # of three episodes, one query being spent on the batch
    loop.add(episodes(4))
    assert show(loop, 2, due=9) == (0, None)
    loop.add(episodes(5))
    assert show(loop, 2, due=9) == (1, UNSAFE)


def test_while_the_answer_about_a_batch_is_on_its_way_no_other_one_is_shown():
    oracle = DelayedOracle(SyntheticOracle(3), rounds=1)
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2))
    assert show(loop, 2, due=1) == (1, None)
    loop.add(episodes(8, 9))
    assert loop.num_open == 1
    late = loop.round(1, batch=2)
    assert (late.batch, late.batch_shown) == (SAFE, False)
    assert show(loop, 2, due=2) == (1, None)
    assert loop.round(2, batch=2).batch == UNSAFE


def test_a_batch_that_is_not_due_is_not_shown():
    loop = FeedbackLoop(SyntheticOracle(3), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2, 3))
    answers = loop.round(1, batch=3)
    assert (answers.batch_shown, answers.batch, len(answers.pairs)) == (False, None, 1)
    loop.add(episodes(1, 2, 3))
    assert show(loop, 3, due=3) == (2, SAFE)


def test_a_batch_without_an_answer_counts_and_one_beyond_the_budget_does_not():
    oracle = SyntheticOracle(3, budget=2, teacher=Teacher(skip_above=5))
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng())
    loop.add(episodes(8, 9, 7))
    answers = loop.round(2, batch=3)
    assert math.isnan(answers.batch.safe)
    assert (loop.queries_asked, loop.num_labels) == (2, 1)
    loop.add(episodes(1))
    with pytest.warns(
        RuntimeWarning, match="3 online queries are due, but 2 were asked .* budget"
    ) as found:
        answers = loop.round(3, batch=1)
    assert found[0].filename == __file__
    assert (answers.batch_shown, answers.batch) == (False, None)
    assert loop.round(3, batch=1).batch is None  # and no second warning
    assert (loop.queries_asked, loop.num_labels) == (2, 1)


def test_the_log_has_the_answer_about_a_batch_before_those_about_pairs(tmp_path):
    loop = FeedbackLoop(SyntheticOracle(3), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    loop.add(episodes(1, 1))
    loop.round(2, batch=2)
    assert read_labels(tmp_path / "labels.jsonl") == [SAFE, Label(0.5, 1.0, 1.0)]


def test_an_answer_about_a_batch_that_does_not_fit_on_the_disk_is_an_error(tmp_path):
    """Nothing is lost by it: once there is space, the next round has the answer."""
    loop = FeedbackLoop(SyntheticOracle(3), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    loop.add(episodes(1, 2))
    size = (tmp_path / "labels.jsonl").stat().st_size
    with full_disk(size + 20), pytest.raises(StorageError, match="free disk space"):
        loop.round(1, batch=2)
    assert read_labels(tmp_path / "labels.jsonl") == []
    assert loop.round(1, batch=2).batch == SAFE


def test_an_oracle_that_is_not_asked_about_batches_is_named_and_nothing_is_spent(tmp_path):
    oracle = FunctionOracle(lambda _: Label(1, 1, 1), tmp_path / "bought.jsonl")
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2))
    with pytest.raises(UnsupportedError, match="shown to a FunctionOracle; constrain the share"):
        loop.round(1, batch=2)
    assert (loop.queries_asked, len(loop.round(1, wait=math.inf).pairs)) == (0, 1)


def test_answers_about_an_earlier_round_are_late():
    loop = FeedbackLoop(DelayedOracle(SyntheticOracle(5), rounds=1), PreferenceBuffer(), rng=rng())
    loop.add(episodes(1, 2, 3))
    assert loop.round(2).num_late == 0
    loop.add(episodes(4, 5))
    answers = loop.round(3)
    assert (len(answers.pairs), answers.num_late) == (2, 2)
    answers = loop.round(3)  # in which nothing was asked: the newest episodes are those compared
    assert (len(answers.pairs), answers.num_late) == (1, 0)


# -- Grids -----------------------------------------------------------------------------------


def test_every_second_query_is_a_grid_of_twelve_fresh_episodes(tmp_path):
    """Queries 2 and 4 are grids; 12 episodes make one, and what is missing is made up by pairs."""
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    options = {"grids": True, "model": Judge(5)}
    found = []
    for due, num in ((1, 40), (2, 40), (5, 30), (6, 11), (6, 40)):
        loop.add(episodes(*range(num)))
        before = loop.queries_asked
        answers = loop.round(due, **options)
        found.append((loop.queries_asked - before, len(answers.pairs)))
    assert found == [(1, 1), (1, 0), (3, 2), (1, 1), (0, 0)]
    assert loop.queries_used == loop.num_labels == 6
    kinds = [type(one) for one in read_labels(tmp_path / "labels.jsonl")]
    assert kinds == [Label, GridLabel, GridLabel, Label, Label, Label]


def test_without_a_model_or_if_not_told_so_no_grid_is_shown():
    for options in ({"grids": True}, {"model": Judge(5)}):
        loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng())
        loop.add(episodes(*range(40)))
        assert len(loop.round(4, **options).pairs) == 4


def test_what_a_grid_finds_is_in_the_next_pairs_and_counts_once_it_is_confirmed():
    """Of 1 to 12 the model calls 11 and 12 unsafe, and 6 to 12 are: it misses five, 6 to 10."""
    loop = taught(SyntheticOracle(5.5))
    loop.add(episodes(*range(1, 13)))
    grid = loop.round(2, model=Judge(10.5), grids=True)
    assert (len(grid.pairs), grid.unsafe_rate) == (0, 7 / 12)
    assert grid.judged.tolist() == [[5, 0], [0, 2]]  # of the others it is right
    loop.add(episodes(0.5, 1.5, 2.5, 3.5, 4.5, 0.25))
    next_pairs = loop.round(5, model=Judge(10.5))
    shown = [set(pair) for pair in costs_of(loop.buffer, next_pairs.pairs)]
    assert [len(pair & {6, 7, 8, 9, 10}) for pair in shown] == [1, 1, 1]
    assert [len(pair & {0.5, 1.5, 2.5, 3.5, 4.5, 0.25}) for pair in shown] == [1, 1, 1]
    assert next_pairs.unsafe_rate == 0  # the fresh ones alone were drawn by chance
    assert next_pairs.judged.tolist() == [[3, 3], [0, 0]]
    loop.add(episodes(*np.linspace(0.1, 5, 8)))
    last = loop.round(8, model=Judge(10.5))
    shown += [set(pair) for pair in costs_of(loop.buffer, last.pairs)]
    assert [len(pair & {6, 7, 8, 9, 10}) for pair in shown] == [1, 1, 1, 1, 1, 0]
    assert set().union(*shown) > {6, 7, 8, 9, 10}
    assert (last.unsafe_rate, last.judged.tolist()) == (0, [[4, 2], [0, 0]])


def test_what_was_found_comes_beside_a_fresh_episode():
    loop = taught(SyntheticOracle(5))
    loop.add(episodes(*[1] * 10, 8, 9))
    loop.round(2, model=Judge(10), grids=True)
    loop.add(episodes(2, 3, 4, 4.5))
    for due in (3, 4):
        (shown,) = costs_of(loop.buffer, loop.round(due, model=Judge(10)).pairs)
        assert (len({8, 9} & set(shown)), len({2, 3, 4, 4.5} & set(shown))) == (1, 1)
        loop.add(episodes(2, 3, 4, 4.5))


def test_a_mistake_in_a_grid_is_withdrawn_by_the_pair():
    loop = taught(SyntheticOracle(5))
    loop.oracle.submit_grid = lambda shown: loop.oracle.submit_wrongly(shown)
    loop.oracle.submit_wrongly = lambda shown: SyntheticOracle.submit_grid(
        loop.oracle, [replace(one, costs=one.costs + 9 * (one.true_cost == 3)) for one in shown]
    )
    loop.add(episodes(*[1] * 11, 3))
    grid = loop.round(2, model=Judge(5), grids=True)
    assert (grid.unsafe_rate, grid.judged.tolist()) == (1 / 12, [[11, 0], [0, 0]])
    loop.add(episodes(2, 2.5))
    answers = loop.round(3, model=Judge(5))
    assert 3 in costs_of(loop.buffer, answers.pairs)[0]
    assert answers.judged.tolist() == [[2, 0], [0, 0]]


def test_grids_and_pairs_estimate_the_share_of_unsafe_episodes_without_bias():
    """A tenth is unsafe, of which the model knows half; people find some of the other half."""
    random, constraint, measured = rng(), UnsafeRate(0.05), []
    loop = FeedbackLoop(SyntheticOracle(0.9), PreferenceBuffer(), rng=random)
    model = Judge(0.95)
    for iteration in range(200):
        fresh = [
            Trajectory(x[None], np.zeros((1, 1)), x) for x in random.uniform(size=(200, 1)).round(4)
        ]
        loop.add(fresh)
        answers = loop.round(4 * (iteration + 1), model=model, grids=True)
        measured.append(constraint.measure(answers, model.score(fresh), model.learned_limit)[0])
    assert abs(np.mean(measured[20:]) - 0.1) < 0.02  # of .05 that are called unsafe
    found = [loop.buffer.trajectories[i].true_cost for i in np.unique(loop.buffer.labelled_pairs)]
    assert np.mean([0.9 < cost <= 0.95 for cost in found]) > 0.2  # where chance has .05


def test_a_clip_of_a_grid_that_nobody_could_tell_counts_nowhere():
    loop = taught(SyntheticOracle(5, teacher=Teacher(skip_above=11)))
    loop.add(episodes(*range(1, 12), 12))
    answers = loop.round(2, model=Judge(5), grids=True)
    assert (answers.unsafe_rate, answers.judged.tolist()) == (6 / 11, [[5, 0], [0, 6]])


def test_grids_show_segments_where_pairs_do():
    loop = FeedbackLoop(
        SyntheticOracle(5, share=0.5), PreferenceBuffer(), rng=rng(), segment_length=1
    )
    loop.add(episodes(*[3] * 6))  # 12 steps, of which 6 cost more than half of the limit
    loop.round(1)
    loop.add(episodes(*[3] * 6))
    assert loop.round(2, model=Judge(9), grids=True).unsafe_rate == 0.5


def test_late_answers_about_grids_are_judged_by_the_model_of_then():
    loop = taught(SyntheticOracle(5))
    loop.oracle, before = DelayedOracle(SyntheticOracle(5), rounds=1), loop.oracle
    assert before.collect() == {}
    loop.add(episodes(*range(1, 13)))
    assert not loop.round(2, model=Judge(20), grids=True).judged.any()
    assert loop.num_open == 1
    answers = loop.round(2, model=Judge(4), grids=True)
    assert (answers.judged.tolist(), loop.num_open) == ([[4, 0], [1, 7]], 0)


def test_a_grid_beyond_the_budget_is_not_shown_and_one_that_is_refused_spends_nothing(tmp_path):
    loop = FeedbackLoop(SyntheticOracle(5, budget=1), PreferenceBuffer(), rng=rng())
    loop.add(episodes(*range(20)))
    loop.round(1)
    loop.add(episodes(*range(20)))
    with pytest.warns(RuntimeWarning, match="2 online queries are due, but 1 were asked") as found:
        loop.round(2, model=Judge(5), grids=True)
    assert found[0].filename == __file__
    assert loop.queries_asked == 1
    oracle = FunctionOracle(lambda _: Label(1, 1, 1), tmp_path / "bought.jsonl")
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng())
    loop.add(episodes(*range(20)))
    with pytest.raises(UnsupportedError, match=r"shown to a FunctionOracle; ask about pairs"):
        loop.round(2, model=Judge(5), grids=True)
    assert (loop.queries_asked, len(loop.round(2, wait=math.inf).pairs)) == (0, 2)


@pytest.mark.parametrize("wrong", [Label(1, 1, 1), GridLabel((1, 0, 1)), BatchLabel(1)])
def test_an_answer_that_is_not_about_each_episode_of_the_grid_is_refused(tmp_path, wrong):
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    loop.oracle.collect = lambda **_: dict.fromkeys(loop._open_grids, wrong)
    loop.add(episodes(*range(20)))
    with pytest.raises(LabelError, match=r"a grid by a GridLabel with an answer for each of its"):
        loop.round(2, model=Judge(5), grids=True)
    assert read_labels(tmp_path / "labels.jsonl") == []


def test_people_answer_grids_and_a_killed_run_knows_what_it_has_asked(tmp_path):
    def begin():
        oracle = FolderOracle(tmp_path / "asked")
        return FeedbackLoop(oracle, PreferenceBuffer(), rng=rng(), folder=tmp_path / "run")

    loop = begin()
    loop.add(episodes(7, 8))
    loop.round(1)
    answer(tmp_path / "asked", 1, Label(1, 1, 0))
    loop.add(episodes(*range(20)))
    loop.round(3, model=Judge(30), grids=True)
    assert (questions(tmp_path / "asked"), loop.num_open, loop.queries_used) == ([1, 2, 3], 2, 3)
    state = copy.deepcopy(loop.state_dict())
    loop.close()
    loop.oracle.close()
    again = begin()
    again.load_state_dict(state)
    answer(tmp_path / "asked", 2, GridLabel((*[1.0] * 10, 0.0, math.nan)))
    answer(tmp_path / "asked", 3, Label(1, 1, 1))
    answers = again.round(3, model=Judge(30))
    assert (len(answers.pairs), again.num_open) == (1, 0)
    assert answers.unsafe_rate == 1 / 13
    state = copy.deepcopy(again.state_dict())
    assert len(state["missed"]) == 1
    for name in ("open_grids", "missed", "chosen"):  # older ones have none
        del state[name]
    again.close()
    again.oracle.close()
    older = begin()
    older.load_state_dict(state)
    assert older.state_dict()["missed"] == []


# -- Faults ----------------------------------------------------------------------------------


def test_labels_that_do_not_fit_on_the_disk_are_kept_for_the_next_round(tmp_path):
    oracle = DelayedOracle(SyntheticOracle(5), rounds=1)  # the first round writes no labels
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng(), folder=tmp_path)
    loop.add(episodes(1, 2, 3))
    loop.round(3)
    log = tmp_path / "labels.jsonl"
    with full_disk(log.stat().st_size + 20), pytest.raises(StorageError, match="free disk space"):
        loop.round(3)
    assert len(loop.buffer) == len(read_labels(log)) == 0
    assert loop.round(3).pairs.tolist() == [0, 1, 2]
    assert len(read_labels(log)) == 3


def test_episodes_that_do_not_fit_on_the_disk_stay_in_memory(tmp_path):
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    loop.add(episodes(1, 2))
    with full_disk(100), pytest.raises(StorageError, match="free disk space"):
        loop.round(1)
    assert loop.round(1).pairs.tolist() == [0]


def test_rounds_keep_no_file_open(tmp_path):
    """Forty rounds, and the run that goes on with them, by ten files more than are open now."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    loop = FeedbackLoop(SyntheticOracle(1.0), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    with open(os.devnull) as file:  # the lowest number that is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno() + 10, hard))
    try:
        for number in range(40):
            loop.add(episodes(number, 0.0))
            loop.round(number + 1)
        state = loop.state_dict()
        loop.close()
        buffer = PreferenceBuffer()
        again = FeedbackLoop(SyntheticOracle(1.0), buffer, rng=rng(), folder=tmp_path)
        again.load_state_dict(state)
        again.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list((tmp_path / "online").iterdir())) == 40
    assert [one.true_cost for one in buffer.trajectories[::2]] == list(range(40))


def test_a_query_that_cannot_be_written_is_asked_when_there_is_space_again(tmp_path):
    oracle = FolderOracle(tmp_path / "asked")
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng(), folder=tmp_path)
    loop.add(episodes(1, 2))
    with full_disk(100), pytest.raises(StorageError, match="free disk space"):
        loop.round(1)
    assert (len(loop.buffer.trajectories), loop.queries_asked) == (0, 0)
    assert ask(loop, 1) == 1
    assert [t.true_cost for t in loop.buffer.trajectories] == [1, 2]


def test_an_oracle_that_somebody_else_asks_too_is_refused():
    oracle = SyntheticOracle(5)
    loop = FeedbackLoop(oracle, buffer_of(1, 2), rng=rng())
    oracle.submit(loop.buffer.queries(np.array([[0, 1]])))
    with pytest.raises(LabelError, match=r"asked by the loop alone, but it answered queries \[0\]"):
        loop.round(0)


def test_an_oracle_that_answers_a_query_by_the_label_of_a_batch_is_refused(tmp_path):
    """Before anything is logged."""
    oracle = SyntheticOracle(5)
    loop = FeedbackLoop(oracle, PreferenceBuffer(), rng=rng(), folder=tmp_path)
    loop.add(episodes(1, 2))
    oracle.submit = lambda queries: [oracle.submit_batch([queries[0].first])]
    with pytest.raises(LabelError, match=r"a batch by a BatchLabel .*, but got \[BatchLabel"):
        loop.round(1)
    assert read_labels(tmp_path / "labels.jsonl") == []


def test_an_episode_without_true_costs_is_refused_by_the_oracle_that_needs_them():
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng())
    loop.add([Trajectory(np.zeros((1, 1)), np.zeros((1, 1)))] * 2)
    with pytest.raises(MissingCostError):
        loop.round(1)
    assert (len(loop.buffer.trajectories), loop.queries_asked, loop.num_open) == (0, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda loop: FeedbackLoop(loop.oracle, [], rng=rng()),
            "go into a PreferenceBuffer, got l",
        ),
        (lambda loop: FeedbackLoop(loop.oracle, loop.buffer, rng=0), r"got 0; pass np\.random"),
        (lambda loop: loop.label_all([([], 3)]), "go into a PreferenceBuffer, got list"),
        (
            lambda loop: loop.label_all([(loop.buffer, 2.5)]),
            r"num_queries .*, got 2\.5; round it down",
        ),
        (
            lambda loop: loop.add(episode(1)),
            "a sequence of Trajectory, got Trajectory; pass a list",
        ),
        (lambda loop: loop.add([None]), "a sequence of Trajectory, got NoneType"),
        (lambda loop: loop.round("3"), "due is a number of queries, got '3'"),
        (lambda loop: loop.round(3, batch=2.0), r"batch is a number of episodes, got 2\.0"),
    ],
)
def test_a_wrong_type_is_named(wrong, message):
    loop = FeedbackLoop(SyntheticOracle(5), buffer_of(1, 2), rng=rng())
    with pytest.raises(TypeError, match=message):
        wrong(loop)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"due": -1}, "due is a number of queries and must be >= 0, got -1"),
        ({"due": 1, "batch": -1}, "batch is a number of episodes and must be >= 0, got -1"),
        ({"due": 1, "wait": -1}, "wait is in seconds and must be >= 0, got -1; 0 never waits"),
        ({"due": 1, "wait": math.nan}, "must be >= 0, got nan"),
    ],
)
def test_a_negative_number_is_refused(options, message):
    loop = FeedbackLoop(SyntheticOracle(5), buffer_of(1, 2), rng=rng())
    with pytest.raises(ValueError, match=message):
        loop.round(**options)


# -- Killed and resumed ----------------------------------------------------------------------

NOISE = Teacher(preference_noise=0.3, safety_noise=0.3)
CALLS = ["label valid", "label", *["add", "round"] * 6]
BATCHES = ["label valid", "label", *["add", "round with a batch"] * 6]
GRIDS = ["label valid", "label", *["add many", "round with grids"] * 6]


def synthetic(_):
    return SyntheticOracle(5, teacher=NOISE, budget=40, rng=rng(7))


def late(folder):
    return DelayedOracle(synthetic(folder), rounds=2)


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
            number = self.step // 2  # of the round
            if call == "label valid":
                label(self.loop, self.valid, 2)
            elif call == "label":
                label(self.loop, self.buffer, 8)
            elif call == "add":
                self.loop.add(episodes(*self.rng.uniform(0, 10, 4)))
            elif call == "add many":
                self.loop.add(episodes(*self.rng.uniform(0, 10, 30)))
            elif call == "round with grids":
                self.note(self.loop.round(3 * number, model=Judge(7), grids=True))
            elif call == "round":
                self.note(self.loop.round(2 * number))
            else:
                self.note(self.loop.round(4 * number, batch=3))
            self.step += 1

    def note(self, answers):
        self.found.append((answers.pairs.tolist(), repr(replace(answers, pairs=None))))

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
    [(one, calls) for one in (synthetic, late, short) for calls in (CALLS, BATCHES, GRIDS)],
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
        label(again, buffer, 10)
    assert len(buffer) == 0
    assert len(read_labels(tmp_path / "labels.jsonl")) == 10


def test_a_log_that_is_shorter_than_the_state_knows_is_refused(tmp_path):
    cut = Session(synthetic, tmp_path)
    cut.run(4)
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
    loop.round(1)
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

    def play(loop, number):
        loop.add(episodes(2 * number, 2 * number + 1))
        return loop.round(number).pairs.tolist()

    loop = begin()
    play(loop, 1)
    state, drawn = loop.state_dict(), draws.bit_generator.state
    play(loop, 2)
    play(loop, 3)
    answer(asked, 2, Label(0, 0, 1))
    answer(asked, 3, Label(1, 1, 0))
    assert len(loop.round(3).pairs) == 2
    loop.close()
    loop.oracle.close()

    again = begin()
    again.load_state_dict(state)
    assert again.num_open == 1
    answer(asked, 1, Label(0.5, 1, 1))
    assert again.round(1).pairs.tolist() == [0]
    draws.bit_generator.state = drawn
    assert play(again, 2) + play(again, 3) == [1, 2]
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
    with suppress(ConnectionError):  # if the function was quick
        loop.round(1)
    state = loop.state_dict()
    loop.close()
    loop.oracle.close()
    again = begin(lambda _: Label(0.5, 1, 1))
    again.load_state_dict(state)
    assert again.round(1, wait=math.inf).pairs.tolist() == [0]
    assert again.queries_used == 1


def test_late_answers_of_a_folder_are_late_once_more_after_a_restart(tmp_path):
    asked = tmp_path / "asked"

    def begin():
        oracle = DelayedOracle(FolderOracle(asked), rounds=1)
        return FeedbackLoop(oracle, PreferenceBuffer(), rng=rng(), folder=tmp_path)

    loop = begin()
    loop.add(episodes(1, 2))
    loop.round(1)
    answer(asked, 1, Label(0.5, 1, 1))
    assert len(loop.round(1).pairs) == 0  # but one that came before the person's answer
    state = loop.state_dict()
    del loop  # with its oracle: that ends the locks
    again = begin()
    again.load_state_dict(state)
    assert [len(again.round(1).pairs) for _ in range(2)] == [0, 1]


def test_unused_labels_are_set_aside_for_a_run_that_goes_on_with_other_episodes(tmp_path):
    loop = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    state = loop.state_dict()
    loop.add(episodes(1, 9))
    loop.round(1)
    loop.close()
    again = FeedbackLoop(SyntheticOracle(5), PreferenceBuffer(), rng=rng(), folder=tmp_path)
    again.load_state_dict(state)
    assert again.set_unused_labels_aside() == 1
    again.add(episodes(3, 4))
    again.round(1)
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


def test_marked_steps_are_learned_from_and_outlive_the_process(tmp_path):
    """Steps that cost are marked; each of the labelled episodes is one, by its number of times."""

    def steps(*costs):
        return Trajectory(np.zeros((len(costs), 1)), np.zeros((len(costs), 1)), np.array(costs))

    def make():
        oracle = SyntheticOracle(5, marks=True)
        return FeedbackLoop(oracle, PreferenceBuffer(), rng=rng(), folder=tmp_path)

    loop = make()
    loop.add([steps(0, 2, 2, 0), steps(0, 0, 0, 0), steps(9, 0, 0, 1)])
    loop.round(3)
    found = {tuple(mark.trajectory.costs): mark.unsafe.tolist() for mark in loop.buffer.marks}
    assert found == {
        (0, 2, 2, 0): [0, 1, 1, 0],
        (0, 0, 0, 0): [0, 0, 0, 0],
        (9, 0, 0, 1): [1, 0, 0, 1],
    }
    assert len(loop.buffer.marks) == 6
    state = loop.state_dict()
    loop.close()
    again = make()
    again.load_state_dict(state)
    assert again.buffer.stretches == loop.buffer.stretches
    assert read_labels(tmp_path / "labels.jsonl")[0].first_unsafe is not None
