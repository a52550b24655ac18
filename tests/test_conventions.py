"""Conventions of the code, checked by parsing every file: imports, sizes, names and docstrings.

Nothing is imported or traced. `pytest -rP tests/test_conventions.py` prints the exceptions, which
`tests/naming_rules.py` lists with their reasons.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.naming_rules import EXCEPTIONS, NAMES, ORDINARY_IN_SENTENCES, WORDS
from tests.source_tree import Place, SourceTree, words

LIBRARY = "collective_matmul"
PROGRAMS = (LIBRARY, "models", "train", "benchmarks")
REPOSITORY = SourceTree(Path(__file__).parents[1], (*PROGRAMS, "tests", "docs"))

#: Rooms from the ground up. A module imports from its own room and from rooms before it.
ROOMS: dict[str, tuple[str, ...]] = {
    "ground": (
        "_compat",
        "agreement",
        "data",
        "explicit_axes",
        "hardware",
        "log",
        "peer_access",
        "source_location",
        "transport",
    ),
    "jaxprs": ("jaxprs",),
    "mosaic_gpu": ("mosaic_gpu",),
    "operands": ("operands",),
    "schedule": ("schedule",),
    "dispatch": ("dispatch",),
    "ops": ("ops",),
    "jit": ("jit",),
    "tuning": ("tuning",),
    "layers": ("layers",),
    "rewrite": ("rewrite",),
    "users": ("__main__", "explain"),
}
#: Folders and modules of packages, from the first: each imports from itself and from those before
#: it. What else is in a package is imported by none of them.
STEPS: dict[str, tuple[str, ...]] = {
    f"{LIBRARY}.dispatch": (
        *("contract", "recording", "registry", "branches", "repetitions", "run_counts", "tables"),
        *("assessment", "selection"),
    ),
    f"{LIBRARY}.layers": (
        *("sharding_context", "layer_checks", "sequence_form"),
        *("linear", "experts", "parallelize"),
    ),
    f"{LIBRARY}.mosaic_gpu": (
        *("device", "kernel_types", "peers", "hopper_matmul", "grouped_matmul"),
    ),
    f"{LIBRARY}.operands": (
        *("varying", "arithmetic", "scaled", "chunked", "format", "multiply", "beside", "grouped"),
        *("sharded", "quantized", "weight_blocks", "recipes"),
    ),
    # In the order in which a program goes through them.
    f"{LIBRARY}.rewrite": ("find", "match", "replace"),
    "train": (
        "_compat",
        "config",
        "data",
        "processes",
        "log",
        "parallel",
        "optimizer",
        "step",
        "checkpoint",
        "memory",
        "plan",
        "run",
        "compare",
        "__main__",
    ),
}
ROOM_ORDER = (*ROOMS, "public", "models", "train", "benchmarks")
PUBLIC_MODULES = {LIBRARY, f"{LIBRARY}.jaxprs", f"{LIBRARY}.layers"}
#: The one benchmark module that imports private names; the other modules import them from it.
BENCHMARKED_INTERNALS = "benchmarks/internals.py"

#: The files that may import private parts of JAX, one for each of two programs.
PRIVATE_JAX = ("collective_matmul/_compat.py", "train/_compat.py")

#: The folder that knows which parameters of equations hold jaxprs.
JAXPR_WALKER = "collective_matmul/jaxprs/"

#: Where the name of a backend may be compared, besides the registry.
_RINGS = (
    "collective_matmul/ops/matmul/ring/",
    "collective_matmul/ops/experts/ring.py",
    "collective_matmul/ops/attention/context/context_ring.py",
)
BACKEND_FILES: dict[str, tuple[str, ...]] = {
    "xla": (
        "collective_matmul/ops/matmul/xla.py",
        "collective_matmul/ops/experts/xla.py",
        "collective_matmul/ops/experts/grouped/xla.py",
        "collective_matmul/ops/attention/context/xla.py",
    ),
    "ring": _RINGS,
    "ring_two_way": _RINGS,
    "ring_direct": _RINGS,
    "one_shot": ("collective_matmul/ops/matmul/one_shot/",),
    "fused": ("collective_matmul/ops/matmul/fused/",),
    # The name of a use of schedules too.
    "exchange": (
        "collective_matmul/ops/experts/exchange.py",
        "collective_matmul/schedule/schedules.py",
    ),
    "triton": ("collective_matmul/ops/experts/grouped/triton",),
    "mosaic": ("collective_matmul/ops/experts/grouped/mosaic.py",),
}
#: What the folder of each family of ops may have. "xla" is its reference.
OP_FOLDERS = "collective_matmul/ops/"
OP_MODULES = (
    "api",
    "request",
    "gradients",
    "backend",
    "backends",
    "checks",
    "measured_program",
    "ring",
    "xla",
)
REGISTRIES = tuple(
    f"{OP_FOLDERS}{family}/backends.py"
    for family in ("matmul", "experts", "experts/grouped", "attention/context")
)
#: Not that of the experts, whose round trips carry pytrees of the op's choice.
CONTRACTS = tuple(f"{OP_FOLDERS}{family}/backend.py" for family in ("matmul", "experts/grouped"))

# The longest function of the library has 49 lines besides its docstring. Kernels may be longer: the
# functions of one loop are nested in it.
MAX_FUNCTION_LINES = 50
DEVICE_CODE = ("kernel.py", "sender.py")
MAX_README_LINES = 200
MAX_BENCHMARK_LINES = 10_030
MAX_REPORT_FILES = 61
MAX_REPORT_LINES = 12_000


class Finding(NamedTuple):
    """Something that breaks a convention."""

    place: Place
    what: str

    def __str__(self) -> str:
        return f"{self.place.path}:{self.place.line}: {self.place.text} {self.what}"


Findings = Iterator[Finding]
Check = Callable[[SourceTree], Findings]


def upward_imports(tree: SourceTree) -> Findings:
    for module in tree.below(*PROGRAMS):
        own = room(module.name)
        if not own:
            yield Finding(Place(module.path, 1, module.name), "is in no room of ROOMS")
            continue
        allowed = ROOM_ORDER[: ROOM_ORDER.index(own) + 1]
        for place in module.imports(tree.names):
            if own != "public" and room(place.text) not in allowed:
                yield Finding(place, f"of {room(place.text) or 'no room'} is imported by {own}")


def room(name: str) -> str:
    """The room of a module by its name; "" for modules outside of all rooms, such as tests."""
    package, _, rest = name.partition(".")
    if package != LIBRARY:
        return package if package in ROOM_ORDER else ""
    first = rest.partition(".")[0]
    inside = (name for name, members in ROOMS.items() if first in members)
    return next(inside, "") if rest else "public"


def steps_back(tree: SourceTree) -> Findings:
    """Modules of `STEPS` that import from a later step, or from what calls the steps."""
    for package, steps in STEPS.items():
        for module in tree.below(package.partition(".")[0]):
            step = _step(package, module.name)
            if step not in steps:
                continue
            allowed = steps[: steps.index(step) + 1]
            for place in module.imports(tree.names):
                other = _step(package, place.text)
                if other and other not in allowed:
                    yield Finding(place, f"is imported by {step}")


def _step(package: str, name: str) -> str:
    """The folder or module of a package that a module is in; "" if it is in another package."""
    inside = name.removeprefix(f"{package}.")
    return "" if inside == name else inside.partition(".")[0]


def import_cycles(tree: SourceTree) -> Findings:
    """Modules that import each other, directly or through others."""
    modules = {module.name: module for module in tree.modules}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> Findings:
        if name in trail:
            cycle = " -> ".join((*trail[trail.index(name) :], name))
            yield Finding(Place(modules[name].path, 1, name), f"imports itself: {cycle}")
        elif name not in done:
            imported = {place.text for place in modules[name].imports(tree.names)}
            for other in sorted(imported - {name}):
                yield from visit(other, (*trail, name))
            done.add(name)

    for name in modules:
        yield from visit(name, ())


def private_imports(tree: SourceTree) -> Findings:
    """Imports by models, train and benchmarks of what is not public in the library."""
    root = next(module for module in tree.modules if module.name == LIBRARY)
    exported = root.assigned("__all__")
    assert isinstance(exported, list)
    public = {f"{LIBRARY}.{name}" for name in exported} | PUBLIC_MODULES
    for module in tree.below(*PROGRAMS[1:]):
        for place in module.imports(tree.names):
            is_private = room(place.text) not in PROGRAMS and place.text not in public
            if is_private and module.path != BENCHMARKED_INTERNALS:
                yield Finding(place, "is imported and not public")


def private_jax(tree: SourceTree) -> Findings:
    for module in tree.modules:
        if module.path not in PRIVATE_JAX:
            yield from (Finding(place, "is private JAX") for place in module.private_jax())


def walks_over_nested_jaxprs(tree: SourceTree) -> Findings:
    """Modules that look into equations for jaxprs by themselves: only one folder does."""
    for module in tree.below(*PROGRAMS):
        if not module.path.startswith(JAXPR_WALKER):
            yield from (Finding(p, "is what jaxprs/ looks at") for p in module.nested_jaxprs())


def compared_backend_names(tree: SourceTree) -> Findings:
    for module in tree.below(*PROGRAMS):
        for place in module.compared_strings():
            home = BACKEND_FILES.get(place.text)
            if home and module.path not in REGISTRIES and not module.path.startswith(home):
                yield Finding(place, "is compared with")


def untyped_backends(tree: SourceTree) -> Findings:
    """Annotations with `Any` for backends, and in the contract and the registry except for JSON."""
    for module in tree.below(LIBRARY):
        everywhere = module.path in (*REGISTRIES, *CONTRACTS)
        for place, annotation in module.annotations():
            text = ast.unparse(annotation)
            is_backend = everywhere or {"backend", "implementation"} & {*words(place.text)}
            if is_backend and re.search(r"\bAny\b", text) and text != "dict[str, Any]":
                yield Finding(place, f"is annotated as {text}")


def long_functions(tree: SourceTree) -> Findings:
    for module in tree.below(LIBRARY):
        for place, lines in module.functions():
            if lines > MAX_FUNCTION_LINES and not module.path.endswith(DEVICE_CODE):
                yield Finding(place, f"has {lines} lines besides its docstring")


def repeated_names(tree: SourceTree) -> Findings:
    """Modules of a package that share a name, and classes that do."""
    for package in PROGRAMS:
        places = defaultdict(list)
        for module in tree.below(package):
            name = module.name.rpartition(".")[2]
            is_part = module.path.startswith(OP_FOLDERS) and name in OP_MODULES
            if not is_part and not module.path.endswith(("__init__.py", "__main__.py")):
                places["module", name].append(Place(module.path, 1, name))
            for place in module.classes():
                places["class", place.text.lstrip("_")].append(place)
        for (kind, _), found in places.items():
            for place in found if len(found) > 1 else ():
                others = ", ".join(other.path for other in found if other is not place)
                yield Finding(place, f"is also a {kind} in {others}")


def home_made_names(tree: SourceTree) -> Findings:
    """Names from `naming_rules`. Reports keep the words of their time."""
    for module in tree.modules:
        for place in module.identifiers():
            if use := better_name(place):
                yield Finding(place, f"should be {use}")
    for path in tree.other_files():
        place = Place(path, 1, Path(path).stem)
        if not path.startswith("benchmarks/reports/") and (use := better_name(place)):
            yield Finding(place, f"should be {use}")


def better_name(place: Place) -> str | None:
    """Replacement for a name, if `naming_rules` lists it."""
    text = f"_{'_'.join(words(place.text))}_"
    for word, use in WORDS.items():
        is_sentence = place.text.startswith("test_") and word in ORDINARY_IN_SENTENCES
        if f"_{'_'.join(words(word))}_" in text and not is_sentence:
            return use
    bare = place.text.lstrip("_")
    listed = (names for folder, names in NAMES.items() if place.path.startswith(f"{folder}/"))
    return next((names[bare] for names in listed if bare in names), None)


def docstring_openers(tree: SourceTree) -> Findings:
    """Docstrings that say something about a thing before they say what it is."""
    for module in tree.modules:
        for place, docstring in module.docstrings():
            if re.match(r"(The same|It|What|As|Of|That of|Those)\b", docstring):
                yield Finding(place, f"has a docstring that opens with {docstring.split()[0]!r}")


def reports_in_tests(tree: SourceTree) -> Findings:
    for module in tree.below("tests"):
        for place in module.strings():
            if re.search(r"\b20\d\d-\d\d-\d\d-\w", place.text):
                yield Finding(place._replace(text=place.text[:60]), "is a dated report")


def sizes(tree: SourceTree) -> Findings:
    """README, benchmarks and their reports, where they are larger than allowed."""
    reports = [p for p in tree.other_files() if p.startswith("benchmarks/reports/")]
    texts = [p for p in reports if not p.endswith((".png", ".gz"))]
    measured = [
        ("README.md", _lines(tree, ["README.md"]), MAX_README_LINES, "lines"),
        (
            "benchmarks",
            sum(m.lines for m in tree.below("benchmarks")),
            MAX_BENCHMARK_LINES,
            "lines",
        ),
        ("benchmarks/reports", len(reports), MAX_REPORT_FILES, "files"),
        ("benchmarks/reports", _lines(tree, texts), MAX_REPORT_LINES, "lines"),
    ]
    for path, size, limit, unit in measured:
        if size > limit:
            yield Finding(Place(path, 1, path), f"has {size} {unit}, and {limit} are allowed")


def _lines(tree: SourceTree, paths: list[str]) -> int:
    texts = ((tree.root / path).read_text(encoding="utf-8") for path in paths)
    return sum(len(text.splitlines()) for text in texts)


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        upward_imports,
        steps_back,
        import_cycles,
        private_imports,
        private_jax,
        walks_over_nested_jaxprs,
        compared_backend_names,
        untyped_backends,
        long_functions,
        repeated_names,
        home_made_names,
        docstring_openers,
        reports_in_tests,
        sizes,
    )
}


def exception(check: str, finding: Finding) -> tuple[str, str, str] | None:
    """The exception that covers a finding, if any."""
    for excepted, path, name in EXCEPTIONS:
        place = finding.place
        if (excepted, name) == (check, place.text) and place.path.startswith(path):
            return excepted, path, name
    return None


@pytest.mark.parametrize("check", CHECKS)
def test_no_file_breaks_a_convention(check: str) -> None:
    found = [f for f in CHECKS[check](REPOSITORY) if exception(check, f) is None]
    assert not found, "\n".join(map(str, ["", *found]))


def test_every_exception_is_in_use() -> None:
    used = {exception(name, f) for name, check in CHECKS.items() for f in check(REPOSITORY)}
    for (check, path, name), reason in EXCEPTIONS.items():
        print(f"{check}: {path}: {name}: {reason}")
    assert used - {None} == EXCEPTIONS.keys()


# Joined here, so that this file does not break the convention.
DATED = "-".join(["2026", "11", "21", "ops"])
_LONG = "def long():\n" + "    pass\n" * 650

#: Files that break conventions: one of each kind.
PLANTED = {
    "README.md": "A line.\n" * 201,
    "collective_matmul/__init__.py": "__all__ = ['gather']",
    "collective_matmul/operands/values.py": "from collective_matmul import ops",
    "collective_matmul/ops/api.py": (
        "import jax\nfrom collective_matmul.operands import values\njax._src.core"
    ),
    "collective_matmul/ops/__init__.py": "from collective_matmul.ops import api",
    "collective_matmul/operands/__init__.py": "from collective_matmul.operands import values",
    "collective_matmul/ops/matmul/backend.py": "def backend(site: Any) -> dict[str, Any]: ...",
    "collective_matmul/dispatch/selection.py": 'if name in ("xla", "ring"): pass',
    "collective_matmul/layers/values.py": f"class PeerTwins:\n    '''Of peers.'''\n{_LONG}",
    "collective_matmul/rewrite/match/casts.py": "from collective_matmul.rewrite.replace import cut",
    "collective_matmul/rewrite/replace/cut.py": "",
    "train/run/loop.py": "from collective_matmul import gather, ops",
    "train/data/chat.py": "from train.run import loop",
    "models/loops.py": """
from jax.extend.core import jaxprs_in_params
equation.params["branches"], getattr(closed, "jaxpr", closed), equation.params.values()
""",
    "collective_matmul/jaxprs/bodies.py": 'equation.params["cond_jaxpr"]',
    "tests/test_report.py": f'open("{DATED}")',
    "docs/strips.md": "",
}


@pytest.mark.parametrize(
    ("check", "expected"),
    {
        "upward_imports": {"collective_matmul.ops"},
        "steps_back": {"collective_matmul.rewrite.replace.cut", "train.run.loop"},
        "import_cycles": {"collective_matmul.operands.values"},
        "private_imports": {"collective_matmul.ops"},
        "private_jax": {"jax._src"},
        "walks_over_nested_jaxprs": {
            "jaxprs_in_params",
            "branches",
            "jaxpr",
            "equation.params.values",
        },
        "compared_backend_names": {"xla", "ring"},
        "untyped_backends": {"site"},
        "long_functions": {"long"},
        "repeated_names": {"values"},
        "home_made_names": {"PeerTwins", "strips"},
        "docstring_openers": {"PeerTwins"},
        "reports_in_tests": {DATED},
        "sizes": {"README.md"},
    }.items(),
)
def test_planted_mistakes_are_found(check: str, expected: set[str], tmp_path: Path) -> None:
    for path, text in PLANTED.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    tree = SourceTree(tmp_path, REPOSITORY.folders)
    assert {finding.place.text for finding in CHECKS[check](tree)} == expected


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("PeerTwins", True),
        ("_twin_of", True),
        ("two_steps", True),
        ("in_two_shots", False),
        ("stripped", False),
        ("test_twins_are_found", True),
        ("test_messages_say_why", False),
        ("say", True),
    ],
)
def test_names_are_compared_by_words(name: str, is_refused: bool) -> None:
    assert (
        better_name(Place("collective_matmul/ops/matmul/api.py", 1, name)) is not None
    ) is is_refused
