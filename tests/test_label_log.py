import json
import math
import zlib
from pathlib import Path

import numpy as np
import pytest

from pbcrl.data.label_log import LabelLog, query_digest, read_labels
from pbcrl.errors import (
    BudgetError,
    CorruptFileError,
    FormatVersionError,
    LabelError,
    StorageError,
)
from pbcrl.trajectory import BatchLabel, GridLabel, Label, Query, Trajectory

from .damage import full_disk, read_only, with_flipped_bits

LABELS = [Label(1.0, 1.0, 0.0), Label(0.5, math.nan, 0.0), BatchLabel(math.nan)]


def label_log(path: Path) -> Path:
    LabelLog(path).append(LABELS)
    return path


def test_labels_come_back_in_order_with_nan_where_none_was_given(tmp_path):
    log = LabelLog(tmp_path / "made" / "labels.jsonl")
    assert read_labels(log.path) == []
    log.append(LABELS[:1])
    log.append([])
    log.append(LABELS[1:])
    assert repr(read_labels(log.path)) == repr(LABELS)  # NaN equals itself only in print


def test_a_label_line_is_readable_json(tmp_path):
    header, _, second, _ = label_log(tmp_path / "log").read_text().splitlines()
    assert json.loads(header) == {"format": "pbcrl-labels", "version": 2}
    entry = json.loads(second)
    assert entry.pop("crc32") > 0
    assert entry == {"preference": 0.5, "first_safe": None, "second_safe": 0.0}


def test_the_label_of_a_batch_has_a_line_of_its_own_form(tmp_path):
    path = tmp_path / "log"
    given = [BatchLabel(1.0), BatchLabel(0.0), BatchLabel(math.nan)]
    LabelLog(path).append(given)
    entries = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [entry.pop("crc32") > 0 for entry in entries] == [True] * 3
    assert entries == [{"batch_safe": 1.0}, {"batch_safe": 0.0}, {"batch_safe": None}]
    assert repr(read_labels(path)) == repr(given)


def test_the_label_of_a_grid_has_a_list(tmp_path):
    path = tmp_path / "log"
    given = [GridLabel((1.0, 0.0, math.nan))]
    LabelLog(path).append(given)
    assert '"grid_safe": [1.0, 0.0, null]' in path.read_text()
    assert repr(read_labels(path)) == repr(given)


def test_marked_steps_are_in_the_line_of_their_label_and_in_no_other(tmp_path):
    path = tmp_path / "log"
    given = [Label(1.0, 0.0, 1.0, ((0, 2), (4, 5)), ()), Label(1.0, 0.0, 1.0)]
    LabelLog(path).append(given)
    first, second = (json.loads(line) for line in path.read_text().splitlines()[1:])
    assert (first["first_unsafe"], first["second_unsafe"]) == ([[0, 2], [4, 5]], [])
    assert "first_unsafe" not in second
    assert read_labels(path) == given


def test_a_label_with_thousands_of_stretches_can_be_read_again(tmp_path):
    """Its line was once longer than a reader took, and all labels of the log were lost with it."""
    stretches = tuple((2 * i, 2 * i + 1) for i in range(20_000))
    log = LabelLog(tmp_path / "log")
    log.append([Label(1.0, 0.0, 0.0, stretches, stretches)])
    assert read_labels(log.path)[0].first_unsafe == stretches


def test_a_label_that_no_reader_would_take_is_refused_before_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("pbcrl.data.label_log._MAX_LINE", 200)
    log = LabelLog(tmp_path / "log")
    log.append(LABELS)
    with pytest.raises(LabelError, match="less than 200 bytes in a log, got one of"):
        log.append([Label(1.0, 0.0, 0.0, tuple((2 * i, 2 * i + 1) for i in range(40)), ())])
    assert repr(read_labels(log.path)) == repr(LABELS)


def test_an_existing_log_is_continued(tmp_path):
    path = label_log(tmp_path / "log")
    LabelLog(path).append([Label(0.25, 0.0, 0.0)])
    assert repr(read_labels(path)) == repr([*LABELS, Label(0.25, 0.0, 0.0)])


def test_a_torn_last_line_is_dropped_with_a_warning_wherever_it_tore(tmp_path):
    path = label_log(tmp_path / "log")
    good = path.read_bytes()
    last_line = good.rindex(b"\n", 0, -1) + 1
    for length in range(last_line + 1, len(good)):
        path.write_bytes(good[:length])
        with pytest.warns(UserWarning, match=rf"last {length - last_line} bytes .* are dropped"):
            assert repr(read_labels(path)) == repr(LABELS[:2])


def test_continuing_a_torn_log_first_removes_the_half_line(tmp_path):
    path = label_log(tmp_path / "log")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.warns(UserWarning, match="half a line"):
        log = LabelLog(path)
    log.append(LABELS[2:])
    assert repr(read_labels(path)) == repr(LABELS)


def test_a_log_that_tore_in_its_first_line_starts_afresh(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"format": "pb')
    with pytest.warns(UserWarning, match="half a line"):
        log = LabelLog(path)
    log.append(LABELS[:1])
    assert read_labels(path) == LABELS[:1]


def test_a_flipped_bit_before_the_last_line_break_is_detected(tmp_path):
    path = label_log(tmp_path / "log")
    *lines, last = path.read_bytes().splitlines(keepends=True)
    for damaged in with_flipped_bits(b"".join(lines) + last[:-1], step=7):
        path.write_bytes(damaged + b"\n")
        with pytest.raises((CorruptFileError, FormatVersionError)):
            read_labels(path)


@pytest.mark.parametrize(
    "line", [b"{}", b"", b"[1]", b"\xff", b"null", b'{"preference": 2}', b"[" * 10**5]
)
def test_damage_inside_a_log_names_the_line_and_stops_appending_too(tmp_path, line):
    path = label_log(tmp_path / "log")
    lines = path.read_bytes().split(b"\n")
    lines[2] = line
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(CorruptFileError, match=r"log is damaged .*: line 3 "):
        read_labels(path)
    with pytest.raises(CorruptFileError, match="line 3"):
        LabelLog(path)


def test_another_file_is_not_continued_as_a_label_log(tmp_path):
    path = tmp_path / "notes"
    path.write_text('{"format": "diary", "version": 1}\n')
    with pytest.raises(CorruptFileError, match="its format is 'diary', not 'pbcrl-labels'"):
        LabelLog(path)
    assert path.read_text().startswith('{"format": "diary"')


def test_a_text_without_a_line_break_is_not_taken_for_a_torn_label_log(tmp_path):
    path = tmp_path / "notes"
    path.write_text("one precious line")
    with pytest.raises(CorruptFileError, match="does not begin as a file of the format"):
        LabelLog(path)
    assert path.read_text() == "one precious line"


def test_labels_that_do_not_fit_on_the_disk_leave_the_log_as_it_was(tmp_path):
    log = LabelLog(label_log(tmp_path / "log"))
    before = log.path.read_bytes()
    with full_disk(len(before) + 100), pytest.raises(StorageError, match="free disk space"):
        log.append(LABELS)
    assert log.path.read_bytes() == before
    log.append(LABELS)
    assert repr(read_labels(log.path)) == repr(LABELS + LABELS)


def test_a_label_log_of_another_version_is_refused(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"format": "pbcrl-labels", "version": 7}\nwhatever\n')
    with pytest.raises(FormatVersionError, match=r"version 2 of pbcrl-labels, but .* version 7"):
        read_labels(path)


def test_a_label_log_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="must be writable"):
        LabelLog(tmp_path / "file" / "log")


def test_a_second_writer_is_refused_before_it_asks_for_labels(tmp_path):
    with LabelLog(tmp_path / "log") as log:
        log.append(LABELS[:1])
        with pytest.raises(StorageError, match=r"one writer at a time, but another one has .*log"):
            LabelLog(tmp_path / "log")
        assert read_labels(log.path) == LABELS[:1]  # reading is free
        log.append(LABELS[:1])
    assert len(read_labels(LabelLog(tmp_path / "log").path)) == 2


def test_a_log_that_was_closed_or_replaced_takes_no_label_in_silence(tmp_path):
    log = LabelLog(label_log(tmp_path / "log"))
    log.path.rename(tmp_path / "moved")
    label_log(tmp_path / "log")
    with pytest.raises(
        StorageError, match=r"was closed, or replaced by another file.*open it again"
    ):
        log.append(LABELS)
    log.path.unlink()
    with pytest.raises(StorageError, match="must be writable, but: No such file"):
        log.append(LABELS)
    log.close()
    with pytest.raises(StorageError, match="was closed"):
        log.append(LABELS)
    assert repr(read_labels(tmp_path / "moved")) == repr(LABELS)


def test_a_log_in_a_read_only_folder_is_read_and_not_continued(tmp_path):
    label_log(tmp_path / "folder" / "log")
    with read_only(tmp_path / "folder") as folder:
        assert repr(read_labels(folder / "log")) == repr(LABELS)
        for name in ("log", "other"):
            with pytest.raises(StorageError, match=rf"{name} must be writable, but: Permission"):
                LabelLog(folder / name)


@pytest.mark.parametrize("device", ["/dev/full", "/dev/zero"])
def test_a_device_is_no_label_log(device):
    for attempt in (LabelLog, read_labels):
        with pytest.raises(StorageError, match="not a regular file"):
            attempt(device)


# -- Lines that moved ------------------------------------------------------------------------


def changed(path: Path, change) -> None:
    header, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([header, *change(lines)]))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda x: [x[1], x[0], x[2]], 2),
        (lambda x: [x[0], x[2]], 3),
        (lambda x: [x[0], x[1], x[1], x[2]], 4),
        (lambda x: x[1:], 2),
        (lambda x: [*x, x[-1]], 5),
    ],
    ids=["swapped", "deleted", "doubled", "first deleted", "last doubled"],
)
def test_lines_that_were_swapped_deleted_or_doubled_are_found(tmp_path, change, line):
    path = label_log(tmp_path / "log")
    changed(path, change)
    with pytest.raises(CorruptFileError, match=rf"line {line} does not match its crc32: .* moved"):
        read_labels(path)


# -- Cutting ---------------------------------------------------------------------------------


def test_labels_that_are_cut_off_lie_in_another_log(tmp_path):
    unused = tmp_path / "unused"
    with LabelLog(label_log(tmp_path / "log")) as log:
        log.cut(1, unused=unused)
        assert log.labels == LABELS[:1]
        log.append([Label(0.25, 0, 0)])
    assert read_labels(tmp_path / "log") == [LABELS[0], Label(0.25, 0, 0)]
    assert repr(read_labels(unused)) == repr(LABELS[1:])


# -- Queries ---------------------------------------------------------------------------------


def episode(value):
    return Trajectory(np.full((3, 1), value), np.zeros((3, 1)))


def query(first, second):
    return Query(episode(first), episode(second))


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


def test_a_log_is_continued_with_all_that_was_asked_and_answered(tmp_path):
    first, second, _ = LABELS
    with LabelLog(tmp_path / "log") as log:
        log.ask(["a", "b", "a", "c"])
        log.answer("b", second)
        log.answer("a", first)
        log.ask(["b", "a"])
    again = LabelLog(tmp_path / "log")
    assert repr(again.answers) == repr({"a": first, "b": second, "c": None})
    assert repr(again.labels) == repr(read_labels(again.path)) == repr([second, first])
    assert again.queries_asked == 3


def test_a_query_and_its_answer_are_readable_json(tmp_path):
    log = LabelLog(tmp_path / "log")
    log.ask(["a"])
    log.answer("a", LABELS[1])
    header, *lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert header == {"format": "pbcrl-labels", "version": 2}
    assert all(line.pop("crc32") for line in lines)
    assert lines == [
        {"query": "a"},
        {"query": "a", "preference": 0.5, "first_safe": None, "second_safe": 0.0},
    ]


def test_what_was_not_asked_cannot_be_answered(tmp_path):
    with pytest.raises(BudgetError, match="only what was asked can be answered, but b was not"):
        LabelLog(tmp_path / "log").answer("b", LABELS[0])


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"query": 7},
        {"query": "a", "preference": 10**400, "first_safe": 1.0, "second_safe": 1.0},
        {"query": "a", "preference": 1.0},
        {"query": "a", "batch_safe": 1.0},
        {"batch_safe": 0.5},
        {"query": "a", "grid_safe": [1.0]},
        {"grid_safe": []},
        {"grid_safe": 1.0},
        {"preference": 1.0, "first_safe": 0.0, "second_safe": 1.0, "first_unsafe": [[2, 1]]},
        {"preference": 1.0, "first_safe": 0.0, "second_safe": 1.0, "first_unsafe": 3},
    ],
)
def test_a_line_that_is_neither_query_nor_label_is_named(tmp_path, entry):
    path = label_log(tmp_path / "log")
    lines = path.read_text().splitlines()[:1]
    crc32 = zlib.crc32(f"{lines[0]}\n".encode())
    for one in ({"query": "a"}, entry):
        crc32 = zlib.crc32(json.dumps(one).encode(), crc32)
        lines.append(json.dumps({**one, "crc32": crc32}))
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(CorruptFileError, match="line 3 is no label and no query"):
        LabelLog(path)


def test_a_query_that_does_not_fit_on_the_disk_is_not_noted(tmp_path):
    log = LabelLog(tmp_path / "log")
    before = log.path.read_bytes()
    with full_disk(len(before) + 20), pytest.raises(StorageError, match="free disk space"):
        log.ask(["a"])
    assert log.path.read_bytes() == before
    assert log.queries_asked == 0
