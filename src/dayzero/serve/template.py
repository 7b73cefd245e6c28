"""The server's side of the chat template: `TemplateRenderer` owns the rendering process and its time limit."""

import asyncio
import json
import logging
import os
from typing import Any

from dayzero.serve.errors import ApiError, invalid, unavailable
from dayzero.serve.processes import kill_group, python_module

log = logging.getLogger("dayzero.serve")

START_TIMEOUT_S = 60.0  # importing transformers on a busy machine
LINE_LIMIT_BYTES = 1 << 28  # of one answer; the text itself is bounded by max_chars


class TemplateRenderer:
    """Renders one conversation at a time, in order. A process that took too long is replaced."""

    def __init__(self, template: str, special_tokens: dict[str, str], *, timeout_s: float, max_chars: int) -> None:
        self._start = {"template": template, "special_tokens": special_tokens, "max_chars": max_chars}
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._restart: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        """Start the process ahead of the first request."""
        async with self._turn:
            await self._running()

    async def render(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        """The prompt's text. Raises ApiError 400 with the template's own message, or naming the limit it broke."""
        try:
            request = json.dumps({"messages": messages, "arguments": arguments}).encode() + b"\n"
        except RecursionError:
            raise invalid("messages", "the messages are nested too deeply") from None
        # To the end even if the client leaves meanwhile: a cancelled exchange would cost the process.
        answer = await asyncio.shield(self._exchange(request))
        if "error" in answer:
            raise invalid("messages", f"the chat template refuses these messages: {answer['error']}", code="chat_template")
        return str(answer["text"])

    async def _exchange(self, request: bytes) -> dict[str, Any]:
        async with self._turn:
            return await self._ask(request)

    async def _ask(self, request: bytes) -> dict[str, Any]:
        process = await self._running()
        assert process.stdin is not None and process.stdout is not None
        done = False
        try:
            async with asyncio.timeout(self._timeout_s):
                process.stdin.write(request)
                await process.stdin.drain()
                line = await process.stdout.readline()
            done = bool(line)
        except TimeoutError:
            self._restart = asyncio.create_task(self.start())  # so that the next request need not wait for it
            raise invalid("messages", f"the chat template did not finish within {self._timeout_s:g} s on these messages",
                          code="chat_template") from None  # fmt: skip
        except ConnectionError:
            line = b""
        finally:
            if not done:  # too slow, dead, or the request was cancelled: the next answer would be this one's
                await self._stop()
        if not line:
            raise invalid("messages", "the chat template ended its process on these messages", code="chat_template")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        process = await asyncio.create_subprocess_exec(
            *python_module("dayzero.serve.template_process", str(os.getpid())), process_group=0,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LINE_LIMIT_BYTES,
        )  # fmt: skip
        self._process = process
        if self._closing:  # `close` came while it was being started, and found nothing to end
            await self._stop()
            raise unavailable("the server is shutting down", code="draining", retry_after_s=None)
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                process.stdin.write(json.dumps(self._start).encode() + b"\n")
                line = await process.stdout.readline()
        except (TimeoutError, ConnectionError):
            line = b""
        except asyncio.CancelledError:
            await self._stop()
            raise
        if not line:
            await self._stop()
            raise ApiError(500, "the process that renders chat templates does not start", type="server_error")
        return process

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            kill_group(process.pid)
            await asyncio.shield(process.wait())

    async def close(self) -> None:
        self._closing = True
        if self._restart is not None:
            self._restart.cancel()
        await self._stop()
