"""Datasets that Batches reads (jdp/sources.py): each format read, sent to a worker, and refused."""

import pickle
import sys

import grain
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from array_record.python import array_record_module

import jdp
from jdp.batches import Batches
from jdp.files import ArrayRecords, Parquet, TokenFile
from jdp.packed import Packed, first_fit
from jdp.sources import Columns


def _sent(source):
    """As a worker process gets it."""
    return pickle.loads(pickle.dumps(source))


def _epoch(source, name, **options):
    """The column of one epoch, padding left out, in the order of the source."""
    batches = Batches(source, jdp.make_mesh(), batch=8, seed=0, epochs=1, shuffle=False, **options)
    return np.concatenate([np.asarray(b[name])[np.asarray(b["weight"]) == 1] for b in batches])


def test_columns_may_be_memory_mapped(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(22.0, dtype=np.float32).reshape(11, 2))
    source = Columns({"x": np.load(tmp_path / "x.npy", mmap_mode="r"), "y": np.arange(11)})
    assert len(source) == 11
    assert _epoch(source, "x").tolist() == np.arange(22).reshape(11, 2).tolist()
    with pytest.raises(ValueError, match=r"arrays of one length.*'x': 2, 'y': 3"):
        Columns({"x": [1, 2], "y": [1, 2, 3]})
    with pytest.raises(ValueError, match="got none"):
        Columns({})


@pytest.mark.parametrize("kind", ["raw", "npy"])
def test_every_token_but_the_first_is_a_target_once(tmp_path, kind):
    ids, path = np.arange(41, dtype=np.uint16), tmp_path / f"ids.{kind}"
    np.save(path, ids) if kind == "npy" else ids.tofile(path)
    source = TokenFile(path, 4)
    assert len(source[0]["tokens"]) == 5  # opens the map
    source = _sent(source)
    assert len(pickle.dumps(source)) < 500  # a path, not the file
    rows = _epoch(source, "tokens")
    assert rows[:, 1:].reshape(-1).tolist() == list(range(1, 41))
    assert (rows[:, 1:] - rows[:, :-1] == 1).all()
    assert len(TokenFile(path, 7)) == 5  # 5 ids left over
    assert len(TokenFile(path, 40)) == 1
    with pytest.raises(ValueError, match=r"give no window of length 41"):
        TokenFile(path, 41)


def test_token_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "ids.bin"
    path.write_bytes(b"12345")
    with pytest.raises(ValueError, match=r"has 5 bytes, which is no whole number of uint16 ids"):
        TokenFile(path, 1)
    with pytest.raises(FileNotFoundError, match=r"jdp.TokenFile found nothing at .*gone.bin"):
        TokenFile(tmp_path / "gone.bin", 1)


def _number(record):
    return {"id": np.int32(int(record))}


def test_array_records_through_grain(tmp_path):
    for part in range(2):
        path = str(tmp_path / f"part{part}.array_record")
        writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
        for i in range(part * 10, part * 10 + 10 - part):
            writer.write(str(i).encode())
        writer.close()
    source = _sent(ArrayRecords(str(tmp_path / "*.array_record"), decode=_number))
    assert len(source) == 19
    assert _epoch(source, "id").tolist() == list(range(19))
    assert _epoch(source, "id", threads=2).tolist() == list(range(19))
    # Grain's own source of records, decoded in the transform
    plain = grain.sources.ArrayRecordDataSource(str(tmp_path / "part0.array_record"))
    assert _epoch(plain, "id", transform=_number).tolist() == list(range(10))
    with pytest.raises(FileNotFoundError, match=r"jdp.ArrayRecords found nothing at"):
        ArrayRecords([str(tmp_path / "none*.array_record")], decode=_number)


def test_parquet_rows_in_groups_of_several_files(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    pyarrow = pytest.importorskip("pyarrow")

    for part in range(2):
        ids = list(range(part * 7, part * 7 + 7))
        table = pyarrow.table({"id": ids, "x": [[i, i + 0.5] for i in ids], "name": ["a"] * 7})
        parquet.write_table(table, tmp_path / f"{part}.parquet", row_group_size=3)
    source = _sent(Parquet(str(tmp_path / "*.parquet"), columns=["id", "x"]))
    assert len(source) == 14
    assert _epoch(source, "id").tolist() == list(range(14))
    assert _epoch(source, "x", transform=_floats)[3].tolist() == [3.0, 3.5]
    assert Parquet(tmp_path / "0.parquet")[2]["name"] == "a"
    with pytest.raises(ValueError, match=r"has no column \['y'\], only \['id', 'x', 'name'\]"):
        Parquet(tmp_path / "0.parquet", columns=["y"])


def _floats(example):
    return {"x": np.asarray(example["x"], np.float32)}


def test_hugging_face_datasets_are_sources():
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    pyarrow = pytest.importorskip("pyarrow")
    # a fingerprint of our own: dill, which would make one, cannot pickle pyarrow's newest types
    source = datasets.Dataset(pyarrow.table({"id": list(range(11))}), fingerprint="ids")
    assert _epoch(source, "id").tolist() == list(range(11))


def test_a_missing_library_is_named_with_its_install_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ImportError, match=r"Install it with: pip install 'jdp-train\[data\]'"):
        Parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "grain", None)
    (tmp_path / "a.array_record").touch()
    with pytest.raises(ImportError, match=r"Install it with: pip install 'jdp-train\[data\]'"):
        ArrayRecords(tmp_path / "a.array_record", decode=_number)


# Packing ------------------------------------------------------------------------------------------


@hypothesis.given(st.lists(st.integers(0, 23), min_size=1, max_size=300), st.integers(1, 9))
@hypothesis.settings(deadline=None, max_examples=60)
def test_every_token_is_in_exactly_one_row(lengths, length):
    ends = np.cumsum(lengths)
    documents = [np.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]
    rows = Packed(documents, length)
    found, owner = [], np.repeat(np.arange(len(lengths)), lengths)
    for row in (rows[i] for i in range(len(rows))):
        real = row["segment_ids"] > 0
        assert real.any()
        assert (row["tokens"][~real] == 0).all()
        tokens, segments, positions = (row[n][real] for n in ("tokens", "segment_ids", "positions"))
        found += tokens.tolist()
        starts = ends[owner[tokens]] - np.asarray(lengths)[owner[tokens]]
        assert (positions == tokens - starts).all()
        same = owner[tokens][:, None] == owner[tokens][None, :]
        pieces = segments[:, None] == segments[None, :]
        assert (pieces <= same).all()  # a segment is of one document
    assert sorted(found) == list(range(sum(lengths)))


def test_packing_fills_rows_as_first_fit_does():
    lengths = np.random.default_rng(0).integers(1, 65, 2000)
    rows = first_fit(lengths, 128)
    least = -(-lengths.sum() // 128)
    # first fit needs at most 1.7 times the least (Dosa and Sgall, 2013); here far fewer
    assert least <= len(rows) <= 1.02 * least + 1


def test_an_epoch_of_packed_rows_has_every_document_once():
    documents = [{"tokens": np.full(1 + i % 5, i)} for i in range(40)]
    expected = sorted(int(t) for d in documents for t in d["tokens"])
    batches = Batches(Packed(documents, 8), jdp.make_mesh(), batch=8, seed=1, epochs=1)
    real = [np.asarray(b["tokens"])[np.asarray(b["segment_ids"]) > 0] for b in batches]
    assert sorted(np.concatenate(real).tolist()) == expected


def test_what_cannot_be_packed():
    with pytest.raises(ValueError, match="length=0; a row holds at least one token"):
        Packed([np.arange(3)], 0)
    with pytest.raises(ValueError, match="got 2 lengths for 1 documents"):
        Packed([np.arange(3)], 4, lengths=[3, 1])
    with pytest.raises(ValueError, match="document 0 has 3 tokens, not the 2 that"):
        Packed([np.arange(3)], 4, lengths=[2])[0]
