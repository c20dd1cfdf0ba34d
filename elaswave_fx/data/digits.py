"""scikit-learn's digits: 1797 grey images of 8x8, ten classes.

In: a layout. Out: `{"image": float32 [1,8,8] or [64], "label": int64 []}`, or the halves of the image as two inputs,
`{"left": float32 [32], "right": float32 [32], "label": int64 []}`. Values are in [0, 1].
"""

from pathlib import Path

import numpy as np

from elaswave_fx.data.cached import cached_array
from elaswave_fx.data.dataset import ArrayDataset
from elaswave_fx.errors import DataError

_CLASSES = 10


def open_digits(layout: str, cache: Path | None) -> ArrayDataset:
    """The dataset; raises `DataError` without scikit-learn."""
    # Cached, as importing scikit-learn takes longer than everything else here, on every rank.
    table = cached_array(cache and cache / "digits", "digits", "1", _load)
    images = (table[:, :64] / np.float32(16)).reshape(-1, 1, 8, 8)
    return ArrayDataset({**arrange(images, layout), "label": table[:, 64].astype(np.int64)}, classes=_CLASSES)


def arrange(images: np.ndarray, layout: str) -> dict[str, np.ndarray]:
    """float32 [n,1,8,8] as `image` ([1,8,8]), `flat` ([64]) or `halves` (two times [32])."""
    count = len(images)
    if layout == "halves":
        left, right = images[..., :4], images[..., 4:]
        return {"left": left.reshape(count, 32), "right": right.reshape(count, 32)}
    return {"image": images.reshape(count, 64) if layout == "flat" else images}


def _load() -> np.ndarray:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("data=digits: needs scikit-learn; install it with: pip install elaswave_fx[data]") from error
    features, labels = load_digits(return_X_y=True)
    return np.concatenate([features, labels[:, None]], axis=1).astype(np.float32)
