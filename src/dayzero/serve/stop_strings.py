"""Where a text ends because of a stop string: pieces of text in, the part that is certain out.

Rule: of all occurrences in the full text the one that starts first ends it, and of those that start there the shortest; so
the result does not depend on how the text was cut into pieces. Only a suffix that may still grow into a stop string is held
back. When a stop string is complete but one that started earlier is still undecided, the decision waits for it.
"""


class StopMatcher:
    """State of one generated text. After `matched` is set, nothing more comes out."""

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        assert all(stops), stops
        self._stops = stops
        self._include = include
        self._pending = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to be part of the output now. May set `matched`."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._pending += text
        undecided = self._first_undecided()
        found = self._first_found()
        if found is not None and found[0] <= undecided:
            return self._end(*found)
        out, self._pending = self._pending[:undecided], self._pending[undecided:]
        return out

    def pass_through(self, text: str) -> str:
        """Text in which no stop string may be found (that of the first `min_tokens` tokens)."""
        assert not self._pending, self._pending
        return text

    def flush(self) -> str:
        """The end of the generation: everything held back, or what comes before a match that was waiting."""
        if self.matched is not None:
            return ""
        found = self._first_found()
        if found is not None:
            return self._end(*found)
        out, self._pending = self._pending, ""
        return out

    def _end(self, start: int, stop: str) -> str:
        out = self._pending[: start + len(stop) if self._include else start]
        self.matched, self._pending = stop, ""
        return out

    def _first_found(self) -> tuple[int, str] | None:
        places = [(start, len(stop), stop) for stop in self._stops if (start := self._pending.find(stop)) >= 0]
        if not places:
            return None
        start, _, stop = min(places)
        return start, stop

    def _first_undecided(self) -> int:
        """Where the longest suffix that is a proper prefix of a stop string begins; the length when there is none."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:size]):
                    longest = size
                    break
        return len(self._pending) - longest
