"""What the chart may write into custom resources: their fields as JSON schemas, which know only
what the chart uses and refuse all else. Pod templates in them are checked as pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
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
BOOLEAN: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
SECRET_KEY = _object("name key", name=TEXT, key=TEXT)

# From the CRD of KubeRay 1.7.0 (helm-chart/kuberay-operator/crds), without descriptions; templates,
# which are checked as pods, and what the chart has nothing of are objects of any kind.
RAY_CLUSTER: Schema = json.loads((Path(__file__).parent / "raycluster-v1.json").read_text())
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
NUMBER: Schema = {"type": "integer"}
# From the standard channel of the Gateway API 1.3 and its Inference Extension 1.0, and KEDA 2.17.
HTTP_ROUTE = _object(
    "parentRefs rules",
    parentRefs=_list(_object("name", name=TEXT, namespace=TEXT, sectionName=TEXT)),
    hostnames=_list(TEXT),
    rules=_list(
        _object(
            "backendRefs",
            timeouts=_object(
                request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
            ),
            backendRefs=_list(_object("name port", name=TEXT, port=NUMBER)),
        )
    ),
)
INFERENCE_POOL = _object(
    "selector targetPorts endpointPickerRef",
    selector=_object("matchLabels", matchLabels=TEXTS),
    targetPorts=_list(_object("number", number=NUMBER)) | {"minItems": 1, "maxItems": 8},
    endpointPickerRef=_object(
        "name port",
        name=TEXT,
        port=_object("number", number=NUMBER),
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)
SCALED_OBJECT = _object(
    "scaleTargetRef triggers",
    scaleTargetRef=_object("name", name=TEXT),
    minReplicaCount=NUMBER,
    maxReplicaCount=NUMBER,
    triggers=_list(
        _object("type metadata", type=TEXT, metricType={"enum": ["AverageValue"]}, metadata=TEXTS)
    ),
)
SPECS = {
    "gateway.networking.k8s.io/v1 HTTPRoute": HTTP_ROUTE,
    "inference.networking.k8s.io/v1 InferencePool": INFERENCE_POOL,
    "keda.sh/v1alpha1 ScaledObject": SCALED_OBJECT,
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
