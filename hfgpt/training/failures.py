"""Save and report what is needed when a run fails."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hfgpt.distributed.compiler import explain_compiler_error
from hfgpt.distributed.stop_signals import Interrupted
from hfgpt.errors import RunError, UserError, first_line
from hfgpt.hub.resume_from_hub import HUB
from hfgpt.training.run import TrainingRun
from hfgpt.training.saving import finish_pushes, record_lost_output, record_saved, start_save, write_report


@contextmanager
def saved_on_failure(run: TrainingRun) -> Iterator[None]:
    """If an exception is raised inside, save the last finished step and record the end of the run.

    Errors that the user can act on become a RunError that says how to continue. Other exceptions are re-raised with
    attributes for `run_recipe`: `end_of_run` (the same sentence) and `traceback_file`.
    """
    try:
        yield
    except (Exception, SystemExit, Interrupted) as error:
        if run.has_ended or not run.has_started:
            raise
        saver = run.saver
        has_given_up = run.non_finite.has_given_up or saver.failures >= saver.max_failures
        lost = [] if has_given_up else _save_alone(run)
        fault: BaseException = error
        if isinstance(error, Interrupted):
            fault = run.signals.to_error() or RunError("the main process was stopped", 128 + signal.SIGTERM)
        cause = str(fault) if fault is not error else f"{type(error).__name__}: {error}"
        run.record(event="end", skipped_rows=dict(run.progress.skipped_rows), fault=cause)
        write_report(run)
        if has_given_up or isinstance(error, SystemExit):
            raise
        everywhere = getattr(error, "everywhere", False)
        end = [] if everywhere else [f"ended after step {run.progress.step}"]
        end += [*lost, how_to_continue(run)]
        if broken := explain_compiler_error(error) if isinstance(error, Exception) else None:
            fault = RunError(broken)
        if isinstance(fault, UserError | RunError):
            problems = getattr(fault, "problems", [str(fault)])
            raise RunError("; ".join([*problems, *end]), getattr(fault, "exit_code", 1), everywhere) from error
        if file := run.folder.keep_traceback(error, run.machine.ranks.rank):
            end.append(f"traceback in {file}")
        vars(error).update(end_of_run="; ".join(end), traceback_file=file)
        raise


def _save_alone(run: TrainingRun) -> list[str]:
    """Save the last finished step from the main process alone, without callbacks. Returns the reason if that fails."""
    step = run.progress.step
    if not run.is_main or step == 0:
        return []
    try:
        record_saved(run, run.saver.collect(wait=True))
        logs = run.non_finite.read(alone=True)
        if run.non_finite.diverged:
            return [f"step {step} is not saved, because the run has diverged"]
        if logs and run.callbacks.control.should_log:
            run.callbacks.mfu.on_log(run.callbacks.args, run.callbacks.state, run.callbacks.control, logs)
            run.record(**logs)
        record_lost_output(run)
        if step == run.saver.saved_step and not run.saver.failures:
            return []
        if run.step.is_updating:
            return [f"step {step} is not saved, because the next step had already begun to change the model"]
        if run.machine.is_sharded:
            return [f"step {step} is not saved, because under FSDP2 all processes are needed to save it"]
        start_save(run, after_failure=True)
        outcome = run.saver.collect(wait=True)
        record_saved(run, outcome)
    except Exception as error:
        outcome = error
    finally:
        with suppress(Exception):  # the error that ends the run is reported
            finish_pushes(run, is_stopped=True)
    return [f"step {step} is not saved ({first_line(outcome)})"] if isinstance(outcome, Exception) else []


def how_to_continue(run: TrainingRun) -> str:
    """Return a hint on how to continue the run, for the end of an error message."""
    # On other machines the folder of the main process may not be visible.
    saved_elsewhere = run.saver.saved_step is not None and not run.is_main
    if run.folder.checkpoints() or saved_elsewhere:
        return f"continue with --resume_from_checkpoint {HUB if run.config.resume_from_checkpoint == HUB else 'latest'}"
    return "no checkpoint has been written"
