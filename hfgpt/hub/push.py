"""Push a checkpoint to the Hub: verified first, then the model's files in one commit, with retries."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Container
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import disable_progress_bars
from transformers import AutoTokenizer

from hfgpt.checkpointing.checkpoint import MANIFEST
from hfgpt.checkpointing.read_training_state import STATE, read_state
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.config import PretrainConfig
from hfgpt.data.remote import quiet_hub
from hfgpt.errors import RunError, UserError, one_line
from hfgpt.evaluation.results import read_evaluations
from hfgpt.files import TOKENIZER_FILES
from hfgpt.hub.client import cause_of, check_access, commit_files, full_name, retry_hub
from hfgpt.hub.model_card import PLOT, address_card, model_card, plot_losses, public_records, split_languages
from hfgpt.hub.resume_point import point_files, resume_folder
from hfgpt.hub.verify import check_is_model, verify
from hfgpt.links import follow
from hfgpt.messages.formats import enumerated
from hfgpt.messages.slow_progress import SlowWork
from hfgpt.retry import is_temporary

logger = logging.getLogger(__name__)

# The only files ever uploaded from a folder; the card, loss curve and records are generated for the upload.
UPLOADED = ("config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES)
CARD, RECORDS = "README.md", "metrics.jsonl"
WEIGHTS = (".bin", ".safetensors", ".index.json", ".pt", ".h5", ".msgpack", ".gguf")


def push(
    folder: str | Path,
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    tag: str | None = None,
    license: str | None = None,
    language: str | None = None,
    hub_strategy: str = "end",
) -> str:
    """Upload the model in a checkpoint folder, which is only read; returns the URL of the commit.

    repo_id: user/name, or only a name. private: None is the account's default; True refuses a public repository.
    revision: a branch, created if it does not exist. tag: a tag for the commit. license, language: for the card,
    instead of the run's. hub_strategy: also keeps the checkpoint as a resume point, as a run does. Raises UserError if
    nothing can be sent, and RunError if the folder fails verification (then nothing is sent) or if the upload fails.
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
        options = (private, revision, tag, license, language)
        return _upload(HfApi(token=token), folder, repo_id, *options, resume_folder(hub_strategy, folder))

    try:
        with quiet_hub(), SlowWork(f"uploading to {repo_id}"):
            return retry_hub(upload, (folder / "model.safetensors").stat().st_size)
    except (RunError, UserError):
        raise
    except Exception as error:
        options = {"--revision": revision, "--tag": tag, "--license": license, "--language": language}
        flags = [part for key, value in options.items() if value is not None for part in (key, value)]
        again = shlex.join(["hfgpt", "push", str(given), repo_id, *(["--private"] if private else []), *flags])
        cause = cause_of(error, repo_id, token)
        if resume_folder(hub_strategy, folder):
            again += ", or with its resume point by the command of the run with --resume_from_checkpoint latest"
        raise RunError(f"{given} is complete, but was not pushed to {repo_id}: {cause}; try again: {again}") from None


def check_push(config: PretrainConfig) -> None:
    """Raise UserError, before training, for what would prevent the push, if any; only warn if the Hub is down."""
    if not config.push_to_hub:
        return
    repo_id = config.hub_repo_id()
    token = check_access(repo_id)
    try:
        with quiet_hub():
            user = retry_hub(HfApi(token=token).whoami, tries=2)
            retry_hub(lambda: _check_card(config.hub_license, config.hub_language), tries=2)
    except UserError:
        raise
    except Exception as error:
        cause = cause_of(error, repo_id, token)
        if not is_temporary(error):
            raise UserError(f"push_to_hub: {cause}") from None
        when = "after it" if config.hub_strategy == "end" else "at each save"
        logger.warning(
            "the Hub cannot be reached now (%s); training starts anyway, and the push is tried %s", cause, when
        )
        return
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"push_to_hub: the token of {user['name']} is read-only; use one with write permission")
    owners = [user["name"], *(one["name"] for one in user.get("orgs", ()))]
    if "/" in repo_id and (owner := repo_id.split("/")[0]) not in owners:
        raise UserError(
            f"hub_model_id={repo_id}: {user['name']} cannot push to {owner}; give it as {enumerated(owners)}/name"
        )


def push_trained(config: PretrainConfig, folder: Path) -> None:
    """Push the last checkpoint of a finished run. Raises RunError with the command for trying again."""
    try:
        url = push(folder, config.hub_repo_id(), config.hub_private_repo, hub_strategy=config.hub_strategy)
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
    kept_in: str | None,
) -> str:
    """Make all requests of a push. Each one detects what was already done, so the whole can be retried."""
    name = full_name(api, repo_id)
    _check_card(license, language)
    files = _files(folder, name, revision, license, language)
    if kept_in:
        files |= point_files(folder, RunFolder(folder.parent, writes=False), kept_in)
    commit = commit_files(api, name, files, "Upload model with hfgpt", private, revision, replaced=kept_in)
    others = [path for path in api.list_repo_files(name, revision=revision) if path.endswith(WEIGHTS)]
    if others := [path for path in others if "/" not in path and path not in files]:
        logger.warning("%s also contains %s, which other tools may load instead; delete them on the Hub", name, others)
    if tag is not None:
        api.create_tag(name, tag=tag, revision=commit.oid, exist_ok=True)
        tagged = {ref.name: ref.target_commit for ref in api.list_repo_refs(name).tags}.get(tag, commit.oid)
        if tagged != commit.oid:
            raise RunError(f"pushed to {name}, but tag {tag} already names commit {tagged[:12]}; choose another tag")
    return str(commit.commit_url)


def model_files(folder: Path, listed: Container[str] | None) -> dict[str, Path | bytes]:
    """Return the model's files in a folder that are `listed` (None: all), by name."""
    found = {path.relative_to(folder).as_posix(): path for name in UPLOADED for path in sorted(folder.glob(name))}
    return {name: path for name, path in found.items() if path.is_file() and (listed is None or name in listed)}


def _files(
    folder: Path, repo_id: str, revision: str | None, license: str | None, language: str | None
) -> dict[str, Path | bytes]:
    """Return what to upload, by name in the repository.

    If the folder has a manifest, only the files listed there: files added later are not part of the checkpoint. A
    folder without training state keeps its own card.
    """
    manifest = folder / MANIFEST
    own = json.loads(manifest.read_text(encoding="utf-8"))["files"] if manifest.is_file() else None
    files = model_files(folder, own)
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
