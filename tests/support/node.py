"""Run the modules of a page under Node."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from driftgen.studio.playground_page import PLAYGROUND

SOURCES = PLAYGROUND.parent
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node 18 or newer")


def run_node(code, inputs, modules, folder=SOURCES):
    """Run code with ``inputs`` and the names that modules of a folder export. Return what it returns."""
    imports = "\n".join(
        f'import * as {Path(name).name} from "{(folder / name).with_suffix(".mjs").as_uri()}";'
        for name in modules
    )
    script = f"""{imports}
import {{ readFileSync }} from "node:fs";
const inputs = JSON.parse(readFileSync(0, "utf-8"));
const plain = (key, value) => (ArrayBuffer.isView(value) ? Array.from(value) : value);
process.stdout.write(JSON.stringify((() => {{ {code} }})(), plain));
"""
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script],
        input=json.dumps(inputs),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
