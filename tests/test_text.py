"""Labelled responses are read as they were meant: all three kinds of rows, and what is wrong."""

import gzip
import json
import math
import sys

import numpy as np
import pytest

from pbcrl import Label
from pbcrl.errors import CorruptFileError, LabelError, StorageError
from pbcrl.llm.text import TextPair, helpfulness, read_pairs

SAFE_RLHF = {
    "prompt": "How do I open a lock?",
    "response_0": "Call a locksmith.",
    "response_1": "Break it.",
    "is_response_0_safe": True,
    "is_response_1_safe": False,
    "better_response_id": 1,
    "safer_response_id": 0,
    "response_0_severity_level": 0,
}
CONTRADICTORY = {**SAFE_RLHF, "safer_response_id": 1}


def write(path, *rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(path, seed=0, **options):
    return read_pairs(path, rng=np.random.default_rng(seed), **options)


def in_file_order(pair):
    """The pair as its row has it, whichever way it was swapped."""
    if pair.first == SAFE_RLHF["response_0"]:
        return pair
    mu, first, second = pair.label.preference, pair.label.first_safe, pair.label.second_safe
    label = Label(1 - mu, second, first)
    return TextPair(pair.prompt, pair.second, pair.first, label, 1 - pair.first_better)


def test_a_row_of_safe_rlhf_says_who_is_safer_who_is_safe_and_who_is_more_helpful(tmp_path):
    (pair,) = read(write(tmp_path / "a.jsonl", SAFE_RLHF))
    expected = TextPair(
        "How do I open a lock?", "Call a locksmith.", "Break it.", Label(1.0, 1.0, 0.0), 0.0
    )
    assert in_file_order(pair) == expected


def test_both_orders_of_a_pair_occur_and_say_the_same(tmp_path):
    pairs = read(write(tmp_path / "a.jsonl", *[SAFE_RLHF] * 100))
    firsts = [pair.first for pair in pairs]
    assert 30 < firsts.count("Break it.") < 70
    assert len({in_file_order(pair) for pair in pairs}) == 1


NO_PYARROW = "parquet files need pyarrow, and that NumPy 2"


def test_the_same_seed_gives_the_same_order(tmp_path):
    path = write(tmp_path / "a.jsonl", *[SAFE_RLHF] * 20)
    assert read(path, seed=3) == read(path, seed=3)


def test_jsonl_gz_and_parquet_hold_the_same_pairs(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason=NO_PYARROW, exc_type=ImportError)
    import pyarrow

    rows = [SAFE_RLHF, {**SAFE_RLHF, "is_response_1_safe": None, "prompt": "Wie? 锁 🔒\u2028 ok"}]
    plain = read(write(tmp_path / "a.jsonl", *rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for path in (write(tmp_path / "a.jsonl.gz", *rows), tmp_path / "a.parquet"):
        assert repr(read(path)) == repr(plain)  # NaN != NaN
    assert plain[1].prompt == "Wie? 锁 🔒\u2028 ok"
    assert math.isnan(in_file_order(plain[1]).label.second_safe)


def test_the_chosen_response_of_trl_is_the_safer_one(tmp_path):
    row = {"prompt": "p", "chosen": SAFE_RLHF["response_0"], "rejected": "no"}
    (pair,) = map(in_file_order, read(write(tmp_path / "a.jsonl", row)))
    assert (pair.first, pair.second, pair.label.preference) == (row["chosen"], "no", 1.0)
    assert np.isnan([pair.label.first_safe, pair.label.second_safe, pair.first_better]).all()
    labelled = {**row, "chosen_safe": 1, "rejected_safe": 0}
    (pair,) = map(in_file_order, read(write(tmp_path / "b.jsonl", labelled)))
    assert pair.label == Label(1.0, 1.0, 0.0)


def test_a_row_of_beavertails_is_a_safety_label_alone(tmp_path):
    row = {"prompt": "p", "response": "r", "category": {}, "is_safe": False}
    (pair,) = read(write(tmp_path / "a.jsonl", row))
    assert (pair.first, pair.second, pair.label.first_safe) == ("r", None, 0.0)
    assert np.isnan([pair.label.preference, pair.label.second_safe]).all()


@pytest.mark.parametrize(
    "wrong",
    [
        CONTRADICTORY,
        {**SAFE_RLHF, "response_1": SAFE_RLHF["response_0"], "is_response_1_safe": True},
        {"prompt": "p", "chosen": "a", "rejected": "b", "chosen_safe": 0, "rejected_safe": 1},
    ],
    ids=["the unsafe one is safer", "equal texts", "chosen but unsafe"],
)
def test_contradictory_rows_are_refused_dropped_or_kept(tmp_path, wrong):
    path = write(tmp_path / "a.jsonl", SAFE_RLHF, wrong)
    for seed in range(4):  # in either order of the pair
        with pytest.raises(LabelError, match="line 2, calls an unsafe response safer"):
            read(path, seed=seed)
        with pytest.warns(UserWarning, match="1 contradictory rows were dropped"):
            assert len(read(path, seed=seed, conflicts="drop")) == 1
        assert [p.is_contradictory for p in read(path, seed, conflicts="keep")] == [False, True]


def test_two_safe_or_two_unsafe_responses_may_be_ranked_either_way(tmp_path):
    rows = [
        {
            **SAFE_RLHF,
            "is_response_0_safe": safe,
            "is_response_1_safe": safe,
            "safer_response_id": i,
        }
        for safe in (True, False)
        for i in (0, 1)
    ]
    assert len(read(write(tmp_path / "a.jsonl", *rows))) == 4


def test_a_template_surrounds_the_prompt_even_if_that_has_braces(tmp_path):
    row = {**SAFE_RLHF, "prompt": "{x} {prompt}"}
    (pair,) = read(write(tmp_path / "a.jsonl", row), template="USER: {prompt} ASSISTANT:")
    assert pair.prompt == "USER: {x} {prompt} ASSISTANT:"
    with pytest.raises(ValueError, match=r"must hold '\{prompt\}'"):
        read(tmp_path / "a.jsonl", template="USER:")


def test_helpfulness_takes_the_place_of_safety():
    better_first = TextPair("p", "a", "b", Label(0.0, 0.0, 1.0), first_better=1.0)
    unknown = TextPair("p", "a", "b", Label(0.0, 0.0, 1.0))
    (pair,) = helpfulness([better_first, unknown])
    assert pair.label.preference == 0.0  # the first has the higher score
    assert np.isnan([pair.label.first_safe, pair.label.second_safe]).all()


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "p", "response_0": "a"}, r"line 1, lacks response_1, .* has 'prompt', 'resp"),
        ({"question": "p"}, "lacks prompt, response, is_safe and has 'question'; rename"),
        ({**SAFE_RLHF, "safer_response_id": 2}, "safer_response_id must be .* line 1, has 2"),
        ({**SAFE_RLHF, "is_response_0_safe": "yes"}, "is_response_0_safe must be .* has 'yes'"),
        ({"prompt": [{"role": "user"}], "chosen": "", "rejected": ""}, "must be text.* has list"),
    ],
)
def test_a_row_that_is_none_of_the_three_kinds_is_named(tmp_path, row, match):
    with pytest.raises(LabelError, match=match):
        read(write(tmp_path / "a.jsonl", row))


def test_damage_is_named_with_its_line(tmp_path):
    path = write(tmp_path / "a.jsonl", SAFE_RLHF)
    path.write_bytes(path.read_bytes() + b'{"prompt": "p", \n')
    with pytest.raises(CorruptFileError, match=r"a\.jsonl, line 2, makes no sense"):
        read(path)
    path.write_bytes(b"[1]\n")
    with pytest.raises(CorruptFileError, match=r"line 1, makes no sense \(it holds list"):
        read(path)
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(CorruptFileError, match="makes no sense"):
        read(path)
    packed = write(tmp_path / "b.jsonl.gz", *[SAFE_RLHF] * 50)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(CorruptFileError, match="makes no sense"):
        read(packed)
    (tmp_path / "c.jsonl.gz").write_text("not packed")
    with pytest.raises(CorruptFileError, match="makes no sense"):
        read(tmp_path / "c.jsonl.gz")


def test_damaged_parquet_is_named(tmp_path):
    pytest.importorskip("pyarrow.parquet", reason=NO_PYARROW, exc_type=ImportError)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(CorruptFileError, match=r"a\.parquet makes no sense"):
        read(tmp_path / "a.parquet")
    with pytest.raises(StorageError, match="must exist"):
        read(tmp_path / "none.parquet")


def test_files_without_rows_missing_ones_and_other_endings_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(LabelError, match="has none to learn from"):
        read(tmp_path / "a.jsonl")
    with pytest.raises(StorageError, match="must exist"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"\.jsonl, \.jsonl\.gz and \.parquet"):
        read(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="conflicts must be"):
        read(tmp_path / "a.jsonl", conflicts="ignore")


def test_without_pyarrow_a_parquet_file_names_the_extra_that_has_no_language_model(
    tmp_path, monkeypatch
):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'pbcrl\[parquet\]', or convert to \.jsonl"):
        read_pairs(tmp_path / "a.parquet", rng=np.random.default_rng(0))
