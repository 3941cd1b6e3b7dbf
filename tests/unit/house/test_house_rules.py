"""Rules of the house that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from cli.entry import PACKAGES
from cli.settings_table import render
from common.messages import AttemptMessage, Job, Tokens, WorkerMessage
from tests.unit.house.measures import ROOT, nodes_of
from worker.identity import Head

COMMON = {"access", "blocks", "bus", "errors", "job_queue", "log", "messages", "peers", "store", "subjects"}
COMMON |= {"model", "pages", "policy", "settings", "tasks", "tls", "tracing", "wire", "words"}

LARGEST_ROOM = 14  # modules, its __init__ aside


def modules(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def test_every_setting_is_documented() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == render(), (
        "run python -m cli.settings_table > docs/configuration.md"
    )


def test_common_stays_small_and_known() -> None:
    found = {path.relative_to(ROOT / "common").parts[0].removesuffix(".py") for path in modules("common")}
    assert found - {"__init__"} <= COMMON


def test_whoever_says_something_about_a_request_says_its_trace() -> None:
    """By name, or with the head that a worker's messages begin with: `Failed(**identity.head(job), …)`."""
    assert set(Head.__annotations__) == set(WorkerMessage.__struct_fields__) - {"v"}
    kinds = {kind.__name__ for kind in (*AttemptMessage.__subclasses__(), *WorkerMessage.__subclasses__(), Job, Tokens)}
    said: dict[str, bool] = {}
    for path in modules("gateway", "worker", "prefill", "decode", "services"):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                place = f"{path.relative_to(ROOT)}:{node.lineno} {node.func.id}"
                said[place] = any(keyword.arg == "traceparent" or _is_head(keyword) for keyword in node.keywords)
    assert {place.partition(" ")[2] for place in said} == kinds - {"WorkerMessage"}
    assert [place for place, with_trace in said.items() if not with_trace] == []


def _is_head(keyword: ast.keyword) -> bool:
    """Whether this is `**….identity.head(…)`."""
    call = keyword.value
    return keyword.arg is None and isinstance(call, ast.Call) and ast.unparse(call.func).endswith("identity.head")


def test_no_module_is_a_drawer() -> None:
    assert [path for path in modules(*PACKAGES) if path.stem in ("util", "utils", "helpers", "misc")] == []


def test_no_room_of_the_gateway_holds_more_than_a_reader_can() -> None:
    """The floors between the rooms are import-linter's (pyproject.toml)."""
    folders = [folder for folder in (ROOT / "gateway").rglob("*") if folder.is_dir()]  # a dialect is a room of its own
    sizes = {
        str(room.relative_to(ROOT)): sum(path.stem != "__init__" for path in room.glob("*.py")) for room in folders
    }
    large = {room: size for room, size in sizes.items() if size > LARGEST_ROOM}
    assert large == {}, "make a room of a part that stands by itself"


PICKLES = re.compile(
    r"^\s*(import|from) (_?c?pickle|dill|cloudpickle|joblib|shelve|marshal|multiprocessing)\b"
    r"|\btorch\.load\(|allow_pickle|(send|recv)_pyobj|yaml\.(unsafe_|full_)?load\(|(?<![\w.])(eval|exec)\(",
    re.MULTILINE,
)


def test_nothing_is_pickled() -> None:
    """Nor otherwise made to run what was read."""
    for path in modules(*PACKAGES):
        assert not PICKLES.search(path.read_text()), path
    for guilty in ("import pickle", "    from marshal import loads", "torch.load(path)", "x = eval(text)"):
        assert PICKLES.search(guilty)


def test_the_environment_is_read_in_one_place() -> None:
    readers = {str(path.relative_to(ROOT)) for path in modules(*PACKAGES) if "os.environ" in path.read_text()}
    allowed = {
        "services/runtime/loading.py",
        "services/runtime/hub.py",  # the hub's own variables
        "services/runtime/models/modelscope.py",  # ModelScope's own variable
        "services/runtime/models/registry.py",  # Docker's own variable
        "cli/reach.py",  # OpenAI's own variables
        "cli/torch_build.py",  # make's and pip's own variables, before anything is installed
        "services/rank/gpu.py",  # CUDA's own variable
        "services/runtime/servers.py",  # hands a few on to NATS and Redis
        "gateway/children/child.py",  # hands Python's own on
        "services/runtime/commands.py",  # hands the environment on to children
        "services/nursery/__main__.py",  # does so without exec
        "kvtransfer/ucx/wire.py",  # UCX's own variables
        "engine/kernels/device.py",  # Triton's own variable
        "engine/processor.py",  # oneDNN's own variable
        "engine/kernels/native/__init__.py",  # CC and XDG_CACHE_HOME
        "gateway/answers/tokenizer.py",  # tokenizers' own variable
        "services/runtime/tracer.py",  # OpenTelemetry's own variables
    }
    assert readers <= allowed


def test_no_distribution_claims_our_names() -> None:
    assert set(PACKAGES) & set(metadata.packages_distributions()) == set()


FRONT_DOOR = [
    *(f"services.{name}.__main__" for name in ("gateway", "up", "planner")),
    "services.gateway.process",
    *(f"cli.{name}.__main__" for name in ("chat", "bench", "top", "doctor", "keys")),
]


def test_the_front_door_has_no_torch() -> None:
    code = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    if "torch" in sys.modules:
        sys.exit(f"{module} imports torch")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *FRONT_DOOR], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_address_of_a_registry_or_of_a_machine_is_in_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names = ["Makefile", "pyproject.toml", "constraints.txt", ".ci/run"]
    for name in [path for path in names if path in listed]:
        text = (ROOT / name).read_text()
        assert "index-url" not in text, name
        assert "file://" not in text, name


def test_every_path_that_the_docs_name_is_there() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
    tops = "|".join((*PACKAGES, "tests", "benchmarks", "deploy", "docs", "demo"))
    missing = {
        f"{page.relative_to(ROOT)}: {path}"
        for page in pages
        for path in re.findall(rf"`((?:{tops})/[\w/.-]*)`", page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    }
    assert missing == set()
