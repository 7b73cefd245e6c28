"""The two generation endpoints' JSON to one `ParsedRequest` in token ids, every value checked.

What each field may be stands in `read_options`. Fields nobody knows are ignored and listed for a warning header; those that
would change the answer and are not served (tools, response_format, suffix, ...) are refused. The length rule is in
`lengths.py`. Seeds: 0 to 2**63 - 1; choice 0 draws with the seed itself, choice i with `derived_seed(seed, i)`, where i counts
over all prompts and n, so that no two choices draw the same noise and each can be repeated by a request of its own.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

from dayzero.core.generation import MAX_TOP_LOGPROBS, EngineInfo, SamplingParams
from dayzero.serve.errors import ApiError, invalid, quote, unsupported
from dayzero.serve.fields import (
    Fields,
    check_integer,
    check_list,
    check_number,
    check_text,
    check_token_ids,
    wrong_type,
)
from dayzero.serve.lengths import check_prompt_length, token_budget

MAX_CHOICES_PER_PROMPT = 128
MAX_STOPS, MAX_STOP_CHARS = 16, 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_SEED = 2**63 - 1
MAX_TOKENS_FIELD = 2**31 - 1  # a sane integer; the length rule decides
# Below this a temperature is not "nearly greedy" but an overflow: 0 is greedy.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 2.0

Endpoint = Literal["completions", "chat/completions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What both endpoints share."""

    n: int
    max_tokens: int | None
    max_tokens_param: str
    sampling: SamplingParams  # its max_tokens and seed are set per choice
    stops: tuple[str, ...]
    include_stop: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """`text` is None for a prompt sent as token ids."""

    token_ids: tuple[int, ...]
    text: str | None
    param: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRequest:
    endpoint: Endpoint
    options: Options
    prompts: tuple[Prompt, ...]
    budgets: tuple[int, ...]  # tokens to generate, per prompt
    ignored: tuple[str, ...]
    echo: bool = False
    score_only: bool = False  # echo with max_tokens 0: the one token that was generated is dropped

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.options.n


def derived_seed(seed: int, choice: int) -> int:
    """The seed of one choice: the request's own for choice 0, else 63 bits of a hash of both."""
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{choice}".encode()).digest()[:8], "big") >> 1


def check_model(fields: Fields, served: str) -> None:
    """Raises ApiError 404 for a model that is not served."""
    name = check_text(fields.required("model"), "model")
    if name != served:
        raise ApiError(404, f"the model {quote(name)} does not exist; this server has {served!r}", param="model",
                       code="model_not_found")  # fmt: skip


def read_options(
    fields: Fields, info: EngineInfo, *, top_logprobs: int | None, prompt_logprobs: bool, least_tokens: int
) -> Options:
    """Everything but the prompt, the model and the two spellings of logprobs."""
    max_tokens, max_param = _read_max_tokens(fields, least_tokens)
    stream = fields.flag("stream")
    temperature = _or(fields.number("temperature", 0.0, MAX_TEMPERATURE), 1.0)
    if 0 < temperature < MIN_TEMPERATURE:
        raise invalid("temperature", f"temperature must be 0 (greedy) or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, "
                                     f"not {temperature!r}")  # fmt: skip
    min_tokens = _or(fields.integer("min_tokens", 0, MAX_TOKENS_FIELD), 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"min_tokens {min_tokens} is more than {max_param} {max_tokens}")
    stop_ids = fields.list_of("stop_token_ids", max_entries=MAX_STOP_TOKEN_IDS) or []
    sampling = SamplingParams(
        max_tokens=1,
        temperature=temperature,
        top_k=_or(fields.integer("top_k", 0, info.vocab_size), 0),
        top_p=_or(fields.number("top_p", 0.0, 1.0, above=True), 1.0),
        min_p=_or(fields.number("min_p", 0.0, 1.0), 0.0),
        presence_penalty=_or(fields.number("presence_penalty", -2.0, 2.0), 0.0),
        frequency_penalty=_or(fields.number("frequency_penalty", -2.0, 2.0), 0.0),
        repetition_penalty=_or(fields.number("repetition_penalty", 0.01, 10.0), 1.0),
        seed=fields.integer("seed", 0, MAX_SEED),
        stop_token_ids=check_token_ids(stop_ids, "stop_token_ids", info.vocab_size),
        ignore_eos=fields.flag("ignore_eos"),
        min_tokens=min_tokens,
        logit_bias=_read_logit_bias(fields, info.vocab_size),
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    n = _or(fields.integer("n", 1, MAX_CHOICES_PER_PROMPT), 1)
    best_of = fields.integer("best_of", 1, MAX_CHOICES_PER_PROMPT)
    if best_of is not None and best_of != n:
        raise unsupported("best_of", f"best_of other than n ({n}) is not served")
    fields.text("user")  # for the client's own records; it changes nothing
    return Options(
        n=n, max_tokens=max_tokens, max_tokens_param=max_param, sampling=sampling, stops=_read_stops(fields),
        include_stop=fields.flag("include_stop_str_in_output"), stream=stream,
        include_usage=_read_include_usage(fields, stream), return_token_ids=fields.flag("return_token_ids"),
    )  # fmt: skip


def read_completion(body: dict[str, Any], info: EngineInfo, served: str) -> tuple[Fields, Options, bool]:
    """The fields of /v1/completions without the prompt: (fields, options, echo)."""
    fields = Fields(body)
    check_model(fields, served)
    echo = fields.flag("echo")
    if fields.text("suffix"):
        raise unsupported("suffix", "suffix (insertion) is not served")
    top_logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    options = read_options(fields, info, top_logprobs=top_logprobs, prompt_logprobs=echo and top_logprobs is not None,
                           least_tokens=0 if echo else 1)  # fmt: skip
    return fields, options, echo


def read_chat(body: dict[str, Any], info: EngineInfo, served: str) -> tuple[Fields, Options]:
    """The fields of /v1/chat/completions without the messages."""
    fields = Fields(body)
    check_model(fields, served)
    _refuse_unserved(fields)
    top_logprobs = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if fields.flag("logprobs"):
        top_logprobs = top_logprobs or 0
    elif top_logprobs is not None:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    return fields, read_options(fields, info, top_logprobs=top_logprobs, prompt_logprobs=False, least_tokens=1)


def read_prompts(fields: Fields, info: EngineInfo, *, max_prompts: int) -> list[tuple[str, str | tuple[int, ...]]]:
    """`prompt`: a string, a list of strings, token ids, or a list of token-id lists. As (param, text or ids) each."""
    prompt = fields.required("prompt")
    if isinstance(prompt, str):
        return [("prompt", check_text(prompt, "prompt"))]
    entries = check_list(prompt, "prompt", empty=False)
    first = entries[0]
    if type(first) is int:
        return [("prompt", _prompt_ids(entries, "prompt", info))]
    if not isinstance(first, (str, list)):
        raise wrong_type("prompt[0]", first, "a string, a token id (an integer) or a list of token ids")
    named = [(f"prompt[{place}]", entry) for place, entry in enumerate(check_list(entries, "prompt", max_entries=max_prompts))]
    if isinstance(first, str):
        return [(param, check_text(entry, param)) for param, entry in named]
    return [(param, _prompt_ids(check_list(entry, param), param, info)) for param, entry in named]


def _prompt_ids(entries: list[Any], param: str, info: EngineInfo) -> tuple[int, ...]:
    check_prompt_length(len(entries), info, prompt_param=param)  # before a million entries are looked at
    return check_token_ids(entries, param, info.vocab_size)


def finish(
    endpoint: Endpoint, fields: Fields, options: Options, prompts: list[Prompt], info: EngineInfo, *, echo: bool = False
) -> ParsedRequest:
    """Put it together: the length rule for every prompt, and what was ignored."""
    score_only = options.max_tokens == 0
    wanted = 1 if score_only else options.max_tokens
    budgets = [token_budget(len(prompt.token_ids), wanted, info, prompt_param=prompt.param, max_param=options.max_tokens_param)
               for prompt in prompts]  # fmt: skip
    if options.sampling.min_tokens > min(budgets):
        raise invalid("min_tokens", f"min_tokens {options.sampling.min_tokens} is more than the {min(budgets)} tokens that fit")
    return ParsedRequest(endpoint=endpoint, options=options, prompts=tuple(prompts), budgets=tuple(budgets),
                         ignored=tuple(fields.unread), echo=echo, score_only=score_only)  # fmt: skip


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _read_max_tokens(fields: Fields, least: int) -> tuple[int | None, str]:
    old = fields.integer("max_tokens", least, MAX_TOKENS_FIELD)
    new = fields.integer("max_completion_tokens", least, MAX_TOKENS_FIELD)
    if old is not None and new is not None and old != new:
        raise invalid("max_completion_tokens", f"max_completion_tokens {new} and max_tokens {old} differ: send one")
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def _read_include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.inner("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "stream_options needs stream: true")
    return options.flag("include_usage")


def _read_stops(fields: Fields) -> tuple[str, ...]:
    stop = fields.raw("stop")
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (check_text(stop, "stop", max_chars=MAX_STOP_CHARS, empty=False),)
    if not isinstance(stop, list):
        raise wrong_type("stop", stop, "a string or a list of strings")
    entries = check_list(stop, "stop", max_entries=MAX_STOPS)
    return tuple(
        check_text(entry, f"stop[{place}]", max_chars=MAX_STOP_CHARS, empty=False) for place, entry in enumerate(entries)
    )


def _read_logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    biases = fields.object("logit_bias") or {}
    if len(biases) > MAX_LOGIT_BIASES:
        raise invalid("logit_bias", f"logit_bias may have at most {MAX_LOGIT_BIASES} entries, not {len(biases)}")
    result = {}
    for key, value in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or str(int(key)) != key:
            raise invalid("logit_bias", f"logit_bias: a key must be a token id in decimal digits, not {quote(key)}")
        token_id = check_integer(int(key), "logit_bias", 0, vocab_size - 1)
        result[token_id] = check_number(value, f"logit_bias.{key}", -100.0, 100.0)
    return result


def _refuse_unserved(fields: Fields) -> None:
    """Fields that would change the answer in ways this server does not know."""
    for name in ("tools", "functions"):
        if fields.list_of(name, max_entries=10_000):
            raise unsupported(name, f"{name} are not served")
    choice = fields.raw("tool_choice")
    if choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "tool_choice other than none is not served")
    if fields.raw("function_call") not in (None, "none", "auto"):
        raise unsupported("function_call", "function_call is not served")
    response_format = fields.object("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise unsupported("response_format", "response_format other than text is not served")
    modalities = fields.raw("modalities")
    if modalities not in (None, ["text"]):
        raise unsupported("modalities", "only the modality text is served")
    if fields.object("audio") is not None:
        raise unsupported("audio", "audio is not served")
