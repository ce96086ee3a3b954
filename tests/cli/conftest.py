"""The command, run in this process."""

import json

import pytest

from hocket.cli import main


@pytest.fixture
def hocket(capsys):
    """Run the command in this process: (exit code, standard output, standard error)."""

    def run(*args: str) -> tuple[int, str, str]:
        code = main(args)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def result(hocket):
    """What the command prints as JSON; it must succeed, and say nothing else."""

    def run(*args: str):
        code, out, err = hocket(*args, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run
