"""The fixed policies of the comparison: scripted, from observations alone, the same on both sides.

Each is good enough at its task to meet goals, and clumsy enough to pay costs and to bump into what
stands around. NumPy alone: the real package's side has nothing else.
"""

import numpy as np

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


def goal(obs, _step):
    """To the goal, around the hazards, through the vase."""
    place, hazards = nearest(lidar_of(obs, 0)), seen(lidar_of(obs, 1))
    heading, leaving, _ = steer_clear(place, hazards, np.full(NUM_BINS, 0.25))
    return drive(obs, heading, speed=0.5, reverse=leaving)


def button(obs, _step, radii=(0.25, 0.25, 0.4), speed=0.5, patience=1.6):
    """To the goal button around the rest; where the detour is too long, wait."""
    place = nearest(lidar_of(obs, 1))
    buttons = seen(lidar_of(obs, 0))
    buttons = np.where(np.abs(buttons - place[:, None]) < 0.3, 1e9, buttons)
    things = np.concatenate([buttons, seen(lidar_of(obs, 2)), seen(lidar_of(obs, 3))], axis=1)
    heading, leaving, detour = steer_clear(place, things, np.repeat(radii, NUM_BINS))
    return drive(obs, heading, speed=np.where(detour > patience, 0.0, speed), reverse=leaving)


def push(obs, _step, radius=0.36):
    """Around the box to its far side, then against it, as long as no hazard is ahead."""
    place, box = nearest(lidar_of(obs, 0)), nearest(lidar_of(obs, 3))
    hazards = seen(lidar_of(obs, 1))
    beyond = unit(place - box)
    pushing = (np.abs(np.angle(box * np.conj(beyond))) < 0.4) & (np.abs(box) < 0.75)
    things = np.concatenate([hazards, box[:, None]], axis=1)
    radii = np.append(np.full(NUM_BINS, radius), 0.5)
    around, leaving, _ = steer_clear(box - 0.65 * beyond, things, radii)
    in_the_way = (np.abs(hazards) < radius + 0.1) & ((hazards * np.conj(box)[:, None]).real > 0)
    speed = np.where(pushing & in_the_way.any(axis=1), 0.0, 0.5)
    return drive(obs, np.where(pushing, box, around), speed=speed, reverse=leaving & ~pushing)


def bump(obs, step):
    """Against one thing after another, of one kind for 60 steps."""
    kinds = (obs.shape[1] - NUM_SENSORS) // NUM_BINS
    return drive(obs, nearest(lidar_of(obs, step // 60 % kinds)), speed=0.8)


POLICIES = {"goal": goal, "button": button, "push": push, "bump": bump}
