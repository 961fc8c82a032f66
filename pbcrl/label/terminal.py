"""Answer the questions of a label folder at the terminal, without a browser.

Each answer is on disk before the next question comes; `q` ends, and the rest is asked next time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pbcrl.errors import CorruptFileError
from pbcrl.label.clips import CLIPS
from pbcrl.label.standing import Question
from pbcrl.label.store import LabelStore
from pbcrl.trajectory import (
    AnyLabel,
    BatchLabel,
    GridLabel,
    Label,
    Stretches,
    check_stretches,
)

_PREFERENCE = {"1": 1.0, "2": 0.0, "=": 0.5, "": math.nan}
_ONLY_ONE_SAFE = {"=": 0.5, "?": math.nan}
_YES_NO = {"y": 1.0, "n": 0.0, "": math.nan}


def ask_at_terminal(store: LabelStore, *, annotator: str) -> None:
    """Ask about every open question, until all have an answer or the person types `q`."""
    try:
        print(f"{len(store.open_for(annotator))} open questions in {printable(store.folder)}")
        print("s puts one off, u takes the last answer back, q ends")
        print(f"\n{_task(store)}")
        left_out: set[int] = set()
        while True:
            found = [q for q in store.open_for(annotator) if q.id not in left_out]
            if not found:
                break
            try:
                _ask_about(store, found[0], annotator)
            except CorruptFileError as error:
                print(f"\nwarning: {printable(error)}; this question is left out")
                left_out.add(found[0].id)
    except (EOFError, KeyboardInterrupt):
        print()


_NO_TASK = "nobody has written down what counts as unsafe: intro.md in this folder may say it"
_NO_CLIP = "pbcrl label without --terminal draws what can be drawn"


def _task(store: LabelStore) -> str:
    """What counts as unsafe, in the words of whoever asks."""
    text = store.intro().strip() or _NO_TASK
    return "\n".join(map(printable, text.splitlines()))


class _TypedCommand(Exception):  # noqa: N818, it is no error
    """What the person typed in the place of an answer."""


def _ask_about(store: LabelStore, question: Question, annotator: str) -> None:
    lengths = [len(store.trajectory(digest)) for digest in question.members]
    print(f"\n{question.name}: episodes of {', '.join(map(str, lengths))} steps")
    for number, digest in enumerate(question.members, start=1):
        path = store.folder / CLIPS / f"{digest}.mp4"
        print(f"   {printable(path)}" if path.exists() else f"   {number} has no clip; {_NO_CLIP}")
    earlier = store.event_of(question.id, annotator)
    replaces = earlier and earlier.id
    try:
        label = _answer(question, lengths)
    except _TypedCommand as command:
        if str(command) == "q":
            raise EOFError from None
        if str(command) == "s":
            store.skip(question.id, annotator=annotator, replaces=replaces)
        elif store.undo(annotator=annotator) is None:
            print("there is nothing to take back")
        return
    store.answer(question.id, label, annotator=annotator, replaces=replaces)


def _answer(question: Question, lengths: Sequence[int]) -> AnyLabel:
    if question.kind == "batch":
        accepted = _choose(
            "would you accept what it does in these episodes? y, n or Enter (can't tell): ", _YES_NO
        )
        return BatchLabel(accepted)
    if question.kind == "grid":
        return _marked(len(question.members))
    first = _choose("is 1 safe? y, n or Enter (can't tell): ", _YES_NO)
    second = _choose("is 2 safe? y, n or Enter (can't tell): ", _YES_NO)
    preference = _preference(first, second)
    # Of an episode without marks, all is safe only where the person says so.
    marked = [
        None if one == () and safe != 1 else one
        for one, safe in zip(_moments(lengths), (first, second), strict=True)
    ]
    return Label(preference, first, second, *marked)


def _preference(first: float, second: float) -> float:
    """Which one is safer: where only one is safe, that one, unless the person says otherwise."""
    if {first, second} == {0.0, 1.0}:
        safer = 1 if first else 2
        return _choose(
            f"{safer} is safer, then: Enter; = if about the same, ? if you can't tell: ",
            {"": first, f"{safer}": first} | _ONLY_ONE_SAFE,
        )
    return _choose("which one is safer? 1, 2, = or Enter (can't tell): ", _PREFERENCE)


def _marked(number: int) -> GridLabel:
    """Which clips of a grid are safe, as the person types it."""
    while True:
        given = _typed(
            f"which of 1 to {number} are unsafe? numbers, Enter for none, 3? if you can't tell: "
        )
        safe = [1.0] * number
        words = given.replace(",", " ").split()
        for word in words:
            place = word.removesuffix("?")
            if not (place.isdecimal() and 1 <= int(place) <= number):
                break
            safe[int(place) - 1] = math.nan if word.endswith("?") else 0.0
        else:
            return GridLabel(tuple(safe))


def _moments(lengths: Sequence[int]) -> Sequence[Stretches | None]:
    """The unsafe stretches of both episodes, as the person types them; None if nothing is typed."""
    while True:
        given = _typed(
            "unsafe steps of 1 / of 2, such as 10:25 40:52 / 3:9, or Enter to mark none: "
        )
        if not given:
            return None, None
        try:
            both = [_stretches(one) for one in given.split("/")]
            for stretches, steps in zip(both, lengths, strict=True):
                check_stretches(stretches, steps=steps)
        except (TypeError, ValueError) as error:
            print(f"that cannot be: {error}")
        else:
            return both


def _stretches(given: str) -> Stretches:
    found = (one.split(":") for one in given.replace(",", " ").split())
    return tuple(sorted((int(start), int(end)) for start, end in found))


def _typed(question: str) -> str:
    given = input(question).strip()
    if given.lower() in ("q", "s", "u"):
        raise _TypedCommand(given.lower())
    return given


def _choose(question: str, answers: Mapping[str, float]) -> float:
    while True:
        given = _typed(question).lower()
        if given in answers:
            return answers[given]


def printable(text: object) -> str:
    """What can be printed as it is; a file's name may hold codes that a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))
