"""The command `hocket`: finds the command, parses its options, and turns errors into messages and exit codes.

0: done. 1: refused, with a message on standard error. 2: usage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from hocket.errors import ConfigError, HocketError

_COMMANDS = {
    "show": "print the program of a schedule: for each rank its actions",
    "verify": "prove that a program is complete, ordered, paired and free of deadlock",
    "simulate": "print when a step ends, what is idle and what is held, for given costs",
    "compare": "print a table over schedules, for given costs and memory",
    "plan": "divide layers over stages and print who does what when",
    "draw": "draw a timeline: text, figure, page or Chrome trace",
}

_HELP = f"""usage: hocket COMMAND [SCHEDULE] [OPTIONS]

Pipeline-parallel schedules, printed, proved, simulated, planned and drawn. Nothing here needs PyTorch or a GPU.

commands:
{chr(10).join(f"  {name:<10}{text}" for name, text in _COMMANDS.items())}

  hocket COMMAND --help            what the command takes
  hocket COMMAND SCHEDULE --help   and the options of that schedule
  hocket --import MODULE ...       import a module first, for the schedules that it registers
  hocket --version

for example:
  hocket draw 1f1b --ranks 4 --microbatches 8
  hocket simulate zero_bubble_v --ranks 8 --microbatches 32 --json

exit codes: 0 done, 1 refused with a message on standard error, 2 usage"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: that of the process) and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has had enough, as `head` does. The interpreter would flush once more, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except HocketError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return _refuse("interrupted", 130)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)


def _run(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        (sys.stdout if args else sys.stderr).write(_HELP + "\n")
        return 0 if args else 2
    if args[0] == "--version":
        from hocket import __version__

        sys.stdout.write(f"hocket {__version__}\n")
        return 0
    if args[0] == "--import":
        if len(args) < 2:
            return _refuse("--import needs the name of a module", 2)
        _import(args[1])
        return _run(args[2:])
    if args[0] not in _COMMANDS:
        return _unknown(args[0])
    if find_spec("tyro") is None:
        return _refuse("the command line needs tyro; install it: pip install 'hocket[cli]'")
    from hocket.cli.commands import run

    return run(args[0], args[1:])


def _import(name: str) -> None:
    """Import a module, which may lie in the current folder. Raises ConfigError if it cannot be imported."""
    import importlib

    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        importlib.import_module(name)
    except HocketError:
        raise
    except Exception as error:  # whatever a module does when it is imported
        raise ConfigError(f"cannot import {name!r}: {type(error).__name__}: {error}") from None


def _unknown(name: str) -> int:
    import difflib

    close = difflib.get_close_matches(name, _COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return _refuse(f"there is no command {name!r}; {hint}commands: {', '.join(_COMMANDS)}", 2)


def _refuse(message: str, code: int = 1) -> int:
    sys.stderr.write(f"hocket: {message}\n")
    return code
