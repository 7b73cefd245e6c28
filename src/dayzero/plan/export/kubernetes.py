"""A server on Kubernetes: a LeaderWorkerSet (its own controller must be installed), or a plain StatefulSet with a service.

Goes in: a `Server`. Comes out: YAML text, all strings quoted by the YAML writer and `$(` kept from Kubernetes' own expansion.
Deliberately not done: storage classes, network attachments for RDMA, node selectors: those belong to a cluster.
"""

from copy import deepcopy
from typing import Any

from dayzero.plan.export.servers import PORT, RENDEZVOUS_PORT, Server

# What device plugins call their cards. A vendor that is not here gets no resource line, and a note.
RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Huawei": "huawei.com/Ascend910", "Intel": "habana.ai/gaudi",
             "Cambricon": "cambricon.com/mlu", "Google": "google.com/tpu"}  # fmt: skip
# A release of a terabyte takes its time: two hours before a start counts as failed.
_START_SECONDS, _PROBE_SECONDS = 7200, 10
_HTTP_PROBE = {"httpGet": {"path": "/health", "port": PORT}}
# In a set of alike pods only the first answers; the images have Python, not all have curl.
_ASK = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{PORT}/health', timeout=5)"
_RANK_PROBE = {"exec": {"command": ["/bin/sh", "-c", f'[ "${{HOSTNAME##*-}}" -ne 0 ] || python3 -c "{_ASK}"']}}


def leader_worker_set(server: Server, notes: list[str]) -> str:
    """One group: the leader is node 0 and answers, the workers are the others. The controller gives address and number."""
    bridge = 'export MASTER_ADDR="$LWS_LEADER_ADDRESS" NODE_RANK="$LWS_WORKER_INDEX"; '
    leader, worker = {"app": server.name, "role": "leader"}, {"app": server.name, "role": "worker"}
    template = {
        "size": server.num_nodes,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": _pod(server, bridge, notes, leader, _HTTP_PROBE),
        "workerTemplate": _pod(server, bridge, notes, worker),
    }
    group = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "metadata": {"name": server.name},
             "spec": {"replicas": 1, "leaderWorkerTemplate": template}}  # fmt: skip
    return _documents(group, _service(server.name, leader))


def stateful_set(server: Server, notes: list[str]) -> str:
    """The same without a controller of its own: a pod's ordinal is its node number, pod 0's name the first node's address."""
    peers = f"{server.name}-nodes"
    bridge = f'export MASTER_ADDR="{server.name}-0.{peers}" NODE_RANK="${{HOSTNAME##*-}}"; '
    labels = {"app": server.name}
    pods = _pod(server, bridge, notes, labels, _HTTP_PROBE if server.num_nodes == 1 else _RANK_PROBE)
    spec = {"serviceName": peers, "replicas": server.num_nodes, "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels}, "template": pods}  # fmt: skip
    group = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": server.name}, "spec": spec}
    # Workers must find node 0 long before it is ready.
    headless = _service(peers, labels, clusterIP="None", publishNotReadyAddresses=True)
    headless["spec"]["ports"].append({"name": "rendezvous", "port": RENDEZVOUS_PORT})
    first = {"statefulset.kubernetes.io/pod-name": f"{server.name}-0"}
    return _documents(headless, group, _service(server.name, first))


def _pod(
    server: Server, bridge: str, notes: list[str], labels: dict[str, str], probe: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`probe`: how Kubernetes asks whether this pod answers; None where it never does."""
    text = (bridge if server.num_nodes > 1 else "") + server.script()
    environment: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in server.environment]
    own = {"fieldRef": {"fieldPath": "status.podIP"}}
    environment += [{"name": name, "valueFrom": own} for name in server.own_address]
    container: dict[str, Any] = {
        "name": "server",
        "image": server.image,
        "command": ["/bin/sh", "-c", text.replace("$(", "$$(")],
        "env": environment,
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if server.model_path.startswith("/"):
        place = server.model_path.rstrip("/").rpartition("/")[0] or "/"
        container["volumeMounts"].append({"name": "models", "mountPath": place, "readOnly": True})
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}})
        notes.append("Kubernetes: a volume claim named `models` must hold the release")
    if (resource := RESOURCES.get(server.vendor)) is not None:
        container["resources"] = {"limits": {resource: str(server.cards_per_node)}}
        notes.append(f"Kubernetes: cards are asked for as {resource}; a device plugin set up otherwise has another name")
    else:
        notes.append(f"Kubernetes: what {server.vendor}'s device plugin calls its cards is not known here: add the limit")
    if probe is not None:
        container["ports"] = [{"containerPort": PORT, "name": "http"}]
        asking = deepcopy(probe) | {"periodSeconds": _PROBE_SECONDS, "timeoutSeconds": _PROBE_SECONDS}
        container["readinessProbe"] = deepcopy(asking)  # YAML would write the same object as an alias
        container["startupProbe"] = asking | {"failureThreshold": _START_SECONDS // _PROBE_SECONDS}
    # Without the links, a service's name cannot turn into variables that an engine reads as its own (NAME_PORT).
    spec = {"enableServiceLinks": False, "containers": [container], "volumes": volumes}
    return {"metadata": {"labels": dict(labels)}, "spec": spec}


def _service(name: str, selector: dict[str, str], **more: Any) -> dict[str, Any]:
    spec = {"selector": dict(selector), "ports": [{"name": "http", "port": PORT, "targetPort": PORT}]} | more
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def _documents(*documents: dict[str, Any]) -> str:
    import yaml

    return "---\n".join(yaml.safe_dump(document, sort_keys=False, width=120) for document in documents)
