"""Passes: functions from a legal Program to a legal Program. `lower` runs those that every run needs."""

from hocket.passes.comms import add_communication
from hocket.program import Program

__all__ = ["add_communication", "lower"]


def lower(program: Program) -> Program:
    """Make a compute-only program executable: add its sends and receives.

    A program that is lowered already comes back as it is. Raises ProgramError if the program cannot run.
    """
    return program if program.is_lowered else add_communication(program)
