"""The Hub: which files a dataset has, patience with faults on the way to them, and the files of a model."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from hfgpt.errors import RunError, UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What reading a broken file raises; a faulty transfer raises it too, so a remote file is read this often.
BROKEN = (EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError)
TRIES_OF_A_BROKEN_FILE = 3
LONGEST_PAUSE_SECONDS = 60.0
LAST_TRY_SECONDS = 30.0
# How long a Hub that has not answered yet is waited for, before anything is asked of it.
CONTACT_SECONDS = 5.0

# What this process had to try again since `take_events` was called last.
_events: list[dict[str, Any]] = []


def take_events() -> list[dict[str, Any]]:
    """The records of retries since the last call: `what, reason, tries, waited_seconds`."""
    events, _events[:] = list(_events), []
    return events


def patiently(read: Callable[[], T], what: str, patience_seconds: float) -> T:
    """What `read` returns, called again with growing pauses while the way to it fails.

    A refusal (no such file, no right to it) is raised at once. Raises RunError once it has failed for
    `patience_seconds`, all tries and pauses together, and what a broken file raises when it has been read a few times
    to the same end.
    """
    began, pause, tries, broken, is_last = time.monotonic(), 1.0, 0, 0, False
    left = patience_seconds
    while True:
        try:
            with deadline(left, patience_seconds), _client_retries(what):
                return read()
        except UserError:
            raise
        except Exception as error:
            broken += isinstance(error, BROKEN)
            if not (isinstance(error, BROKEN) or is_passing(error)) or broken == TRIES_OF_A_BROKEN_FILE:
                raise
            tries, waited, reason = tries + 1, time.monotonic() - began, first_line(error)
            left = patience_seconds - waited
            if left <= 0 or is_last:
                raise RunError(f"{what} could not be read for {waited:.0f} s ({reason})") from error
            # One more try before the patience ends, however long a server asks to be left alone.
            pause, longest = max(pause, asked_pause(error)), left - min(left / 2, LAST_TRY_SECONDS)
            pause, is_last = min(pause, longest), pause >= longest
            _note(what, reason, tries, waited, f"trying again in {pause:.0f} s")
            time.sleep(pause)
            left = patience_seconds - (time.monotonic() - began)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _note(what: str, reason: str, tries: int, waited_seconds: float, then: str) -> None:
    _events.append({"what": what, "reason": reason, "tries": tries, "waited_seconds": waited_seconds})
    logger.warning("%s: %s; %s", what, reason, then)


@contextlib.contextmanager
def deadline(seconds: float, patience_seconds: float | None = None) -> Iterator[None]:
    """TimeoutError in what takes longer than `seconds`, be it a trickle of bytes that no time-out of the client ends.

    Only the main thread of a process can be woken so. The error names the whole `patience_seconds` if they are given.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def wake(*_: object) -> None:
        raise TimeoutError(f"it took more than {patience_seconds or seconds:g} s")

    before = signal.signal(signal.SIGALRM, wake)
    began = time.monotonic()
    outer, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001) if patience_seconds or seconds else 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:  # a deadline around this one
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - began), 0.001))


@contextlib.contextmanager
def _client_retries(what: str) -> Iterator[None]:
    """Turn the lines in which the Hub client tells of its own retries into ours, and into records."""
    began, reasons = time.monotonic(), ["fault"]

    def take(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "thrown while requesting" in message:
            reasons.append(message.partition(" thrown while requesting")[0])
        elif retry := re.search(r"\[Retry (\d+)/", message):
            then = message.partition(" [Retry")[0].strip(". ").lower()
            _note(what, reasons[-1], int(retry[1]), time.monotonic() - began, then)
        else:
            return True
        return False

    client = logging.getLogger("huggingface_hub.utils._http")
    client.addFilter(take)
    try:
        yield
    finally:
        client.removeFilter(take)


def is_passing(error: BaseException) -> bool:
    """Whether a fault may pass: of the network or of a busy server, here or among the causes of `error`."""
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return status in (408, 425, 429) or status >= 500
        # The HTTP client's own faults are no OSError, and the package that has them has changed.
        if isinstance(cause, ConnectionError | TimeoutError) or "TransportError" in {
            base.__name__ for base in type(cause).__mro__
        }:
            return True
    return type(error) is OSError and error.errno is None  # a transfer that came out too short


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def asked_pause(error: BaseException) -> float:
    """Seconds that a server asks to be left alone, else 0: by Retry-After, a number or a date, or, like the Hub, by
    `RateLimit: "api";r=0;t=55`.
    """
    for cause in _causes(error):
        headers = getattr(getattr(cause, "response", None), "headers", {})
        if used_up := re.search(r";r=0;t=(\d+)", headers.get("RateLimit", "").replace(" ", "")):
            return float(used_up[1])
        with contextlib.suppress(KeyError, ValueError):
            asked = headers["Retry-After"]
            return float(asked) if asked.isdecimal() else parsedate_to_datetime(asked).timestamp() - time.time()
    return 0.0


def contact_fault() -> str | None:
    """Why the Hub cannot be reached, found in seconds; None if it answers, whatever it says, or is not to be asked."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return None
    began, reason = time.monotonic(), ""
    while not reason or time.monotonic() - began < CONTACT_SECONDS:
        if reason:
            time.sleep(1)
        try:
            with deadline(CONTACT_SECONDS):  # looking its name up has no time-out of its own
                get_session().head(constants.ENDPOINT, timeout=CONTACT_SECONDS)
            return None
        except Exception as error:  # of the HTTP client, whose package has changed
            reason = first_line(error)
            kinds = {base.__name__ for cause in _causes(error) for base in type(cause).__mro__}
            if not kinds & {"ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError", "TimeoutError"}:
                return None  # it was there, and failed: that is for the patience of the request itself
            if "gaierror" in kinds and "Name or service not known" in reason:
                break
    return f"the Hub at {constants.ENDPOINT} cannot be reached"


def check_hub(given: str, repository: str) -> None:
    """Raise UserError, which begins with `given`, where the Hub is not there and has nothing of `repository` cached."""
    from huggingface_hub import try_to_load_from_cache

    repository = repository.partition("@")[0]
    with contextlib.suppress(Exception):  # not the form of a name there
        cached = (try_to_load_from_cache(repository, name) for name in ("config.json", "tokenizer_config.json"))
        if any(isinstance(path, str) for path in cached):
            return
    if fault := contact_fault():
        raise UserError(f"{given}: no such local file or folder, and {fault}; check the name or the connection")


def hub_files(
    dataset: str, name: str | None, split: str, revision: str | None, patience_seconds: float
) -> tuple[list[str], str]:
    """Files of one split, as URLs (hf://datasets/ID@COMMIT/PATH) or in the local cache when offline, and the commit.

    Raises UserError for what is not there or not allowed.
    """
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    asked = {"dataset": dataset, "dataset_name": name, "dataset_revision": revision}
    given = ", ".join(f"{key}={value}" for key, value in asked.items() if value)
    asked_before = False

    def resolve() -> tuple[Any, str]:
        nonlocal asked_before
        try:
            return look_up()
        except Exception as error:
            if not asked_before and is_passing(error) and (fault := contact_fault()):
                hint = "check the name or the connection, or use what is cached with HF_HUB_OFFLINE=1"
                raise UserError(f"{given}: no local file, and {fault}: {first_line(error)}; {hint}") from error
            asked_before = True
            raise

    def look_up() -> tuple[Any, str]:
        if HF_HUB_OFFLINE:
            folder = snapshot_download(dataset, repo_type="dataset", revision=revision, local_files_only=True)
            return load_dataset_builder(folder, name).config.data_files or {}, Path(folder).name
        commit = HfApi().dataset_info(dataset, revision=revision).sha
        return load_dataset_builder(dataset, name, revision=commit).config.data_files or {}, str(commit)

    try:
        splits, commit = patiently(resolve, given, patience_seconds)
    except UserError:
        raise
    except RunError as error:
        raise UserError(f"{given}: no local file, and the Hub cannot be reached: {error}") from error
    except Exception as error:  # not found, not allowed, unknown configuration: each of its own type
        way_out = "; HF_HUB_OFFLINE is set, so only what is cached can be used" if HF_HUB_OFFLINE else ""
        raise UserError(f"{given}: no local file, and not usable from the Hub: {first_line(error)}{way_out}") from error
    if split not in splits:
        raise UserError(f"dataset_split={split}: {dataset} has no such split; it has {', '.join(map(str, splits))}")
    return list(splits[split]), commit


def model_files(name: str, setting: str = "init_from=") -> Path:
    """A model that is there, or after it was fetched to the Hub's cache: `name` is a path, or ID or ID@REVISION.

    Raises UserError, which begins with `setting` and the name, for what is neither.
    """
    from huggingface_hub import snapshot_download

    if Path(name).exists():
        return Path(name)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise UserError(f"{setting}{name}: no such file or folder")
    repository, _, revision = name.partition("@")
    wanted = ("config.json", "generation_config.json", "tokenizer*.json", "vocab.json", "merges.txt")
    weights = ("model*.safetensors", "model.safetensors.index.json")
    check_hub(f"{setting}{name}", repository)
    try:
        with quiet_hub():
            return Path(snapshot_download(repository, revision=revision or None, allow_patterns=[*wanted, *weights]))
    except Exception as error:  # not found, not allowed, not reachable: each of its own type
        reason = first_line(error).rstrip(".")
        raise UserError(f"{setting}{name}: no such file or folder, and not usable from the Hub: {reason}") from error


def pinned_name(name: str, files: Path) -> str:
    """What `model_files` turned `name` into, for good: a path without links, or ID@COMMIT."""
    return str(files.resolve()) if Path(name).exists() else f"{name.partition('@')[0]}@{files.name}"


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Keep the Hub client from logging each of its own retries: what comes of them is told in one line."""
    client = logging.getLogger("huggingface_hub")
    level = client.level
    client.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        client.setLevel(level)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
