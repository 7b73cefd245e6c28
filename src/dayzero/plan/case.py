"""One question to the planner, opened: the model with parameters, the request with every blank filled in, the search.

Goes in: what `make_plan` is given. Comes out: a `Case`, and cases that differ from it in one thing (a shorter context, other
weights), which share whatever the change does not touch. Deliberately not done: choosing anything.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Literal

from dayzero.core.model import ModelDescription
from dayzero.core.target import Target, Workload
from dayzero.plan.ledger import Evaluator
from dayzero.plan.options import PlanOptions, Request, resolve
from dayzero.plan.search import Search
from dayzero.plan.unlisted import with_parameters

# What the tables of an evaluator depend on; everything else of a request is read when a layout is priced.
PRICED_BY = ("weights_dtype", "cache_dtype", "block_tokens", "mtp", "chunk_tokens")


@dataclass(frozen=True, slots=True)
class Case:
    """`listed`: whether the description lists parameters, or they were estimated from its counts."""

    listed: bool
    target: Target
    workload: Workload
    options: PlanOptions
    search: Search

    @property
    def evaluator(self) -> Evaluator:
        return self.search.evaluator

    @property
    def request(self) -> Request:
        return self.search.request


def open_case(model: ModelDescription, target: Target, workload: Workload, options: PlanOptions) -> Case:
    """Raises DayZeroError for a dtype or an engine nobody knows and for a target without a memory size."""
    if options.objective is not None:
        workload = replace(workload, objective=options.objective)
    listed, model = bool(model.parameters), with_parameters(model)
    evaluator = Evaluator(model, target, resolve(model, workload, options), engine=options.engine)
    return Case(listed, target, workload, options, Search(evaluator, workload))


def with_request(evaluator: Evaluator, request: Request) -> Evaluator:
    """An evaluator for another request; its tables are shared where the request does not change them."""
    old = evaluator.request
    if any(getattr(old, name) != getattr(request, name) for name in PRICED_BY):
        return Evaluator(evaluator.model, evaluator.target, request, engine=evaluator.engine)
    changed = copy(evaluator)
    changed.request = request
    return changed


def changed_search(search: Search, request: Request, *, phase: Literal["mixed", "prefill", "decode"] | None = None) -> Search:
    """The search for another request. What is legal depends on the weights alone and is not found out again."""
    evaluator = with_request(search.evaluator, request)
    found = Search(evaluator, search.workload, phase=phase or search.phase)
    if evaluator.weights is search.evaluator.weights:
        found.share(search)
    return found


def with_context(request: Request, context_tokens: int) -> Request:
    """The request at another context; nothing in it is longer than the context."""
    return replace(request, context_tokens=context_tokens, average_tokens=min(request.average_tokens, context_tokens),
                   chunk_tokens=min(request.chunk_tokens, context_tokens))  # fmt: skip
