"""Tokens of text: its bytes, or a byte-level BPE trained on the text itself.

In: documents (bytes). Out: one stream of tokens, each document followed by the end mark, token 0.

    ByteTokenizer().encode([b"ab", b"c"])   ->  [97, 98, 0, 99, 0]
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from elaswave_fx.config.keys import TokenizerConfig
from elaswave_fx.data.cached import cached_json, digest
from elaswave_fx.errors import DataError

END = 0
_END_TEXT = "<|end|>"
_CHUNK = 1000
"""Documents per call of the encoder."""


class Tokenizer(Protocol):
    @property
    def kind(self) -> str:
        """The name of its kind in the configuration."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def key(self) -> str:
        """Name of the tokenizer's content, for the cache of encoded text."""
        ...

    def encode(self, documents: Iterable[bytes]) -> np.ndarray:
        """One stream of tokens, uint8, uint16 or uint32."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Every byte is a token; byte 0 is the end mark."""

    kind = "bytes"
    vocab_size = 256
    key = "bytes"

    def encode(self, documents: Iterable[bytes]) -> np.ndarray:
        return np.frombuffer(b"".join(part for document in documents for part in (document, b"\0")), np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token != END).decode("utf-8", errors="replace")


class BpeTokenizer:
    """Byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) of the tokenizers library, from its JSON form."""

    kind = "bpe"

    def __init__(self, serialized: str) -> None:
        self._tokenizer: Any = _library().Tokenizer.from_str(serialized)
        self._tokenizer.encode_special_tokens = True  # the end mark within a text is plain text
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.key = digest("bpe", "marks are text", serialized)

    @staticmethod
    def train(documents: Iterable[bytes], vocab_size: int) -> "BpeTokenizer":
        """Equal documents and sizes give equal tokenizers, smaller than requested if the text has no more pairs."""
        library = _library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[_END_TEXT],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((_text(document) for document in documents), trainer)
        return BpeTokenizer(tokenizer.to_str())

    def serialized(self) -> str:
        return self._tokenizer.to_str()

    def encode(self, documents: Iterable[bytes]) -> np.ndarray:
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        pieces: list[np.ndarray] = [np.empty(0, dtype)]
        texts = [_text(document) for document in documents]
        for start in range(0, len(texts), _CHUNK):
            for encoding in self._tokenizer.encode_batch_fast(texts[start : start + _CHUNK], add_special_tokens=False):
                pieces.append(np.array([*encoding.ids, END], dtype))
        return np.concatenate(pieces)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def make_tokenizer(config: TokenizerConfig, documents: Sequence[bytes], cache: Path | None) -> Tokenizer:
    """The tokenizer that `config` names, trained on `documents` if it needs training."""
    if config.kind == "bytes":
        return ByteTokenizer()
    key = digest("bpe", config.vocab_size, *documents)
    train = lambda: BpeTokenizer.train(documents, config.vocab_size).serialized()  # noqa: E731
    return BpeTokenizer(cached_json(cache and cache / "tokenizers", "bpe", key, train))


def _text(document: bytes) -> str:
    try:
        return document.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"tokenizer=bpe: a text is not UTF-8, it has the byte {document[error.start]:#04x} at {error.start}; "
            "convert it, as iconv -t UTF-8 does, or set tokenizer=bytes"
        ) from error


def _library() -> Any:
    import tokenizers

    return tokenizers
