"""The one error a user sees: what happened, what was got, what was wanted, how to fix it."""


class DayZeroError(Exception):
    """A mistake in the input or the environment, told in four short facts (exit status 2).

    Internal invariants use `assert`; this class is for what a user can do something about.
    """

    def __init__(
        self, what: str, *, got: object = "", want: object = "", fix: str = "", details: dict[str, object] | None = None
    ) -> None:
        self.what = what
        self.got = str(got)
        self.want = str(want)
        self.fix = fix
        self.details = details or {}  # further fields of the JSON object, for scripts
        super().__init__(what)

    def as_dict(self) -> dict[str, object]:
        """The object printed under `--json`."""
        return {"error": {"what": self.what, "got": self.got, "wanted": self.want, "fix": self.fix}, **self.details}

    def __str__(self) -> str:
        facts = (("got", self.got), ("wanted", self.want), ("fix", self.fix))
        return "\n".join([self.what, *(f"  {name + ':':8}{value}" for name, value in facts if value)])

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.got, self.want, self.fix, self.details)


def _rebuild(cls: type[DayZeroError], what: str, got: str, want: str, fix: str, details: dict[str, object]) -> DayZeroError:
    return cls(what, got=got, want=want, fix=fix, details=details)


def one_line(error: BaseException, most: int = 300) -> str:
    """Class and text of an exception on one line of at most so many characters: a reason inside a sentence."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]
