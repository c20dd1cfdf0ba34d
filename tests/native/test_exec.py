"""Unit programs: results against eager, every rule with the message that a broken one gives."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch

from elaswave_fx import _native
from elaswave_fx.errors import ExecError

Program = _native.Program
Data = dict[str, Any]


def slot(number: int) -> list[Any]:
    return ["slot", number]


def call(op: str, args: list[Any], outs: list[int], frees: tuple[int, ...] = (), **more: Any) -> Data:
    name, _, overload = op.partition(".")
    return {"op": name, "overload": overload, "args": args, "outs": outs, "frees": list(frees), **more}


def program(num_inputs: int, num_slots: int, outputs: list[int], *instructions: Data) -> Data:
    return {
        "name": "small", "num_inputs": num_inputs, "num_slots": num_slots, "outputs": outputs,
        "instructions": list(instructions),
    }  # fmt: skip


def run(data: Data, *inputs: Any) -> list[Any]:
    return Program(data).run(list(inputs))


def test_a_linear_layer() -> None:
    x, w, b = torch.randn(4, 3), torch.randn(5, 3), torch.randn(5)
    data = program(
        3, 6, [5, 3],
        call("aten::t", [slot(1)], [3]),
        call("aten::addmm", [slot(2), slot(0), slot(3), ["int", 1], ["int", 1]], [4], frees=(0, 2)),
        call("aten::relu", [slot(4)], [5], frees=(4,)),
    )  # fmt: skip
    out, transposed = run(data, x, w, b)
    assert torch.equal(out, torch.relu(torch.addmm(b, x, w.t())))
    assert torch.equal(transposed, w.t())


def test_a_program_can_run_again_and_keeps_nothing() -> None:
    compiled = Program(program(1, 2, [1], call("aten::relu", [slot(0)], [1], frees=(0,))))
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(compiled.run([x])[0], x.relu())
    assert compiled.name == "small"


def test_lists_of_tensors_and_of_sizes() -> None:
    x, index = torch.randn(4, 6), torch.tensor([2, 0])
    data = program(
        2, 9, [3, 5, 7],
        call("aten::split.Tensor", [slot(0), ["int", 2], ["int", 1]], [2, -1, 3], unpack=True),
        call("int::size", [slot(0), ["int", 0]], [4]),
        call("aten::cat", [["list", [slot(2), slot(2)]], ["int", 1]], [5], frees=(2,)),
        call("int::mul", [slot(4), ["int", 2]], [6]),
        call("aten::view", [slot(0), ["list", [slot(6), ["int", -1]]]], [7]),
        call("aten::index.Tensor", [slot(0), ["list", [["none"], slot(1)]]], [8]),
    )  # fmt: skip
    parts, cat, viewed = run(data, x, index)
    assert torch.equal(parts, x[:, 4:])
    assert torch.equal(cat, torch.cat([x[:, :2]] * 2, 1))
    assert torch.equal(viewed, x.view(8, 3))
    data["outputs"] = [8]
    assert torch.equal(run(data, x, index)[0], x[:, index])


def test_several_results_optional_ones_and_scalars() -> None:
    x = torch.randn(2, 3, 8)
    data = program(
        1, 3, [1, -1, 2],
        call("aten::native_layer_norm",
             [slot(0), ["list", [["int", 8]]], ["none"], ["none"], ["float", 1e-5]], [1, -1, 2]),
    )  # fmt: skip
    normal, nothing, rstd = run(data, x)
    expected = torch.native_layer_norm(x, [8], None, None, 1e-5)
    assert torch.equal(normal, expected[0])
    assert nothing is None
    assert torch.equal(rstd, expected[2])


def test_undefined_results_become_none() -> None:
    x, w, g = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 3, 3)
    numbers = [["list", [["int", n]] * 2] for n in (1, 0, 1)]
    mask = ["list", [["bool", False], ["bool", True], ["bool", False]]]
    data = program(
        3, 6, [3, 4, 5],
        call("aten::convolution_backward",
             [slot(0), slot(1), slot(2), ["none"], *numbers, ["bool", False], ["list", [["int", 0]] * 2], ["int", 1],
              mask], [3, 4, 5]),
    )  # fmt: skip
    dx, dw, db = run(data, g, x, w)
    assert dx is None
    assert db is None
    weight = w.clone().requires_grad_()
    (expected,) = torch.autograd.grad(torch.conv2d(x, weight), weight, g)
    torch.testing.assert_close(dw, expected)


def test_dtypes_devices_and_memory_formats() -> None:
    data = program(
        1, 3, [1, 2],
        call("aten::_to_copy",
             [slot(0), ["dtype", "bfloat16"], ["layout", "strided"], ["device", "cpu"], ["none"], ["bool", False],
              ["memory_format", "contiguous_format"]], [1]),
        call("aten::full", [["list", [["int", 2]]], ["float", 0.5], ["dtype", "float64"], ["none"], ["none"], ["none"]],
             [2]),
    )  # fmt: skip
    half, full = run(data, torch.randn(3, 2).t())
    assert half.dtype == torch.bfloat16
    assert half.is_contiguous()
    assert torch.equal(full, torch.full((2,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        ("int::add", (7, -2), 5),
        ("int::sub", (7, -2), 9),
        ("int::mul", (7, -2), -14),
        ("int::floordiv", (7, -2), 7 // -2),
        ("int::floordiv", (-7, 2), -7 // 2),
        ("int::mod", (7, -2), 7 % -2),
        ("int::mod", (-7, 2), -7 % 2),
        ("int::pow", (-7, 3), -343),
        ("int::pow", (7, 0), 1),
        ("int::neg", (7,), -7),
        ("int::min", (7, 2), 2),
        ("int::max", (7, 2), 7),
        ("int::eq", (7, 7), True),
        ("int::ne", (7, 7), False),
        ("int::lt", (2, 7), True),
        ("int::le", (7, 7), True),
        ("int::gt", (2, 7), False),
        ("int::ge", (7, 7), True),
        ("int::from_float", (2.75,), 2),
        ("float::from_int", (2,), 2.0),
        ("float::add", (0.5, 2), 2.5),
        ("float::sub", (0.5, 2), -1.5),
        ("float::mul", (0.5, 3), 1.5),
        ("float::truediv", (7, 2), 3.5),
        ("float::pow", (7, 0.5), 7**0.5),
        ("float::pow", (7, -2), 7**-2),
        ("float::neg", (0.5,), -0.5),
    ],
)
def test_numbers(op: str, args: tuple[Any, ...], expected: Any) -> None:
    count = len(args)
    (result,) = run(program(count, count + 1, [count], call(op, [slot(i) for i in range(count)], [count])), *args)
    assert result == expected
    assert type(result) is type(expected)


def test_sizes_follow_the_batch() -> None:
    compiled = Program(
        program(
            1, 4, [3],
            call("int::numel", [slot(0)], [1]),
            call("float::from_int", [slot(1)], [2]),
            call("aten::div.Scalar", [slot(0), slot(2)], [3]),
        )
    )  # fmt: skip
    for batch in (2, 5):
        x = torch.randn(batch, 3)
        assert torch.equal(compiled.run([x])[0], x / (3.0 * batch))


def test_an_integer_slot_serves_as_a_float() -> None:
    data = program(
        1, 3, [2],
        call("int::size", [slot(0), ["int", 0]], [1]),
        call("aten::leaky_relu", [slot(0), slot(1)], [2]),
    )  # fmt: skip
    x = torch.randn(3, 2)
    assert torch.equal(run(data, x)[0], torch.nn.functional.leaky_relu(x, 3))


def test_keyed_operators_inside_a_program() -> None:
    x = torch.randn(3, 2)
    keys = torch.ops.elaswave.sample_keys(0, 0, 3, 0)
    keyed = program(
        2, 3, [2],
        call("elaswave::keyed_dropout", [slot(0), slot(1), ["float", 0.5], ["int", 1], ["int", 0], ["int", 1]], [2]),
    )  # fmt: skip
    assert torch.equal(run(keyed, x, keys)[0], torch.ops.elaswave.keyed_dropout(x, keys, 0.5, 1, 0, 1))


def test_runs_below_autograd_and_autocast() -> None:
    w = torch.randn(3, 3, requires_grad=True)
    data = program(2, 3, [2], call("aten::mm", [slot(0), slot(1)], [2]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (out,) = run(data, w, w)
    assert out.dtype == torch.float32
    assert not out.requires_grad
    out.add_(1.0)  # an ordinary tensor: it may be used in autograd afterwards
    assert (out * w).sum().requires_grad


def test_other_threads_run_meanwhile() -> None:
    compiled = Program(program(1, 2, [1], call("aten::cumsum", [slot(0), ["int", 0], ["none"]], [1])))
    x = torch.randn(1_000_000)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(compiled.run([x])[0])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, x.cumsum(0)) for result in results)
    assert len(results) == 3


RELU = call("aten::relu", [slot(0)], [1])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (program(1, 2, [1], call("aten::relu", [slot(1)], [1])),
         "program small, instruction 0 (aten::relu): reads slot 1 before anything was written to it"),
        (program(1, 2, [0], call("aten::relu", [slot(0)], [1], frees=(0,))),
         "program small, outputs: reads slot 0 after it was freed"),
        (program(1, 2, [1], call("aten::rellu", [slot(0)], [1])), "instruction 0 (aten::rellu): no such operator"),
        (program(1, 2, [1], call("aten::relu.nope", [slot(0)], [1])), "(aten::relu.nope): no such operator"),
        (program(1, 2, [1], call("aten::add.Tensor", [slot(0), slot(0)], [1])),
         "has 2 arguments, its schema takes 3"),
        (program(1, 3, [1], call("aten::relu", [slot(0)], [1, 2])), "has 2 outs, its schema returns 1 values"),
        (program(1, 2, [1], call("aten::relu", [["int", 3]], [1])), "argument self is an int, its schema takes Tensor"),
        (program(1, 2, [1], call("aten::relu", [["none"]], [1])), "argument self is None, its schema takes Tensor"),
        (program(1, 3, [2], call("int::numel", [slot(0)], [1]), call("aten::relu", [slot(1)], [2])),
         "instruction 1 (aten::relu): argument self is slot 1, which holds an int; its schema takes Tensor"),
        (program(1, 2, [1], call("aten::sum.dim_IntList",
                                 [slot(0), ["list", [["float", 0.5]]], ["bool", False], ["none"]], [1])),
         "argument dim is a float, its schema takes int"),
        (program(1, 2, [1], call("aten::sum.dim_IntList", [slot(0), ["int", 0], ["int", 1], ["none"]], [1])),
         "argument keepdim is an int, its schema takes bool"),
        (program(1, 2, [1], call("aten::sum", [slot(0), ["dtype", "float31"]], [1])),
         'program small, instruction 0 (aten::sum): unknown dtype "float31"'),
        (program(1, 2, [1], call("int::numel", [slot(0), slot(0)], [1])), "has 2 arguments, takes 1"),
        (program(1, 2, [1], call("aten::relu", [slot(0)], [1], unpack=True)), "does not return one list"),
        (program(1, 2, [1], call("aten::relu", [["tensor", 0]], [1])), 'unknown kind of argument "tensor"'),
    ],
)  # fmt: skip
def test_refusals(data: Data, message: str) -> None:
    with pytest.raises(ExecError, match=re.escape(message)):
        Program(data)


def test_a_failing_operator_is_named_and_the_program_lives_on() -> None:
    compiled = Program(program(2, 4, [3], RELU | {"outs": [2]}, call("aten::mm", [slot(2), slot(1)], [3], frees=(2,))))
    with pytest.raises(ExecError) as caught:
        compiled.run([torch.randn(2, 3), torch.randn(2, 3)])
    text = str(caught.value)
    assert text.startswith("program small, instruction 1 (aten::mm): mat1 and mat2 shapes cannot be multiplied")
    assert "\n" not in text
    x, y = torch.randn(2, 3), torch.randn(3, 2)
    assert torch.equal(compiled.run([x, y])[0], x.relu() @ y)


def test_unpacked_lists_have_the_promised_length() -> None:
    data = program(1, 3, [1], call("aten::split.Tensor", [slot(0), ["int", 2], ["int", 0]], [1, 2], unpack=True))
    with pytest.raises(ExecError, match="returned 3 tensors, the program keeps 2"):
        run(data, torch.randn(6))


def test_the_number_of_inputs_is_checked() -> None:
    with pytest.raises(ExecError, match="program small: takes 1 inputs, got 2"):
        run(program(1, 2, [1], RELU), torch.randn(2), torch.randn(2))


def test_division_by_zero() -> None:
    with pytest.raises(ExecError, match="int::floordiv.*division by zero"):
        run(program(1, 2, [1], call("int::floordiv", [slot(0), ["int", 0]], [1])), 3)


_CUBE = torch.arange(120.0).reshape(4, 5, 6)


@pytest.mark.parametrize(
    ("op", "args", "base"),
    [
        ("aten::reshape", [["list", [["int", 20], ["int", 6]]]], _CUBE),
        ("aten::reshape", [["list", [["int", -1], ["int", 6]]]], _CUBE),
        ("aten::reshape", [["list", []]], torch.ones(1)),
        ("aten::reshape", [["list", [["int", 0], ["int", 7]]]], torch.ones(7, 0)),
        ("aten::reshape", [["list", [["int", 16], ["int", 6]]]], _CUBE[:, :4]),
        ("aten::reshape", [["list", [["int", 30], ["int", 4]]]], _CUBE.permute(2, 1, 0)),
        ("aten::transpose.int", [["int", 0], ["int", -1]], _CUBE[:, 1:4]),
        ("aten::transpose.int", [["int", 0], ["int", 0]], torch.ones(())),
        ("aten::t", [], _CUBE[2]),
        ("aten::t", [], torch.ones(3)),
        ("aten::split.Tensor", [["int", 2], ["int", -2]], _CUBE[1:]),
        ("aten::split.Tensor", [["int", 9], ["int", 0]], _CUBE),
        ("aten::split.Tensor", [["int", 2], ["int", 0]], torch.ones(0, 3)),
    ],
    ids=["reshape", "a size to work out", "to a number", "nothing", "with a hole", "that copies", "transpose",
         "a number", "t", "t of one dimension", "split", "split in one", "split of nothing"],
)  # fmt: skip
def test_views_are_those_of_torch(op: str, args: list[Any], base: torch.Tensor) -> None:
    name, _, overload = op.removeprefix("aten::").partition(".")
    numbers = [[item[1] for item in arg[1]] if arg[0] == "list" else arg[1] for arg in args]
    expected = getattr(getattr(torch.ops.aten, name), overload or "default")(base, *numbers)
    wanted = list(expected) if isinstance(expected, (list, tuple)) else [expected]
    outs = list(range(1, 1 + len(wanted)))
    extra = {"unpack": True} if name == "split" else {}
    found = run(program(1, 1 + len(wanted), outs, call(op, [slot(0), *args], outs, **extra)), base)
    for mine, other in zip(found, wanted, strict=True):
        assert torch.equal(mine, other) and mine.stride() == other.stride() and mine.dtype == other.dtype
        assert mine.storage_offset() == other.storage_offset()
        assert (mine.data_ptr() == base.data_ptr()) == (other.data_ptr() == base.data_ptr())


def test_sizes_of_a_view_may_be_slots_and_wrong_ones_are_refused() -> None:
    shaped = program(2, 3, [2], call("aten::reshape", [slot(0), ["list", [slot(1), ["int", 6]]]], [2], frees=(0, 1)))
    assert run(shaped, _CUBE, 20)[0].shape == (20, 6)
    with pytest.raises(ExecError, match=r"instruction 0 \(aten::reshape\).*invalid for input of size 120"):
        run(shaped, _CUBE, 21)
    turned = program(1, 2, [1], call("aten::transpose.int", [slot(0), ["int", 0], ["int", 3]], [1], frees=(0,)))
    with pytest.raises(ExecError, match="Dimension out of range"):
        run(turned, _CUBE)
