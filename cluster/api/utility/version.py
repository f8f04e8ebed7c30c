"""The version that is installed, read once: when files run out, it can still be told."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("kvrelay")
