"""Joiners fetch the job's files from the coordinator: whole, checked, by name, and nobody without the token does."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_fx.control.agent.ask_to_join import asking
from elaswave_fx.control.agent.fetch_files import fetch_files
from elaswave_fx.control.coordinator.file_server import PART_BYTES, FileServer, SharedFile, part_of
from elaswave_fx.control.coordinator.job_file import JobFile
from elaswave_fx.control.coordinator.refusal_log import EVERY_S, RefusalLog
from elaswave_fx.control.protocol.member_info import UNNUMBERED, Conditions
from elaswave_fx.control.protocol.messages import (
    Connected,
    Disconnected,
    Fetch,
    FilePart,
    JoinRequest,
    NumberWanted,
    Offer,
    PartWanted,
    Refused,
    Welcome,
)
from elaswave_fx.control.stream import Hello
from elaswave_fx.control.tcp import listen, port_of
from elaswave_fx.control.wire import ControlAddress, CoordinatorSocket, RankSocket, encode
from elaswave_fx.errors import ConfigError
from elaswave_fx.plan.work.topology import Rank
from tests.control.member_infos import info_of
from tests.waiting import WAIT_S, await_true

STATE = "state.safetensors"


class Coordinator:
    """A coordinator that numbers and serves joiners, in a thread, until it is closed."""

    def __init__(self, address: ControlAddress, files: dict[str, SharedFile], listener: socket.socket) -> None:
        self.wanted: list[Fetch] = []
        self.strangers: list[str] = []
        self.before_answer: Callable[[Fetch], None] = lambda fetch: None
        self._socket, self._server = CoordinatorSocket(address, listener), FileServer(files)
        self._socket.on_stranger = self.strangers.append
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ends.wait(0.0005):
            for event in self._socket.receive():
                if isinstance(event, NumberWanted):
                    self._socket.answer(event.connection, Welcome(Rank(4), "{}", (), self._server.offers()))
                elif isinstance(event, PartWanted):
                    self.wanted.append(event.fetch)
                    self.before_answer(event.fetch)
                    self._server.ask(event)
            for connection, answer in self._server.answers():
                self._socket.answer(connection, answer)
        self._server.close()
        self._socket.close()

    def close(self) -> None:
        self.die()
        self._thread.join()

    def die(self) -> None:
        """From its own thread: it answers nothing more."""
        self._ends.set()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """As the launcher has it, whichever coordinator serves it."""
    with listen("127.0.0.1", 0) as found:
        yield found


@pytest.fixture
def address(listener: socket.socket) -> ControlAddress:
    return ControlAddress("127.0.0.1", port_of(listener), "t" * 32)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, SharedFile]:
    """One of several pieces, one of exactly one, an empty one."""
    contents = {
        STATE: os.urandom(3 * PART_BYTES + 17), "program/artifact.json": os.urandom(PART_BYTES), "program/none": b"",
    }  # fmt: skip
    found = {}
    for name, data in contents.items():
        path = tmp_path / "there" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        found[name] = SharedFile.of(path)
    return found


@contextmanager
def serving(address: ControlAddress, files: dict[str, SharedFile], listener: socket.socket) -> Iterator[Coordinator]:
    coordinator = Coordinator(address, files, listener.dup())
    try:
        yield coordinator
    finally:
        coordinator.close()


def offers(files: dict[str, SharedFile]) -> tuple[Offer, ...]:
    return tuple(Offer(name, file.size, file.digest) for name, file in files.items())


def assert_here(files: dict[str, SharedFile], folder: Path) -> None:
    for name, file in files.items():
        assert (folder / name).read_bytes() == Path(file.path).read_bytes()


def test_files_arrive_piece_by_piece_before_and_after_a_number(
    address: ControlAddress, files: dict[str, SharedFile], listener: socket.socket, tmp_path: Path
) -> None:
    with serving(address, files, listener) as coordinator, asking(address) as line:
        assert isinstance(line.ask(Fetch(STATE, 5), WAIT_S), FilePart)
        welcome = line.ask(JoinRequest(), WAIT_S)
        assert isinstance(welcome, Welcome) and welcome.offers == offers(files)
        assert isinstance(line.ask(Fetch(STATE, 6), WAIT_S), FilePart)
        assert fetch_files(address, welcome.offers, tmp_path / "here") == sum(file.size for file in files.values())
    assert_here(files, tmp_path / "here")
    pieces = [Fetch(STATE, place * PART_BYTES) for place in range(4)]
    assert coordinator.wanted[2:] == [*pieces, Fetch("program/artifact.json", 0)], "none of the empty file"


def test_a_coordinator_that_no_launcher_has_started_knows_the_files(
    files: dict[str, SharedFile], tmp_path: Path
) -> None:
    conditions, folder = Conditions({"torch": "2.13.0"}, "ff"), str(tmp_path)
    job = JobFile(
        folder=folder, host="127.0.0.1", port=4711, token="t", run_dir=folder, copies=1, allow_rollback=False,
        conditions=conditions, facts='{"host": "127.0.0.1"}', files=files,
    )  # fmt: skip
    spec = JobFile.read(job.write()).spec()
    assert (spec.files, spec.facts) == (files, job.facts)


def test_another_coordinator_goes_on_with_the_file(
    address: ControlAddress, files: dict[str, SharedFile], listener: socket.socket, tmp_path: Path
) -> None:
    first = Coordinator(address, files, listener.dup())
    first.before_answer = lambda fetch: first.die() if fetch.offset == 2 * PART_BYTES else None
    found: list[int] = []
    fetching = threading.Thread(target=lambda: found.append(fetch_files(address, offers(files), tmp_path / "here")))
    fetching.start()
    await_true(lambda: not first._thread.is_alive(), "the first one is gone")
    with serving(address, files, listener) as second:
        fetching.join(WAIT_S)
    assert found == [sum(file.size for file in files.values())]
    assert_here(files, tmp_path / "here")
    assert second.wanted[0].offset in (2 * PART_BYTES, 3 * PART_BYTES), "what has arrived is not fetched again"


def test_a_coordinator_that_does_not_come_back_is_waited_for_so_long(
    address: ControlAddress, files: dict[str, SharedFile], listener: socket.socket, tmp_path: Path
) -> None:
    listener.close()
    with pytest.raises(ConfigError, match=rf"tcp://127.0.0.1:{address.port}: cannot be reached"):
        fetch_files(address, offers(files), tmp_path / "here", timeout_s=0.3)


def cut(path: Path) -> None:
    os.truncate(path, PART_BYTES // 2)


def change(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes([path.read_bytes()[0] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (change, f"{STATE} did not arrive as it was built: its SHA-256 is "),
        (cut, f"refuses this process: {STATE}: has become shorter than it was built"),
        (Path.unlink, rf"refuses this process: {STATE}: the coordinator cannot read it .No such file"),
    ],
    ids=["changed", "cut", "gone"],
)
def test_a_file_that_is_not_as_it_was_built_is_refused(
    damage: Callable[[Path], None], why: str, address: ControlAddress, files: dict[str, SharedFile],
    listener: socket.socket, tmp_path: Path,
) -> None:  # fmt: skip
    damage(Path(files[STATE].path))
    with serving(address, files, listener), pytest.raises(ConfigError, match=why):
        fetch_files(address, offers(files), tmp_path / "here")


def test_a_file_that_has_grown_is_as_it_was_up_to_its_end(
    address: ControlAddress, files: dict[str, SharedFile], listener: socket.socket, tmp_path: Path
) -> None:
    before = Path(files[STATE].path).read_bytes()
    with Path(files[STATE].path).open("ab") as file:
        file.write(b"more")
    with serving(address, files, listener):
        fetch_files(address, offers(files), tmp_path / "here")
    assert (tmp_path / "here" / STATE).read_bytes() == before


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "program/../../up", ""])
def test_no_file_goes_outside_of_the_folder(name: str, address: ControlAddress, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no name of a file that a job shares"):
        fetch_files(address, (Offer(name, 0, ""),), tmp_path / "here")


def test_a_disk_without_room_is_named(
    address: ControlAddress, files: dict[str, SharedFile], listener: socket.socket
) -> None:
    named = {"full": files[STATE]}
    with serving(address, named, listener), pytest.raises(ConfigError, match="No space left on device.; TMPDIR names"):
        fetch_files(address, offers(named), Path("/dev"))


def test_nothing_else_is_read(files: dict[str, SharedFile]) -> None:
    for name in ("/etc/passwd", files[STATE].path, "program", ""):
        assert part_of(files, Fetch(name, 0)) == Refused(f"the job shares no file {name!r}")
    for offset in (-1, files[STATE].size, 1 << 80):
        assert isinstance(part_of(files, Fetch(STATE, offset)), Refused)
    last = part_of(files, Fetch(STATE, 3 * PART_BYTES))
    assert isinstance(last, FilePart) and len(last.data) == 17


def test_a_disk_that_hangs_holds_the_coordinator_up_for_no_moment(tmp_path: Path) -> None:
    """Who opens a pipe waits for its other end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    server = FileServer({STATE: SharedFile(str(pipe), 4, "")})
    server.ask(PartWanted(0, Fetch(STATE, 0)))
    assert server.answers() == []
    with pipe.open("wb"):
        found: list[object] = []
        await_true(lambda: (found.extend(server.answers()), len(found))[-1] == 1, "an answer")
    ((connection, refused),) = found  # type: ignore[misc]
    assert connection == 0 and "the coordinator cannot read it" in refused.reason
    server.close()


# --- Who gets nothing


def test_who_holds_another_token_gets_nothing_and_is_told_of(
    address: ControlAddress, files: dict[str, SharedFile], listener: socket.socket, tmp_path: Path
) -> None:
    with serving(address, files, listener) as coordinator:
        with pytest.raises(ConfigError, match="does not hold the job's token"):
            fetch_files(replace(address, token="f" * 32), offers(files), tmp_path / "here")
        await_true(lambda: len(coordinator.strangers) == 1, "the coordinator has noticed")
        assert fetch_files(address, offers(files), tmp_path / "here")
    assert coordinator.wanted[0] == Fetch(STATE, 0) and len(coordinator.wanted) == 5
    (line,) = coordinator.strangers
    assert line.startswith("127.0.0.1:") and line.endswith("somebody came, and left without a proof of the job's token")


def test_who_proves_nothing_gets_nothing(
    address: ControlAddress, files: dict[str, SharedFile], listener: socket.socket
) -> None:
    fetch = encode(Fetch(STATE, 0))
    greeting = Hello.of(UNNUMBERED).frame
    with serving(address, files, listener) as coordinator:
        for said in ((fetch,), (greeting, fetch), (greeting, b"p" * 32, fetch)):
            with socket.create_connection((address.host, address.port), timeout=WAIT_S) as stranger:
                stranger.sendall(b"".join(struct.pack("<I", len(frame)) + frame for frame in said))
                assert len(_all_of(stranger)) < 100, "a challenge at most"
        await_true(lambda: len(coordinator.strangers) == 3, "the coordinator has noticed")
    assert coordinator.wanted == []
    assert all("somebody came" in line for line in coordinator.strangers), coordinator.strangers


def _all_of(end: socket.socket) -> bytes:
    found = b""
    try:
        while data := end.recv(1 << 16):
            found += data
    except ConnectionResetError:
        return found
    return found


def test_a_rank_fetches_nothing(address: ControlAddress, listener: socket.socket) -> None:
    coordinator, rank = CoordinatorSocket(address, listener.dup()), RankSocket(address, info_of(1))
    found: list[object] = []

    def turn(count: int) -> bool:
        rank.connect(0.0)
        rank.receive()
        found.extend(coordinator.receive())
        return len(found) >= count

    await_true(lambda: turn(1), "it is known")
    rank.send(Fetch(STATE, 0))
    await_true(lambda: turn(2), "it is cut off")
    assert found[:2] == [Connected(Rank(1)), Disconnected(Rank(1))]
    rank.close()
    coordinator.close()


def test_who_does_not_wait_for_an_answer_is_cut_off(address: ControlAddress, listener: socket.socket) -> None:
    coordinator = CoordinatorSocket(address, listener.dup())
    found: list[object] = []
    with asking(address) as line:
        opening = threading.Thread(target=lambda: setattr(line, "_stream", line._opened(time.monotonic() + WAIT_S)))
        opening.start()
        await_true(lambda: (coordinator.receive(), line._stream is not None)[-1], "it has proved the token")
        assert line._stream is not None
        line._stream.send(encode(Fetch(STATE, 0)))
        line._stream.send(encode(Fetch(STATE, 1)))
        await_true(lambda: (found.extend(coordinator.receive()), coordinator.refused)[-1] == 1, "it is cut off")
    assert found == [PartWanted(0, Fetch(STATE, 0))]
    coordinator.answer(0, FilePart(STATE, 0, b"late"))
    assert coordinator._connections == {}
    coordinator.close()


def test_of_many_strangers_few_lines_speak() -> None:
    log = RefusalLog()
    assert log.line("10.0.0.7:4711: no", 100.0) == "refused: 10.0.0.7:4711: no"
    assert [log.line("10.0.0.7:4712: no", 100.0 + k / 1000) for k in range(1000)] == [None] * 1000
    later = 100.0 + EVERY_S
    assert log.line("10.0.0.8:1: no", later) == "refused: 10.0.0.8:1: no (1000 others since the last such line)"
    assert log.line("10.0.0.8:2: no", later + EVERY_S) == "refused: 10.0.0.8:2: no"
