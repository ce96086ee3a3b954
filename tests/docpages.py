"""Runs the code of a documentation page, in the order of the page: `python tests/docpages.py docs/schedules.md`.

- ```python blocks run one after the other in one namespace, in an empty folder, as a reader would type them.
- ```console blocks: each `$ hocket ...` (and `$ python ...`) runs in the same folder. Lines below it must be what it
  prints; a line `...` stands for any number of lines; no lines: only the exit status counts. `# exit 1` at the end of
  the command says what the status is if not 0.

A comment on the line above a block changes that:

    <!-- not run: it needs two hosts -->     skipped; a reason is required
    <!-- run: torchrun 2 -->                 a python block that is a script of its own, launched on 2 ranks
    <!-- run: script -->                     the same on one process

Exits with 1, and page and line, at the first block that fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[a-z]*)[^\n`]*\n(?P<body>.*?)^(?P=indent)``` *$", re.M | re.S)
_MARK = re.compile(r"<!-- (not run|run): *(.*?) *-->\s*\Z")


class PageError(Exception):
    """A block that does not do what the page says."""


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    line: int
    """Of the page, where the body begins."""
    skip: str | None = None
    """Why it is not run."""
    launch: str | None = None
    """`script`, or `torchrun N`."""


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text, 0, match.start())
        kind, value = mark.groups() if mark else ("", "")
        line = text.count("\n", 0, match.start("body")) + 1
        if mark and not value:
            raise PageError(f"line {line - 2}: `<!-- {kind}: -->` says nothing; give a reason, or how to run it")
        if kind == "run" and not re.fullmatch(r"script|torchrun \d+", value):
            raise PageError(f"line {line - 2}: cannot run by {value!r}; write `script` or `torchrun N`")
        body = textwrap.dedent(match["body"])
        yield Block(
            match["language"], body, line, value if kind == "not run" else None, value if kind == "run" else None
        )


def run_page(page: Path) -> int:
    """Runs all blocks of a page in the current folder; returns how many."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    name = os.path.relpath(page, ROOT)
    count = 0
    for block in blocks(page.read_text()):
        if block.skip is not None or block.language not in ("python", "console"):
            continue
        count += 1
        if block.language == "console":
            _run_console(block, name)
        elif block.launch is not None:
            _launch(block, name)
        else:
            source = "\n" * (block.line - 1) + block.body  # so that a traceback shows the line of the page
            exec(compile(source, page, "exec"), namespace)
    return count


def _environment() -> dict[str, str]:
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    # Colours and widths as in a pipe, whatever the terminal of the one who runs the tests.
    return {**os.environ, "PATH": os.pathsep.join(path), "COLUMNS": "80", "NO_COLOR": "1"}


def _launch(block: Block, name: str) -> None:
    script = Path(f"block_{block.line}.py").absolute()
    script.write_text(block.body)
    command = [sys.executable, script]
    if block.launch != "script":
        ranks = (block.launch or "").split()[1]
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment(), timeout=100)
    if done.returncode:
        raise PageError(f"{name}:{block.line}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")


def _run_console(block: Block, name: str) -> None:
    """Runs the commands of a console block, and compares what they print with what the page shows."""
    for offset, command, expected in _commands(block.body):
        if not re.match(r"(hocket|python)\b", command):
            continue
        where = f"{name}:{block.line + offset}: $ {command}"
        command, _, status = command.partition("# exit ")
        done = subprocess.run(
            ["bash", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env=_environment(),
            timeout=100,
        )
        if done.returncode != int(status or 0):
            raise PageError(f"{where}\nexit status {done.returncode}, not {int(status or 0)}\n{done.stdout}")
        if expected.strip() and not matches(expected, done.stdout):
            raise PageError(f"{where}\n--- the page shows\n{expected}\n--- it prints\n{done.stdout}")


def _commands(body: str) -> Iterator[tuple[int, str, str]]:
    """(line, command, what is shown below it) of a console block; a backslash continues a command."""
    lines = body.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        last = start
        while lines[last].endswith("\\") and last + 1 < end:
            last += 1
        command = "\n".join(lines[start : last + 1])[2:]
        yield start, command, "\n".join(lines[last + 1 : end])


def matches(expected: str, printed: str) -> bool:
    """Whether text was printed as expected, but for white space at the ends of lines and for `...` lines."""
    wanted, found = ([line.rstrip() for line in text.strip("\n").splitlines()] for text in (expected, printed))
    # Between two `...` lines are pieces that must come in this order; the first and the last are bound to the ends.
    pieces: list[list[str]] = [[]]
    for line in wanted:
        if line.strip() == "...":
            pieces.append([])
        else:
            pieces[-1].append(line)
    if len(pieces) == 1:
        return wanted == found
    first, *middle, last = pieces
    if len(first) + len(last) > len(found) or found[: len(first)] != first:
        return False
    rest = found[len(first) : len(found) - len(last)]
    if found[len(found) - len(last) :] != last:
        return False
    for piece in middle:
        at = next((i for i in range(len(rest) - len(piece) + 1) if rest[i : i + len(piece)] == piece), None)
        if at is None:
            return False
        rest = rest[at + len(piece) :]
    return True


def main(page: str) -> int:
    path = Path(page).resolve()
    with tempfile.TemporaryDirectory(prefix="hocket-docs-") as folder:
        os.chdir(folder)
        try:
            print(f"{run_page(path)} blocks of {page} run")
        except PageError as error:
            print(error, file=sys.stderr)
            return 1
        except Exception:
            traceback.print_exc()
            return 1
        finally:
            os.chdir(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
