"""The exceptions of hocket: one tree, so that `except HocketError` catches all that the library raises.

HocketError
├── ConfigError (ValueError)        a config, an argument or an input that cannot work; says what to change
│   ├── ScheduleError               the schedule's definition rules these numbers out
│   └── PartitionError              layers or items that cannot be divided as asked
├── ProgramError (ValueError)       a program that is not legal; shows the grid with a mark at the fault
│   └── ParseError                  text or CSV that is no program
└── PipelineError (RuntimeError)    a step that failed at run time
    ├── StageError                  the user's code failed: names rank, stage, microbatch and action
    ├── PeerError                   another rank failed, disagrees, or is gone
    └── PipelineTimeoutError        a rank did not answer in time
"""


class HocketError(Exception):
    """Base of all errors that hocket raises on purpose."""

    agreed: bool = False
    """All ranks raise it, at the same place and before anything is sent: the pipeline can go on."""


class ConfigError(HocketError, ValueError):
    """A config, an argument or an input that cannot work; the message says which value and what to change."""


class ScheduleError(ConfigError):
    """The definition of a schedule rules out these numbers of ranks, stages or microbatches."""


class PartitionError(ConfigError):
    """Layers cannot be divided over stages, or items over microbatches, as asked."""


class ProgramError(HocketError, ValueError):
    """A program is not legal: incomplete, out of order, unpaired, or it would deadlock."""


class ParseError(ProgramError):
    """Text or CSV that is no program."""


class PipelineError(HocketError, RuntimeError):
    """A step of the pipeline failed at run time."""


class StageError(PipelineError):
    """The user's code (stage, loss, hook, provider) failed; names rank, stage, microbatch and action."""


class PeerError(PipelineError):
    """Another rank failed, disagrees with this one, or is gone."""


class PipelineTimeoutError(PipelineError):
    """A rank did not answer within the time allowed."""
