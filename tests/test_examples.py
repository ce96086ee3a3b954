"""The examples run as their docstrings say; train_gpt.py has the same losses, to the bit, on any ranks and schedule."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from distributed import run_torchrun

EXAMPLES = Path(__file__).parent.parent / "examples"
TRAIN = EXAMPLES / "train_gpt.py"
SMALL = "--steps 4 --width 32 --context 32 --batch 6 --layers 4 --microbatches 4 --log-every 2"


def train(*args: object, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """`python examples/train_gpt.py ARGS`, which launches itself with torchrun where it has to."""
    command = [sys.executable, os.fspath(TRAIN), *map(str, args)]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, env=env)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    path = tmp_path_factory.mktemp("reference") / "losses.json"
    done = train(*SMALL.split(), "--ranks", 1, "--sample", 0, "--losses", path)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.mark.torchrun
@pytest.mark.parametrize(
    "nproc,schedule",
    [
        (2, "1f1b"),
        (2, "zero_bubble_v"),
        (4, '{"schedule": "1f1b", "zero_bubble": true}'),
    ],
)
def test_losses_are_those_of_one_process(tmp_path: Path, reference: list[float], nproc: int, schedule: str):
    path = tmp_path / "losses.json"
    run_torchrun(TRAIN, nproc, *SMALL.split(), "--schedule", schedule, "--sample", 0, "--losses", path)
    assert len(reference) == 4
    assert json.loads(path.read_text()) == reference


@pytest.mark.torchrun
def test_it_launches_itself_shows_progress_and_writes_a_sample():
    done = train(*SMALL.split(), "--ranks", 2, "--schedule", "gpipe", "--sample", 5)
    assert done.returncode == 0, done.stderr
    progress = r"step +(\d)/4  loss \d\.\d{3}  +[\d,]+ tokens/s  gpipe  bubble 20\.0%  +\d+ s"
    assert re.findall(progress, done.stdout) == ["1", "2", "4"]
    assert "held out  loss" in done.stdout
    assert [s.strip("\n")[:4] for s in re.split("-{80}\n", done.stdout)[1:]] == ["def ", "clas", "impo", "    "]


def test_help_explains_the_options():
    done = train("--help")
    assert done.returncode == 0
    for option in ("--schedule", "--ranks", "--microbatches", "--steps", "--layers", "--width", "--heads", "--seed"):
        assert option in done.stdout


@pytest.mark.parametrize(
    "args,problem",
    [
        ("--schedule 1f1", "did you mean '1f1b'"),
        ("--schedule inference", "runs forward only"),
        ("--batch 3 --microbatches 4", "--batch 3 cannot fill --microbatches 4"),
        ("--ranks 8 --layers 4", "4 layers cannot fill 8 stages"),
        ("--heads 3", "--width 128 is no multiple of twice --heads 3"),
        ("--steps 0", "0 is less than 1"),
    ],
)
def test_bad_options_are_refused_before_anything_is_launched(
    args: str, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *args.split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(os.fspath(TRAIN), run_name="__main__")
    assert end.value.code == 2
    assert problem in capsys.readouterr().err.splitlines()[-1]
