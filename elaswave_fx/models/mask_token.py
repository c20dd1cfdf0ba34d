"""The id of the mask token in the tokenizer of a Hugging Face folder.

tokenizer_config.json {"mask_token": "[MASK]"}, tokenizer.json {"added_tokens": [{"id": 103, "content": "[MASK]"}]}
    -> 103
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elaswave_fx.errors import ConfigError

_USUAL = ("[MASK]", "<mask>")
_FILES = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json", "added_tokens.json", "vocab.json")


def mask_token_of(folder: str | Path | None, config: Mapping[str, Any]) -> int | None:
    """The id that `config` (keys of a configuration) or a file of the folder's tokenizer names; None if there is none.

    Raises ConfigError for a file that cannot be read.
    """
    if isinstance(config.get("mask_token_id"), int):
        return config["mask_token_id"]
    if folder is None:
        return None
    try:
        return _mask_token(Path(folder))
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConfigError(f"init_from={folder}: its tokenizer cannot be read ({error})") from error


def _mask_token(folder: Path) -> int | None:
    files = {name: _read(folder / name, folder) for name in _FILES}
    named = [_text(files[name].get("mask_token")) for name in ("tokenizer_config.json", "special_tokens_map.json")]
    words = [word for word in named if word] or list(_USUAL)
    ids = dict(_ids(files, folder / "vocab.txt"))
    return next((ids[word] for word in words if word in ids), None)


def _read(path: Path, folder: str | Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"init_from={folder}: {path.name} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _text(token: Any) -> Any:
    """A token's text; tokens are written as a text or as a group with its content."""
    return token.get("content") if isinstance(token, dict) else token


def _ids(files: Mapping[str, Mapping[str, Any]], lines: Path) -> Iterator[tuple[str, int]]:
    """(token, id) of all files; later entries override earlier ones."""
    if lines.is_file():
        with lines.open(encoding="utf-8") as file:  # a token may contain other line separators
            yield from ((line.removesuffix("\n"), number) for number, line in enumerate(file))
    yield from files["vocab.json"].items()
    model = files["tokenizer.json"].get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    elif isinstance(vocabulary, list):  # of a unigram model: (token, score) in the order of ids
        yield from ((entry[0], number) for number, entry in enumerate(vocabulary))
    yield from files["added_tokens.json"].items()
    for number, token in files["tokenizer_config.json"].get("added_tokens_decoder", {}).items():
        yield str(_text(token)), int(number)
    for token in files["tokenizer.json"].get("added_tokens", []):
        yield token["content"], token["id"]
