"""Pages of lists, as OpenAI's calls ask for them and are answered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple


class PageQuery(NamedTuple):
    """What a call wants of a list, as OpenAI's calls say it."""

    is_asc: bool
    after: str | None  # the id of the entry before the first
    limit: int


def list_of(page: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page as it is answered."""
    first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    about = {"has_more": has_more, "first_id": first_id, "last_id": last_id}
    return {"object": "list", "data": page, **about}


def list_body(entries: Sequence[tuple[str, bytes]], has_more: bool) -> bytes:
    """Makes JSON of a page, of entries that are JSON already. entries: of each its id, and all."""
    ends = (entries[0][0], entries[-1][0]) if entries else (None, None)
    about = {"has_more": has_more, "first_id": ends[0], "last_id": ends[1]}
    data = b",".join(entry for _, entry in entries)
    return b'{"object":"list","data":[' + data + b"]," + json.dumps(about).encode()[1:]
