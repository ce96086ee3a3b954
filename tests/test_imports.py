"""The front half is torch-free, in fact and by contract; and both checks can fail."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FRONT = sorted(
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "src/hocket").rglob("*.py")
    if path.relative_to(ROOT / "src/hocket").parts[0] not in ("runtime", "integrations", "__main__.py")
)
"""Every module outside the runtime and the integrations."""


def loads_torch(statement: str, *path: Path) -> bool:
    """Whether `statement`, alone in a fresh interpreter, makes torch a loaded module."""
    code = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n{statement}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().endswith("True")


def test_import_hocket_does_not_import_torch():
    assert not loads_torch("import hocket")
    assert {"hocket", "hocket.program", "hocket.verify"} < set(FRONT)
    assert not loads_torch("; ".join(f"import {name}" for name in FRONT))
    assert not loads_torch("import hocket; dir(hocket); [getattr(hocket, n) for n in ('build', 'lower', 'verify')]")


def test_the_check_can_fail(tmp_path: Path):
    """The same check finds torch in a copy of hocket whose program.py imports it, and when the runtime is asked for."""
    shutil.copytree(ROOT / "src/hocket", tmp_path / "hocket")
    assert not loads_torch("import hocket", tmp_path)
    with (tmp_path / "hocket/program.py").open("a") as f:
        f.write("\nimport torch\n")
    assert loads_torch("import hocket", tmp_path)
    assert loads_torch("from hocket import build_schedule")


def lint_imports(folder: Path) -> str:
    """The report of import-linter on the hocket in `folder`/src."""
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PYTHONPATH": str(folder / "src"), "PATH": "", "COLUMNS": "200"},
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "where,statement,broken",
    [
        ("program.py", "import torch", "only the runtime and the integrations import torch"),
        ("draw/text.py", "def f():\n    import torch", "only the runtime and the integrations import torch"),
        ("simulate.py", "from hocket.runtime import pipeline", "the front half flows one way"),
        ("errors.py", "from hocket.program import Action", "the front half flows one way"),
        ("schedules/mine.py", "import hocket.passes", "the front half flows one way"),
        ("passes/mine.py", "import hocket.schedules", "the front half flows one way"),
        ("runtime/mine.py", "import hocket.simulate", "the runtime never imports"),
    ],
)
def test_each_contract_can_break(tmp_path: Path, where: str, statement: str, broken: str):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "src/hocket" / where).open("a") as f:
        f.write("\n" + textwrap.dedent(statement) + "\n")
    lines = [line for line in lint_imports(tmp_path).splitlines() if "BROKEN" in line]
    assert len(lines) == 1 and broken in lines[0]
