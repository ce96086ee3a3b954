"""The text pictures, byte for byte; docs/draw.md shows the same ones. HOCKET_GOLDEN=1 writes them anew."""

import os
import shlex
from pathlib import Path

import pytest

from hocket.cli import main

GOLDEN = Path(__file__).parent / "golden"
PAGE = Path(__file__).parents[2] / "docs/draw.md"

COMMANDS = {
    "1f1b": "hocket draw 1f1b --ranks 4 --microbatches 8 --width 80",
    "names": "hocket draw gpipe --ranks 2 --microbatches 3 --width 80",
    "costs": "hocket draw 1f1b --ranks 3 --microbatches 4 --forward 1,2,1 --hop-latency 0.5 --width 80",
    "interleaved": "hocket draw 1f1b --num-stages-per-rank 2 --ranks 4 --microbatches 8 --width 130",
    "zero_bubble_v": "hocket draw zero_bubble_v --ranks 4 --microbatches 6 --width 100",
    "dual_pipe_v": "hocket draw dual_pipe_v --ranks 2 --microbatches 4 --overlap-speedup 1.5 --width 100",
    "narrow": "hocket draw 1f1b --ranks 4 --microbatches 8 --width 30",
    "texture": "hocket draw 1f1b --zero-bubble --ranks 8 --microbatches 64 --width 80",
    "window": "hocket draw 1f1b --zero-bubble --ranks 8 --microbatches 64 --width 80 --start 185 --end 208",
    "ascii": "hocket draw inference --ranks 4 --microbatches 6 --width 60 --ascii",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_picture_is_as_it_was(name, capsys):
    assert main(shlex.split(COMMANDS[name])[1:]) == 0
    picture = capsys.readouterr().out
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("HOCKET_GOLDEN"):
        path.write_text(picture)
    assert picture == path.read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_docs_show_the_same_picture(name):
    shown = f"```console\n$ {COMMANDS[name]}\n{(GOLDEN / f'{name}.txt').read_text()}```\n"
    assert shown in PAGE.read_text()


def test_every_golden_file_has_a_command():
    assert {path.stem for path in GOLDEN.glob("*")} == set(COMMANDS)
