"""Files of tokens, memory-mapped: flat `.bin` files and the indexed files of Megatron-LM.

A flat file is nothing but unsigned integers, little-endian. Megatron's `NAME.bin` is the same for any integer type, and
`NAME.idx` beside it says where the sequences are (public format, version 1, all little-endian):

    9 bytes "MMIDIDX" 0 0    uint64 version 1    uint8 type code    uint64 s, sequences    uint64 d, document bounds
    int32[s] tokens per sequence    int64[s] byte offset of each in the .bin    int64[d] first sequence per document
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from elaswave_fx.config.schema import show
from elaswave_fx.data.corpus import matching_files
from elaswave_fx.data.tokens import ArrayTokens, JoinedTokens, PiecedTokens, TokenStream
from elaswave_fx.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = len(_MAGIC) + 8 + 1 + 8 + 8
# Codes 6 and 7 are floating-point types, which are no tokens.
_TYPE_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_token_files(patterns: Sequence[str], dtype: str) -> TokenStream:
    """One stream of the tokens of all files, in the order of the patterns. `dtype` is that of flat files.

    Raises `DataError` for files that are missing, empty, cut off or not of the format.
    """
    expanded = [_with_suffix(pattern) for pattern in patterns]
    files = [path for path in matching_files(expanded) if path.suffix != ".idx"]
    if not files:
        raise DataError(f"data.paths={show(patterns)}: holds .idx files without their .bin")
    streams = [_open(path, dtype) for path in files]
    return streams[0] if len(streams) == 1 else JoinedTokens(streams)


def _with_suffix(pattern: str) -> str:
    """Megatron names a pair of files by their common prefix."""
    path = Path(pattern).expanduser()
    paired = path.with_name(path.name + ".bin") if path.name else path
    return str(paired) if not path.exists() and paired.is_file() else pattern


def _open(path: Path, dtype: str) -> TokenStream:
    index = path.with_suffix(".idx")
    return _open_indexed(path, index) if index.is_file() else ArrayTokens(_map(path, np.dtype(dtype).newbyteorder("<")))


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
        return ArrayTokens(tokens[: int(ends[-1])])  # one after the other, as Megatron's own builder leaves them
    return PiecedTokens(tokens, starts, lengths)
