"""Bytes from outside, damaged in every way, to every parser that reads such: each refuses in its own words, or reads.

    make fuzz ARGS='--inputs 1000000'        python -m tests.fuzz --only plan --seed 7

An input is a valid one with bits, bytes and pieces changed, cut off, doubled or mixed with another. A parser may give
a value, or raise what its docstring says; anything else is a finding, printed with the seed that makes it again. The
parsers of the native runtime have a program of the same design, native/tests/fuzz.h, which `make fuzz` runs as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from rich.progress import track

from elaswave_fx.audit.lines import check_files
from elaswave_fx.audit.record import read_record
from elaswave_fx.checkpoint import manifest
from elaswave_fx.checkpoint.folder import MANIFEST
from elaswave_fx.config.compose import compose, load_config
from elaswave_fx.config.read import read_config
from elaswave_fx.control.coordinator.job_file import JobFile
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.types import SEED, Activation, Certificate, Stamp, Term, Version, Vote
from elaswave_fx.control.store.exact_total import ExactTotal
from elaswave_fx.control.store.file_store import FileStore
from elaswave_fx.control.store.ledger import CHAIN_START, Payload, line_of, linked
from elaswave_fx.control.stream import Hello, Stream, answer, challenge
from elaswave_fx.control.wire import decode, encode
from elaswave_fx.data.token_files import open_token_files
from elaswave_fx.errors import CommError, ConfigError, DataError, PlanError
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.spans import Span, WorkSpan
from elaswave_fx.plan.work.topology import Epoch, Rank
from elaswave_fx.program.artifact import FORMAT, Artifact
from tests.checkpoint.test_refusals import make_checkpoint
from tests.control.test_wire import MESSAGES
from tests.control.toy_planner import first_assignment
from tests.plan.test_plan import small_text

TOKEN = b"t" * 32
WORDS = (
    b"steps=3",
    b"recipe=gpt_stdlib",
    b"optimizer.lr=1e-3",
    b"parallel.dp=2",
    b"model.width=64",
    b"faults=[]",
    b"seed=7",
)


@dataclass(frozen=True)
class Parser:
    """`valid`: inputs that it reads; `refuses`: all that it may raise."""

    name: str
    valid: tuple[bytes, ...]
    parse: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]
    costs: int = 1
    """Of the inputs asked for, a dear parser gets one in so many."""


def parsers(folder: Path) -> list[Parser]:
    """Every parser; `folder` is for those that read files."""
    register, job_file, index = (folder / name for name in ("store/register.json", "job.json", "tokens/t.idx"))
    written, artifact = folder / "manifest" / MANIFEST, folder / "artifact" / "artifact.json"
    return [
        Parser("message", tuple(map(encode, MESSAGES)), decode, (CommError,)),
        Parser("frame", tuple(map(_framed, map(encode, MESSAGES))), _frames, ()),
        Parser("hello", (Hello.of(Rank(3)).frame,), Hello.read, (CommError,)),
        Parser("challenge", (challenge(TOKEN, HELLO),), lambda data: answer(TOKEN, HELLO, data), (CommError,)),
        Parser("vote", (Payload(loss=ExactTotal.of(1.0)).pack(),), Payload.unpack, (ValueError,)),
        Parser("plan", (small_text().encode(),), lambda data: Plan.from_json(_text(data)), (PlanError,)),
        Parser("register", _register(folder), _in_file(register, _read_register), (OSError,), 4),
        Parser("job file", (_job(folder),), _in_file(job_file, JobFile.read), (ConfigError,), 4),
        Parser("manifest", (_manifest(folder),), _in_file(written, _read_manifest), (ConfigError,), 4),
        Parser("artifact", (b'{"format": %d, "programs": {}}' % FORMAT,), _in_file(artifact, _damage), (), 4),
        Parser("ledger", (_ledger(folder),), _in_file(folder / "record" / "ledger.jsonl", _verify), (), 10),
        Parser("run files", _RUN_FILES, _in_file(folder / "record" / "files", _verify_files), (), 10),
        Parser("token index", (_index(),), _in_file(index, _open_tokens), (DataError,), 4),
        Parser("config", tuple(_settings(_COMPOSED)), _read_settings, (ConfigError,)),
        Parser("override", WORDS, lambda data: load_config([_text(data)]), (ConfigError,), 500),
    ]  # fmt: skip


HELLO = Hello.of(Rank(1))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def _frames(data: bytes) -> None:
    """A stream takes what comes and keeps no more than was announced and allowed."""
    ours, theirs = socket.socketpair()
    with contextlib.closing(theirs):
        ours.setblocking(False)
        stream = Stream(ours)
        theirs.sendall(data)
        for frame in stream.receive():
            assert len(frame) <= stream.most
        assert len(stream._in) <= 4 * stream.most
        stream.close()


def _in_file(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    path.parent.mkdir(parents=True, exist_ok=True)

    def parse(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return parse


def _register(folder: Path) -> tuple[bytes, ...]:
    first = Activation(Epoch(0), first_assignment(2, 1), SEED, SEED, None, rollback=True)
    store = FileStore.create(folder / "run", Register(Term(0), first, SEED, SEED, None, SEED), "{}")
    try:
        return ((store.folder / "register.json").read_bytes(),)
    finally:
        store.settle()


def _read_register(path: Path) -> object:
    return FileStore(path.parent, path.parent).read()


def _job(folder: Path) -> bytes:
    place = {"folder": str(folder), "host": "127.0.0.1", "port": 29500, "token": "t", "run_dir": str(folder)}
    conditions = {"versions": {"torch": "2.13.0"}, "data_digest": "ab" * 32}
    files = {"state.safetensors": {"path": str(folder), "size": 812, "digest": "ab" * 32}}
    more = {"copies": 1, "allow_rollback": False, "conditions": conditions, "files": files}
    return json.dumps({**place, **more}).encode()


def _manifest(folder: Path) -> bytes:
    return (make_checkpoint(folder / "checkpoints", 5) / MANIFEST).read_bytes()


def _read_manifest(path: Path) -> object:
    """Signed again where it can be, so that more is seen than a wrong digest."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        body = json.loads(path.read_bytes())
        body.pop("digest", None)
        path.write_text(json.dumps({**body, "digest": manifest._digest(body)}))
    return manifest.read_manifest(path.parent)


def _damage(path: Path) -> None:
    (path.parent / "digests.json").write_bytes(path.read_bytes())
    (path.parent / "costs.json").write_bytes(path.read_bytes())
    assert Artifact.damage(path.parent) is not None


def _ledger(folder: Path) -> bytes:
    """Three lines, beside the other files of their run."""
    place = folder / "record"
    place.mkdir(parents=True)
    for name, data in zip(("run.json", "summary.json", "metrics.jsonl"), _RUN_FILES, strict=True):
        (place / name).write_bytes(data)
    text, head = "", CHAIN_START
    for version in (1, 2, 3):
        stamp = Stamp(Version(version), Epoch(0))
        span = WorkSpan(Span(0, 2), Span(0, 4))
        payload = Payload(1.0, 0.5, 0, 7, 8, (span,), *(ExactTotal.of(2.0) for _ in range(3)), ((0, 9), (1, 10)))
        line = line_of(Certificate(stamp, (Vote(stamp, Rank(0), (span,), payload.pack()),)), 5, "ab")
        one, head = linked(line, head)
        text += one + "\n"
    return text.encode()


def _run_files() -> tuple[bytes, ...]:
    config = manifest.plain_config(load_config(["recipe=gpt_stdlib"]))
    run = {"first_step": 0, "program": "ab", "fingerprint": {"device": "cpu"}, "resume_from": None, "config": config}
    summary = {"steps": 3, "loss_last": 1.0, "ledger_head": "ab", "state_digest": "ab", "buckets": {"0": "ab"}}
    metrics = [{"step": step, "loss": 1.0, "grad_norm": 0.5, "tokens": 2} for step in range(3)]
    lines = "".join(json.dumps(line) + "\n" for line in metrics)
    return json.dumps(run).encode(), json.dumps(summary).encode(), lines.encode()


def _verify(path: Path) -> None:
    for finding in check_files(read_record(path.parent)):
        assert str(finding)


def _verify_files(path: Path) -> None:
    """The same damaged bytes as each of the files, beside the others as they were."""
    for name, whole in zip(("run.json", "summary.json", "metrics.jsonl"), _RUN_FILES, strict=True):
        (path.parent / name).write_bytes(path.read_bytes())
        try:
            with contextlib.suppress(ConfigError):
                _verify(path)
        finally:
            (path.parent / name).write_bytes(whole)


_RUN_FILES = _run_files()


def _index() -> bytes:
    lengths = (3, 5)
    head = (
        b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08" + (2).to_bytes(8, "little") + (2).to_bytes(8, "little")
    )
    sizes = b"".join(each.to_bytes(4, "little") for each in lengths)
    return head + sizes + b"".join(each.to_bytes(8, "little") for each in (0, 6, 0, 2))


def _open_tokens(path: Path) -> object:
    (path.parent / "t.bin").write_bytes(bytes(16))
    stream = open_token_files([str(path.parent / "t")], "uint16")
    return stream.read(0, min(len(stream), 4))


def _composed() -> str:
    """What Hydra makes of a recipe, with a setting for what is off there."""
    speeds = ["device=emulated", "emulated.speeds=[1.0,0.5,1.0,1.0]"]
    asked = ["recipe=gpt_stdlib", "faults=[{step: 1, rank: 0}]", *speeds]
    return json.dumps(OmegaConf.to_container(compose(asked), resolve=True))


_COMPOSED = _composed()


def _settings(composed: str) -> Iterator[bytes]:
    """A line `dotted.key=value` for every key, groups included; values in JSON."""
    nodes = [("", json.loads(composed))]
    while nodes:
        place, node = nodes.pop()
        for name, value in node.items():
            key = f"{place}{name}"
            yield f"{key}={json.dumps(value)}".encode()
            if isinstance(value, dict):
                nodes.append((f"{key}.", value))


def _read_settings(data: bytes) -> object:
    """A configuration in which each line has set a key, as an override does, but without the cost of Hydra; what is no
    JSON is text."""
    plain = json.loads(_COMPOSED)
    for line in _text(data).split("\n"):
        key, _, text = line.partition("=")
        *groups, last = key.split(".")
        node = plain
        for group in groups:
            node = node.setdefault(group, {})
            if not isinstance(node, dict):
                return None
        try:
            node[last] = json.loads(text)
        except (ValueError, RecursionError):
            node[last] = text
    return read_config(plain)


# --- Damage


def damaged(draw: random.Random, valid: Sequence[bytes]) -> bytes:
    """One of the inputs, changed in one to four ways."""
    data = bytearray(draw.choice(valid))
    for _ in range(draw.randint(1, 4)):
        draw.choice(_CHANGES)(draw, data, valid)
    return bytes(data)


def _flip(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _set(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, *b'{}[]",:-0e'))


def _cut(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[draw.randint(0, len(data)) :]


def _remove(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = draw.randint(0, len(data))
    del data[at : at + draw.randint(1, 16)]


def _double(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = draw.randint(0, len(data))
    data[at:at] = data[at : at + draw.randint(1, 64)] * draw.randint(1, 8)


def _insert(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = draw.randint(0, len(data))
    data[at:at] = draw.choice(
        (b"-1", b"1e999", b"null", b"99999999999999999999", b"[" * 2000, b"\xff" * 8, draw.randbytes(8))
    )


def _mix(draw: random.Random, data: bytearray, valid: Sequence[bytes]) -> None:
    other = draw.choice(valid)
    data[draw.randint(0, len(data)) :] = other[draw.randint(0, len(other)) :]


_CHANGES = (_flip, _set, _cut, _remove, _double, _insert, _mix)


@dataclass(frozen=True)
class Finding:
    """An input that was neither read nor refused in the parser's words."""

    parser: str
    seed: int
    error: BaseException

    def __str__(self) -> str:
        return f"{self.parser}, seed {self.seed}: {type(self.error).__name__}: {str(self.error)[:200]}"


def fuzz(parser: Parser, inputs: int, seed: int) -> Iterator[Finding | None]:
    """Each input has a seed of its own; None for one that went well."""
    for number in range(seed, seed + max(1, inputs // parser.costs)):
        data = damaged(random.Random(number), parser.valid)
        try:
            parser.parse(data)
        except parser.refuses:
            yield None
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            yield Finding(parser.name, number, error)
        else:
            yield None


NO_SUCH_PARSER = 3
"""The exit code of the native program when none of its parsers has the name."""


def main(words: Sequence[str]) -> int:
    """The command line above; returns the exit code."""
    options = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__.split("\n")[0])
    options.add_argument("--inputs", type=int, default=1_000_000, help="for each parser; dear ones get fewer")
    options.add_argument("--seed", type=int, default=0, help="of the first input")
    options.add_argument("--only", default="", help="parsers with this in their name")
    options.add_argument("--native", type=Path, help="the program that does the same for the native parsers")
    given = options.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        chosen = [each for each in parsers(Path(folder)) if given.only in each.name]
        found: list[Finding] = []
        for parser in chosen:
            inputs = fuzz(parser, given.inputs, given.seed)
            total = max(1, given.inputs // parser.costs)
            new = [each for each in track(inputs, parser.name, total=total) if each is not None]
            print(f"{parser.name}: {total} inputs, {len(new)} findings", flush=True)
            found += new
    for each in found[:20]:
        print(each)
    native = NO_SUCH_PARSER
    if given.native is not None:
        same = ["--inputs", str(given.inputs), "--seed", str(given.seed), "--only", given.only]
        native = subprocess.run([given.native, *same], check=False).returncode
    if not chosen and native == NO_SUCH_PARSER:
        print(f"no parser has {given.only!r} in its name")
        return 1
    return 1 if found or native not in (0, NO_SUCH_PARSER) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
