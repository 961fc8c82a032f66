"""People who answer in a label folder, scripted."""

from pathlib import Path

from pbcrl.label.store import LabelStore
from pbcrl.trajectory import Label, Query


def answer(folder: Path, number: int, label: Label, *, annotator: str = "Ada") -> None:
    """Give a first answer to a question, or correct the person's earlier one."""
    store = LabelStore(folder)
    before = {event.query: event.id for event in store.events(annotator=annotator)}
    store.answer(number, label, annotator=annotator, replaces=before.get(number))
    store.close()


def questions(folder: Path) -> list[int]:
    """The numbers of all questions of a folder."""
    store = LabelStore(folder)
    found = [question.id for question in store.questions()]
    store.close()
    return found


def query_of(folder: Path, number: int) -> Query:
    """What a question about a pair shows."""
    store = LabelStore(folder)
    first, second = (store.trajectory(one) for one in store.question(number).members)
    store.close()
    return Query(first, second)
