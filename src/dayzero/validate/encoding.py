"""Whether the server makes the same tokens of a text as the release's own tokenizer and chat template.

A wrong special token or template is invisible to checks that send token ids, and ruins every answer.
"""

from dayzero.core.reports import Check
from dayzero.validate.ask import Asked, Encoded
from dayzero.validate.checks import not_shown

NAME = "tokenizer_equal"


def check_encodings(asked: Asked) -> Check:
    """Not required where there is no tokenizer, no chat template or no server to compare."""
    if asked.encoded is None:
        return not_shown(NAME, "no server was given that tells the tokens of a text", required=False)
    if not asked.encoded:
        return not_shown(NAME, asked.inputs.not_encoded or "no sample prompt fits the context", required=False)
    wrong = [found for found in asked.encoded if found.token_ids != found.encoding.token_ids]
    num_tokens = sum(len(found.encoding.token_ids) for found in asked.encoded)
    kinds = {kind: sum(found.encoding.kind == kind for found in asked.encoded) for kind in ("text", "chat")}
    detail = f"{num_tokens} tokens of {kinds['text']} prompts and {kinds['chat']} chats compared with the release's tokenizer"
    detail += f"; chats are not: {asked.inputs.not_encoded}" if asked.inputs.not_encoded else ""
    return Check(name=NAME, verdict="fail" if wrong else "pass", value=len(wrong), limit=0,
                 where=f"{wrong[0].encoding.kind}: {wrong[0].encoding.text}" if wrong else "",
                 detail=f"{_difference(wrong[0])}; {detail}" if wrong else detail)  # fmt: skip


def _difference(found: Encoded) -> str:
    if found.refused:
        return found.refused
    got, want = found.token_ids, found.encoding.token_ids
    place = next((at for at, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]), min(len(got), len(want)))
    what = f"got {got[place:][:4]}, want {want[place:][:4]}"
    return f"{len(got)} tokens instead of {len(want)}, the first difference at {place}: {what}"
