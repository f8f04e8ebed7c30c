"""Where a command writes its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

STDOUT = "-"


def write_json(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes them into a file, or to the standard output."""
    text = json.dumps(figures, indent=2) + "\n"
    if str(path) == STDOUT:
        click.echo(text, nl=False)
    else:
        path.write_text(text)
