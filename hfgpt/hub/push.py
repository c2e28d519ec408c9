"""Checkpoints to the Hub: verified first, the model's files alone, in one commit; patient with a busy server."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData, constants, get_token
from huggingface_hub.errors import HFValidationError, RevisionNotFoundError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from transformers import AutoTokenizer

from hfgpt.checkpointing.checkpoint import MANIFEST
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.checkpointing.training_state import STATE, read_state
from hfgpt.config import PretrainConfig
from hfgpt.data.remote import quiet_hub
from hfgpt.errors import RunError, UserError
from hfgpt.evaluation.results import recorded_evaluations
from hfgpt.hub.model_card import PLOT, addressed, curves, languages, loss_plot, model_card, public
from hfgpt.hub.verify import verify
from hfgpt.retry import first_line, is_temporary, retry

logger = logging.getLogger(__name__)

T = TypeVar("T")

# All that is ever taken from a folder; the card, the loss curve and the records are made anew.
MODEL_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
)
CARD, RECORDS = "README.md", "metrics.jsonl"
# Each request is tried this often, for at most so long; a server that asks for longer pauses gets LONGEST_PAUSE.
TRIES, PATIENCE_SECONDS, LONGEST_PAUSE_SECONDS = 6, 300.0, 60.0
# One try may take a minute, and the time that its bytes take on a slow line.
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
    """Upload the model in a checkpoint folder to `repo_id` (user/name, or name alone); the address of the commit.

    private: None leaves it to the account's default; True refuses a repository that is public. revision: branch, made
    if there is none. tag: name given to the commit. license, language: for the card, instead of the run's.
    The folder is only read. Raises UserError where nothing can be sent, and RunError for a folder that does not
    verify, of which nothing is sent, or an upload that fails, with the command to try again.
    """
    token = check_access(repo_id)
    given, folder = folder, Path(folder).resolve()  # checkpoint-latest may come to point elsewhere meanwhile
    verified = verify(folder)
    if problems := verified["problems"]:
        raise RunError(f"checkpoint {given} is not pushed: {'; '.join(problems)}")
    if (folder / STATE).is_dir() and (reason := verified.get("loss_not_checked")):
        logger.warning("checkpoint %s: its loss was not checked (%s)", given, reason)
    api = HfApi(token=token)
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        with quiet_hub():
            name = repo_id if "/" in repo_id else f"{_call_hub(api.whoami)['name']}/{repo_id}"
            _check_card(license, language)
            files = _files(folder, name, revision, license, language)
            _call_hub(lambda: api.create_repo(name, private=private, exist_ok=True))
            if private and not _call_hub(lambda: api.model_info(name)).private:
                raise RunError(f"{name} is public, and nothing was pushed to it; name another one, or change it there")
            if revision is not None:
                _call_hub(lambda: api.create_branch(name, branch=revision, exist_ok=True))
            commit = _call_hub(lambda: _commit(api, name, files, revision), _size(files))
            _tell_others(api, name, revision, files)
            if tag is not None:
                _tag(api, name, tag, commit.oid)
    except (RunError, UserError):
        raise
    except Exception as error:
        options = {"--revision": revision, "--tag": tag, "--license": license, "--language": language}
        flags = [part for key, value in options.items() if value is not None for part in (key, value)]
        again = shlex.join(["hfgpt", "push", str(given), repo_id, *(["--private"] if private else []), *flags])
        cause = _cause(error, repo_id, token)
        raise RunError(f"{given} is whole, but was not pushed to {repo_id}: {cause}; try again: {again}") from None
    return str(commit.commit_url)


def check_access(repo_id: str) -> str:
    """The token to push with. Raises UserError for a name that no repository can have, or where there is no token."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(
            f"repository {repo_id!r}: {first_line(error)}; name it user/name (in a recipe by hub_model_id)"
        ) from None
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"repository {repo_id}: HF_HUB_OFFLINE is set, so nothing can be pushed; unset it")
    if (token := get_token()) is None:
        raise UserError(f"repository {repo_id}: no token to push with; log in with `hf auth login`, or set HF_TOKEN")
    return token


def check_push(config: PretrainConfig) -> None:
    """Raise UserError, before training, for what would keep the model from being pushed after it.

    A Hub that cannot be reached now may be by then: that is only told.
    """
    token = check_access(config.hub_repo_id())
    try:
        with quiet_hub():
            user = _call_hub(HfApi(token=token).whoami, tries=2)
            _check_card(config.hub_license, config.hub_language)
    except UserError:
        raise
    except Exception as error:
        cause = _cause(error, config.hub_repo_id(), token)
        if not _may_pass(error):
            raise UserError(f"push_to_hub: {cause}") from None
        logger.warning("the Hub cannot be reached now (%s); training begins, and pushes at its end", cause)
        return
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"push_to_hub: the token of {user['name']} may only read; use one that may write")


def push_trained(config: PretrainConfig, folder: Path) -> None:
    """Push the last checkpoint of a run that has ended. Raises RunError, and never harms the run."""
    try:
        url = push(folder, config.hub_repo_id(), private=config.hub_private_repo)
    except UserError as error:  # what could be pushed when training began
        again = f"hfgpt push {shlex.quote(str(folder))} {config.hub_repo_id()}"
        raise RunError(f"training is done, but nothing was pushed: {error}; try again: {again}") from None
    print(f"pushed to {url}", flush=True)


def _files(
    folder: Path, repo_id: str, revision: str | None, license: str | None, language: str | None
) -> dict[str, Path | bytes]:
    """What is uploaded, by its name there. A folder without training state brings its own card, if it has one.

    Of a folder with a manifest only what that names: a file that came later is not the checkpoint's.
    """
    manifest = folder / MANIFEST
    own = json.loads(manifest.read_text(encoding="utf-8"))["files"] if manifest.is_file() else MODEL_FILES
    files: dict[str, Path | bytes] = {
        name: folder / name for name in MODEL_FILES if name in own and (folder / name).is_file()
    }
    text = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""
    if (folder / STATE).is_dir():
        trainer, fingerprint = read_state(folder, "trainer_state"), read_state(folder, "data_state")["fingerprint"]
        run = RunFolder(folder.resolve().parent, writes=False)
        is_its_run = run.run_id() == trainer["run_id"]
        records = public(run.records(), trainer["step"]) if is_its_run else []
        later = recorded_evaluations(folder)
        facts = run.facts() if is_its_run else {}
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        text = model_card(facts, fingerprint, trainer, records, repo_id, later, tokenizer)
        if curves(records):
            files[PLOT] = loss_plot(records)
            files[RECORDS] = "".join(json.dumps(record) + "\n" for record in records).encode()
    if text or license or language:
        card = ModelCard(addressed(text, repo_id, revision))
        card.data["license"] = license or card.data.get("license")
        card.data["language"] = languages(language) or card.data.get("language")
        files[CARD] = str(card).encode()
    return files


def _commit(api: HfApi, repo_id: str, files: dict[str, Path | bytes], revision: str | None) -> Any:
    """One commit of what is not there yet; where all is, or a try before has made it after all, the one there is."""
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
    return api.create_commit(repo_id, operations, commit_message="Upload model with hfgpt", revision=revision)


def _check_card(license: str | None, language: str | None) -> None:
    """Raise UserError for a license or language that the Hub does not know."""
    told = ModelCardData(license=license, language=languages(language))
    try:
        if told.to_dict():
            _call_hub(ModelCard(f"---\n{told}\n---\n").validate)
    except ValueError as error:
        raise UserError(f"license={license}, language={language}: {' '.join(str(error).split())}") from None


def _tell_others(api: HfApi, repo_id: str, revision: str | None, files: dict[str, Path | bytes]) -> None:
    """Warn of weights in the repository that are not ours: other tools may load them instead."""
    weights = (".bin", ".safetensors", ".index.json", ".pt", ".h5", ".msgpack", ".gguf")
    there = _call_hub(lambda: api.list_repo_files(repo_id, revision=revision))
    if others := [name for name in there if name.endswith(weights) and name not in files]:
        logger.warning("%s also holds %s, which others may load instead; take them out there", repo_id, others)


def _tag(api: HfApi, repo_id: str, tag: str, commit: str) -> None:
    _call_hub(lambda: api.create_tag(repo_id, tag=tag, revision=commit, exist_ok=True))
    there = {ref.name: ref.target_commit for ref in _call_hub(lambda: api.list_repo_refs(repo_id)).tags}
    if there.get(tag, commit) != commit:
        raise RunError(f"pushed to {repo_id}, but tag {tag} already names commit {there[tag][:12]}; choose another tag")


def _size(files: dict[str, Path | bytes]) -> int:
    return sum(len(content) if isinstance(content, bytes) else content.stat().st_size for content in files.values())


def _call_hub(call: Callable[[], T], size_bytes: int = 0, tries: int = TRIES) -> T:
    """Calls `call`, again while the server is busy or the network fails. Raises its last error."""

    def on_retry(error: Exception, tries: int, waited_seconds: float, pause_seconds: float) -> None:
        logger.warning("the Hub: %s; trying again in %.0f s", _without_queries(first_line(error)), pause_seconds)

    try_seconds = TRY_SECONDS + size_bytes / SLOWEST_BYTES_PER_SECOND
    patience_seconds = PATIENCE_SECONDS + tries * try_seconds
    try:
        return retry(
            *(call, "the Hub failed", patience_seconds, on_retry, _may_pass),
            max_tries=tries,
            try_seconds=try_seconds,
            longest_pause_seconds=LONGEST_PAUSE_SECONDS,
        )
    except RunError as error:
        if isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise


def _may_pass(error: Exception) -> bool:
    return is_temporary(error) or isinstance(error, json.JSONDecodeError)  # a failing server may answer with a page


def _cause(error: Exception, repo_id: str, token: str) -> str:
    """One line, without the token."""
    response = getattr(error, "response", None)
    if response is None:
        told = [error] if isinstance(error, ValueError) else filter(None, (error, error.__cause__))
        cause = ": ".join(f"{type(part).__name__}: {' '.join(str(part).split()) or 'no message'}" for part in told)
    else:
        cause = f"{response.status_code} {response.reason_phrase} from {str(response.url).split('?')[0]}"
        if message := getattr(error, "server_message", None):
            cause += f": {' '.join(message.split())}"
        if isinstance(error, RevisionNotFoundError):
            cause += "; the Hub has no such branch, and would not make it"
        elif response.status_code in (401, 403, 404):
            cause += f"; log in with `hf auth login`, or set HF_TOKEN to a token that may write to {repo_id}"
    return _without_queries(cause).replace(token, "(token)")


def _without_queries(text: str) -> str:
    """Addresses of storage are signed in their queries."""
    return re.sub(r"(https?://[^\s'\"?]+)\?[^\s'\"]*", r"\1", text)
