"""From what Hydra composed (`conf/`, a recipe, the command line) to a checked `Config`.

Everything that can be refused before a model is built is refused here, with one line that names the key and the
nearest valid key or value:

    read_config({"precision": "bf61", …})
        ->  ConfigError("precision=bf61: must be one of fp32, bf16; nearest valid: bf16")

Keys of features that do not exist yet are present with their defaults; any other value "is not available yet":
`NOT_AVAILABLE_YET`. This module does not import torch, so that mistakes are answered at once.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elaswave_fx.config import validation
from elaswave_fx.config.emulation import check_emulation, check_links
from elaswave_fx.config.faults import check_faults
from elaswave_fx.config.groups import read_groups
from elaswave_fx.config.keys import MOST_RANKS, Config, LaunchConfig
from elaswave_fx.config.power import check_power
from elaswave_fx.config.validation import nearest, refuse_non_utf8, show
from elaswave_fx.errors import ConfigError

# These keys have only some of their values so far. The first one is the default.
NOT_AVAILABLE_YET: dict[str, tuple[object, ...]] = {
    "device": ("cpu", "emulated"),
    "launch": ("local",),
    "compile": ("none",),
}


def read_config(composed: Any, extra: Sequence[str] = ()) -> Config:
    """The checked configuration. `composed`: OmegaConf or a plain mapping; keys in `extra` belong to the command that
    asks and are not looked at. Raises `ConfigError`."""
    plain = _plain(composed)
    _check_recipe(plain.get("recipe"))
    _check_text(plain, "")
    config = validation.read(Config, read_groups(plain), "", extra=(*extra, "recipe"))
    _refuse_later(config)
    _check_shape(config)
    _check_exact(config)
    _check_init_from(config)
    _check_checkpoint(config)
    check_emulation(config)
    check_links(config)
    check_power(config)
    _check_axes(config)
    check_faults(config.faults, config.parallel.ranks, config.steps)
    return config


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


def _check_recipe(left: object) -> None:
    """Refuse a recipe whose keys have stayed in a group of its own, where nobody reads them."""
    if isinstance(left, dict) and left:
        raise ConfigError(
            f"recipe: its keys ({', '.join(map(str, left))}) do not reach the configuration; its first line must be "
            "`# @package _global_`"
        )


def _check_text(value: object, place: str) -> None:
    match value:
        case str():
            refuse_non_utf8(value, place)
        case dict():
            for key, each in value.items():
                _check_text(each, f"{place}.{key}" if place else str(key))
        case list():
            for number, each in enumerate(value):
                _check_text(each, f"{place}[{number}]")
        case _:
            return


def _refuse_later(config: Config) -> None:
    for key, available in NOT_AVAILABLE_YET.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if isinstance(value, LaunchConfig):
            value = value.kind
        if value not in available:
            raise ConfigError(f"{key}={show(value)} is not available yet")


def _check_axes(config: Config) -> None:
    """Refuse axes that leave nothing to answer a loss with."""
    if not {"dataflow", "graph"} & set(config.lab.axes):
        raise ConfigError(
            f"lab.axes={show(list(config.lab.axes))}: neither samples nor units could go to other ranks after "
            "a loss; nearest valid: lab.axes=[dataflow]"
        )


def _check_shape(config: Config) -> None:
    """Refuse a shape that leaves a rank without samples, or that splits a granule."""
    batch, shape = config.global_batch, config.parallel
    if shape.ranks > MOST_RANKS:
        raise ConfigError(
            f"parallel.dp={shape.dp} x parallel.pp={shape.pp}: are {shape.ranks} ranks, and at most {MOST_RANKS} are "
            f"possible; nearest valid: parallel.pp={max(1, MOST_RANKS // shape.dp)}"
        )
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


def _check_exact(config: Config) -> None:
    """Refuse what would compute with other shapes or draws, whose bits are others, or computes nothing."""
    shape = config.parallel
    if config.exact and shape.micro_batch not in (None, shape.granule):
        fits = config.global_batch % shape.micro_batch == 0 and config.global_batch // shape.micro_batch >= shape.dp
        cure = f"parallel.granule={shape.micro_batch}" if fits else f"parallel.micro_batch={shape.granule}"
        raise ConfigError(
            f"parallel.micro_batch={shape.micro_batch}: exact=true runs one granule at a time, of "
            f"parallel.granule={shape.granule}, in every layout; nearest valid: {cure}"
        )
    if config.exact and config.device == "emulated":
        raise ConfigError("exact=true: device=emulated computes nothing; nearest valid: exact=false")
    if config.exact and config.lab.policy == "smaller_batch":
        raise ConfigError(
            "exact=true: lab.policy=smaller_batch leaves samples out after a loss, which has other bits than one rank; "
            "nearest valid: lab.policy=drop_replica"
        )
    if config.exact and not config.lab.reshard_rng:
        raise ConfigError(
            "exact=true: with lab.reshard_rng=false random draws depend on the layout; nearest valid: "
            "lab.reshard_rng=true"
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
    """Refuse words that name nothing. Whether a checkpoint is there is looked at when the run starts."""
    if not config.resume:
        raise ConfigError("resume=: must be auto, off or a path; nearest valid: auto")
    if config.checkpoint.dir == "":
        raise ConfigError("checkpoint.dir=: must be a folder; nearest valid: null, which is RUN/checkpoints")
