"""Kinds of sources besides plain text: what each holds, and what is said about each that is damaged."""

import gzip
import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale.config.data import DataConfig
from bytescale.data import SequenceDataset, open_dataset
from bytescale.errors import UserError
from tests.data.corpora import write_jsonl

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

IDS = [[5, 6, 7, 8], [300, 2], [9] * 70_000, [1, 2, 3]]


def opened(path: Path, source: str, **settings: Any) -> SequenceDataset:
    settings = {"max_context": 1 << 20, **settings}
    cache = path.parent / "cache"
    return open_dataset(DataConfig(source=source, path=str(path), cache_dir=str(cache), **settings))  # type: ignore[arg-type]


def rows(dataset: SequenceDataset) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of every sequence."""
    every = np.arange(len(dataset))
    tokens, labels = dataset.reader.read_runs(every, np.zeros_like(every), dataset.lengths)
    cuts = np.cumsum(dataset.lengths)[:-1]
    parts = zip(np.split(tokens, cuts), np.split(labels, cuts), strict=True)
    found = [(token.tolist(), label.tolist()) for token, label in parts]
    assert [sum(x >= 0 for x in label) for _, label in found] == dataset.num_targets.tolist()
    return found


def refusal(path: Path, source: str, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        opened(path, source, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_table(directory: Path, kind: str, records: Sequence[dict[str, Any]]) -> Path:
    """The same records as lines, compressed lines, parquet, both formats of Arrow, or a saved `datasets` directory."""
    path = directory / f"x.{kind}"
    if kind == "jsonl":
        return write_jsonl(path, records)
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    if kind == "gz":
        path.write_bytes(gzip.compress(text))
        return path
    if kind == "zst":
        with arrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(text)
        return path
    table = arrow.Table.from_pylist(list(records))
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=2)
        return path
    if kind in ("file", "stream"):
        writer = arrow.ipc.new_file if kind == "file" else arrow.ipc.new_stream
        with writer(str(path), table.schema) as file:
            file.write_table(table, max_chunksize=2)
        return path
    path.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, 1), table.slice(1)), strict=True):
        with arrow.ipc.new_stream(str(path / name), table.schema) as file:
            file.write_table(part)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (path / "dataset_info.json").write_text("{}")
    return path


KINDS = {"jsonl": "jsonl", "gz": "jsonl", "zst": "jsonl", "parquet": "parquet", "file": "arrow", "stream": "arrow"}
KINDS["saved"] = "arrow"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_texts(tmp_path: Path, kind: str) -> None:
    path = write_table(tmp_path, kind, [{"doc": {"text": text}} for text in ("one", "twö", "", "three\n")])
    dataset = opened(path, KINDS[kind], text_field="doc.text")
    assert [bytes(tokens[:-1]).decode() for tokens, _ in rows(dataset)] == ["one", "twö", "three\n"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_ids_and_labels(tmp_path: Path, kind: str) -> None:
    labels = [[-100, -100, 7, 8], [300, 2], [-100] * 69_999 + [9], [1, -100, -100]]
    records = [{"input_ids": ids, "labels": of_ids} for ids, of_ids in zip(IDS, labels, strict=True)]
    dataset = opened(write_table(tmp_path, kind, records), KINDS[kind], content="tokens")
    found = rows(dataset)
    # No end token is added, and the last record has no target left: its only label is on its first token.
    assert [tokens for tokens, _ in found] == IDS[:3]
    assert [row for _, row in found[:2]] == [[-100, 7, 8, -100], [2, -100]]
    assert (dataset.counts.without_target, dataset.num_targets.tolist()) == (1, [2, 1, 1])
    assert dataset.reader.num_ids == 301


def test_a_loss_mask_and_no_mask(tmp_path: Path) -> None:
    records = [{"ids": [1, 2, 3], "m": [0, 0, 1]}, {"ids": [4, 5, 6]}, {"ids": [7, 8], "m": [True, True]}]
    dataset = opened(
        write_jsonl(tmp_path / "x", records), "jsonl", content="tokens", tokens_field="ids", mask_field="m"
    )
    assert [labels for _, labels in rows(dataset)] == [[-100, 3, -100], [5, 6, -100], [8, -100]]


def test_masks_of_documents_that_are_cut(tmp_path: Path) -> None:
    records = [{"input_ids": list(range(10)), "loss_mask": [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]}]
    dataset = opened(write_jsonl(tmp_path / "x", records), "jsonl", content="tokens", max_context=3)
    # Parts 0-2 and 3-5 have no target, of 6-8 the last two are, and the last part is one token.
    assert [tokens for tokens, _ in rows(dataset)] == [[6, 7, 8]]
    assert dataset.counts.without_target == 3


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"ids": [1]}, 'x:1 has no "input_ids"; set data.tokens_field (did you mean'),
        ({"input_ids": "abc"}, 'x:1: "input_ids" holds text, not a list of integers'),
        ({"input_ids": [1, 2.5]}, 'x:1: "input_ids" holds a number among its entries'),
        ({"input_ids": [1, -3]}, 'x:1: "input_ids" holds -3, no token'),
        ({"input_ids": [1 << 40]}, f'x:1: "input_ids" holds {1 << 40}, no token'),
        ({"input_ids": [1, 2], "labels": [1]}, 'x:1: "labels" has 1 entries, "input_ids" has 2'),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, 'x:1: "labels" is 3 at 1, "input_ids" is 2; labels are the token'),
    ],
)
def test_bad_ids_are_named(tmp_path: Path, record: dict[str, Any], words: str) -> None:
    path = write_jsonl(tmp_path / "x", [record, {"input_ids": [1, 2, 3]}])
    assert words.split(" (did")[0] in refusal(path, "jsonl", content="tokens")
    dataset = opened(path, "jsonl", content="tokens", on_error="skip")
    assert (len(dataset), dataset.counts.skipped) == (1, 1)


def write_megatron(path: Path, documents: Sequence[Sequence[Sequence[int]]], code: int = 8) -> Path:
    """Documents of one or more sequences, written field by field from the description of the format."""
    kind = {4: "<i4", 5: "<i8", 8: "<u2"}[code]
    sequences = [sequence for document in documents for sequence in document]
    data, places = b"", []
    for sequence in sequences:
        places.append(len(data))
        data += np.array(sequence, dtype=kind).tobytes()
    ends = np.cumsum([0, *(len(document) for document in documents)]).tolist()
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
    index = struct.pack(f"<{len(sequences)}i", *map(len, sequences)) + struct.pack(f"<{len(sequences)}q", *places)
    path.with_suffix(".idx").write_bytes(header + index + struct.pack(f"<{len(ends)}q", *ends))
    path.with_suffix(".bin").write_bytes(data)
    return path.with_suffix(".idx")


@pytest.mark.parametrize("code", [4, 5, 8])
@pytest.mark.parametrize("suffix", ["", ".idx", ".bin"])
def test_megatron(tmp_path: Path, code: int, suffix: str) -> None:
    write_megatron(tmp_path / "corpus", [[[1, 2, 3]], [], [[4, 5], [60_000, 7, 8]]], code)
    dataset = opened(tmp_path / f"corpus{suffix}", "megatron")
    assert [tokens for tokens, _ in rows(dataset)] == [[1, 2, 3], [4, 5, 60_000, 7, 8]]
    assert (dataset.counts.documents, dataset.counts.empty_dropped) == (3, 1)
    # The data is part of what the cache goes by.
    write_megatron(tmp_path / "corpus", [[[1, 2, 3]], [], [[4, 5], [60_000, 7, 9]]], code)
    assert rows(opened(tmp_path / f"corpus{suffix}", "megatron"))[1][0][-1] == 9


def test_an_index_that_does_not_fit(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "c", [[[1, 2, 3]], [[4, 5]]])
    whole, data = path.read_bytes(), path.with_suffix(".bin").read_bytes()
    path.with_suffix(".bin").write_bytes(data[:-1])
    assert "c.idx does not fit its data: sequence 1 has 2 tokens at byte 6, c.bin has 9 bytes" in refusal(
        path, "megatron"
    )
    path.with_suffix(".bin").write_bytes(data)
    for changed, words in (
        (whole[:-4], "is cut short"),
        (whole[:20], "is cut short"),
        (b"TNTIDX\0\0" + whole[8:], "not the index of a Megatron dataset; it is of the older TNTIDX format"),
        (whole[:9] + b"\x02" + whole[10:], "has version 2, which is not known"),
        (whole[:17] + b"\x07" + whole[18:], "has tokens of type code 7, which is not known"),
        (whole[:-8] + struct.pack("<q", 1), "does not fit itself"),
    ):
        path.write_bytes(changed)
        assert words in refusal(path, "megatron")
    path.with_suffix(".bin").unlink()
    assert "c.bin does not exist; a Megatron dataset is two files" in refusal(path, "megatron")


def test_directories_of_datasets_that_are_not_one(tmp_path: Path) -> None:
    (tmp_path / "d" / "train").mkdir(parents=True)
    assert "is empty: no .arrow file in" in refusal(tmp_path / "d", "arrow")
    (tmp_path / "d" / "dataset_dict.json").write_text("{}")
    (tmp_path / "d" / "train" / "state.json").write_text("{}")
    assert "holds the splits train; add one to data.path" in refusal(tmp_path / "d", "arrow")
    assert "cannot read" in refusal(tmp_path / "d" / "train", "arrow")
    (tmp_path / "x.arrow").write_bytes(b"ARROW1\0\0 and then nothing")
    assert "x.arrow as arrow (row 0)" in refusal(tmp_path / "x.arrow", "arrow")


def test_skipping_counts_lines_files_and_broken_archives(tmp_path: Path) -> None:
    good = [{"text": f"text {i} " + "x" * (i % 90)} for i in range(3000)]
    write_jsonl(tmp_path / "a.jsonl", good[:5])
    (tmp_path / "b.jsonl").write_bytes(b'{"text": 3}\nnot json\n{"text": "fine"}\n')
    text = "".join(json.dumps(record) + "\n" for record in good).encode()
    packed = gzip.compress(text)
    (tmp_path / "c.jsonl").write_bytes(packed[: len(packed) // 2])
    message = refusal(tmp_path / "*.jsonl", "jsonl")
    assert 'b.jsonl:1: "text" holds a number' in message
    dataset = opened(tmp_path / "*.jsonl", "jsonl", on_error="skip")
    assert dataset.counts.skipped == 3
    assert 5 + 1 + 100 < len(dataset) < 3000
    assert re.search(r"skipped 3 documents under .*; the first: .*b\.jsonl:1", dataset.notes[-1])
    assert "3 bad documents skipped" in dataset.counts.describe()
    (tmp_path / "b.jsonl").unlink()
    assert "c.jsonl is compressed and damaged or cut short" in refusal(tmp_path / "*.jsonl", "jsonl")
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "c.jsonl").write_bytes(b"nonsense\n")
    assert "no document in its 1 file" in refusal(tmp_path / "*.jsonl", "jsonl", on_error="skip")


def test_workers_make_the_same_entry(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    records = [{"text": "word " * int(n)} for n in rng.integers(0, 2000, 900)]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    alone = opened(path, "jsonl", max_context=512)
    config = DataConfig(source="jsonl", path=str(path), cache_dir=str(tmp_path / "w"), workers=2, max_context=512)
    several = open_dataset(config)
    assert several.counts.documents == 900
    assert alone.reader.digest() == several.reader.digest()
    (tmp_path / "y.jsonl").write_text("nonsense\n")
    with pytest.raises(UserError, match=r"y\.jsonl:1 is not a line of JSON"):
        open_dataset(DataConfig(source="jsonl", path=str(tmp_path / "*.jsonl"), cache_dir=str(tmp_path), workers=2))
