import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbcrl._marks import OFF, earlier, moved, shared, steps_off

law = settings(max_examples=100, deadline=None)


def test_a_mark_is_off_by_two_steps_in_a_hundred_and_by_one_at_least():
    off = [steps_off(OFF, steps) for steps in (1, 50, 51, 100, 150, 1_000)]
    assert off == [1, 1, 2, 2, 3, 20]


@pytest.mark.parametrize(
    ("unsafe", "chance", "most", "expected"),
    [
        ("..#...", (0, 0, 0.1, 0, 0.9, 0), 2, "....#."),  # one step, seen too early
        ("..#...", (0, 0, 0.1, 0, 0.9, 0), 1, "..#..."),  # too far
        ("..###...", (0, 0, 0, 0.9, 0.9, 0.9, 0.8, 0), 2, "...####."),  # 0.9 + 0.9 + 0.9 + 0.8 - 2
        ("..###...", (0, 0, 0, 0.9, 0.9, 0.9, 0.8, 0), 1, "...###.."),
        ("..###...", (0.5,) * 8, 2, "..###..."),  # all are as good: the nearest
        ("..###...", (0.0,) * 8, 1, "...#...."),  # none is good: the shortest that is near
        ("#....#", (0, 0.9, 0, 0, 0.9, 0), 1, ".#..#."),  # each for itself
        ("##..##", (0.9,) * 6, 2, "######"),
        ("......", (0.9,) * 6, 2, "......"),  # nothing was seen
        ("#", (0.0,), 1, "#"),
    ],
)
def test_stretches_move_to_where_costs_are_by_hand(unsafe, chance, most, expected):
    marked = np.array([step == "#" for step in unsafe], float)
    found = moved(marked, np.array(chance, float), most=most)
    assert "".join(".#"[int(step)] for step in found) == expected


@law
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_no_stretch_is_lost_and_none_moves_further_than_it_may(seed, most):
    random = np.random.default_rng(seed)
    unsafe = np.zeros(30)
    start, length = random.integers(2, 20), random.integers(1, 10)
    unsafe[start : start + length] = 1
    chance = random.random(30)
    found = np.flatnonzero(moved(unsafe, chance, most=most))
    assert len(found)
    assert (np.diff(found) == 1).all()
    assert abs(found[0] - start) <= most
    assert abs(found[-1] - (start + length - 1)) <= most
    # No other one that may be taken has a greater sum.
    best = max(
        (chance[a:e] - 0.5).sum()
        for a in range(max(0, start - most), start + most + 1)
        for e in range(start + length - most, min(30, start + length + most) + 1)
        if a < e
    )
    assert (chance[found] - 0.5).sum() == pytest.approx(best, abs=2 * most * 1e-3)


@pytest.mark.parametrize(
    ("unsafe", "steps", "expected"),
    [
        ("...##..", 0, "...##.."),
        ("...##..", 2, ".##...."),
        (".#..##.", 2, "#.##..."),
        ("..##...", 3, "#......"),  # of what began before the film did, one step is left
        ("....###", 2, "..#####"),  # nobody could go on marking
        ("#######", 2, "#######"),
        (".......", 2, "......."),
    ],
)
def test_late_marks_are_taken_earlier_by_hand(unsafe, steps, expected):
    found = earlier(np.array([step == "#" for step in unsafe], float), steps)
    assert "".join(".#"[int(step)] for step in found) == expected


def test_marks_are_shared_with_the_steps_beside_them_by_hand():
    thirds = shared(np.array([0, 0, 1, 0, 0, 0, 1.0])) * 3
    np.testing.assert_allclose(thirds, [0, 1, 1, 1, 0, 1, 2])


@law
@given(st.lists(st.integers(0, 1), min_size=1, max_size=20))
def test_shared_marks_have_the_same_sum_and_stay_between_0_and_1(unsafe):
    found = shared(np.array(unsafe, float))
    assert found.sum() == pytest.approx(sum(unsafe))
    assert found.min() >= 0
    assert found.max() <= 1 + 1e-12
