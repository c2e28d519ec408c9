"""Retry network calls while the connection or the server fails."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import TypeVar

from hfgpt.errors import RunError, UserError, message

T = TypeVar("T")

LONGEST_PAUSE_SECONDS = 60.0
LAST_TRY_SECONDS = 30.0


def retry(
    call: Callable[[], T],
    failure: str,
    patience_seconds: float,
    on_retry: Callable[[Exception, int, float, float], None],
    should_retry: Callable[[Exception], bool] | None = None,
    max_tries: int | None = None,
    try_seconds: float | None = None,
    longest_pause_seconds: float = math.inf,
) -> T:
    """Call until it succeeds, with growing pauses between tries, for at most `patience_seconds` in total.

    The Hub client retries single requests a few times by itself; this retries a whole piece of work, for minutes. If a
    server asks for a longer pause, it gets one, but there is always one more try before the patience ends.

    Args:
        failure: what has failed, for the error: "a.parquet could not be read".
        patience_seconds: 0 allows one try of any length.
        on_retry: called before a pause with the error, failed tries, seconds since the start and seconds of the pause.
        should_retry: `is_temporary` by default; other errors are raised at once.
        try_seconds: limit for one try; default: the rest of the patience.

    Raises RunError when the patience or the tries are used up; its cause is the last error.
    """
    start, pause, tries, is_last = time.monotonic(), 1.0, 0, False
    left = patience_seconds
    while True:
        try:
            with deadline(try_seconds or left, shown_seconds=try_seconds or patience_seconds):
                return call()
        except (UserError, RunError):  # final, although a network failure may have caused it
            raise
        except Exception as error:
            if not (should_retry or is_temporary)(error):
                raise
            tries, waited = tries + 1, time.monotonic() - start
            left = patience_seconds - waited
            if left <= 0 or is_last or tries == max_tries:
                raise RunError(f"{failure} for {waited:.0f} s ({message(error)})") from error
            longest = left - min(left / 2, LAST_TRY_SECONDS)
            wanted = min(max(pause, requested_pause(error)), longest_pause_seconds)
            is_last, pause = wanted >= longest, min(wanted, longest)
            on_retry(error, tries, waited, pause)
            time.sleep(pause)
            left = patience_seconds - (time.monotonic() - start)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


@contextlib.contextmanager
def deadline(seconds: float, shown_seconds: float | None = None) -> Iterator[None]:
    """Raise TimeoutError if the code inside takes longer than `seconds`.

    This also catches a slow trickle of bytes that never trips a client's own timeout. There is no limit if `seconds`
    is 0, or outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def wake(*_: object) -> None:
        raise TimeoutError(f"it took more than {shown_seconds or seconds:g} s")

    before, start = signal.signal(signal.SIGALRM, wake), time.monotonic()
    limit = max(seconds, 0.001) if shown_seconds or seconds else 0
    outer, _ = signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:  # the deadline around this one
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - start), 0.001))


def is_temporary(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, comes from the network or a busy server."""
    for cause in causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return status in (408, 425, 429) or status >= 500
        # By name, as the Hub client has changed its HTTP package, whose errors are not OSErrors.
        if isinstance(cause, ConnectionError | TimeoutError) or "TransportError" in _class_names(cause):
            return True
    return type(error) is OSError and error.errno is None  # an incomplete transfer


def requested_pause(error: BaseException) -> float:
    """Return how many seconds a server asks clients to wait, by its headers RateLimit or Retry-After."""
    from huggingface_hub.utils import parse_ratelimit_headers  # late: takes time to import

    for cause in causes(error):
        headers = getattr(getattr(cause, "response", None), "headers", {})
        if (limit := parse_ratelimit_headers(headers)) and limit.remaining == 0:
            return float(limit.reset_in_seconds)
        with contextlib.suppress(KeyError, ValueError):
            asked = headers["Retry-After"]
            return float(asked) if asked.isdecimal() else parsedate_to_datetime(asked).timestamp() - time.time()
    return 0.0


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, what caused it, and so on, each once: the cause of a later error may be raised again in it."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def error_names(error: BaseException) -> set[str]:
    """Return the names of the classes, base classes included, of an error and its causes."""
    return {name for cause in causes(error) for name in _class_names(cause)}


def _class_names(error: BaseException) -> set[str]:
    return {base.__name__ for base in type(error).__mro__}
