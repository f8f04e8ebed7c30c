"""Where a process imports from: the folder of its own version, whatever the link to it does later.

An upgrade moves the link that leads to the installation, and goes on for minutes. What runs
meanwhile is of the version before, and so has to be all that it imports late or starts.
"""

from __future__ import annotations

import os
import sys

PYTHON_PATH = "PYTHONPATH"
GIVEN_PATH = os.environ.get(PYTHON_PATH, "")  # with its links: a restart follows them anew


def pin_installation() -> None:
    """Follow the links that lead to what this process imports from, and to the interpreter of its
    children. Call it before others can move them; links inside the folders stay."""
    followed = {each: real for each in sys.path if (real := _followed(each)) != each}
    for module in list(sys.modules.values()):
        path = getattr(module, "__dict__", {}).get("__path__")
        if isinstance(path, list):  # a namespace's follows `sys.path` by itself
            path[:] = [_below(each, followed) for each in path]
    sys.path[:] = [followed.get(each, each) for each in sys.path]
    sys.executable = interpreter(sys.executable)
    if given := os.environ.get(PYTHON_PATH):
        os.environ[PYTHON_PATH] = os.pathsep.join(map(_followed, given.split(os.pathsep)))


def interpreter(path: str) -> str:
    """Where its folder is; in a virtual environment it is itself a link out of that."""
    folder, name = os.path.split(path)
    return os.path.join(_followed(folder), name)


def _followed(path: str) -> str:
    """A word that is no absolute path is left: it may be a hook's, or the current folder."""
    return os.path.realpath(path) if os.path.isabs(path) else path


def _below(path: str, followed: dict[str, str]) -> str:
    """The folder of a package, by the entry of `sys.path` that it was found in."""
    for entry, real in followed.items():
        if path.startswith(f"{entry}{os.sep}"):
            return real + path[len(entry) :]
    return path
