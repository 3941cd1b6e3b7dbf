"""Unchanged clients, each in an environment of its own, against the demo model: `make clients`.

Their pins exclude each other, and PyPI and npm are asked for them: this is no part of `make test`. The table goes to
docs/clients.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import ROOT, Cluster
from tests.ports import own_port

HERE = Path(__file__).parent
ENVIRONMENTS = ROOT / ".clients"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- table -->\n", "<!-- end -->\n"


@dataclass(frozen=True, slots=True)
class Client:
    """A script beside this file, and the packages that it needs; the first one's version is told."""

    script: str
    packages: tuple[str, ...]


ALIASES = ("--alias", "gpt-4o=tiny,tgi=tiny,dummy=tiny,claude-haiku-4-5=tiny")  # names that clients insist on
CLIENTS = (
    Client("openai_client.py", ("openai==3.54.0", "pydantic")),
    Client("responses_client.py", ("openai==3.57.0", "pydantic")),
    Client("agents_client.py", ("openai-agents==0.24.0",)),
    Client("azure_client.py", ("openai==3.57.0",)),
    Client("kept_responses_client.py", ("openai-agents==0.24.0",)),
    Client("langchain.py", ("langchain-openai==1.7.3",)),
    Client("pydantic_ai_client.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    Client("instructor_client.py", ("instructor==1.17.0",)),
    Client("litellm_client.py", ("litellm==1.106.2", "mcp")),
    Client("openapi_client.py", ("openapi-python-client==0.29.1",)),
    Client("text_generation_client.py", ("text-generation==0.7.0",)),
    Client("huggingface_client.py", ("huggingface_hub==2.4.0",)),
    Client("triton_http_client.py", ("tritonclient[http]==2.73.0", "numpy")),
    Client("triton_grpc_client.py", ("tritonclient[grpc]==2.73.0", "numpy")),
    Client("ollama_client.py", ("ollama==0.6.3",)),
    Client("anthropic_client.py", ("anthropic==2.13.0",)),
    Client("openai_node.mjs", ("openai@6.49.0", "zod@4.6.7")),
    Client("ai_sdk.mjs", ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.91", "zod@4.6.7")),
    Client(
        "anthropic_node.mjs",
        ("@anthropic-ai/sdk@1.13.0", "@ai-sdk/anthropic@3.0.140", "ai@6.0.326", "zod@4.6.7"),
    ),
    Client("ollama_node.mjs", ("ollama@0.6.4",)),
)


@dataclass(frozen=True, slots=True)
class Row:
    client: str
    case: str
    error: str


def command(client: Client) -> list[str]:
    """What runs the client's script in its environment, which is made if it is not there yet."""
    folder = ENVIRONMENTS / Path(client.script).stem
    is_made = (folder / ".made").is_file()
    if not is_made:
        print(f"making the environment of {client.packages[0]} …", flush=True)
    made = _node(client, folder, is_made) if client.script.endswith(".mjs") else _python(client, folder, is_made)
    (folder / ".made").touch()
    return made


def _python(client: Client, folder: Path, is_made: bool) -> list[str]:
    python = folder / "bin" / "python"
    if not is_made:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        subprocess.run([*pip, *client.packages], check=True)
    return [str(python), str(HERE / client.script)]


def _node(client: Client, folder: Path, is_made: bool) -> list[str]:
    """Node looks for a module's packages beside it, so the scripts are copied there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not is_made:
        subprocess.run(["npm", "install", "--silent", "--prefix", str(folder), *client.packages], check=True)
    for script in (client.script, "cases.mjs"):
        shutil.copy(HERE / script, folder)
    return ["node", str(folder / client.script)]


async def rows_of(client: Client, url: str, model: str) -> list[Row]:
    """Run one client's script; a script that ends early is a row of its own."""
    words = await asyncio.to_thread(command, client)
    process = await asyncio.create_subprocess_exec(*words, f"{url}/v1", model, stdout=subprocess.PIPE, cwd=HERE)
    out, _ = await process.communicate()
    name = client.packages[0]
    rows = [
        Row(name, one["case"], one["error"]) for one in map(json.loads, filter(_is_result, out.decode().splitlines()))
    ]
    return (
        rows
        if rows and not process.returncode
        else [*rows, Row(name, "the script", f"ended with {process.returncode}")]
    )


def _is_result(line: str) -> bool:
    return line.startswith('{"case"')


def usable(clients: Sequence[Client]) -> list[Client]:
    """Without node its clients are left out, with a word."""
    if shutil.which("npm"):
        return list(clients)
    print("npm isn't here: node's clients are left out", flush=True)
    return [client for client in clients if not client.script.endswith(".mjs")]


def table(rows: list[Row]) -> str:
    lines = ["| client | case | result |", "|---|---|---|"]
    lines += [f"| {row.client} | {row.case} | {'works' if not row.error else _cell(row.error)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(error: str) -> str:
    return "**fails**: " + " ".join(error.split()).replace("|", "\\|")[:200]


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of packages' names; none: all")
    parser.add_argument("--write", action="store_true", help="write the table into docs/clients.md")
    options = parser.parse_args()
    chosen = [one for one in CLIENTS if not options.names or any(name in one.packages[0] for name in options.names)]
    rows: list[Row] = []
    rpc_port = own_port()
    os.environ["GRPC_ADDRESS"] = f"127.0.0.1:{rpc_port}"  # for scripts that have no use for a URL
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OLLAMA_ADMIN_KEY"] = admin = secrets.token_hex(16)
        gateway_options = (*ALIASES, "--grpc-port", str(rpc_port), "--orders-key", admin)
        async with Cluster(
            Path(folder), model=ROOT / "demo", transport="shm", kv_memory_mb=64, gateway_options=gateway_options
        ) as cluster:
            for client in usable(chosen):
                rows += await rows_of(client, cluster.url, "tiny")
    print(table(rows))
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + table(rows) + END + rest.partition(END)[2], encoding="utf-8")
    failed = sum(bool(row.error) for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} cases work")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
