"""What the open specification of the responses API asks of a server, as JSON schemas.

Written from its facts (openresponses.org, as of 2026-04-24): which fields an object has, of which
types, and which events a stream may have.
"""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def having(_type: str | None = None, _optional: Schema | None = None, **fields: Schema) -> Schema:
    """An object with these fields; `_type`: what its field `type` says."""
    if _type is not None:
        fields["type"] = {"const": _type}
    properties = fields | (_optional or {})
    return {"type": "object", "required": list(fields), "properties": properties}


def listed(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


TOP_LOGPROB = having(token=STRING, logprob=NUMBER, bytes=listed(INTEGER))
LOGPROBS = listed(
    having(token=STRING, logprob=NUMBER, bytes=listed(INTEGER), top_logprobs=listed(TOP_LOGPROB))
)
PART: Schema = {
    "oneOf": [
        having("input_text", text=STRING),
        having("output_text", {"logprobs": LOGPROBS}, text=STRING, annotations=listed({})),
        having("text", text=STRING),
        having("summary_text", text=STRING),
        having("reasoning_text", text=STRING),
        having("refusal", refusal=STRING),
        having("input_image", image_url=nullable(STRING), detail=STRING),
        having("input_file"),
    ]
}
PHASE: Schema = {"phase": {"enum": ["commentary", "final_answer"]}}
ITEM: Schema = {
    "oneOf": [
        having(
            "message",
            PHASE,
            id=STRING,
            status=STATUS,
            role={"enum": ["user", "assistant", "system", "developer"]},
            content=listed(PART),
        ),
        having(
            "function_call", id=STRING, call_id=STRING, name=STRING, arguments=STRING, status=STATUS
        ),
        having(
            "function_call_output",
            id=STRING,
            call_id=STRING,
            output={"type": ["string", "array"]},
            status=STATUS,
        ),
        having(
            "reasoning",
            {"content": listed(PART), "encrypted_content": STRING},
            id=STRING,
            summary=listed(PART),
        ),
        having("compaction", id=STRING, encrypted_content=STRING),
    ]
}
TOOL = having(
    "function",
    name=STRING,
    description=nullable(STRING),
    parameters=nullable({"type": "object"}),
    strict=nullable(BOOLEAN),
)
USAGE = having(
    input_tokens=INTEGER,
    output_tokens=INTEGER,
    total_tokens=INTEGER,
    input_tokens_details=having(cached_tokens=INTEGER),
    output_tokens_details=having(reasoning_tokens=INTEGER),
)
RESPONSE = having(
    id=STRING,
    object={"const": "response"},
    created_at=INTEGER,
    completed_at=nullable(INTEGER),
    status=STRING,
    incomplete_details=nullable(having(reason=STRING)),
    model=STRING,
    previous_response_id=nullable(STRING),
    instructions=nullable(STRING),
    output=listed(ITEM),
    error=nullable(having(code=STRING, message=STRING)),
    tools=listed(TOOL),
    tool_choice={"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
    truncation={"enum": ["auto", "disabled"]},
    parallel_tool_calls=BOOLEAN,
    text=having(format=having(type={"enum": ["text", "json_object", "json_schema"]})),
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=INTEGER,
    temperature=NUMBER,
    reasoning=nullable(having(effort=nullable(STRING), summary=nullable(STRING))),
    user=nullable(STRING),
    usage=nullable(USAGE),
    max_output_tokens=nullable(INTEGER),
    max_tool_calls=nullable(INTEGER),
    store=BOOLEAN,
    background=BOOLEAN,
    service_tier=STRING,
    metadata={"type": "object"},
    safety_identifier=nullable(STRING),
    prompt_cache_key=nullable(STRING),
)
COMPACTED = having(
    id=STRING,
    object={"const": "response.compaction"},
    output=listed(ITEM),
    created_at=INTEGER,
    usage=USAGE,
)
_PLACE: dict[str, Schema] = {"item_id": STRING, "output_index": INTEGER, "content_index": INTEGER}


def _event(kind: str, _optional: Schema | None = None, **fields: Schema) -> Schema:
    return having(f"response.{kind}", _optional, sequence_number=INTEGER, **fields)


_OF_RESPONSES = ("created", "queued", "in_progress", "completed", "failed", "incomplete")
_CALL: dict[str, Schema] = {"item_id": STRING, "output_index": INTEGER}
EVENT: Schema = {
    "oneOf": [
        *(_event(kind, response=RESPONSE) for kind in _OF_RESPONSES),
        *(
            _event(f"output_item.{kind}", output_index=INTEGER, item=nullable(ITEM))
            for kind in ("added", "done")
        ),
        *(_event(f"content_part.{kind}", **_PLACE, part=PART) for kind in ("added", "done")),
        _event("output_text.delta", {"logprobs": LOGPROBS}, **_PLACE, delta=STRING),
        _event("output_text.done", {"logprobs": LOGPROBS}, **_PLACE, text=STRING),
        _event("function_call_arguments.delta", **_CALL, delta=STRING),
        _event("function_call_arguments.done", **_CALL, arguments=STRING),
    ]
}
ERROR_EVENT = having("error", error=having(code=nullable(STRING), message=STRING), status=INTEGER)


def check(schema: Schema, value: Any) -> None:
    errors = sorted(Draft202012Validator(schema).iter_errors(value), key=lambda e: len(e.path))
    assert not errors, [f"{error.json_path}: {error.message:.300}" for error in errors[:3]]
