"""The `messages` of a chat request, checked and brought to the one form chat templates are written for.

Out: a list of plain dicts, `content` always a string. Parts of text are joined, null content is the empty string, empty
`tool_calls` are dropped, arguments of tool calls become objects. Which roles may follow each other is the template's
business; a template that knows no "developer" gets that role as "system".
"""

import json
from typing import Any

from dayzero.serve.errors import invalid, unsupported
from dayzero.serve.fields import Fields, check_list, check_object, check_text, wrong_type

MAX_MESSAGES = 10_000
MAX_ROLE_CHARS = 64
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
# Names a template is given by the server itself.
RESERVED_ARGUMENTS = frozenset({"messages", "tools", "documents", "chat_template", "add_generation_prompt",
                                "continue_final_message", "return_assistant_tokens_mask", "conversations"})  # fmt: skip


def read_messages(fields: Fields, chat_template: str) -> list[dict[str, Any]]:
    """Raises ApiError naming the message and the field at fault."""
    messages = check_list(fields.required("messages"), "messages", max_entries=MAX_MESSAGES, empty=False)
    knows_developer = "developer" in chat_template
    return [_read_message(message, f"messages[{place}]", knows_developer) for place, message in enumerate(messages)]


def read_template_arguments(fields: Fields) -> dict[str, Any]:
    """`chat_template_kwargs`: further variables for the template."""
    arguments = fields.object("chat_template_kwargs") or {}
    taken = sorted(RESERVED_ARGUMENTS & arguments.keys())
    if taken:
        raise invalid("chat_template_kwargs", f"chat_template_kwargs may not set {taken[0]!r}")
    return arguments


def _read_message(message: Any, param: str, knows_developer: bool) -> dict[str, Any]:
    values = check_object(message, param)
    fields = Fields(values, f"{param}.")
    role = check_text(fields.required("role"), f"{param}.role", max_chars=MAX_ROLE_CHARS, empty=False)
    if role == "developer" and not knows_developer:
        role = "system"
    tool_calls = _read_tool_calls(fields, f"{param}.tool_calls")
    if "content" not in values and not tool_calls:
        raise invalid(f"{param}.content", f"{param}.content is required", code="missing")
    result: dict[str, Any] = {"role": role, "content": _read_content(fields.raw("content"), f"{param}.content")}
    if tool_calls:
        result["tool_calls"] = tool_calls
    for name in ("name", "tool_call_id", "reasoning_content"):
        text = fields.text(name)
        if text is not None:
            result[name] = text
    return result


def _read_content(content: Any, param: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return check_text(content, param)
    if not isinstance(content, list):
        raise wrong_type(param, content, "a string or a list of parts")
    return "".join(_read_part(part, f"{param}[{place}]") for place, part in enumerate(content))


def _read_part(part: Any, param: str) -> str:
    fields = Fields(check_object(part, param), f"{param}.")
    kind = check_text(fields.required("type"), f"{param}.type")
    if kind not in TEXT_PARTS:
        raise unsupported(param, f"{param}: parts other than text are not served: this model is served as text only")
    return check_text(fields.required("text"), f"{param}.text")


def _read_tool_calls(fields: Fields, param: str) -> list[dict[str, Any]]:
    calls = fields.list_of("tool_calls", max_entries=MAX_MESSAGES) or []
    return [_read_tool_call(call, f"{param}[{place}]") for place, call in enumerate(calls)]


def _read_tool_call(call: Any, param: str) -> dict[str, Any]:
    values = check_object(call, param)
    function = check_object(Fields(values, f"{param}.").required("function"), f"{param}.function")
    inner = Fields(function, f"{param}.function.")
    name = check_text(inner.required("name"), f"{param}.function.name")
    return values | {"function": function | {"name": name, "arguments": _read_arguments(inner.raw("arguments"))}}


def _read_arguments(arguments: Any) -> Any:
    """Clients send an object as a JSON string; templates print objects. Text that is no JSON stays text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
