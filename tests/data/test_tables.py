"""Tables: what columns hold is told from their types; rows of null are left out or refused; other columns may be
anything."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elaswave_fx.config.compose import load_config
from elaswave_fx.data import Dataset, open_data
from elaswave_fx.data.source import open_source
from elaswave_fx.errors import DataError

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")


def opened(paths: Sequence[Path] | Path, *words: str, cache: Path | None = None) -> Dataset:
    named = ",".join(map(str, paths)) if isinstance(paths, Sequence) else str(paths)
    kept = "cache.enabled=false" if cache is None else f"cache.dir={cache}"
    return open_data(load_config(["data=hf", f"data.paths=[{named}]", "seq_len=4", kept, *words]))


def parquet(folder: Path, array: Any, name: str = "x") -> Path:
    from pyarrow import parquet

    parquet.write_table(pa.table({name: array, "other": list(range(len(array)))}), folder / "rows.parquet")
    return folder / "rows.parquet"


def lines_of(folder: Path, *words: str) -> tuple[str, ...]:
    return open_source(load_config(["data=hf", f"data.paths=[{folder}]", "cache.enabled=false", *words])).lines


def ids_of(dataset: Dataset) -> list[int]:
    """The stream: inputs of all samples, and the last label."""
    batch = dataset.batch(np.arange(len(dataset)))
    return [*batch["input_ids"].flatten().tolist(), int(batch["labels"][-1, -1])]


IDS = [[1, 2, 3], None, [4, 5], [], [6, 7, 8, 9]]
PAIRS = [None, [1, 2], [3, 4], None, [5, 6], [7, 8], [9, 9]]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(IDS, pa.list_(pa.int32())),
        pa.array(IDS, pa.large_list(pa.uint16())),
        pa.array([None, *IDS], pa.list_(pa.int64())),
        pa.array(PAIRS, pa.list_(pa.int8(), 2)),
    ],
    ids=["list", "large_list", "null first", "fixed_size_list"],
)
def test_rows_of_null_are_left_out_of_token_ids(column: Any, tmp_path: Path) -> None:
    assert ids_of(opened(parquet(tmp_path, column), "data.column=x")) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_rows_of_null_are_left_out_of_texts(kind: str, tmp_path: Path) -> None:
    texts = pa.array([None, "abcd", None, "", "efgh"])
    column = texts.dictionary_encode() if kind == "dictionary" else texts.cast(getattr(pa, kind)())
    assert bytes(ids_of(opened(parquet(tmp_path, column), "data.column=x"))) == b"abcd\0\0efg\0"[:9]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([[1.0, 2.0]] * 9), r"holds list<.*double>, neither text nor lists of token ids"),
        (pa.array([[True, False]] * 9), r"holds list<.*bool>, neither text"),
        (pa.array([[[1, 2], [3]]] * 9), r"holds list<.*list<.*int64>>, neither text"),
        (pa.array([None] * 9), "holds null, neither text"),
        (pa.array([b"abc"] * 9), "holds binary, neither text"),
        (pa.array([[1, 2], [3, None], [None]]), "row 1 has a null among its token ids"),
        (pa.array([None, [1, 2], None, [3, None]]), "row 3 has a null among its token ids"),
    ],
    ids=["floats", "bools", "nested", "nulls", "binary", "null inside", "null rows before"],
)
def test_columns_that_are_no_tokens(column: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"data.column=x: {words}"):
        opened(parquet(tmp_path, column), "data.column=x")


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([1.5, 2.5, None]), "row 2 has a null"),
        (pa.array([None, [1, 2]]), "row 0 has a null"),
        (pa.array([[[1, 2]], [[3, None]]]), "row 1 has a null"),
        (pa.array(PAIRS[1:], pa.list_(pa.int8(), 2)), "row 2 has a null"),
        (pa.array(["a", "b"]), "holds string; a sample is made of numbers"),
        (pa.array([{"a": 1}] * 2), "holds struct<a: int64>; a sample is made of numbers"),
        (pa.array([None, None]), "has no values, all 2 rows are null"),
        (pa.array([[1, 2], [1, 2, 3]]), r"has 3 values in row 1 and 2 in row 0; all samples must have one shape"),
        (pa.array([[[1], [2]], [[1], [2, 3]]]), "has 2 values in row 1 and 1 in row 0; all samples"),
    ],
)
def test_columns_of_fields_that_cannot_be(column: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"data.fields: column x: {words}"):
        opened(parquet(tmp_path, column), "data.fields=[x,other]")


@pytest.mark.parametrize("form", ["torch", "numpy", "arrow", None])
def test_a_table_may_give_its_rows_in_any_form(form: str | None, tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"x": [[1, 2, 3], [4, 5, 6]], "y": [0.5, 1.5], "z": ["a", "b"]})
    table.set_format(form, columns=["y"] if form == "torch" else None)
    table.save_to_disk(str(tmp_path / "saved"))
    assert ids_of(opened(tmp_path / "saved", "data.column=x")) == [1, 2, 3, 4, 5]
    row = opened(tmp_path / "saved", "data.fields=[x,y]").sample(1)
    assert (row["x"].tolist(), row["y"].item()) == ([4, 5, 6], 1.5)
    assert len(opened(tmp_path / "saved", "data.column=z", "seq_len=3")) == 1


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


MIXED = ({"text": "abcd", "ids": [1, 2, 3], "m": 1}, {"text": None, "ids": None, "m": 2})
OTHERS = ({"text": "efgh", "ids": [4, 5], "m": {"by": [1, "x"]}}, {"text": "i", "ids": [6, 7, 8, 9], "m": "x"})


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("places", [(0, 1), (1, 0)], ids=["values first", "null first"])
def test_a_mixed_column_that_nobody_reads_does_not_matter(
    cached: bool, places: tuple[int, int], tmp_path: Path
) -> None:
    first = [MIXED[place] for place in places]
    paths = [lines(tmp_path / "a.jsonl", *first[:1]), lines(tmp_path / "b.jsonl", *first[1:], *OTHERS)]
    cache = tmp_path / "cache" if cached else None
    assert ids_of(opened(paths, "data.column=ids", cache=cache)) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert bytes(ids_of(opened(paths, cache=cache))) == b"abcd\0efgh\0i\0"[:9]
    with pytest.raises(DataError, match="data.column=idz: no such column; nearest valid value: ids"):
        opened(paths, "data.column=idz", cache=cache)
    with pytest.raises(DataError, match="column m holds values of several types, such as .* in row"):
        opened(paths, "data.column=m", cache=cache)


def test_a_mixed_column_of_one_file(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "abcdefgh", "m": 1}, {"text": "b", "m": "x"})
    assert len(opened(path)) == 2
    for words in ("data.column=m", "data.fields=[m]"):
        with pytest.raises(DataError, match="holds values of several types"):
            opened(path, words)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_whose_other_columns_differ(kind: str, tmp_path: Path) -> None:
    tables = [datasets.Dataset.from_dict({"text": ["abcd"], "m": [m]}) for m in (1, "x")]
    paths = [tmp_path / f"{number}.{kind}" for number in range(2)]
    for table, path in zip(tables, paths, strict=True):
        getattr(table, f"to_{kind}")(str(path))
    assert bytes(ids_of(opened(paths, "data.column=text"))) == b"abcd\0abcd"
    with pytest.raises(DataError, match="data.column=txt: no such column; nearest valid value: text"):
        opened(paths, "data.column=txt")


@pytest.mark.parametrize(
    "row",
    [
        "[182, 134, 169]",
        "[182 134 169\\n  7]",
        "[0 1 ... 99]",
        "[5]",
        "101 7 8 102",
        "101,7,8",
        "(101, 7)",
        "[101. 7. 8.]",
        "tensor([101,   7])",
        "tensor([101, 7], dtype=torch.int32)",
        "101|7|8",
        "[]",
        "[np.int64(85), np.int64(63)]",
        "[[1, 2], [3, 4]]",
        "[None, 2]",
        "[nan 1. 2.]",
        "[True, False]",
        "['85', '63']",
        "7",
    ],
)
def test_lists_of_numbers_as_text_are_no_text(row: str, tmp_path: Path) -> None:
    row = row.replace("\\n", "\n")
    (tmp_path / "rows.csv").write_text("ids,m\n" + f'"{row}",1\n' * 20)
    with pytest.raises(
        DataError, match=r"data.column=ids: holds (lists of )?numbers as text, such as .*; (save them as lists|columns)"
    ):
        opened(tmp_path / "rows.csv", "data.column=ids", "seq_len=6")
    (tmp_path / "text.csv").write_text("ids,m\n" + f'"{row} and more",1\n' * 20)
    assert len(opened(tmp_path / "text.csv", "data.column=ids", "seq_len=6")) > 0


@pytest.mark.parametrize(
    "text",
    ["a,b,c\n0,-1.0,0,\n1,2.0,1,\n", '"a","b"\n"1",0,-1.0\n"2",1,2.0\n', "a,b\n" + "1,2\n" * 60 + "1,2, 3\n1,2\n"],
)
def test_rows_with_more_values_than_names_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(DataError, match=r"rows.csv: line \d+ has [34] values, and the header [23] names \(a, b"):
        opened(tmp_path / "rows.csv", "data.fields=[a,b]", "global_batch=1")


def test_json_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "caf\u00e9"}\n' * 9, encoding="latin-1")
    with pytest.raises(DataError, match=r"rows.jsonl: is not UTF-8 \(byte 0xe9\); convert it, as iconv"):
        opened(path, "data.column=text", "seq_len=6")
    path.write_text('{"text": "caf\u00e9"}\n' * 9, encoding="utf-8")
    assert len(opened(path, "data.column=text", "seq_len=6"))


def test_texts_that_look_like_numbers_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nwords\n")
    (tmp_path / "b.csv").write_text("text\n007\n1.50\n1e5\n")
    dataset = opened([tmp_path / "a.csv", tmp_path / "b.csv"], "data.column=text", "seq_len=6")
    assert bytes(ids_of(dataset)).startswith(b"words\x00007\x001.50\x001e5")


def test_a_text_may_read_like_a_missing_value(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,m\nNA,1\n,2\nnull,3\n")
    assert bytes(ids_of(opened(tmp_path / "rows.csv", "data.column=text", "seq_len=6"))) == b"NA\0null"


def test_arrow_files_are_tables_too(tmp_path: Path) -> None:
    table = pa.table({"ids": [[1, 2, 3], [4, 5]]})
    for stream in (True, False):
        path = tmp_path / f"{stream}.arrow"
        with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as file:
            file.write_table(table)
        assert ids_of(opened(path)) == [1, 2, 3, 4, 5]


def test_times_that_float32_rounds_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"at": 1e9 + i / 4, "x": i / 4, "n": i}) + "\n" for i in range(8)))
    (note,) = opened(path, "data.fields=[at,x,n]").notes
    assert note.startswith("data: float64 is read as float32, in at:")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
@pytest.mark.parametrize("cached", [False, True])
def test_texts_that_look_like_dates_stay_as_they_are(kind: str, cached: bool, tmp_path: Path) -> None:
    texts = ["2024-05-01", "2024-05-01T07:00:00", "2024-05-01 07:00:00Z"]
    paths = [text_file(tmp_path / f"{number}.{kind}", text=rows) for number, rows in enumerate((texts, ["words"] * 3))]
    for order in (paths, paths[::-1]):
        dataset = opened(order, "seq_len=16", "data.column=text", cache=tmp_path / "cache" if cached else None)
        stream = bytes(ids_of(dataset))
        assert b"2024-05-01\x002024-05-01T07:00:00\x002024-05-01 07:00" in stream


def text_file(path: Path, **columns: list[Any]) -> Path:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if path.suffix == ".csv":
        written = [",".join(columns), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(written))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        lines(path, *rows)
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "parquet"])
@pytest.mark.parametrize("values", [([True, False], [2, 0]), ([1, 2], [True, False])], ids=["bool first", "int first"])
def test_truth_is_no_number_of_another_file(kind: str, values: Any, tmp_path: Path) -> None:
    paths = []
    for number, part in enumerate(values):
        paths.append(tmp_path / f"{number}.{kind}")
        if kind == "parquet":
            datasets.Dataset.from_dict({"x": part}).to_parquet(str(paths[-1]))
        else:
            text_file(paths[-1], x=part)
    with pytest.raises(DataError, match=r"column x holds (values of several types, such as|bool in|int64 in)"):
        opened(paths, "data.fields=[x]", "global_batch=1")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array([1, 2]), pa.array([0, 1], pa.timestamp("ms"))),
        (pa.array(["a", "b"]), pa.array([1, 2])),
        (pa.array([1, 2]), pa.array(["5", "0x10"])),
        (pa.array([[1, 2]]), pa.array([1, 2])),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_values_of_later_files_are_of_one_kind_with_the_first(
    first: Any, second: Any, kind: str, tmp_path: Path
) -> None:
    paths = [table_file(tmp_path / f"{number}.{kind}", x=column) for number, column in enumerate((first, second))]
    for words in (("data.fields=[x]",), ("data.column=x",)):
        with pytest.raises(DataError, match="column x holds values of several types, such as .* after .* in row [12]"):
            opened(paths, *words, "global_batch=1")


def table_file(path: Path, **columns: Any) -> Path:
    from pyarrow import parquet

    table = pa.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    return path


@pytest.mark.parametrize("file", ["parquet", "arrow"])
@pytest.mark.parametrize("number", [1, -1])
def test_numbers_are_as_wide_as_any_file_has_them(number: int, file: str, tmp_path: Path) -> None:
    columns = [(pa.float16(), 1.5), (pa.float32(), 70_000.0), (pa.int16(), 7), (pa.float64(), 0.25)][::number]
    paths = [table_file(tmp_path / f"{place}.{file}", y=pa.array([0]), x=pa.array([value], kind), **{f"z{place}": [0]})
             for place, (kind, value) in enumerate(columns)]  # fmt: skip
    dataset = opened(paths, "data.fields=[x]", "global_batch=1")
    assert [dataset.sample(row)["x"].item() for row in range(4)] == [value for _, value in columns]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
@pytest.mark.parametrize("file", ["parquet", "arrow"])
def test_texts_are_texts_however_they_are_stored(kind: Any, file: str, tmp_path: Path) -> None:
    texts = pa.array(["abcd", "ef"]).dictionary_encode(), pa.array(["gh", None]).cast(kind)
    for order in (texts, texts[::-1]):
        paths = [table_file(tmp_path / f"{place}.{file}", x=text) for place, text in enumerate(order)]
        assert sorted(bytes(ids_of(opened(paths, "seq_len=5"))).split(b"\0")) == [b"", b"abcd", b"ef", b"gh"]


@pytest.mark.parametrize("file", ["parquet", "arrow"])
def test_a_later_file_may_have_wider_numbers(file: str, tmp_path: Path) -> None:
    for narrow, wide in ((pa.uint16(), pa.int64()), (pa.int8(), pa.int32()), (pa.int32(), pa.uint32())):
        paths = [
            table_file(tmp_path / f"{number}.{file}", x=pa.array([[1, 2, top]], pa.list_(kind)), y=pa.array([0.5]))
            for number, (kind, top) in enumerate(((narrow, 100), (wide, 70_000)))
        ]
        assert sorted(ids_of(opened(paths, "data.column=x"))) == [1, 1, 2, 2, 100]
        rows = opened(paths, "data.fields=[x,y]", "global_batch=1")
        assert [rows.sample(row)["x"].tolist()[-1] for row in range(2)] == [100, 70_000]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_widths_may_differ_between_files(kind: str, tmp_path: Path) -> None:
    columns = [pa.array([[1, 2, 3]], pa.list_(pa.int32())), pa.array([[4, 5]], pa.large_list(pa.int64()))]
    for order in (columns, columns[::-1]):
        paths = [table_file(tmp_path / f"{number}.{kind}", x=column) for number, column in enumerate(order)]
        assert sorted(ids_of(opened(paths, "data.column=x"))) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_numbers_follow_from_the_whole_column(kind: str, tmp_path: Path) -> None:
    paths = [text_file(tmp_path / f"{number}.{kind}", x=part, m=["a"] * 2) for number, part in
             enumerate(([1, 2], [0.1, 1e-45], [3, 4]))]  # fmt: skip
    dataset = opened(paths, "data.fields=[x]", "global_batch=1")
    assert [dataset.sample(row)["x"].item() for row in range(6)] == pytest.approx([1, 2, 0.1, 1e-45, 3, 4], rel=1e-7)


def test_files_may_order_their_columns_as_they_like(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("y,z,x\n4,text,3\n")
    dataset = opened([tmp_path / "a.csv", tmp_path / "b.csv"], "data.fields=[x,y]", "global_batch=1")
    assert [(row["x"].item(), row["y"].item()) for row in map(dataset.sample, range(2))] == [(1, 2), (3, 4)]
    (tmp_path / "b.csv").write_text("y,z\n4,5\n")
    with pytest.raises(DataError, match=r"b.csv: has no column x; it has y, z"):
        opened([tmp_path / "a.csv", tmp_path / "b.csv"], "data.fields=[x,y]", "global_batch=1")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "id;text\n1;abcdefgh\n" * 3, "its header 'id;text' has no comma, and ';'"),
        ("a.csv", '"fixed acidity";"quality"\n7.4;5\n' * 3, "has no comma, and ';': save it with commas"),
        ("a.csv", "id\ttext\n1\tabcdefgh\n" * 3, "has no comma, and '\\\\t'"),
        ("a.csv", 'text,m\n"abc,1\nabcdefgh,2\n', "is no CSV .unexpected end of data."),
        ("a.csv", "text,text\nabcdefgh,abcdefgh\n", "has 2 columns text"),
        ("a.jsonl", '{"text": "abcdefgh"}\n{"text": "abc\n', "neither JSON Lines nor a list of JSON objects .line 2: "),
        ("a.jsonl", '{"text": "abcdefgh"}\n7\n', "row 1 is a int"),
        ("a.json", '{\n "text": ["abcdefgh"]\n}\n', "neither JSON Lines nor a list of JSON objects .line 1: "),
        ("a.jsonl", "", "has no rows"),
        ("a.csv", "", "has no rows"),
        ("a.txt", "", "the split train is empty"),
        ("a.txt", "abcdefgh\0" * 9, "is no text, it has bytes of 0"),
        ("a.csv", "id,text\n1,the first\nand the second\n2,a row\n", "line 3 has 1 values, .* line breaks that"),
        ("a.csv", "x\n0xdeadbeef12345678\n7\n", "column x: holds string"),
        ("a.csv", "x\n++1\n7\n", "column x: holds string"),
        ("a.csv", "x\n\uff14\n7\n", "column x: holds string"),
        ("a.csv", "x\n0.5\nNAN\n", "column x: row 1 has a null"),
        ("a.jsonl", '{"x": 0.5}\n{"x": NaN}\n', "column x: row 1 has a null"),
        ("a.jsonl", '{"x": 0.5}\n{"x": true}\n', "column x holds values of several types, such as True in row 1"),
        ("a.jsonl", '{"x": [0.5]}\n{"x": [0.5, true]}\n', r"several types, such as \[0.5, True\] in row 1"),
        ("a" * 300 + ".txt", "", "cannot be read .File name too long"),
        ("a.csv", "x\n-1\n9223372036854775808\n", r"column x holds whole numbers of 2\*\*63"),
        ("a.csv", "x\n" + "1\n" * 10_000 + "18446744073709551615\n", r"holds whole numbers of 2\*\*63"),
        ("a.csv", "x\n" + "0.5\n" * 10_000 + "9007199254740993\n", "columns x: values of one type"),
        ("a.csv", 'text,m\n"abc\0defgh",1\n', "data.column=text: has a text with a character of 0"),
        ("a.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n", "is a pointer of Git LFS"),
        ("a.csv", "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n", "is a pointer of Git LFS"),
        ("a.jsonl", "PAR1\x15\x04" * 9, "is a Parquet table, and is named .jsonl; rename it"),
        ("a.csv", "text,label\n", "the split train is empty"),
        ("a.jsonl", '{"text": "a"}\n{"text": "abcde \\ud83d x"}\n', "text has half of a surrogate pair in row 1"),
        ("a.jsonl", '{"text": 12345678901234567890}\n', r"column text holds whole numbers of 2\*\*63"),
    ],
)  # fmt: skip
def test_text_files_that_are_no_tables(name: str, text: str, words: str, tmp_path: Path) -> None:
    if len(name) < 255:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words):
        opened(tmp_path / name, *(["data.fields=[x]"] if text.startswith(("x\n", '{"x"')) else []))


def test_compressed_tables_are_named(tmp_path: Path) -> None:
    import gzip

    for name in ("a.csv", "a.jsonl"):
        (tmp_path / name).write_bytes(gzip.compress(b"text\nabcdefgh\n" * 9))
        with pytest.raises(DataError, match="is compressed by gzip; decompress it first"):
            opened(tmp_path / name)


def test_a_list_of_texts_is_a_column(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(["abcd", "2024-05-01"]))
    assert bytes(ids_of(opened(tmp_path / "a.json"))) == b"abcd\x002024-05-01\0"[:13]


def test_keys_that_would_not_be_read_are_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"text": "abcdefgh", "x": 1},) * 4)
    with pytest.raises(DataError, match="data.vocab_size=300: is of token ids, and the column holds text"):
        opened(path, "data.vocab_size=300")
    with pytest.raises(DataError, match=r"data.column=x: is not read beside data.fields=\[x\]; give one of both"):
        opened(path, "data.fields=[x]", "data.column=x")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_numbers_beyond_float32(kind: str, tmp_path: Path) -> None:
    path = text_file(tmp_path / f"a.{kind}", x=[7, *[16777217] * 20, 2.5], y=[[0.5] * 22, [0.5] * 22][0])
    (note,) = opened(path, "data.fields=[x,y]").notes
    assert note.startswith("data: float64 is read as float32, in x:")
    with pytest.raises(DataError, match="column x: holds 1e.300, which is beyond float32"):
        opened(text_file(path, x=[1.0, 1e300]), "data.fields=[x]", "global_batch=1")
    with pytest.raises(DataError, match=r"2\*\*63 and more"):
        opened(text_file(path, x=[5, 2**64 - 1]), "data.fields=[x]", "global_batch=1")
    column = pa.array([[1, 2**63], [3, 4]], pa.list_(pa.uint64()))
    with pytest.raises(DataError, match=r"column x: holds 9223372036854775808; whole numbers of 2\*\*63 and more"):
        opened(parquet(tmp_path, column), "data.fields=[x]", "global_batch=1")


def test_a_field_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.fields=\[x,x\]: names x more than once"):
        opened(text_file(tmp_path / "a.csv", x=[1, 2]), "data.fields=[x,x]")


def test_names_in_headers_may_stand_between_spaces(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x, y ,name\n1, 2,a\n3, 4,b\n")
    dataset = opened(tmp_path / "a.csv", "data.fields=[x,y]", "global_batch=1")
    assert [dataset.sample(row)["y"].item() for row in (0, 1)] == [2, 4]


def test_rows_that_are_not_of_seq_len_are_said(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"input_ids": [1, 2, 3], "labels": [2, 3, 4]} for _ in range(8)))
    words = ["data=hf", f"data.paths=[{path}]", "data.fields=[input_ids,labels]", "data.vocab_size=9", "global_batch=2"]
    said = "data: samples have 3 tokens, as the data has them; seq_len=8 cuts none of them"
    assert said in open_source(load_config([*words, "seq_len=8"])).lines
    assert not any("seq_len" in line for line in open_source(load_config([*words, "seq_len=3"])).lines)


def test_numbers_are_texts_where_the_file_says_so(tmp_path: Path) -> None:
    rows = [{"text": f"{number} 4 1 5"} for number in range(40)]
    assert len(opened(lines(tmp_path / "a.jsonl", *rows))) > 10
    listed = [{"text": str([number, 2])} for number in range(100)]
    with pytest.raises(DataError, match="data.column=text: holds lists of numbers as text"):
        opened(lines(tmp_path / "a.jsonl", *listed, {"text": "[]"}))
    assert len(opened(lines(tmp_path / "a.jsonl", *listed, *({"text": "words"},) * 10)))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    "column", [pa.array([], pa.string()), pa.nulls(0), pa.nulls(3)], ids=["no rows", "null", "nulls"]
)
def test_files_without_values_are_left_out(column: Any, kind: str, first: bool, tmp_path: Path) -> None:
    empty = table_file(tmp_path / f"empty.{kind}", text=column)
    full = table_file(tmp_path / f"full.{kind}", text=pa.array(["abcdefgh", None]))
    assert bytes(ids_of(opened([empty, full] if first else [full, empty]))) == b"abcdefgh\0"
    with pytest.raises(DataError, match="split train is empty|holds null, neither text"):
        opened(empty)


def test_names_of_classes_tell_how_many_there_are(tmp_path: Path) -> None:
    features = datasets.Features({"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=list("abc"))})
    datasets.Dataset.from_dict({"x": [0.5] * 4, "label": [0, 1, 1, 0]}, features=features).save_to_disk(str(tmp_path))
    assert opened(tmp_path, "data.fields=[x,label]").classes == 3
    assert opened(tmp_path, "data.fields=[x]").classes is None


def test_a_key_may_come_late(tmp_path: Path) -> None:
    rows = [{"a": "x"}] * 10_000 + [{"a": "x", "text": "abcdefgh"}]
    path = lines(tmp_path / "a.jsonl", *rows)
    for words in ((), ("data.column=text",)):
        assert bytes(ids_of(opened(path, *words))) == b"abcdefgh\0"


def labelled(path: Path, names: str, **values: Any) -> Path:
    features = datasets.Features({"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=list(names))})
    table = datasets.Dataset.from_dict({"x": [0.0, 1.0] * 8, "label": [0, 1] * 8}, features=features)
    table.to_parquet(str(path)) if path.suffix else table.save_to_disk(str(path))
    return path


def test_classes_have_one_order(tmp_path: Path) -> None:
    words = ("data.fields=[x,label]", "global_batch=2")
    paths = [labelled(tmp_path / f"{names}.parquet", names) for names in ("np", "pn")]
    with pytest.raises(
        DataError, match="column label has other classes in pn.parquet than in np.parquet, or in another"
    ):
        opened(paths, *words)
    saved = [labelled(tmp_path / names, names) for names in ("np", "pn", "np2")]
    evaluated = ("eval.every=1", "eval.data=hf", "eval.data.fields=[x,label]")
    lines_of(saved[0], *words, *evaluated, f"eval.data.paths=[{saved[0]}]")
    with pytest.raises(DataError, match=r"eval.data=hf: label has other classes \(p, n\) than the samples that train"):
        lines_of(saved[0], *words, *evaluated, f"eval.data.paths=[{saved[1]}]")


def test_a_json_file_without_the_column_is_refused(tmp_path: Path) -> None:
    paths = [lines(tmp_path / f"{name}.jsonl", {name: "abcdefgh", "m": 1}) for name in ("text", "body")]
    with pytest.raises(DataError, match="body.jsonl: has no column text; it has body, m"):
        opened(paths)


def test_ids_of_columns_are_of_the_vocabulary(tmp_path: Path) -> None:
    rows = {"input_ids": pa.array([[1, 2], [3, 9]]), "labels": pa.array([[2, -100], [9, -100]])}
    path = table_file(tmp_path / "a.parquet", **rows)
    words = ("data.fields=[input_ids,labels]", "global_batch=1")
    assert opened(path, *words, "data.vocab_size=10").vocab_size == 10
    with pytest.raises(DataError, match="data.vocab_size=9: .*column input_ids holds token 9; nearest valid: 10"):
        opened(path, *words, "data.vocab_size=9")
    path = table_file(tmp_path / "a.parquet", input_ids=pa.array([[1, -100], [3, 9]]), labels=rows["labels"])
    with pytest.raises(DataError, match="column input_ids: holds the negative token id -100"):
        opened(path, *words, "data.vocab_size=10")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns_of_one_name_are_refused(kind: str, tmp_path: Path) -> None:
    from pyarrow import parquet

    table = pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4])], names=["x", "x"])
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    with pytest.raises(DataError, match="has 2 columns x; it has x, x"):
        opened(path, "data.fields=[x]")


@pytest.mark.parametrize("first", [True, False])
def test_empty_parts_say_nothing_of_the_others(first: bool, tmp_path: Path) -> None:
    empty = table_file(tmp_path / "empty.parquet")
    full = labelled(tmp_path / "full.parquet", "np")
    bare = table_file(tmp_path / "bare.parquet", x=pa.array([], pa.float32()), label=pa.nulls(0))
    paths = [empty, bare, full] if first else [full, bare, empty]
    assert len(opened(paths, "data.fields=[x,label]")) == 16
    (tmp_path / "empty.csv").touch()
    rows = text_file(tmp_path / "rows.csv", x=[1, 2])
    paths = [tmp_path / "empty.csv", rows] if first else [rows, tmp_path / "empty.csv"]
    assert len(opened(paths, "data.fields=[x]", "global_batch=1")) == 2


@pytest.mark.parametrize("view", [pa.list_view, pa.large_list_view])
def test_views_of_lists_are_lists(view: Any, tmp_path: Path) -> None:
    path = table_file(tmp_path / "a.arrow", x=pa.array([[1, 2], [3, 4], [5, 6], [7, 8, 9]], view(pa.int64())))
    assert ids_of(opened(path, "data.column=x")) == list(range(1, 10))


def test_columns_of_maps_are_refused(tmp_path: Path) -> None:
    path = table_file(tmp_path / "a.parquet", x=pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64())))
    for words in ("data.fields=[x]", "data.column=x"):
        with pytest.raises(DataError, match="columns x: .*map<string, int64"):
            opened(path, words)


def test_evaluating_what_is_trained_on_is_said(tmp_path: Path) -> None:
    path = labelled(tmp_path / "a.parquet", "np")
    words = ("data.fields=[x,label]", "global_batch=2", "eval.every=1", "eval.data=hf", "eval.data.fields=[x,label]")
    said = "eval.data: reads what data reads, so that samples that are evaluated are trained on"
    for same in (path, tmp_path / ".." / tmp_path.name / "a.parquet", tmp_path):
        assert said in lines_of(path, *words, f"eval.data.paths=[{same}]")
    other = labelled(tmp_path / "b.parquet", "np")
    assert said not in lines_of(path, *words, f"eval.data.paths=[{other}]")


@pytest.mark.parametrize(
    "beside",
    ["no JSON", "[]", '{"info": null}', '{"info": {"features": {"x": {"_type": "ClassLabel", "names": null}}}}'],
)
def test_what_others_write_beside_a_schema_does_not_matter(beside: str, tmp_path: Path) -> None:
    from pyarrow import parquet

    table = pa.table({"x": [1, 0]}).replace_schema_metadata({"huggingface": beside})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert len(opened(tmp_path / "a.parquet", "data.fields=[x]", "global_batch=1")) == 2


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_padding_is_no_part_of_a_stream(kind: str, tmp_path: Path) -> None:
    for padded in (True, False):
        mask = [1, 1, 0 if padded else 1]
        table = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7]] * 3, "attention_mask": [mask] * 3})
        path = tmp_path / f"{padded}" if kind == "saved" else tmp_path / f"{padded}.{kind}"
        save = {"jsonl": table.to_json, "parquet": table.to_parquet, "saved": table.save_to_disk}[kind]
        save(str(path))
        if padded:
            with pytest.raises(
                DataError, match="data.column=input_ids: some of its tokens are padding, .* as 0 in attention_mask"
            ):
                opened(path, "data.column=input_ids")
        else:
            assert ids_of(opened(path, "data.column=input_ids")) == [5, 6, 7] * 3


@pytest.mark.parametrize(
    ("name", "beside", "values", "words"),
    [
        ("token_ids", "attention_mask", [1, 1, 0], "padding, .* as 0 in attention_mask"),
        ("input_ids", "loss_mask", [0, 1, 1], "as 0 in loss_mask"),
        ("tokens", "label", [-100, 6, 7], "as -100 in label"),
        ("tokens", "labels", [5, 6, 7], None),
    ],
)
def test_what_leaves_tokens_out_has_several_names(
    name: str, beside: str, values: list[int], words: str | None, tmp_path: Path
) -> None:
    columns = {name: pa.array([[5, 6, 7]] * 3), beside: pa.array([values] * 3)}
    path = table_file(tmp_path / "a.parquet", **columns)
    if words is None:
        assert ids_of(opened(path, f"data.column={name}")) == [5, 6, 7] * 3
    else:
        with pytest.raises(DataError, match=words):
            opened(path, f"data.column={name}")


@pytest.mark.parametrize("padded", [True, False])
def test_masks_may_be_truths(padded: bool, tmp_path: Path) -> None:
    mask = pa.array([[True, True, not padded]] * 3)
    path = table_file(tmp_path / "a.parquet", input_ids=pa.array([[5, 6, 7]] * 3), attention_mask=mask)
    if padded:
        with pytest.raises(DataError, match="some of its tokens are padding, .* as 0 in attention_mask"):
            opened(path, "data.column=input_ids")
    else:
        assert ids_of(opened(path, "data.column=input_ids")) == [5, 6, 7] * 3


@pytest.mark.parametrize("labels", [["pos", "neg", "pos"], [["O", "B"]] * 3, [True, False, True], [b"a"] * 3])
def test_labels_that_are_no_tokens_do_not_matter_to_a_stream(labels: list[Any], tmp_path: Path) -> None:
    path = table_file(tmp_path / "a.parquet", input_ids=pa.array([[5, 6, 7]] * 3), labels=pa.array(labels))
    assert ids_of(opened(path, "data.column=input_ids")) == [5, 6, 7] * 3


def test_an_empty_list_of_whole_numbers_is_whole(tmp_path: Path) -> None:
    path = table_file(tmp_path / "a.parquet", x=pa.array([[1, 2], []]), y=pa.array([[1.5], [0.5]]))
    dataset = opened(path, "data.fields=[x,y]", "global_batch=1", "data.transform._target_=tests.data.transforms.same")
    kinds = [[dataset.sample(row)[name].dtype for name in "xy"] for row in range(2)]
    assert kinds[0] == kinds[1] == [torch.int64, torch.float32]


@pytest.mark.parametrize("label", [-1, 3, -100])
def test_labels_are_of_their_classes(label: int, tmp_path: Path) -> None:
    features = datasets.Features({"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=list("abc"))})
    table = datasets.Dataset.from_dict({"x": [0.5] * 4, "label": [0, 1, 2, 0]}, features=features)
    changed = table.data.table.set_column(1, "label", pa.array([0, 1, 2, label]))
    from pyarrow import parquet

    parquet.write_table(changed.replace_schema_metadata(features.arrow_schema.metadata), tmp_path / "a.parquet")
    if label == -100:
        assert opened(tmp_path / "a.parquet", "data.fields=[x,label]").classes == 3
        return
    with pytest.raises(DataError, match=f"column label: holds the label {label}, and its 3 classes are 0 to 2"):
        opened(tmp_path / "a.parquet", "data.fields=[x,label]")


def test_ids_of_evaluation_are_of_the_vocabulary_that_trains(tmp_path: Path) -> None:
    for name, most in (("a", 99), ("b", 150)):
        table_file(tmp_path / f"{name}.parquet", input_ids=pa.array([[1, most]] * 4), labels=pa.array([[1, 2]] * 4))
    words = ("data.fields=[input_ids,labels]", "data.vocab_size=100", "global_batch=2", "eval.every=1", "eval.data=hf",
             "eval.data.fields=[input_ids,labels]")  # fmt: skip
    lines_of(tmp_path / "a.parquet", *words, f"eval.data.paths=[{tmp_path}/a.parquet]")
    with pytest.raises(DataError, match="eval.data.vocab_size=100: .*column input_ids holds token 150"):
        lines_of(tmp_path / "a.parquet", *words, f"eval.data.paths=[{tmp_path}/b.parquet]")


def test_labels_beside_token_ids_count(tmp_path: Path) -> None:
    ids = pa.array([[5, 6, 7]] * 3)
    path = table_file(tmp_path / "a.parquet", input_ids=ids, labels=pa.array([[-100, 6, 7]] * 3))
    with pytest.raises(DataError, match="data.column=input_ids: some of its tokens .* as -100 in labels tells"):
        opened(path, "data.column=input_ids")
    assert ids_of(opened(table_file(path, input_ids=ids, labels=ids), "data.column=input_ids")) == [5, 6, 7] * 3


@pytest.mark.parametrize("header", ["PARENT_ID,TEXT", "PAR1,PAR2", "FEA1,FEA2", "GGUF,TEXT", "Obj,GIF8"])
def test_letters_of_a_format_may_begin_a_text(header: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n" + "1,2\n" * 8)
    assert len(opened(tmp_path / "a.csv", f"data.fields=[{header}]", "global_batch=1")) == 8
