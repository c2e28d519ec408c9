"""The one exception that means "wrong use": its text is shown as it is, and the process ends with code 2."""

from __future__ import annotations


class UserError(ValueError):
    """Wrong use: a key, a file or a text that cannot work.

    Each of `problems` is one line that names what is wrong, its value, and the way out.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))
