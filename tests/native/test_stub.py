"""The type stub of the native module names what the module has, no more and no less."""

import ast
from pathlib import Path

import torch  # noqa: F401 - the module finds torch's libraries loaded

from elaswave_fx import _native


def test_stub_and_module_agree() -> None:
    stub = ast.parse((Path(__file__).parents[2] / "elaswave_fx" / "_native.pyi").read_text())
    declared = {
        node.name: {item.name for item in node.body if isinstance(item, ast.FunctionDef)} - {"__init__"}
        for node in stub.body
        if isinstance(node, ast.ClassDef)
    }
    built = {
        name: {item for item in dir(value) if not item.startswith("_")}
        for name, value in vars(_native).items()
        if isinstance(value, type)
    }
    assert declared == built
