"""Datasets that Batches reads (jdp/sources.py): each format read, sent to a worker, and refused."""

import os
import pickle
import sys

import grain
import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pyarrow
import pytest
from array_record.python import array_record_module
from pyarrow import parquet

import jdp
from jdp.batches import Batches
from jdp.files import ArrayRecords, Parquet, TokenFile
from jdp.packed import Packed, first_fit
from jdp.sources import Columns

pytestmark = pytest.mark.alternate


def _sent(source):
    """As a worker process gets it."""
    return pickle.loads(pickle.dumps(source))


def _epoch(source, name, **options):
    """The column of one epoch, padding left out, in the order of the source."""
    batches = Batches(source, jdp.make_mesh(), batch=8, seed=0, epochs=1, shuffle=False, **options)
    return np.concatenate([np.asarray(b[name])[np.asarray(b["weight"]) == 1] for b in batches])


def test_columns_may_be_memory_mapped_and_nested(tmp_path):
    rows = np.arange(22.0, dtype=np.float32).reshape(11, 2)
    np.save(tmp_path / "x.npy", np.repeat(rows, 1000, axis=1))
    np.save(tmp_path / "f.npy", np.asfortranarray(np.repeat(rows, 1000, axis=1)))
    x, f = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xf")
    source = Columns({"x": x, "in": {"f": f, "y": jnp.arange(11)}})
    assert len(source) == 11
    data = pickle.dumps(source)
    assert len(data) < 2000  # paths, not the files
    for some in (source, pickle.loads(data)):
        for i in (0, 10):
            example = some[i]
            assert (example["x"] == np.repeat(rows[i], 1000)).all()
            assert (example["in"]["f"] == example["x"]).all()
            assert example["in"]["y"] == i
            assert isinstance(example["in"]["y"], np.integer)  # a jax.Array would be a program
    assert _epoch(source, "x")[:, ::1000].tolist() == rows.tolist()
    # a view is not where its file says it is
    assert _sent(Columns({"x": x[3:]}))[0]["x"][0] == rows[3, 0]


def test_columns_that_are_none():
    with pytest.raises(ValueError, match=r"arrays of one length.*\['x'\]: 2, \['a'\]\['y'\]: 3"):
        Columns({"x": [1, 2], "a": {"y": [1, 2, 3]}})
    with pytest.raises(ValueError, match="got none"):
        Columns({})
    for column, what in ((3, "int, 3"), (np.zeros(()), "ndarray"), ("text", "str, 'text'")):
        with pytest.raises(TypeError, match=rf"column \['y'\] is a {what}.*has no rows"):
            Columns({"x": [1, 2], "y": column})


@pytest.mark.parametrize("kind", ["raw", "npy"])
def test_every_token_but_the_first_is_a_target_once(tmp_path, kind):
    ids, path = np.arange(4001, dtype=np.uint16), tmp_path / f"ids.{kind}"
    np.save(path, ids) if kind == "npy" else ids.tofile(path)
    source = TokenFile(path, 4)
    assert len(source[0]["tokens"]) == 5  # opens the map
    source = _sent(source)
    assert len(pickle.dumps(source)) < 500  # a path, not the file
    rows = _epoch(source, "tokens")
    assert rows[:, 1:].reshape(-1).tolist() == list(range(1, 4001))
    assert (rows[:, 1:] - rows[:, :-1] == 1).all()
    assert len(TokenFile(path, 7)) == 571  # 3 ids left over
    assert len(TokenFile(path, 4000)) == 1
    for length in (4001, 0):
        with pytest.raises(ValueError, match=f"give no window of length {length}"):
            TokenFile(path, length)


def test_token_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "ids.bin"
    path.write_bytes(b"12345")
    with pytest.raises(ValueError, match=r"has 5 bytes, which is no whole number of uint16 ids"):
        TokenFile(path, 1)
    with pytest.raises(FileNotFoundError, match=r"jdp.TokenFile found nothing at .*gone.bin"):
        TokenFile(tmp_path / "gone.bin", 1)
    with pytest.raises(IsADirectoryError, match=r"is a folder.*Give a pattern, such as"):
        TokenFile(tmp_path, 1)
    np.save(tmp_path / "x.npy", np.zeros(9))
    with pytest.raises(ValueError, match="holds float64, and ids of tokens are integers"):
        TokenFile(tmp_path / "x.npy", 1)
    with pytest.raises(ValueError, match=r"which names 2 files, and a window must not"):
        TokenFile(tmp_path / "*", 1)
    (tmp_path / "x.npy").write_bytes(b"no header")
    path.write_bytes(b"")
    for damaged in (path, tmp_path / "x.npy"):
        with pytest.raises(ValueError, match=r"jdp.TokenFile cannot read .* cut short, damaged"):
            TokenFile(damaged, 1)
    np.arange(20_001, dtype=np.uint16).tofile(path)
    source = TokenFile(path, 4)
    assert source[4999]["tokens"][0] == 19996
    batches = jdp.Batches(source, jdp.make_mesh(), batch=8, seed=0)
    os.truncate(path, 14)  # the mapping would end this process, by SIGBUS
    for held in (source, _sent(source)):
        with pytest.raises(IndexError, match="no whole window 4999 of 5000: the file has become"):
            held[4999]
    with pytest.raises(RuntimeError, match=r"example \d+ in epoch 0: .* has become shorter"):
        batches.at(3)
    path.unlink()
    assert source[1]["tokens"].shape == (5,)  # as long as it is open, it is there


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
    whole = (tmp_path / "part1.array_record").read_bytes()
    (tmp_path / "part1.array_record").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"jdp.ArrayRecords cannot read .*part1.*cut short"):
        ArrayRecords(str(tmp_path / "*.array_record"), decode=_number)


def test_a_damaged_record_is_named(tmp_path):
    path = tmp_path / "a.array_record"
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    noise = np.random.default_rng(0).bytes(1000)
    for _ in range(100):
        writer.write(noise)
    writer.close()
    whole = bytearray(path.read_bytes())
    whole[50_000] ^= 255
    path.write_bytes(whole)
    source = ArrayRecords(path, decode=lambda record: {"x": np.frombuffer(record, np.uint8)})
    said = r"could not read example \d+.*cannot read record \d+ of .*a.array_record.*mend it"
    with pytest.raises(RuntimeError, match=said):
        _epoch(source, "x")


def test_parquet_rows_in_groups_of_several_files(tmp_path):
    for part in range(2):
        ids = list(range(part * 7, part * 7 + 7))
        table = pyarrow.table({"id": ids, "x": [[i, i + 0.5] for i in ids], "name": ["a"] * 7})
        parquet.write_table(table, tmp_path / f"{part}.parquet", row_group_size=3)
    source = _sent(Parquet(str(tmp_path / "*.parquet"), columns=["id", "x"]))
    assert len(source) == 14
    assert _epoch(source, "id").tolist() == list(range(14))
    assert _epoch(source, "x")[3].tolist() == [3.0, 3.5]
    assert Parquet(tmp_path / "0.parquet")[2]["name"] == "a"
    with pytest.raises(ValueError, match=r"has no column \['y'\], only \['id', 'x', 'name'\]"):
        Parquet(tmp_path / "0.parquet", columns=["y"])


def test_parquet_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"id": np.random.default_rng(0).integers(0, 2**31, 1000)})
    # nothing but the checksum can tell a damaged number in a plain page
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    parquet.write_table(table, path, row_group_size=100, **plain)
    source = Parquet(path, columns="id")
    first, whole = source[0], bytearray(path.read_bytes())
    with pytest.raises(IndexError, match="rows 0 to 999, and no row 1000"):
        source[1000]
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"jdp.Parquet cannot read .*a.parquet: .*cut short"):
        Parquet(path)
    # written anew: what was kept of the old one must not be given for it
    parquet.write_table(table.take(np.arange(999, -1, -1)), path, row_group_size=100)
    os.utime(path, ns=(0, 0))
    assert Parquet(path, columns="id")[999] == first
    with pytest.raises(ValueError, match=r"cannot read row group 5 of .*written anew"):
        source[500]
    whole[len(whole) // 2] ^= 255
    path.write_bytes(whole)
    with pytest.raises(RuntimeError, match=r"could not read example \d+: ValueError.*row group \d"):
        _epoch(Parquet(path), "id")


def test_hugging_face_datasets_are_sources():
    import datasets  # takes a second

    # a fingerprint of our own: dill, which would make one, cannot pickle pyarrow's newest types
    table = pyarrow.table({"id": list(range(11)), "x": [[i, i + 1] for i in range(11)]})
    source = datasets.Dataset(table, fingerprint="ids")
    assert _epoch(source, "id").tolist() == list(range(11))
    assert _epoch(_sent(source), "x").tolist() == [[i, i + 1] for i in range(11)]


class Together(list):
    """Reads several at a time, as Hugging Face datasets do, but for one."""

    broken = None

    def __getitems__(self, indices):
        if self.broken in indices:
            raise OSError("one of these")
        return [{"id": -self[index]["id"]} for index in indices]

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError("this one")
        return super().__getitem__(index)


def test_a_source_that_reads_several_at_a_time_is_asked_to():
    source = Together({"id": i} for i in range(16))
    assert _epoch(source, "id").tolist() == [-i for i in range(16)]
    source.broken = 13
    batches = Batches(source, jdp.make_mesh(), batch=8, seed=0, shuffle=False)
    with pytest.raises(RuntimeError, match="could not read example 13 in epoch 0: OSError: this"):
        batches.at(1)


def test_a_missing_library_is_named_with_its_install_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(
        ImportError, match=r"which is not installed .*: pip install 'jdp-train\[data\]'"
    ):
        Parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "grain", None)
    (tmp_path / "a.array_record").touch()
    with pytest.raises(
        ImportError, match=r"which is not installed .*: pip install 'jdp-train\[data\]'"
    ):
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
