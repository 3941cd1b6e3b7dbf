"""The console's pure modules in node, where there is one: a script's `out(value)` as JSON."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from gateway.console.assets import FOLDER


def evaluate(script: str) -> Any:
    """Run an ES module in which `at(name)` imports a file of the console; what it gave to `out`."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node is installed here (apt-get install nodejs): the browser's tests use these modules, too")
    # The files are modules by the page that loads them, which node can't know: there they are loaded from their text.
    source = f"""
    import {{ readFileSync, mkdtempSync, cpSync, writeFileSync, rmSync }} from "node:fs";
    import {{ tmpdir }} from "node:os";
    const folder = mkdtempSync(`${{tmpdir()}}/console-`);
    try {{
      cpSync({json.dumps(str(FOLDER))}, folder, {{ recursive: true }});
      writeFileSync(`${{folder}}/package.json`, '{{"type": "module"}}');
      const at = (name) => import(`${{folder}}/${{name}}`);
      const out = (value) => console.log(JSON.stringify(value));
      {script}
    }} finally {{
      rmSync(folder, {{ recursive: true }});
    }}"""
    done = subprocess.run(
        [node, "--input-type=module", "-e", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
