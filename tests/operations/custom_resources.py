"""What the chart may write into custom resources: their fields as JSON schemas, which know only
what the chart uses and refuse all else. Pod templates in them are checked as pods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]


def _object(required: str = "", **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
ANY: Schema = {"type": "object"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
SECRET_KEY = _object("name key", name=TEXT, key=TEXT)

RAY_CLUSTER = _object(
    "rayVersion headGroupSpec workerGroupSpecs",
    rayVersion=TEXT,
    authOptions=_object(mode={"enum": ["disabled", "token"]}, secretName=TEXT),
    gcsFaultToleranceOptions=_object(
        redisAddress=TEXT, redisPassword=_object(valueFrom=_object(secretKeyRef=SECRET_KEY))
    ),
    enableInTreeAutoscaling=BOOLEAN,
    autoscalerOptions=_object(
        version={"enum": ["v1", "v2"]},
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        idleTimeoutSeconds=NUMBER,
        resources=ANY,
        securityContext=ANY,
    ),
    headGroupSpec=_object("rayStartParams template", rayStartParams=TEXTS, template=ANY),
    workerGroupSpecs=_list(
        _object(
            "groupName replicas minReplicas maxReplicas rayStartParams template",
            groupName=TEXT,
            replicas=NUMBER,
            minReplicas=NUMBER,
            maxReplicas=NUMBER,
            rayStartParams=TEXTS,
            template=ANY,
        )
    ),
)
POD_MONITOR = _object(
    "selector podMetricsEndpoints",
    selector=_object("matchLabels", matchLabels=TEXTS),
    podMetricsEndpoints=_list(
        _object(
            "port path",
            port=TEXT,
            path=TEXT,
            scheme={"enum": ["http", "https"]},
            tlsConfig=_object(insecureSkipVerify=BOOLEAN),
            interval=TEXT,
            authorization=_object(credentials=SECRET_KEY),
            relabelings=_list(_object(action=TEXT, targetLabel=TEXT, replacement=TEXT)),
        )
    ),
)
_RULE = _object("alert expr", alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS)
_RULE["properties"]["for"] = TEXT
PROMETHEUS_RULE = _object(
    "groups", groups=_list(_object("name rules", name=TEXT, interval=TEXT, rules=_list(_RULE)))
)
SPECS = {
    "ray.io/v1 RayCluster": RAY_CLUSTER,
    "monitoring.coreos.com/v1 PodMonitor": POD_MONITOR,
    "monitoring.coreos.com/v1 PrometheusRule": PROMETHEUS_RULE,
}


def pods_of(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pods that a document describes, as pods."""
    spec = document.get("spec", {})
    templates = [spec["template"]] if "template" in spec else []
    templates += [spec["headGroupSpec"]["template"]] if "headGroupSpec" in spec else []
    templates += [group["template"] for group in spec.get("workerGroupSpecs", [])]
    for template in templates:
        metadata = {"name": document["metadata"]["name"], **template["metadata"]}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
