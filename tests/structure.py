"""The structure of the product's code, read from its imports: files, layers and cycles.

`python -m tests.structure [ROOT]` prints a table; `test_tidy` holds the limits. A module's layer in
its package is 1 if it imports no other module of it, else one more than the highest it imports.
Layers count what is imported when the module is. Cycles count imports inside functions and for type
checkers too: those are there to start quickly, and would hide a cycle.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "engine",
    "kvtransfer",
    "worker",
    "prefill_worker",
    "decode_worker",
    "router",
    "cluster",
    "lab",
    "training",
)


@dataclass(frozen=True)
class Structure:
    """Holds what the packages below `root` import."""

    root: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        """Dotted module name -> file."""
        found = {}
        for package in PACKAGES:
            for path in sorted((self.root / package).rglob("*.py")):
                parts = path.relative_to(self.root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> modules of the product that it names in an import."""
        return {m: self._named(ast.walk(self._parsed(m))) - {m} for m in self.files}

    @cached_property
    def imports_first(self) -> dict[str, set[str]]:
        """Module -> modules of the product that it imports when it is imported itself."""
        return {m: self._named(_at_once(self._parsed(m).body)) - {m} for m in self.files}

    def _parsed(self, module: str) -> ast.Module:
        return ast.parse(self.files[module].read_text(encoding="utf-8"))

    def _named(self, nodes: Iterable[ast.AST]) -> set[str]:
        found = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name.removeprefix("kvrelay.") for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                module = node.module.removeprefix("kvrelay.")
                for alias in node.names:
                    whole = f"{module}.{alias.name}"
                    found.add(whole if whole in self.files else module)
        return found & self.files.keys()

    def cycles(self) -> list[list[str]]:
        """Groups of modules that import each other, each sorted; the members of one cannot be
        understood one after the other."""
        reached = {module: self._reached(module) for module in self.files}
        groups = {
            tuple(sorted(m for m in reached[module] if module in reached[m]))
            for module in self.files
            if module in reached[module]
        }
        return [list(group) for group in sorted(groups)]

    def _reached(self, module: str) -> set[str]:
        seen: set[str] = set()
        todo = [module]
        while todo:
            new = self.imports[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    def layers(self, package: str) -> dict[str, int]:
        """Module of `package` -> its layer. There must be no cycle."""
        known: dict[str, int] = {}

        def layer(module: str) -> int:
            if module not in known:
                below = [m for m in self.imports_first[module] if m.split(".")[0] == package]
                known[module] = 1 + max(map(layer, below), default=0)
            return known[module]

        for module in self.files:
            if module.split(".")[0] == package:
                layer(module)
        return known

    def folders(self) -> Counter[str]:
        """Folder, relative to the root -> Python files directly in it."""
        return Counter(p.parent.relative_to(self.root).as_posix() for p in self.files.values())


def _at_once(body: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    """Statements that run when the module is imported, but for those of type checkers."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            if "TYPE_CHECKING" not in ast.unparse(getattr(node, "test", ast.Constant(0))):
                yield from _at_once([*node.body, *node.orelse])
        else:
            yield node


def main() -> None:
    structure = Structure(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    cycles = structure.cycles()
    for cycle in cycles:
        print("cycle:", ", ".join(cycle))
    print(f"{'package':<16}{'files':>6}{'lines':>8}{'layers':>8}{'in its largest folder':>24}")
    for package in PACKAGES:
        files = [p for m, p in structure.files.items() if m.split(".")[0] == package]
        if not files:
            continue
        lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
        is_cyclic = any(m.split(".")[0] == package for cycle in cycles for m in cycle)
        layers = "cycle" if is_cyclic else str(max(structure.layers(package).values()))
        folders = structure.folders()
        largest = max(n for f, n in folders.items() if f.split("/")[0] == package)
        print(f"{package:<16}{len(files):>6}{lines:>8}{layers:>8}{largest:>24}")


if __name__ == "__main__":
    main()
