"""Kinds of files, found by their first bytes: a magic number, a consistent header, or text.

    kind_of(Path("tokens.npy"))    ->  NUMPY
    kind_of(Path("rows.parquet"))  ->  FileKind("a Parquet table", "data=hf reads it")
    kind_of(Path("train.bin"))     ->  None: nothing is known of it, as of a flat file of tokens

A short magic number that raw tokens may contain by chance needs confirmation by the bytes that follow it.
"""

import codecs
import json
import pickletools
import zipfile
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from elaswave_fx.errors import DataError

_HEAD = 1 << 14
"""Bytes examined."""

_LONG = 8
"""Length of a format's initial letters that does not occur in text by chance."""

_LEAST_TEXT = 16
"""Minimum of bytes: fewer may be printable by chance."""

_OPCODES = 16
"""Number of consecutive pickle operations that does not occur by chance."""

_SIZE = 8
"""Bytes of the length before a safetensors header."""


@dataclass(frozen=True)
class FileKind:
    """A format: its `name` in a sentence, and the right way to use such a file."""

    name: str
    cure: str


_UNPACK = "decompress it first"
_TENSORS = "save its token ids with numpy.save as one array, which data=memmap reads"
_FETCH = "fetch the file itself, as git lfs pull and git annex get do"
_ELSEWHERE = "leave it out of data.paths"

NUMPY = FileKind("a NumPy array (.npy)", "data=memmap reads it")
LLM_C = FileKind("a token file of llm.c with its header", "data=memmap reads it")
MEGATRON = FileKind(
    "an index or a token file of Megatron-LM", "data=memmap reads it, as data.paths=[NAME.bin] with NAME.idx beside it"
)
TEXT = FileKind("text", "data=files reads it")

_MAGIC: tuple[tuple[int, bytes, FileKind], ...] = (
    (0, b"\x93NUMPY", NUMPY),
    (0, b"MMIDIDX\x00\x00", MEGATRON),
    (0, b"LITPKDS", FileKind("a packed dataset of lit-gpt", _TENSORS)),
    (0, b"version https://git-lfs.github.com/spec/", FileKind("a pointer of Git LFS", _FETCH)),
    (0, b"/annex/objects/", FileKind("a pointer of git-annex", _FETCH)),
    (0, b"PAR1", FileKind("a Parquet table", "data=hf reads it")),
    (0, b"PARE", FileKind("an encrypted Parquet table", "decrypt it, and data=hf reads it")),
    (0, b"ARROW1\x00\x00", FileKind("an Arrow table", "data=hf reads it")),
    (0, b"FEA1", FileKind("a Feather table", "save it as Parquet, which data=hf reads")),
    (0, b"ORC\x0a", FileKind("an ORC table", "save it as Parquet, which data=hf reads")),
    (0, b"Obj\x01\x04", FileKind("an Avro table", "save it as Parquet, which data=hf reads")),
    (0, b"\x28\xb5\x2f\xfd", FileKind("compressed by zstd", _UNPACK)),
    (0, b"\xfd7zXZ\x00", FileKind("compressed by xz", _UNPACK)),
    (0, b"\x04\x22\x4d\x18", FileKind("compressed by lz4", _UNPACK)),
    (0, b"\xff\x06\x00\x00sNaPpY", FileKind("compressed by snappy", _UNPACK)),
    (0, b"7z\xbc\xaf\x27\x1c", FileKind("a 7z archive", "unpack it first")),
    (0, b"Rar!\x1a\x07", FileKind("a RAR archive", "unpack it first")),
    (257, b"ustar", FileKind("a tar archive", "unpack it first")),
    (0, b"\x89HDF\r\n\x1a\n", FileKind("an HDF5 file", _TENSORS)),
    (512, b"\x89HDF\r\n\x1a\n", FileKind("an HDF5 file", _TENSORS)),
    (0, b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", FileKind("a file of torch.save", _TENSORS)),
    (0, b"SQLite format 3\x00", FileKind("an SQLite database", "export a table as Parquet, which data=hf reads")),
    (0, b"GGUF", FileKind("a GGUF model", _ELSEWHERE)),
    (0, b"%PDF-", FileKind("a PDF", "extract its text first")),
    (0, b"\x89PNG\r\n\x1a\n", FileKind("a PNG image", _ELSEWHERE)),
    (0, b"\xff\xd8\xff", FileKind("a JPEG image", _ELSEWHERE)),
    (0, b"GIF8", FileKind("a GIF image", _ELSEWHERE)),
    (0, b"\x7fELF", FileKind("a compiled program", _ELSEWHERE)),
)  # fmt: skip
"""(offset, bytes, format). Raw tokens match by chance in at most one of 2^24 files."""

_LLM_C_OTHERS = {
    20240522: "an evaluation file of llm.c",
    20240326: "a model of llm.c",
    20240328: "a tokenizer of llm.c",
}
LLM_C_TOKENS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Magic number -> (version, type) of the token files that llm.c's data scripts write."""


def kind_of(path: Path) -> FileKind | None:
    """The kind, or None if unknown. Raises `DataError` if the file cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"data.paths={path}: cannot be read ({error.strerror})") from error
    is_text = _is_text(head)
    for offset, magic, kind in _MAGIC:
        # A text may begin with a format's letters; a binary format soon has unprintable bytes.
        if head[offset : offset + len(magic)] == magic and not (is_text and len(magic) < _LONG):
            return kind
    for look in (_llm_c, _zip, _compressed, _arrow_stream, _safetensors, _pickle, _megatron, _chunk):
        kind = look(head, size, path)
        if kind is not None:
            return kind
    return TEXT if is_text else None


def refuse_no_text(path: Path) -> Path:
    """The path, if the file is text in UTF-8. Raises `DataError` with its actual kind."""
    kind = kind_of(path)
    if kind is TEXT:
        return path
    if kind is not None:
        raise DataError(f"data.paths={path}: is {kind.name}, no text; {kind.cure}")
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        raise DataError(f"data.paths={path}: is text in UTF-16 or UTF-32; save it in UTF-8")
    if b"\0" in head:
        raise DataError(
            f"data.paths={path}: is no text, it has bytes of 0 (the mark at the end of a document); flat files of "
            "tokens are read by data=memmap"
        )
    return path


def _llm_c(head: bytes, size: int, path: Path) -> FileKind | None:
    magic, version, count = (int.from_bytes(head[place : place + 4], "little") for place in (0, 4, 8))
    if magic in LLM_C_TOKENS and 0 < version < 100:
        return LLM_C
    if magic in _LLM_C_OTHERS and 0 < version < 100 and count < size:
        return FileKind(_LLM_C_OTHERS[magic], _ELSEWHERE)
    return None


def _chunk(head: bytes, size: int, path: Path) -> FileKind | None:
    """A chunk of litdata or MosaicML streaming: the number of samples and their offsets, as 32-bit words; the last one
    is the end of the file."""
    count, first = (int.from_bytes(head[place : place + 4], "little") for place in (0, 4))
    end = 4 * (count + 2)
    if count < 1 or not end <= first < size:
        return None
    with path.open("rb") as file:
        file.seek(end - 4)
        last = int.from_bytes(file.read(4), "little")
    return FileKind("a chunk of litdata or MosaicML streaming", _TENSORS) if last == size else None


def _megatron(head: bytes, size: int, path: Path) -> FileKind | None:
    return MEGATRON if path.suffix == ".bin" and path.with_suffix(".idx").is_file() else None


def _zip(head: bytes, size: int, path: Path) -> FileKind | None:
    if not head.startswith((b"PK\x03\x04", b"PK\x05\x06")) or not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        names = []
    if any(name.endswith("data.pkl") for name in names):
        return FileKind("a file of torch.save", _TENSORS)
    if names and all(name.endswith(".npy") for name in names):
        return FileKind("an archive of NumPy arrays (.npz)", _TENSORS)
    if "[Content_Types].xml" in names:
        return FileKind("a document of an office program", "export it as text first")
    return FileKind("a zip archive", "unpack it first")


def _compressed(head: bytes, size: int, path: Path) -> FileKind | None:
    """gzip or bzip2, if the first block decompresses."""
    if head.startswith(b"\x1f\x8b\x08"):
        try:
            zlib.decompressobj(wbits=31).decompress(head)
        except zlib.error:
            return None
        return FileKind("compressed by gzip", _UNPACK)
    is_bzip2 = head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
    return FileKind("compressed by bzip2", _UNPACK) if is_bzip2 else None


def _arrow_stream(head: bytes, size: int, path: Path) -> FileKind | None:
    """An Arrow stream: the mark of a message, the length of its metadata, which ends at a multiple of 8, and the
    schema's version and kind in it."""
    length = int.from_bytes(head[4:8], "little")
    if head[:4] != b"\xff\xff\xff\xff" or not 16 <= length < size or length % 8:
        return None
    root = int.from_bytes(head[8:12], "little")
    return FileKind("an Arrow table", "data=hf reads it") if root < min(length, 256) else None


def _safetensors(head: bytes, size: int, path: Path) -> FileKind | None:
    length = int.from_bytes(head[:_SIZE], "little")
    if head[_SIZE : _SIZE + 2] not in (b'{"', b"{}", b"{ ", b"{\n") or not 2 <= length <= size - _SIZE:
        return None
    if length + _SIZE <= len(head):
        try:
            json.loads(head[_SIZE : _SIZE + length])
        except ValueError:
            return None
    return FileKind("a file of safetensors", _TENSORS)


def _pickle(head: bytes, size: int, path: Path) -> FileKind | None:
    """A pickle of protocols 2 to 5: with a frame that fits into the file, or valid operations."""
    if len(head) < 2 or head[0] != 0x80 or not 2 <= head[1] <= 5:
        return None
    framed = head[2:3] == b"\x95" and int.from_bytes(head[3:11], "little") <= size
    return FileKind("a pickle", _TENSORS) if framed or _operations(head) >= _OPCODES else None


def _operations(head: bytes) -> int:
    """The number of pickle operations at the start; at least the minimum for a complete pickle."""
    seen = 0
    try:
        for _ in pickletools.genops(BytesIO(head)):
            seen += 1
    except (ValueError, IndexError, OverflowError):
        return seen
    return max(seen, _OPCODES)


def _is_text(head: bytes) -> bool:
    """Whether the bytes are UTF-8 of printable characters; a character cut off at the end is ignored."""
    if len(head) < _LEAST_TEXT:
        return False
    text = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        decoded = text.decode(head, final=len(head) < _HEAD)
    except UnicodeDecodeError:
        return False
    return not any(ord(mark) < 32 and mark not in "\t\n\r\f\x1b\b" for mark in decoded)
