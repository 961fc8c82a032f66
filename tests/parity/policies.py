"""The fixed policies of the comparison, from observations and the step alone, for both sides.

Those of the point agent are scripted, and calm on purpose. The motor that turns the agent is so
stiff that rounding grows to a radian per second within half a second of turning, in both packages;
the agent is then a millimetre off. A policy that turns this into another way around a hazard, or
into hundreds of steps of waiting inside it, has costs that would need thousands of episodes. So
most cost comes from one crossing of a hazard, and bumps are few. `bump` and `bump_and_score`, for
single steps, are not calm.
Those of the robots are small and were found by random search. NumPy alone: the real package's side
has nothing else.
"""

from pathlib import Path

import numpy as np

ROBOTS = dict(np.load(Path(__file__).with_name("robots.npz"), allow_pickle=False))
"""HalfCheetah: weights, (6, 18). Others: log Hz, then sine, cosine and offset of each motor."""

NUM_SENSORS, NUM_BINS, MAX_DISTANCE = 12, 16, 3.0
HEADINGS = np.exp(2j * np.pi * np.arange(64) / 64)


def lidar_of(obs, number):
    start = NUM_SENSORS + NUM_BINS * number
    return obs[:, start : start + NUM_BINS]


def nearest(lidar):
    """Where a lidar's nearest object is, as forward + 1j * left; exact if there is only one."""
    return np.take_along_axis(seen(lidar), lidar.argmax(axis=1)[:, None], axis=1)[:, 0]


def seen(lidar):
    """The nearest object of each bin, (N, 16) complex; empty bins are 3 m away."""
    ahead = np.roll(lidar, -1, axis=1) / np.maximum(lidar, 1e-9)
    angle = np.arange(NUM_BINS) + np.minimum(ahead, 1)
    return MAX_DISTANCE * (1 - lidar) * np.exp(2j * np.pi * angle / NUM_BINS)


def steer_clear(target, things, radii, *, within=0.8):
    """The free heading nearest to that of `target`, and what to make of it, (N,) each.

    A heading is free if it passes each of `things`, (N, M), at more than its radius in `radii`,
    (M,), for as far as `within`. Among things, the way out is taken.

    Returns:
        The heading, whether it is the way out, and the detour in radians.
    """
    rows = np.arange(len(target))
    toward = unit(target)
    gap = np.abs(things) - radii
    nearby = np.where(gap < np.minimum(within, np.abs(target))[:, None], things, 1e9)
    relative = nearby[:, :, None] * np.conj(HEADINGS)  # as seen along each heading
    blocked = ((np.abs(relative.imag) < radii[:, None]) & (relative.real > 0)).any(axis=1)
    turn = np.abs(np.angle(HEADINGS * np.conj(toward)[:, None]))  # (N, 64)
    best = (turn + 10.0 * blocked).argmin(axis=1)
    direct = ~blocked[rows, turn.argmin(axis=1)]
    leaving = (gap < 0).any(axis=1)
    # The way out is away from all that is close: sideways from between two of them.
    close = np.where(gap < 0.1, things, 0)
    toward_one = (unit(close)[:, :, None] * np.conj(HEADINGS)).real.max(
        axis=1, where=(close != 0)[:, :, None], initial=-1
    )
    out = HEADINGS[toward_one.argmin(axis=1)]
    heading = np.where(leaving, out, np.where(direct, toward, HEADINGS[best]))
    return heading, leaving, np.where(leaving | direct, 0.0, turn[rows, best])


def unit(vectors):
    return vectors / np.maximum(np.abs(vectors), 1e-9)


def drive(obs, heading, *, speed, reverse=False):
    """Turn to `heading`, (N,) complex, and go there at `speed` m/s; backwards too if `reverse`."""
    backward = reverse & (heading.real < 0)
    angle = np.angle(np.where(backward, -heading, heading))
    ahead = np.where(reverse, heading.real, np.abs(angle) < 0.5)
    thrust = np.clip(0.3 * (speed * ahead - obs[:, 3]), -0.05, 0.05)
    return np.stack([thrust, np.clip(2 * angle, -1, 1)], axis=1)


def cross(obs, hazard, things, radii):
    """Around `things` to a hazard, straight through it, and wait behind it."""
    heading, _, _ = steer_clear(hazard, things, radii)
    inside = np.abs(hazard) < 0.3
    passed = (np.abs(hazard) < 0.6) & (hazard.real < 0) & ~inside
    heading = np.where(inside | passed, 1.0, heading)
    return drive(obs, heading, speed=np.where(passed, 0.0, 0.8))


def goal(obs, step):
    """Through the nearest hazard; then to one goal after another, close around the hazards."""
    place, hazards = nearest(lidar_of(obs, 0)), seen(lidar_of(obs, 1))
    if step < 150:
        vase = nearest(lidar_of(obs, 2))
        return cross(obs, nearest(lidar_of(obs, 1)), vase[:, None], np.array([0.35]))
    heading, leaving, _ = steer_clear(place, hazards, np.full(NUM_BINS, 0.22))
    return drive(obs, heading, speed=0.5, reverse=leaving)


def button(obs, step):
    """Close to the goal button around all else; every 200 steps a charge at it from there.

    The faster it comes, the less do the engines disagree about when: the next goal depends on that.
    """
    place, buttons = nearest(lidar_of(obs, 1)), seen(lidar_of(obs, 0))
    others = np.where(np.abs(buttons - place[:, None]) < 0.3, 1e9, buttons)
    things = np.concatenate([others, seen(lidar_of(obs, 2)), seen(lidar_of(obs, 3))], axis=1)
    heading, leaving, detour = steer_clear(place, things, np.repeat([0.25, 0.25, 0.4], NUM_BINS))
    near = (np.abs(place) < 0.5) & ~leaving
    charging = (step % 200 >= 160) & (np.abs(place) < 0.7) & (np.abs(np.angle(place)) < 0.3)
    speed = np.where(charging, 1.5, np.where(near | (detour > 1.6), 0.0, 0.5))
    return drive(
        obs, np.where(near | charging, place, heading), speed=speed, reverse=leaving & ~charging
    )


def push(obs, step):
    """Through the nearest hazard; then around the box, and against it until it is almost there.

    Hazards on this way are crossed as well: a choice of when to enter one, or to wait, would make
    hundreds of steps of cost depend on rounding.
    """
    place, box = nearest(lidar_of(obs, 0)), nearest(lidar_of(obs, 3))
    hazard, pillar = nearest(lidar_of(obs, 1)), nearest(lidar_of(obs, 2))
    things, radii = np.stack([pillar, box], axis=1), np.array([0.4, 0.5])
    if step < 200:
        return cross(obs, hazard, things, radii)
    pushing, around = pushing_side(place, box, things, radii)
    done = np.abs(place - box) < 0.4
    leaving = done & (np.abs(hazard) < 0.36)
    heading = np.where(leaving, -box, np.where(pushing, box, around))
    return drive(obs, heading, speed=np.where(done & ~leaving, 0.0, 0.5), reverse=leaving)


def pushing_side(place, box, things, radii):
    """Whether the box is between agent and goal, and else the heading around to where it is."""
    beyond = unit(place - box)
    # The closer, the more askew it may push: what begins well is not given up at once.
    allowed = np.interp(np.abs(box), [0.45, 0.6, 0.8, 0.81], [0.6, 0.15, 0.15, 0])
    around, _, _ = steer_clear(box - 0.65 * beyond, things, radii)
    return np.abs(np.angle(box * np.conj(beyond))) < allowed, around


def bump(obs, step):
    """Against one thing after another, of one kind for 60 steps."""
    kinds = (obs.shape[1] - NUM_SENSORS) // NUM_BINS
    return drive(obs, nearest(lidar_of(obs, step // 60 % kinds)), speed=0.8)


def bump_and_score(obs, step):
    """`bump` for 300 steps, then the box into the goal."""
    if step < 300:
        return bump(obs, step)
    kinds = (obs.shape[1] - NUM_SENSORS) // NUM_BINS
    place, box = nearest(lidar_of(obs, 0)), nearest(lidar_of(obs, kinds - 1))
    pushing, around = pushing_side(place, box, box[:, None], np.array([0.5]))
    return drive(obs, np.where(pushing, box, around), speed=0.5)


def halfcheetah(obs, _step):
    """A gait fed back from positions and velocities, a little too fast now and then."""
    scaled = np.concatenate([obs[:, :8], 0.1 * obs[:, 8:], np.ones((len(obs), 1))], axis=1)
    # Row by row, so that a batch of any size is rounded alike.
    return np.tanh(np.array([ROBOTS["halfcheetah"] @ row for row in scaled]))


def walker2d(obs, step):
    """A gait that ends in a fall."""
    return np.tile(gait(ROBOTS["walker2d"], 0.008 * step), (len(obs), 1))


def humanoid(obs, step):
    """A lunge that ends in a fall."""
    return np.tile(0.4 * gait(ROBOTS["humanoid"], 0.015 * step), (len(obs), 1))


def gait(numbers, time):
    phase = 2 * np.pi * np.exp(numbers[0]) * time
    sine, cosine, offset = numbers[1:].reshape(3, -1)
    return np.clip(sine * np.sin(phase) + cosine * np.cos(phase) + offset, -1, 1)


POLICIES = {
    "goal": goal,
    "button": button,
    "push": push,
    "bump": bump,
    "bump_and_score": bump_and_score,
    "halfcheetah": halfcheetah,
    "walker2d": walker2d,
    "humanoid": humanoid,
}
