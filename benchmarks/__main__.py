"""Runs all benchmarks one after the other, and keeps what each prints in benchmarks/results.

python -m benchmarks [--quick] [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ["compile", "lowering", "simulate", "split_backward", "executor", "sleep_step", "training", "memory"]
QUICK = {"compile", "simulate", "split_backward", "executor", "sleep_step", "training"}
"""Those that take --quick."""


def run(name: str, quick: bool) -> int:
    """Run one benchmark, show what it prints as it comes, and keep it."""
    command = [sys.executable, "-u", str(HERE / f"{name}.py"), *(["--quick"] if quick and name in QUICK else [])]
    print(f"== {name}", flush=True)
    begun, lines = time.monotonic(), []
    # One thread a rank: what is compared is the pipeline, on a machine of few cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=HERE.parent) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / f"{name}.txt").write_text("".join(lines))
    print(f"-- {name}: {time.monotonic() - begun:.0f} s, exit {process.returncode}", flush=True)
    return process.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all if none is given")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds")
    args = parser.parse_args()
    unknown = set(args.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}")
    failed = [name for name in args.names or NAMES if run(name, args.quick)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
