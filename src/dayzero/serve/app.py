"""The HTTP routes. In: a `Front`. Out: the ASGI application. Every error has OpenAI's shape, those of unknown paths too."""

import logging
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from dayzero.core.errors import DayZeroError
from dayzero.core.records import to_dict
from dayzero.serve.answers import error_answer, json_answer
from dayzero.serve.errors import ApiError, unavailable
from dayzero.serve.front import Front

log = logging.getLogger("dayzero.serve")


def build_app(front: Front) -> FastAPI:
    app = FastAPI(title="dayzero", openapi_url=None, docs_url=None, redoc_url=None)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await front.generate(request, "completions", front.parse_completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await front.generate(request, "chat/completions", front.parse_chat)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_answer({"object": "list", "data": [_model(front)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != front.spec.served_model_name:
            raise ApiError(404, f"the model {name[:120]!r} does not exist", param="model", code="model_not_found")
        return json_answer(_model(front))

    @app.get("/health")
    async def health() -> Response:
        return json_answer(_health(front), status=200 if front.status == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(front.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        if front.link.state != "ready":
            raise unavailable(f"the engine is {front.link.state}", code=f"engine_{front.link.state}")
        try:
            await front.link.reset_prefix_cache()
        except DayZeroError as error:
            raise ApiError(409, f"{error.what} {error.got}".strip(), code="not_reset") from error
        return json_answer({"reset": True})

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_answer(error)

    @app.exception_handler(HTTPException)
    async def unknown_path(request: Request, error: HTTPException) -> Response:
        answer = error_answer(ApiError(error.status_code, f"{request.method} {request.url.path[:120]}: {error.detail}"))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # Starlette logs the traceback; the client learns no more than that.
        return error_answer(ApiError(500, f"an unexpected {type(error).__name__} in the server", type="server_error"))

    return app


def _model(front: Front) -> dict[str, Any]:
    info = front.link.info
    if info is None:
        raise unavailable("the engine is loading", code="engine_loading")
    return {
        "id": front.spec.served_model_name,
        "object": "model",
        "created": front.created,
        "owned_by": "dayzero",
        "max_model_len": min(info.context_tokens, info.capacity_tokens),
        "context_tokens": info.context_tokens,
        "capacity_tokens": info.capacity_tokens,
        "tier": info.tier,
        "tier_reasons": list(info.tier_reasons),
        "prefix_reuse": info.prefix_reuse,
        "batch_invariant": info.batch_invariant,
        "fallbacks": list(info.fallbacks),
        "towers_not_served": list(info.towers_not_served),
        "vocab_size": info.vocab_size,
        "device": info.device,
        "dtype": info.dtype,
        "instruction_set": info.instruction_set,
        "max_sequences": info.max_sequences,
        "tokenizer": front.codec is not None,
        "chat_template": front.renderer is not None,
        "engine": to_dict(info),
    }


def _health(front: Front) -> dict[str, Any]:
    link = front.link
    return {
        "status": front.status,
        "engine_pid": link.pid,
        "engine_restarts": link.restarts,
        "last_engine_exit": link.last_exit or None,
        "open_requests": front.num_open,
        "seconds_without_progress": round(link.stalled_s, 3),
    }
