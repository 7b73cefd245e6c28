"""Which parts of the OpenAI-compatible interface a server really offers: asked over HTTP, one check per part, named `api: ...`.

Also reads gauges in Prometheus' text format. It deliberately does not test corner cases; the server's own tests do.
"""

import importlib.util
import re
from typing import Any

from dayzero.core.reports import Check, Verdict
from dayzero.report.load_client import LoadClient, Reply
from dayzero.report.prompts import Prompt, completion

PREFIX = "api: "
_METRIC = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})?\s+(\S+)")


def probe_interface(client: LoadClient, model: str, prompt: Prompt) -> tuple[Check, ...]:
    """One short request per part of the interface. Chat is not required of a model without a template (HTTP 400)."""
    body = completion(model, prompt, max_tokens=4, temperature=0)
    models = client.request("GET", "/v1/models")
    whole = client.request("POST", "/v1/completions", body | {"return_token_ids": True})
    streamed = client.stream("/v1/completions", body)
    text = _choice(whole).get("text")
    chat_body = {"model": model, "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": "Hello"}]}
    chat = client.request("POST", "/v1/chat/completions", chat_body)
    no_template = chat.status in (400, 404, 501)
    wrong = client.request("POST", "/v1/completions", body | {"model": "no-such-model"})
    shaped = isinstance(wrong.data, dict) and isinstance(wrong.data.get("error"), dict) and "message" in wrong.data["error"]
    metrics = client.request("GET", "/metrics")
    same = streamed.outcome in ("ok", "empty") and streamed.text == (text or "")
    return (
        _part("/v1/models", models.status == 200 and isinstance(models.data, dict) and bool(models.data.get("data")), models),
        _part("/v1/completions", whole.status == 200 and text is not None, whole),
        Check(name=f"{PREFIX}/v1/completions streamed", verdict="pass" if same else "fail", value=streamed.outcome, limit="ok",
              detail="streamed and whole text are equal" if same else streamed.error or "streamed and whole text differ"),
        Check(name=f"{PREFIX}/v1/chat/completions", limit=200, value=chat.status, required=not no_template,
              verdict="pass" if _choice(chat).get("message") else "not_shown" if no_template else "fail",
              detail="" if chat.status == 200 else f"no chat is offered: {_said(chat)}"),
        Check(name=f"{PREFIX}errors in OpenAI's shape", verdict="pass" if shaped and 400 <= wrong.status < 500 else "fail",
              value=wrong.status, limit="400 to 499 with error.message", detail=_said(wrong)),
        _part("/health", (health := client.request("GET", "/health")).status == 200, health),
        _part("/metrics", metrics.status == 200 and bool(gauges(metrics.text)), metrics, required=False),
        _official_client(client, model, prompt),
    )  # fmt: skip


def gauges(text: str) -> dict[tuple[str, str], float]:
    """Prometheus text -> (metric name, its labels as written, "" without) -> value. What is no sample line is left out."""
    found = {}
    for match in filter(None, map(_METRIC.match, text.splitlines())):
        try:
            found[match[1], match[2] or ""] = float(match[3])
        except ValueError:
            continue  # not a number: not a sample line
    return found


def busy_gauge(client: LoadClient) -> tuple[str, float] | None:
    """What must be 0 on an idle server: cache blocks referenced, else requests running. None without either."""
    reply = client.request("GET", "/metrics", timeout_s=30.0)
    found = gauges(reply.text) if reply.status == 200 else {}
    for words in (("block", "referenced"), ("requests", "running")):
        matching = {key: value for key, value in found.items() if all(word in "".join(key).lower() for word in words)}
        if matching:
            name, labels = next(iter(matching))
            return name + labels, sum(matching.values())
    return None


def _official_client(client: LoadClient, model: str, prompt: Prompt) -> Check:
    """The `openai` package against the server, where it is installed: it is what most users hold in their hands.
    Like the rest of these measurements it goes to the server itself, not to a proxy of the environment."""
    name = f"{PREFIX}official openai client"
    if importlib.util.find_spec("openai") is None:
        return Check(name=name, verdict="not_shown", value=None, limit=None, required=False,
                     detail="openai is not installed here")  # fmt: skip
    import openai

    official = openai.OpenAI(base_url=f"{client.url}{client.prefix}/v1", api_key=client.api_key or "none", max_retries=0,
                             timeout=client.timeout_s, http_client=openai.DefaultHttpxClient(trust_env=False))  # fmt: skip
    try:
        reply: Any = official.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0)
        verdict: Verdict = "pass" if reply.choices and reply.usage and reply.usage.completion_tokens >= 0 else "fail"
        return Check(name=name, verdict=verdict, value=f"openai {openai.__version__}", limit=None)
    except openai.OpenAIError as error:
        return Check(name=name, verdict="fail", value=f"openai {openai.__version__}", limit=None, detail=str(error)[:300])
    finally:
        official.close()


def _part(path: str, works: bool, reply: Reply, *, required: bool = True) -> Check:
    return Check(name=PREFIX + path, verdict="pass" if works else "fail", value=reply.status, limit=200, required=required,
                 detail="" if works else _said(reply))  # fmt: skip


def _choice(reply: Reply) -> dict[str, Any]:
    """The first choice of a whole answer, {} where there is none."""
    choices = reply.data.get("choices") if isinstance(reply.data, dict) else None
    return choices[0] if choices and isinstance(choices[0], dict) else {}


def _said(reply: Reply) -> str:
    return reply.error or reply.text[:300]
