"""`data.transform`: user code that maps a sample to a sample, such as an augmentation.

    transform(sample)             for every sample
    transform(sample, rng)        for samples that train: `rng` is another numpy Generator whenever the sample comes
    transform(sample, rng=None)   for both: `rng` is None for samples that are held out

A sample is a dict of tensors by name, before and after. `rng` is Philox (Salmon et al. 2011), keyed by the sample's
key, so that a replay of a step draws the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import numpy as np
from torch import nn

from elaswave_fx.config.keys import Options
from elaswave_fx.config.targets import import_target, instantiate, parameters_of
from elaswave_fx.data.dataset import Dataset, Sample, WrappedDataset, computable, plain_tensor, rounded_notes, widened
from elaswave_fx.data.global_draws import seeded
from elaswave_fx.data.order import key_of
from elaswave_fx.data.user_code import UserCode
from elaswave_fx.errors import DataError

_RNG = "rng"


@dataclass(frozen=True)
class Transform:
    """Calling convention of the user's object. `draws`: it takes a generator; `evaluates`: it is applied to held-out
    samples, without a generator if it draws. `name` is for messages."""

    call: Callable[..., Any]
    name: str
    draws: bool
    evaluates: bool


def open_transform(spec: Options, seed: int) -> Transform:
    """The transform that `spec` describes; what its constructor draws follows from `seed`. Raises `ConfigError`."""
    import_target("data.transform", spec)
    with seeded(seed):
        made = instantiate("data.transform", spec)
    name = f"data.transform._target_={spec['_target_']}"
    if not callable(made):
        raise DataError(f"{name}: gives a {type(made).__name__}, which cannot be called with a sample")
    rng = parameters_of(made.forward if isinstance(made, nn.Module) else made).get(_RNG)
    return Transform(made, name, draws=rng is not None, evaluates=rng is None or rng.default is not Parameter.empty)


class TransformedDataset(WrappedDataset):
    """A dataset whose samples go through a transform, one at a time. `held_out`: as in an evaluation."""

    def __init__(self, wrapped: Dataset, transform: Transform, code: UserCode, held_out: bool = False) -> None:
        super().__init__(wrapped)
        self._transform, self._code, self._held_out = transform, code, held_out

    @property
    def notes(self) -> tuple[str, ...]:
        rounded = rounded_notes(self._made(0, None))
        return (*self._wrapped.notes, *(line for line in rounded if line not in self._wrapped.notes))

    def sample(self, index: int, key: int | None = None) -> Sample:
        return {name: widened(value, self._place(name)) for name, value in self.given(index, key).items()}

    def given(self, index: int, key: int | None = None) -> Sample:
        made = self._made(index, key)
        return {str(name): plain_tensor(value, self._place(str(name))) for name, value in made.items()}

    def _place(self, field: str) -> str:
        return f"{self._transform.name}: field {field}"

    def _made(self, index: int, key: int | None) -> Mapping[str, Any]:
        # It may write into its argument, and fields of a sample may share memory.
        given = {name: computable(each, self._place(name)) for name, each in self._wrapped.given(index, key).items()}
        drawn = {_RNG: self._generator(index, key)} if self._transform.draws else {}
        with self._code.watched(self._transform.name, f"sample {index}"):
            made = self._transform.call(given, **drawn)
        if not isinstance(made, Mapping) or not made:
            raise DataError(
                f"{self._transform.name}: gives a {type(made).__name__} for sample {index}; it is called with a dict "
                "of tensors by name, and must give one"
            )
        return made

    def for_evaluation(self) -> Dataset:
        held_out = self._wrapped.for_evaluation()
        if not self._transform.evaluates:
            return held_out
        return TransformedDataset(held_out, self._transform, self._code, held_out=True)

    def _generator(self, index: int, key: int | None) -> np.random.Generator | None:
        if self._held_out:
            return None
        return np.random.Generator(np.random.Philox(key=key_of(index) if key is None else key))
