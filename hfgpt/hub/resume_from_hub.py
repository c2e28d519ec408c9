"""`--resume_from_checkpoint hub`, `me/mine` or `me/mine@revision`: the newest whole checkpoint, here or on the Hub."""

from __future__ import annotations

import logging
import re
import sys
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.utils import disable_progress_bars

from hfgpt.checkpointing.checkpoint import find_checkpoint
from hfgpt.checkpointing.read_training_state import read_state
from hfgpt.checkpointing.run_folder import RunFolder
from hfgpt.config import PretrainConfig
from hfgpt.data.remote import quiet_hub
from hfgpt.errors import UserError
from hfgpt.hub.client import cause_of, retry_hub
from hfgpt.hub.resume_point import FOLDER, DamagedPoint, Place, Point, fetch, find_point
from hfgpt.links import follow
from hfgpt.retry import is_temporary

logger = logging.getLogger(__name__)

HUB = "hub"
TRIES = 4  # a few seconds
_ON_HUB = re.compile(rf"([\w.-]+/[\w.-]+)(?:/({FOLDER.pattern}))?(?:@([\w./-]+))?")


def find_resume_point(config: PretrainConfig, run: RunFolder) -> Path | None:
    """Return the checkpoint that `resume_from_checkpoint` names, here or on the Hub; None to start at step 1."""
    place = place_on_hub(config)
    found = resume_from_hub(place, config, run) if place else find_checkpoint(run, config.resume_from_checkpoint)
    if config.push_to_hub and config.hub_strategy in ("checkpoint", "all_checkpoints"):
        _refuse_other_run(config, found)
    return found


def _refuse_other_run(config: PretrainConfig, resumed: Path | None) -> None:
    """Raise UserError if this run would replace the resume point of another one on the Hub."""
    try:
        with quiet_hub():
            api = HfApi(token=get_token())
            point = retry_hub(partial(find_point, api, Place(config.hub_repo_id())), tries=2)
    except Exception:  # `check_push` has reported what keeps the Hub from answering
        return
    own = read_state(resumed, "trainer_state")["run_id"] if resumed else None
    if point is not None and point.run_id != own:
        raise UserError(
            f"hub_model_id={config.hub_repo_id()}: it holds another run, at step {point.step:,}, whose resume point "
            "would be replaced; continue it with --resume_from_checkpoint hub, or choose another hub_model_id"
        )


def place_on_hub(config: PretrainConfig) -> Place | None:
    """Return what `resume_from_checkpoint` names on the Hub; None if it names something here.

    A folder that exists is never a name on the Hub, and neither is one that is missing in a folder that exists.
    """
    wanted = config.resume_from_checkpoint
    if wanted == HUB:
        return Place(config.hub_repo_id())
    parts = _ON_HUB.fullmatch(wanted or "")
    if wanted is None or parts is None or follow(wanted).exists() or Path(Path(wanted).parts[0]).exists():
        return None
    return Place(*parts.groups())


def resume_from_hub(place: Place, config: PretrainConfig, run: RunFolder) -> Path | None:
    """Return the checkpoint to resume from, downloaded if it is on the Hub; None to start at step 1, only for `hub`.

    If the run is here too, the newer checkpoint wins; without the Hub, that is the one here. Raises UserError if there
    is nothing to resume from, and for another run in the run folder.
    """
    where = f"resume_from_checkpoint={config.resume_from_checkpoint}"
    if place.is_exact and run.holds_run():
        raise UserError(f"output_dir={run.path} already holds a run; choose another output_dir for {where}")
    here, damage = _newest_here(run)
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{where}: HF_HUB_OFFLINE is set, so nothing can be read from the Hub; unset it, or use latest")
    if not sys.stderr.isatty():
        disable_progress_bars()
    token = get_token()
    api = HfApi(token=token)
    try:
        with quiet_hub():
            if (point := retry_hub(partial(find_point, api, place), tries=TRIES)) is None:
                return _nothing_there(place, config, run, here, damage)
            if _is_newer_here(point, here, run, where):
                return here
            return fetch(api, point, config, run)
    except DamagedPoint as error:
        cause, is_fault = str(error), True
    except UserError:
        raise
    except Exception as error:
        cause, is_fault = cause_of(error, place.repo_id, token), is_temporary(error)
    if here is None or place.is_exact or not is_fault:
        raise UserError(f"{where}: {cause}")
    logger.warning("%s: %s; the run continues from %s, the newest checkpoint here", where, cause, here)
    return here


def _newest_here(run: RunFolder) -> tuple[Path | None, UserError | None]:
    """Return the run's newest whole checkpoint, or what is wrong with all of them."""
    try:
        return (find_checkpoint(run, "latest") if run.checkpoints() else None), None
    except UserError as error:
        return None, error


def _nothing_there(
    place: Place, config: PretrainConfig, run: RunFolder, here: Path | None, damage: UserError | None
) -> Path | None:
    """Return what a run resumes from if there is nothing on the Hub: what is here, or nothing."""
    if config.resume_from_checkpoint != HUB:
        known = ", ".join(path.name for path in run.checkpoints()) or "none"
        raise UserError(
            f"resume_from_checkpoint={config.resume_from_checkpoint}: no such folder, and no resume point of that name "
            f"on the Hub (a run puts one there with --hub_strategy checkpoint); checkpoints in {run.path}: {known}"
        )
    if damage:
        raise damage
    start = "continues from its newest checkpoint here" if here else "starts at step 1"
    logger.warning("%s: nothing on the Hub to resume from yet; the run %s", place.repo_id, start)
    return here


def _is_newer_here(point: Point, here: Path | None, run: RunFolder, where: str) -> bool:
    """Return whether the run's checkpoint here is to be used. Raises UserError if the run here is another one."""
    if point.step is None:
        return False
    known = run.run_id() or (read_state(here, "trainer_state")["run_id"] if here else None)
    if run.holds_run() and known not in (None, point.run_id):
        raise UserError(
            f"output_dir={run.path} holds another run than {point} ({where}); choose another output_dir or "
            "hub_model_id, or continue the run here with --resume_from_checkpoint latest"
        )
    step = read_state(here, "trainer_state")["step"] if here else -1
    if step > point.step:
        logger.warning("%s is newer than step %s of %s, and is used", here, f"{point.step:,}", point)
    return step >= point.step
