"""A chat template rendered in a process of its own: messages in, text out. `python -m dayzero.serve.template_process`.

A template comes with the release and is not trusted: transformers' sandbox keeps it from Python's internals, the memory
limit here from filling the machine, and the server kills this process when a template takes too long. One JSON object per
line, on standard input (first `{"template", "special_tokens"}`, then requests) and output.
"""

import json
import os
import resource
import sys
from typing import Any

from dayzero.serve.processes import end_with_parent

MEMORY_BYTES = 1 << 30  # beyond what the process has once it is ready
MAX_ERROR_CHARS = 1000


def render(template: str, special_tokens: dict[str, str], request: dict[str, Any], max_chars: int) -> dict[str, str]:
    """`{"text"}`, or `{"error"}` with what the template said."""
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = special_tokens | request["arguments"]
    try:
        rendered = render_jinja_template(
            conversations=[request["messages"]], chat_template=template, add_generation_prompt=True, **variables
        )
        text = str(rendered[0][0])  # (texts, spans of the assistant)
        text.encode("utf-8")
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it recurses too deeply"}
    except Exception as error:  # whatever a template raises is its answer to these messages
        return {"error": (str(error) or type(error).__name__)[:MAX_ERROR_CHARS]}
    if len(text) > max_chars:
        return {"error": f"its output has {len(text)} characters, more than {max_chars}"}
    return {"text": text}


def limit_memory() -> None:
    """Bound the address space to what is in use now and MEMORY_BYTES more (where the platform can tell)."""
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            in_use = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES, in_use + MEMORY_BYTES))


def main(arguments: list[str]) -> int:
    end_with_parent(int(arguments[0]))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    start = json.loads(sys.stdin.readline())
    empty: dict[str, Any] = {"messages": [], "arguments": {}}
    render("", {}, empty, 1)  # imports and compiles what every template needs
    limit_memory()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        answer = render(start["template"], start["special_tokens"], json.loads(line), start["max_chars"])
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
