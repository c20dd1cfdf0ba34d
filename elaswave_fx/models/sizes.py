"""Sizes that a model's configuration may leave to the data."""

from dataclasses import dataclass

_CHANNELS = (1, 3, 4)
"""Channels of pictures: grey, colour, with transparency."""


@dataclass(frozen=True)
class DataSizes:
    """Sizes of the samples that a model will see; None where the data has none.

    `vocab_size` counts the tokenizer's tokens, `seq_len` the tokens of a sample, `image_shape` is (channels, height,
    width), `classes` the number of labels, `tokenizer` the kind of our tokenizer that made tokens of text; `masked`:
    whether tokens are masked already, and labels hold the tokens to predict in their places.
    """

    vocab_size: int | None = None
    seq_len: int | None = None
    image_shape: tuple[int, int, int] | None = None
    classes: int | None = None
    tokenizer: str | None = None
    masked: bool = False

    @property
    def channels_look_last(self) -> bool:
        """Whether `image_shape` looks like (height, width, channels)."""
        shape = self.image_shape
        return shape is not None and shape[2] in _CHANNELS and shape[0] not in _CHANNELS
