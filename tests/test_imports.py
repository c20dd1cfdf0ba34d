"""Imports run one way: program <- plan <- passes <- build, worker <- commands (the right may import the left).

Read from the syntax trees, so imports inside functions count and nothing is executed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Anybody may import these, which import nobody but each other.
LEAVES = {"errors", "files", "ownership", "scheduling", "watchdog", "words"}
# What a layer may import of this project, beside itself and the leaves.
ALLOWED: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "program": {"_native"},  # the keyed operators are registered by it
    "plan": {"program"},
    "passes": {"program", "plan", "config.validation"},  # options of passes are read as keys are
    # How processes start and what users see knows nothing of what is computed; workers report through both.
    "observe": {"plan.work.spans"},
    "pictures": {"observe", "plan"},
    "checkpoint": {"_native", "config", "devices.fingerprint", "plan", "program"},
    "launch": {"_liveness", "config", "control", "devices.clocks", "observe", "plan"},
    "control": {"observe", "plan"},
    # Tools may import anything of ours, the simulator only what a real run enters.
    "tools.sim": {"_native", "control", "plan"},
}
# What users call. Everything else is called by it.
COMMANDS = {"command", "train", "inspect", "simulate", "verify", "coordinator", "timeline"}
BEFORE_COMMANDS = {"build", "config", "data", "devices", "models", "optim", "worker"}
# The rooms of plan, each of which may import those before it in the same line, but not those beside it.
ROOMS = (
    ("work",), ("order",), ("plan",), ("predict",), ("lanes", "replicas"), ("make",), ("describe", "next", "lower"),
    ("check",),
)  # fmt: skip
# Torch is an effect of a kind: who computes what is decided without it.
NO_TORCH = {"plan", "control"}


def python_files() -> list[Path]:
    return sorted(path for top in ("elaswave_fx", "passes", "tools") for path in (ROOT / top).rglob("*.py"))


def module_parts(path: Path) -> tuple[str, ...]:
    """elaswave_fx/plan/plan.py -> ("elaswave_fx", "plan", "plan"); a package's __init__ is the package itself, and
    passes/lower.py stands for ("elaswave_fx", "passes", "lower")."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "passes":
        return ("elaswave_fx", *parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import in `tree`, which lies in `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *((node.module or "").split(".") if node.module else ())))
            # `from elaswave_fx import plan` names a layer only together with its last word.
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)


def layer_of(name: str) -> str | None:
    """The layer that a dotted name belongs to; None for other people's modules and for the bare package."""
    parts = name.split(".")
    if parts[0] == "tools":
        return ".".join(parts[:2])
    return parts[1] if parts[0] == "elaswave_fx" and len(parts) > 1 else None


def _is_before(room: str, importing: str) -> bool:
    """Whether one room of plan is another, or stands before it."""
    floors = {name: floor for floor, names in enumerate(ROOMS) for name in names}
    return room == importing or floors[room] < floors[importing]


def violations(parts: tuple[str, ...], is_package: bool, source: str) -> list[str]:
    """Every import of module `parts` that its layer forbids, in words."""
    own = layer_of(".".join(parts))
    package = parts if is_package else parts[:-1]
    found = []
    for line, name in imported(ast.parse(source), package):
        place, layer = f"{'.'.join(parts)}:{line} imports {name}", layer_of(name)
        if own in NO_TORCH and name.split(".")[0] == "torch":
            found.append(f"{place}; {own} is decided without torch")
        if name.split(".")[0] == "passes":
            found.append(f"{place}; that is a user's, ours is elaswave_fx.passes")
        if (
            own == layer == "plan"
            and name.startswith("elaswave_fx.plan.")
            and len(parts) > 2
            and not _is_before(name.split(".")[2], parts[2])
        ):
            found.append(f"{place}; rooms of plan import those before them")
        if layer is None or layer in {own, *LEAVES, "__version__"}:
            continue
        if own in ALLOWED and not any(f"{name}.".startswith(f"elaswave_fx.{each}.") for each in ALLOWED[own]):
            found.append(f"{place}; {own} may import {sorted(ALLOWED[own])} only")
        if own in BEFORE_COMMANDS and layer in COMMANDS:
            found.append(f"{place}; {own} stands before the commands")
        if layer.startswith("tools") and not str(own).startswith("tools"):
            found.append(f"{place}; tools are not in the wheel")
    return found


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    assert violations(module_parts(path), path.name == "__init__.py", path.read_text()) == []


def circles(modules: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left of module -> imported modules once those that import nothing that is left are taken away."""
    left = modules
    while True:
        smaller = {name: names & left.keys() for name, names in left.items() if names & left.keys()}
        if smaller == left:
            return left
        left = smaller


def module_of(name: str, modules: set[str]) -> str | None:
    """The module of ours that an imported name is or lies in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = {".".join(module_parts(path)): path for path in python_files()}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = [name for _, name in imported(ast.parse(path.read_text()), tuple(package.split(".")))]
        graph[module] = {found for name in names if (found := module_of(name, set(paths))) not in (None, module)}
    assert circles(graph) == {}


def test_a_circle_is_seen_and_nothing_else() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == {}
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}).keys() == {"a", "b", "c"}


def test_every_layer_of_the_rule_exists() -> None:
    layers = {layer_of(".".join(module_parts(path))) for path in python_files()}
    assert set(ALLOWED) | BEFORE_COMMANDS <= layers, "a layer was renamed: the rule above would check nothing"


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("elaswave_fx.plan.work.box", "import torch", "decided without torch"),
        ("elaswave_fx.plan.work.box", "from torch.fx import Graph", "decided without torch"),
        ("elaswave_fx.plan.work.box", "from ...worker import engine", "imports elaswave_fx.worker.engine"),
        (
            "elaswave_fx.plan.work.box",
            "def f():\n    from elaswave_fx import launch",
            "box:2 imports elaswave_fx.launch",
        ),
        ("elaswave_fx.program.ir", "import elaswave_fx.passes.lower", "imports elaswave_fx.passes.lower"),
        (
            "elaswave_fx.plan.order.hops",
            "import elaswave_fx.plan.lanes.shares",
            "rooms of plan import those before them",
        ),
        (
            "elaswave_fx.plan.lanes.shares",
            "from elaswave_fx.plan.replicas import owners",
            "import those before them",
        ),
        ("elaswave_fx.build.compile", "from passes.lower import lower", "ours is elaswave_fx.passes"),
        ("elaswave_fx.worker.loop", "from ..train import main", "stands before the commands"),
        ("elaswave_fx.train", "from tools.bench import results", "tools are not in the wheel"),
        ("tools.sim.world", "from elaswave_fx.worker import loop", "imports elaswave_fx.worker.loop"),
        ("elaswave_fx.passes.lower", "from elaswave_fx.observe.metrics import Metrics", "imports elaswave_fx.observe"),
        ("elaswave_fx.passes.lower", "from elaswave_fx.config.keys import Config", "imports elaswave_fx.config.keys"),
    ],
)
def test_the_rule_sees(module: str, source: str, expected: str) -> None:
    (message,) = violations(tuple(module.split(".")), False, source)
    assert expected in message


def test_the_rule_allows_the_right_direction() -> None:
    source = (
        "import torch\nfrom elaswave_fx.plan.work.box import Box\nfrom . import pipeline\n"
        "from elaswave_fx import errors"
    )
    assert violations(("elaswave_fx", "passes", "lower"), False, source) == []
