"""Requests that change a repository of the Hub: access, retries, a commit, and the cause of a failure in one line."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id

from hfgpt.errors import RunError, UserError, message, one_line
from hfgpt.retry import retry

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRIES, LONGEST_PAUSE_SECONDS = 6, 60.0
# A try may take a minute, plus the time for the weights on a slow connection.
TRY_SECONDS, SLOWEST_BYTES_PER_SECOND = 60.0, 100_000
LARGE = (".safetensors", ".jsonl")  # files that the Hub may store apart, and that are sent one after another


def check_access(repo_id: str) -> str:
    """Return the token for pushing. Raises UserError for an invalid repository name, or without a token."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(
            f"repository {repo_id!r}: {message(error)}; give it as user/name (in a recipe: --hub_model_id user/name)"
        ) from None
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"repository {repo_id}: HF_HUB_OFFLINE is set, so nothing can be pushed; unset it")
    if (token := get_token()) is None:
        raise UserError(f"repository {repo_id}: no token to push with; log in with `hf auth login`, or set HF_TOKEN")
    return token


def full_name(api: HfApi, repo_id: str) -> str:
    """Return user/name: a name alone is under the account of the token."""
    return repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"


def commit_files(
    api: HfApi,
    name: str,
    files: Mapping[str, Path | bytes],
    title: str,
    private: bool | None = None,
    revision: str | None = None,
    replaced: str | None = None,
) -> Any:
    """Make one commit with `files`, by name in the repository, which is created if needed; returns the commit.

    private: True refuses a public repository. replaced: a folder in the repository that afterwards has nothing but
    `files`. Everything that was already done is detected, so the whole can be retried.
    """
    api.create_repo(name, private=private, exist_ok=True)
    if private and not api.model_info(name).private:
        raise RunError(
            f"{name} is public, so nothing was pushed to it; choose another one, or make it private on the Hub"
        )
    if revision is not None:
        api.create_branch(name, branch=revision, exist_ok=True)
    added = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=content) for path, content in files.items()]
    gone: list[CommitOperationDelete] = []
    if replaced:
        there = [path for path in api.list_repo_files(name, revision=revision) if path.startswith(f"{replaced}/")]
        gone = [CommitOperationDelete(path_in_repo=path, is_folder=False) for path in there if path not in files]
    for one in added:
        if one.path_in_repo.endswith(LARGE):  # each alone: threads of a pool would hold up the end of the process
            api.preupload_lfs_files(name, [one], revision=revision, free_memory=False)
    # Sends what the repository lacks; if it lacks nothing, this is the existing commit.
    return api.create_commit(name, [*added, *gone], commit_message=title, revision=revision)


def longest_seconds(upload_bytes: int) -> float:
    """Return how long all tries of a push may take together."""
    return TRIES * (TRY_SECONDS + upload_bytes / SLOWEST_BYTES_PER_SECOND + LONGEST_PAUSE_SECONDS)


def retry_hub(call: Callable[[], T], transfer_bytes: int = 0, tries: int = TRIES) -> T:
    """Retry, with growing pauses, while the Hub is busy or cannot be reached. Raises the last error.

    The Hub client itself retries file transfers, but not the commit or the requests around it.
    """

    def on_retry(error: Exception, tries: int, waited_seconds: float, pause_seconds: float) -> None:
        logger.warning("the Hub: %s; trying again in %.0f s", without_signatures(message(error)), pause_seconds)

    try_seconds = TRY_SECONDS + transfer_bytes / SLOWEST_BYTES_PER_SECOND
    try:
        return retry(
            *(call, "the Hub failed", tries * (try_seconds + LONGEST_PAUSE_SECONDS), on_retry),
            max_tries=tries,
            try_seconds=try_seconds,
            longest_pause_seconds=LONGEST_PAUSE_SECONDS,
        )
    except RunError as error:
        if isinstance(last := error.__cause__, Exception):
            raise last from last.__cause__  # which says whether the network was at fault
        raise


def cause_of(error: Exception, repo_id: str, token: str | None) -> str:
    """Return the cause of an error in one line, without the token."""
    response = getattr(error, "response", None)
    if response is None:
        chain = [error] if isinstance(error, ValueError) else filter(None, (error, error.__cause__))
        cause = ": ".join(dict.fromkeys(f"{type(part).__name__}: {one_line(part) or 'no message'}" for part in chain))
    else:
        cause = f"{response.status_code} {response.reason_phrase} from {str(response.url).split('?')[0]}"
        if answer := getattr(error, "server_message", None):
            cause += f": {' '.join(answer.split())}"
        if isinstance(error, RevisionNotFoundError):
            cause += "; the Hub has no such branch, and did not create it"
        elif response.status_code in (401, 403, 404):
            cause += f"; log in with `hf auth login`, or set HF_TOKEN to a token with write access to {repo_id}"
    return without_signatures(cause).replace(token or "\0", "(token)")


def without_signatures(text: str) -> str:
    """Remove the query strings of storage URLs: anybody who has them could write there."""
    return re.sub(r"(https?://[^\s'\"?]+)\?[^\s'\"]*", r"\1", text)
