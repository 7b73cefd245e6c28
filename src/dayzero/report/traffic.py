"""What a soak sends: a shuffled deck of ordinary requests, clients that leave, and requests that are wrong on purpose.

Every deck holds each kind at least once, so that even a short run has met them all. It decides what is sent and what
answer is right; sending and judging is `soak`'s.
"""

import random
import threading
from dataclasses import dataclass, field
from typing import Any

from dayzero.report.load_client import Leave
from dayzero.report.prompts import Prompts, completion


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A request that is wrong on purpose. It must get one of `statuses`, and the server must live on.

    `body` is merged into a good request; `raw` replaces it by these bytes.
    """

    name: str
    body: dict[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    raw: bytes | None = None
    path: str = "/v1/completions"
    statuses: tuple[int, ...] = (400, 404, 413, 422)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One thing a client does: an ordinary request (neither fault nor leave), a departure, or a fault."""

    kind: str
    body: dict[str, Any]
    stream: bool = False
    leave: Leave | None = None
    fault: Fault | None = None


def default_faults(*, vocab_size: int | None = None, context_tokens: int | None = None) -> tuple[Fault, ...]:
    """Mistakes every OpenAI-compatible server must refuse; more where the vocabulary and the context are known."""
    faults = [
        Fault(name="malformed JSON", raw=b'{"model": "x", "prompt": [1, 2'),
        Fault(name="a body that is no object", raw=b'["not", "an", "object"]'),
        Fault(name="unknown model", body={"model": "no-such-model"}),
        Fault(name="temperature of a wrong type", body={"temperature": "hot"}),
        Fault(name="negative temperature", body={"temperature": -1.0}),
        Fault(name="negative max_tokens", body={"max_tokens": -1}),
        Fault(name="no prompt", drop=("prompt",)),
        Fault(name="top_p above one", body={"top_p": 1.5}),
        Fault(name="unknown path", path="/v1/no-such-path", statuses=(404, 405)),
    ]
    if vocab_size is not None:
        faults.append(Fault(name="token id beyond the vocabulary", body={"prompt": [vocab_size]}))
        faults.append(Fault(name="negative token id", body={"prompt": [-1]}))
        if context_tokens is not None:
            too_long = [vocab_size // 2] * (context_tokens + 1)
            faults.append(Fault(name="prompt longer than the context", body={"prompt": too_long}))
    return tuple(faults)


class Deck:
    """An endless, seeded sequence of tasks, dealt to any number of threads."""

    def __init__(self, *, model: str, prompts: Prompts, input_tokens: tuple[int, ...], output_tokens: tuple[int, ...],
                 faults: tuple[Fault, ...], seed: int) -> None:  # fmt: skip
        self._model, self._prompts, self._faults = model, prompts, faults
        self._inputs, self._outputs = input_tokens, output_tokens
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._tasks: list[Task] = []
        self._next_fault = 0

    def deal(self) -> Task:
        with self._lock:
            if not self._tasks:
                self._tasks = self._shuffled()
            return self._tasks.pop()

    def _shuffled(self) -> list[Task]:
        """Every mix of streamed or whole, greedy or sampled and input length; four departures; three faults in turn."""
        tasks = [
            Task(kind=f"{'streamed' if stream else 'whole'}, {'sampled' if sampled else 'greedy'}", stream=stream,
                 body=self._body(length, self._random.choice(self._outputs), sampled=sampled))
            for stream in (True, False) for sampled in (True, False) for length in self._inputs
        ]  # fmt: skip
        long = max(self._outputs) * 4  # long enough that the client is gone before the answer is complete
        leaves = (
            (True, Leave(after_events=self._random.randint(1, 4))),
            (True, Leave(after_events=self._random.randint(1, 4), reset=True)),
            (False, Leave(after_s=self._random.uniform(0.01, 0.3))),
            (True, Leave(after_s=self._random.uniform(0.01, 0.1), reset=True)),
        )
        tasks += [
            Task(kind="client left", stream=stream, leave=leave,
                 body=self._body(self._random.choice(self._inputs), long, sampled=False)) for stream, leave in leaves
        ]  # fmt: skip
        for _ in range(min(3, len(self._faults))):
            fault = self._faults[self._next_fault % len(self._faults)]
            self._next_fault += 1
            good = self._body(min(self._inputs), min(self._outputs), sampled=False)
            body = {key: value for key, value in (good | fault.body).items() if key not in fault.drop}
            tasks.append(Task(kind="wrong on purpose", body=body, fault=fault))
        self._random.shuffle(tasks)
        return tasks

    def _body(self, num_input: int, num_output: int, *, sampled: bool) -> dict[str, Any]:
        chosen: dict[str, Any] = {"temperature": 0}
        if sampled:
            chosen = {"temperature": self._random.uniform(0.5, 1.3), "top_p": self._random.uniform(0.7, 1.0),
                      "seed": self._random.randrange(2**31)}  # fmt: skip
        return completion(self._model, self._prompts.draw(num_input), max_tokens=num_output, ignore_eos=True, **chosen)
