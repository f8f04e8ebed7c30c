"""A RayCluster's pods, as KubeRay makes them from its templates (read from its release 1.7)."""

from __future__ import annotations

import copy
from typing import Any

Spec = dict[str, Any]
GCS_PORT, AGENT_PORT, METRICS_PORT = 6379, 52365, 8080
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
WAIT = """
SECONDS=0
while true; do
  if ray health-check --address {0} > /dev/null 2>&1; then echo "GCS is ready."; break; fi
  echo "$SECONDS seconds elapsed: Waiting for GCS to be ready."
  sleep 5
done
"""


def pod_template(cluster: Spec, group: Spec | None, namespace: str) -> Spec:
    """What KubeRay makes of a worker group, or (None) of the head."""
    name, spec = cluster["metadata"]["name"], cluster["spec"]
    template: Spec = copy.deepcopy((group or spec["headGroupSpec"])["template"])
    params = dict((group or spec["headGroupSpec"])["rayStartParams"])
    group_name = group["groupName"] if group else "headgroup"
    template["metadata"]["labels"] |= {
        "ray.io/cluster": name,
        "ray.io/node-type": "worker" if group else "head",
        "ray.io/group": group_name,
    }
    pod, main = template["spec"], template["spec"]["containers"][0]
    head = f"{name}-head-svc.{namespace}.svc.cluster.local"
    env: list[Spec] = main.setdefault("env", [])
    token = _token_env(spec)
    if group:
        pod.setdefault("initContainers", []).append(_wait_for_gcs(main, head, token))
        params.setdefault("address", f"{head}:{GCS_PORT}")
        _add(env, FQ_RAY_IP=head, RAY_IP=f"{name}-head-svc")
    elif spec.get("enableInTreeAutoscaling"):
        params["no-monitor"] = "true"
    if storage := spec.get("gcsFaultToleranceOptions"):
        if group:
            _add(env, RAY_gcs_rpc_server_reconnect_timeout_s="600")
        else:
            params["redis-password"] = "$REDIS_PASSWORD"
            _add(env, RAY_external_storage_namespace=f"uid-of-{name}")
            _add(env, RAY_REDIS_ADDRESS=storage["redisAddress"])
            env.append({"name": "REDIS_PASSWORD", **storage["redisPassword"]})
    if spec.get("enableInTreeAutoscaling") and spec["autoscalerOptions"]["version"] == "v2":
        pod["restartPolicy"] = "Never"
        if not group:
            _add(env, RAY_enable_autoscaler_v2="true")
    env += token
    params.setdefault("metrics-export-port", str(METRICS_PORT))
    params |= {"block": "true"}
    params.setdefault("dashboard-agent-listen-port", str(AGENT_PORT))
    start = f"ray start {'' if group else '--head '}{_flags(params, main['resources'])}"
    main["command"] = ["/bin/bash", "-c", "--"]
    main["args"] = [f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {start}"]
    for variable, path in (
        ("RAY_CLUSTER_NAME", "metadata.labels['ray.io/cluster']"),
        ("RAY_CLUSTER_NAMESPACE", "metadata.namespace"),
        ("RAY_CLOUD_INSTANCE_ID", "metadata.name"),
        ("RAY_NODE_TYPE_NAME", "metadata.labels['ray.io/group']"),
    ):
        env.append({"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    address = f"{head if group else '127.0.0.1'}:{GCS_PORT}"
    _add(env, KUBERAY_GEN_RAY_START_CMD=start, RAY_PORT=str(GCS_PORT), RAY_ADDRESS=address)
    _add(env, RAY_USAGE_STATS_KUBERAY_IN_USE="1")
    # Since Ray 2.53 the agent of each node answers for all of it.
    probe = {"httpGet": {"path": "/api/healthz", "port": AGENT_PORT}, "periodSeconds": 5}
    probe["timeoutSeconds"] = 2 if group else 5
    main["livenessProbe"] = probe | {"initialDelaySeconds": 30, "failureThreshold": 120}
    main["readinessProbe"] = probe | {"initialDelaySeconds": 10, "failureThreshold": 10}
    return template


def head_service(cluster: Spec) -> Spec:
    """Without an address of its own: its name is the head's, ready or not."""
    name = cluster["metadata"]["name"]
    selector = {"ray.io/cluster": name, "ray.io/node-type": "head"}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return {"metadata": {"name": f"{name}-head-svc"}, "spec": spec | {"ports": []}}


def _add(env: list[Spec], **variables: str) -> None:
    there = {each["name"] for each in env}
    env += [{"name": k, "value": v} for k, v in variables.items() if k not in there]


def _token_env(spec: Spec) -> list[Spec]:
    options = spec.get("authOptions", {})
    if options.get("mode") != "token":
        return []
    key = {"name": options["secretName"], "key": "auth_token"}
    secret = {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": key}}
    return [{"name": "RAY_AUTH_MODE", "value": "token"}, secret]


def _wait_for_gcs(main: Spec, head: str, token: list[Spec]) -> Spec:
    return {
        "name": "wait-gcs-ready",
        "command": ["/bin/bash", "-c", "--"],
        "args": [WAIT.format(f"{head}:{GCS_PORT}")],
        "env": copy.deepcopy(main["env"]) + token,
        "securityContext": main["securityContext"],
        "volumeMounts": main["volumeMounts"],
    }


def _flags(params: dict[str, str], resources: Spec) -> str:
    limits = resources.get("limits", {})
    cpus = limits.get("cpu", resources.get("requests", {}).get("cpu"))
    if cpus is not None:
        whole = -(-int(cpus[:-1]) // 1000) if str(cpus).endswith("m") else int(cpus)
        params.setdefault("num-cpus", str(whole))
    if memory := limits.get("memory"):
        params.setdefault("memory", str(int(memory[:-2]) * UNITS[memory[-2:]]))
    for resource, count in limits.items():
        if resource.endswith("/gpu"):
            params.setdefault("num-gpus", str(count))
    flags = [f"--{k}" if v == "true" else f"--{k}={v}" for k, v in sorted(params.items())]
    return " ".join(flags)
