"""Build an object of the user's from its import path and keyword arguments.

    instantiate("optimizer", {"_target_": "lion.Lion", "beta": 0.9})  ->  lion.Lion(beta=0.9)

What fails, fails as one `ConfigError` that names the key: the module that does not import, the class that does not
exist, the constructor that refuses.
"""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from elaswave_fx.errors import ConfigError, importing


def instantiate(key: str, spec: Mapping[str, object], offered: Mapping[str, object] | None = None) -> Any:
    """The object that `spec` describes (`_target_` and keyword arguments, as `hydra.utils.instantiate` takes it).

    `offered` are arguments that the target gets only if it has parameters of these names and `spec` does not set them.
    A function that still lacks arguments is not called: it comes back with the given ones bound. Raises `ConfigError`.
    """
    import hydra.utils
    from hydra.errors import InstantiationException

    target, found = spec.get("_target_"), import_target(key, spec)
    try:
        parameters = parameters_of(found)
        extra = {name: value for name, value in (offered or {}).items() if name in parameters and name not in spec}
        return hydra.utils.instantiate(completed({**spec, **extra}), _convert_="all")
    except (InstantiationException, ImportError, AttributeError, ValueError, TypeError) as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
        if isinstance(cause, ConfigError):
            raise cause from error
        raise ConfigError(f"{key}._target_={target}: cannot be built: {_reason(cause)}") from error


def import_target(key: str, spec: Mapping[str, object]) -> Any:
    """The class or function that `spec` names. Its module may set seeds when it is imported, so that whoever seeds does
    so afterwards. Raises `ConfigError`."""
    target, before = spec.get("_target_"), _default_dtype()
    try:
        found = _located(target)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"{key}._target_={target}: cannot be built: {_reason(error)}") from error
    after = _default_dtype()
    if key != "data" and before is not None and after != before:  # the module of the data is imported by all, and first
        raise ConfigError(
            f"{key}._target_={target}: its module calls torch.set_default_dtype({after}) when it is imported, which "
            "changes samples that are read in the same process alone; a way out is a dtype where tensors are made, or "
            "precision=bf16"
        )
    return found


def _default_dtype() -> Any:
    """torch's, if anybody has imported torch."""
    return sys.modules["torch"].get_default_dtype() if "torch" in sys.modules else None


def _located(target: object) -> Any:
    import hydra.utils

    with importing():
        return hydra.utils.get_object(str(target))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def completed(spec: Mapping[str, object]) -> dict[str, object]:
    """`spec` such that a function that lacks arguments is not called. Raises what an import may raise."""
    found = _located(spec.get("_target_"))
    lacks = inspect.isfunction(found) and _lacks(parameters_of(found), spec)
    return {**spec, "_partial_": True} if lacks else dict(spec)


def takes_argument(target: str, name: str) -> bool:
    """Whether the class or function of that import path has a parameter `name`; one that is not there has none."""
    try:
        return name in parameters_of(_located(target))
    except (ImportError, ValueError):
        return False


def _lacks(parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, object]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        each.kind in positional and each.default is inspect.Parameter.empty and name not in arguments
        for name, each in parameters.items()
    )


def parameters_of(target: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function or class by name; none of what has no signature."""
    try:
        return inspect.signature(target).parameters
    except (ValueError, TypeError):  # A built-in has no signature.
        return {}
