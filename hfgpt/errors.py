"""Exceptions whose message tells a user all they need; they are shown without a traceback."""

from __future__ import annotations

from typing import Any


class UserError(ValueError):
    """Wrong use: a setting, a file or a text that cannot work. Exit code 2.

    Each of `problems` is one line that names the key, its value, and the fix.
    """

    retries: list[dict[str, Any]] = []  # noqa: RUF012 records of earlier tries

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class RunError(RuntimeError):
    """A run that cannot continue, with its cause in one line.

    `exit_code`: 1, or 128 + the number of the signal that ended the run. `everywhere`: every process
    prints it, as the main process may be gone. `retries`: records of earlier tries.
    """

    retries: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, message: str, exit_code: int = 1, everywhere: bool = False) -> None:
        super().__init__(message)
        self.exit_code, self.everywhere = exit_code, everywhere


class TextEnded(RunError):
    """The text of a run has no more steps, as `max_epochs` wants it: the run saves and ends with exit code 0."""


def first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {message(error) if str(error).strip() else 'no message'}"


def message(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException) -> str:
    """Return an exception's message, with spaces for line ends."""
    return " ".join(str(error).split())


def name_process(error: UserError | RunError, process: str) -> UserError | RunError:
    """Return the same error, with the name of its process before each problem."""
    if isinstance(error, UserError):
        return UserError(*(f"{process}: {problem}" for problem in error.problems))
    return RunError(f"{process}: {error}", error.exit_code, error.everywhere)
