"""Files of tokens, memory-mapped: flat `.bin` files, NumPy's `.npy`, those of llm.c, the indexed files of Megatron-LM.

A flat file contains only integers, little-endian. Other formats are recognized by content (`file_kinds`): NumPy's by
its header, llm.c's by 256 leading int32 (magic number, version, number of tokens). Megatron's `NAME.bin` is a flat file
of any integer type, and `NAME.idx` beside it locates the sequences (public format, version 1, all little-endian):

    9 bytes "MMIDIDX" 0 0    uint64 version 1    uint8 type code    uint64 s, sequences    uint64 d, document bounds
    int32[s] tokens per sequence    int64[s] byte offset of each in the .bin    int64[d] first sequence per document
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from elaswave_fx.config.validation import show
from elaswave_fx.data.corpus import matching_files
from elaswave_fx.data.file_kinds import LLM_C, LLM_C_TOKENS, NUMPY, TEXT, kind_of
from elaswave_fx.data.token_width import refuse_other_width
from elaswave_fx.data.tokens import ArrayTokens, JoinedTokens, PiecedTokens, TokenStream
from elaswave_fx.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = len(_MAGIC) + 8 + 1 + 8 + 8
# Codes 6 and 7 are floating-point types, which are not tokens.
_TYPE_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_SUFFIXES_OF_TEXT = (".json", ".jsonl", ".txt", ".md", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".log", ".py", ".sh")
"""Suffixes of files that may be too short to be recognized as text."""

_LLM_C_BYTES = 4 * 256
"""Bytes of llm.c's header."""


def open_token_files(patterns: Sequence[str], dtype: str, vocab_size: int | None = None) -> TokenStream:
    """One stream of the tokens of all files, in the order of the patterns. `dtype`: of flat files; `vocab_size`: upper
    bound of ids, if known.

    Raises `DataError` for files that are missing, empty, cut off, of an unsupported format, or of another width.
    """
    expanded = [_with_suffix(pattern) for pattern in patterns]
    files = [path for path in matching_files(expanded) if path.suffix != ".idx"]
    if not files:
        raise DataError(f"data.paths={show(patterns)}: names .idx files alone; name the .bin beside them")
    streams = [_open(path, dtype, vocab_size) for path in files]
    return streams[0] if len(streams) == 1 else JoinedTokens(streams)


def _with_suffix(pattern: str) -> str:
    """The pattern with a suffix: Megatron names a pair of files by their common prefix."""
    path = Path(pattern).expanduser()
    paired = path.with_name(path.name + ".bin") if path.name else path
    return str(paired) if not path.exists() and paired.is_file() else pattern


def _open(path: Path, dtype: str, vocab_size: int | None) -> TokenStream:
    index = path.with_suffix(".idx")
    if index.is_file():
        return _open_indexed(path, index)
    kind = kind_of(path)
    if kind is NUMPY:
        return ArrayTokens(_array(path))
    if kind is LLM_C:
        return ArrayTokens(_of_llm_c(path))
    if kind is TEXT or (kind is None and path.suffix in _SUFFIXES_OF_TEXT):
        raise DataError(
            f"data.paths={path}: is text, no file of tokens; {TEXT.cure}, or name the files of tokens alone"
        )
    if kind is not None:
        raise DataError(f"data.paths={path}: is {kind.name}, no flat file of tokens; {kind.cure}")
    tokens = _map(path, np.dtype(dtype).newbyteorder("<"))
    refuse_other_width(path, dtype, vocab_size)
    return ArrayTokens(tokens)


def _array(path: Path) -> np.ndarray:
    """The array of a `.npy` file: one dimension of integers."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"data.paths={path}: is {NUMPY.name} that cannot be read ({error})") from error
    end = array.offset + array.nbytes if isinstance(array, np.memmap) else path.stat().st_size
    if end != path.stat().st_size:
        raise DataError(
            f"data.paths={path}: is {NUMPY.name} of {array.size} values, and something follows them; save one array "
            "a file"
        )
    if array.dtype.kind not in "iu":
        raise DataError(f"data.paths={path}: is {NUMPY.name} of {array.dtype}; token ids are integers")
    if array.ndim != 1:
        raise DataError(
            f"data.paths={path}: is {NUMPY.name} of shape {list(array.shape)}; a stream of tokens has one dimension: "
            "save array.reshape(-1)"
        )
    return array


def _of_llm_c(path: Path) -> np.ndarray:
    """The tokens behind llm.c's header, as many as it states."""
    magic, version, count = (int(word) for word in np.fromfile(path, "<i4", 3))
    known, dtype = LLM_C_TOKENS[magic]
    if version != known:
        raise DataError(f"data.paths={path}: is {LLM_C.name} of version {version}; version {known} is known")
    there = (path.stat().st_size - _LLM_C_BYTES) / np.dtype(dtype).itemsize
    if there != count:
        raise DataError(f"data.paths={path}: is {LLM_C.name}, which says {count} tokens, and {there:g} follow it")
    return np.memmap(path, dtype, mode="r", offset=_LLM_C_BYTES) if count else np.empty(0, dtype)


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"data.paths={path}: is empty")
    if size % dtype.itemsize:
        raise DataError(f"data.paths={path}: its {size} bytes are no whole number of {dtype.name} tokens")
    return np.memmap(path, dtype, mode="r")


def _open_indexed(path: Path, index: Path) -> TokenStream:
    data = index.read_bytes()
    if data[: len(_MAGIC)] != _MAGIC or len(data) < _HEADER_BYTES:
        raise DataError(f"data.paths={index}: is no Megatron index, it does not start with MMIDIDX")
    version, code, sequences, bounds = _header(data)
    if version != 1:
        raise DataError(f"data.paths={index}: has version {version}, only version 1 is known")
    if code not in _TYPE_CODES:
        raise DataError(f"data.paths={index}: has type code {code}; tokens are {show(tuple(_TYPE_CODES))}")
    if len(data) == _HEADER_BYTES - 8 + 12 * sequences and code in _TYPE_CODES:
        raise DataError(
            f"data.paths={index}: is an index of fairseq, which knows no documents; save its token ids with numpy.save"
        )
    if len(data) < _HEADER_BYTES + 12 * sequences + 8 * bounds:
        raise DataError(f"data.paths={index}: is cut off, {sequences} sequences and {bounds} bounds need more bytes")
    lengths = np.frombuffer(data, "<i4", sequences, _HEADER_BYTES)
    offsets = np.frombuffer(data, "<i8", sequences, _HEADER_BYTES + 4 * sequences)
    tokens = _map(path, np.dtype(_TYPE_CODES[code]))
    return _pieces(path, tokens, offsets, lengths)


def _header(data: bytes) -> tuple[int, int, int, int]:
    place = len(_MAGIC)
    version = int.from_bytes(data[place : place + 8], "little")
    sequences = int.from_bytes(data[place + 9 : place + 17], "little")
    bounds = int.from_bytes(data[place + 17 : place + 25], "little")
    return version, data[place + 8], sequences, bounds


def _pieces(path: Path, tokens: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> TokenStream:
    width = tokens.dtype.itemsize
    starts = offsets // width
    if not len(lengths):
        raise DataError(f"data.paths={path}: its index names no sequences")
    if (lengths < 0).any() or (offsets < 0).any() or (offsets % width).any():
        raise DataError(f"data.paths={path}: its index has a negative length or an offset between two tokens")
    if int((starts + lengths).max()) > len(tokens):
        raise DataError(f"data.paths={path}: is cut off, its index names tokens behind its end")
    ends = np.cumsum(lengths, dtype=np.int64)
    if starts[0] == 0 and (starts[1:] == ends[:-1]).all():
        return ArrayTokens(tokens[: int(ends[-1])])  # consecutive, as Megatron's own builder leaves them
    return PiecedTokens(tokens, starts, lengths)
