"""Interpretation of the labels of user data by language models, ours or of transformers.

A model that predicts the next token takes labels that are the next tokens. Data prepared for transformers has labels
equal to its input_ids, which the library's own models shift internally; unshifted they would train the identity. They
are shifted here, as part of the data, so that steps, evaluation and every rank see the same:

    input_ids 5 6 7 8, labels -100 6 7 8   ->   labels 6 7 8 -100

`data.labels=auto` shifts where labels equal input_ids, up to noise in these, for models that are known to predict the
next token. For a masked language model labels that differ from input_ids mean masked data, and equal ones that the
model masks tokens itself.
"""

import numpy as np
import torch
from torch import Tensor

from elaswave_fx.config.keys import Config, DataConfig
from elaswave_fx.data.dataset import IGNORED, Batch, Dataset, Sample, WrappedDataset
from elaswave_fx.data.hashing import Words
from elaswave_fx.data.order import Indices
from elaswave_fx.errors import DataError

_EXAMINED, _AT_MOST = 16, 512
_OWN, _CLEARLY = 0.5, 0.25
"""Labels stand at their own tokens if more than the first share of them equal these, and the share exceeds that of the
next tokens by the second, both beyond chance. Labels of padding, or of a token that is followed by itself, are not
counted."""


class _Noted(WrappedDataset):
    """A dataset with an additional line for the user."""

    def __init__(self, wrapped: Dataset, note: str) -> None:
        super().__init__(wrapped)
        self._note = note

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self._wrapped.notes, self._note)

    def given(self, index: int, key: int | None = None) -> Sample:
        return {**self._wrapped.given(index, key), "labels": self.sample(index, key)["labels"]}

    def for_evaluation(self) -> Dataset:
        return type(self)(self._wrapped.for_evaluation(), self._note)


class NextTokenLabels(_Noted):
    """A dataset with labels at their own tokens, converted to samples whose labels are the next tokens."""

    def sample(self, index: int, key: int | None = None) -> Sample:
        return _shifted(self._wrapped.sample(index, key))

    def batch(self, indices: Indices, keys: Words | None = None) -> Batch:
        return _shifted(self._wrapped.batch(indices, keys))


class MaskedTokens(_Noted):
    """A dataset whose tokens are masked already: its labels are the targets of a masked language model."""

    @property
    def masked(self) -> bool:
        return True

    def sample(self, index: int, key: int | None = None) -> Sample:
        return self._wrapped.sample(index, key)

    def batch(self, indices: Indices, keys: Words | None = None) -> Batch:
        return self._wrapped.batch(indices, keys)


class UnmaskedTokens(_Noted):
    """A dataset whose labels are its own tokens, for a masked language model that masks them. Samples with other labels
    are refused, as those would be ignored."""

    def sample(self, index: int, key: int | None = None) -> Sample:
        made = self._wrapped.sample(index, key)
        self._refuse_others(index, made)
        return made

    def batch(self, indices: Indices, keys: Words | None = None) -> Batch:
        made = self._wrapped.batch(indices, keys)
        for place, index in enumerate(indices):
            self._refuse_others(int(index), {name: tensor[place] for name, tensor in made.items()})
        return made

    def _refuse_others(self, index: int, sample: Sample) -> None:
        if not _equal_where_they_count(sample):
            raise DataError(
                f"data: the labels of sample {index} are other tokens than its input_ids, and those of the samples "
                "that were examined the same, which model.task=masked_lm masks itself; give all of one kind"
            )


def has_own_labels(data: DataConfig) -> bool:
    """Whether samples may have labels from the user."""
    return data.kind == "target" or (data.kind == "hf" and bool(data.fields))


def with_labels_of_model(config: Config, dataset: Dataset) -> Dataset:
    """The dataset with the labels that the model takes. Raises `DataError` where `data.labels=same` makes no sense."""
    data = config.data
    if data.kind not in ("hf", "target"):
        return dataset
    if _task(config) == "masked_lm" and (data.kind == "target" or data.fields):
        return _with_masks(dataset, bool(config.eval.every) and config.eval.data is None)
    if data.labels == "shifted":
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
        return dataset  # such a model may shift them itself
    examined = _examined(dataset)
    own, following = _shares(examined)
    if own <= _OWN or own - following <= _CLEARLY or not _predicts_next(config):
        return dataset
    where = "wherever they count"
    if not all(map(_equal_where_they_count, examined)):
        where = f"at {own:.0%} of the tokens beyond chance"
    note = (
        f"labels: in {len(examined)} examined samples they equal input_ids {where}, as transformers has them, and are "
        "shifted to the next tokens (data.labels=shifted leaves them as they are)"
    )
    return NextTokenLabels(dataset, note)


def _with_masks(dataset: Dataset, holds_out: bool) -> Dataset:
    examined = _examined(dataset)
    if not any(map(_counted, examined)):
        return dataset
    if all(map(_equal_where_they_count, examined)):
        return UnmaskedTokens(dataset, "labels: they are the tokens of input_ids, of which 15 % are masked here")
    held_out = _examined(dataset.for_evaluation()) if holds_out else []
    if any(map(_counted, held_out)) and all(map(_equal_where_they_count, held_out)):
        raise DataError(
            "data: the labels of held-out samples are their input_ids, and those of samples that train are not: only "
            "these are masked, and an evaluation would ask for tokens that are seen; a transform with an argument "
            "rng=None is called for both, without a generator for held-out ones"
        )
    return MaskedTokens(
        dataset, "labels: they are other tokens than input_ids, which is masked already; none is masked here"
    )


def _task(config: Config) -> str | None:
    """The task of a transformers model."""
    if config.model.kind != "hf":
        return None
    from elaswave_fx.models.hf_config import task_of

    return task_of(config.model, config.init_from)


def _predicts_next(config: Config) -> bool:
    """Whether the model takes the next tokens as labels; a user's module does if `data.labels` says so."""
    return config.model.kind in ("gpt", "target") or _task(config) == "causal_lm"


def _examined(dataset: Dataset) -> list[Sample]:
    """Some samples, or none if the labels of one have another shape than its inputs. More samples if no label of the
    first ones counts."""
    samples: list[Sample] = []
    for count in (_EXAMINED, _AT_MOST):
        for index in np.unique(np.linspace(0, len(dataset) - 1, count).astype(np.int64)):
            sample = dataset.sample(int(index))
            inputs, labels = sample.get("input_ids"), sample.get("labels")
            if inputs is None or labels is None or inputs.shape != labels.shape or not labels.dim():
                return []
            samples.append(sample)
            if count == _AT_MOST and _counted(sample):
                return samples
        if any(map(_counted, samples)):
            break
    return samples


def _shares(samples: list[Sample]) -> tuple[float, float]:
    """Shares of labels that equal their token, and the next token, beyond chance. Counted labels at tokens followed by
    another token are used; without any, the last label of each sample."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    last: list[tuple[Tensor, Tensor]] = []
    for sample in samples:
        inputs, labels = sample["input_ids"].long(), sample["labels"].long()
        tokens, after = inputs[..., :-1], inputs[..., 1:]
        counts = (labels[..., :-1] != IGNORED) & (tokens != after)
        found.append((labels[..., :-1][counts], tokens[counts], after[counts]))
        ends = labels[..., -1] != IGNORED
        last.append((labels[..., -1][ends], inputs[..., -1][ends]))
    labels, tokens, after = (torch.cat(parts) for parts in zip(*found, strict=True)) if found else [torch.zeros(0)] * 3
    if labels.numel():
        return _beyond_chance(labels, tokens), _beyond_chance(labels, after)
    labels, tokens = (torch.cat(parts) for parts in zip(*last, strict=True)) if last else [torch.zeros(0)] * 2
    return (_beyond_chance(labels, tokens) if labels.numel() else 0.0), 0.0


def _beyond_chance(labels: Tensor, tokens: Tensor) -> float:
    """Cohen's kappa of labels and tokens: 0 for chance agreement by frequency, 1 for all equal; the plain share if
    there is only one label."""
    share = float((labels == tokens).float().mean())
    values, places = torch.cat((labels, tokens)).unique(return_inverse=True)
    used = [torch.bincount(part, minlength=len(values)).double() / len(labels) for part in places.split(len(labels))]
    chance = float((used[0] * used[1]).sum())
    return share if chance == 1 else (share - chance) / (1 - chance)


def _counted(sample: Sample) -> bool:
    return bool((sample["labels"].long() != IGNORED).any())


def _equal_where_they_count(sample: Sample) -> bool:
    labels = sample["labels"].long()  # labels in bytes cannot be -100
    counts = labels != IGNORED
    return torch.equal(sample["input_ids"][counts].long(), labels[counts])


def _shifted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    labels = tensors["labels"].long()
    return {**tensors, "labels": torch.cat((labels[..., 1:], torch.full_like(labels[..., :1], IGNORED)), dim=-1)}
