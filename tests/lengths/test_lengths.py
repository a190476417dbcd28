"""Length sources: files, named distributions, generators against the published shares, batches."""

import json
from pathlib import Path

import numpy as np
import pytest

from bytescale.errors import UserError
from bytescale.lengths.distributions import DISTRIBUTIONS
from bytescale.lengths.source import batches, draw, draw_batch, length_source

K = 1024


def sample(name: str, num: int = 2_000_000) -> np.ndarray:
    return draw(length_source(name), num, np.random.default_rng(0))


def token_share(lengths: np.ndarray, mask: np.ndarray) -> float:
    return float(lengths[mask].sum() / lengths.sum())


def test_byted_meets_every_published_share() -> None:
    s = sample("byted")
    assert abs((s <= 4 * K).mean() - 0.80) < 0.01
    assert abs((s >= 128 * K).mean() - 0.01) < 0.0005
    assert abs(token_share(s, s >= 128 * K) - 0.443) < 0.01
    assert abs(token_share(s, s > 256 * K) - 0.37) < 0.01
    assert abs((s >= 2048 * K).mean() - 0.0005) < 0.00005
    assert abs(token_share(s, s >= 2048 * K) - 0.121) < 0.01


def test_github_meets_every_published_share() -> None:
    s = sample("github")
    assert abs(token_share(s, s > 128 * K) - 0.162) < 0.005
    assert abs(token_share(s, s > 256 * K) - 0.098) < 0.005
    assert int(s.max()) == 2048 * K


def test_shipped_sets_keep_their_shape() -> None:
    wikipedia, wlb, magi = sample("wikipedia"), sample("wlb"), sample("magiattention")
    assert abs(wikipedia.mean() - 1014) < 10
    assert np.median(wikipedia) in range(345, 350)
    assert abs(wlb.mean() - 3962) < 20
    assert abs((magi <= 1024).mean() - 0.7138) < 0.003
    assert int(magi.max()) <= 196608


def test_max_cuts() -> None:
    assert int(sample("github:max=262144", 100_000).max()) == 262144


def test_lognormal_is_the_published_one() -> None:
    rng = np.random.default_rng(0)
    expected = np.clip(rng.lognormal(np.log(8192) - 0.72, 1.2, 100).astype(int), 16, 131072)
    source = length_source("lognormal:mean=8192,sigma=1.2,max=131072")
    assert draw(source, 100, np.random.default_rng(0)).tolist() == expected.tolist()


@pytest.mark.parametrize("name", [n for n in DISTRIBUTIONS if n != "lognormal"])
def test_batches_by_tokens_are_exact_and_repeatable(name: str) -> None:
    source = length_source(name)
    first = list(batches(source, 2, 5, tokens=3_000_000))
    again = list(batches(source, 2, 5, tokens=3_000_000))
    assert [int(b.sum()) for b in first] == [3_000_000, 3_000_000]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(int(b.min()) >= 1 for b in first)
    assert len(draw_batch(source, np.random.default_rng(0), sequences=7)) == 7


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_files_keep_their_order(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    lengths = [5, 3, 3, 90000]
    np.save(tmp_path / "a.npy", np.array(lengths))
    pq.write_table(pa.table({"length": lengths, "other": ["a"] * 4}), tmp_path / "a.parquet")
    files = [
        write(tmp_path / "a.json", json.dumps(lengths)),
        write(tmp_path / "a.csv", "length,count\n5,1\n3,2\n90000,1\n"),
        write(tmp_path / "b.csv", "5\n3\n3\n90000\n"),
        write(tmp_path / "a.txt", "# lengths\n5\n3\n\n3\n90000\n"),
        str(tmp_path / "a.npy"),
        str(tmp_path / "a.parquet"),
    ]
    for file in files:
        (batch,) = batches(length_source(file), 1, 0)
        assert batch.tolist() == lengths, file


def test_ranges_are_a_distribution(tmp_path: Path) -> None:
    source = length_source(write(tmp_path / "r.csv", 'range,number\n"[0, 10]",3\n"[11, 50]",1\n'))
    assert source.listed is None
    values = draw(source, 10_000, np.random.default_rng(0))
    assert values.min() >= 1
    assert values.max() <= 50
    assert abs((values <= 10).mean() - 0.75) < 0.02


BROKEN = [
    ("a.json", "[1, 2", "not JSON"),
    ("a.json", '{"a": 1}', "list"),
    ("a.json", "[]", "no lengths"),
    ("a.json", "[1, 0]", "entry 1 is 0"),
    ("a.json", "[1, -5]", "entry 1 is -5"),
    ("a.json", "[1.5]", "entry 0 is 1.5"),
    ("a.json", "[1, NaN]", "entry 1 is nan"),
    ("a.json", '[1, "x"]', "whole number"),
    ("a.json", "[[1, 2], [3]]", "flat list"),
    ("a.json", "[[1, 2], [3, 4]]", "flat list"),
    ("a.json", "[true, false]", "entry 0 is True"),
    ("a.json", "[1e400]", "entry 0 is inf"),
    ("a.json", '[512, 1024.0, "2048"]', "entry 2 is '2048'"),
    ("a.json", "[5, null]", "entry 1 is None"),
    ("a.json", "[5, true]", "entry 1 is True"),
    ("a.json", "[99999999999999999999999]", "entry 0"),
    ("a.csv", "length,count\n", "no lengths"),
    ("a.csv", "length,count\n5,x\n", "line 2"),
    ("a.csv", "length\n7\nabc\n", "line 3"),
    ("a.csv", "length\n0\n", "line 2"),
    ("a.csv", "length,count\n5,0\n", "no lengths"),
    ("a.csv", 'range,n\n"[9, 3]",1\n', "empty"),
    ("a.txt", "12\nnan\n", "line 2"),
    ("a.txt", "", "no lengths"),
    ("a.npy", "nothing", "no array"),
    ("a.parquet", "nothing", "parquet"),
    ("a.bin", "1", "come as"),
]


@pytest.mark.parametrize(("name", "text", "words"), BROKEN)
def test_broken_files_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(UserError) as caught:
        length_source(path)
    assert words in str(caught.value)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "text"), [("a.txt", "5\n7\n"), ("a.csv", "length\n5\n7\n"), ("a.json", "[5, 7]")])
def test_a_byte_order_mark_is_skipped(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    (batch,) = batches(length_source(str(tmp_path / name)), 1, 0)
    assert batch.tolist() == [5, 7]


def test_a_huge_text_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(UserError, match=r"big.json has 100 MiB"):
        length_source(str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gihub", "did you mean 'github'"),
        ("/no/such.json", "no such file"),
        ("lognormal:mean=x", "must be a number"),
        ("lognormal:men=3", "did you mean 'mean'"),
        ("github:max=-1", "above 0"),
    ],
)
def test_unknown_sources_are_named(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        length_source(text)


def test_a_seed_is_not_negative() -> None:
    with pytest.raises(UserError, match="seed is -1"):
        list(batches(length_source("github"), 1, -1, tokens=5))


def test_a_distribution_needs_a_batch_size() -> None:
    with pytest.raises(UserError, match="--batch-tokens"):
        list(batches(length_source("github"), 1, 0))
