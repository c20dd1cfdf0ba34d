"""`checkpoint.json`: the contents of a checkpoint, and the digests that reveal damage.

    manifest = read_manifest(path)            # refuses another format, an edited manifest
    check_files(path, manifest)               # refuses truncated, edited, missing files
    check_samples(manifest, config, where)    # refuses another seed or global batch
    check_model(manifest, contents, where)    # refuses another model, optimizer, data

All refusals are `ConfigError`s of one line that begins with the key `resume`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from elaswave_fx.checkpoint.folder import MANIFEST
from elaswave_fx.checkpoint.layout import KeyPath, key_paths
from elaswave_fx.config.keys import Config
from elaswave_fx.config.validation import show, with_keys_of_today
from elaswave_fx.devices.fingerprint import difference
from elaswave_fx.errors import ConfigError, DamagedCheckpoint
from elaswave_fx.files import file_digest

FORMAT = 2
_FLAT = 1
"""The previous format: all tensors have one dimension and logical names."""

_OF_SAMPLES = ("data", "tokenizer", "seq_len", "eval.fraction", "eval.every", "eval.split", "eval.data")
"""Keys that determine the training samples."""


@dataclass(frozen=True)
class Contents:
    """The contents of a run's checkpoints, and the data that a checkpoint is compared with on resume.

    Args:
        program: the key of the compiled program, for the reader.
        tensors: name -> (shape, dtype) of every logical tensor.
        frozen: parameters that training does not change -> SHA-256 of their bytes.
        samples: number of samples that training draws from.
        data_digest: digest of a subset of the samples, evenly spread.
        fingerprint: what else determines the bits of a step, see `Device.fingerprint`.
        state_dict: key of the model's own state dict -> logical tensor.
        unchanged: (shape, dtype) of its tensors that training does not change.
        buffers: those of them that are buffers -> SHA-256 of their bytes; checkpoints of earlier versions have none.
    """

    program: str
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    frozen: Mapping[str, str]
    samples: int
    data_digest: str
    fingerprint: Mapping[str, str] = dataclasses.field(default_factory=dict)
    state_dict: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unchanged: Mapping[str, tuple[tuple[int, ...], str]] = dataclasses.field(default_factory=dict)
    buffers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def key_paths(self) -> dict[str, tuple[KeyPath, ...]]:
        return key_paths((*self.tensors, *self.unchanged), self.state_dict)


@dataclass(frozen=True)
class Manifest:
    """The whole of `checkpoint.json`. `step`: completed steps; the data resumes at position step x global_batch.

    `files`: name -> (bytes, SHA-256) of every other file of the checkpoint.
    """

    step: int
    run_dir: str
    config: Mapping[str, Any]
    contents: Contents
    files: Mapping[str, tuple[int, str]]
    format: int = FORMAT

    @property
    def is_flat(self) -> bool:
        return self.format == _FLAT


def plain_config(config: Config) -> dict[str, Any]:
    """The configuration after a round trip through JSON."""
    return json.loads(json.dumps(config.as_dict(), default=str))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and sync `checkpoint.json`."""
    body = dataclasses.asdict(manifest)
    body["config_digest"] = _digest(body["config"])
    body["digest"] = _digest(body)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(body, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest. Raises DamagedCheckpoint if it was changed, ConfigError for another format."""
    try:
        body = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        claimed = body.pop("digest")
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"resume={folder}: {MANIFEST} cannot be read, it is truncated or edited ({error})"
        ) from error
    if body.get("format") not in (_FLAT, FORMAT):
        reads = f"{_FLAT} and {FORMAT}"
        raise ConfigError(f"resume={folder}: has checkpoint format {body.get('format')}, this version reads {reads}")
    if claimed != _digest(body):
        raise DamagedCheckpoint(f"resume={folder}: {MANIFEST} was edited, its digest differs")
    try:
        manifest = msgspec.convert(body, Manifest)
        return dataclasses.replace(manifest, config=with_keys_of_today(manifest.config))
    except msgspec.ValidationError as error:
        raise DamagedCheckpoint(f"resume={folder}: {MANIFEST} is no manifest ({error})") from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file has its original bytes. Raises DamagedCheckpoint naming the first that has not."""
    for name, (size, sha) in sorted(manifest.files.items()):
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"resume={folder}: {name} is missing")
        found = path.stat().st_size
        if found != size:
            word = "truncated" if found < size else "edited"
            raise DamagedCheckpoint(f"resume={folder}: {name} is {word}, it has {found} bytes and had {size}")
        if file_digest(path) != sha:
            raise DamagedCheckpoint(f"resume={folder}: {name} was edited, its SHA-256 differs from that in {MANIFEST}")


def check_samples(manifest: Manifest, config: Config, where: Path) -> None:
    """Refuse keys that would change the samples or random numbers of the steps, and too few steps."""
    then = manifest.config
    for key, value, made_with, what in (
        ("seed", config.seed, then["seed"], "samples"),
        ("global_batch", config.global_batch, then["global_batch"], "samples"),
        ("lab.reshard_rng", config.lab.reshard_rng, then["lab"]["reshard_rng"], "random draws"),
    ):
        if made_with != value:
            raise ConfigError(
                f"resume={where}: {key}={show(value)} would change the {what}, the checkpoint was made with "
                f"{key}={show(made_with)}; nearest valid: {key}={show(made_with)}"
            )
    if config.steps < manifest.step:
        raise ConfigError(
            f"steps={config.steps}: the checkpoint {where} is at step {manifest.step}; nearest valid: {manifest.step}"
        )


def check_model(manifest: Manifest, contents: Contents, config: Config, where: Path) -> None:
    """Refuse a checkpoint of another optimizer, model or data, naming the difference; with `exact`, also one of a
    machine that computes other bits."""
    other = difference(contents.fingerprint, manifest.contents.fingerprint) if config.exact else None
    if other is not None:
        raise ConfigError(f"resume={where}: exact=true cannot go on from it, its run computed other bits: {other}")
    _check_optimizer(manifest.config["optimizer"], plain_config(config)["optimizer"], where)
    _check_trained(manifest.contents, contents, where)
    _check_tensors(manifest.contents.tensors, contents.tensors, where)
    then = manifest.contents
    same = "see init_from" if config.model.kind == "hf" else "the model's constructor has to make the same"
    for name, sha in contents.frozen.items():
        if then.frozen.get(name) != sha:
            raise ConfigError(f"resume={where}: parameter {name}, which is not trained, has other values; {same}")
    others = other_buffers(manifest, contents)
    if others and config.exact:
        raise ConfigError(
            f"resume={where}: exact=true cannot go on from it, buffer {others[0]} has other values; {same}, or "
            "persistent=False takes new ones"
        )
    if (then.samples, then.data_digest) != (contents.samples, contents.data_digest):
        named = _differences(manifest.config, plain_config(config), _OF_SAMPLES)
        why = f" ({', '.join(named)})" if named else ", the keys of data being the same"
        if "split" not in manifest.config["eval"]:
            why += "; that run held out the last samples, evaluated or not: set eval.split=last and eval.every"
        counts = f"{contents.samples} to train on, {then.samples} in the checkpoint's run"
        raise ConfigError(f"resume={where}: the data has other samples ({counts}){why}")


def other_buffers(manifest: Manifest, contents: Contents) -> tuple[str, ...]:
    """Persistent buffers that training does not change, whose values are not those of the checkpoint's run: a
    constructor made them anew."""
    then = manifest.contents.buffers
    return tuple(name for name, sha in contents.buffers.items() if then.get(name, sha) != sha)


def changed_keys(manifest: Manifest, config: Config) -> tuple[str, ...]:
    """`key=new (was old)` for permitted differences from the checkpoint's run, for the user."""
    about_training = (
        "steps", "optimizer", "schedule", "clip_norm", "precision", "parallel", "model", "passes", "exact", "lab",
        "copies.record",
    )  # fmt: skip
    return _differences(manifest.config, plain_config(config), about_training)


def _check_optimizer(then: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    if (then["name"], then["target"]) != (now["name"], now["target"]):
        old, new = then["target"] or then["name"], now["target"] or now["name"]
        raise ConfigError(
            f"resume={where}: optimizer={new}, but the checkpoint holds the state of {old}; nearest valid: {old}"
        )


def _check_trained(then: Contents, now: Contents, where: Path) -> None:
    for one, other, words in (
        (then.frozen, now.tensors, "was frozen in its run, and is trained now"),
        (now.frozen, then.tensors, "was trained in its run, and is frozen now"),
    ):
        changed = [name for name in one if f"model/{name}" in other]
        if changed:
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise ConfigError(
                f"resume={where}: {changed[0]} {words}{more}, and a checkpoint is for the parameters it trained; a way "
                "out is a new run, with a model that loads the checkpoint's weights in its constructor"
            )


def _check_tensors(then: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    lines = [f"has no {name}" for name in now if name not in then]
    lines += [f"has {name}, which the model has not" for name in then if name not in now]
    lines += [
        f"has {name} as {then[name][1]} {list(then[name][0])}, the model as {now[name][1]} {list(now[name][0])}"
        for name in now
        if name in then and then[name] != now[name]
    ]
    if lines:
        more = f" (and {len(lines) - 1} more differences)" if len(lines) > 1 else ""
        hint = ""
        if sum(name.startswith("optimizer/") for name in then.keys() ^ now.keys()) == len(lines):
            hint = "; an optimizer keeps the state that its options need, such as a momentum: set them as in that run"
        raise ConfigError(f"resume={where}: is a checkpoint of another model or optimizer: it {lines[0]}{more}{hint}")


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, ...]:
    found = []
    before, after = leaves(then), leaves(now)
    for key in sorted({*before, *after}):
        if _value(before, key) == _value(after, key):
            continue
        is_part = any(_value(before, each) != _value(after, each) for each in _parents(key))
        if not is_part and any(key == each or key.startswith(f"{each}.") for each in keys):
            found.append(f"{key}={show(_value(after, key))} (was {show(_value(before, key))})")
    return tuple(found)


def _parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _value(of: Mapping[str, Any], key: str) -> object:
    """The value of a key, or the kind of a group in its place."""
    return of.get(key, of.get(f"{key}.kind"))


def leaves(node: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    found: dict[str, Any] = {}
    for name, value in node.items():
        key = f"{place}.{name}" if place else name
        found |= leaves(value, key) if isinstance(value, Mapping) else {key: value}
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
