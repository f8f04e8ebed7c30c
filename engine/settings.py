"""What all tables of settings share: their base class, common types, and errors in a user's words.

What msgspec says of a table becomes a line with the key, its value, and what would be right.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from msgspec import Meta, Struct, ValidationError
from msgspec.structs import fields

_EXPECTED = {"int": "a whole number", "float": "a number", "str": "a text"}
_EXPECTED |= {"bool": "true or false", "array": "a list of texts"}
_EXPECTED |= {">=": "at least", ">": "more than", "<=": "at most", "<": "less than"}


Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0.0)]
Timeout = Annotated[float, Meta(ge=0.1)]  # seconds


def matching(pattern: str, expected: str = "", secret: bool = False) -> Meta:
    """A text that matches `pattern` as a whole; errors do not show the value of a secret."""
    return Meta(pattern=rf"^(?:{pattern})\Z", extra={"expected": expected, "secret": secret})


# Numbers that nobody has had a reason to set: constants, which the simulator and tests vary.
FIXED = Meta(extra={"fixed": True})
FixedInt = Annotated[int, FIXED]
FixedFloat = Annotated[float, FIXED]


def settings_of(kind: type[Struct]) -> list[str]:
    """The names of what a file may set of a table."""
    return [each.name for each in fields(kind) if FIXED not in get_args(each.type)]


def check_settings(table: Mapping[str, Any], kind: type[Struct], where: str) -> None:
    """Raises ValidationError, as msgspec words it, for a name in `table` that no file may set, or a
    number that is not finite. `where`: of the table, as "$.router"."""
    for key, value in table.items():
        if key not in settings_of(kind):
            raise ValidationError(f"Object contains unknown field `{key}` - at `{where}`")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValidationError(f"Not finite - at `{where}.{key}`")


OPERATIONS_KEY_FILE = "operations.key"  # in the state directory, where one was made


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file. The first sentence of its docstring is the table's comment there."""


class ConfigError(Exception):
    """One line for the user: key, value, and what would be right."""


def state_folder(state_dir: str = "") -> Path:
    """The directory for what has to be there again after a restart, and is not KV, on this
    machine; "": kvrelay in the user's state directory."""
    if state_dir:
        return Path(state_dir).expanduser()
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "kvrelay"


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError if it is no TOML."""
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def explain_error(error: str, tables: Any, root: type[Struct]) -> str:
    """msgspec's `error` about `tables`, which were to become a `root`. Values that their `Meta`
    calls secret, and those of entries of a list of tables, are not shown."""
    complaint, _, path = error.partition(" - at `$")
    kind: Any = root
    value, name, entry = tables, "", None
    for part in re.findall(r"\w+", path):
        if not part.isdigit():
            kind = next(each.type for each in fields(kind) if each.name == part)
            value, name, entry = value[part], f"{name}.{part}".lstrip("."), _entry_of(kind)
        elif entry is not None:
            kind, value, name = entry, value[int(part)], f"{name} {int(part) + 1}"
    said, _, key = complaint.rstrip("`").partition(" field `")
    if said == "Object contains unknown":
        return f"{name}.{key}".lstrip(".") + f" is not a setting; {_suggestion(key, kind)}"
    if said == "Object missing required":
        return f"{name}.{key} is missing"
    if entry is not None and kind is not entry:
        return f"{name}: expected tables, each beginning with [[{name}]]"
    meta = next((m.extra for m in get_args(kind) if isinstance(m, Meta) and m.extra), {})
    if isinstance(value, float) and not math.isfinite(value):
        expected = "a finite number"
    elif complaint.startswith("Expected `object`"):
        expected = f"a table, [{name}]"
    elif complaint.startswith("Invalid enum"):
        choices = ", ".join(each for each in _flat(kind) if isinstance(each, str))
        expected = f"a number or {choices}" if float in _flat(kind) else f"one of {choices}"
    elif " matching regex " in complaint:
        expected = meta["expected"]
    elif bound := re.fullmatch(r"Expected `\w+` ([<>]=?) (.+)", complaint):
        expected = f"{_EXPECTED[bound[1]]} {bound[2]}"
    elif wrong := re.fullmatch(r"Expected `(\w+)[^`]*`, got .*", complaint):
        is_entry = isinstance(value, list) and "got `array`" not in complaint
        expected = _EXPECTED["array" if is_entry else wrong[1]]
    else:
        return complaint  # the section's own
    shown = "..." if entry is not None or meta.get("secret") else repr(value)
    return f"{name} = {shown}: expected {expected}"


def _entry_of(kind: Any) -> type[Struct] | None:
    """What each table of a list of tables is."""
    structs = (each for each in get_args(kind) if isinstance(each, type))
    return next((each for each in structs if issubclass(each, Struct)), None)


def _flat(kind: Any) -> list[Any]:
    """What a type is made of: literals, and types without arguments."""
    return [part for each in get_args(kind) for part in _flat(each)] or [kind]


def _suggestion(key: str, kind: type[Struct]) -> str:
    known = sorted(settings_of(kind))
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
