"""The Python files of a repository, parsed: what they import, define and compare."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_COMPARING_METHODS = ("startswith", "endswith", "removeprefix", "get", "pop")
#: Parameters of JAX's calls, loops and branches that hold jaxprs.
_JAXPR_PARAMETERS = ("jaxpr", "call_jaxpr", "cond_jaxpr", "body_jaxpr", "branches")
_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """A name, or a text, at a line of a file."""

    path: str
    line: int
    text: str


class Module:
    """One file."""

    def __init__(self, path: str, text: str):
        self.path = path
        parts = Path(path).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.lines = len(text.splitlines())
        self.nodes = tuple(ast.walk(ast.parse(text, path)))

    def imports(self, known: frozenset[str]) -> Iterator[Place]:
        """The known modules that it imports, also inside functions.

        ``from package import name`` counts as ``package.name`` where that is a module.
        """
        for node in self.nodes:
            if isinstance(node, ast.Import):
                candidates = [(alias.name,) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: a relative import"
                source = node.module or ""
                candidates = [(f"{source}.{alias.name}", source) for alias in node.names]
            else:
                continue
            for names in candidates:
                if found := [name for name in names if name in known]:
                    yield Place(self.path, node.lineno, found[0])

    def private_jax(self) -> Iterator[Place]:
        """Uses of ``jax._src``."""
        for node in self.nodes:
            match node:
                case ast.Import(names=aliases, lineno=line):
                    names = [alias.name for alias in aliases]
                case ast.ImportFrom(module=str(source), names=aliases, lineno=line):
                    names = [f"{source}.{alias.name}" for alias in aliases]
                case ast.Attribute(attr="_src", lineno=line):
                    names = [ast.unparse(node)]
                case _:
                    continue
            yield from (
                Place(self.path, line, name) for name in names if f"{name}.".startswith("jax._src.")
            )

    def identifiers(self) -> Iterator[Place]:
        """Its own name and its folder's, and every name that it defines."""
        path = Path(self.path)
        names = [path.parent.name, *([] if path.stem == "__init__" else [path.name])]
        yield from (Place(self.path, 1, name) for name in names)
        for node in self.nodes:
            match node:
                case (
                    ast.FunctionDef(name=name, lineno=line)
                    | ast.AsyncFunctionDef(name=name, lineno=line)
                    | ast.ClassDef(name=name, lineno=line)
                    | ast.arg(arg=name, lineno=line)
                    | ast.Name(id=name, ctx=ast.Store(), lineno=line)
                    | ast.Attribute(attr=name, ctx=ast.Store(), lineno=line)
                    | ast.alias(asname=str(name), lineno=line)
                ):
                    yield Place(self.path, line, name)

    def classes(self) -> Iterator[Place]:
        """Every class."""
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                yield Place(self.path, node.lineno, node.name)

    def functions(self) -> Iterator[tuple[Place, int]]:
        """Every function with its number of lines, without those of its docstring."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = node.body[:1] if ast.get_docstring(node) else []
                lines = _lines(node) - sum(map(_lines, docstring))
                yield Place(self.path, node.lineno, node.name), lines

    def docstrings(self) -> Iterator[tuple[Place, str]]:
        """Every definition with a docstring, and the module itself if it has one."""
        for node in self.nodes:
            if isinstance(node, _Definition) and (text := ast.get_docstring(node)):
                name = self.name if isinstance(node, ast.Module) else node.name
                yield Place(self.path, node.body[0].lineno, name), text

    def strings(self) -> Iterator[Place]:
        """Every string literal."""
        for node in self.nodes:
            yield from self._strings(node) if isinstance(node, ast.Constant) else ()

    def compared_strings(self) -> Iterator[Place]:
        """String literals that are compared with something, or used to look something up."""
        for node in self.nodes:
            match node:
                case ast.Compare(left=left, comparators=comparators):
                    parts = [left, *comparators]
                case ast.MatchValue(value=value):
                    parts = [value]
                case ast.Subscript(slice=ast.Constant() as value):
                    parts = [value]
                case ast.Call(func=ast.Attribute(attr=method), args=arguments):
                    parts = arguments if method in _COMPARING_METHODS else []
                case _:
                    continue
            for part in parts:
                yield from self._strings(part)

    def nested_jaxprs(self) -> Iterator[Place]:
        """Uses of the jaxprs in the parameters of an equation."""
        for node in self.nodes:
            match node:
                case ast.alias(name="jaxprs_in_params" as name, lineno=line):
                    yield Place(self.path, line, name)
                case ast.Attribute(attr="jaxprs_in_params" as name, lineno=line):
                    yield Place(self.path, line, name)
                case ast.Constant(value=str(name), lineno=line) if name in _JAXPR_PARAMETERS:
                    yield Place(self.path, line, name)
                case ast.Attribute(attr="values", value=ast.Attribute(attr="params"), lineno=line):
                    yield Place(self.path, line, ast.unparse(node))

    def annotations(self) -> Iterator[tuple[Place, ast.expr]]:
        """Names with their annotations; a return annotation counts for the function's name."""
        for node in self.nodes:
            match node:
                case ast.arg(arg=name, annotation=ast.expr() as annotation):
                    pass
                case ast.FunctionDef(name=name, returns=ast.expr() as annotation):
                    pass
                case ast.AnnAssign(target=target, annotation=annotation):
                    name = ast.unparse(target)
                case _:
                    continue
            yield Place(self.path, annotation.lineno, name), annotation

    def assigned(self, name: str) -> object:
        """The value of a literal assigned to a name of the module."""
        for node in self.nodes:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return ast.literal_eval(node.value)
        raise LookupError(f"{self.path}: no {name}")

    def _strings(self, node: ast.AST) -> Iterator[Place]:
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield Place(self.path, part.lineno, part.value)


class SourceTree:
    """The files below some folders of a repository."""

    def __init__(self, root: Path, folders: tuple[str, ...]):
        self.root = root
        self.folders = folders

    @functools.cached_property
    def modules(self) -> tuple[Module, ...]:
        """All Python files, ordered by path."""
        paths = [path for path in self._paths() if path.endswith(".py")]
        return tuple(Module(p, (self.root / p).read_text(encoding="utf-8")) for p in paths)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names of all modules."""
        return frozenset(module.name for module in self.modules)

    def below(self, *folders: str) -> tuple[Module, ...]:
        """The modules below some of the folders."""
        return tuple(m for m in self.modules if m.path.split("/")[0] in folders)

    def other_files(self) -> list[str]:
        """All files that are not Python."""
        return [path for path in self._paths() if not path.endswith(".py")]

    def _paths(self) -> list[str]:
        files = [f for folder in self.folders for f in sorted((self.root / folder).rglob("*"))]
        paths = [f.relative_to(self.root).as_posix() for f in files if f.is_file()]
        return [path for path in paths if "__pycache__" not in path]


@functools.cache
def words(name: str) -> tuple[str, ...]:
    """`"_PeerBuffers2"` -> `("peer", "buffer", "2")`: split, in lower case, without plurals."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name.removesuffix(".py"))
    return tuple(part.lower().removesuffix("s") for part in parts)


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
