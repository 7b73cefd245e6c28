"""A server as a Docker Compose file: on one host, or the same file on each of several hosts with its number given."""

from typing import Any

from dayzero.plan.export.servers import Server

_ASCEND_DRIVER = "/usr/local/Ascend/driver"


def compose(server: Server, notes: list[str]) -> str:
    """`NODE_RANK=1 MASTER_ADDR=10.0.0.1 docker compose up` on each host where there are several."""
    import yaml

    variables = {name: _literal(value) for name, value in server.environment}
    if server.num_nodes > 1:
        variables |= {"NODE_RANK": f"${{NODE_RANK:?the number of this node, 0 to {server.num_nodes - 1}}}",
                      "MASTER_ADDR": "${MASTER_ADDR:?the address of node 0}"}  # fmt: skip
    variables |= {name: f"${{{name}:?the address of this node}}" for name in server.own_address}
    # Host network and memory: collectives between cards and nodes use both.
    service: dict[str, Any] = {"image": server.image, "entrypoint": ["/bin/sh", "-c"], "command": [_literal(server.script())],
                               "network_mode": "host", "ipc": "host", "restart": "unless-stopped"}  # fmt: skip
    if variables:
        service["environment"] = variables
    volumes = _models(server)
    if server.vendor == "Huawei":
        volumes.append({"type": "bind", "source": _ASCEND_DRIVER, "target": _ASCEND_DRIVER, "read_only": True})
        notes.append(f"Compose: the host's driver is expected in {_ASCEND_DRIVER}")
    if volumes:
        service["volumes"] = volumes
    service |= _cards(server, notes)
    return yaml.safe_dump({"services": {server.name: service}}, sort_keys=False, width=120)


def _literal(text: str) -> str:
    """Compose replaces `$NAME`; a doubled dollar stays one."""
    return text.replace("$", "$$")


def _cards(server: Server, notes: list[str]) -> dict[str, Any]:
    """How a container is given its cards, by vendor."""
    if server.vendor == "NVIDIA":
        device = {"driver": "nvidia", "count": server.cards_per_node, "capabilities": ["gpu"]}
        return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}
    if server.vendor == "AMD":
        return {"devices": ["/dev/kfd", "/dev/dri"], "group_add": ["video"], "security_opt": ["seccomp=unconfined"]}
    if server.vendor == "Huawei":
        cards = [f"/dev/davinci{index}" for index in range(server.cards_per_node)]
        return {"devices": [*cards, "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]}
    notes.append(f"Compose: how a container is given {server.vendor}'s cards is not known here: add its devices")
    return {}


def _models(server: Server) -> list[dict[str, Any]]:
    if not server.model_path.startswith("/"):
        return []
    place = _literal(server.model_path.rstrip("/").rpartition("/")[0] or "/")
    return [{"type": "bind", "source": place, "target": place, "read_only": True}]
