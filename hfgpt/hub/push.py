"""Push a checkpoint to the Hub: verified first, then the model's files in one commit, with retries."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData, constants, get_token
from huggingface_hub.errors import HFValidationError, RevisionNotFoundError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from transformers import AutoTokenizer

from hfgpt.checkpointing.checkpoint import MANIFEST
from hfgpt.checkpointing.read_training_state import STATE, read_state
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.config import PretrainConfig
from hfgpt.data.remote import quiet_hub
from hfgpt.errors import RunError, UserError, message, one_line
from hfgpt.evaluation.results import read_evaluations
from hfgpt.hub.model_card import PLOT, address_card, model_card, plot_losses, public_records, split_languages
from hfgpt.hub.verify import check_is_model, verify
from hfgpt.links import follow
from hfgpt.messages.slow_progress import SlowWork
from hfgpt.retry import is_temporary, retry

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The only files ever uploaded from a folder; the card, loss curve and records are generated for the upload.
UPLOADED = (
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
)
CARD, RECORDS = "README.md", "metrics.jsonl"
WEIGHTS = (".bin", ".safetensors", ".index.json", ".pt", ".h5", ".msgpack", ".gguf")
TRIES, LONGEST_PAUSE_SECONDS = 6, 60.0
# A try may take a minute, plus the time for the weights on a slow connection.
TRY_SECONDS, SLOWEST_BYTES_PER_SECOND = 60.0, 100_000


def push(
    folder: str | Path,
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    tag: str | None = None,
    license: str | None = None,
    language: str | None = None,
) -> str:
    """Upload the model in a checkpoint folder, which is only read; returns the URL of the commit.

    repo_id: user/name, or only a name. private: None is the account's default; True refuses a public repository.
    revision: a branch, created if it does not exist. tag: a tag for the commit. license, language: for the card,
    instead of the run's. Raises UserError if nothing can be sent, and RunError if the folder fails verification (then
    nothing is sent) or if the upload fails.
    """
    check_is_model(follow(folder))
    token = check_access(repo_id)
    given, folder = folder, follow(folder).resolve()  # checkpoint-latest may point elsewhere before this ends
    verified = verify(folder)
    if problems := verified["problems"]:
        raise RunError(f"checkpoint {given} was not pushed: {'; '.join(problems)}")
    if (folder / STATE).is_dir() and (reason := verified.get("loss_not_checked")):
        logger.warning("checkpoint %s: its loss was not checked (%s)", given, reason)
    if not sys.stderr.isatty():
        disable_progress_bars()

    def upload() -> str:
        return _upload(HfApi(token=token), folder, repo_id, private, revision, tag, license, language)

    try:
        with quiet_hub(), SlowWork(f"uploading to {repo_id}"):
            return _retry(upload, (folder / "model.safetensors").stat().st_size)
    except (RunError, UserError):
        raise
    except Exception as error:
        options = {"--revision": revision, "--tag": tag, "--license": license, "--language": language}
        flags = [part for key, value in options.items() if value is not None for part in (key, value)]
        again = shlex.join(["hfgpt", "push", str(given), repo_id, *(["--private"] if private else []), *flags])
        cause = _cause(error, repo_id, token)
        raise RunError(f"{given} is complete, but was not pushed to {repo_id}: {cause}; try again: {again}") from None


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


def check_push(config: PretrainConfig) -> None:
    """Raise UserError, before training, for anything that would prevent the push; only warn if the Hub is down."""
    token = check_access(config.hub_repo_id())
    try:
        with quiet_hub():
            user = _retry(HfApi(token=token).whoami, tries=2)
            _retry(lambda: _check_card(config.hub_license, config.hub_language), tries=2)
    except UserError:
        raise
    except Exception as error:
        cause = _cause(error, config.hub_repo_id(), token)
        if not is_temporary(error):
            raise UserError(f"push_to_hub: {cause}") from None
        logger.warning(
            "the Hub cannot be reached now (%s); training starts anyway, and the push is tried after it", cause
        )
        return
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"push_to_hub: the token of {user['name']} is read-only; use one with write permission")


def push_trained(config: PretrainConfig, folder: Path) -> None:
    """Push the last checkpoint of a finished run. Raises RunError with the command for trying again."""
    try:
        url = push(folder, config.hub_repo_id(), private=config.hub_private_repo)
    except UserError as error:  # access was already checked before training
        again = f"hfgpt push {shlex.quote(str(folder))} {config.hub_repo_id()}"
        raise RunError(f"training is done, but nothing was pushed: {error}; try again: {again}") from None
    print(f"pushed to {url}", flush=True)


def _upload(
    api: HfApi,
    folder: Path,
    repo_id: str,
    private: bool | None,
    revision: str | None,
    tag: str | None,
    license: str | None,
    language: str | None,
) -> str:
    """Make all requests of a push. Each one detects what was already done, so the whole can be retried."""
    name = repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"
    _check_card(license, language)
    files = _files(folder, name, revision, license, language)
    api.create_repo(name, private=private, exist_ok=True)
    if private and not api.model_info(name).private:
        raise RunError(
            f"{name} is public, so nothing was pushed to it; choose another one, or make it private on the Hub"
        )
    if revision is not None:
        api.create_branch(name, branch=revision, exist_ok=True)
    # Sends what the repository lacks; if it lacks nothing, this is the existing commit.
    added = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=content) for path, content in files.items()]
    commit = api.create_commit(name, added, commit_message="Upload model with hfgpt", revision=revision)
    others = [path for path in api.list_repo_files(name, revision=revision) if path.endswith(WEIGHTS)]
    if others := [path for path in others if path not in files]:
        logger.warning("%s also contains %s, which other tools may load instead; delete them on the Hub", name, others)
    if tag is not None:
        api.create_tag(name, tag=tag, revision=commit.oid, exist_ok=True)
        tagged = {ref.name: ref.target_commit for ref in api.list_repo_refs(name).tags}.get(tag, commit.oid)
        if tagged != commit.oid:
            raise RunError(f"pushed to {name}, but tag {tag} already names commit {tagged[:12]}; choose another tag")
    return str(commit.commit_url)


def _files(
    folder: Path, repo_id: str, revision: str | None, license: str | None, language: str | None
) -> dict[str, Path | bytes]:
    """Return what to upload, by name in the repository.

    If the folder has a manifest, only the files listed there: files added later are not part of the checkpoint. A
    folder without training state keeps its own card.
    """
    manifest = folder / MANIFEST
    own = json.loads(manifest.read_text(encoding="utf-8"))["files"] if manifest.is_file() else UPLOADED
    files: dict[str, Path | bytes] = {
        name: folder / name for name in UPLOADED if name in own and (folder / name).is_file()
    }
    card = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""
    if (folder / STATE).is_dir():
        trainer, fingerprint = read_state(folder, "trainer_state"), read_state(folder, "data_state")["fingerprint"]
        run = RunFolder(folder.resolve().parent, writes=False)
        is_its_run = run.run_id() == trainer["run_id"]
        records = public_records(run.records(), trainer["step"]) if is_its_run else []
        facts = run.facts() if is_its_run else {}
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        card = model_card(facts, fingerprint, trainer, records, repo_id, read_evaluations(folder), tokenizer)
        if records:
            files[PLOT] = plot_losses(records)
            files[RECORDS] = "".join(json.dumps(record) + "\n" for record in records).encode()
    if card or license or language:
        parts = ModelCard(address_card(card, repo_id, revision))
        parts.data["license"] = license or parts.data.get("license")
        parts.data["language"] = split_languages(language) or parts.data.get("language")
        files[CARD] = str(parts).encode()
    return files


def _check_card(license: str | None, language: str | None) -> None:
    """Raise UserError for a license or language that the Hub does not know."""
    data = ModelCardData(license=license, language=split_languages(language))
    if not data.to_dict():
        return
    try:
        ModelCard(f"---\n{data}\n---\n").validate()
    except ValueError as error:
        raise UserError(f"license={license}, language={language}: {one_line(error)}") from None


def _retry(call: Callable[[], T], upload_bytes: int = 0, tries: int = TRIES) -> T:
    """Retry, with growing pauses, while the Hub is busy or cannot be reached. Raises the last error.

    The Hub client itself retries file uploads, but not the commit or the requests around it.
    """

    def on_retry(error: Exception, tries: int, waited_seconds: float, pause_seconds: float) -> None:
        logger.warning("the Hub: %s; trying again in %.0f s", _without_signatures(message(error)), pause_seconds)

    try_seconds = TRY_SECONDS + upload_bytes / SLOWEST_BYTES_PER_SECOND
    try:
        return retry(
            *(call, "the Hub failed", tries * (try_seconds + LONGEST_PAUSE_SECONDS), on_retry),
            max_tries=tries,
            try_seconds=try_seconds,
            longest_pause_seconds=LONGEST_PAUSE_SECONDS,
        )
    except RunError as error:
        if isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise


def _cause(error: Exception, repo_id: str, token: str) -> str:
    """Return the cause of an error in one line, without the token."""
    response = getattr(error, "response", None)
    if response is None:
        chain = [error] if isinstance(error, ValueError) else filter(None, (error, error.__cause__))
        cause = ": ".join(f"{type(part).__name__}: {one_line(part) or 'no message'}" for part in chain)
    else:
        cause = f"{response.status_code} {response.reason_phrase} from {str(response.url).split('?')[0]}"
        if answer := getattr(error, "server_message", None):
            cause += f": {' '.join(answer.split())}"
        if isinstance(error, RevisionNotFoundError):
            cause += "; the Hub has no such branch, and did not create it"
        elif response.status_code in (401, 403, 404):
            cause += f"; log in with `hf auth login`, or set HF_TOKEN to a token with write access to {repo_id}"
    return _without_signatures(cause).replace(token, "(token)")


def _without_signatures(text: str) -> str:
    """Remove the query strings of storage URLs: anybody who has them could write there."""
    return re.sub(r"(https?://[^\s'\"?]+)\?[^\s'\"]*", r"\1", text)
