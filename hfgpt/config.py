"""`PretrainConfig`: every setting of a run, checked all at once. settings/layers.py merges recipe, files and flags."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from hfgpt.errors import UserError
from hfgpt.files import local_path
from hfgpt.messages.formats import shown
from hfgpt.model.configuration_gpt2 import MODEL_SIZES
from hfgpt.settings.batch import Batch, split_stages, split_step
from hfgpt.settings.checks import (
    FRACTION,
    NAME,
    NOT_NEGATIVE,
    OPEN,
    PATH,
    POSITIVE,
    SECONDS,
    SIZE,
    SIZE_OR_NONE,
    WORKERS,
    find_problems,
)
from hfgpt.settings.field_types import AUTO, NO_VALUE, NOT_CONVERTIBLE, convert, describe
from hfgpt.settings.layers import GaveWay, drop_of_another, merge_layers, read_flags, stated_size
from hfgpt.settings.mixture import OF_SOURCE, Mixture, evaluation_texts, read_mixture, with_numbers

Auto = Literal["auto"]
Schedule = Literal["cosine_with_min_lr", "warmup_stable_decay", "linear", "constant", "constant_with_warmup"]
# Settings that can only be checked against the text itself.
OF_THE_TEXT = (
    *("dataset_name", "dataset_split", "dataset_revision", "text_column", "tokens_dtype", "tokens_column"),
    *("eval_dataset", "document_masking"),
)


def _f(default: Any, help: str, must: str | None = None) -> Any:
    return field(default=default, metadata={"help": help, "must": must})


@dataclass(frozen=True)
class PretrainConfig:
    """All settings of a pretraining run, checked when built.

    Raises UserError with every problem found, not only the first.
    """

    output_dir: str = _f("out/run", "run folder: run.json, metrics.jsonl, checkpoints", PATH)
    run_name: str | None = _f(None, "name shown by trackers; default: the folder's name", NAME)
    seed: int = _f(1337, "seed of the initial weights, the order of the text, and dropout", NOT_NEGATIVE)
    model: str | dict[str, Any] = _f(
        AUTO,
        f"size ({', '.join(MODEL_SIZES)}), or GPT2Config fields, optionally based on a size: {{size: ..}}; "
        "auto: the model of init_from, or gpt2-125m",
    )
    init_from: str | None = _f(None, "weights to start from: GPT-2 folder, Hub id[@revision], or nanoGPT ckpt.pt", PATH)
    dataset: str | list[Any] = _f(
        "embedded",
        "Hub id, local file, folder or glob of text or tokens, or embedded; or a list of such sources, mixed: "
        "[{dataset: .., weight: 0.7, max_epochs: 4}, ..]",
        PATH,
    )
    dataset_name: str | None = _f(None, "configuration (subset) of a Hub dataset, such as sample-10BT", NAME)
    dataset_split: str = _f("train", "split of a Hub dataset, or of a folder of save_to_disk", NAME)
    dataset_revision: str | None = _f(None, "commit, tag or branch of a Hub dataset", NAME)
    text_column: str = _f("text", "column that holds the text", NAME)
    tokens_dtype: Literal["uint16", "uint32", "int32"] | None = _f(
        None, "type of the ids in token files that do not state it; default for .bin: uint16"
    )
    tokens_column: str | None = _f(None, "column that holds lists of token ids, such as input_ids", NAME)
    stages: list[Any] | None = _f(
        None, "weights of a mixture that change: [{until_tokens: 9e9}, {weights: [0.2, 0.8]}]; the last to the end"
    )
    on_exhausted: Literal["stop", "renormalise"] = _f(
        "stop", "when a source has had its max_epochs: end the run, or go on with the other sources"
    )
    eval_dataset: str | dict[str, Any] | None = _f(
        None,
        "text for evaluation: a local path, or a split of the Hub dataset; or several by name: {wiki: .., code: ..}; "
        "default: a held-out part of the text, of each source",
        PATH,
    )
    tokenizer: str = _f(
        AUTO,
        "Hub id or folder, char, or bpe-N (trained on the text, N entries); auto: the one of init_from, or gpt2",
        PATH,
    )
    reserved_tokens: str | None = _f(
        None, "special tokens that bpe-N keeps for later, as for chat: '<|user|>,<|assistant|>'; adds a pad token", NAME
    )
    streaming: bool | Auto = _f("auto", "stream documents, or load the text into memory; auto: by size")
    sequence_length: int = _f(1024, "tokens per sequence in training", POSITIVE)
    tokens_per_step: int | list[list[int]] | None = _f(
        None,
        "target tokens per step, over all processes; or stages that grow: [[0, 65536], [1e9, 524288]], each with the "
        "tokens seen from which it holds",
        POSITIVE,
    )
    per_device_train_batch_size: int | Auto = _f(
        8, "micro-batch: sequences per forward pass on one process; auto: the fastest that fits", POSITIVE
    )
    gradient_accumulation_steps: int | None = _f(None, "micro-batches per step; derived from tokens_per_step", POSITIVE)
    per_device_eval_batch_size: int | None = _f(
        None, "sequences per forward pass in evaluation; default: as in training", POSITIVE
    )
    max_steps: int | None = _f(None, "length of the run, in steps", POSITIVE)
    max_tokens: int | None = _f(None, "length of the run, in target tokens", POSITIVE)
    num_train_epochs: float | None = _f(None, "length of the run, in passes over text that is in memory", SIZE)
    learning_rate: float = _f(6e-4, "peak learning rate", SIZE)
    min_learning_rate: float | None = _f(None, "final learning rate; default: a tenth of learning_rate")
    lr_scheduler_type: Schedule = _f("cosine_with_min_lr", "learning rate schedule")
    lr_schedule_on_resume: Literal["keep", "stretch"] = _f(
        "keep", "when a resume changes max_steps: keep the schedule, or stretch the rest of it to the new end"
    )
    warmup_steps: int = _f(0, "steps of linear warm-up", NOT_NEGATIVE)
    embedding_learning_rate: float | None = _f(
        None, "peak learning rate of embeddings and head; default: learning_rate", SIZE
    )
    vector_learning_rate: float | None = _f(
        None, "peak learning rate of biases and norms; default: learning_rate", SIZE
    )
    weight_decay: float = _f(0.1, "weight decay of matrices, and of embeddings and head", SIZE_OR_NONE)
    embedding_weight_decay: float | None = _f(
        None, "weight decay of embeddings and head; default: weight_decay", SIZE_OR_NONE
    )
    vector_weight_decay: float | None = _f(None, "weight decay of biases and norms; default: 0", SIZE_OR_NONE)
    optim: Literal["adamw", "muon"] = _f("adamw", "muon: Muon for the matrices of the blocks, AdamW for the rest")
    muon_learning_rate: float | None = _f(None, "peak learning rate of muon; default: learning_rate", SIZE)
    adam_beta1: float = _f(0.9, "", FRACTION)
    adam_beta2: float = _f(0.95, "", FRACTION)
    adam_epsilon: float = _f(1e-8, "", SIZE)
    ema_decay: float | None = _f(
        None, "average the weights exponentially, such as 0.999; the better of average and weights is saved", OPEN
    )
    average_last: float | None = _f(None, "average the weights of the last part of max_steps evenly, such as 0.2", OPEN)
    max_grad_norm: float = _f(1.0, "clip gradients to this norm; 0: no clipping", SIZE_OR_NONE)
    skip_spikes: float | None = _f(
        None,
        "from step 129 on, skip steps whose loss or gradient norm is this many standard deviations above the mean of "
        "the last 128, such as 10; 0: never",
        SIZE_OR_NONE,
    )
    rollback_margin: float | None = _f(
        None,
        "go back to a checkpoint, and pass over the text since, when the loss stays this much above its lowest mean, "
        "such as 1",
        SIZE,
    )
    rollback_steps: int = _f(50, "steps in a row above rollback_margin; also the steps of a mean", POSITIVE)
    max_rollbacks: int = _f(3, "rollbacks after which the next divergence ends the run", POSITIVE)
    mixed_precision: Literal["auto", "bf16", "fp16", "no"] = _f(
        "auto", "auto: the fastest precision that this device supports"
    )
    torch_compile: bool | Auto = _f(
        "auto", "auto: if there is a compiler and the run is long enough to repay compilation"
    )
    document_masking: bool = _f(
        False, "attend only within a document, and restart positions at each document; GPT-2 does neither"
    )
    gradient_checkpointing: bool = _f(False, "recompute activations in the backward pass: less memory, slower")
    mfu_peak_tflops: float | None = _f(None, "dense peak of one device, for MFU; default: looked up or measured", SIZE)
    logging_steps: int = _f(10, "steps between training records", POSITIVE)
    eval_steps: int = _f(250, "steps between evaluations, also after the last step; 0: never", NOT_NEGATIVE)
    eval_tokens: int | None = _f(None, "target tokens of an evaluation; default: all held-out text", POSITIVE)
    eval_train: bool = _f(False, "also evaluate on the same amount of training text: train_eval_loss")
    metric_for_best_model: str = _f(
        "eval_loss",
        "what the best checkpoint and early stopping go by: the lowest eval_loss, eval_loss/NAME of a named text, or "
        "eval_loss_ema of the average",
        NAME,
    )
    early_stopping_patience: int | None = _f(
        None, "stop after this many evaluations in a row without a better loss", POSITIVE
    )
    sample_steps: int = _f(0, "steps between printed samples; 0: never", NOT_NEGATIVE)
    sample_prompt: str | None = _f(None, "prompt of the samples; default: the start of a document")
    save_steps: int = _f(1000, "steps between checkpoints, also after the last step; 0: only at the end", NOT_NEGATIVE)
    save_best: bool = _f(False, "also save after each evaluation with the best loss so far")
    save_total_limit: int | None = _f(None, "checkpoints to keep; with 2 or more, the best one is among them", POSITIVE)
    max_failed_saves: int = _f(
        3, "end the run after this many failed checkpoints in a row (a full disk, say)", POSITIVE
    )
    resume_from_checkpoint: str | None = _f(
        "never",
        "latest (if there is one), best, checkpoint-N of this run, a checkpoint folder, hub (the newest here or in "
        "hub_model_id), user/name[/checkpoint-N][@revision] on the Hub, or never",
        PATH,
    )
    accept_changed_text: bool = _f(False, "resume even if text, tokenizer, seed or step size changed")
    on_bad_files: Literal["stop", "skip"] = _f(
        "stop", "for a file that cannot be read: end the run, or skip the file and count it"
    )
    stream_timeout: float = _f(900.0, "seconds to retry reading before the run saves and ends", SECONDS)
    dataloader_num_workers: int = _f(1, "processes that read and tokenize streamed text in advance", WORKERS)
    ddp_timeout: float = _f(1800.0, "seconds to wait for an unresponsive process before the run ends", SECONDS)
    report: bool = _f(True, "write report.html, a page with the loss curves, at each save and at the end")
    report_to: str = _f(
        "none",
        "trackers, comma-separated: tensorboard, wandb, trackio, mlflow or another that transformers knows; all: those "
        "installed",
        NAME,
    )
    push_to_hub: bool = _f(False, "upload the model to the Hub, by default after the last step")
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = _f(
        "end",
        "end: push after the last step; every_save: also the model after each save, in the background; checkpoint: and "
        "all that a resume needs, in last-checkpoint/; all_checkpoints: that of each save, in checkpoint-N/",
    )
    hub_model_id: str | None = _f(None, "user/name or name on the Hub; default: the name of output_dir", NAME)
    hub_private_repo: bool | None = _f(None, "create the repository as private; default: the account's setting")
    hub_license: str | None = _f(None, "license for the model card, such as apache-2.0", NAME)
    hub_language: str | None = _f(None, "languages for the model card, comma-separated, such as en", NAME)

    # Keys that the user set (None: all keys), and recipe values that were replaced because they conflicted with them.
    stated: ClassVar[frozenset[str] | None] = None
    gave_way: ClassVar[dict[str, GaveWay]] = {}
    usual: ClassVar[frozenset[str]] = frozenset()  # keys that were "auto", and got the usual value

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        problems, unreadable = [], set()
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            try:
                object.__setattr__(self, spec.name, convert(value, hints[spec.name]))
            except NOT_CONVERTIBLE:
                must = f"={shown(value)}: must be {describe(hints[spec.name])}"
                problems.append(spec.name + (": needs a value" if value in (NO_VALUE, "") else must))
                unreadable.add(spec.name)
                object.__setattr__(self, spec.name, spec.default)  # so that the rest can be checked too
                continue
            if spec.metadata["must"] == PATH and isinstance(path := getattr(self, spec.name), str):
                try:
                    object.__setattr__(self, spec.name, local_path(path))
                except ValueError as error:
                    problems.append(f"{spec.name}={shown(path)}: {error}")
        match self.tokens_per_step:
            case [[0, tokens]]:  # one stage is the whole run
                object.__setattr__(self, "tokens_per_step", tokens)
        for name in ("dataset", "stages"):
            object.__setattr__(self, name, with_numbers(getattr(self, name)))
        if not self.metric_for_best_model.startswith("eval_"):
            object.__setattr__(self, "metric_for_best_model", f"eval_{self.metric_for_best_model}")
        if self.tokenizer == AUTO and self.source_tokenizers:  # token files have one already
            object.__setattr__(self, "tokenizer", self.source_tokenizers[0])
        for name, usual in (("model", "gpt2-125m"), ("tokenizer", "gpt2")):
            if getattr(self, name) == AUTO and self.init_from is None:
                object.__setattr__(self, name, usual)
                object.__setattr__(self, "usual", self.usual | {name})
        if problems := problems + find_problems(self, unreadable):
            raise UserError(*problems)

    @classmethod
    def from_cli(
        cls,
        defaults: dict[str, Any] | None = None,
        argv: list[str] | None = None,
        for_model: dict[str, dict[str, Any]] | None = None,
    ) -> PretrainConfig:
        """Read the settings: `--key value` over `--config file.yaml` over the recipe's `defaults`.

        defaults: settings of the recipe. One that conflicts with a file or flag is replaced, and listed in `gave_way`.
        argv: the command line; default `sys.argv`. If a flag is repeated, the last one counts, with a warning.
        for_model: more defaults, by the name of the model size that they apply to.
        """
        recipe = dict(defaults or {})
        layers = read_flags(cls, recipe, argv)
        dropped = drop_of_another(cls, recipe, layers)
        size = stated_size([recipe, *layers])
        config = cls.from_layers(*layers, recipe=(recipe, (for_model or {}).get(size, {})))
        config.gave_way.update(dropped)
        return config

    @classmethod
    def from_layers(cls, *layers: dict[str, Any], recipe: Sequence[dict[str, Any]] | None = None) -> PretrainConfig:
        """Merge `layers`, later ones winning, and convert each value to its field's type.

        recipe: lower layers, whose values are replaced where they conflict with `layers`.
        """
        merged = merge_layers(cls, list(layers), list(recipe or ()))
        problems = merged.problems
        try:
            config = cls(**merged.values)
        except UserError as error:
            problems += error.problems
        if problems:
            raise UserError(*problems)
        if recipe is not None:
            object.__setattr__(config, "stated", merged.stated)
            object.__setattr__(config, "gave_way", merged.gave_way)
        return config

    def is_stated(self, key: str) -> bool:
        """Return whether the user set this key, rather than the recipe or the library."""
        return key not in self.usual and (self.stated is None or key in self.stated)

    def without(self, error: UserError) -> PretrainConfig:
        """Replace the recipe's value that `error` names with the library's default; raise `error` if it names none."""
        key = re.split(r"\W", str(error), maxsplit=1)[0]
        if key not in OF_THE_TEXT or self.is_stated(key):
            raise error
        recipe, default = getattr(self, key), self.__dataclass_fields__[key].default
        if recipe == default:
            raise error
        new = self.with_facts(**{key: default})
        new.gave_way[key] = GaveWay(recipe, default)
        return new

    def with_facts(self, **facts: Any) -> PretrainConfig:
        """Add `facts` as if the user had set them, replacing recipe values that conflict with them."""
        usual = self.usual - facts.keys()
        if self.stated is None:
            new = dataclasses.replace(self, **facts)
            object.__setattr__(new, "usual", usual)
            return new
        values = self.to_dict()
        stated = {key: values[key] for key in self.stated if key in values} | facts
        new = self.from_layers(stated, recipe=[{key: value for key, value in values.items() if key not in stated}])
        object.__setattr__(new, "gave_way", {**self.gave_way, **new.gave_way})
        object.__setattr__(new, "stated", self.stated)
        object.__setattr__(new, "usual", usual)
        return new

    @classmethod
    def of_run(cls, settings: dict[str, Any]) -> PretrainConfig:
        """Read a run's recorded settings, except how its steps are split, which depends on the number of processes."""
        unsplit = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": None, "tokens_per_step": None}
        return cls.from_layers(settings, unsplit)

    @functools.cached_property
    def mixture(self) -> Mixture | None:
        """The sources of a mixture and its stages; None if `dataset` is the name of one text."""
        known = [spec.name for spec in dataclasses.fields(self)]
        return None if isinstance(self.dataset, str) else read_mixture(self.dataset, self.stages, known)

    @property
    def reserved(self) -> tuple[str, ...]:
        """The names in `reserved_tokens`."""
        return tuple(name.strip() for name in (self.reserved_tokens or "").split(",") if self.reserved_tokens)

    @property
    def source_tokenizers(self) -> list[str]:
        """The different tokenizers that sources of a mixture name."""
        given = [source.settings.get("tokenizer") for source in (self.mixture.sources if self.mixture else [])]
        return list(dict.fromkeys(name.removeprefix("openai-community/") for name in given if name))

    @property
    def evaluation_texts(self) -> dict[str, dict[str, Any]]:
        """The settings of each named evaluation text; empty if `eval_dataset` is not a mapping."""
        return self.checked_evaluation_texts[0]

    @functools.cached_property
    def checked_evaluation_texts(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        known = [spec.name for spec in dataclasses.fields(self)]
        return evaluation_texts(self.eval_dataset, known) if isinstance(self.eval_dataset, dict) else ({}, [])

    def of_text(self, settings: dict[str, Any]) -> PretrainConfig:
        """Return the settings for one text alone: a source of a mixture, or a named evaluation text."""
        defaults = {key: spec.default for key, spec in self.__dataclass_fields__.items() if key in OF_SOURCE}
        # A mixture reads the evaluation text itself, once for all sources.
        eval_dataset = None if self.eval_dataset is None else {"text": "embedded"}
        single = {"stages": None, "eval_dataset": eval_dataset, "metric_for_best_model": "eval_loss"}
        return dataclasses.replace(self, **{**defaults, **single, **settings, "tokenizer": self.tokenizer})

    def batch(self, processes: int) -> Batch:
        """Split one step over `processes`, with micro-batches of one block if the micro-batch is "auto".

        If steps grow in stages, the `Batch` is that of their greatest common divisor. Raises UserError, with a list of
        sizes that fit, if a step cannot be split evenly.
        """
        micro_batch = 1 if isinstance(self.per_device_train_batch_size, str) else self.per_device_train_batch_size
        how = micro_batch, self.sequence_length, self.gradient_accumulation_steps, processes
        if isinstance(self.tokens_per_step, list):
            return split_stages(self.tokens_per_step, *how)
        return split_step(self.tokens_per_step, *how)

    def end_learning_rate(self) -> float:
        """Return the learning rate after the decay."""
        return 0.1 * self.learning_rate if self.min_learning_rate is None else self.min_learning_rate

    @property
    def pushes_saves(self) -> bool:
        """Return whether each save is pushed to the Hub, in the background."""
        return self.push_to_hub and self.hub_strategy != "end"

    def hub_repo_id(self) -> str:
        """Return the repository to push to: user/name, or only a name, which is under the account of the token."""
        return self.hub_model_id or Path(self.output_dir).name

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
