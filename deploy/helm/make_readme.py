"""Writes the chart's README: its values, with the comments of values.yaml.

python deploy/helm/make_readme.py
"""

from __future__ import annotations

import re
from pathlib import Path

CHART = Path(__file__).resolve().parent / "baton"
HEAD = """# Baton's chart

Disaggregated LLM serving. Yours to bring (`docs/deployment.md` has the steps): images in a registry, NATS with JetStream and
Redis with the users of `baton users`, secrets, and a claim with the models that pods on several nodes may mount (ReadOnlyMany or
ReadWriteMany). The notes after an install say how to look whether they are there.

    helm install baton deploy/helm/baton --set image.repository=registry.example.org/team/baton \\
      --set natsUrl=nats://nats:4222 --set model=/models/qwen3

Unknown values are refused (`values.schema.json`). This table is made from `values.yaml` by `deploy/helm/make_readme.py`.

| value | default | what |
|---|---|---|
"""
_LINE = re.compile(r"( *)(\w+):(?: (.*))?")


def rendered() -> str:
    """Return the README's text."""
    rows, path, said = [], list[str](), list[str]()
    for line in (CHART / "values.yaml").read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("#"):
            said.append(line.lstrip()[1:].strip())
            continue
        if found := _LINE.fullmatch(line):
            indent, name, default = found.groups()
            path = [*path[: len(indent) // 2], name]
            what = " ".join(said).replace("|", "\\|")
            if default is not None or what:
                shown = f"`{default}`" if default is not None else ""
                rows.append(f"| `{'.'.join(path)}` | {shown} | {what} |")
        said = []
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    (CHART / "README.md").write_text(rendered(), encoding="utf-8")
