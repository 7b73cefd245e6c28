"""What an engine module hands to the writers of files: one `Server` per pool, with its options checked and its nodes known.

A server runs the same options on each of its nodes; what differs (the node's number, the first node's address) is a
`Variable`, filled in by whatever starts it: a shell, Kubernetes, Docker Compose. Deliberately not done: any engine's names.
"""

import re
import shlex
from dataclasses import dataclass
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.target import Target
from dayzero.plan.export.checked import spelled

PORT = 8000
RENDEZVOUS_PORT = 29501


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """A value that each node knows only when it starts: `$NAME`, and what follows it."""

    name: str
    suffix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """`options`: of every node, None for a flag without value; `worker_options`: only of nodes after the first.

    `own_address`: environment variables that hold the node's own address. `visible`: what hides the other cards of a node.
    """

    role: str
    name: str
    program: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    node_options: tuple[tuple[str, int | Variable], ...] = ()
    worker_options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    own_address: tuple[str, ...] = ()
    num_nodes: int = 1
    cards_per_node: int = 1
    image: str = ""
    vendor: str = ""
    model_path: str = ""
    workers_serve: bool = False  # whether nodes after the first answer HTTP too

    def words(self, *, worker: bool = False) -> list[str]:
        """The command as shell words, quoted; variables stay `"$NAME"`."""
        words = [shlex.quote(word) for word in self.program]
        for name, value in (*self.options, *self.node_options):
            words.append(name)
            if isinstance(value, Variable):
                words.append(f'"${value.name}{value.suffix}"' if not value.suffix else f'"${{{value.name}}}{value.suffix}"')
            elif value is not None:
                words.append(shlex.quote(spelled(value)))
        return words + list(self.worker_options if worker else ())

    def script(self) -> str:
        """One shell command for any node: `NODE_RANK` and `MASTER_ADDR` must be set where there are several."""
        lead = " ".join(["exec", *self.words()])
        if self.num_nodes == 1 or not self.worker_options:
            return lead
        work = " ".join(["exec", *self.words(worker=True)])
        return f'if [ "$NODE_RANK" -eq 0 ]; then {lead}; else {work}; fi'


def resource_name(text: str) -> str:
    """A name that Kubernetes and Compose take: lower case, digits, hyphens, a letter first, at most 40 characters."""
    short = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return short if short[:1].isalpha() else f"model-{short}".strip("-")


def split_nodes(devices: int, target: Target, notes: list[str], fits: Any) -> tuple[int, int]:
    """(nodes, cards a node): the fewest nodes over which the engine can spread that many devices. `fits(nodes, cards)`.

    Raises DayZeroError when none of the divisions is one the engine can run.
    """
    most = target.node.num_cards
    if most is None:
        notes.append(f"{target.id} does not say how many cards a node has: one node with {devices} cards is assumed")
        most = devices
    for cards in range(min(most, devices), 0, -1):
        if devices % cards == 0 and fits(devices // cards, cards):
            if devices > most and cards < most:
                notes.append(f"{cards} of the {most} cards of a node are used: {devices} devices divide no other way")
            return devices // cards, cards
    raise DayZeroError("the layout cannot be spread over the target's nodes by this engine", got=f"{devices} devices",
                       want=f"a division over nodes of up to {most} cards", fix="plan with other degrees")  # fmt: skip
