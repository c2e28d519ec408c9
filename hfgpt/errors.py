"""The exceptions whose text is all that a user needs: no traceback is shown with them."""

from __future__ import annotations

from typing import Any


class UserError(ValueError):
    """Wrong use: a key, a file or a text that cannot work. Exit code 2.

    Each of `problems` is one line that names what is wrong, its value, and the way out.
    """

    retries: list[dict[str, Any]] = []  # noqa: RUF012 records of what was tried before, where there are any

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class RunError(RuntimeError):
    """A run that cannot go on, with its cause in one line; what it had reached is saved.

    `exit_code`: 1, or 128 + the number of the signal that ended the run. `everywhere`: told by every process, as the
    main one may be gone. `retries`: records of what was tried before.
    """

    retries: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, message: str, exit_code: int = 1, everywhere: bool = False) -> None:
        super().__init__(message)
        self.exit_code, self.everywhere = exit_code, everywhere


def first_line(error: BaseException) -> str:
    """The type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {message(error)}"


def message(error: BaseException) -> str:
    """The first line of an exception's message."""
    return (str(error).strip() or "no message").splitlines()[0]


def one_line(error: BaseException) -> str:
    """An exception's message, with spaces for line ends."""
    return " ".join(str(error).split())


def told_by(fault: UserError | RunError, who: str) -> UserError | RunError:
    """The same fault, with the name of the process that met it."""
    if isinstance(fault, UserError):
        return UserError(*(f"{who}: {problem}" for problem in fault.problems))
    return RunError(f"{who}: {fault}", fault.exit_code, fault.everywhere)
