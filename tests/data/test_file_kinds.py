"""Files say what they are: containers are read as what they are or refused by name, and flat files of another width
than data.dtype are refused."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from elaswave_fx.config.compose import load_config
from elaswave_fx.data import Dataset, open_data
from elaswave_fx.data.file_kinds import TEXT, kind_of
from elaswave_fx.errors import DataError

TOKENS = (np.arange(4000) * 7919 % 100).astype(np.uint16)


def opened(kind: str, path: Path, *words: str) -> Dataset:
    return open_data(load_config([f"data={kind}", f"data.paths=[{path}]", "seq_len=16", "cache.enabled=false", *words]))


def llm_c(magic: int, version: int, tokens: np.ndarray, count: int | None = None) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.tobytes()


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", "<u4", "<i8"])
def test_a_numpy_array_is_read_by_its_own_header(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", TOKENS.astype(dtype))
    dataset = opened("memmap", tmp_path / "tokens.npy")
    assert (len(dataset), dataset.vocab_size) == (3999 // 16, 100)
    assert dataset.sample(3)["labels"].tolist() == TOKENS[49:65].tolist()


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_a_token_file_of_llm_c_is_read_behind_its_header(magic: int, version: int, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(llm_c(magic, version, TOKENS.astype(dtype)))
    dataset = opened("memmap", tmp_path / "train.bin")
    assert dataset.vocab_size == 100
    assert dataset.sample(0)["input_ids"].tolist() == TOKENS[:16].tolist()


def test_containers_are_joined_with_flat_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", TOKENS.astype(np.int64))
    TOKENS.tofile(tmp_path / "b.bin")
    (tmp_path / "c.bin").write_bytes(llm_c(20240520, 1, TOKENS))
    assert len(opened("memmap", tmp_path)) == (3 * 4000 - 1) // 16


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((4, 100), np.uint16), r"of shape \[4, 100\]; a stream of tokens has one dimension"),
        (np.zeros(100, np.float32), "of float32; token ids are integers"),
        (np.array([[1], [2, 3]], object), "cannot be read"),
        (np.array([5, -100, 7] * 20), "holds the negative token id -100"),
    ],
    ids=["rows", "floats", "objects", "negative"],
)
def test_arrays_that_are_no_stream_of_tokens(array: np.ndarray, words: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=words):
        opened("memmap", tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (llm_c(20240520, 2, TOKENS), "of version 2; version 1 is known"),
        (llm_c(20240520, 1, TOKENS, count=5000), "which says 5000 tokens, and 4000 follow it"),
        (llm_c(20240522, 1, TOKENS), "an evaluation file of llm.c"),
    ],
)
def test_files_of_llm_c_that_are_not_read(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(DataError, match=words):
        opened("memmap", tmp_path / "x.bin")


def tensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"ids": torch.arange(100)}, path)


def archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes.txt", "words")


def tar(path: Path) -> None:
    with tarfile.open(path, "w") as file:
        file.addfile(tarfile.TarInfo("notes.txt"), io.BytesIO(b""))


def parquet(path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"ids": [[1, 2]]}), path)


def arrow(stream: bool) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import pyarrow as pa

        table = pa.table({"ids": [[1, 2]]})
        with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as file:
            file.write_table(table)

    return write


def database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("create table t (x)")


def old_torch(path: Path) -> None:
    torch.save(torch.arange(9), path, _use_new_zipfile_serialization=False)


def npz(path: Path) -> None:
    np.savez(path.open("wb"), ids=TOKENS)


def hdf5(path: Path) -> None:
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))


def written(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


ROWS = [{"ids": list(range(9)), "name": str(number)} for number in range(50)]
CONTAINERS = {
    "a Parquet table; data=hf": parquet,
    "an Arrow table; data=hf ": arrow(stream=False),
    "an Arrow table; data=hf": arrow(stream=True),
    "compressed by gzip; decompress": written(gzip.compress(TOKENS.tobytes())),
    "compressed by bzip2; decompress": written(bz2.compress(TOKENS.tobytes())),
    "compressed by xz; decompress": written(lzma.compress(TOKENS.tobytes())),
    "compressed by zstd; decompress": written(b"\x28\xb5\x2f\xfd\x24\x05" + bytes(20)),
    "an archive of NumPy arrays (.npz); save": npz,
    "a zip archive; unpack": archive,
    "a tar archive; unpack": tar,
    "a file of torch.save; save": lambda path: torch.save(torch.arange(9), path),
    "a file of torch.save; save ": old_torch,
    "a file of safetensors; save": tensors,
    "an HDF5 file; save": hdf5,
    "a pickle; save": written(pickle.dumps(ROWS)),
    "a pickle; save ": written(pickle.dumps(ROWS, protocol=2)),
    "an SQLite database; export": database,
    "a packed dataset of lit-gpt; save": written(b"LITPKDS" + bytes(17) + TOKENS.tobytes()),
    "a PDF; extract": written(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj"),
    "a PNG image; leave": written(b"\x89PNG\r\n\x1a\n" + bytes(20)),
}


@pytest.mark.parametrize("words", CONTAINERS)
def test_what_is_neither_tokens_nor_text_is_refused_by_name(words: str, tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    CONTAINERS[words](path)
    name, _, cure = words.strip().partition("; ")
    for kind, rest in (("memmap", "no flat file of tokens"), ("files", "no text")):
        with pytest.raises(DataError) as caught:
            opened(kind, path)
        assert str(caught.value).startswith(f"data.paths={path}: is {name}, {rest}; {cure}"), kind


def test_text_is_no_file_of_tokens_and_tokens_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text("import numpy\n" * 20)
    with pytest.raises(DataError, match="prepare.py: is text, no file of tokens; data=files reads it"):
        opened("memmap", tmp_path)
    (tmp_path / "prepare.py").unlink()
    np.save(tmp_path / "x.npy", TOKENS)
    with pytest.raises(DataError, match="x.npy: is a NumPy array .*no text; data=memmap reads it"):
        opened("files", tmp_path)
    (tmp_path / "x.npy").unlink()
    TOKENS.tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match="x.bin: is no text, it has bytes of 0 .*data=memmap"):
        opened("files", tmp_path)
    (tmp_path / "x.bin").write_text("Wörter und mehr\n" * 20, encoding="utf-16")
    with pytest.raises(DataError, match="x.bin: is text in UTF-16 or UTF-32; save it in UTF-8"):
        opened("files", tmp_path)


def test_text_of_any_kind_is_text(tmp_path: Path) -> None:
    texts = (
        "häßlich, 漢字 👋\n" * 2000,
        "BZh is no archive, nor is PK" * 9,
        '{"a": 1}\n' * 9,
        "\x1b[1mred\x1b[0m" * 9,
    )
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.txt"
        path.write_text(text, encoding="utf-8")
        assert kind_of(path) is TEXT, text[:20]
    (tmp_path / "latin-1.txt").write_bytes("Straße und Häuser\n".encode("latin-1") * 20)
    opened("files", tmp_path)  # byte by byte, as ever


@pytest.mark.parametrize(
    ("stored", "read", "vocab_size", "words"),
    [
        ("<u4", "uint16", None, "every second token is 0; nearest valid: data.dtype=uint32"),
        ("<i4", "uint16", None, "every second token is 0; nearest valid: data.dtype=uint32"),
        ("<i8", "uint16", None, "3 of every 4 tokens are 0; nearest valid: data.dtype=int64"),
        ("<i8", "uint32", None, "every second token is 0; nearest valid: data.dtype=int64"),
        ("<i8", "uint8", None, "7 of every 8 tokens are 0; nearest valid: data.dtype=int64"),
        ("<u2", "uint32", None, "as of two ids in one; nearest valid: data.dtype=uint16"),
        ("<u2", "int64", None, "as of two ids in one; nearest valid: data.dtype=uint16"),
        ("<u4", "int64", None, "as of two ids in one; nearest valid: data.dtype=uint32"),
        ("<u2", "uint32", 100, "beyond data.vocab_size=100; nearest valid: data.dtype=uint16"),
        ("u1", "uint16", 100, "beyond data.vocab_size=100; nearest valid: data.dtype=uint8"),
        ("<u2", "uint16", 50, "id 99, beyond data.vocab_size=50; nearest valid: data.vocab_size=100"),
    ],
)
def test_flat_files_of_another_width(
    stored: str, read: str, vocab_size: int | None, words: str, tmp_path: Path
) -> None:
    TOKENS.astype(stored).tofile(tmp_path / "x.bin")
    with pytest.raises(DataError) as caught:
        opened("memmap", tmp_path / "x.bin", f"data.dtype={read}", f"data.vocab_size={vocab_size or 'null'}")
    assert str(caught.value).startswith(f"data.paths={tmp_path}/x.bin: cannot be tokens of data.dtype={read}: ")
    assert str(caught.value).endswith(words)


CHARACTERS = np.random.default_rng(1).choice(65, 4000, p=np.arange(65) / np.arange(65).sum()).astype("u1")
TEXT_IDS = np.unique(np.frombuffer(Path(__file__).read_bytes()[:8000], "u1"), return_inverse=True)[1].astype("u1")
SAMPLES_OF_SOUND = np.random.default_rng(1).normal(128, 40, 8000).clip(0, 255).astype("u1")
LARGE = np.random.default_rng(0).integers(0, 128_256, 20_000)
USED_ALIKE = "both bytes of ids .* are used alike.*; nearest valid: data.dtype=uint8"


@pytest.mark.parametrize(
    ("tokens", "read", "words"),
    [
        (
            CHARACTERS,
            "uint16",
            r"both bytes of ids \(up to 64 and 64\) are used alike.*; nearest valid: data.dtype=uint8",
        ),
        (
            np.where(np.arange(4000) % 100 < 50, 0, CHARACTERS),
            "uint16",
            "used alike.*; nearest valid: data.dtype=uint8",
        ),
        (TEXT_IDS, "uint16", USED_ALIKE),
        (SAMPLES_OF_SOUND, "uint16", USED_ALIKE),
        (np.tile(TEXT_IDS[:86], 80), "uint16", USED_ALIKE),
        (np.tile(TEXT_IDS[:86], 80), "uint32", "data.dtype=uint8"),
        (TEXT_IDS[:400], "uint16", USED_ALIKE),
        ((LARGE % 250).astype("u1")[:3000], "uint16", USED_ALIKE),
        (CHARACTERS, "uint32", "the upper half of ids .*; nearest valid: data.dtype=uint8"),
        (
            (np.arange(4000) * 7919 % 500).astype("<u2"),
            "uint8",
            "second token is at most 1, .*: data.dtype=uint16",
        ),
        ((np.arange(4000) * 7919 % 5000).astype("<u2"), "uint8", "second token is at most 19, .*: data.dtype=uint16"),
    ],
    ids=[
        "characters",
        "padded",
        "text",
        "sound",
        "repeated",
        "repeated as uint32",
        "short",
        "random",
        "characters as uint32",
        "500 ids",
        "5000 ids",
    ],
)
def test_bytes_are_not_read_as_ids_of_two(tokens: np.ndarray, read: str, words: str, tmp_path: Path) -> None:
    tokens.tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match=f"cannot be tokens of data.dtype={read}: .*{words}"):
        opened("memmap", tmp_path / "x.bin", f"data.dtype={read}")


@pytest.mark.parametrize(
    ("tokens", "read"),
    [
        (TOKENS, "uint16"),
        (TOKENS % 2, "uint16"),
        (np.zeros(4000, np.uint16), "uint16"),
        (LARGE.astype("<u4"), "uint32"),
        (LARGE.astype("<i8"), "int64"),
        ((LARGE % 50257).astype("<u2"), "uint16"),
        ((LARGE % 256).astype("u1"), "uint8"),
        (CHARACTERS, "uint8"),
        (TEXT_IDS, "uint8"),
        (np.repeat((LARGE % 200).astype("<u2"), 3), "uint16"),
        (np.where(LARGE < 64_000, 0, LARGE % 500).astype("<u2"), "uint16"),
        (np.where(LARGE % 9 == 0, 256 + LARGE % 100, 32 + LARGE % 90).astype("<u2"), "uint16"),
        (np.tile(LARGE[:40] % 50257, 300).astype("<u2"), "uint16"),
        (LARGE.astype("<u2") & 0xFFFE, "uint16"),
        ((LARGE % 4096 << 4).astype("<u2"), "uint16"),
    ],
    ids=[
        "small",
        "bits",
        "padding",
        "uint32",
        "int64",
        "uint16",
        "uint8",
        "characters",
        "text",
        "repeated",
        "half padding",
        "bytes and marks",
        "repeated words",
        "even",
        "of 12 bits",
    ],
)
def test_flat_files_of_their_own_width_are_read(tokens: np.ndarray, read: str, tmp_path: Path) -> None:
    tokens.tofile(tmp_path / "x.bin")
    assert opened("memmap", tmp_path / "x.bin", f"data.dtype={read}").vocab_size == int(tokens.max()) + 1


ZIPF = np.minimum(np.random.default_rng(2).zipf(1.3, 20_000), 50_256)


@pytest.mark.parametrize("read", ["uint8", "uint16", "uint32", "int64"])
@pytest.mark.parametrize("kind", ["f4", "f8", ">i4", ">i8", ">u2"])
def test_what_is_no_little_endian_integer_is_refused(kind: str, read: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=20_000) if kind[0] == "f" else ZIPF
    values.astype(kind).tofile(tmp_path / "x.bin")
    words = {"f4": "float32 numbers", "f8": "float64 numbers"}.get(kind, f"integers of {kind[-1]} bytes in big-endian")
    if (kind, read) == (">u2", "uint8"):
        assert opened("memmap", tmp_path / "x.bin", f"data.dtype={read}").vocab_size == 256
        return
    with pytest.raises(DataError, match=f"cannot be tokens of data.dtype={read}: they look like {words}"):
        opened("memmap", tmp_path / "x.bin", f"data.dtype={read}")
    if kind == "f4":
        TOKENS.astype(kind).tofile(tmp_path / "x.bin")
        with pytest.raises(DataError, match="they look like float32 numbers"):
            opened("memmap", tmp_path / "x.bin", f"data.dtype={read}", "data.vocab_size=100")


def test_a_vocabulary_does_not_make_tokens_of_what_is_none(tmp_path: Path) -> None:
    np.random.default_rng(0).normal(size=20_000).astype("f4").tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match="they look like float32 numbers"):
        opened("memmap", tmp_path / "x.bin", "data.dtype=uint16", "data.vocab_size=65536")
    np.random.default_rng(0).integers(0, 128_256, 20_000).astype(">i4").tofile(tmp_path / "x.bin")
    for words in (("data.dtype=uint32",), ("data.dtype=uint16", "data.vocab_size=65536")):
        with pytest.raises(DataError, match="they look like integers of 4 bytes in big-endian order"):
            opened("memmap", tmp_path / "x.bin", *words)


SMALL_IDS = np.where(np.arange(20_000) % 30 == 29, 151_643, np.random.default_rng(4).integers(10, 25, 20_000))
PADDED_IDS = np.where(np.arange(20_000) % 100 < 60, 0, np.random.default_rng(5).integers(0, 128_256, 20_000))


@pytest.mark.parametrize("read", ["uint16", "uint8"])
@pytest.mark.parametrize("ids", [SMALL_IDS, PADDED_IDS], ids=["small", "padded"])
def test_ids_that_are_mostly_small_are_of_their_width(ids: np.ndarray, read: str, tmp_path: Path) -> None:
    ids.astype("<u4").tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match=f"cannot be tokens of data.dtype={read}: .*nearest valid: data.dtype=uint32"):
        opened("memmap", tmp_path / "x.bin", f"data.dtype={read}")
    assert opened("memmap", tmp_path / "x.bin", "data.dtype=uint32").vocab_size == int(ids.max()) + 1
    marked = np.where(ids > 60_000, 50_256, ids % 50_000).astype("<u2")
    marked.tofile(tmp_path / "x.bin")
    assert opened("memmap", tmp_path / "x.bin", "data.dtype=uint16").vocab_size == int(marked.max()) + 1


def test_ids_of_text_are_read_in_their_own_order(tmp_path: Path) -> None:
    for number, (ids, kind) in enumerate(((ZIPF, "<u2"), (ZIPF, "<u4"), (ZIPF % 300, "<u2"), (ZIPF + 15_000, "<u2"))):
        ids.astype(kind).tofile(tmp_path / f"{number}.bin")
        read = opened("memmap", tmp_path / f"{number}.bin", f"data.dtype={np.dtype(kind).name}")
        assert read.vocab_size == int(ids.max()) + 1, number


def test_ids_of_two_bytes_are_read_when_the_vocabulary_says_so(tmp_path: Path) -> None:
    """Such as a note and how loud it is."""
    (LARGE % 100 * 256 + LARGE // 100 % 100).astype("<u2").tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match=r"are used alike, as of two ids in one \(data.vocab_size tells if"):
        opened("memmap", tmp_path / "x.bin")
    assert opened("memmap", tmp_path / "x.bin", "data.vocab_size=65536").vocab_size == 65536


def test_negative_ids_are_named(tmp_path: Path) -> None:
    np.where(np.arange(4000) % 50, TOKENS.astype("<i8"), -1).tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match=r"x.bin: holds the negative id -1; token ids are 0 or more"):
        opened("memmap", tmp_path / "x.bin", "data.dtype=int64")


def test_negative_ids_of_another_width_have_their_width_named(tmp_path: Path) -> None:
    (np.random.default_rng(0).integers(0, 65_000, 4000)).astype("<u2").tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match="it would hold the negative id -.*; nearest valid: data.dtype=uint16"):
        opened("memmap", tmp_path / "x.bin", "data.dtype=int32")


def test_a_large_vocabulary_in_32_bits_is_not_read_as_16(tmp_path: Path) -> None:
    LARGE.astype("<u4").tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match="every second token is below 16; nearest valid: data.dtype=uint32"):
        opened("memmap", tmp_path / "x.bin")


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32"])
@pytest.mark.parametrize("between", [b"", b'{"version": 2}'])
def test_chunks_of_streams_are_refused_by_name(between: bytes, dtype: str, tmp_path: Path) -> None:
    begin = 4 * 102 + len(between)
    words = np.array([100, *(begin + 626 * np.arange(101))], "<u4")
    (tmp_path / "x.bin").write_bytes(words.tobytes() + between + TOKENS.astype("<u2").tobytes() * 8)
    size = int(words[-1])
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes()[:size])
    with pytest.raises(DataError, match="is a chunk of litdata or MosaicML streaming, no flat file of tokens"):
        opened("memmap", tmp_path / "x.bin", f"data.dtype={dtype}")


def test_arrays_in_one_file_are_not_read_in_part(tmp_path: Path) -> None:
    with (tmp_path / "x.npy").open("wb") as file:
        np.save(file, TOKENS)
        np.save(file, TOKENS)
    with pytest.raises(DataError, match=r"x.npy: is a NumPy array \(.npy\) of 4000 values, and something follows them"):
        opened("memmap", tmp_path / "x.npy")


@pytest.mark.parametrize("name", ["x.npy", "rows.jsonl"])
def test_ids_beyond_a_vocabulary_that_was_given_are_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", TOKENS)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"ids": TOKENS.tolist()}))
    with pytest.raises(DataError, match="data.vocab_size=99: data=.* holds token 99; nearest valid: 100"):
        opened("memmap" if name == "x.npy" else "hf", tmp_path / name, "data.vocab_size=99")
