"""Unit programs: the plain data that an fx graph becomes for the native runtime, which verifies and runs it.

Slots, complete positional arguments, frees after the last use:

    addmm(bias, x, w_t)  ->  {"op": "aten::addmm", "overload": "", "args": [["slot", 2], ["slot", 7], ["slot", 8],
                              ["int", 1], ["int", 1]], "outs": [9], "frees": [7, 8]}
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from elaswave_fx.errors import CaptureError, PassError
from elaswave_fx.program.ir import (
    argument,
    calls,
    is_aten,
    is_getitem,
    module_of,
    output_nodes,
    placeholders,
    value_of,
)

_NUMBERS = {
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.neg: "neg",
    operator.floordiv: "floordiv", operator.mod: "mod", operator.truediv: "truediv",
    operator.pow: "pow",
    torch.sym_min: "min", torch.sym_max: "max", torch.sym_float: "from_int", torch.sym_int: "from_float",
    operator.eq: "eq", operator.ne: "ne", operator.lt: "lt", operator.le: "le", operator.gt: "gt", operator.ge: "ge",
}  # fmt: skip
_SIZES = {"aten.sym_size.int": "int::size", "aten.sym_numel.default": "int::numel"}
_ALIASES = ("aten.detach", "aten.alias")


def lower_graph(name: str, module: fx.GraphModule) -> dict[str, Any]:
    """The unit program of a graph. A None output becomes slot -1.

    Raises CaptureError naming the module and the call that has no native form; PassError where a pass went wrong.
    """
    return _Lowering(name, module.graph).run()


class _Lowering:
    """Assigns slots, writes instructions, and frees every slot after its last use."""

    def __init__(self, name: str, graph: fx.Graph) -> None:
        self.name = name
        self.graph = graph
        self.slots: dict[fx.Node, int] = {}
        self.parts: dict[fx.Node, list[int]] = {}
        self.instructions: list[dict[str, Any]] = []
        self.num_slots = 0

    def run(self) -> dict[str, Any]:
        inputs = placeholders(self.graph)
        for node in inputs:
            self.slots[node] = self._new_slot()
        for node in calls(self.graph):
            self._call(node)
        outputs = [-1 if node is None else self.slots[node] for node in output_nodes(self.graph)]
        self._free(set(outputs))
        return {
            "name": self.name,
            "num_inputs": len(inputs),
            "num_slots": self.num_slots,
            "outputs": outputs,
            "instructions": self.instructions,
        }

    def _new_slot(self) -> int:
        self.num_slots += 1
        return self.num_slots - 1

    def _call(self, node: fx.Node) -> None:
        target = node.target
        if is_getitem(node):
            owner, index = node.args
            assert isinstance(owner, fx.Node) and isinstance(index, int)
            self.slots[node] = self.parts[owner][index]
        elif target in _NUMBERS:
            kind = "float" if isinstance(value_of(node), (float, torch.SymFloat)) else "int"
            args = [self._argument(node, arg) for arg in node.args]
            self._instruction(f"{kind}::{_NUMBERS[target]}", "", args, node)  # type: ignore[index]
        elif is_aten(node, *_SIZES):
            self._instruction(_SIZES[str(target)], "", [self._argument(node, arg) for arg in node.args], node)
        elif is_aten(node, *_ALIASES):
            self.slots[node] = self.slots[node.args[0]]  # type: ignore[index]
        elif isinstance(target, torch._ops.OpOverload):
            schema = target._schema
            numbers = _numbers_for_tensors(node)
            scalar = _scalar_overload(node, numbers)
            if scalar is not None:
                schema, numbers = scalar._schema, []
            given = {name: self._scalar_tensor(node, name) for name in numbers}
            self._instruction(schema.name, schema.overload_name, self._complete(node, schema, given), node)
        else:
            raise CaptureError(
                f"model: {module_of(node)} computes by {target}, which has no native form; a way out for numbers of "
                "sizes is +, -, *, /, //, % or **, or a tensor, such as torch.full((), x.shape[0])"
            )

    def _instruction(self, op: str, overload: str, args: list[Any], node: fx.Node) -> None:
        value = value_of(node)
        entry: dict[str, Any] = {"op": op, "overload": overload, "args": args, "frees": []}
        if isinstance(value, (tuple, list)):
            self.parts[node] = [self._new_slot() for _ in value]
            entry["outs"] = list(self.parts[node])
            schema = getattr(node.target, "_schema", None)
            if schema is not None and len(schema.returns) == 1:
                entry["unpack"] = True
        else:
            self.slots[node] = self._new_slot()
            entry["outs"] = [self.slots[node]]
        self.instructions.append(entry)

    def _complete(self, node: fx.Node, schema: Any, ready: dict[str, list[Any]]) -> list[Any]:
        """Positional arguments for every parameter of the schema, defaults filled in; some may be ready."""
        args = []
        for position, parameter in enumerate(schema.arguments):
            if parameter.name in ready:
                args.append(ready[parameter.name])
                continue
            if position < len(node.args) and not parameter.kwarg_only:
                given = node.args[position]
            elif parameter.name in node.kwargs:
                given = node.kwargs[parameter.name]
            elif parameter.has_default_value():
                given = parameter.default_value
            else:
                raise PassError(f"lower: {self.name}: {node.target} lacks its argument '{parameter.name}'")
            args.append(self._argument(node, given))
        return args

    def _scalar_tensor(self, node: fx.Node, name: str) -> list[Any]:
        """A slot with a number as a 0-dim tensor, of the dtype of the tensor it is combined with."""
        number = argument(node, name)
        if isinstance(number, complex):
            return self._complex_tensor(node, number)
        tensors = [value_of(n) for n in node.all_input_nodes if isinstance(value_of(n), torch.Tensor)]
        meets = next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])
        real = isinstance(value_of(number) if isinstance(number, fx.Node) else number, (float, torch.SymFloat))
        dtype = torch.float32 if real and not meets.is_floating_point() else meets.dtype
        values = (number, dtype, None, meets.device, None)
        return self._emit("aten::scalar_tensor", [self._argument(node, value) for value in values])

    def _complex_tensor(self, node: fx.Node, number: complex) -> list[Any]:
        """A slot with a complex number as a 0-dim tensor, of the precision of the node's result."""
        result = value_of(node)
        options = (result.real.dtype, None, result.device, None)
        parts = [(number.real, *options), (number.imag, *options)]
        made = [self._emit("aten::scalar_tensor", [self._argument(node, value) for value in part]) for part in parts]
        return self._emit("aten::complex", made)

    def _emit(self, op: str, args: list[Any]) -> list[Any]:
        slot = self._new_slot()
        self.instructions.append({"op": op, "overload": "", "args": args, "frees": [], "outs": [slot]})
        return ["slot", slot]

    def _argument(self, node: fx.Node, value: Any) -> list[Any]:
        if isinstance(value, fx.Node):
            if value not in self.slots:
                return ["list", [["slot", slot] for slot in self.parts[value]]]
            return ["slot", self.slots[value]]
        if value is None:
            return ["none"]
        if isinstance(value, (list, tuple)):
            return ["list", [self._argument(node, item) for item in value]]
        kinds = (bool, "bool"), (int, "int"), (float, "float"), (str, "str")
        for kind, tag in kinds:
            if isinstance(value, kind):
                return [tag, value]
        names = (torch.dtype, "dtype"), (torch.layout, "layout"), (torch.memory_format, "memory_format")
        for kind, tag in names:
            if isinstance(value, kind):
                return [tag, str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, complex):
            raise CaptureError(
                f"model: {node.target} in {module_of(node)} takes the complex number {value}, for which unit programs "
                "have no form; a way out is a tensor, such as torch.complex(real, imaginary)"
            )
        raise PassError(f"lower: {self.name}: {node.target} has an argument of type {type(value).__name__}")

    def _free(self, outputs: set[int]) -> None:
        last: dict[int, int] = {}
        for index, entry in enumerate(self.instructions):
            for slot in [*_slots(entry["args"]), *entry["outs"]]:
                last[slot] = index
        for slot, index in sorted(last.items()):
            if slot not in outputs:
                self.instructions[index]["frees"].append(slot)


def _numbers_for_tensors(node: fx.Node) -> list[str]:
    """Tensor parameters of the operator for which Python passed a number."""
    parameters = node.target._schema.arguments  # type: ignore[union-attr]
    return [p.name for p in parameters if str(p.type) == "Tensor" and _is_number(argument(node, p.name))]


def _scalar_overload(node: fx.Node, numbers: list[str]) -> Any:
    """The overload with a number that computes the same bits, if there is one.

    mul.Tensor(x, 0.5) is mul.Scalar(x, 0.5), div.Tensor_mode(x, 2, ...) is div.Scalar_mode(x, 2, ...).
    """
    if numbers != ["other"] or isinstance(argument(node, "other"), complex):
        return None
    target: Any = node.target
    given = target._schema.overload_name
    name = given.replace("Tensor", "Scalar", 1) or "Scalar"
    known = name != given and name in target.overloadpacket.overloads()
    return getattr(target.overloadpacket, name) if known else None


def _is_number(given: Any) -> bool:
    value = value_of(given) if isinstance(given, fx.Node) else given
    return isinstance(value, (bool, int, float, complex, torch.SymInt, torch.SymFloat))


def _slots(args: Any) -> list[int]:
    found = []
    for arg in args:
        if arg[0] == "slot":
            found.append(arg[1])
        elif arg[0] == "list":
            found += _slots(arg[1])
    return found
