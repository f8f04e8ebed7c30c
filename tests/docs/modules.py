"""`python -m tests.docs.modules`: each module with the first sentence of its docstring."""

from __future__ import annotations

import ast
import textwrap
from itertools import groupby
from pathlib import Path

from tests.structure import PACKAGES, ROOT

WIDTH = 100


def first_sentence(path: Path) -> str:
    """Reads the module's docstring, on one line and without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:")


def wing(path: Path) -> str:
    """Names the package and the first folder below it: `router/admission`, or `router` alone."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:2])


def module_list() -> str:
    """Markdown: a heading for each wing, then one item for each module that is not empty."""
    parts = []
    for package in PACKAGES:
        paths = sorted((ROOT / package).rglob("*.py"), key=lambda path: (wing(path), path))
        for name, members in groupby(paths, key=wing):
            parts.append(f"### {name}\n\n" + "\n".join(filter(None, map(_item, members))))
    return "\n\n".join(parts)


def _item(path: Path) -> str:
    module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    is_package = path.name == "__init__.py"
    module = module.removesuffix(".__init__")
    sentence = first_sentence(path)
    if is_package and not sentence:
        return ""
    return textwrap.fill(
        f"* `{module}`: {sentence}.",
        WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def between_marks(page: str, name: str, text: str) -> str:
    """`page` with `text` between its two marks of that name."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    print(module_list())
