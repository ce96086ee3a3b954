"""Help, usage and refusals of the command; what it never loads."""

import os
import subprocess
import sys
import textwrap

import pytest

from hocket.schedules import config_type_of, schedule_names

SIZE = ["--ranks", "4", "--microbatches", "8"]


def test_help_names_every_command(hocket):
    code, out, err = hocket("--help")
    assert code == 0 and err == ""
    for command in ("show", "verify", "simulate", "compare", "plan", "draw"):
        assert f"  {command} " in out
        assert hocket(command, "--help")[:1] == (0,)


def test_help_is_quick_and_loads_nothing_that_it_does_not_need():
    code = "import sys; from hocket.cli import main; main(['--help']); print(sorted(sys.modules), file=sys.stderr)"
    best = float("inf")
    for _ in range(2):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        after = os.times()
        # Time of the processor, since other tests run beside this one.
        best = min(best, after.children_user + after.children_system - before.children_user - before.children_system)
    loaded = done.stderr
    assert "'hocket.cli'" in loaded
    for name in ("torch", "matplotlib", "numpy", "rich", "tyro", "yaml"):
        assert f"'{name}'" not in loaded
    assert best < 0.5


def test_no_command_imports_torch():
    code = """
        import sys
        from hocket.cli import main
        size = ["--ranks", "2", "--microbatches", "4"]
        for args in (["show", "1f1b"], ["simulate", "1f1b"], ["draw", "1f1b"], ["plan", "1f1b", "--layers", "4"]):
            assert main(args + size) == 0
        assert main(["compare", *size]) == 0
        assert main(["draw", "1f1b", "--output", "x.png", *size]) == 0
        assert "torch" not in sys.modules and "rich" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, stdout=subprocess.DEVNULL, cwd="/tmp")


@pytest.mark.parametrize("name", schedule_names())
def test_help_of_a_schedule_says_what_its_fields_mean(hocket, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10000")
    code, out, _ = hocket("show", name, "--help")
    assert code == 0
    words = " ".join(out.replace("│", " ").split())
    config_type = config_type_of(name)
    for field in config_type.options():
        assert "--" + field.replace("_", "-") in words
        doc = config_type.model_fields[field].description
        assert doc and doc.split()[0] in words
    for other in schedule_names():
        assert f"  {other} " in hocket("show", "--help")[1]


@pytest.mark.parametrize(
    "args,words",
    [
        ([], "usage: hocket"),
        (["shw"], "did you mean 'show'"),
        (["show", "1f1b"], "--ranks"),
        (["show", "1f1b", "--ranks", "two", "--microbatches", "2"], "--ranks"),
        (["show", "1f1b", *SIZE, "--num-stages", "2"], "--num-stages"),
        (["show", "gpipe", *SIZE, "--zero-bubble"], "--zero-bubble"),
        (["show", *SIZE], "SCHEDULE"),
        (["simulate", "1f1b", *SIZE, "--mode", "quick"], "--mode"),
        (["verify"], "FILE"),
        (["--import"], "--import needs"),
    ],
)
def test_usage(hocket, args, words):
    code, out, err = hocket(*args)
    assert code == 2 and out == ""
    assert words in err


@pytest.mark.parametrize(
    "args,words",
    [
        (["show", "1f1c", *SIZE], "did you mean '1f1b'"),
        (["show", '{"schedule": 1}', *SIZE], "needs its name"),
        (["show", '{"schedule": ', *SIZE], "no valid JSON"),
        (["show", "missing.json", *SIZE], "cannot read 'missing.json': No such file"),
        (["show", "missing.csv"], "cannot read 'missing.csv': No such file"),
        (["show", "mine.toml", *SIZE], "its suffix does not say"),
        (["show", "1f1b", "--ranks", "0", "--microbatches", "8"], "ranks must be at least 1"),
        (["show", "1f1b", *SIZE, "--num-stages-per-rank", "0"], "num_stages_per_rank=0"),
        (["show", "dual_pipe_v", "--ranks", "4", "--microbatches", "2"], "at least"),
        (["simulate", "1f1b", *SIZE, "--forward", "1,2"], "2 numbers for 4 stages"),
        (["simulate", "1f1b", *SIZE, "--forward", "quick"], "--forward is 'quick'"),
        (["simulate", "1f1b", *SIZE, "--forward", "-1"], "forward is -1"),
        (["simulate", "1f1b", *SIZE, "--costs", '{"forwards": 1}'], "no field 'forwards'"),
        (["simulate", "1f1b", *SIZE, "--costs", "[1]"], "give JSON like"),
        (["simulate", "1f1b", *SIZE, "--costs", "{1}"], "--costs is no valid JSON"),
        (["draw", "1f1b", *SIZE, "--width", "3"], "give 16 to"),
        (["draw", "1f1b", *SIZE, "--output", "x.gif"], "its suffix says"),
        (["draw", "1f1b", *SIZE, "--output", "/nowhere/x.txt"], "cannot write '/nowhere/x.txt'"),
        (["draw", "1f1b", *SIZE, "--output", "/nowhere/x.png"], "cannot write '/nowhere/x.png'"),
        (["draw", "1f1b", *SIZE, "--output", "x.png", "--json"], "leave one out"),
        (["draw", "1f1b", *SIZE, "--measured", "missing.json"], "cannot read 'missing.json'"),
        (["plan", "1f1b", *SIZE, "--layers", "3"], "3"),
        (["plan", "1f1b", *SIZE, "--layers", "8", "--rank", "4"], "rank 4"),
        (["plan", "1f1b", *SIZE, "--layers", "8", "--layer-counts", "1.5"], "whole numbers"),
        (["compare", *SIZE, "--schedules", "1f1b,none"], "unknown schedule 'none'"),
        (["compare", *SIZE, "--memory", "0"], "memory is 0"),
        (["verify", "missing.csv"], "cannot read"),
        (["verify", "."], "cannot read '.': Is a directory"),
        (["verify", "a\0b"], "cannot read"),
        (["--import", "no_such_module", "show"], "cannot import 'no_such_module'"),
    ],
)
def test_refused(hocket, args, words):
    code, out, err = hocket(*args)
    assert code == 1 and out == ""
    assert err.startswith("hocket: ") and words in err and "Traceback" not in err
