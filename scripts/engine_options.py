"""Make the option list of a serving engine from its source package: what `dayzero plan --export` is checked against.

    python scripts/engine_options.py vllm SOURCE --version 0.33.0 [--out FOLDER]
    python scripts/engine_options.py sglang SOURCE --version 0.5.23
    python scripts/engine_options.py vllm-ascend SOURCE --version 0.23.0.post1 --base vllm-0.23.0

SOURCE is an unpacked source package or wheel (`pip download --no-deps --no-clean --no-binary :all: vllm==0.33.0` leaves one
in pip's temporary folder even where the package cannot be built here; a wheel is unpacked by `python -m zipfile -e`).

Goes in: the engine's own argument parser as text. Comes out: one JSON file, an option a line: its spelling, aliases, type,
choices. The source is parsed, never imported or run, so no accelerator and no dependency of the engine is needed. A choice
list that is computed at run time is left out (null), and so is the check of it.
"""

import argparse
import ast
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "src" / "dayzero" / "plan" / "export" / "options"
SCHEMA = "dayzero.engine_options/1"

# Environment variables the exports use. A list keeps only those whose name is in the engine's source.
ENVIRONMENT = ("VLLM_PP_LAYER_PARTITION", "SGLANG_PP_LAYER_PARTITION", "VLLM_NIXL_SIDE_CHANNEL_HOST",
               "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_HOST_IP", "SGLANG_HOST_IP")  # fmt: skip
SCALARS = {"int": "int", "float": "float", "str": "str", "bool": "bool"}


class Source:
    """Parsed modules of one package, and the names they define: classes, and literal types and lists at top level."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.read: dict[str, str] = {}
        self.names: dict[str, ast.expr] = {}

    def parse(self, relative: str) -> ast.Module:
        text = (self.root / relative).read_text(encoding="utf-8")
        self.read[relative] = hashlib.sha256(text.encode()).hexdigest()
        tree = ast.parse(text)
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.names.setdefault(node.targets[0].id, node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self.names.setdefault(node.target.id, node.value)
        return tree

    def index_literals(self, package: str) -> None:
        """Literal types anywhere in the package, for annotations that import them."""
        for path in sorted((self.root / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if "Literal[" in text and re.search(r"^\w+(: \w+)? = Literal\[", text, re.MULTILINE):
                for node in ast.parse(text).body:
                    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                        value = node.value
                        if isinstance(value, ast.Subscript) and _name(value.value) == "Literal":
                            self.names.setdefault(node.targets[0].id, value)

    def mentions(self, package: str, word: str) -> bool:
        return any(word in path.read_text(encoding="utf-8", errors="replace") for path in (self.root / package).rglob("*.py"))


def _name(node: ast.AST | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def parts(node: ast.expr, source: Source, seen: frozenset[str] = frozenset()) -> list[ast.expr]:
    """The members of a union, aliases followed: `Optional[X]`, `X | Y`, `Annotated[X, ...]`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return parts(ast.parse(node.value, mode="eval").body, source, seen)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return parts(node.left, source, seen) + parts(node.right, source, seen)
    if isinstance(node, ast.Subscript):
        kind = _name(node.value)
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if kind in ("Optional", "Union"):
            return [part for item in inner for part in parts(item, source, seen)]
        if kind in ("Annotated", "A", "SkipValidation"):
            return parts(inner[0], source, seen)
    name = _name(node)
    if isinstance(node, ast.Name) and name not in SCALARS and name in source.names and name not in seen:
        return parts(source.names[name], source, seen | {name})
    return [node]


def values(node: ast.expr | None, source: Source) -> list[Any] | None:
    """A list of constants, names followed; None where it is computed at run time."""
    if isinstance(node, ast.Name) and node.id in source.names:
        return values(source.names[node.id], source)
    if isinstance(node, ast.Subscript) and _name(node.value) == "Literal":
        node = node.slice if isinstance(node.slice, ast.Tuple) else ast.Tuple(elts=[node.slice])
    if isinstance(node, ast.Call) and _name(node.func) in ("set", "list", "tuple", "frozenset", "get_args", "sorted"):
        return values(node.args[0], source) if node.args else []
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)) and all(isinstance(item, ast.Constant) for item in node.elts):
        return [item.value for item in node.elts if isinstance(item, ast.Constant)]
    return None


def typed(node: ast.expr, source: Source) -> dict[str, Any]:
    """The kind of value an annotation takes on the command line."""
    members = [item for item in parts(node, source) if not (isinstance(item, ast.Constant) and item.value is None)]
    kinds = [_name(item.value) if isinstance(item, ast.Subscript) else _name(item) for item in members]
    literal = [value for item in members if isinstance(item, ast.Subscript) and _name(item.value) == "Literal"
               for value in values(item, source) or []]  # fmt: skip
    if "bool" in kinds and "str" not in kinds:
        return {"type": "bool"}
    if literal:
        return {"type": type(literal[0]).__name__, "choices": literal}
    if {"list", "tuple", "set", "List", "Tuple"} & set(kinds):
        return {"type": "list"}
    for kind in ("int", "float"):
        if kind in kinds:
            return {"type": kind}
    if {"dict", "Dict"} & set(kinds) or any(kind.endswith("Config") for kind in kinds):
        return {"type": "json"}
    return {"type": "str"}


def option(names: list[str], facts: dict[str, Any]) -> dict[str, Any]:
    """The longest spelling first: it says what it is."""
    long = [name for name in names if name.startswith("--")]
    made = {"option": long[0], "aliases": [name for name in names if name != long[0]], "type": facts.get("type", "str"),
            "choices": facts.get("choices")}  # fmt: skip
    return made | ({"fields": facts["fields"]} if "fields" in facts else {})


def classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def fields(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> dict[str, ast.expr]:
    """Annotated fields of a class, its bases' first."""
    found: dict[str, ast.expr] = {}
    for base in node.bases:
        if _name(base) in known:
            found |= fields(known[_name(base)], known)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
            found[item.target.id] = item.annotation
    return found


def added(tree: ast.AST, source: Source, lookup: dict[str, dict[str, ast.expr]]) -> list[dict[str, Any]]:
    """Every `add_argument` call. `lookup`: the variable that holds a configuration's keyword arguments -> its fields."""
    found = []
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and _name(call.func) == "add_argument"):
            continue
        names = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        if not any(name.startswith("--") for name in names):
            continue
        facts: dict[str, Any] = {}
        for word in call.keywords:
            if word.arg == "action":
                facts["type"] = "bool"
            elif word.arg == "type" and isinstance(word.value, ast.Name):
                facts.setdefault("type", SCALARS.get(word.value.id, "str"))
            elif word.arg == "choices":
                facts["choices"] = values(word.value, source)
            elif word.arg is None:
                for node in ast.walk(word.value):
                    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                        annotation = lookup.get(_name(node.value), {}).get(str(node.slice.value))
                        if annotation is not None:
                            facts |= typed(annotation, source)
                            facts |= _inside(names[0], lookup)
        if facts.get("choices"):
            facts["type"] = "str" if facts.get("type") == "bool" else facts.get("type", "str")  # its action takes a value
        found.append(option(names, facts))
    return found


def _inside(name: str, lookup: dict[str, dict[str, ast.expr]]) -> dict[str, Any]:
    """For the options whose JSON the exports write: the keys that may be in it, those of an inner object dotted."""
    return {"fields": sorted(lookup[name])} if name in lookup else {}


def connectors(source: Source, relative: str) -> list[str]:
    """Names under which a cache can be handed from one server to another."""
    calls = [call for call in ast.walk(source.parse(relative)) if isinstance(call, ast.Call)]
    return sorted({str(call.args[0].value) for call in calls if _name(call.func) == "register_connector"
                   and call.args and isinstance(call.args[0], ast.Constant)})  # fmt: skip


def read_vllm(source: Source) -> list[dict[str, Any]]:
    """`EngineArgs.add_cli_args` over the configuration classes, and the arguments of `vllm serve`."""
    known: dict[str, ast.ClassDef] = {}
    for path in sorted((source.root / "vllm" / "config").rglob("*.py")):
        known |= classes(source.parse(path.relative_to(source.root).as_posix()))
    source.index_literals("vllm")
    engine = source.parse("vllm/engine/arg_utils.py")
    lookup: dict[str, dict[str, ast.expr]] = {}
    for node in ast.walk(engine):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            calls = [call for call in ast.walk(node.value) if isinstance(call, ast.Call) and _name(call.func) == "get_kwargs"]
            if calls and _name(calls[0].args[0]) in known:
                lookup[node.targets[0].id] = fields(known[_name(calls[0].args[0])], known)
    lookup["--kv-transfer-config"] = fields(known["KVTransferConfig"], known)
    passes = {f"pass_config.{name}": kind for name, kind in fields(known["PassConfig"], known).items()}
    lookup["--compilation-config"] = fields(known["CompilationConfig"], known) | passes
    found = added(engine, source, lookup)
    front = next(path for path in ("vllm/entrypoints/common/cli_args.py", "vllm/entrypoints/openai/cli_args.py")
                 if (source.root / path).is_file())  # fmt: skip
    tree = source.parse(front)
    found += added(tree, source, {})
    served = classes(tree)
    for name, annotation in fields(served["FrontendArgs"], served).items():
        found.append(option([f"--{name.replace('_', '-')}"], typed(annotation, source)))
    return found


def read_sglang(source: Source) -> list[dict[str, Any]]:
    """Annotated fields of the argument groups, and the arguments that `server_args.py` adds by hand."""
    package = "sglang/srt" if (source.root / "sglang" / "srt").is_dir() else "python/sglang/srt"
    source.parse(f"{package}/arg_groups/choices.py")
    found = []
    for path in sorted((source.root / package / "arg_groups" / "fields").glob("*.py")):
        for group in classes(source.parse(path.relative_to(source.root).as_posix())).values():
            for name, annotation in fields(group, {}).items():
                if isinstance(annotation, ast.Subscript) and _name(annotation.value) in ("A", "Annotated"):
                    found += _sglang_field(name, annotation, source)
    return found + added(source.parse(f"{package}/server_args.py"), source, {})


def _sglang_field(name: str, annotation: ast.Subscript, source: Source) -> list[dict[str, Any]]:
    members = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    facts, names = typed(members[0], source), [f"--{name.replace('_', '-')}"]
    for call in members[1:]:
        if isinstance(call, ast.Call) and _name(call.func) == "Arg":
            words = {word.arg: word.value for word in call.keywords}
            if "no_cli" in words:
                return []
            if "cli_name" in words:
                names[0] = ast.literal_eval(words["cli_name"])
            names += ast.literal_eval(words["aliases"]) if "aliases" in words else []
            if "choices" in words:
                facts["choices"] = values(words["choices"], source)
    return [option(names, facts)]


def read_ascend(source: Source) -> list[dict[str, Any]]:
    """Keys of `--additional-config`, dotted: what the plugin's configuration object reads from it, and from the parts."""
    tree = source.parse("vllm_ascend/ascend_config.py")
    found = {key: "json" if key.endswith("_config") else "any" for key in _reads(tree, "additional_config")}
    for name, key in (("FinegrainedTPConfig", "finegrained_tp_config"), ("EplbConfig", "eplb_config")):
        found |= {f"{key}.{inner}": "any" for inner in _reads(classes(tree)[name], key)}
    return [{"option": key, "aliases": [], "type": kind, "choices": None} for key, kind in sorted(found.items())]


def _reads(tree: ast.AST, holder: str) -> set[str]:
    keys = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            own = call.func.attr == "get" and _name(call.func.value) == holder
            passed = call.func.attr == "_get_config_value" and call.args and _name(call.args[0]) == holder
            place = 0 if own else 1
            if (own or passed) and len(call.args) > place and isinstance(call.args[place], ast.Constant):
                keys.add(str(call.args[place].value))  # type: ignore[attr-defined]
    return keys


READERS = {"vllm": (read_vllm, "vllm"), "sglang": (read_sglang, "sglang"), "vllm-ascend": (read_ascend, "vllm_ascend")}
CONNECTORS = {"vllm": "vllm/distributed/kv_transfer/kv_connector/factory.py",
              "vllm-ascend": "vllm_ascend/distributed/kv_transfer/__init__.py"}  # fmt: skip


def make(engine: str, root: Path, version: str, base: str | None = None) -> str:
    """The file's text. Raises SystemExit when the source does not look as it did: a shorter list would refuse real options."""
    reader, package = READERS[engine]
    source = Source(root)
    found = {item["option"]: item for item in reader(source)}
    least = {"vllm": 200, "sglang": 300, "vllm-ascend": 20}[engine]
    if len(found) < least:
        raise SystemExit(f"{engine} {version}: only {len(found)} options were found in {root}; its parser has moved")
    environment = [word for word in ENVIRONMENT if source.mentions(package, word)]
    head = {"schema": SCHEMA, "engine": engine, "version": version, "base": base, "environment": environment,
            "connectors": connectors(source, CONNECTORS[engine]) if engine in CONNECTORS else [],
            "sources": {path: digest for path, digest in sorted(source.read.items()) if "/config/" not in path}}  # fmt: skip
    lines = ",\n".join("  " + json.dumps(item) for _, item in sorted(found.items()))
    return json.dumps(head, indent=1)[:-2] + ',\n "options": [\n' + lines + "\n ]\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("engine", choices=sorted(READERS))
    parser.add_argument("source", type=Path)
    parser.add_argument("--version", required=True)
    parser.add_argument("--base", help="for a plugin: the option list of the engine it extends")
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    text = make(given.engine, given.source, given.version, given.base)
    path = given.out / f"{given.engine}-{given.version}.json"
    path.write_text(text, encoding="utf-8")
    print(f"{path}: {len(json.loads(text)['options'])} options", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
