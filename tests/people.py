"""People who answer in a label folder, scripted."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pbcrl.label.store import STORE, LabelStore
from pbcrl.trajectory import AnyLabel, BatchLabel, GridLabel, Label, Query, Trajectory


def answer(folder: Path, number: int, label: AnyLabel, *, annotator: str = "Ada") -> None:
    """Give a first answer to a question, or correct the person's earlier one."""
    store = LabelStore(folder)
    before = store.event_of(number, annotator)
    store.answer(number, label, annotator=annotator, replaces=before and before.id)
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


@contextmanager
def answering(
    folder: Path, cost: Callable[[Trajectory], float], *, limit: float, annotator: str = "Ada"
) -> Iterator[None]:
    """Somebody answers all that is asked, as soon as it is, by a rule on what can be seen."""
    stop = threading.Event()

    def person() -> None:
        while not stop.wait(0.02):
            if not (folder / STORE).exists():
                continue
            store = LabelStore(folder)
            while not stop.is_set() and (question := store.next_for(annotator)):
                costs = [cost(store.trajectory(digest)) for digest in question.members]
                label: AnyLabel
                if question.kind == "batch":
                    label = BatchLabel(float(sum(costs) / len(costs) <= limit))
                elif question.kind == "grid":
                    label = GridLabel(tuple(float(one <= limit) for one in costs))
                else:
                    first, second = costs
                    preference = 0.5 if first == second else float(first < second)
                    label = Label(preference, float(first <= limit), float(second <= limit))
                store.answer(question.id, label, annotator=annotator, seconds=1.0)
            store.close()

    thread = threading.Thread(target=person)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
