"""Case SV-08: a chat template is code that came with the release. It gets no further than an error for these messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from dayzero.serve.errors import ApiError
from dayzero.serve.template import TemplateRenderer

# One template for all, so that one process renders them.
TEMPLATE = """{%- set what = messages[0]['content'] -%}
{%- if what == 'loop' -%}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- elif what == 'large' -%}{% for a in range(99999) %}{{ 'x' * 100 }}{% endfor %}
{%- elif what == 'huge' -%}{{ 'x' * 10 ** 10 }}
{%- elif what == 'escape' -%}{{ ''.__class__.__mro__[1].__subclasses__() }}
{%- elif what == 'globals' -%}{{ cycler.__init__.__globals__.os.getcwd() }}
{%- elif what == 'file' -%}{% include '/etc/hostname' %}
{%- elif what == 'undefined' -%}{{ messages[7].content.x }}
{%- elif what == 'raise' -%}{{ raise_exception('roles must alternate') }}
{%- else -%}{{ bos_token }}{{ what }}{{ suffix or '' }}{% endif -%}"""


def with_renderer(test: Callable[[TemplateRenderer], Awaitable[None]]) -> None:
    async def run() -> None:
        renderer = TemplateRenderer(TEMPLATE, {"bos_token": "<s>"}, timeout_s=1.0, max_chars=100_000)
        try:
            await renderer.start()
            await test(renderer)
        finally:
            await renderer.close()

    asyncio.run(run())


async def render(renderer: TemplateRenderer, content: str) -> str:
    return await renderer.render([{"role": "user", "content": content}], {"suffix": "!"})


def test_hostile_templates_are_errors_of_their_request() -> None:
    async def test(renderer: TemplateRenderer) -> None:
        assert await render(renderer, "plain") == "<s>plain!"
        for content, message in (
            ("large", "9999900 characters"),
            ("huge", "memory"),
            ("escape", "unsafe"),
            ("globals", "unsafe"),
            ("file", "chat template"),
            ("undefined", "undefined|no element"),
            ("raise", "roles must alternate"),
        ):
            with pytest.raises(ApiError, match=message) as refused:
                await render(renderer, content)
            assert refused.value.status == 400, content
            assert await render(renderer, "plain") == "<s>plain!"
        started = time.monotonic()
        with pytest.raises(ApiError, match="did not finish within 1 s") as refused:
            await render(renderer, "loop")
        assert refused.value.status == 400 and time.monotonic() - started < 4
        assert await render(renderer, "again") == "<s>again!"

    with_renderer(test)
