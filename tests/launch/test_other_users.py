"""Other users of the machine: one who tries everything against a job that runs, and one with a job of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pkgutil
import shutil
import signal
import socket
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import elaswave_fx
from elaswave_fx.config.keys import CacheConfig
from elaswave_fx.control.coordinator.job_file import JobFile
from elaswave_fx.control.stream import Hello
from elaswave_fx.errors import ConfigError
from elaswave_fx.files import others_may_change
from elaswave_fx.launch.ports import claimed_ports
from elaswave_fx.plan.work.topology import Rank
from tests.recovery.harness import Finished, Job, job_config
from tests.recovery.invariants import assert_survived
from tests.recovery.references import References
from tests.waiting import await_true

STRANGER = 65534
"""A user who owns nothing here."""

CONNECTIONS = 64
"""That are held open to every port of the job: four times as many as a rank talks with at once."""

HELLO = Hello.of(Rank(1)).frame

NAMES = ("elaswave-0", "elaswave-port-0", "coordinator", *(f"elaswave-port-{port}" for port in range(29500, 29508)))
"""In the kernel's memory, which a job may want."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own may be entered by its user only."""
    folder = Path(tempfile.mkdtemp(prefix="two-users-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_stranger_gets_nothing_and_hinders_nobody(open_folder: Path, references: References) -> None:
    config = job_config((2, 2), "steps=400", "parallel.ranks_per_host=1")
    loot = open_folder / "loot"
    loot.mkdir()
    os.chown(loot, STRANGER, STRANGER)
    with Job(config, open_folder / "run") as job:
        job.await_step(5)
        told = JobFile.read(job.folder)
        token = told.token
        coordinator = job.coordinator()
        assert coordinator is not None
        pids = [*job.pids.values(), job.launcher, coordinator]
        ports = [port for pid in job.pids.values() for port in listening_ports(pid)]
        assert len(ports) == len(job.pids), f"the ranks listen on {ports}"
        with as_stranger(lambda: Attack(job.folder, pids, ports, told.port).run(loot)) as stranger:
            await_true((loot / "tried.json").exists, "everything was tried once")
            tried = json.loads((loot / "tried.json").read_text())
            assert not job.ended, f"the run was over too soon, in {job.folder}"
            run = job.wait()
            assert os.waitpid(stranger, os.WNOHANG) == (0, 0), "the stranger went on to the end"
    assert tried["had"] == [], "what is nobody else's business"
    assert tried["connected"] >= len(ports), "it could at least try"
    assert tried["read"] > 0, "the stranger may read what a user leaves open"
    assert token.encode() not in (loot / "bytes").read_bytes()
    assert_survived(run, references.of(config), set())
    assert run.summary["recoveries"] == []
    assert not run.of_kind("coordinator"), "the coordinator was not hindered"


def test_two_users_train_side_by_side(open_folder: Path, references: References) -> None:
    text = open_folder / "text.txt"
    text.write_text("".join(f"line {number} of {number * number}\n" for number in range(5000)))
    config = job_config((2, 2), "steps=60", "data=files", f"data.paths=[{text}]")
    import_package()
    theirs = open_folder / "theirs"
    theirs.mkdir()
    os.chown(theirs, STRANGER, STRANGER)

    def train_too() -> None:
        os.environ.update(HOME=str(theirs), XDG_CACHE_HOME=str(theirs / "cache"))
        own = dataclasses.replace(config, cache=CacheConfig(enabled=True, dir=str(theirs / "cache")))
        with Job(own, theirs / "run") as job:
            (theirs / "code").write_text(str(job.wait().code))

    with as_stranger(train_too) as stranger, Job(config, open_folder / "run") as job:
        ours = job.wait()
        await_true(lambda: os.waitpid(stranger, os.WNOHANG)[0] != 0, "the other user's run ends")
    assert (theirs / "code").read_text() == "0", (theirs / "run" / "console.log").read_text()
    for run in (ours, Finished(0, theirs / "run")):
        assert_survived(run, references.of(config), set())
        assert run.summary["recoveries"] == []
    assert {path.stat().st_uid for path in (theirs / "run").rglob("*")} == {STRANGER}
    assert others_may_change(theirs / "cache" / "programs"), "we take nothing from their cache"
    assert not others_may_change(config.cache.path or open_folder)


# --- The stranger


@pytest.mark.parametrize("kind", ["listens on it", "has its name"])
def test_a_port_that_another_user_has_is_refused(kind: str, open_folder: Path) -> None:
    port, taken = 29610, open_folder / "taken"
    taken.mkdir(mode=0o777)
    taken.chmod(0o777)

    def take() -> None:
        by_name = kind == "has its name"
        with socket.socket(*((socket.AF_UNIX, socket.SOCK_DGRAM) if by_name else ())) as place:
            place.bind(f"\0elaswave-port-{port + 1}" if by_name else ("127.0.0.1", port + 1))
            if not by_name:
                place.listen()
            (taken / "yes").touch()
            signal.pause()

    with as_stranger(take):
        await_true((taken / "yes").exists, "the port is taken")
        busy = f"launch.port={port}: port {port + 1} \\(rank 1\\) is busy; nearest valid: {port + 2}, or 0 for any"
        with pytest.raises(ConfigError, match=busy), claimed_ports("127.0.0.1", port, 3):
            pass
    with claimed_ports("127.0.0.1", port, 3):
        pass


@dataclass
class Attack:
    """What another user can try against a run, its processes and its ports."""

    folder: Path
    pids: list[int]
    ports: list[int]
    control: int
    had: list[str] = field(default_factory=list)
    """What succeeded, and must not."""

    seen: bytearray = field(default_factory=bytearray)
    held: list[socket.socket] = field(default_factory=list)
    connected: int = 0

    def run(self, loot: Path) -> None:
        """Once everything, with a report; then the same again until it is ended."""
        while True:
            self.read_files()
            self.read_processes()
            self.signal_processes()
            self.take_names()
            self.reach_the_coordinator()
            self.fill_ports()
            if not (loot / "tried.json").exists():
                (loot / "bytes").write_bytes(self.seen)
                report = {"had": self.had, "read": len(self.seen), "connected": self.connected}
                (loot / "new").write_text(json.dumps(report))
                (loot / "new").rename(loot / "tried.json")

    def read_files(self) -> None:
        """The run directory, and what jobs keep in memory."""
        self._read_below(self.folder)
        for entry in Path("/dev/shm").glob("elaswave*"):
            with contextlib.suppress(FileNotFoundError):  # of a job that has ended
                if entry.stat().st_uid != os.getuid() and self._read_below(entry):
                    self.had.append(f"read {entry}")
        for name in ("control", "control/job.json", "control/register.json", "control/coordinator.lock"):
            if self._read(self.folder / name):
                self.had.append(f"read {name}")
        for place in (self.folder, self.folder / "control", *Path("/dev/shm").glob("elaswave-*")):
            with contextlib.suppress(OSError):
                (place / "of-a-stranger").write_bytes(b"")
                self.had.append(f"wrote into {place}")

    def read_processes(self) -> None:
        """Environment, memory, open files; segments between ranks are files that have no name elsewhere."""
        for pid in self.pids:
            for name in ("environ", "mem", "maps", "stack", "syscall", "auxv"):
                if self._read(Path(f"/proc/{pid}/{name}")):
                    self.had.append(f"read {name} of process {pid}")
            with contextlib.suppress(OSError):
                for entry in os.listdir(f"/proc/{pid}/fd"):
                    self.had.append(f"saw descriptor {entry} of process {pid}")
            with contextlib.suppress(OSError):
                os.close(os.pidfd_open(pid))  # anybody may; what it is good for is tried below
            self._read(Path(f"/proc/{pid}/cmdline"))
            for number in range(64):
                if self._read(Path(f"/proc/{pid}/fd/{number}")):
                    self.had.append(f"read descriptor {number} of process {pid}")

    def signal_processes(self) -> None:
        for pid in self.pids:
            for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, 0):
                with contextlib.suppress(PermissionError, ProcessLookupError):
                    os.kill(pid, number)
                    self.had.append(f"signal {number} to process {pid}")

    def take_names(self) -> None:
        """Names that a job has, or may want."""
        with contextlib.suppress(OSError):
            taken = [line.split()[-1][1:] for line in Path("/proc/net/unix").read_text().splitlines() if "@" in line]
            for name in (*NAMES, *taken):
                taker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                with contextlib.suppress(OSError):
                    taker.bind(f"\0{name}")
                self._hold(taker)

    def reach_the_coordinator(self) -> None:
        """With a greeting as a rank has it, on which a coordinator proves the job's token: it is not even heard."""
        with socket.socket() as dialer, contextlib.suppress(ConnectionError, TimeoutError):
            dialer.settimeout(1.0)
            dialer.connect(("127.0.0.1", self.control))
            dialer.send(struct.pack("<I", len(HELLO)) + HELLO)
            if heard := dialer.recv(4096):
                self.had.append(f"{len(heard)} bytes of the coordinator")

    def fill_ports(self) -> None:
        """Connections that say nothing, little, or nonsense, and stay; some are given up for new ones."""
        for port in (*self.ports, self.control):
            for number in range(CONNECTIONS):
                dialer = socket.socket()
                dialer.setblocking(False)
                with contextlib.suppress(OSError):
                    dialer.settimeout(0.2)
                    dialer.connect(("127.0.0.1", port))
                    self.connected += 1
                    dialer.setblocking(False)
                    dialer.send((b"", b"E", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096))[number % 4])
                self._hold(dialer)
        time.sleep(0.05)
        for dialer in self.held:
            with contextlib.suppress(OSError):
                dialer.setblocking(False)
                self.seen += dialer.recv(4096)

    def _hold(self, taken: socket.socket) -> None:
        """Open until it is one of too many."""
        self.held.append(taken)
        while len(self.held) > 2 * CONNECTIONS * (len(self.ports) + 1):
            self.held.pop(0).close()

    def _read_below(self, folder: Path) -> int:
        return sum(self._read(Path(place, name)) for place, _, names in os.walk(folder) for name in names)

    def _read(self, path: Path) -> int:
        """How many bytes could be read; they are kept."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return 0
        try:
            found = os.read(descriptor, 1 << 20)
        except OSError:
            return 0
        finally:
            os.close(descriptor)
        if len(self.seen) < 1 << 26:
            self.seen += found
        return len(found)


@contextlib.contextmanager
def as_stranger(body: Callable[[], None]) -> Iterator[int]:
    """A process of another user that runs `body`; ended with the block."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            body()
            code = 0
        except BaseException:  # noqa: BLE001 - the entry point of a process
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def import_package() -> None:
    """All modules that a run imports: the interpreter's library may lie where another user cannot read."""
    importlib.import_module("encodings.idna")  # which the first look at an address imports
    for module in pkgutil.walk_packages(elaswave_fx.__path__, "elaswave_fx."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def listening_ports(pid: int) -> list[int]:
    """The TCP ports on which a process waits for others."""
    links = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(entry.path))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
