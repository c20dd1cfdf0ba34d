"""Transforms as users write them: with a generator, without one, and wrong in every way."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch
from torch import Tensor, nn

Sample = dict[str, Tensor]


class Noise:
    """Adds what it draws to every float."""

    def __init__(self, scale: float = 0.1) -> None:
        self.scale = scale

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        return {
            name: value + self.scale * torch.from_numpy(rng.standard_normal(value.shape, np.float32))
            if value.is_floating_point()
            else value
            for name, value in sample.items()
        }


class Crop(nn.Module):
    """A square out of the image: anywhere, or from the middle."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, sample: Sample, rng: np.random.Generator | None = None) -> Sample:
        image = sample["image"]
        room = image.shape[-1] - self.size
        left, top = (room // 2, room // 2) if rng is None else rng.integers(0, room + 1, 2).tolist()
        return {**sample, "image": image[..., top : top + self.size, left : left + self.size]}


class BlindCrop(Crop):
    def forward(self, sample: Sample, rng: np.random.Generator) -> Sample:  # type: ignore[override]
        return super().forward(sample, rng)


@dataclasses.dataclass(frozen=True)
class Scale:
    factor: float = 2.0

    def __call__(self, sample: Sample) -> Sample:
        return {**sample, "image": sample["image"].mul_(self.factor)}  # in place: it has the sample to itself


def flipped(sample: Sample, rng: np.random.Generator, share: float = 0.5) -> Sample:
    return {**sample, "image": sample["image"].flip(-1) if rng.random() < share else sample["image"]}


def careless(sample: Sample) -> Sample:
    return {**sample, "image": sample["image"] + torch.rand(1)}


def careless_evaluation(sample: Sample, rng: np.random.Generator | None = None) -> Sample:
    return {**sample, "image": sample["image"] + (rng or np.random.default_rng()).random()}


def raising(sample: Sample) -> Sample:
    raise RuntimeError("no such crop")


def hanging(sample: Sample) -> Sample:
    time.sleep(1e6)
    return sample


def nothing(sample: Sample) -> None:
    return None


def words(sample: Sample) -> dict[str, str]:
    return {"image": "a picture"}


class Uncallable:
    pass


class Pictures:
    """A dataset with a transform of its own, of the image alone."""

    def __init__(self, transform: object = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Sample:
        image = torch.full((1, 8, 8), float(index))
        return {"image": self.transform(image) if callable(self.transform) else image}


def doubled(image: Tensor) -> Tensor:
    return 2 * image


def masks_inputs(sample: Sample) -> Sample:
    sample["input_ids"][1::2] = 255
    return sample


def same(sample: Sample) -> Sample:
    return sample


def finer(sample: Sample) -> Sample:
    return {**sample, "image": sample["image"].double() * 1e5 + 0.123}
