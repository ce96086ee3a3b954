"""The command as a process: plug-ins, pipes, terminals, a missing extra."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

SIZE = ["--ranks", "4", "--microbatches", "8"]


def process(*args: str, **options) -> subprocess.CompletedProcess[str]:
    """Run the command as users do."""
    command = [sys.executable, "-m", "hocket", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


def test_a_schedule_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent('''
            from typing import Literal
            from hocket.program import Action, Op, Placement, Program
            from hocket.schedules import ScheduleConfig, register_schedule

            class MineConfig(ScheduleConfig):
                """A schedule of one's own."""

                schedule: Literal["mine"] = "mine"

                ranks: int
                """A field named like an option of the command."""

                weights: dict[str, int] = {"a": 1}
                """A field that takes JSON."""

            @register_schedule(MineConfig)
            def build_mine(config, ranks, microbatches):
                assert config.ranks == 7 and config.weights == {"b": 2}
                lists = tuple(tuple(Action(Op.F, r, m) for m in range(microbatches)) for r in range(ranks))
                return Program(Placement.loop(ranks), lists, microbatches)
        ''')
    )
    args = ["mine", "--schedule-ranks", "7", "--weights", '{"b": 2}', "--ranks", "2", "--microbatches", "2"]
    done = process("--import", "mine", "show", *args, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "rank 1: 1F0 1F1" in done.stdout
    done = process("--import", "mine", "show", "mine", "--help", cwd=tmp_path)
    assert "A field that takes JSON." in done.stdout
    args[4] = "{"
    done = process("--import", "mine", "show", *args, cwd=tmp_path)
    assert done.returncode == 1 and "--weights is no valid JSON" in done.stderr


def test_without_the_extra():
    code = "import sys; sys.modules['tyro'] = None; from hocket.cli import main; sys.exit(main(['show', '1f1b']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.strip().endswith("install it: pip install 'hocket[cli]'")


@pytest.mark.parametrize("size", [("2", "2"), ("8", "500")])
def test_a_broken_pipe_is_silent(size):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hocket", "show", "1f1b", "--ranks", size[0], "--microbatches", size[1]]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_without_unicode_gets_ascii():
    done = process("draw", "1f1b", *SIZE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout.isascii() and "|F0F1F2F3......" in done.stdout


def test_progress_on_a_terminal_and_nothing_in_a_pipe():
    import pty

    command = [sys.executable, "-m", "hocket", "compare", *SIZE]
    assert process("compare", *SIZE).stderr == ""
    terminal, inside = pty.openpty()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=inside, env={**os.environ, "TERM": "xterm"})
    os.close(inside)
    shown, until = b"", time.monotonic() + 60
    while time.monotonic() < until:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the child has closed its end
            break
        if not piece:
            break
        shown += piece
    os.close(terminal)
    assert child.wait(60) == 0
    assert b"comparing schedules" in shown
