"""Check of a flat token file's declared type: wrong widths show in the ids.

    int64 ids read as uint16:   7 0 0 0 9 0 0 0 …         three of four tokens are 0
    uint32 ids read as uint16:  7 0 9 0 …                 every second token is 0
    uint16 ids read as uint32:  7 + 9 x 65536, …          the upper half of an id is as large as the lower one
    uint8 ids read as uint16:   7 + 9 x 256, …            both halves of an id are used alike
    uint16 ids read as uint8:   244 1 9 0 …               every second token is much smaller
    float32 read as any:        1.0 0.25 …                four bytes together are a float of usual size
    ids in big-endian order:    7 x 256, 0, 9 x 256, …    bytes are used as those of ids whose order is reversed

Large files are sampled, spread evenly.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from elaswave_fx.errors import DataError

_BLOCK, _BLOCKS = 1 << 16, 64
"""Bytes of a sampled block, and number of blocks."""

_LEAST = 16
"""Nonzero ids needed for a pattern."""

_SELDOM = 5
"""Upper halves are rarely used if they are this many times less often nonzero than lower ones: by the mark at the end
of documents."""

_MANY, _FEW_UPPER = 1024, 16
"""With this many 32-bit ids of a large vocabulary the upper halves stay below the second number: ids below a
million."""

_SMALL = {4: 1 << 24, 8: 1 << 31}
"""Bound of signed ids that cannot be ids of another width, however many are negative; by bytes of an id."""

_OF_HALF = 8
"""Ratio up to which the upper half of ids counts as large as the lower one."""

_PAIRS, _ALIKE, _APART, _UNEVEN = 512, 0.25, 0.5, 0.25
"""Minimum of byte pairs; distances in variation below and above which lower and upper bytes are used alike or
differently; distance from the uniform distribution above which bytes carry data."""

_MOST_OF_TEXT, _LEAST_OF_LOW = 247, 250
"""Largest byte of text; lower bytes of ids above 255 reach the second number."""

_UPPER, _CHANCE = 8, 1e-9
"""Distinct upper bytes of a large vocabulary; chance at which its ids avoid all larger lower bytes."""

_FLOATS, _ORDINARY = 0.99, (1e-6, 1e6)
"""Values are floats if this share is 0 or within these limits; a fifth of random pairs of ids would be."""

_FIRST, _MOSTLY, _FOCUSED = 4, 0.2, 4.0
"""Upper bytes of ids of text are mostly below the first number, by at least this share, and are concentrated this many
times more than lower ones."""


def refuse_other_width(path: Path, dtype: str, vocab_size: int | None) -> None:
    """Raise `DataError` with the nearest possible type if the file cannot hold ids of `dtype`."""
    examined = _examined(path)
    sign = _sign(examined, np.dtype(dtype), vocab_size)
    foreign = _sign_of_floats(examined) or _sign_of_reversed(examined, np.dtype(dtype))
    if foreign is not None:
        raise DataError(f"data.paths={path}: cannot be tokens of data.dtype={dtype}: {foreign}")
    if sign is None:
        return
    tokens = _view(examined, np.dtype(dtype))
    small = _SMALL.get(tokens.itemsize, 0)
    if 0 > tokens.min() > -small and tokens.max() < small:
        raise DataError(f"data.paths={path}: {sign.replace('it would hold', 'holds')}; token ids are 0 or more")
    fitting = [name for name in _candidates(vocab_size) if _sign(examined, np.dtype(name), vocab_size) is None]
    if fitting:
        cure = f"nearest valid: data.dtype={fitting[0]}"
    elif vocab_size is not None and _largest(examined, np.dtype(dtype)) >= vocab_size:
        cure = f"nearest valid: data.vocab_size={_largest(examined, np.dtype(dtype)) + 1}"
    else:
        cure = "save the ids with numpy.save, which keeps their type"
    raise DataError(f"data.paths={path}: cannot be tokens of data.dtype={dtype}: {sign}; {cure}")


def _candidates(vocab_size: int | None) -> Iterator[str]:
    """Types, most likely first. Bytes count as ids of any width, unless a vocabulary excludes it."""
    if vocab_size is not None and vocab_size <= 256:
        yield "uint8"
    yield from ("uint16", "uint32", "int64")
    if vocab_size is None:
        yield "uint8"


def _examined(path: Path) -> np.ndarray:
    """The sampled bytes, in blocks aligned to 8."""
    raw = np.memmap(path, np.uint8, mode="r")
    if len(raw) <= _BLOCK * _BLOCKS:
        return np.asarray(raw)
    starts = np.linspace(0, len(raw) - _BLOCK, _BLOCKS).astype(np.int64) // 8 * 8
    return np.concatenate([raw[start : start + _BLOCK] for start in starts])


def _sign(examined: np.ndarray, dtype: np.dtype, vocab_size: int | None) -> str | None:
    """Evidence that the bytes are not ids of `dtype`, or None."""
    tokens = _view(examined, dtype)
    if not len(tokens):
        return None
    return (
        _sign_of_wider(examined, dtype)
        or _sign_of_range(tokens, vocab_size)
        or (_sign_of_narrower(examined, dtype) if vocab_size is None else None)
    )


def _sign_of_wider(examined: np.ndarray, dtype: np.dtype) -> str | None:
    """Evidence of an upper half of wider ids, which is (nearly) always 0."""
    width = dtype.itemsize
    for wider in (8, 4, 2):
        parts = wider // width
        if parts < 2:
            break
        lanes = _view(examined, np.dtype(f"<u{width}"), wider).reshape(-1, parts)
        low, high = lanes[:, : parts // 2], lanes[:, parts // 2 :]
        if not len(lanes) or np.count_nonzero(low.any(axis=1)) < _LEAST:
            continue
        if not high.any():
            zeros = sum(not lane.any() for lane in lanes.T)
            return "every second token is 0" if parts == 2 else f"{zeros} of every {parts} tokens are 0"
        is_seldom = np.count_nonzero(high.any(axis=1)) * _SELDOM <= np.count_nonzero(low.any(axis=1))
        if is_seldom and parts == 2 and len(lanes) >= _MANY and (width == 1 or high.max() < _FEW_UPPER):
            return "every second token is nearly always 0"
        used = low[low > 0]
        if (width, wider) == (2, 4) and len(lanes) >= _MANY and high.max() < _FEW_UPPER and np.median(used) > 255:
            return f"every second token is below {_FEW_UPPER}"
        if (width, wider) == (1, 4) and len(lanes) >= _MANY and high[:, 0].max() < _FEW_UPPER and not high[:, 1].any():
            return "every fourth token is 0"
        if (width, wider) == (1, 2) and len(lanes) >= _PAIRS and low.max() >= _LEAST_OF_LOW:
            most = int(high.max())
            if most * _OF_HALF <= int(low.max()) and _distance(low, high) > _APART:
                return f"every second token is at most {most}, as upper halves of ids are"
    return None


def _sign_of_range(tokens: np.ndarray, vocab_size: int | None) -> str | None:
    if tokens.min() < 0:
        return f"it would hold the negative id {int(tokens.min())}"
    if vocab_size is not None and tokens.max() >= vocab_size:
        return f"it would hold id {int(tokens.max())}, beyond data.vocab_size={vocab_size}"
    return None


def _sign_of_narrower(examined: np.ndarray, dtype: np.dtype) -> str | None:
    """Evidence of two ids in one: upper halves that are used like lower ones."""
    width = dtype.itemsize
    if width < 2:
        return None
    halves = _view(examined, np.dtype(f"<u{width // 2}"), width).reshape(-1, 2)
    low, high = int(halves[:, 0].max()), int(halves[:, 1].max())
    if width == 2:
        large = np.unique(_view(examined, dtype)[halves[:, 1] > 0])
        bits = int(np.bitwise_or.reduce(large, initial=0)) & 255
        step = bits & -bits or 1  # of ids that are multiples, as of 16
        bounded = len(np.unique(large >> 8)) >= _UPPER and ((low + step) / 256) ** len(large) < _CHANCE
        of_bytes = low <= _MOST_OF_TEXT or _distance(halves, np.arange(256)) > _UNEVEN
        alike = bounded or (len(halves) >= _PAIRS and high and of_bytes and _distance(*halves.T) < _ALIKE)
        if not alike:
            return None
        return (
            f"both bytes of ids (up to {low} and {high}) are used alike, as of two ids in one (data.vocab_size tells "
            "if they are of one)"
        )
    if high == 0 or high * _OF_HALF < low or len(halves) < _LEAST:
        return None
    return f"the upper half of ids (up to {high}) is as large as the lower one (up to {low}), as of two ids in one"


def _sign_of_floats(examined: np.ndarray) -> str | None:
    """Evidence of floating-point numbers."""
    least, most = _ORDINARY
    for kind in (np.float32, np.float64):
        with np.errstate(invalid="ignore"):
            sizes = np.abs(_view(examined, np.dtype(kind)).astype(np.float64))
        usual = (sizes >= least) & (sizes <= most)
        if np.count_nonzero(usual) >= _LEAST and np.count_nonzero(usual | (sizes == 0)) >= _FLOATS * len(sizes):
            return f"they look like {kind.__name__} numbers; save token ids as whole numbers"
    return None


def _sign_of_reversed(examined: np.ndarray, dtype: np.dtype) -> str | None:
    """Evidence of ids in big-endian byte order: upper parts come first."""
    cure = "save them with numpy.save, which keeps it, or as little-endian"
    for width in (8, 4):
        halves = _view(examined, np.dtype(f"<u{width // 2}"), width).reshape(-1, 2)
        first, second = (half.byteswap() for half in halves.T)
        is_upper = not len(first) or not first.any()
        if width == 4 and len(first) >= _MANY and first.max() < _FEW_UPPER and np.median(second) > 255:
            is_upper = True  # ids of a large vocabulary
        if is_upper and len(np.unique(second)) >= _LEAST:
            return f"they look like integers of {width} bytes in big-endian order; {cure}"
    pairs = _view(examined, np.dtype(np.uint8), 2).reshape(-1, 2)
    if len(pairs) < _PAIRS or dtype.itemsize < 2:
        return None
    first, second = (np.bincount(each, minlength=256) / len(pairs) for each in pairs.T)
    common = int(first.argmax())
    is_focused = float((first**2).sum()) > _FOCUSED * float((second**2).sum())
    if common < _FIRST and first[common] > _MOSTLY and is_focused:
        return f"they look like integers of 2 bytes in big-endian order; {cure}"
    return None


def _distance(low: np.ndarray, high: np.ndarray) -> float:
    """The total variation between the uses of two sets of bytes: 0 for equal, 1 for disjoint."""
    used = [np.bincount(each.ravel(), minlength=256) / each.size for each in (low, high)]
    return float(np.abs(used[0] - used[1]).sum() / 2)


def _view(examined: np.ndarray, dtype: np.dtype, multiple: int | None = None) -> np.ndarray:
    whole = multiple or dtype.itemsize
    return examined[: len(examined) // whole * whole].view(dtype.newbyteorder("<"))


def _largest(examined: np.ndarray, dtype: np.dtype) -> int:
    return int(_view(examined, dtype).max())
