"""A server as shell: one script for any of its nodes, each node's whole command in words, and the engine's own config file."""

import shlex

from dayzero.plan.export.servers import Server

# Both engines read a YAML file of option names without the dashes, command-line options coming on top.
_HEADER = "#!/bin/sh\n# {what}\nset -eu\n"


def script(server: Server) -> str:
    """`launch.sh`: on several nodes `launch.sh NODE_RANK MASTER_ADDR`."""
    many = server.num_nodes > 1
    what = f"{server.num_nodes} nodes of {server.cards_per_node} cards" if many else f"one node, {server.cards_per_node} cards"
    lines = [_HEADER.format(what=what + (": run on each node as launch.sh NODE_RANK MASTER_ADDR" if many else ""))]
    if many:
        lines.append(f'NODE_RANK="${{1:?the number of this node, 0 to {server.num_nodes - 1}}}"\n'
                     'MASTER_ADDR="${2:?the address of node 0}"\n')  # fmt: skip
    lines += [f"export {name}={shlex.quote(value)}\n" for name, value in server.environment]
    lines += [f': "${{{name}:?the address of this node}}"\nexport {name}\n' for name in server.own_address]
    return "".join(lines) + server.script() + "\n"


def commands(server: Server) -> str:
    """`commands.txt`: what each node runs, to read or to paste; `MASTER_ADDR` stands for node 0."""
    lines = []
    before = " ".join(f"{name}={shlex.quote(value)}" for name, value in server.environment)
    for rank in range(server.num_nodes):
        words = [str(rank) if word == '"$NODE_RANK"' else word for word in server.words(worker=rank > 0)]
        lines.append(f"# node {rank}\n" + " ".join(filter(None, [before, *words])))
    return "\n".join(lines) + "\n"


def configuration(server: Server) -> str:
    """The options that are the same on every node."""
    import yaml

    data = {name.removeprefix("--"): True if value is None else value for name, value in server.options}
    start = " ".join(shlex.quote(word) for word in server.program)
    return f"# {start} --config THIS_FILE\n" + yaml.safe_dump(data, sort_keys=False, width=120)
