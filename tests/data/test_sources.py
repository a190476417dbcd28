import bz2
import glob
import gzip
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.config.data import DataConfig
from bytescale.data import open_dataset
from bytescale.data.sources.chunks import Limits, Position
from bytescale.data.sources.content import Document
from bytescale.data.sources.source import (
    DocumentSource,
    chunks,
    content_fingerprint,
    document_name,
    documents,
    iter_documents,
    open_source,
)
from bytescale.data.sources.walk import find_files
from bytescale.errors import UserError
from tests.data.corpora import write_jsonl, write_tree


def read(source: str, path: Path | str | None = None, **settings: str) -> list[Document]:
    config = DataConfig(source=source, path=None if path is None else str(path), **settings)
    return list(iter_documents(open_source(config)))


def test_text_tree_reads_sorted_files_unstripped(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "b.txt": " two\r\n",
            "a/z.txt": "one",
            "a.txt": "",
            "é.txt": "naïve 漢字 \U0001f600",
            ".git/x.txt": "hidden",
            ".y": "h",
        },
    )
    (tmp_path / "empty_directory.txt").mkdir()
    documents = read("text-tree", tmp_path)
    assert documents == [
        Document("a.txt", ""),
        Document("a/z.txt", "one"),
        Document("b.txt", " two\r\n"),
        Document("é.txt", "naïve 漢字 \U0001f600"),
    ]
    assert [d.name for d in read("text-tree", tmp_path, glob="a/*")] == ["a/z.txt"]
    assert [d.name for d in read("text-tree", tmp_path, glob=".git/*")] == [".git/x.txt"]


def test_text_tree_names_the_bad_file(tmp_path: Path) -> None:
    write_tree(tmp_path, {"good.txt": "fine", "picture.png": b"\x89PNG\xff"})
    with pytest.raises(UserError, match=r"picture\.png is not UTF-8 text \(byte 0\).*data\.glob"):
        read("text-tree", tmp_path)
    assert len(read("text-tree", tmp_path, glob="*.txt")) == 1


def test_text_tree_names_the_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, {"secret.txt": "x"})

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"cannot read .*secret\.txt: Permission denied"):
        read("text-tree", tmp_path)


@pytest.mark.parametrize(
    ("source", "path", "settings", "message"),
    [
        ("text-tree", "nowhere", {}, "nowhere does not exist"),
        ("text-tree", "file", {}, 'file is not a directory.*set data.path = ".*" and data.glob = "file"'),
        ("text-tree", "corpus/*.md", {}, r'does not exist.*set data.path = ".*corpus" and data.glob = "\*\.md"'),
        ("text-tree", "", {"glob": "*/../*"}, r'data.glob = .* cannot be used; "\.\." may not follow a wildcard'),
        ("text-tree", "", {"glob": "*.rst"}, r"empty: no file matches \*\.rst under"),
        ("text-tree", "", {"glob": "/etc/*"}, "data.glob = '/etc/\\*' cannot be used"),
        ("jsonl", "nowhere.jsonl", {}, "nowhere.jsonl does not exist"),
        ("jsonl", "*.jsonl", {}, r"empty: no file matches .*\*\.jsonl"),
        ("jsonl", "", {}, "is a directory; give a file or a glob"),
        ("jsonl", "/dev/null", {}, "is not a regular file"),
        ("parquet", "*.parquet", {}, "empty: no file matches"),
    ],
)
def test_nothing_to_read(tmp_path: Path, source: str, path: str, settings: dict[str, str], message: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=message) as caught:
        read(source, tmp_path / path, **settings)
    assert "\n" not in str(caught.value)


def test_jsonl(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": " a\u2028b ", "n": 1}, {"text": None}, {"text": ""}])
    path.write_text(path.read_text() + "\n" + json.dumps({"text": "漢\U0001f600"}, ensure_ascii=False))
    assert read("jsonl", path) == [
        Document("x.jsonl:1", " a\u2028b "),
        Document("x.jsonl:2", ""),
        Document("x.jsonl:3", ""),
        Document("x.jsonl:5", "漢\U0001f600"),
    ]
    write_jsonl(tmp_path / "w.jsonl", [{"text": "first"}])
    assert [d.name for d in read("jsonl", tmp_path / "*.jsonl")][:2] == ["w.jsonl:1", "x.jsonl:1"]
    config = DataConfig(source="jsonl", path=str(tmp_path / "*.jsonl"))
    assert document_name(open_source(config), 2) == "x.jsonl:2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', r"x\.jsonl:2 is not a line of JSON"),
        (b'{"text": "\xff"}', r"x\.jsonl:2 is not a line of JSON"),
        (b"[" * 100_000, r"x\.jsonl:2 is not a line of JSON"),
        (b"[1]", r"x\.jsonl:2 holds .*list of integers"),
        (b'{"texts": "a"}', r"x\.jsonl:2 has no \"text\".*did you mean 'texts'"),
        (b"{}", r"x\.jsonl:2 has no \"text\""),
        (b'{"text": 3}', r"x\.jsonl:2: \"text\" holds a number, not text"),
        (b'{"text": "\\ud83d"}', r"x\.jsonl:2: .*half of a surrogate pair"),
    ],
)
def test_jsonl_names_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "\\ud83d\\ude00 fine"}\n' + line + b"\n")
    with pytest.raises(UserError, match=message) as caught:
        read("jsonl", tmp_path / "x.jsonl")
    assert "\n" not in str(caught.value)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    texts = [f"text {i} é\n" for i in range(600)] + [None, ""]
    table = pyarrow.table({"body": texts, "n": list(range(602))})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=250)
    documents = read("parquet", tmp_path / "*.parquet", text_field="body")
    assert [d.content for d in documents] == [text or "" for text in texts]
    assert documents[600].name == "x.parquet:600"
    with pytest.raises(UserError, match=r'has no "text".*known: body'):
        read("parquet", tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r'"n" holds values of type int64, not text'):
        read("parquet", tmp_path / "x.parquet", text_field="n")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "x.parquet").read_bytes()[:500])
    with pytest.raises(UserError, match=r"cannot read .*cut\.parquet as parquet"):
        read("parquet", tmp_path / "cut.parquet", text_field="body")
    (tmp_path / "x.arrow").write_bytes(b"ARROW1\0\0")
    with pytest.raises(UserError, match=r'x\.arrow is an Arrow file; set data.source = "arrow"'):
        read("parquet", tmp_path / "x.arrow")


def test_python_stdlib_is_long_tailed_and_has_no_packages() -> None:
    source = open_source(DataConfig(source="python-stdlib"))
    assert "dataclasses.py" in source.files
    assert "json/decoder.py" in source.files
    assert not any("site-packages" in name or "__pycache__" in name for name in source.files)
    assert list(source.files) == sorted(source.files)
    lengths = [len(str(document.content)) for document in iter_documents(source)]
    assert len(lengths) == len(source.files)
    assert min(lengths) < 100 < 100_000 < max(lengths)


def test_fingerprint_follows_content_alone(tmp_path: Path) -> None:
    def fingerprint(root: Path, **settings: str) -> str:
        return content_fingerprint(open_source(DataConfig(source="text-tree", path=str(root), **settings)))

    first = write_tree(tmp_path / "first", {"a.txt": "one", "b.txt": "two"})
    before = fingerprint(first)
    os.utime(first / "a.txt", (1, 1))
    assert fingerprint(first) == before
    shutil.copytree(first, tmp_path / "second")
    assert fingerprint(tmp_path / "second") == before
    write_tree(first, {"b.txt": "twO"})
    assert fingerprint(first) != before
    # The border between files counts, not only the bytes.
    assert fingerprint(write_tree(tmp_path / "third", {"a.txt": "onet", "b.txt": "wo"})) != before
    assert fingerprint(tmp_path / "second", glob="a*") != before


def test_fingerprint_names_the_field(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a", "body": "b"}])
    fields = ("text", "body")
    sources = [open_source(DataConfig(source="jsonl", path=str(path), text_field=field)) for field in fields]
    assert content_fingerprint(sources[0]) != content_fingerprint(sources[1])


def test_import_needs_numpy_alone() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'tokenizers', 'pyarrow', 'transformers', 'ray']))\n"
        "import bytescale.data\n"
        "from bytescale.config.schema import DataConfig\n"
        "from bytescale.data.optional import require\n"
        "try: require('pyarrow.parquet', 'data', 'parquet')\n"
        "except ValueError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "parquet needs pyarrow: pip install 'bytescale[data]'\n"


def linked_tree(root: Path) -> Path:
    """Two files, thirty behind a linked directory, one of those by a link of its own too, and what cannot be read."""
    write_tree(root, {f"store/books/{i}.txt": "b" for i in range(30)})
    tree = write_tree(root / "tree", {"real/1.txt": "x", "real/2.txt": "y", ".git/x.txt": "h", "real/.y.txt": "h"})
    for link, target in {
        "books": "../store/books",
        "one.txt": "../store/books/0.txt",
        "real/loop": "..",
        "again": "real",
        "broken.txt": "nowhere",
        "self.txt": "self.txt",
    }.items():
        (tree / link).symlink_to(target)
    os.mkfifo(tree / "pipe.txt")
    return tree


def test_links_are_followed_and_every_file_is_taken_once(tmp_path: Path) -> None:
    tree = linked_tree(tmp_path)
    source = open_source(DataConfig(source="text-tree", path=str(tree)))
    books = [f"books/{i}.txt" for i in range(30)]
    assert list(source.files) == sorted([*books, "real/1.txt", "real/2.txt"])
    assert source.left_out == (
        "2 hidden files or directories, 2 broken links, 1 entry that is no regular file, "
        "2 links to directories already read, 1 second name of a file already read"
    )
    # A link among the files renames nothing.
    (tree / "a.txt").symlink_to("real/1.txt")
    assert open_source(DataConfig(source="text-tree", path=str(tree))).files == source.files


@pytest.mark.parametrize("pattern", ["**/*.txt", "**/**/*.txt", "**/**/**/*.txt", "**"])
def test_one_rule_for_every_source(tmp_path: Path, pattern: str) -> None:
    tree = linked_tree(tmp_path)
    as_tree = open_source(DataConfig(source="text-tree", path=str(tree), glob=pattern))
    as_lines = open_source(DataConfig(source="jsonl", path=f"{tree}/{pattern}"))
    assert len(as_tree.files) == 32
    assert (as_lines.files, as_lines.left_out) == (as_tree.files, as_tree.left_out)


@pytest.mark.parametrize("pattern", ["**/*.py", "dom/*", "*/*.py", "[de]*/**/[a-m]*", "**/d*/**/*.py", "d[o]m/*.p?"])
def test_patterns_mean_what_they_do_elsewhere(pattern: str) -> None:
    root = os.path.join(sysconfig.get_path("stdlib"), "xml")
    expected = {os.path.relpath(path, root) for path in glob.glob(f"{root}/{pattern}", recursive=True)}
    found = find_files(root, pattern)
    assert found.names == tuple(sorted(path for path in expected if os.path.isfile(f"{root}/{path}")))


def test_only_hidden_files(tmp_path: Path) -> None:
    write_tree(tmp_path, {".a.txt": "x"})
    with pytest.raises(UserError, match=r"empty: no file matches .*; left out: 1 hidden file or directory"):
        read("text-tree", tmp_path)


def test_a_note_tells_what_was_left_out(tmp_path: Path) -> None:
    write_tree(tmp_path / "text", {"a.txt": "x", ".b.txt": "y"})
    config = DataConfig(source="text-tree", path=str(tmp_path / "text"), cache_dir=str(tmp_path / "cache"))
    assert open_dataset(config).notes == (f"left out under {tmp_path / 'text'}: 1 hidden file or directory",)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_compressed_files_and_byte_order_marks(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    bom = b"\xef\xbb\xbf"
    lines = bom + b'{"text": "one"}\n' + bom + b"\n" + bom + b'{"text": "tw\xc3\xb6"}\n'
    (tmp_path / "lines").write_bytes(compress(lines))
    assert [d.content for d in read("jsonl", tmp_path / "lines")] == ["one", "twö"]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_bytes(compress(bom + " ö\n".encode()))
    assert [d.content for d in read("text-tree", tmp_path / "text")] == [" ö\n"]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_damaged_compression(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    whole = compress(json.dumps({"text": os.urandom(999).hex()}).encode())
    write_tree(tmp_path, {"x/cut": whole[: len(whole) // 2]})
    for source, path in (("jsonl", tmp_path / "x" / "cut"), ("text-tree", tmp_path / "x")):
        with pytest.raises(UserError, match="cut is compressed and damaged or cut short"):
            read(source, path)


FOREIGN = [
    (b"PK\x03\x04\x14\xff", "a zip archive"),
    (b"PAR1\x15\xff", 'a parquet file; set data.source = "parquet"'),
    ("hello".encode("utf-16"), "UTF-16 text; convert it to UTF-8"),
    (b"name".ljust(257, b"\0") + b"ustar", "a tar archive"),
    (gzip.compress(b"name".ljust(257, b"\0") + b"ustar", mtime=0), "a tar archive"),
]


@pytest.mark.parametrize(("content", "words"), FOREIGN)
def test_other_kinds_of_files_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    write_tree(tmp_path, {"x/a": content})
    for source, path in (("jsonl", tmp_path / "x" / "a"), ("text-tree", tmp_path / "x")):
        with pytest.raises(UserError, match=re.escape(words)):
            read(source, path)


CHAT = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("record", "field", "words"),
    [
        (
            {"messages": [{"role": "user", "content": "x"}]},
            "text",
            '"messages" holds a chat (a list of messages): set data.content = "messages"',
        ),
        (
            {"id": "7", "conversations": [{"from": "me", "value": "x"}]},
            "text",
            'set data.content = "messages" and data.messages_field = "conversations"',
        ),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            "messages",
            'holds a chat (a list of messages), not text: set data.content = "messages"',
        ),
        (
            {"input_ids": [1, 2]},
            "text",
            '"input_ids" holds token ids (a list of integers): set data.content = "tokens"',
        ),
        ({"ids": [1, 2]}, "ids", 'set data.content = "tokens" and data.tokens_field = "ids"'),
        ({"doc": {"text": "x"}}, "doc", "holds an object, not text; set data.text_field (known: doc.text)"),
        ({"doc": {"body": "x"}}, "text", "set data.text_field (known: doc.body)"),
        ({"n": 1, "tags": ["a"]}, "n", "holds a number, not text, and nothing else there is text"),
        ({"n": 1}, "text", 'has no "text", and nothing else there is text'),
    ],
)
def test_what_is_not_text_is_named(tmp_path: Path, record: dict[str, object], field: str, words: str) -> None:
    """In lines and in tables alike, never in a circle."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "x.parquet")
    write_jsonl(tmp_path / "x.jsonl", [record])
    for kind in ("jsonl", "parquet"):
        with pytest.raises(UserError) as caught:
            read(kind, tmp_path / f"x.{kind}", text_field=field)
        assert words.replace("a number", "values of type int64" if kind == "parquet" else "a number") in str(
            caught.value
        )


def test_nested_text(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = [{"a": {"b": {"c": "one"}, "d": 1}}, {"a": {"b": None, "d": 2}}, {"a": None}, {"a": {"b": {"c": "two"}}}]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "x.parquet")
    write_jsonl(tmp_path / "x.jsonl", records)
    for kind in ("jsonl", "parquet"):
        assert [d.content for d in read(kind, tmp_path / f"x.{kind}", text_field="a.b.c")] == ["one", "", "", "two"]


def test_text_columns_of_other_types(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.array(["a", "b", None, "a"])
    for column in (texts.dictionary_encode(), texts.cast(pyarrow.large_string())):
        parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
        assert [d.content for d in read("parquet", tmp_path / "x.parquet")] == ["a", "b", "", "a"]
    parquet.write_table(pyarrow.table({"text": texts.cast(pyarrow.binary())}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match='"text" holds bytes, not text: bytes are not read'):
        read("parquet", tmp_path / "x.parquet")


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(1, 4), st.integers(0, 30))
def test_documents_from_any_chunk(sizes: list[int], num_records: int, first: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for i, size in enumerate(sizes):
            write_jsonl(Path(directory) / f"{i}.jsonl", [{"text": f"{i} {j}"} for j in range(size)])
        config = DataConfig(source="jsonl", path=directory)
        source = DocumentSource(config, Path(directory), tuple(f"{i}.jsonl" for i in range(len(sizes))))
        limits = Limits(1 << 20, num_records)
        found = list(chunks(source, limits=limits))
        assert [document for chunk in found for document in documents(source, chunk)] == list(iter_documents(source))
        assert all(len(chunk.lines) <= num_records for chunk in found)
        begin = found[first].end if first < len(found) else Position()
        assert list(chunks(source, begin, limits)) == (found[first + 1 :] if first < len(found) else found)
