"""The configuration of a run: one frozen `Config`, checked once, trusted afterwards.

In: what Hydra composed from `conf/`, a recipe and the command line. Out: `Config`. Everything that can be refused
before a model is built is refused here, with one line that names the key and the nearest valid key or value:

    load_config(["recipe=gpt_stdlib", "parallel.dp=2"]).parallel.dp   ->  2
    load_config(["precision=bf61"])   ->  ConfigError("precision=bf61: must be one of fp32, bf16; nearest valid: bf16")

Keys of features that do not exist yet are present with their defaults; any other value "is not available
yet": `NOT_AVAILABLE_YET`. This module imports neither torch nor Hydra, so that `--help` answers at once.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_fx.config import schema
from elaswave_fx.config.faults import Fault, check_faults
from elaswave_fx.config.schema import constrained, nearest, show
from elaswave_fx.errors import ConfigError

Options = Mapping[str, object]

# Key -> the values that exist so far. The first one is the default.
NOT_AVAILABLE_YET: dict[str, tuple[object, ...]] = {
    "exact": (False,),
    "policy": ("elaswave",),
    "planner.axes": (("dataflow", "graph", "frequency"),),
    "rng.reshard": (True,),
    "device": ("cpu", "emulated"),
    "launch": ("local",),
    "compile": ("none",),
}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The starting shape of the work plane: dp x pp ranks."""

    dp: int = constrained(at_least=1)
    pp: int = constrained(at_least=1)
    micro_batch: int | None = constrained(at_least=1)  # most samples a rank runs at once; None: the planner chooses
    granule: int = constrained(at_least=1)  # samples that are never separated
    ranks_per_host: int = constrained(at_least=1)

    @property
    def ranks(self) -> int:
        return self.dp * self.pp


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model. `options`: sizes of an own model, overrides of a Hugging Face configuration, or the keyword
    arguments of the user's class (then `kind` is "target" and `name` its import path)."""

    kind: str
    name: str
    task: str | None
    options: Options

    @property
    def spec(self) -> dict[str, object]:
        """What `hydra.utils.instantiate` takes, for kind "target"."""
        return {"_target_": self.name, **self.options}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which samples. `paths`, `dtype`, … are set where the kind has them (`conf/data/`), `options` for "target"."""

    kind: str
    paths: tuple[str, ...] = ()
    limit_mb: float | None = constrained(above=0, default=None)  # stdlib, files: stop reading after so many megabytes
    dtype: str = constrained(choices=("uint16", "uint32"), default="uint16")  # memmap, flat files
    vocab_size: int | None = constrained(
        at_least=2, default=None
    )  # memmap, synthetic, hf columns of ids; None: measured
    column: str | None = None  # hf: the column of text or of token ids
    split: str = "train"  # hf
    fields: tuple[str, ...] = ()  # names for what a sample holds: hf columns, or the positions of a tuple
    layout: str = constrained(choices=("image", "flat", "halves", "tokens"), default="image")  # digits, synthetic
    samples: int = constrained(at_least=1, default=1)  # synthetic
    classes: int = constrained(at_least=2, default=10)  # synthetic
    name: str = ""  # import path of the user's class or function
    options: Options = dataclasses.field(default_factory=dict)

    @property
    def spec(self) -> dict[str, object]:
        """What `hydra.utils.instantiate` takes, for kind "target"."""
        return {"_target_": self.name, **self.options}


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    kind: str = constrained(choices=("bytes", "bpe"))
    vocab_size: int = constrained(at_least=256)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """As in PyTorch. `target` (else None) is the import path of the user's optimizer and `options` its arguments."""

    name: str = constrained(choices=("adamw", "sgd", "target"))
    lr: float = constrained(above=0)
    weight_decay: float = constrained(at_least=0, default=0.0)
    betas: tuple[float, float] = constrained(at_least=0, below=1, default=(0.9, 0.999))
    eps: float = constrained(above=0, default=1e-8)
    momentum: float = constrained(at_least=0, below=1, default=0.0)
    no_decay: str = constrained(choices=("vectors", "none"), default="vectors")  # vectors: parameters with ndim < 2
    target: str | None = None
    options: Options = dataclasses.field(default_factory=dict)

    @property
    def spec(self) -> dict[str, object]:
        """What `hydra.utils.instantiate` takes, for name "target"."""
        return {"_target_": self.target, **self.options}


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over steps, as a factor of `optimizer.lr`: warm-up, then NAME down to `min_lr_ratio`."""

    name: str = constrained(choices=("constant", "cosine", "linear", "target"))
    warmup_steps: int = constrained(at_least=0, default=0)
    min_lr_ratio: float = constrained(at_least=0, at_most=1, default=0.0)
    target: str | None = None
    options: Options = dataclasses.field(default_factory=dict)

    @property
    def spec(self) -> dict[str, object]:
        """What `hydra.utils.instantiate` takes, for name "target"."""
        return {"_target_": self.target, **self.options}


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: int = constrained(at_least=0)  # steps between evaluations; 0: never
    batches: int = constrained(at_least=1)  # at most so many global batches of held-out samples
    fraction: float = constrained(at_least=0, below=1)  # share of the samples (the last ones) held out from training


@dataclass(frozen=True, kw_only=True)
class PassesConfig:
    dump: str | None  # folder for the numbered graphs between passes


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    enabled: bool
    dir: str  # absolute once read

    @property
    def path(self) -> Path | None:
        """The cache folder, or None when nothing is to be cached."""
        return Path(self.dir) if self.enabled else None


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    kind: str = constrained(choices=("local", "env"))
    port: int = constrained(at_least=0, at_most=65535)  # 0: any


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The state on disk. Made when `dir` or `every` is set; the last one at the end in any case."""

    dir: str | None  # None: RUN/checkpoints
    every: int = constrained(at_least=0)  # steps between checkpoints; 0: only the last one, if `dir` is set
    keep: int = constrained(at_least=1)  # so many newest ones stay


@dataclass(frozen=True, kw_only=True)
class CopiesConfig:
    """Copies of a rank's state in the memory of others: `count` of each box besides its owner's."""

    count: int = constrained(at_least=0)
    mode: str = constrained(choices=("log", "state"))
    record: str = constrained(choices=("fp32", "bf16"))


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    allow_rollback: bool


@dataclass(frozen=True, kw_only=True)
class EmulatedConfig:
    """The emulated device: how long its kernels take."""

    unit_ms: float | None = constrained(
        above=0
    )  # per sample, mean over units, forward and backward; None: as on the CPU


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    axes: tuple[str, ...] = constrained(choices=("dataflow", "graph", "frequency"))


@dataclass(frozen=True, kw_only=True)
class RngConfig:
    reshard: bool


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything about a run. Built by `from_hydra` or `load_config` only."""

    steps: int = constrained(at_least=1)
    seed: int = constrained(at_least=0, at_most=2**63 - 1)
    global_batch: int = constrained(at_least=1)  # samples per step
    seq_len: int = constrained(at_least=1)  # tokens per sample
    parallel: ParallelConfig
    model: ModelConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    clip_norm: float | None = constrained(above=0)
    precision: str = constrained(choices=("fp32", "bf16"))
    recompute: str = constrained(choices=("none", "light", "full"))
    passes: PassesConfig
    eval: EvalConfig
    init_from: str | None
    cache: CacheConfig
    device: str = constrained(choices=("cpu", "cuda", "npu", "emulated"))
    emulated: EmulatedConfig
    compile: str
    launch: LaunchConfig
    checkpoint: CheckpointConfig
    resume: str  # auto, off, or a path
    exact: bool
    copies: CopiesConfig
    recovery: RecoveryConfig
    policy: str = constrained(choices=("elaswave", "recycle", "drop_replica", "restart"))
    planner: PlannerConfig
    rng: RngConfig
    faults: tuple[Fault, ...]

    @staticmethod
    def from_hydra(composed: Any, extra: Sequence[str] = ()) -> "Config":
        """The checked configuration. `composed`: OmegaConf or a plain mapping; keys in `extra` belong to the command
        that asks and are not looked at. Raises `ConfigError`."""
        from elaswave_fx.config.groups import read_groups

        config = schema.read(Config, read_groups(_plain(composed)), "", extra=(*extra, "recipe"))
        _refuse_later(config)
        _check_shape(config)
        _check_init_from(config)
        _check_checkpoint(config)
        _check_emulated(config)
        check_faults(config.faults, config.parallel.ranks, config.steps)
        return config

    def as_dict(self) -> dict[str, Any]:
        """Plain nested values, for `summary.json`, plans and cache keys."""
        return dataclasses.asdict(self)


def load_config(overrides: Sequence[str] = (), config_dirs: Sequence[str | Path] = ()) -> Config:
    """`Config` as the command line `train OVERRIDES --config-dir DIR` would give it. Raises `ConfigError`."""
    from elaswave_fx.config.compose import compose

    return Config.from_hydra(compose(overrides, config_dirs))


def _plain(composed: Any) -> dict[str, Any]:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(composed, DictConfig):
        return dict(composed)
    try:
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{key}{str(error).splitlines()[0]}") from error
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def _refuse_later(config: Config) -> None:
    for key, available in NOT_AVAILABLE_YET.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if isinstance(value, LaunchConfig):
            value = value.kind
        if value not in available:
            raise ConfigError(f"{key}={show(value)} is not available yet")


def _check_shape(config: Config) -> None:
    """dp, granule, micro-batch and global batch must leave every rank with samples."""
    batch, shape = config.global_batch, config.parallel
    if batch % shape.granule:
        below, above = batch - batch % shape.granule, batch - batch % shape.granule + shape.granule
        choices = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"global_batch={batch}: must be a multiple of parallel.granule={shape.granule}; nearest valid: {choices}"
        )
    granules = batch // shape.granule
    if shape.dp > granules:
        raise ConfigError(
            f"parallel.dp={shape.dp}: leaves a rank without samples, global_batch={batch} has {granules} granules "
            f"of parallel.granule={shape.granule}; nearest valid: {granules}"
        )
    if shape.micro_batch is not None and shape.micro_batch < shape.granule:
        raise ConfigError(
            f"parallel.micro_batch={shape.micro_batch}: must hold at least one granule of "
            f"parallel.granule={shape.granule}; nearest valid: {shape.granule}"
        )


def _check_init_from(config: Config) -> None:
    if config.init_from is None:
        if config.model.kind == "hf" and not config.model.name:
            raise ConfigError("model.name: is missing, model=hf needs a model type as transformers names it")
        return
    if config.model.kind != "hf":
        raise ConfigError(f"init_from={config.init_from}: is for Hugging Face models; nearest valid: model=hf")
    folder = Path(config.init_from)
    if not (folder / "config.json").is_file():
        siblings = [str(path) for path in folder.parent.glob("*/") if (path / "config.json").is_file()]
        best = nearest(str(folder), siblings)
        tail = f"; nearest valid: {best}" if best else ""
        raise ConfigError(f"init_from={folder}: no such folder with a config.json in it{tail}")


def _check_checkpoint(config: Config) -> None:
    """Words that name nothing. Whether a checkpoint is there is looked at when the run starts."""
    if not config.resume:
        raise ConfigError("resume=: must be auto, off or a path; nearest valid: auto")
    if config.checkpoint.dir == "":
        raise ConfigError("checkpoint.dir=: must be a folder; nearest valid: null, which is RUN/checkpoints")


def _check_emulated(config: Config) -> None:
    if config.emulated.unit_ms is not None and config.device != "emulated":
        raise ConfigError(
            f"emulated.unit_ms={config.emulated.unit_ms:g}: device={config.device} takes as long as it takes; "
            "nearest valid: device=emulated"
        )


def default_cache_dir() -> str:
    """`$XDG_CACHE_HOME/elaswave_fx`, or `~/.cache/elaswave_fx`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "elaswave_fx")
