"""What the ratchets measure: sizes and shapes of the code, each as one number and where it comes from."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from cli.entry import PACKAGES

ROOT = Path(__file__).resolve().parents[3]
RATCHETS = Path(__file__).with_name("ratchets.toml")
LONG_COMMENT_WORDS = 12
FIRST_WORDS_THAT_LEAN = ("of", "for", "in", "so")  # such a comment can't be read without the name on its left
FIRST_WORDS_OF_LEANING_LINES = ("of", "by", "behind", "instead", "what", "whose")
FIRST_WORDS_THAT_ASK = ("what", "who", "whose", "whom", "which", "how", "whether", "where", "that", "why", "whoever")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
VALUE_BASES = {"Struct", "BaseModel", "Protocol", "StrEnum", "Enum", "IntEnum", "NamedTuple", "TypedDict", "Exception"}


def allowed() -> dict[str, float]:
    """The most that each measure may be."""
    return {name: float(limit) for name, limit in tomllib.loads(RATCHETS.read_text(encoding="utf-8")).items()}


@dataclass(frozen=True, slots=True)
class Measure:
    """A number, and the places that make it."""

    value: float
    where: list[str]


@cache
def sources(*folders: str) -> tuple[Path, ...]:
    return tuple(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All of a module's nodes: a walk takes longer than to read it."""
    return tuple(ast.walk(tree_of(path)))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _largest(found: dict[str, float]) -> Measure:
    worst = sorted(found, key=lambda name: -found[name])[:5]
    return Measure(max(found.values(), default=0), [f"{name}: {found[name]:g}" for name in worst])


# -- sizes --------------------------------------------------------------------------------------------------------


def longest_module() -> Measure:
    return _largest({name_of(path): len(text_of(path).splitlines()) for path in sources(*PACKAGES)})


def longest_test_module() -> Measure:
    return _largest({name_of(path): len(text_of(path).splitlines()) for path in sources("tests")})


def lines_of_common() -> Measure:
    files = [*sources("common"), *(ROOT / "common").rglob("*.lua")]
    return Measure(sum(len(text_of(path).splitlines()) for path in files), ["common/, Lua counted"])


# One file a maker, by the name on the box: a list of like things, which any division would only hide.
LISTS = ("engine/families",)


def modules_in_a_folder() -> Measure:
    folders: dict[str, float] = {}
    for path in sources(*PACKAGES):
        folder = name_of(path.parent)
        if path.stem not in ("__init__", "__main__") and folder not in LISTS:
            folders[folder] = folders.get(folder, 0) + 1
    return _largest(folders)


def settings() -> Measure:
    rows = [
        row for row in (ROOT / "docs/configuration.md").read_text(encoding="utf-8").splitlines() if "`BATON_" in row
    ]
    names = {found for row in rows for found in re.findall(r"`(BATON_\w+)`", row)}
    return Measure(len(names), ["docs/configuration.md"])


# -- shapes -------------------------------------------------------------------------------------------------------


@cache
def _classes() -> tuple[tuple[str, ast.ClassDef], ...]:
    return tuple(
        (f"{name_of(path)}:{node.name}", node)
        for path in sources(*PACKAGES)
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    )


def _base_names(node: ast.ClassDef) -> list[str]:
    """Bases by their own names; those of a module that is not ours (`uvicorn.Server`) keep its name."""
    return [ast.unparse(base).split("[")[0].removeprefix("msgspec.") for base in node.bases]


def _is_value(node: ast.ClassDef) -> bool:
    """Wire structs, settings, bodies, protocols and frozen dataclasses are records: their fields are their point."""
    frozen = any("dataclass" in ast.unparse(one) and "frozen=True" in ast.unparse(one) for one in node.decorator_list)
    endings = ("Settings", "Options", "Message", "Struct", "Error", "Fields")
    return frozen or any(name in VALUE_BASES or name.endswith(endings) for name in _base_names(node))


def attributes_of_a_class() -> Measure:
    counts: dict[str, float] = {}
    for name, node in _classes():
        if _is_value(node):
            continue
        own = {
            target.attr
            for part in ast.walk(node)
            if isinstance(part, ast.Assign | ast.AnnAssign | ast.AugAssign)
            for target in (part.targets if isinstance(part, ast.Assign) else [part.target])
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
        }
        fields = {
            part.target.id
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        }
        counts[name] = len(own | fields)
    return _largest(counts)


def fields_of_a_value() -> Measure:
    """The fields of a frozen dataclass; wire messages, bodies and settings aside."""
    return _largest(
        {
            name: sum(isinstance(part, ast.AnnAssign) for part in node.body)
            for name, node in _classes()
            if any("frozen=True" in ast.unparse(each) for each in node.decorator_list) and "Settings" not in node.name
        }
    )


def arguments_of_a_constructor() -> Measure:
    """The parameters of `__init__`, `self` aside."""
    counts: dict[str, float] = {}
    for name, node in _classes():
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                counts[name] = len(part.args.args) + len(part.args.kwonlyargs) - 1
    return _largest(counts)


def inheritance_between_our_classes() -> Measure:
    """Classes that take methods from a class of ours; errors, structs, settings and protocols aside."""
    ours = {node.name: node for _, node in _classes() if not _is_value(node)}
    found = [
        f"{name} ← {base}"
        for name, node in _classes()
        if not _is_value(node)
        for base in _base_names(node)
        if base in ours and any(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in ours[base].body)
    ]
    return Measure(len(found), found)


def complexity() -> Measure:
    counts: dict[str, float] = {}
    for path in sources(*PACKAGES):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not path.stem.startswith("triton_"):
                counts[f"{name_of(path)}:{node.lineno} {node.name}"] = _branches(node)
    return _largest(counts)


def _branches(node: ast.AST) -> int:
    total = 1
    for part in ast.walk(node):
        if isinstance(
            part, ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case
        ):
            total += 1
        elif isinstance(part, ast.BoolOp):
            total += len(part.values) - 1
        elif isinstance(part, ast.comprehension):
            total += 1 + len(part.ifs)
    return total


def circles_of_files() -> Measure:
    """Files that import each other in a ring, however long (imports for types alone aside)."""
    graph = _imports()
    found = [sorted(ring) for ring in _rings(graph)]
    return Measure(len(found), [" ⇄ ".join(ring) for ring in found])


def circles_of_rooms() -> Measure:
    """Rooms, folders of a package, that import each other in a ring."""
    rooms: dict[str, set[str]] = {}
    for module, imported in _imports().items():
        rooms.setdefault(_room(module), set()).update(map(_room, imported))
    found = [sorted(ring) for ring in _rings({room: below - {room} for room, below in rooms.items()})]
    return Measure(len(found), [" ⇄ ".join(ring) for ring in found])


def _room(module: str) -> str:
    package, *rest = module.split(".")
    return f"{package}.{rest[0]}" if rest else package


def formats_that_layers_ask_for() -> Measure:
    """`isinstance` on a product's format where layers compute: they ask `Linear.wants` instead."""
    layers = sources("engine/model")
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in layers
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and "Linear" in ast.unparse(node)
    ]
    return Measure(len(found), found)


KV_KINDS = re.compile(r"Keeps\.(WINDOW|STATE)|Kept(Window|State)|(state|window)_blocks|import Window")


def files_that_name_a_kv_kind() -> Measure:
    """Where a kind of KV group is known by name, besides kernels and the layers that call them: all else asks `Group`."""
    named = [name_of(path) for path in sources(*PACKAGES) if KV_KINDS.search(text_of(path))]
    found = [name for name in named if not name.startswith(("engine/kernels/", "engine/model/"))]
    return Measure(len(found), found)


def import_floors_of_the_gateway() -> Measure:
    """The longest chain of rooms below each other."""
    rooms: dict[str, set[str]] = {}
    for module, imported in _imports().items():
        room = ".".join(module.split(".")[:2])
        if module.startswith("gateway."):
            below = {".".join(name.split(".")[:2]) for name in imported if name.startswith("gateway.")}
            rooms.setdefault(room, set()).update(below - {room})

    rings = list(_rings({room: below & rooms.keys() for room, below in rooms.items()}))
    if rings:
        return Measure(len(rooms), [" ⇄ ".join(sorted(ring)) for ring in rings])

    @cache
    def depth(room: str) -> int:
        return 1 + max((depth(below) for below in rooms.get(room, ())), default=0)

    deepest = sorted(rooms, key=depth, reverse=True)
    return Measure(max(map(depth, rooms)), [f"{room}: {depth(room)}" for room in deepest])


@cache
def _imports() -> dict[str, set[str]]:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources(*PACKAGES)}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        skipped = {
            inner
            for node in nodes_of(path)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for inner in ast.walk(node)
        }
        graph[module] = set()
        for node in nodes_of(path):
            if node in skipped:
                continue
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    graph[module] |= {whole if whole in modules else node.module} & modules.keys()
            elif isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names} & modules.keys()
    return graph


def _rings(graph: dict[str, set[str]]) -> Iterator[set[str]]:
    """Strongly connected components of two files and more (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[set[str]]:
        index[node] = low[node] = len(index)
        stack.append(node)
        for below in graph[node]:
            if below not in index:
                yield from visit(below)
                low[node] = min(low[node], low[below])
            elif below in stack:
                low[node] = min(low[node], index[below])
        if low[node] == index[node]:
            ring = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(ring) > 1:
                yield ring

    for node in graph:
        if node not in index:
            yield from visit(node)


# -- prose --------------------------------------------------------------------------------------------------------


@cache
def comments_of(path: Path) -> tuple[tuple[int, str, bool], ...]:
    """Line, text, and whether code stands before it."""
    found = []
    lines = text_of(path).splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text_of(path)).readline):
        if token.type == tokenize.COMMENT:
            trailing = bool(lines[token.start[0] - 1][: token.start[1]].strip())
            found.append((token.start[0], token.string.lstrip("# ").strip(), trailing))
    return tuple(found)


def _trailing() -> Iterator[tuple[str, str]]:
    for path in sources(*PACKAGES):
        for line, text, trailing in comments_of(path):
            if trailing and not text.startswith(("noqa", "type:", "pragma", "fmt:")):
                yield f"{name_of(path)}:{line}", text


def long_trailing_comments() -> Measure:
    found = [place for place, text in _trailing() if len(text.split()) > LONG_COMMENT_WORDS]
    return Measure(len(found), found[:10])


def leaning_trailing_comments() -> Measure:
    found = [place for place, text in _trailing() if text.split(" ")[0].lower() in FIRST_WORDS_THAT_LEAN]
    return Measure(len(found), found[:10])


def leaning_comments() -> Measure:
    """Comments on lines of their own whose first word leans on something that isn't named."""
    found = [
        f"{name_of(path)}:{line}"
        for path in sources(*PACKAGES)
        for line, text in _beginnings(path)
        if text.split(" ")[0].lower().strip(",.") in FIRST_WORDS_OF_LEANING_LINES
    ]
    return Measure(len(found), found[:10])


def _beginnings(path: Path) -> Iterator[tuple[int, str]]:
    """The first line of each comment on lines of its own."""
    before = 0
    for line, text, trailing in comments_of(path):
        if not trailing and line != before + 1:
            yield line, text
        before = line if not trailing else 0


def docstrings_that_ask() -> Measure:
    """Docstrings whose first word asks or leans: their first sentence is no noun phrase and no imperative."""
    words = {*FIRST_WORDS_THAT_ASK, *FIRST_WORDS_OF_LEANING_LINES}
    found = [
        f"{name_of(path)}:{node.body[0].lineno}"
        for path in sources(*PACKAGES, "benchmarks")
        for node in ast.walk(tree_of(path))
        if isinstance(node, DOCUMENTED) and (ast.get_docstring(node) or "").split(" ")[0].lower() in words
    ]
    return Measure(len(found), found[:10])


def prose_words_per_100_lines() -> Measure:
    words = lines = 0
    for path in sources(*PACKAGES):
        lines += len(text_of(path).splitlines())
        words += sum(len(text.split()) for _, text, _ in comments_of(path))
        for node in nodes_of(path):
            if isinstance(node, DOCUMENTED):
                words += len((ast.get_docstring(node) or "").split())
    return Measure(round(100 * words / lines), [f"{words} words, {lines} lines"])


def sentence_words_in_docs() -> Measure:
    lengths: list[int] = []
    for path in (ROOT / "docs").rglob("*.md"):
        if path.name == "configuration.md":
            continue
        text = re.sub(r"```.*?```", "", text_of(path), flags=re.S)
        prose = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "<"))]
        sentences = re.split(r"(?<=[.:;!?])\s+", " ".join(prose))
        lengths += [len(words) for sentence in sentences if len(words := sentence.split()) > 2]
    return Measure(median(lengths), [f"{len(lengths)} sentences"])


MEASURES: dict[str, Callable[[], Measure]] = {
    measure.__name__: measure
    for measure in (
        longest_module,
        longest_test_module,
        lines_of_common,
        modules_in_a_folder,
        settings,
        attributes_of_a_class,
        fields_of_a_value,
        arguments_of_a_constructor,
        inheritance_between_our_classes,
        complexity,
        circles_of_files,
        circles_of_rooms,
        formats_that_layers_ask_for,
        files_that_name_a_kv_kind,
        import_floors_of_the_gateway,
        long_trailing_comments,
        leaning_trailing_comments,
        leaning_comments,
        docstrings_that_ask,
        prose_words_per_100_lines,
        sentence_words_in_docs,
    )
}


def main() -> None:
    """Print every measure and where it comes from."""
    for name, measure in MEASURES.items():
        found = measure()
        print(f"{name} = {found.value:g}", *found.where, sep="\n    ")


if __name__ == "__main__":
    sys.exit(main())
