"""The table of case SV-04 and its kin: fields of a request that must be refused, each with the field the error names.

Shared by the unit tests of validation and by the test through the server. Vocabulary of 400, context of 4096.
"""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 400
BAD_IDS = (-1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 2**70, 1.5, "7", True, None)
BAD_ID_KEYS = ("-1", str(VOCAB_SIZE), "1.5", "seven", "", "07", " 7", "٧", "9" * 5000)

BAD_FIELDS: list[tuple[str, Any, str]] = [
    *(("stop_token_ids", [value], "stop_token_ids") for value in BAD_IDS),
    ("stop_token_ids", [1] * 100_000, "stop_token_ids"),
    ("stop_token_ids", 7, "stop_token_ids"),
    *(("logit_bias", {key: 1.0}, "logit_bias") for key in BAD_ID_KEYS),
    *(("logit_bias", {"7": value}, "logit_bias.7") for value in (101, -101, "1", True, None, [1])),
    ("logit_bias", {str(place): 0 for place in range(100_000)}, "logit_bias"),
    ("logit_bias", [[7, 1.0]], "logit_bias"),
    *(("n", value, "n") for value in (0, -1, 129, 5_000_000, 1.5, "2", True)),
    ("best_of", 3, "best_of"),
    *(("temperature", value, "temperature") for value in (-1, 1e-30, 2.1, 1e300, 10**400, "1", True, [])),
    *(("top_p", value, "top_p") for value in (0, -0.1, 1.1, "1", False)),
    *(("top_k", value, "top_k") for value in (-1, VOCAB_SIZE + 1, 10**9, 1e9, 2.0, "1", True)),
    *(("min_p", value, "min_p") for value in (-0.1, 1.1, "0")),
    *((name, value, name) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, 1e308, "0")),
    *(("repetition_penalty", value, "repetition_penalty") for value in (0, -1, 11, 1e308, "1")),
    *(("seed", value, "seed") for value in (-1, 2**63, 2**200, 1.0, "42", True)),
    *(("max_tokens", value, "max_tokens") for value in (-1, 10**12, 1.0, 1e12, "7", True, [7], {})),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("min_tokens", 5000, "min_tokens"),
    ("stop", "", "stop"),
    ("stop", ["a"] * 17, "stop"),
    ("stop", ["a", ""], "stop[1]"),
    ("stop", ["a", 7], "stop[1]"),
    ("stop", 7, "stop"),
    ("stop", "x" * 100_000, "stop"),
    ("stop", "\ud800", "stop"),
    *((name, value, name) for name in ("stream", "ignore_eos", "return_token_ids") for value in (1, 0, "true", [])),
    ("include_stop_str_in_output", "yes", "include_stop_str_in_output"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("stream_options", 7, "stream_options"),
    ("stream_options", {}, "stream_options"),
    ("user", 7, "user"),
    ("model", None, "model"),
    ("model", 7, "model"),
]

BAD_COMPLETION_FIELDS: list[tuple[str, Any, str]] = [
    *(("prompt", [5, value], "prompt") for value in (*BAD_IDS, [5])),
    *(("prompt", [[5], [5, value]], "prompt[1]") for value in (-1, VOCAB_SIZE, "7")),
    ("prompt", [[5], "a"], "prompt[1]"),
    ("prompt", ["a", [5]], "prompt[1]"),
    ("prompt", [], "prompt"),
    ("prompt", [[]], "prompt[0]"),
    ("prompt", [True], "prompt[0]"),
    ("prompt", [1.5], "prompt[0]"),
    ("prompt", {"text": "a"}, "prompt"),
    ("prompt", 7, "prompt"),
    ("prompt", None, "prompt"),
    ("prompt", "", "prompt"),
    ("prompt", "\udfff", "prompt"),
    ("prompt", [5] * 100_000, "prompt"),
    ("prompt", ["a"] * 100_000, "prompt"),
    *(("logprobs", value, "logprobs") for value in (-1, 21, 10**9, 1e9, "5", True)),
    ("max_tokens", 0, "max_tokens"),
    ("suffix", "the end", "suffix"),
    ("echo", 1, "echo"),
]

BAD_CHAT_FIELDS: list[tuple[str, Any, str]] = [
    *(("messages", value, "messages") for value in (None, [], {}, "hello", 7)),
    *(("messages", [value], "messages[0]") for value in (None, "hello", 7, [])),
    ("messages", [{"content": "a"}], "messages[0].role"),
    ("messages", [{"role": 7, "content": "a"}], "messages[0].role"),
    ("messages", [{"role": "", "content": "a"}], "messages[0].role"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": 7}], "messages[0].content"),
    ("messages", [{"role": "user", "content": {"text": "a"}}], "messages[0].content"),
    ("messages", [{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ("messages", [{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
    ("messages", [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls"),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
    ("top_logprobs", 5, "top_logprobs"),
    ("logprobs", 5, "logprobs"),
    ("max_tokens", 0, "max_tokens"),
    ("tools", [{"type": "function"}], "tools"),
    ("tool_choice", "required", "tool_choice"),
    ("response_format", {"type": "json_object"}, "response_format"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs"),
    ("chat_template_kwargs", 7, "chat_template_kwargs"),
]
