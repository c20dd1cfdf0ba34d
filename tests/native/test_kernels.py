"""The keyed random operators: Random123's vectors, bits against a second implementation, tracing, derivatives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from elaswave_fx import _native  # noqa: F401  (registers the operators)

ops = torch.ops.elaswave
SAMPLE_STREAM, ELEMENT_STREAM = 0x454C5731, 0x454C5732
MASK32, MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox 4x32-10 of counters [n, 4], written apart from the native one."""
    x = counter.astype(np.uint64)
    k0, k1 = key
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * x[:, 0]
        p1 = np.uint64(0xCD9E8D57) * x[:, 2]
        hi0, lo0 = p0 >> np.uint64(32), p0 & np.uint64(MASK32)
        hi1, lo1 = p1 >> np.uint64(32), p1 & np.uint64(MASK32)
        x = np.stack([hi1 ^ x[:, 1] ^ np.uint64(k0), lo1, hi0 ^ x[:, 3] ^ np.uint64(k1), lo0], axis=1)
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return x.astype(np.uint32)


def split(value: int) -> tuple[int, int]:
    value &= MASK64
    return value & MASK32, value >> 32


def reference_key(seed: int, position: int, unit: int) -> int:
    words = philox(np.array([[*split(position), unit & MASK32, SAMPLE_STREAM]]), split(seed))[0]
    return int(words[1]) << 32 | int(words[0])


def reference_words(key: int, op: int, count: int) -> np.ndarray:
    blocks = -(-count // 4)
    counter = np.array([[*split(b), op, ELEMENT_STREAM] for b in range(blocks)])
    return philox(counter, split(key)).reshape(-1)[:count]


def reference_layout(shape: tuple[int, ...], keys: torch.Tensor, op: int, axis: int, period: int) -> np.ndarray:
    """The word of every element, by the definition: number = row-major index with the sample index removed."""
    if axis == -1:
        return reference_words(int(keys[0]), op, math.prod(shape)).reshape(shape)
    one = (*shape[:axis], period, *shape[axis + 1 :])
    samples = [reference_words(int(key), op, math.prod(one)).reshape(one) for key in keys]
    return np.concatenate(samples, axis=axis)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([MASK32] * 4, (MASK32, MASK32), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_reference_is_philox(counter: list[int], key: tuple[int, int], expected: str) -> None:
    """Random123's known answers; the native generator has them in its own test (native/tests/test_philox.cc)."""
    assert " ".join(f"{word:08x}" for word in philox(np.array([counter]), key)[0]) == expected


@pytest.mark.parametrize(("seed", "first", "unit"), [(0, 0, 0), (1234, 10**12, 7), (-1, 5, 3 | 0x80000000)])
def test_sample_keys(seed: int, first: int, unit: int) -> None:
    keys = ops.sample_keys(seed, first, 5, unit)
    assert keys.dtype == torch.int64
    assert [int(key) & MASK64 for key in keys] == [reference_key(seed, first + i, unit) for i in range(5)]


def test_sample_keys_depend_on_the_position_alone() -> None:
    whole = ops.sample_keys(3, 100, 8, 2)
    assert torch.equal(whole[3:6], ops.sample_keys(3, 103, 3, 2))


LAYOUTS = [
    ((4, 7), 4, 0, 1),
    ((4, 6, 33), 4, 0, 1),
    ((3, 4, 5), 4, 1, 1),
    ((3, 12, 5), 4, 1, 3),
    ((8, 9), 4, 0, 2),
    ((2, 3, 4), 4, 2, 1),
    ((5, 2100), 1, -1, 1),
    ((2, 4099), 2, 0, 1),
]


@pytest.mark.parametrize(("shape", "samples", "axis", "period"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dropout_bits(shape: tuple[int, ...], samples: int, axis: int, period: int, dtype: torch.dtype) -> None:
    p, op = 0.3, 11
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys = ops.sample_keys(1, 0, samples, 5)
    words = reference_layout(shape, keys, op, axis, period)
    keep = torch.from_numpy((words >> 8).astype(np.float64) * 2.0**-24 >= p)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    scaled = (x.to(compute) * torch.tensor(1.0 / (1.0 - p), dtype=compute)).to(dtype)
    expected = torch.where(keep, scaled, torch.zeros((), dtype=dtype))
    assert torch.equal(ops.keyed_dropout(x, keys, p, op, axis, period), expected)


def test_a_slice_of_the_batch_has_the_same_bits() -> None:
    x = torch.randn(3, 12, 5)
    keys = ops.sample_keys(9, 0, 4, 1)
    whole = ops.keyed_dropout(x, keys, 0.5, 2, 1, 3)
    part = ops.keyed_dropout(x[:, 3:9], ops.sample_keys(9, 1, 2, 1), 0.5, 2, 1, 3)
    assert torch.equal(whole[:, 3:9], part)


def test_strides_do_not_matter() -> None:
    x = torch.randn(6, 4).t()
    keys = ops.sample_keys(0, 0, 4, 0)
    out = ops.keyed_dropout(x, keys, 0.5, 0, 0, 1)
    assert out.is_contiguous()
    assert torch.equal(out, ops.keyed_dropout(x.contiguous(), keys, 0.5, 0, 0, 1))


def test_dropout_at_its_ends() -> None:
    x = torch.randn(4, 100)
    keys = ops.sample_keys(0, 0, 4, 0)
    assert torch.equal(ops.keyed_dropout(x, keys, 0.0, 0, 0, 1), x)
    assert torch.equal(ops.keyed_dropout(x, keys, 1.0, 0, 0, 1), torch.zeros(4, 100))
    infinite = torch.full((4, 100), math.inf)
    assert not ops.keyed_dropout(infinite, keys, 0.5, 0, 0, 1).isnan().any()


@pytest.mark.parametrize(("shape", "samples", "axis", "period"), LAYOUTS)
def test_uniform_bits(shape: tuple[int, ...], samples: int, axis: int, period: int) -> None:
    keys = ops.sample_keys(2, 0, samples, 0)
    words = reference_layout(shape, keys, 4, axis, period)
    drawn = ops.keyed_uniform(keys, shape, 4, axis, period, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(drawn, torch.from_numpy((words >> 8).astype(np.float32) * np.float32(2.0**-24)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_uniform_stays_below_one_in_short_types(dtype: torch.dtype) -> None:
    keys = ops.sample_keys(2, 0, 1, 0)
    exact = ops.keyed_uniform(keys, (1 << 17,), 4, -1, 1, dtype=torch.float32, device=torch.device("cpu"))
    short = ops.keyed_uniform(keys, (1 << 17,), 4, -1, 1, dtype=dtype, device=torch.device("cpu")).float()
    bits = 8 if dtype == torch.bfloat16 else 11
    assert torch.equal(short, (exact * 2**bits).floor() / 2**bits)
    assert short.max() < 1.0


@pytest.mark.parametrize(("shape", "samples", "axis", "period"), LAYOUTS)
def test_normal_values(shape: tuple[int, ...], samples: int, axis: int, period: int) -> None:
    keys = ops.sample_keys(3, 0, samples, 0)
    one = shape if axis == -1 else (*shape[:axis], period, *shape[axis + 1 :])
    count = math.prod(one)
    parts = []
    for key in keys:
        u = (reference_words(int(key), 6, count + count % 2) >> 8).astype(np.float64) * 2.0**-24
        radius, angle = np.sqrt(-2.0 * np.log(1.0 - u[0::2])), 2.0 * np.pi * u[1::2]
        pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        parts.append(pairs.reshape(-1)[:count].reshape(one))
    expected = torch.from_numpy(np.concatenate(parts, axis=max(axis, 0)) if axis != -1 else parts[0])
    drawn = ops.keyed_normal(keys, shape, 6, axis, period, dtype=torch.float64, device=torch.device("cpu"))
    torch.testing.assert_close(drawn, expected, rtol=1e-12, atol=1e-13)


def test_normal_is_normal() -> None:
    drawn = ops.keyed_normal(
        ops.sample_keys(0, 0, 1, 0), (200_000,), 0, -1, 1, dtype=torch.float32, device=torch.device("cpu")
    )
    assert abs(float(drawn.mean())) < 0.01
    assert abs(float(drawn.std()) - 1.0) < 0.01


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, k: ops.keyed_dropout(x, k, 1.5, 0, 0, 1), "p = 1.5 is not in"),
        (lambda x, k: ops.keyed_dropout(x, k, 0.5, 0, 2, 1), "axis 2 of a tensor with 2 dimensions"),
        (lambda x, k: ops.keyed_dropout(x, k, 0.5, 0, 1, 1), "dimension 1 has size 6, but 4 keys x period 1"),
        (lambda x, k: ops.keyed_dropout(x, k, 0.5, 0, -1, 1), "without a sample axis there is one key, not 4"),
        (lambda x, k: ops.keyed_dropout(x, k.int(), 0.5, 0, 0, 1), "keys must be contiguous int64"),
        (lambda x, k: ops.keyed_dropout(x.int(), k, 0.5, 0, 0, 1), "is not float32, float64"),
        (lambda x, k: ops.sample_keys(0, 0, -1, 0), "count = -1 is negative"),
    ],
)
def test_refusals(call: object, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(torch.randn(4, 6), ops.sample_keys(0, 0, 4, 0))  # type: ignore[operator]


def test_the_gradient_is_the_same_mask() -> None:
    x = torch.randn(4, 50, requires_grad=True)
    keys = ops.sample_keys(0, 0, 4, 0)
    tangent = torch.randn(4, 50)
    (grad,) = torch.autograd.grad(ops.keyed_dropout(x, keys, 0.4, 3, 0, 1), x, tangent)
    assert torch.equal(grad, ops.keyed_dropout(tangent, keys, 0.4, 3, 0, 1))


def test_the_second_derivative() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    keys = ops.sample_keys(0, 0, 3, 0)

    def square(x: torch.Tensor) -> torch.Tensor:
        return ops.keyed_dropout(x, keys, 0.4, 3, 0, 1) ** 2

    assert torch.autograd.gradcheck(square, (x,))
    assert torch.autograd.gradgradcheck(square, (x,))


def test_functional_transforms() -> None:
    x = torch.randn(3, 5)
    keys = ops.sample_keys(0, 0, 3, 0)
    grad = torch.func.grad(lambda x: ops.keyed_dropout(x, keys, 0.4, 3, 0, 1).sum())(x)
    assert torch.equal(grad, ops.keyed_dropout(torch.ones(3, 5), keys, 0.4, 3, 0, 1))


def calls(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_tracing_shows_one_operator_each_way(mode: str) -> None:
    def step(x: torch.Tensor, keys: torch.Tensor, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = ops.keyed_dropout(x, keys, 0.4, 3, 0, 1)
        return y, *torch.autograd.grad(y, x, tangent)

    x = torch.randn(4, 50, requires_grad=True)
    traced = make_fx(step, tracing_mode=mode)(x, ops.sample_keys(0, 0, 4, 0), torch.randn(4, 50))
    assert [name for name in calls(traced.graph) if "elaswave" in name] == ["elaswave.keyed_dropout.default"] * 2


def test_joint_export_with_a_symbolic_batch() -> None:
    def block(x: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor]:
        noise = ops.keyed_uniform(keys, (x.shape[0], 3), 1, 0, 1, dtype=torch.float32, device=torch.device("cpu"))
        return (ops.keyed_dropout(x.relu(), keys, 0.4, 3, 0, 1) * noise.sum(),)

    fake = FakeTensorMode(shape_env=ShapeEnv())
    batch = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = fake.from_tensor(torch.randn(6, 50, requires_grad=True), symbolic_context=batch)
    samples = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    keys = fake.from_tensor(ops.sample_keys(0, 0, 6, 0), symbolic_context=samples)
    joint = aot_export_joint_simple(block, [x, keys], trace_joint=True)
    names = calls(joint.graph)
    assert names.count("elaswave.keyed_dropout.default") == 2
    assert names.count("elaswave.keyed_uniform.default") == 1
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    assert isinstance(placeholders[0].meta["val"].shape[0], torch.SymInt)


def test_meta_shapes() -> None:
    keys = torch.empty(4, dtype=torch.int64, device="meta")
    x = torch.empty(6, 4, device="meta").t()
    out = ops.keyed_dropout(x, keys, 0.1, 0, 0, 1)
    assert out.shape == (4, 6)
    assert out.is_contiguous()
    drawn = ops.keyed_normal(keys, (4, 3), 0, 0, 1, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (drawn.shape, drawn.dtype) == ((4, 3), torch.bfloat16)
