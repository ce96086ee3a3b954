"""The helper that runs functions on ranks: values come back, failures and hangs are shown, nothing is left running."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed import run_distributed, run_torchrun


def test_values_come_back_by_rank():
    def fn(rank, x):
        assert torch.get_num_threads() == 1
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == (str(rank), "4", str(rank))
        t = x + rank
        dist.all_reduce(t)
        return {"rank": rank, "sum": t}

    values = run_distributed(fn, 4, torch.ones(3))
    assert [v["rank"] for v in values] == [0, 1, 2, 3]
    assert all(torch.equal(v["sum"], torch.full((3,), 10.0)) for v in values)


def test_a_large_value_comes_back():
    (value,) = run_distributed(lambda rank: torch.arange(3_000_000), 1)
    assert torch.equal(value, torch.arange(3_000_000))


def test_the_message_of_a_rank_that_returned_arrives_all_the_same():
    """A rank that is done first stays until its peers have read what it sent."""

    def fn(rank):
        if rank == 0:
            dist.send(torch.arange(100_000), 1)
            return None
        time.sleep(0.3)
        t = torch.zeros(100_000, dtype=torch.long)
        dist.recv(t, 0)
        return t.sum().item()

    assert run_distributed(fn, 2)[1] == sum(range(100_000))


def test_a_failure_shows_the_first_traceback_first():
    def fn(rank):
        if rank == 2:
            raise RuntimeError("the first cause")
        dist.barrier()  # its peers hang, or lose the connection and fail too

    with pytest.raises(AssertionError) as error:
        run_distributed(fn, 4)
    text = str(error.value)
    assert "rank 2 of 4 failed first" in text.splitlines()[0]
    assert text.count("--- rank") == 1 or text.index("the first cause") < text.index(
        "--- rank", text.index("--- rank 2") + 1
    )
    assert not multiprocessing.active_children()


def test_peers_that_hang_after_a_failure_are_stopped():
    def fn(rank):
        if rank == 0:
            raise ValueError("no such stage")
        time.sleep(1000)

    with pytest.raises(AssertionError, match=r"no such stage[\s\S]*ranks \[1\] still ran"):
        run_distributed(fn, 2)
    assert not multiprocessing.active_children()


def test_a_hang_shows_where_each_rank_stood():
    def stuck_here(rank):
        if rank == 1:
            return
        dist.recv(torch.zeros(1), 1)

    with pytest.raises(AssertionError) as error:
        run_distributed(stuck_here, 2, timeout=1)
    text = str(error.value)
    assert "not done after 1 s; ranks [0] of 2 still ran, [1] were done" in text
    assert "rank 0, where it stood" in text and "stuck_here" in text.split("where it stood")[1]
    assert not multiprocessing.active_children()


def test_a_rank_that_is_killed_is_named():
    def fn(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed first[\s\S]*exit code -9"):
        run_distributed(fn, 2)


def test_a_value_that_cannot_be_pickled_is_a_failure():
    with pytest.raises(AssertionError, match="pickle"):
        run_distributed(lambda rank: lambda: 0, 1)


def test_outcomes_of_survivors():
    def fn(rank):
        if rank == 0:
            raise RuntimeError("gone")
        with pytest.raises(RuntimeError):
            dist.recv(torch.zeros(1), 0)
        return "survived"

    first, second = run_distributed(fn, 2, check=False)
    assert "gone" in first.traceback and not first.done
    assert second.done and second.value == "survived"


def test_a_stopped_process_does_not_hang_the_helper():
    def fn(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return rank

    first, second = run_distributed(fn, 2, timeout=1, check=False)
    assert first.value == 0
    assert not second.done and "did not answer" in second.stack


@pytest.mark.torchrun
def test_torchrun_runs_a_script(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "os.write(1, f'rank {dist.get_rank()} of {dist.get_world_size()} {sys.argv[1]}\\n'.encode())\n"
        "dist.destroy_process_group()\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    done = run_torchrun(script, 2, 0)
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 0", "rank 1 of 2 0"]
    with pytest.raises(AssertionError, match=r"exit status 1[\s\S]*rank 0 of 2 3"):
        run_torchrun(script, 2, 3)


@pytest.mark.torchrun
def test_torchrun_is_stopped_in_time(tmp_path: Path):
    script = tmp_path / "script.py"
    pids = tmp_path / "pids"
    pids.mkdir()
    script.write_text(
        f"import os, time\nopen(f'{pids}/{{os.getpid()}}', 'w')\nprint('sleeping', flush=True)\ntime.sleep(1000)\n"
    )
    with pytest.raises(AssertionError, match=r"not done after 10 s[\s\S]*sleeping"):
        run_torchrun(script, 1, timeout=10)
    (pid,) = [int(p.name) for p in pids.iterdir()]
    if sys.platform == "linux":
        assert not Path(f"/proc/{pid}").exists()
