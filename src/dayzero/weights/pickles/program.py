"""The pickle of a PyTorch checkpoint in, inert records out. Nothing of the file is imported, looked up or called.

A pickle is a program for a small stack machine; this is a second machine that knows only the instructions which build dicts,
lists, tuples, numbers and text, and for which `torch._utils._rebuild_tensor_v2` is a name that makes a `StoredTensor` record.
Every other name ends the reading and is named, wherever in the file it stands, whether or not it would have been called.
Work and memory are linear in the pickle's length: nothing recurses, and no value is ever printed or hashed but text and
numbers (a few bytes of pickle can nest tuples whose printing never ends). Not here: finding the
pickle, or checking sizes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dayzero.core.units import DTYPE_BITS
from dayzero.model.headers import MAX_DIMENSION

# A tensor takes some 30 instructions and one dict (of its hooks). One byte of pickle can be a dict of 200 bytes.
MAX_INSTRUCTIONS, MAX_DICTS = 10_000_000, 1_000_000
MAX_RANK = 64  # torch's own limit on dimensions
# Storage classes of torch and the dtype their elements have; UntypedStorage counts bytes.
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "UntypedStorage": "uint8",
}  # fmt: skip
UNTYPED = "torch.storage.UntypedStorage"
ORDERED_DICT, SIZE = "collections.OrderedDict", "torch.Size"
TENSOR, TENSOR_WITH_DTYPE = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
PARAMETER = "torch._utils._rebuild_parameter"
CALLABLE = (ORDERED_DICT, SIZE, TENSOR, TENSOR_WITH_DTYPE, PARAMETER)
# What other names of torch would have built, for the refusal.
KNOWN_OTHERS = {
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without storage",
    "torch._tensor._rebuild_from_type_v2": "a tensor subclass",
    "torch._utils._rebuild_wrapper_subclass": "a tensor subclass",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of another device",
}


class RefusedPickle(Exception):
    """`kind` and `detail` of the problem."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


@dataclass(frozen=True, slots=True)
class Name:
    """A name of the file's, allowed and never looked up."""

    text: str


@dataclass(frozen=True, slots=True)
class Storage:
    """`key`: the member `data/<key>`. `dtype` is that of the storage class, uint8 where it counts bytes."""

    key: str
    dtype: str
    num_elements: int
    untyped: bool


@dataclass(frozen=True, slots=True)
class StoredTensor:
    storage: Storage
    dtype: str
    offset: int  # in elements of `dtype`, as the strides
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Entries:
    """A dict of the file: keys are text or numbers. `repeated` are keys given more than once; the last one counts."""

    items: dict[Any, Any] = field(default_factory=dict)
    repeated: list[Any] = field(default_factory=list)

    def put(self, key: Any, value: Any) -> None:
        if not (key is None or isinstance(key, (str, float)) or (isinstance(key, int) and abs(key) <= MAX_DIMENSION)):
            raise RefusedPickle("pickle_value", f"a dict key is a {type(key).__name__}, wanted text or a number")
        if key in self.items:
            self.repeated.append(key)
        self.items[key] = value


def run_pickle(data: bytes) -> Any:
    """The value the pickle stands for, made of Entries, list, tuple, numbers, text, None, Storage and StoredTensor.

    Raises RefusedPickle for anything else, naming it.
    """
    try:
        return _Machine().run(data)
    except RefusedPickle:
        raise
    except (ValueError, IndexError, KeyError, UnicodeError, OverflowError) as error:  # what genops and a broken program raise
        raise RefusedPickle("pickle_broken", f"its pickle is broken: {type(error).__name__} {str(error)[:120]}") from error


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.num_dicts = 0

    def run(self, data: bytes) -> Any:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            if number >= MAX_INSTRUCTIONS or self.num_dicts > MAX_DICTS:
                raise RefusedPickle("pickle_too_large", f"its pickle has more than {MAX_INSTRUCTIONS} instructions or "
                                    f"{MAX_DICTS} dicts")  # fmt: skip
            if opcode.name == "STOP":
                assert position is not None  # genops knows it of bytes
                if position + 1 != len(data):
                    raise RefusedPickle("trailing_bytes", f"{len(data) - position - 1} bytes follow the end of its pickle")
                value = self.stack.pop()
                if self.stack or self.marks:
                    raise RefusedPickle("pickle_broken", "its pickle leaves values behind")
                return value
            step = STEPS.get(opcode.name)
            if step is None:
                raise RefusedPickle("pickle_instruction", f"its pickle uses {opcode.name} at byte {position}, which plain "
                                    "checkpoints of tensors do not need")  # fmt: skip
            step(self, argument)
        raise RefusedPickle("pickle_broken", "its pickle has no end")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def empty_dict(self) -> None:
        self.num_dicts += 1
        self.push(Entries())

    def since_mark(self) -> list[Any]:
        at = self.marks.pop()
        values = self.stack[at:]
        del self.stack[at:]
        return values

    def top(self, *kinds: type) -> Any:
        value = self.stack[-1]
        if not isinstance(value, kinds):
            raise RefusedPickle("pickle_broken", f"its pickle fills a {type(value).__name__} as if it were a container")
        return value

    def take(self, count: int) -> list[Any]:
        """The last values, which must lie above the last mark."""
        at = len(self.stack) - count
        if at < (self.marks[-1] if self.marks else 0):
            raise RefusedPickle("pickle_broken", "its pickle takes more values than there are")
        values = self.stack[at:]
        del self.stack[at:]
        return values

    def set_items(self, values: Sequence[Any]) -> None:
        target = self.top(Entries)
        if len(values) % 2:
            raise RefusedPickle("pickle_broken", "its pickle has a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            target.put(key, value)

    def name(self, text: str) -> None:
        module, _, last = text.rpartition(".")
        storage = last in STORAGES and (module == "torch" or text == UNTYPED)
        dtype = module == "torch" and last in DTYPE_BITS
        if not (storage or dtype or text in CALLABLE):
            what = f", {KNOWN_OTHERS[text]}" if text in KNOWN_OTHERS else ""
            raise RefusedPickle("unknown_global", f"its pickle names {text!r:.120}{what}, which is no plain tensor; it was not "
                                "looked up or run")  # fmt: skip
        self.push(Name(text))

    def stack_global(self) -> None:
        module, last = self.take(2)
        if not (isinstance(module, str) and isinstance(last, str)):
            raise RefusedPickle("pickle_broken", "its pickle makes a name of something that is no text")
        self.name(f"{module}.{last}")

    def reduce(self) -> None:
        function, arguments = self.take(2)
        if not isinstance(function, Name) or function.text not in CALLABLE:
            shown = function.text if isinstance(function, Name) else f"a {type(function).__name__}"
            raise RefusedPickle("pickle_instruction", f"its pickle calls {shown}, which makes no tensor")
        if not isinstance(arguments, tuple):
            raise RefusedPickle("pickle_broken", f"its pickle calls {function.text} without a tuple of arguments")
        self.num_dicts += function.text == ORDERED_DICT
        self.push(BUILD[function.text](arguments))

    def build(self) -> None:
        # The attributes of a state dict (`_metadata`: versions of modules). They hold no tensors' bytes and are left out.
        target, _ = self.take(2)
        if not isinstance(target, Entries):
            raise RefusedPickle("pickle_instruction", f"its pickle sets attributes of a {type(target).__name__}")
        self.push(target)

    def persistent(self) -> None:
        (value,) = self.take(1)
        self.push(_storage(value))


def _storage(value: Any) -> Storage:
    """('storage', storage class, key, location, number of elements), as torch.save writes it."""
    shaped = isinstance(value, tuple) and len(value) == 5 and value[0] == "storage" and isinstance(value[1], Name)
    if not shaped or not isinstance(value[2], str) or not isinstance(value[3], str) or not _is_count(value[4]):
        raise RefusedPickle("pickle_broken", f"its pickle refers to a storage by a {type(value).__name__} that names none")
    kind = value[1].text.rpartition(".")[2]
    if kind not in STORAGES:
        raise RefusedPickle("pickle_broken", f"its pickle has {value[1].text} as a storage")
    return Storage(value[2], STORAGES[kind], value[4], kind == "UntypedStorage")


def _tensor(arguments: tuple[Any, ...], dtype: str | None = None) -> StoredTensor:
    """(storage, offset, shape, strides, requires_grad, hooks[, metadata])."""
    if len(arguments) not in (6, 7) or not isinstance(arguments[0], Storage):
        raise RefusedPickle("pickle_broken", f"its pickle builds a tensor of {len(arguments)} arguments")
    storage, offset, shape, strides = arguments[:4]
    sizes = (shape, strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else ()
    if not sizes or not all(_is_count(one) for one in (offset, *shape, *strides)):
        raise RefusedPickle("pickle_broken", "its pickle builds a tensor whose offset, shape or strides are not sizes")
    if len(shape) != len(strides) or len(shape) > MAX_RANK:
        raise RefusedPickle("pickle_broken", f"its pickle builds a tensor of {len(shape)} sizes and {len(strides)} strides")
    if len(arguments) == 7 and arguments[6] is not None and not (isinstance(arguments[6], Entries) and not arguments[6].items):
        raise RefusedPickle("tensor_metadata", "its pickle marks a tensor as conjugated or negated, or gives it other metadata")
    if dtype is None and storage.untyped:
        raise RefusedPickle("pickle_broken", "its pickle builds a tensor of an untyped storage without a dtype")
    return StoredTensor(storage, dtype or storage.dtype, offset, shape, strides)


def _tensor_with_dtype(arguments: tuple[Any, ...]) -> StoredTensor:
    """As `_tensor`, with the dtype after the hooks."""
    dtype = arguments[6] if len(arguments) in (7, 8) else None
    if not isinstance(dtype, Name) or dtype.text.rpartition(".")[2] not in DTYPE_BITS:
        raise RefusedPickle("pickle_broken", "its pickle builds a tensor without a dtype")
    return _tensor((*arguments[:6], *arguments[7:]), dtype.text.rpartition(".")[2])


def _parameter(arguments: tuple[Any, ...]) -> StoredTensor:
    if len(arguments) != 3 or not isinstance(arguments[0], StoredTensor):
        raise RefusedPickle("pickle_broken", "its pickle builds a parameter of something that is no tensor")
    return arguments[0]


def _ordered_dict(arguments: tuple[Any, ...]) -> Entries:
    made = Entries()
    for pair in arguments[0] if len(arguments) == 1 and isinstance(arguments[0], list) else ():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise RefusedPickle("pickle_broken", "its pickle builds an OrderedDict of something that is no pair")
        made.put(*pair)
    if len(arguments) > 1 or (arguments and not isinstance(arguments[0], list)):
        raise RefusedPickle("pickle_broken", "its pickle builds an OrderedDict of something that is no list")
    return made


def _size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(arguments) != 1 or not isinstance(arguments[0], (tuple, list)):
        raise RefusedPickle("pickle_broken", "its pickle builds a torch.Size of something that is no list")
    return tuple(arguments[0])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DIMENSION


BUILD: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    ORDERED_DICT: _ordered_dict, SIZE: _size, TENSOR: _tensor, TENSOR_WITH_DTYPE: _tensor_with_dtype, PARAMETER: _parameter,
}  # fmt: skip

_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
           "SHORT_BINBYTES", "BINBYTES")  # fmt: skip
STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(_VALUES, _Machine.push),
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.empty_dict(),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.take(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.take(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.take(3))),
    "APPEND": lambda machine, _: _append(machine, machine.take(1)),
    "APPENDS": lambda machine, _: _append(machine, machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items(machine.take(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "BINPUT": lambda machine, at: machine.memo.__setitem__(at, machine.stack[-1]),
    "LONG_BINPUT": lambda machine, at: machine.memo.__setitem__(at, machine.stack[-1]),
    "MEMOIZE": lambda machine, _: machine.memo.__setitem__(len(machine.memo), machine.stack[-1]),
    "BINGET": lambda machine, at: machine.push(machine.memo[at]),
    "LONG_BINGET": lambda machine, at: machine.push(machine.memo[at]),
    "GLOBAL": lambda machine, text: machine.name(".".join(text.split(" ", 1))),
    "STACK_GLOBAL": lambda machine, _: machine.stack_global(),
    "REDUCE": lambda machine, _: machine.reduce(),
    "BUILD": lambda machine, _: machine.build(),
    "BINPERSID": lambda machine, _: machine.persistent(),
}


def _append(machine: _Machine, values: list[Any]) -> None:
    machine.top(list).extend(values)
