"""Type checkers accept the idioms of the guide, and know what they return."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("node") is None, reason="pyright would download Node.js")
def test_pyright_accepts_the_idioms(tmp_path):
    # `assert_type` fails where a result is `Any`. A comment that ignores an error fails where there
    # is none, so that mistakes are known to be found.
    settings = {
        "include": ["typed_idioms.py"],
        "extraPaths": [str(ROOT / "src")],
        "typeCheckingMode": "standard",
        "reportInvalidTypeForm": False,  # as in pyproject.toml
        "reportUnnecessaryTypeIgnoreComment": True,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    shutil.copy(ROOT / "tests" / "typed_idioms.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1, done.stderr
    assert report["generalDiagnostics"] == []
