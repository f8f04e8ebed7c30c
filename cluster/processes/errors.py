"""What ends `kvrelay serve` with a message."""

from __future__ import annotations


class ServeError(Exception):
    """Serving cannot begin, or cannot go on; one line for the user."""
