"""How many tokens a request may generate: one rule for every endpoint.

- A prompt of `context` tokens or more is refused: nothing could be generated.
- prompt + max_tokens beyond the limit is refused; the message names both and the limit. Nothing is clamped or truncated.
- Without max_tokens a request gets what remains of the limit, and ends with finish_reason "length" there.
- The limit is the context, or what the cache pool can hold of one request where that is less (a request beyond it could
  never finish); the message says which.
"""

from dayzero.core.generation import EngineInfo
from dayzero.serve.errors import ApiError, invalid


def _too_long(message: str, param: str) -> ApiError:
    return invalid(param, message, code="context_length_exceeded")


def token_budget(num_prompt: int, max_tokens: int | None, info: EngineInfo, *, prompt_param: str, max_param: str) -> int:
    """The tokens the request may generate, at least 1. Raises ApiError naming the limit that is exceeded."""
    if num_prompt == 0:
        raise invalid(prompt_param, f"{prompt_param} is empty: it has 0 tokens")
    check_prompt_length(num_prompt, info, prompt_param=prompt_param)
    limit, name = _limit(info)
    if max_tokens is None:
        return limit - num_prompt
    if num_prompt + max_tokens > limit:
        message = (
            f"{num_prompt} prompt tokens and {max_param} {max_tokens} are {num_prompt + max_tokens} tokens, but {name} is "
            f"{limit}: shorten the prompt or ask for at most {limit - num_prompt}"
        )
        raise _too_long(message, max_param)
    return max_tokens


def check_prompt_length(num_prompt: int, info: EngineInfo, *, prompt_param: str) -> None:
    """Raises ApiError when nothing could follow a prompt of this length."""
    limit, name = _limit(info)
    if num_prompt >= limit:
        message = f"{prompt_param} has {num_prompt} tokens, but {name} is {limit}: at most {limit - 1} leave room for an answer"
        raise _too_long(message, prompt_param)


def _limit(info: EngineInfo) -> tuple[int, str]:
    if info.capacity_tokens < info.context_tokens:
        return info.capacity_tokens, f"the capacity of the cache for one request (context {info.context_tokens})"
    return info.context_tokens, "the context length"
