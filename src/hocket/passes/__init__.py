"""Passes: functions from a legal Program to a legal Program. `lower` runs those that every run needs."""

from hocket.passes.comms import add_communication, communicating_rank
from hocket.program import Action, Program

__all__ = ["add_communication", "lower", "lower_rank"]


def lower(program: Program) -> Program:
    """Make a compute-only program executable: add its sends and receives.

    A program that is lowered already comes back as it is. Raises ProgramError if the program is not legal.
    """
    return program if program.is_lowered else add_communication(program)


def lower_rank(program: Program, rank: int) -> tuple[Action, ...]:
    """The list of one rank in `lower(program)`, without making those of the others."""
    return program.ranks[rank] if program.is_lowered else communicating_rank(program, rank)
