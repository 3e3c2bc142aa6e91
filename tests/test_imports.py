"""Imports go downwards only.

ORDER is the diagram of ARCHITECTURE.md as a list: a module may import from those before it. A package (`methods`, `lab`)
is one entry, and its files may import each other, except that the methods stand apart: see `METHODS_MAY_IMPORT`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "eigendamage"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

ORDER = [
    "checks",
    "layers",
    "streams",
    "passes",
    "processes",
    "linalg",
    "files",
    "text",
    "progress",
    "cost",
    "covariance",
    "operations",
    "coupling",
    "links",
    "rehearsal",
    "standins",
    "calibration",
    "curvature",
    "labels",
    "batches",
    "methods",
    "observing",
    "reading",
    "selection",
    "structures",
    "timing",
    "plans",
    "refitting",
    "surgery",
    "solver",
    "offers",
    "budgets",
    "calibrating",
    "measuring",
    "planning",
    "storage",
    "synchronised",
    "checkpoints",
    "objective",
    "recording",
    "finetune",
    "rounds",
    "figures",
    "charts",
    "report",
    "compress",
    "plan_report",
    "frontier",
    "lab",
    "demo",
    "bench",
    "bench_time",
    "options",
    "cli",
]

# A method is a pure function of a layer and its curvature, and knows no other: only two share the energy of a filter.
METHODS_MAY_IMPORT = {"layers", "linalg", "curvature", "methods.kron_obd", "methods.regression"}

FORBIDDEN = {
    "torchvision": "it does not import on a CPU build of torch, and then transformers does not either",
    "pickle": "files are read without running what is in them; use safetensors and JSON",
}

# CIFAR's official files are pickles: one file reads them, and admits nothing but data.
ALLOWED = {("lab.unpickling", "pickle")}


def modules_of(root: Path) -> dict[str, Path]:
    """Every file by its dotted name inside the package: `layers`, `methods`, `methods.obs`; the package itself is ``""``."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, source: str, modules: set[str], package: bool) -> list[tuple[int, str]]:
    """Line and absolute dotted name of everything that ``source`` imports, wherever in the file it does so."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = [PACKAGE, *module.split(".")] if module else [PACKAGE]
            here = here[: len(here) - node.level + package] if node.level else []
            base = ".".join([*here, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.append((node.lineno, name if name.removeprefix(f"{PACKAGE}.") in modules else base))
    return found


def complaints(module: str, source: str, modules: set[str], package: bool, root_place: int) -> list[str]:
    """What is wrong with the imports of one file. ``root_place`` is where `import eigendamage` stands in ORDER."""
    room = module.split(".")[0]
    if module and room not in ORDER:
        return [f"{room} has no place yet: add it to ORDER in {Path(__file__).name} and to the diagram of ARCHITECTURE.md"]
    place = ORDER.index(room) if module else len(ORDER)
    wrong = []
    for line, name in imports_of(module, source, modules, package):
        top, _, inner = name.partition(".")
        if top in FORBIDDEN and (module, top) not in ALLOWED:
            wrong.append(f"line {line}: {top} may not be imported: {FORBIDDEN[top]}")
        elif top == PACKAGE and not allowed(module, place, inner, root_place):
            wrong.append(f"line {line}: {module or PACKAGE} may not import {name}: imports go downwards only, see ORDER")
    return wrong


def allowed(module: str, place: int, target: str, root_place: int) -> bool:
    if not target:
        return not module or place > root_place
    room = target.split(".")[0]
    if module.startswith("methods."):
        return target != module and target in METHODS_MAY_IMPORT
    if module.split(".")[0] == room:
        return True
    return room not in ORDER or ORDER.index(room) < place  # a module without a place is reported at its own file


def place_of_root(modules: dict[str, Path]) -> int:
    """`import eigendamage` brings in all that its ``__init__`` imports, so it stands where the last of these does."""
    names = [name.split(".") for _, name in imports_of("", modules[""].read_text(), set(modules), True)]
    return max((ORDER.index(name[1]) for name in names if name[0] == PACKAGE and name[1:] and name[1] in ORDER), default=-1)


MODULES = modules_of(SOURCE)


@pytest.mark.parametrize("module", MODULES, ids=lambda name: name or PACKAGE)
def test_imports_go_downwards(module: str) -> None:
    path = MODULES[module]
    wrong = complaints(module, path.read_text(), set(MODULES), path.name == "__init__.py", place_of_root(MODULES))
    assert not wrong, "\n".join([str(path.relative_to(SOURCE.parent)), *wrong])


KNOWN = {
    "",
    "layers",
    "curvature",
    "methods",
    "methods.obs",
    "methods.kron_obd",
    "methods.cp",
    "planning",
    "compress",
    "demo",
    "lab",
    "lab.nets",
}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("curvature", "from .layers import rows"),
        ("curvature", "from . import layers"),
        ("planning", "from eigendamage.methods import METHODS"),
        ("methods", "from . import cp, obs"),
        ("methods.cp", "from ..curvature import Curvature\nfrom .kron_obd import filter_energies"),
        ("demo", "import eigendamage as ed\nfrom eigendamage import measure"),
        ("lab.nets", "from . import tables\nimport eigendamage"),
        ("", "from .compress import compress"),
        ("layers", "import math, torch.nn"),
    ],
)
def test_accepts(module: str, source: str) -> None:
    assert complaints(module, source, KNOWN, module in ("", "methods", "lab"), ORDER.index("compress")) == []


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("layers", "from .curvature import Curvature", "layers may not import eigendamage.curvature"),
        ("layers", "def f():\n    from . import planning", "line 2: layers may not import eigendamage.planning"),
        ("curvature", "import eigendamage.methods.obs", "may not import eigendamage.methods.obs"),
        ("methods.cp", "from ..planning import Plan", "methods.cp may not import eigendamage.planning"),
        ("methods.cp", "from . import METHODS", "methods.cp may not import eigendamage.methods"),
        ("methods.obs", "from .cp import cp", "methods.obs may not import eigendamage.methods.cp"),
        ("methods", "from ..planning import Plan", "methods may not import eigendamage.planning"),
        ("planning", "import eigendamage as ed", "planning may not import eigendamage:"),
        ("attic", "import torch", "attic has no place yet: add it to ORDER"),
        ("layers", "import torchvision.models", "torchvision may not be imported"),
        ("layers", "from pickle import loads", "pickle may not be imported"),
    ],
)
def test_complains(module: str, source: str, message: str) -> None:
    (wrong,) = complaints(module, source, KNOWN, module in ("", "methods", "lab"), ORDER.index("compress"))
    assert message in wrong
