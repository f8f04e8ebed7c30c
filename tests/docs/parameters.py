"""The tables of parameters in docs/api.md, made from the models of requests and their lists.

`python -m tests.docs.parameters` rewrites what stands between the two `parameters` marks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.cluster.api.peer_fields import ENDPOINTS, Endpoint
from tests.docs.modules import between_marks
from tests.structure import ROOT

PAGE = ROOT / "docs/api.md"
COLUMNS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text",
    "/v1/embeddings": "embed",
    "/v1/score": "score",
    "/v1/rerank": "rank",
    "/v1/responses": "resp",
    "/v1/messages": "msg",
    "/tokenize": "token",
}


def tables() -> str:
    shown = [each for each in ENDPOINTS if each.path in COLUMNS]
    heads = [f"`{path}` {column}" for path, column in COLUMNS.items()]
    known = sorted({name for each in shown for name in each.obeyed})
    rows = [[f"`{name}`", *("x" if name in e.obeyed else "" for e in shown)] for name in known]
    parts = [
        f"Columns: {', '.join(heads[:3])},\n{', '.join(heads[3:6])},\n{', '.join(heads[6:])}.",
        "### Obeyed\n\n" + table(["field", *COLUMNS.values()], rows),
        "### Refused by name\n\n" + _reasons(shown, _refused),
        "### Harmless\n\n" + _reasons(shown, lambda each: each.fields.harmless),
    ]
    return "\n\n".join(parts)


def _refused(endpoint: Endpoint) -> Mapping[str, str]:
    """Why, and which values are let through."""
    found = {}
    for name, refused in endpoint.fields.refused.items():
        but = ", ".join(str(value).lower() for value in refused.but)
        found[name] = f"{refused.why} (allowed: {but})" if but else refused.why
    return found


def _reasons(shown: list[Endpoint], listed: Callable[[Endpoint], Mapping[str, str]]) -> str:
    """A row for each field and reason, with the endpoints that it is for."""
    places: dict[tuple[str, str], list[str]] = {}
    for endpoint in shown:
        for name, why in listed(endpoint).items():
            places.setdefault((name, why), []).append(COLUMNS[endpoint.path])
    rows = [[f"`{name}`", ", ".join(where), why] for (name, why), where in sorted(places.items())]
    return table(["field", "where", "why"], rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Writes it as Markdown does."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_parameters(page: str) -> str:
    return between_marks(page, "parameters", tables())


if __name__ == "__main__":
    PAGE.write_text(with_parameters(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
