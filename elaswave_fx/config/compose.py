"""The command line of `train` and `inspect`: Hydra as it is, with one clear line for every mistake.

In: `sys.argv`, `conf/` (of the source tree, or inside an installed package), recipes. Out: the task is called with a
`Job` whose configuration is already checked, and the process's exit code comes back.

    def task(job: Job) -> int: ...
    sys.exit(run_hydra(task))

    $ python -m elaswave_fx.train stepz=3
    error: stepz: unknown key; nearest valid key: steps          (exit code 2)
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from elaswave_fx.config.keys import Config
from elaswave_fx.config.read import read_config
from elaswave_fx.config.validation import hint, nearest_key, refuse_non_utf8
from elaswave_fx.entry import End, end_of, say
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.stop import SIGNALLED
from elaswave_fx.ownership import refuse_links, refuse_others

# These groups take a class of the user by `GROUP._target_=…`, followed by its keyword arguments as keys.
_TARGET_GROUPS = ("model", "data", "optimizer", "schedule", "eval.data")

_PACKAGES = {"eval.data": "data@eval.data"}
"""Groups whose options are another group's, as Hydra names them."""

_NAMES = tuple(f"{data}.{key}" for data in ("data", "eval.data") for key in ("paths", "fields", "column", "split"))
"""Keys whose values are names of files and columns, whatever they look like."""

_FUNCTION = re.compile(r"(choice|range|interval|glob|sort|shuffle|tag|str|extend_list)\(")
"""Of Hydra's, on the right side of an override."""

_FLAGS_WITH_VALUE = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--package", "-p", "--cfg",
                     "-c", "--experimental-rerun")  # fmt: skip

_RUN_DIRS = ("hydra.run.dir", "hydra.sweep.dir", "out")
"""Keys of folders that Hydra makes, and writes to."""


@dataclass(frozen=True)
class Job:
    """One run as the user asked for it.

    `run_dir` exists and can be written to. `extra` holds the keys that only this command has (`inspect`: out, lose).
    `overrides` are what was typed, without Hydra's own.
    """

    config: Config
    run_dir: Path
    extra: Mapping[str, Any]
    overrides: tuple[str, ...]


def conf_dir() -> Path:
    """The folder of Hydra's groups: beside the package in a source tree, inside it when installed."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"{package}: the package was installed without its conf folder; install it again")


def compose(
    overrides: Sequence[str] = (), config_dirs: Sequence[str | Path] = (), config_name: str = "config"
) -> DictConfig:
    """Return what the command line OVERRIDES composes to, for tests and tools. Raises `ConfigError`."""
    prepared = prepare_overrides(overrides)
    for folder in config_dirs:
        if not Path(folder).is_dir():
            raise ConfigError(f"--config-dir {folder}: no such folder")
    if config_dirs:
        prepared.append(f"hydra.searchpath=[{','.join(f'file://{Path(folder).resolve()}' for folder in config_dirs)}]")
    with (
        _fresh_hydra(),
        _translated(overrides, config_name),
        hydra.initialize_config_dir(str(conf_dir()), version_base=None),
    ):
        return hydra.compose(config_name, overrides=prepared)


def load_config(overrides: Sequence[str] = (), config_dirs: Sequence[str | Path] = ()) -> Config:
    """`Config` as the command line `train OVERRIDES --config-dir DIR` would give it. Raises `ConfigError`.

    load_config(["recipe=gpt_stdlib", "parallel.dp=2"]).parallel.dp   ->  2
    """
    return read_config(compose(overrides, config_dirs))


def run_hydra(task: Callable[[Job], int], config_name: str = "config", extra: Sequence[str] = ()) -> int:
    """Compose from `sys.argv`, check, and call `task` (for each job of a multirun, as its launcher has it: in this
    process or in others); returns the exit code, that of the first job which did not end with 0.

    What went wrong is said, as `entry` does. A job that fails does not keep others of a multirun from being run; one
    that was stopped does. `extra`: keys of `config_name` that are no part of `Config`.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Exceptions come back instead of sys.exit(1).
    code = 0

    def job(composed: DictConfig) -> None:
        nonlocal code
        settings = HydraConfig.get()
        end = end_of(lambda: task(_job(composed, extra)), Path(settings.runtime.output_dir))
        say(end)
        if settings.mode != RunMode.MULTIRUN:
            code = end.code  # Hydra would add a line to an exception.
        elif end.code:
            kind = _Stopped if end.code > SIGNALLED else _Failed
            raise kind(end.code, " ".join(settings.overrides.task), end.line)

    def compose_and_run() -> int:
        cwd = _working_folder()
        if cwd not in sys.path:
            sys.path.insert(0, cwd)  # `_target_`s may be in the user's folder.
        words = sys.argv[1:]
        _refuse_run_dirs(words)
        sys.argv[1:] = prepare_overrides(words)
        try:
            with _translated(words, config_name):
                hydra.main(version_base=None, config_path=str(conf_dir()), config_name=config_name)(job)()
        except (_Failed, _Stopped) as failed:
            say(failed.end)
            return failed.end.code
        return code

    end = end_of(compose_and_run)
    say(end)
    return end.code


def _refuse_run_dirs(words: Sequence[str]) -> None:
    """Refuse a folder of somebody else's before Hydra writes to it."""
    for word in words:
        key, _, value = word.partition("=")
        if key in _RUN_DIRS and "$" not in value and Path(value).is_dir():
            refuse_others(Path(value).resolve(), word)
            refuse_links(Path(value), word, (".hydra",))


class _Ended(BaseException):
    """A job of a multirun did not end with 0: with this code and, in words, for this reason."""

    def __init__(self, code: int, overrides: str, line: str) -> None:
        super().__init__(code, overrides, line)  # What is pickled on its way from another process.
        reason = f": {line}" if line else ""
        self.end = End(code, f"the run with {overrides} ended with exit code {code}{reason}")


class _Failed(_Ended, Exception):
    """Others of the multirun go on."""


class _Stopped(_Ended):
    """Raised by a signal, which is for all of the multirun."""


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the working folder was removed; change to one that exists") from error


def _job(composed: DictConfig, extra: Sequence[str]) -> Job:
    config = read_config(composed, extra)
    hydra_config = HydraConfig.get()
    run_dir = Path(hydra_config.runtime.output_dir).resolve()
    refuse_non_utf8(str(run_dir), "hydra.run.dir")
    refuse_others(run_dir, f"hydra.run.dir={run_dir}")
    try:
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise ConfigError(f"hydra.run.dir={run_dir}: cannot be written ({error.strerror})") from error
    more = {key: OmegaConf.to_object(node) if OmegaConf.is_config(node := composed[key]) else node for key in extra}
    return Job(config, run_dir, more, tuple(hydra_config.overrides.task))


def prepare_overrides(words: Sequence[str]) -> list[str]:
    """The command line with what Hydra wants spelled out.

    `model._target_=C model.hidden=8` becomes `model=target ++model._target_=C ++model.hidden=8`, and keys under
    `model.config.` and `data.transform.`, which belong to others, may be given with or without the `+`.
    """
    groups = [group for group in _TARGET_GROUPS if any(_key(word) == f"{group}._target_" for word in words)]
    prepared = [
        f"{_PACKAGES.get(group, group)}=target"
        for group in groups
        if not any(_key(word) in (group, _PACKAGES.get(group)) for word in words)
    ]
    names_alone = any(_key(word) in ("data", "eval.data") for word in words)  # and no class has keys of these names
    for word in words:
        key = _key(word)
        if key in _PACKAGES:
            word = word.replace(key, _PACKAGES[key], 1)
        if word in ("recipe=null", *(f"{name}=null" for name in _PACKAGES.values())):
            word = "~" + word.removesuffix("=null")  # Hydra spells it so.
        opened = any(key.startswith(f"{group}.") for group in groups)
        foreign = key.startswith(("model.config.", "data.transform.", "eval.data.transform."))
        if (opened or foreign) and not word.startswith(("~", "++")):
            word = "++" + word.lstrip("+")
        prepared.append(_quoted(word, names_alone) if key else word)
    added = len(prepared) - len(words)
    return _before_flags(prepared[added:] + prepared[:added])


_PLAIN = re.compile(r"[^\[\]{},:'\"]*[^\x00-\x7f][^\[\]{},:'\"]*")
"""What has a letter that is not ASCII, up to the next mark of a list, a mapping or a sweep."""


_NAME = re.compile(r"[^\[\]{},]+")
_UNQUOTED = re.compile(r"[\w/.:@%?*+ -]*")
"""What Hydra takes without quotes."""


def _quoted(word: str, names_alone: bool) -> str:
    """KEY=VALUE with quotes around what is not ASCII, which Hydra takes in quotes only, and around names of files and
    columns that it would not take, or for a number (`names_alone`: these keys have nothing but names). A user's own
    quotes, and interpolations, stay as they are."""
    key, _, value = word.partition("=")
    if any(mark in value for mark in "'\"$\\"):
        return word
    if key.lstrip("+") in _NAMES and value != "null" and value.count("[") < 2 and _FUNCTION.match(value) is None:
        return f"{key}=" + _NAME.sub(lambda found: _quoted_name(found[0].strip(), names_alone), value)
    if value.isascii():
        return word
    if not any(mark in value for mark in "[]{},"):
        return f"{key}='{value}'"
    return f"{key}=" + _PLAIN.sub(lambda found: f"'{found[0].strip()}'", value)


def _quoted_name(name: str, always: bool) -> str:
    return f"'{name}'" if always or not _UNQUOTED.fullmatch(name) or not name.isascii() else name


def _before_flags(words: list[str]) -> list[str]:
    """Hydra takes overrides in one place alone: in front of all flags, which may want a value."""
    overrides: list[str] = []
    flags: list[str] = []
    for word in words:
        is_value = bool(flags) and flags[-1] in _FLAGS_WITH_VALUE
        (flags if is_value or word.startswith("-") else overrides).append(word)
    return overrides + flags


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~") if "=" in word and not word.startswith("-") else ""


@contextmanager
def _fresh_hydra() -> Iterator[None]:
    """Composing must not disturb an application that runs under Hydra, nor an earlier composition."""
    saved = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().clear()
        if saved is not None:
            GlobalHydra.instance().initialize(saved)


@contextmanager
def _translated(words: Sequence[str], config_name: str) -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise, and a run directory that cannot be made, into one `ConfigError`."""
    try:
        yield
    except MissingConfigException as error:
        raise ConfigError(_missing_config(error, words)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else "a recipe"
        raise ConfigError(f"{place}: is no YAML ({error.problem})") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_bad_override(error, config_name)) from error
    except ValueError as error:
        if not str(error).startswith("Config group override"):
            raise
        raise ConfigError(_no_option(words)) from error
    except OSError as error:
        if error.filename is None or not _names_run_dir(str(error.filename), words):
            raise
        raise ConfigError(f"hydra.run.dir={error.filename}: cannot be written ({error.strerror})") from error


def _names_run_dir(path: str, words: Sequence[str]) -> bool:
    """Whether Hydra failed at making the run directory, and nothing else of the program failed."""
    chosen = [word.partition("=")[2] for word in words if _key(word) in _RUN_DIRS]
    wanted = [Path(choice).absolute() for choice in chosen] + [Path("runs").absolute()]
    where = Path(path).absolute()
    return any(where == folder or folder in where.parents or where in folder.parents for folder in wanted)


def _no_option(words: Sequence[str]) -> str:
    """Which group was given something else than the name of an option."""
    for word in words:
        group = _key(word)
        if group in _TARGET_GROUPS or (conf_dir() / group).is_dir():
            value = word.partition("=")[2]
            options = list(_keys_of_options(group))
            if value not in options:
                return f"{word.lstrip('+~')}: must name a {group}; valid values: {', '.join(options)}"
    return "a group of the configuration must be given a name"


def _missing_config(error: MissingConfigException, words: Sequence[str]) -> str:
    name = error.missing_cfg_file
    if name is None:
        return _first_line(error)
    group, _, option = str(name).removesuffix(".yaml").rpartition("/")
    options = [choice.removesuffix(".yaml") for choice in error.options or ()]
    if not group:
        return f"{_first_line(error)}"
    key = next((key for key, name in _PACKAGES.items() if f"{key}={option}" in words), group)
    return f"{key}={option}: no such {group}; {hint(option, options, 'value')}"


def _bad_override(error: Exception, config_name: str) -> str:
    """One line for an override that Hydra refuses, with the nearest key where a key is at fault."""
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for cause in causes:
        if isinstance(cause, OverrideParseException):
            return f"{cause.override}: is no KEY=VALUE ({_parse_reason(cause)})"
    text = "\n".join(str(cause) for cause in causes)
    found = re.search(r"Could not (?:override|delete from config\.) '([^'+~]+)'", text)
    if found and re.search(r"not in struct|No match in the defaults|does not exist", text):
        return _unknown_key(found.group(1).split("@")[0], config_name)
    if isinstance(error, ConfigCompositionException) and len(causes) > 1:
        return f"{_first_line(error)}: {_first_line(causes[-1])}"
    return _first_line(error)


def _parse_reason(error: OverrideParseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("See https:")]
    told = [line for line in lines if not line.startswith(("Error parsing override", "^"))]
    return told[0] if told else "cannot be parsed"


def _unknown_key(key: str, config_name: str) -> str:
    if key.startswith("eval.data."):
        of_data = _unknown_key(key.removeprefix("eval."), config_name)
        return of_data.replace("data.", "eval.data.").replace("data=", "eval.data=")
    group = key.split(".")[0]
    owners = [option for option, keys in _keys_of_options(group).items() if key in keys]
    if owners:
        return f"{key}: unknown key for this {group}; nearest valid: {group}={owners[0]}, which has it"
    known = {
        "recipe",
        *_dotted_keys(conf_dir() / "config.yaml", ""),
        *_dotted_keys(conf_dir() / f"{config_name}.yaml", ""),
    }
    for folder in conf_dir().iterdir():
        if folder.is_dir() and folder.name not in ("hydra", "recipe"):
            known.update(name for keys in _keys_of_options(folder.name).values() for name in keys)
    return f"{key}: unknown key; {nearest_key(key, known)}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__


def _keys_of_options(group: str) -> dict[str, set[str]]:
    """Option -> its keys, dotted from the top of the configuration; empty if there is no such group."""
    return {path.stem: _dotted_keys(path, group) for path in sorted((conf_dir() / group).glob("*.yaml"))}


def _dotted_keys(path: Path, place: str) -> set[str]:
    keys = _dotted(OmegaConf.load(path), place) if path.is_file() else ()
    return {key for key in keys if key.split(".")[0] not in ("defaults", "hydra")}


def _dotted(node: Any, place: str) -> Iterator[str]:
    if place:
        yield place
    if isinstance(node, DictConfig):
        for name in node:
            yield from _dotted(node._get_node(name), f"{place}.{name}" if place else str(name))
