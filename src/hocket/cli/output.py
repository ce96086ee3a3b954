"""What the command writes: text and JSON to standard output, progress to a terminal and nowhere else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any


def say(text: str) -> None:
    """Write lines to standard output; what its encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    text = text.encode(encoding, "replace").decode(encoding)
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def say_json(value: Any) -> None:
    """Write one JSON value, indented, to standard output."""
    say(json.dumps(value, indent=2, ensure_ascii=False))


def number(value: float) -> str:
    """A number with as many digits as matter."""
    return f"{value:.6g}"


def size(value: float) -> str:
    """Bytes in the unit that leaves a short number."""
    for unit, name in ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if value >= unit:
            return f"{value / unit:.4g} {name}"
    return f"{value:.6g} B"


def percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns under their heads: text to the left, numbers to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [all(row[i][:1].isdigit() or row[i] == "-" for row in lines[1:]) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values, one pair a line."""
    found = list(pairs)
    width = max(len(name) for name, _ in found)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in found)


def prints(text: str) -> bool:
    """Whether standard output can show these characters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def wants_color(choice: str) -> bool:
    """Whether to colour text, for `auto`, `always` or `never`; `auto` heeds NO_COLOR and pipes."""
    if choice == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return choice == "always"


@contextmanager
def progress(text: str) -> Generator[None]:
    """Show `text` with a spinner on standard error while the block runs, if that is a terminal."""
    if not _shows_progress():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def counter(text: str) -> Generator[Callable[[int, int], None] | None]:
    """Give a function to call with (done, total), which shows a bar on standard error; None if that is no terminal."""
    if not _shows_progress():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _shows_progress() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and find_spec("rich") is not None
