"""The Hub: find files of datasets and models, and retry reads while the network fails."""

from __future__ import annotations

import contextlib
import logging
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from hfgpt.data.kinds import file_kind
from hfgpt.data.token_names import splits_of_repository
from hfgpt.errors import RunError, UserError, message
from hfgpt.files import TOKENIZER_FILES
from hfgpt.links import follow
from hfgpt.retry import error_names, is_temporary, retry

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Raised for a broken file. A faulty transfer raises them too, so a remote file is read up to this often.
BROKEN = (EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError)
TRIES_OF_A_BROKEN_FILE = 3
# Seconds to wait for the Hub's first answer before it is reported as unreachable.
CONTACT_SECONDS = 5.0
# Files that `datasets` reads, except what describes a set of tokens.
_DATA_FILE = re.compile(r"\.(parquet|jsonl|csv|tsv|txt|arrow|tar)(\.\w+)?$")
UNREACHABLE = {"ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError", "TimeoutError"}

NOT_ON_HUB = "no dataset of that name on the Hub"
PUSHING = "push-"  # how the names of threads begin that push to the Hub

_retries: list[dict[str, Any]] = []


def take_retries() -> list[dict[str, Any]]:
    """Return the records of this process's retries since the last call: `what, reason, tries, waited_seconds`."""
    records, _retries[:] = list(_retries), []
    return records


def read_with_retries(read: Callable[[], T], what: str, patience_seconds: float) -> T:
    """Return what `read` returns, waiting out network failures for `patience_seconds`.

    A refusal (no such file, no permission) is raised at once, and the error of a broken file after a few tries.
    Raises RunError when the patience is used up. Each retry is logged and recorded, including the Hub client's own.
    """
    broken_reads = 0

    def should_retry(error: Exception) -> bool:
        nonlocal broken_reads
        broken_reads += isinstance(error, BROKEN)
        return is_temporary(error) or (isinstance(error, BROKEN) and broken_reads < TRIES_OF_A_BROKEN_FILE)

    def on_retry(error: Exception, tries: int, waited_seconds: float, pause_seconds: float) -> None:
        _record_retry(what, message(error), tries, waited_seconds, f"trying again in {pause_seconds:.0f} s")

    with _client_retries_recorded(what):
        return retry(read, f"{what} could not be read", patience_seconds, on_retry, should_retry)


def _record_retry(what: str, reason: str, tries: int, waited_seconds: float, next_action: str) -> None:
    _retries.append({"what": what, "reason": reason, "tries": tries, "waited_seconds": waited_seconds})
    logger.warning("%s: %s; %s", what, reason, next_action)


@contextlib.contextmanager
def _client_retries_recorded(what: str) -> Iterator[None]:
    """Convert the Hub client's log lines about its own retries into our records and log lines."""
    start, reason = time.monotonic(), "fault"

    def keep(record: logging.LogRecord) -> bool:
        nonlocal reason
        line = record.getMessage()
        if str(record.threadName).startswith(PUSHING):
            return True
        if "thrown while requesting" in line:
            reason = line.partition(" thrown while requesting")[0]
        elif found := re.search(r"\[Retry (\d+)/", line):
            next_action = line.partition(" [Retry")[0].strip(". ").lower()
            _record_retry(what, reason, int(found[1]), time.monotonic() - start, next_action)
        else:
            return True
        return False

    client = logging.getLogger("huggingface_hub.utils._http")
    client.addFilter(keep)
    try:
        yield
    finally:
        client.removeFilter(keep)


def find_hub_fault() -> str | None:
    """Return, within seconds, why the Hub cannot be reached; None if it answers at all, or if HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    def should_retry(error: Exception) -> bool:
        is_unknown_name = "gaierror" in error_names(error) and "Name or service not known" in str(error)
        return not error_names(error).isdisjoint(UNREACHABLE) and not is_unknown_name

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        retry(
            lambda: get_session().head(constants.ENDPOINT, timeout=CONTACT_SECONDS),
            "the Hub did not answer",
            CONTACT_SECONDS,
            on_retry=lambda *_: None,
            should_retry=should_retry,
        )
    except Exception as error:  # by name: the Hub client has changed its HTTP package
        if not error_names(error).isdisjoint(UNREACHABLE):  # the request retries after other failures
            return f"the Hub at {constants.ENDPOINT} cannot be reached"
    return None


def check_hub(given: str, repository: str) -> None:
    """Raise UserError, starting with `given`, if the Hub is unreachable and nothing of `repository` is cached."""
    from huggingface_hub import try_to_load_from_cache

    repository = repository.partition("@")[0]
    with contextlib.suppress(Exception):  # not a valid repository name
        cached = (try_to_load_from_cache(repository, name) for name in ("config.json", "tokenizer_config.json"))
        if any(isinstance(path, str) for path in cached):
            return
    if fault := find_hub_fault():
        raise UserError(f"{given}: no such local file or folder, and {fault}; check the name or the connection")


def hub_files(
    dataset: str, name: str | None, split: str, revision: str | None, patience_seconds: float
) -> tuple[list[str], str]:
    """Return the files of a split, as URLs (hf://datasets/ID@COMMIT/PATH) or cached paths if offline, and the commit.

    Raises UserError if they do not exist or access is not allowed.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    settings = {"dataset": dataset, "dataset_name": name, "dataset_revision": revision}
    given = ", ".join(f"{key}={value}" for key, value in settings.items() if value)
    is_reachable = False

    def find() -> tuple[Any, str]:
        nonlocal is_reachable
        try:
            return _find_splits(dataset, name, revision)
        except Exception as error:
            if not is_reachable and is_temporary(error) and (fault := find_hub_fault()):
                hint = "check the name or the connection, or use what is cached with HF_HUB_OFFLINE=1"
                raise UserError(
                    f"{given}: no such local file or folder, and {fault}: {message(error)}; {hint}"
                ) from error
            is_reachable = True
            raise

    try:
        splits, commit = read_with_retries(find, given, patience_seconds)
    except UserError:
        raise
    except Exception as error:  # not found, not allowed, unknown configuration: each has its own type
        names = error_names(error)
        if HF_HUB_OFFLINE and "LocalEntryNotFoundError" in names:
            problem = "no dataset of that name is cached, and HF_HUB_OFFLINE is set; check the name"
        elif "RepositoryNotFoundError" in names and "GatedRepoError" not in names:
            problem = f"{NOT_ON_HUB} (or your token may not see it); check the name"
        else:
            problem = "the Hub cannot be reached" if isinstance(error, RunError) else "not usable from the Hub"
            hint = "; HF_HUB_OFFLINE is set, so only cached files can be used" if HF_HUB_OFFLINE else ""
            problem += f": {message(error)}{hint}"
        raise UserError(f"{given}: no such local file or folder, and {problem}") from error
    if split not in splits:
        raise UserError(f"dataset_split={split}: {dataset} has no such split; it has {', '.join(map(str, splits))}")
    return list(splits[split]), commit


def _find_splits(dataset: str, name: str | None, revision: str | None) -> tuple[Any, str]:
    """Return the files of each split, and the commit that the revision resolves to."""
    from datasets import load_dataset_builder  # imported late: takes seconds
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        folder = snapshot_download(dataset, repo_type="dataset", revision=revision, local_files_only=True)
        files = [path.relative_to(folder).as_posix() for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        if splits := _token_splits(dataset, name, "", files):
            root = f"hf://datasets/{dataset}@/"
            return {key: [file.replace(root, f"{folder}/") for file in splits[key]] for key in splits}, Path(
                folder
            ).name
        return load_dataset_builder(folder, name).config.data_files or {}, Path(folder).name
    info = HfApi().dataset_info(dataset, revision=revision)
    commit = str(info.sha)
    if splits := _token_splits(dataset, name, commit, [sibling.rfilename for sibling in info.siblings or ()]):
        return splits, commit
    return load_dataset_builder(dataset, name, revision=commit).config.data_files or {}, commit


def listed_sizes(files: list[str]) -> list[int]:
    """Return the sizes of files from `hub_files`, by the listings of their folders, of which most are already known."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    if "://" not in files[0]:
        return [Path(file).stat().st_size for file in files]
    filesystem = url_to_fs(files[0])[0]
    paths = [file.partition("://")[2] for file in files]
    folders = dict.fromkeys(path.rpartition("/")[0] for path in paths)
    sizes = {entry["name"]: entry["size"] for folder in folders for entry in filesystem.ls(folder)}
    return [sizes[path] for path in paths]


def _token_splits(dataset: str, name: str | None, commit: str, files: list[str]) -> dict[str, list[str]]:
    """Return the token files of a repository (or of its folder `name`) by split; empty if it has other data files.

    `datasets` does not know such files.
    """
    if not any(file_kind(file) == "tokens" for file in files) or any(map(_DATA_FILE.search, files)):
        return {}
    chosen = [file for file in files if name is None or file.startswith(f"{name}/")]
    return splits_of_repository([f"hf://datasets/{dataset}@{commit}/{file}" for file in chosen])


def model_files(name: str, setting: str = "init_from=") -> Path:
    """Return the folder or file of a model: a local path unchanged, or ID or ID@REVISION downloaded to the Hub cache.

    Raises UserError, starting with `setting` and the name, if neither exists.
    """
    from huggingface_hub import snapshot_download

    if Path(name).exists():
        return follow(name)
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or set(name) & {"\\", ":"}:
        raise UserError(f"{setting}{name}: no such file or folder")
    repository, _, revision = name.partition("@")
    patterns = ["config.json", "generation_config.json", *TOKENIZER_FILES]
    patterns += ["model*.safetensors", "model.safetensors.index.json"]
    check_hub(f"{setting}{name}", repository)
    try:
        with quiet_hub():
            return Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # not found, not allowed, not reachable: each has its own type
        reason = message(error).rstrip(".")
        raise UserError(f"{setting}{name}: no such file or folder, and not usable from the Hub: {reason}") from error


def pinned_name(name: str, files: Path) -> str:
    """Return a permanent name for what `model_files` found under `name`: a path without links, or ID@COMMIT."""
    return str(files.resolve()) if Path(name).exists() else f"{name.partition('@')[0]}@{files.name}"


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Keep the Hub client from logging its own retries, where the outcome is reported in a single line anyway."""
    client = logging.getLogger("huggingface_hub")
    level = client.level
    client.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        client.setLevel(level)
