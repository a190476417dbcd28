import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bytescale.config.schema import DataConfig
from bytescale.data.sources import Document, content_fingerprint, document_name, iter_documents, open_source
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
        ("text-tree", "file", {}, "file is not a directory"),
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
        (b"[1]", r"x\.jsonl:2 holds a list"),
        (b'{"texts": "a"}', r"x\.jsonl:2 has no \"text\".*did you mean 'texts'"),
        (b"{}", r"x\.jsonl:2 has no \"text\""),
        (b'{"text": 3}', r"x\.jsonl:2: \"text\" is a int"),
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
    assert [d.text for d in documents] == [text or "" for text in texts]
    assert documents[600].name == "x.parquet:600"
    with pytest.raises(UserError, match=r'has no column "text".*known: body, n'):
        read("parquet", tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r'column "n" holds int, not text'):
        read("parquet", tmp_path / "x.parquet", text_field="n")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "x.parquet").read_bytes()[:500])
    with pytest.raises(UserError, match=r"cannot read .*cut\.parquet as parquet"):
        read("parquet", tmp_path / "cut.parquet", text_field="body")


def test_python_stdlib_is_long_tailed_and_has_no_packages() -> None:
    source = open_source(DataConfig(source="python-stdlib"))
    assert "dataclasses.py" in source.files
    assert "json/decoder.py" in source.files
    assert not any("site-packages" in name or "__pycache__" in name for name in source.files)
    assert list(source.files) == sorted(source.files)
    lengths = [len(document.text) for document in iter_documents(source)]
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
