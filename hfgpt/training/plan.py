"""`Plan`: what a run will do, printed before the first step and kept in run.json."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config

from hfgpt import __version__
from hfgpt.config import PretrainConfig
from hfgpt.distributed import cpu
from hfgpt.distributed.compiler import CompileChoice
from hfgpt.distributed.device import Precision
from hfgpt.errors import UserError
from hfgpt.messages.formats import about, counted, rounded
from hfgpt.model.configuration_gpt2 import model_fields
from hfgpt.model.flops import TYPICAL_MFU, parameter_counts, training_flops_per_token
from hfgpt.model.memory import Setting, training_memory
from hfgpt.settings.batch import Batch, largest_step, splits_of_stages
from hfgpt.settings.step_sizes import StepSizes
from hfgpt.training.divergence import describe_guards
from hfgpt.training.parameter_groups import describe_groups, group_settings

BUSY_SHARE = 0.25  # of a CPU that other programs use, from which on the plan mentions it


LIBRARIES_GIB = 0.5  # of Python, torch and the other libraries; measured on Linux


def setting_of(
    config: PretrainConfig, batch: Batch, precision: str, shares: int, device_type: str, compiled: bool = False
) -> Setting:
    """Return the inputs for the memory estimate of one process."""
    return Setting(
        micro_batch=batch.micro_batch,
        sequence_length=batch.sequence_length,
        accumulation=largest_step(config, batch).accumulation,
        precision=precision,
        compiled=compiled,
        checkpointing=config.gradient_checkpointing,
        optim=config.optim,
        averaged=config.ema_decay is not None or config.average_last is not None,
        processes=batch.processes,
        sharded=shares > 1,
        document_masking=config.document_masking,
        device=device_type,
    )


def check_memory(config: PretrainConfig, batch: Batch, setting: Setting, available_bytes: int | None) -> None:
    """Raise UserError if the sizes far exceed the device's memory. The still unknown vocabulary counts as zero."""
    model = GPT2Config(**{**model_fields(config.model), "vocab_size": 2, "bos_token_id": None, "eos_token_id": None})
    needed = training_memory(model, setting).peak
    batch = largest_step(config, batch)
    needed += 12 * batch.tokens_per_step // batch.processes  # token ids of one step
    if available_bytes and needed > 2 * available_bytes:
        raise UserError(
            f"per_device_train_batch_size={batch.micro_batch} x sequence_length={batch.sequence_length} x accumulation "
            f"{batch.accumulation} with this model needs about {needed / 2**30:,.0f} GiB, but the device has "
            f"{available_bytes / 2**30:,.0f}; use a smaller model, sequence_length, micro-batch or tokens_per_step"
        )


@dataclass(frozen=True)
class Plan:
    """Everything decided before the first step. `lines` is printed, `to_dict` goes to run.json."""

    config: PretrainConfig
    model: GPT2Config
    batch: Batch
    sizes: StepSizes
    max_steps: int
    precision: Precision
    compile: CompileChoice
    device: str
    text: list[str]
    checkpoint_folder: str
    setting: Setting
    peak_tflops: float | None  # dense peak of one device
    resumed: str | None = None  # the checkpoint from which the run continues
    average: str = ""  # of the weights

    def lines(self) -> list[str]:
        model, batch, config = self.model, self.batch, self.config
        counts = parameter_counts(model)
        name = config.model if isinstance(config.model, str) else "custom"
        memory, shares = training_memory(model, self.setting).peak, self.setting.shares
        sharing = f", parameters sharded over {shares} processes" if shares > 1 else ""
        every = f"every {config.save_steps} steps and " if config.save_steps else ""
        rows = [
            (
                "model",
                f"{name}: {counted(model.n_layer, 'layer')}, {counted(model.n_head, 'head')}, {model.n_embd} wide; "
                f"{counts.total:,} parameters ({counts.without_positions:,} without positions)",
            ),
            *([("time", self._time())] if self.peak_tflops else []),
            *([("resume", self.resumed)] if self.resumed else []),
            *([("weights", f"start from {config.init_from}")] if config.init_from else []),
            *(("changed", f"{key}: {change}") for key, change in config.gave_way.items()),
            *(("text", line) for line in self.text),
            *(("step", f"{steps}{batch.of(blocks).describe()}") for steps, blocks in self._stages()),
            ("run", f"{counted(self.max_steps, 'step')}, {self.max_tokens:,} tokens{self._not_begun()}"),
            (
                "rate",
                f"{config.lr_scheduler_type}: {config.warmup_steps} warm-up steps to {config.learning_rate:g}"
                + (", by tokens, because steps grow" if isinstance(config.tokens_per_step, list) else "")
                + ("; the run ends during warm-up" if config.warmup_steps > self.max_steps else ""),
            ),
            *([("groups", groups)] if (groups := describe_groups(config)) else []),
            *([("average", self.average)] if self.average else []),
            *([("guards", guards)] if (guards := describe_guards(config, self.max_steps)) else []),
            ("device", f"{self.device}; {self.precision.label} ({self.precision.reason})"),
            ("compile", f"{'on' if self.compile.enabled else 'off'} ({self.compile.reason})"),
            ("memory", f"about {rounded(memory / 2**30, 2)} GiB expected{sharing}{self._besides()}"),
            ("saves", f"{every}at the end, to {self.checkpoint_folder}"),
            *([("push", self._push())] if config.push_to_hub else []),
        ]
        is_alone = self.batch.processes == 1  # others would count as other programs
        if self.setting.device == "cpu" and is_alone and (share := cpu.busy_share()) > BUSY_SHARE:
            fix = "expect a slower run, and start it with OMP_WAIT_POLICY=PASSIVE if that lasts"
            rows.append(("note", f"other programs are using {share:.0%} of this CPU; {fix}"))
        return [f"{key:<8} {value}" for key, value in rows]

    @property
    def max_tokens(self) -> int:
        return self.sizes.tokens_after(self.max_steps)

    def _stages(self) -> list[tuple[str, int]]:
        """Return the steps of each stage in words, and their blocks; no words if all steps have the same."""
        stages = self.sizes.stages_before(self.max_steps)
        if len(stages) == 1:
            return [("", stages[0][2])]
        return [
            (f"step {last:,}: " if last == first + 1 else f"steps {first + 1:,} to {last:,}: ", blocks)
            for first, last, blocks in stages
        ]

    def _not_begun(self) -> str:
        """Return a note on stages of `tokens_per_step` that have no step."""
        stated, planned = self.config.tokens_per_step, len(self.sizes.stages)
        notes = []
        if isinstance(stated, list) and len(stated) > planned and not self.resumed:
            notes.append("; a stage of tokens_per_step is left out, as the next one begins within one step")
        if len(self.sizes.stages_before(self.max_steps)) < planned:
            notes.append("; it ends before the last stage of tokens_per_step begins")
        return "".join(notes)

    def _besides(self) -> str:
        """Return what the memory of a step does not count: on a CPU, steps report the memory of the whole process."""
        return f" for tensors, and about {LIBRARIES_GIB} GiB for the program" if self.setting.device == "cpu" else ""

    def _push(self) -> str:
        what = {
            "end": "after the last step",
            "every_save": "the model after each save",
            "checkpoint": "the model after each save, with all that a resume needs in last-checkpoint/",
            "all_checkpoints": "the model after each save, with all that a resume needs in checkpoint-N/",
        }
        return f"{what[self.config.hub_strategy]}, to {self.config.hub_repo_id()} on the Hub"

    def _time(self) -> str:
        """Estimate the seconds of the whole run from its FLOPs."""
        flops = training_flops_per_token(self.model, self.batch.sequence_length)
        rate = TYPICAL_MFU * self.batch.processes * (self.peak_tflops or 0) * 1e12 / flops
        seconds = self.max_tokens / rate
        where = "this CPU" if self.setting.device == "cpu" else "this GPU"
        where = f"{self.batch.processes} processes" if self.batch.processes > 1 else where
        return f"{about(seconds)} of training on {where}, at an MFU of {TYPICAL_MFU:.0%}"

    def choices(self) -> dict[str, Any]:
        """Return choices that depend on the machine and may change the last bits of a result."""
        found = {
            "precision": self.precision.name,
            "compiled": self.compile.enabled,
            "processes": self.batch.processes,
            "device": self.device,
        }
        if self.setting.device == "cpu":  # the number of threads changes the order of summation
            found["threads"] = torch.get_num_threads()
        return found

    def to_dict(self) -> dict[str, Any]:
        stages = splits_of_stages(self.batch, self.sizes, self.max_steps)
        same = {key: stages[0][key] for key in ("tokens_per_step", "accumulation")}
        return {
            **asdict(self.batch),
            **({**dict.fromkeys(same), "stages": stages} if len(stages) > 1 else same),  # no number is right for all
            "max_steps": self.max_steps,
            "max_tokens": self.max_tokens,
            "average": self.average or None,
            "parameter_groups": {name: group._asdict() for name, group in group_settings(self.config).items()},
            "precision": asdict(self.precision),
            "torch_compile": asdict(self.compile),
            "text": self.text,
        }


def run_facts(run_id: str, plan: Plan, data: dict[str, Any]) -> dict[str, Any]:
    """Return the content of run.json. `data`: fingerprint of the training text."""
    packages = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")
    counts = parameter_counts(plan.model)
    return {
        "run_id": run_id,
        "config": plan.config.to_dict(),
        "gave_way": {key: values._asdict() for key, values in plan.config.gave_way.items()},
        "model": {
            **plan.model.to_dict(),
            "parameters": counts.total,
            "parameters_without_positions": counts.without_positions,
        },
        "plan": plan.to_dict(),
        "versions": {
            "hfgpt": __version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "device": plan.device,
        "git_revision": _git_revision(Path(sys.argv[0]).resolve().parent),
        "data": data,
        "started": time.time(),
    }


def _git_revision(folder: Path) -> str | None:
    """Return the current commit of the git repository that contains `folder`, if any."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
