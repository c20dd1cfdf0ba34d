"""`data.labels`: whether labels are the next tokens already, or stand at their own tokens as for transformers.

A model that predicts the next token takes labels that are the next tokens. A dataset that was prepared for transformers
has labels equal to its input_ids, which the library's own models shift inside; taken as they are, they would train the
identity. Here they are shifted, as part of the data, so that steps, evaluation and every rank see the same:

    input_ids 5 6 7 8, labels -100 6 7 8   ->   labels 6 7 8 -100

`auto` shifts where labels equal input_ids wherever they count, for models that are known to predict the next token.
"""

import numpy as np
import torch
from torch import Tensor

from elaswave_fx.config.types import Config
from elaswave_fx.data.dataset import Batch, Dataset, Sample, WrappedDataset
from elaswave_fx.data.hashing import Words
from elaswave_fx.data.order import Indices
from elaswave_fx.errors import DataError

IGNORED = -100
_EXAMINED = 16


class NextTokenLabels(WrappedDataset):
    """A dataset whose labels stand at their own tokens, as samples whose labels are the next tokens. `note`: for the
    user."""

    def __init__(self, wrapped: Dataset, note: str) -> None:
        super().__init__(wrapped)
        self._note = note

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self._wrapped.notes, self._note)

    def sample(self, index: int, key: int | None = None) -> Sample:
        return _shifted(self._wrapped.sample(index, key))

    def batch(self, indices: Indices, keys: Words | None = None) -> Batch:
        return _shifted(self._wrapped.batch(indices, keys))

    def for_evaluation(self) -> Dataset:
        return NextTokenLabels(self._wrapped.for_evaluation(), self._note)


def with_next_tokens(config: Config, dataset: Dataset) -> Dataset:
    """The dataset as the model wants its labels. Raises `DataError` where `data.labels=same` makes no sense."""
    data = config.data
    if data.kind not in ("hf", "target") or data.labels == "shifted":
        return dataset
    if data.kind == "hf" and not data.fields:
        if data.labels == "same":
            raise DataError(
                "data.labels=same: the labels of a column of text or token ids are the next tokens, made here; "
                "nearest valid: data.labels=auto"
            )
        return dataset
    if data.labels == "same":
        if "labels" not in dataset.sample(0):
            raise DataError(f"data.labels=same: samples have no labels; they hold {', '.join(dataset.sample(0))}")
        note = "labels: they stand at their own tokens (data.labels=same), and are shifted to the next ones"
        return NextTokenLabels(dataset, note) if _predicts_next(config) else dataset
    if config.model.kind not in ("gpt", "hf"):
        return dataset  # Such a model may shift them itself.
    examined = _equal_where_they_count(dataset)
    if not examined or not _predicts_next(config):
        return dataset
    note = (
        f"labels: in {examined} examined samples they equal input_ids wherever they count, as transformers has them, "
        "and are shifted to the next tokens (data.labels=shifted leaves them as they are)"
    )
    return NextTokenLabels(dataset, note)


def _predicts_next(config: Config) -> bool:
    """Whether the model takes the next tokens as labels; a module of the user's does if `data.labels` says so."""
    if config.model.kind != "hf":
        return config.model.kind in ("gpt", "target")
    from elaswave_fx.models.hf_config import task_of

    return task_of(config.model, config.init_from) == "causal_lm"


def _equal_where_they_count(dataset: Dataset) -> int:
    """How many samples were examined, if the labels of all of them equal the inputs wherever they count, else 0."""
    indices = np.unique(np.linspace(0, len(dataset) - 1, _EXAMINED).astype(np.int64))
    counted = 0
    for index in indices:
        sample = dataset.sample(int(index))
        inputs, labels = sample.get("input_ids"), sample.get("labels")
        if inputs is None or labels is None or inputs.shape != labels.shape or not labels.dim():
            return 0
        counts = labels != IGNORED
        if not torch.equal(inputs[counts], labels[counts]):
            return 0
        counted += int(counts.sum())
    return len(indices) if counted else 0


def _shifted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    labels = tensors["labels"]
    return {**tensors, "labels": torch.cat((labels[..., 1:], torch.full_like(labels[..., :1], IGNORED)), dim=-1)}
