"""Prompts as token ids in, greedy tokens out, through a running server's `/v1/completions`; and what it makes of a text.

Proves that what is served is what the engine computes. Uses `return_token_ids` and `ignore_eos`, which this project's server
and vLLM's understand; a server that returns no ids is an error, since text would hide differences. No retries: a refused
request is a finding.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from dayzero.core.errors import DayZeroError
from dayzero.validate.subject import ServerRefused

TOP_LOGPROBS = 5  # the most that OpenAI's completions endpoint gives


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedAnswer:
    """`top_logprobs` per token, by the token's text as the server spells it; `cached_tokens` of the prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float], ...]
    cached_tokens: int


class HttpSubject:
    """Close it, or use it as a context manager. `url` is the server's root, without `/v1`."""

    def __init__(self, url: str, *, model: str | None = None, timeout_s: float = 300.0,
                 headers: dict[str, str] | None = None) -> None:  # fmt: skip
        try:
            import httpx
        except ImportError as error:
            raise DayZeroError("asking a server needs httpx", got=str(error), want="httpx installed",
                               fix="pip install 'dayzero[serve]'") from error  # fmt: skip
        self.url = url.rstrip("/")
        # A concurrent check must really be concurrent: no limit on connections here.
        # Proxies of the environment are not for a server named by its address.
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(timeout=timeout_s, headers=headers, limits=limits, trust_env=False)
        self._model = model

    def __enter__(self) -> "HttpSubject":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    @property
    def model(self) -> str:
        """The name to ask for: as given, else the first one the server lists."""
        if self._model is None:
            listed = self._ask("GET", "/v1/models").get("data") or []
            if not listed:
                raise DayZeroError("the server lists no model", got=self.url, want="one model", fix="load a model first")
            self._model = str(listed[0]["id"])
        return self._model

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        return [list(answer.token_ids) for answer in self.answers(prompts, max_tokens)]

    def answers(self, prompts: list[list[int]], max_tokens: int) -> list[ServedAnswer]:
        """One request per prompt, all at once."""
        model = self.model
        with ThreadPoolExecutor(max_workers=max(1, len(prompts))) as pool:
            return list(pool.map(lambda prompt: self._answer(model, prompt, max_tokens), prompts))

    def prompt_ids(self, kind: Literal["text", "chat"], text: str) -> list[int]:
        """The token ids which the server makes of a text. Raises ServerRefused where it does not take it or does not tell."""
        asked: dict[str, Any] = {"model": self.model, "max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
        if kind == "chat":
            body = self._ask("POST", "/v1/chat/completions", asked | {"messages": [{"role": "user", "content": text}]})
        else:
            body = self._ask("POST", "/v1/completions", asked | {"prompt": text})
        choices = body.get("choices") or [{}]
        found = body.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
        if not isinstance(found, list):
            raise ServerRefused("the server does not tell the token ids of a prompt", got=f"an answer with {sorted(body)}",
                                want="prompt_token_ids", fix="use a server that honours return_token_ids")  # fmt: skip
        return [int(token) for token in found]

    def _answer(self, model: str, prompt: list[int], max_tokens: int) -> ServedAnswer:
        body = self._ask("POST", "/v1/completions", {
            "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True,
            "return_token_ids": True, "logprobs": TOP_LOGPROBS,
        })  # fmt: skip
        choice = body["choices"][0]
        if not isinstance(choice.get("token_ids"), list):
            raise DayZeroError("the server returns no token ids", got=f"choices[0] with {sorted(choice)}",
                               want="choices[0].token_ids", fix="use a server that honours return_token_ids")  # fmt: skip
        logprobs = choice.get("logprobs") or {}
        details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
        return ServedAnswer(
            token_ids=tuple(choice["token_ids"]),
            logprobs=tuple(logprobs.get("token_logprobs") or ()),
            top_logprobs=tuple(logprobs.get("top_logprobs") or ()),
            cached_tokens=int(details.get("cached_tokens") or 0),
        )

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        import httpx

        try:
            response: httpx.Response = self._client.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            raise DayZeroError(f"{self.url}{path} does not answer", got=f"{type(error).__name__}: {error}",
                               want="a running server", fix="start it with `dayzero serve`") from error  # fmt: skip
        if response.status_code != 200:
            raise ServerRefused(f"{path} refused a request of the validator", want="200", fix="see the server's log",
                                got=f"{response.status_code}: {response.text[:300]}")  # fmt: skip
        try:
            found = response.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise DayZeroError(f"{path} answers something else than a JSON object", got=response.text[:200],
                               want="a JSON object", fix="check that the address is an OpenAI-compatible server")  # fmt: skip
        return found
