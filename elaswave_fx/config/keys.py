"""The configuration of a run as a value: one frozen `Config`, made by `read.read_config` and trusted afterwards.

A key is a field here (its type, its rule, the kinds of its group that have it), and a default with a comment, its
meaning, in `conf/`; `docs/reference/keys.md` is made of both. This module imports neither torch nor Hydra.

    Config(steps=100, parallel=ParallelConfig(dp=2, …), optimizer=OptimizerConfig(name="adamw", lr=1e-3, …), …)
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_fx.config.faults import Fault
from elaswave_fx.config.validation import constrained

Options = Mapping[str, object]

MOST = 2**31 - 1
"""No count is larger: more is a slip of the hand, and would be allocated before anything could refuse it."""

MOST_RANKS = 4096

LEAST, MOST_BYTES = 1e-6, 1e15
"""Durations, speeds and watts are multiplied and divided by each other: beyond these bounds that overflows."""
LABELS = ("auto", "shifted", "same")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The starting shape of the work plane: dp x pp ranks."""

    dp: int = constrained(at_least=1, at_most=MOST_RANKS)
    pp: int = constrained(at_least=1, at_most=MOST_RANKS)
    micro_batch: int | None = constrained(at_least=1, at_most=MOST)
    """A rank runs at most so many samples at once; None lets the planner choose."""
    granule: int = constrained(at_least=1, at_most=MOST)
    """So many neighbouring samples are never separated."""
    schedule: str = constrained(choices=("1f1b", "split", "auto"))
    """The order of work: whole backward passes, halves of them, or the faster that fits."""
    ranks_per_host: int = constrained(at_least=1, at_most=MOST_RANKS)

    @property
    def ranks(self) -> int:
        return self.dp * self.pp


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model. `options`: sizes of an own model, overrides of a Hugging Face configuration, or the keyword
    arguments of the user's class (then `kind` is "target" and `name` its import path)."""

    kind: str
    name: str
    task: str | None
    options: Options
    mask_token: int | None = constrained(at_least=0, kinds=("hf",), default=None)
    """The id that stands for masked tokens; None: that of the tokenizer of `init_from`, else a new one."""

    @property
    def spec(self) -> dict[str, object]:
        """What `hydra.utils.instantiate` takes, for kind "target"."""
        return {"_target_": self.name, **self.options}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The samples. `paths`, `dtype`, … are set where the kind has them (`conf/data/`), `options` for "target"."""

    kind: str
    transform: Options | None = constrained(default=None)
    """The import path (`_target_`) of what makes a sample of a sample, and its arguments."""
    deadline_s: float = constrained(above=0, at_most=MOST, default=60.0)
    """Code of the user may take so long for a sample: a dataset as well as a transform."""
    paths: tuple[str, ...] = constrained(kinds=("files", "memmap", "hf"), default=())
    limit_mb: float | None = constrained(above=0, kinds=("stdlib", "files"), default=None)
    """Reading stops after so many megabytes."""
    dtype: str = constrained(
        choices=("uint8", "uint16", "int32", "uint32", "int64"), kinds=("memmap",), default="uint16"
    )
    """The ids in flat files have this type."""
    vocab_size: int | None = constrained(at_least=2, at_most=MOST, kinds=("memmap", "hf", "synthetic"), default=None)
    """Ids are below this; with None it is measured."""
    column: str | None = constrained(kinds=("hf",), default=None)
    """This column holds the text or the token ids."""
    split: str = constrained(kinds=("hf",), default="train")
    fields: tuple[str, ...] = constrained(kinds=("hf", "target"), default=())
    """These name what a sample holds: columns, or the positions of a tuple."""
    labels: str = constrained(choices=LABELS, kinds=("hf", "target"), default="auto")
    """Whether labels are the next tokens (shifted), or stand at their own tokens (same)."""
    layout: str = constrained(
        choices=("image", "flat", "halves", "tokens"), kinds=("digits", "synthetic"), default="image"
    )
    samples: int = constrained(at_least=1, at_most=MOST, kinds=("synthetic",), default=1)
    classes: int = constrained(at_least=2, at_most=MOST, kinds=("synthetic",), default=10)
    name: str = constrained(kinds=("target",), default="")
    """The import path of the user's class or function."""
    options: Options = constrained(kinds=("target",), default_factory=dict)

    @property
    def spec(self) -> dict[str, object]:
        """What `hydra.utils.instantiate` takes, for kind "target"."""
        return {"_target_": self.name, **self.options}


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer of text."""

    kind: str = constrained(choices=("bytes", "bpe"))
    vocab_size: int = constrained(at_least=0, at_most=MOST)


class _OfTarget:
    """What groups share whose kind "target" is code of the user's."""

    target: str | None
    options: Options

    @property
    def spec(self) -> dict[str, object]:
        """What `hydra.utils.instantiate` takes, for name "target"."""
        return {"_target_": self.target, **self.options}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_OfTarget):
    """The optimizer, with the keys of PyTorch's. `target` (else None) is the import path of the user's optimizer and
    `options` its arguments."""

    name: str = constrained(choices=("adamw", "sgd", "target"))
    lr: float = constrained(above=0)
    weight_decay: float | None = constrained(at_least=0, default=None)
    """None: what the constructor of an optimizer of one's own has by itself."""
    betas: tuple[float, float] = constrained(at_least=0, below=1, kinds=("adamw",), default=(0.9, 0.999))
    eps: float = constrained(above=0, kinds=("adamw",), default=1e-8)
    momentum: float = constrained(at_least=0, below=1, kinds=("sgd",), default=0.0)
    no_decay: str = constrained(choices=("vectors", "none"), default="vectors")
    """Which parameters do not decay; `vectors` are those with fewer than two dimensions."""
    max_skipped: int = constrained(at_least=1, at_most=MOST, default=20)
    """So many updates skipped in a row, because gradients are not finite or nothing counts, end the run."""
    target: str | None = constrained(kinds=("target",), default=None)
    options: Options = constrained(kinds=("target",), default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(_OfTarget):
    """The learning rate over steps, as a factor of `optimizer.lr`: warm-up, then NAME down to `min_lr_ratio`."""

    name: str = constrained(choices=("constant", "cosine", "linear", "target"))
    warmup_steps: int = constrained(at_least=0, at_most=MOST, kinds=("constant", "cosine", "linear"), default=0)
    min_lr_ratio: float = constrained(at_least=0, at_most=1, kinds=("cosine", "linear"), default=0.0)
    target: str | None = constrained(kinds=("target",), default=None)
    options: Options = constrained(kinds=("target",), default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """The evaluation: every `every` steps (0: never, and nothing is held out), on at most `batches` global batches of
    held-out samples. `fraction` of the samples is held out from training, by `split`: a keyed shuffle, or the last
    ones; none if `data` are other ones."""

    every: int = constrained(at_least=0, at_most=MOST)
    batches: int = constrained(at_least=1, at_most=MOST)
    fraction: float = constrained(at_least=0, below=1)
    split: str = constrained(choices=("shuffled", "last"))
    data: DataConfig | None


@dataclass(frozen=True, kw_only=True)
class PassesConfig:
    """The compiler. `dump` is a folder for the numbered graphs between passes, `pipeline` the whole pipeline as text
    (None: the standard one). `extra` are the user's passes: `_target_`, `after` or `before`, and options. `options` are
    those of each pass by its name, checked against the pass where it is made."""

    dump: str | None
    pipeline: str | None
    extra: tuple[Options, ...]
    options: Mapping[str, Options]


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The cache of compiled programs. `dir` is an absolute path once it was read."""

    enabled: bool
    dir: str

    @property
    def path(self) -> Path | None:
        """The cache folder, or None when nothing is to be cached."""
        return Path(self.dir) if self.enabled else None


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The launcher. Rank r listens on `port` + r of `host` (0: any free port), whichever process is the coordinator on
    `control_port` (0: any). A rank that is asked to leave has `grace_s` for that. `failure_domain`: what the launcher's
    ranks are lost with; None: this machine."""

    kind: str = constrained(choices=("local", "env"))
    host: str
    port: int = constrained(at_least=0, at_most=65535)
    control_port: int = constrained(at_least=0, at_most=65535)
    failure_domain: str | None
    grace_s: float = constrained(above=0, at_most=MOST)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """The lines on the console: one per event, or with `level` debug all that `logs/console.log` has."""

    level: str = constrained(choices=("info", "debug"), default="info")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The state on disk. Checkpoints are made if `dir` (None: RUN/checkpoints) or `every` is set: one every `every`
    steps, if that is not 0, and the last one in any case. The newest `keep` stay."""

    dir: str | None
    every: int = constrained(at_least=0, at_most=MOST)
    keep: int = constrained(at_least=1, at_most=MOST)


@dataclass(frozen=True, kw_only=True)
class CopiesConfig:
    """Replicas of a rank's state in the memory of others: `count` of each box besides its owner's."""

    count: int = constrained(at_least=0, at_most=MOST_RANKS)
    record: str = constrained(choices=("fp32", "bf16"))


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Whether a run may go back to a checkpoint when no replica of a box is left. Ranks wait `patience_s` for those
    that cannot be reached and may have the last replicas."""

    allow_rollback: bool
    patience_s: float = constrained(above=0, at_most=MOST)


@dataclass(frozen=True, kw_only=True)
class SwitchConfig:
    """A change of the job's ranks or lanes while it trains: syncing replicas take at most `memory` MiB of a rank
    beside what its plan needs, with None all that is left of its memory."""

    memory: float | None = constrained(above=0, at_most=MOST)

    @property
    def memory_bytes(self) -> int | None:
        """The bound in bytes."""
        return None if self.memory is None else int(self.memory * 2**20)


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """The links between emulated hosts: messages are under way for `latency_ms` and go one after another at
    `bytes_per_s`. None: what this machine takes."""

    latency_ms: float | None = constrained(at_least=0, at_most=MOST)
    bytes_per_s: float | None = constrained(at_least=1, at_most=MOST_BYTES)

    @property
    def is_slowed(self) -> bool:
        """Whether anything is emulated of them."""
        return self.latency_ms is not None or self.bytes_per_s is not None


@dataclass(frozen=True, kw_only=True)
class EmulatedConfig:
    """The emulated device. Its units take `unit_ms` per sample, forward and backward, in the mean; with None they take
    as long as on the CPU. Rank r takes that over `speeds[r]`, all ranks alike with None. A rank has `memory_mb`, with
    None its share of this machine's."""

    unit_ms: float | None = constrained(at_least=LEAST, at_most=MOST)
    memory_mb: float | None = constrained(above=0, at_most=MOST)
    speeds: tuple[float, ...] | None = constrained(at_least=LEAST, at_most=MOST)
    link: LinkConfig


@dataclass(frozen=True, kw_only=True)
class HostLinkConfig:
    """The links between the ranks of two hosts."""

    hosts: tuple[int, int] = constrained(at_least=0)
    latency_ms: float = constrained(at_least=0, at_most=MOST, default=0.0)
    bytes_per_s: float | None = constrained(at_least=1, at_most=MOST_BYTES, default=None)


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """What is known of the links between hosts; host h has the ranks from h x `parallel.ranks_per_host` on."""

    links: tuple[HostLinkConfig, ...]


@dataclass(frozen=True, kw_only=True)
class PointConfig:
    """An operating point of a rank's device; `speed` is relative to that at which units were measured."""

    mhz: float = constrained(at_least=LEAST, at_most=MOST)
    speed: float = constrained(at_least=LEAST, at_most=MOST)
    watts: float = constrained(at_least=LEAST, at_most=MOST)


@dataclass(frozen=True, kw_only=True)
class PowerConfig:
    """Clocks. With `points` every rank gets one of them; all ranks together draw at most `cap_w` while they compute.

    `clocked` is the part of a unit's time that follows the clock, `idle_w` what a rank draws that waits. `actuator`
    sets clocks; `processors` and `sysfs` are for cpufreq, `hook` is for Ascend devices.
    """

    points: tuple[PointConfig, ...]
    cap_w: float | None = constrained(at_least=LEAST, at_most=MOST)
    idle_w: float = constrained(at_least=0, at_most=MOST)
    clocked: float = constrained(at_least=0, at_most=1)
    actuator: str = constrained(choices=("emulated", "cpufreq", "nvml", "ascend"))
    processors: tuple[tuple[int, ...], ...] = constrained(at_least=0)
    """Those that rank r computes on."""
    sysfs: str
    hook: str | None


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """How long a plan is expected to last: until the next loss (`mtbf_s`), or until a lost rank is back
    (`rejoin_s`)."""

    mtbf_s: float = constrained(at_least=LEAST, at_most=MOST)
    rejoin_s: float | None = constrained(at_least=LEAST, at_most=MOST)

    @property
    def life_s(self) -> float:
        """Expected of a topology, in seconds."""
        return self.mtbf_s if self.rejoin_s is None else min(self.mtbf_s, self.rejoin_s)


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """What comparisons and ablations change: the answer to a loss (`policy`), the parts of recovery that the planner
    may use (`axes`), how it reaches lanes that begin with a stall (`goals`), how replicas stay current (`copy_mode`),
    whether random draws follow the samples (`reshard_rng`), and whether the launcher tells the coordinator of
    processes that end (`exit_words`)."""

    policy: str = constrained(choices=("elaswave", "recycle", "drop_replica", "smaller_batch", "restart"))
    axes: tuple[str, ...] = constrained(choices=("dataflow", "graph", "frequency"))
    goals: str = constrained(choices=("background", "blocking", "never"))
    copy_mode: str = constrained(choices=("log", "state"))
    reshard_rng: bool
    exit_words: bool


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything about a run. A step takes `global_batch` samples of `seq_len` tokens. `resume` is auto, off, or a
    path."""

    steps: int = constrained(at_least=1, at_most=MOST)
    seed: int = constrained(at_least=0, at_most=2**63 - 1)
    global_batch: int = constrained(at_least=1, at_most=MOST)
    seq_len: int = constrained(at_least=1, at_most=MOST)
    parallel: ParallelConfig
    model: ModelConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    clip_norm: float | None = constrained(above=0)
    precision: str = constrained(choices=("fp32", "bf16"))
    recompute: str = constrained(choices=("none", "light", "full"))
    """The policy of the pass `recompute`, unless `passes.recompute.policy` is set itself."""
    passes: PassesConfig
    eval: EvalConfig
    init_from: str | None
    cache: CacheConfig
    device: str = constrained(choices=("cpu", "cuda", "npu", "emulated"))
    emulated: EmulatedConfig
    topology: TopologyConfig
    power: PowerConfig
    compile: str
    launch: LaunchConfig
    checkpoint: CheckpointConfig
    resume: str
    exact: bool
    copies: CopiesConfig
    recovery: RecoveryConfig
    switch: SwitchConfig
    planner: PlannerConfig
    lab: LabConfig
    faults: tuple[Fault, ...]
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    def as_dict(self) -> dict[str, Any]:
        """Plain nested values, for `summary.json`, plans and cache keys."""
        return dataclasses.asdict(self)


def default_cache_dir() -> str:
    """`$XDG_CACHE_HOME/elaswave_fx`, or `~/.cache/elaswave_fx`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "elaswave_fx")
