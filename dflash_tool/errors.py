"""The errors a user can meet.

Each message says what is wrong, where, what was expected and what to do; the command line prints it
without a traceback and exits with `exit_code`. Anything that is not a `DflashError` is a defect of ours.
"""


class DflashError(Exception):
    """Base of every error a user can cause or mend. `exit_code` is the status of the command line."""

    exit_code = 1


class ConfigError(DflashError):
    """An option or a configuration value is wrong; nothing was read or written yet."""

    exit_code = 2


class DataError(DflashError):
    """The input data can't be used: unreadable file, bad row under `--strict`, nothing left to do."""


class TargetError(DflashError):
    """The target model can't be used: missing files, no chat template, layers out of range."""


class StoreError(DflashError):
    """A store can't be used: something else is there, other settings, locked, damaged, no room."""


class Interrupted(BaseException):
    """The run was stopped by a signal and left everything in order; the message says how to go on.

    No `Exception`: code that turns whatever a library raises into an error of ours must let it pass.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum
