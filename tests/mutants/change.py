"""A module's mutants, and how functions that are imported already get the code of one.

A mutant changes one operator, constant, condition or call within a function. Types, texts, and
checks of our own bugs have none, since no test could see the change.
"""

from __future__ import annotations

import ast
import builtins
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

ROOT = Path(__file__).resolve().parents[2]
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
UNCHANGED = (ast.Assert, ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr)
TYPES = ("annotation", "returns", "decorator_list")
REPORT = "_ran"  # a builtin, while it is reported which statements run


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of the module at `path`, counted by `number`, in the statement at that line."""

    path: str  # from the root
    number: int
    line: int
    statement: int
    change: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.change}"


def mutants(path: str) -> list[Mutant]:
    tree = ast.parse((ROOT / path).read_text())
    return [
        Mutant(path, number, getattr(node, "lineno", 0), statement, change)
        for number, (node, statement, change) in enumerate(_changes(tree))
    ]


def mutated(mutant: Mutant) -> ast.Module:
    tree = ast.parse((ROOT / mutant.path).read_text())
    for number, _ in enumerate(_changes(tree)):
        if number == mutant.number:
            return ast.fix_missing_locations(tree)
    raise ValueError(f"{mutant.path} has no mutant {mutant.number}")


def _changes(tree: ast.Module) -> Iterator[tuple[ast.AST, int, str]]:
    """Each node that has a mutant, its statement's line, and the change. The change is in `tree`
    until the next one is asked for."""
    for node, statement in list(_nodes(tree)):
        before = _first_line(node)
        for field, value in _values(node):
            kept = getattr(node, field)
            setattr(node, field, value)
            yield node, statement, f"{before} -> {_first_line(node)}"
            setattr(node, field, kept)


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0]


def _nodes(node: ast.AST) -> Iterator[tuple[ast.AST, int]]:
    """What is within functions: other lines of classes and modules are fields and constants."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in child.body:
                yield from _within(statement, statement.lineno)
        elif isinstance(child, ast.ClassDef):
            yield from _nodes(child)


def _within(node: ast.AST, statement: int) -> Iterator[tuple[ast.AST, int]]:
    if isinstance(node, UNCHANGED):
        return
    yield node, statement
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in TYPES:
                at = child.lineno if isinstance(child, ast.stmt) else statement
                yield from _within(child, at)


def _values(node: ast.AST) -> Iterator[tuple[str, object]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            yield "ops", [SWAPPED[type(op)]()]
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in SWAPPED:
            yield "op", SWAPPED[type(op)]()
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "test", ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
        case ast.Constant(value=bool(value)):
            yield "value", not value
        case ast.Constant(value=int(value)) | ast.Constant(value=float(value)):
            yield "value", value + 1
        case ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
            yield "id", NAMES[name]
        case ast.Expr(value=ast.Call()):
            yield "value", ast.copy_location(ast.Constant(None), node)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "value", ast.copy_location(ast.Constant(None), node)


def report_statements(path: str, report: Callable[[str, int], None]) -> None:
    """From now on each statement of the module's functions reports the path and its line."""
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        if not isinstance(node, (ast.ClassDef, ast.Module)):
            for field in ("body", "orelse", "finalbody"):
                if isinstance(block := getattr(node, field, None), list):
                    setattr(node, field, [each for kept in block for each in _reported(path, kept)])
    setattr(builtins, REPORT, report)
    replace(path, ast.fix_missing_locations(tree))


def _reported(path: str, statement: ast.stmt) -> Iterator[ast.stmt]:
    if not isinstance(statement, (ast.Nonlocal, ast.Global)):
        args: list[ast.expr] = [ast.Constant(path), ast.Constant(statement.lineno)]
        call = ast.Expr(ast.Call(ast.Name(REPORT, ast.Load()), args, []))
        yield ast.copy_location(call, statement)
    yield statement


def replace(path: str, tree: ast.Module) -> None:
    """Give imported functions of the module the code that `tree` has for them.

    Raises ValueError where one cannot take it, since it would close over other names.
    """
    file = str(ROOT / "kvrelay" / path)
    codes = {(c.co_qualname, c.co_firstlineno): c for c in _codes(compile(tree, file, "exec"))}
    gc.unfreeze()
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename == file:
            code = codes.get((each.__code__.co_qualname, each.__code__.co_firstlineno))
            each.__code__ = code or each.__code__


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)
