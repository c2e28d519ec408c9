"""The model card of a checkpoint: Hub metadata and the facts of the run, put into `model_card.md.jinja`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hfgpt.checkpointing.read_training_state import evaluation_of_model
from hfgpt.hub.describe_text import describe_record, describe_sources, describe_text
from hfgpt.messages.formats import counted
from hfgpt.settings.step_sizes import stages_in_words

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
# Fields of metrics.jsonl that are published: numbers, never text or paths.
PUBLIC = (
    *("step", "num_input_tokens_seen", "wall_seconds", "loss", "learning_rate", "grad_norm", "tokens_per_second"),
    *("mfu", "peak_tflops", "peak_source", "eval_loss", "eval_perplexity", "eval_bits_per_byte", "eval_tokens"),
    *("eval_loss_ema", "muon_learning_rate", "embedding_learning_rate", "vector_learning_rate"),
)
HYPERPARAMETERS = (
    *("learning_rate", "min_learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "muon_learning_rate"),
    *("embedding_learning_rate", "vector_learning_rate", "embedding_weight_decay", "vector_weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "ema_decay", "average_last", "max_grad_norm"),
    *("sequence_length", "document_masking", "seed"),
)
PLOT = "loss.png"
# Metric type on the Hub and display name, by key of an evaluation record.
TEXT = {"loss": ("loss", "loss"), "perplexity": ("perplexity", "perplexity")}
TEXT |= {"bits_per_byte": ("bits_per_byte", "bits per byte")}
_FORMATS = {"loss": "loss {:.4f} nats per token", "perplexity": "perplexity {:.2f}"}
_FORMATS["bits_per_byte"] = "{:.4f} bits per byte"
HELD_OUT = {f"eval_{key}": (kind, f"{name} of held-out text") for key, (kind, name) in TEXT.items()}
HELLASWAG = {"accuracy_norm": ("acc_norm", "accuracy by loss per token"), "accuracy": ("acc", "accuracy by loss")}
# How `init_from` records a Hub model: with its commit. Anything else is a path, which is not published.
HUB_MODEL = re.compile(r"([\w.-]+(?:/[\w.-]+)?)@[0-9a-f]{40}")


def model_card(
    run: dict[str, Any],
    fingerprint: dict[str, Any],
    trainer: dict[str, Any],
    records: Sequence[dict[str, Any]] = (),
    name: str | None = None,
    later: Sequence[dict[str, Any]] = (),
    tokenizer: Any = None,
) -> str:
    """Return the README.md of a checkpoint; unknown facts are left out.

    run: content of run.json, or empty. fingerprint: of the text, from data_state.json. trainer: trainer_state.json.
    records: `public_records` of the run; with them the card shows the speed, and the loss curve in PLOT. name: of the
    model, by default the run's. later: records of later evaluations of this checkpoint.
    """
    config, model, step = trainer["config"], run.get("model"), trainer["step"]
    text, commit = describe_text(config, fingerprint), fingerprint.get("dataset.commit")
    name = name or config["run_name"] or Path(config["output_dir"]).name or "GPT-2-style model"
    results, evaluation = [], evaluation_of_model(trainer)
    if evaluation and trainer["evaluation_step"] == step:
        dataset = {**config, "dataset_revision": commit} if commit else {"dataset": text}
        results = _eval_results({**dataset, "task": "text", **evaluation}, HELD_OUT)
    for record in later:
        results += _eval_results(record, TEXT if record["task"] == "text" else HELLASWAG)
    sources = describe_sources(config, fingerprint, trainer.get("sources"))
    of_mixture = [source.hub for source in sources if source.hub]
    data = _metadata(config, name, results, [config["dataset"]] if commit else of_mixture)
    shape = ""
    if model:
        shape = f" with {model['n_layer']} layers, {model['n_head']} heads, width {model['n_embd']}"
        shape += f" and {model['parameters']:,} parameters"
    tokens = f"{trainer['num_input_tokens_seen']:,}"
    return _render(
        data,
        name,
        tokenizer,
        summary=f"A GPT-2-style language model{shape}, pretrained with hfgpt on {tokens} tokens.",
        evaluation=evaluation,
        averaging=_describe_average(trainer),
        evaluated="average" if (trainer["average"] or {}).get("is_model") else "weights",
        evaluation_step=trainer["evaluation_step"],
        step=step,
        named_results=_named_results(evaluation, trainer["evaluation_step"], step),
        later_results=[_result_row(record) for record in later],
        loss_plot=PLOT if records else None,
        training=[
            ("text", text),
            *((f"source {source.name}", source.text) for source in sources),
            *_ready_tokens(fingerprint),
            *_training_rows(config, fingerprint, trainer, run),
            *_speed_rows(records),
        ],
        hyperparameters=[
            (key.replace("_", " "), config[key]) for key in HYPERPARAMETERS if config.get(key) is not None
        ],
        sequence_length=config["sequence_length"],
    )


def _describe_average(trainer: dict[str, Any]) -> str:
    """Say which of weights and average the model is, and the loss of both where it was measured; empty without one."""
    if not (average := trainer["average"]):
        return ""
    if not average["steps"]:
        begins = f"{average['first_step']:,}"
        return f"The model has the newest weights. Their average, which begins with step {begins}, has no step yet."
    record, steps = trainer["evaluation"] or {}, counted(average["steps"], "step")
    which = "has the newest weights, not an average of those of"
    which = f"The model {'is an average of the weights of' if average['is_model'] else which} {steps}."
    if "eval_loss_ema" not in record:
        return f"{which} The average was not evaluated."
    losses = f"{record['eval_loss_ema']:.4f} of the average, {record['eval_loss']:.4f} of the newest weights"
    return f"{which} Loss at step {trainer['evaluation_step']:,}: {losses}."


def _metadata(config: dict[str, Any], name: str, results: list[Any], datasets: list[str]) -> ModelCardData:
    base = HUB_MODEL.fullmatch(config.get("init_from") or "")
    return ModelCardData(
        license=config.get("hub_license"),
        language=split_languages(config.get("hub_language")),
        datasets=datasets or None,
        base_model=base[1] if base else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gpt2", "hfgpt", "pretraining"],
        model_name=name,
        eval_results=results or None,
    )


def plain_card(name: str, parameters: int, origin: str, tokenizer: Any = None) -> str:
    """Return the README.md of a model that is not from a run, with its `origin`, such as "exported from X."."""
    data = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=["gpt2"])
    summary = f"A GPT-2-style language model of {parameters / 1e6:,.1f} M parameters, {origin}"
    return _render(data, name, tokenizer, summary=summary)


def _render(data: ModelCardData, name: str, tokenizer: Any, **facts: Any) -> str:
    line_end_id = None
    if tokenizer is not None and not tokenizer.all_special_ids:
        vocabulary = tokenizer.get_vocab()
        if all(len(token) == 1 for token in vocabulary):  # one token per character
            line_end_id = vocabulary.get("\n", 0)
    facts |= {"name": name, "line_end_id": line_end_id}
    return f"{ModelCard.from_template(data, template_path=str(TEMPLATE), **facts)}\n"


def address_card(card: str, repo_id: str, revision: str | None) -> str:
    """Adapt one of our cards to a repository: with its name, and code that loads the model from there."""
    if 'from_pretrained(".")' not in card:
        return card
    where = f'"{repo_id}"' + (f', revision="{revision}"' if revision else "")
    card = re.sub(r"(?m)^# .*$", f"# {repo_id}", card, count=1)
    return card.replace("# this folder, or its name on the Hub\n", "").replace(
        'pretrained(".")', f"pretrained({where})"
    )


def export_card(card: str, dtype: str, parameters: int) -> str:
    """Adapt the card of a checkpoint to its export. The results were measured before the conversion."""
    parts = ModelCard(card)
    data: Any = parts.data
    note = f"This is an export of the checkpoint: {parameters:,} parameters in {dtype}."
    if dtype != "float32":
        data.eval_results = None
        note += " The results below were measured before this conversion."
    return re.sub(r"(?m)^(# .*)$", lambda title: f"{title[1]}\n\n{note}", str(parts), count=1)


def plot_losses(records: Sequence[dict[str, Any]]) -> bytes:
    """Plot the loss curves of `public_records` as a PNG; the same records give the same bytes."""
    # These import pandas, which takes half a second of each start.
    from hfgpt.comparing.plots import build_plots
    from hfgpt.comparing.png import draw
    from hfgpt.comparing.runs import PastRun

    run = PastRun("loss", "", "run folder")
    run.training = [record for record in records if "loss" in record]
    run.evaluations = [record for record in records if "eval_loss" in record]
    return draw(build_plots([run])[0])


def public_records(records: Iterable[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """Return the training and evaluation records up to a step, with only the fields that may be published."""
    kept = [r for r in records if r.get("loss") is not None or r.get("eval_loss") is not None]
    return [{key: record[key] for key in PUBLIC if key in record} for record in kept if record["step"] <= step]


def split_languages(names: str | None) -> list[str] | None:
    return [name.strip() for name in names.split(",")] if names else None


def _named_results(evaluation: dict[str, Any] | None, at: int, step: int) -> list[tuple[str, str]]:
    """Return a row for each named text of an evaluation record, made at step `at`."""
    names = [key.partition("/")[2] for key in evaluation or {} if key.startswith("eval_loss/")]
    rows = []
    for name in names:
        values = {key: (evaluation or {}).get(f"eval_{key}/{name}") for key in TEXT}
        shown = [_FORMATS[key].format(value) for key, value in values.items() if value is not None]
        rows.append((f"held-out text {name}" + (f", at step {at:,}" if at != step else ""), ", ".join(shown)))
    return rows


def _eval_results(record: dict[str, Any], metrics: dict[str, tuple[str, str]]) -> list[EvalResult]:
    """Return the Hub metadata for an evaluation record, with each of `metrics` that it has."""
    is_text, on_hub, name = record["task"] == "text", record.get("dataset_revision"), describe_record(record)
    dataset = {
        "dataset_type": record["dataset"] if on_hub else record["task"],
        "dataset_name": name if is_text else f"HellaSwag ({name})",
        # The Hub distinguishes datasets by type, configuration, split and revision, but not by name.
        "dataset_config": record.get("dataset_name") if on_hub else name,
        "dataset_split": record.get("dataset_split"),
        "dataset_revision": on_hub,
        "dataset_args": None if is_text else {"examples": record.get("examples")},
    }
    shared: dict[str, Any] = {"task_type": "text-generation", **dataset}
    return [
        EvalResult(metric_type=kind, metric_name=metric, metric_value=record[key], **shared)
        for key, (kind, metric) in metrics.items()
        if record.get(key) is not None
    ]


def _result_row(record: dict[str, Any]) -> tuple[str, str]:
    """Return the row for an evaluation record in the table of results."""
    if record["task"] == "text":
        values = [text.format(record[key]) for key, text in _FORMATS.items() if record.get(key) is not None]
        return "text", f"{describe_record(record)}, {record['scored_tokens']:,} tokens: {', '.join(values)}"
    values = []
    for key, (_, name) in HELLASWAG.items():
        error = record.get(f"{key}_stderr")
        values.append(f"{name} {record[key]:.2%}" + (f" (standard error {error:.2%})" if error is not None else ""))
    return "HellaSwag", f"{describe_record(record)}, {record['examples']:,} examples: {', '.join(values)}"


def _ready_tokens(fingerprint: dict[str, Any]) -> list[tuple[str, str]]:
    ready = fingerprint.get("dataset.tokens")
    return [("tokenized", f"before the run: token ids were read ({ready})")] if ready else []


def _training_rows(
    config: dict[str, Any], fingerprint: dict[str, Any], trainer: dict[str, Any], run: dict[str, Any]
) -> list[tuple[str, str]]:
    """Return the rows of the training table: held-out text, initial weights, sizes, hardware, and versions."""
    held_out = str(fingerprint["held_out"]).removeprefix("held out: ")
    if isinstance(config["eval_dataset"], dict):
        held_out = f"eval_dataset {', '.join(map(str, config['eval_dataset']))}"
    elif config["eval_dataset"] is not None:
        held_out = f"eval_dataset {Path(config['eval_dataset']).name}"
    base, tokenizer = config.get("init_from"), config["tokenizer"]
    weights = "random" if not base else f"those of {base if HUB_MODEL.fullmatch(base) else Path(base).name}"
    if tokenizer == "auto":
        tokenizer = "that of the initial weights"
    rows = [
        ("held out", held_out),
        ("initial weights", weights),
        ("tokens", f"{trainer['num_input_tokens_seen']:,} in {trainer['step']:,} steps"),
        ("tokenizer", Path(tokenizer).name if Path(tokenizer).is_absolute() else tokenizer),
    ]
    stages = config["tokens_per_step"]
    if plan := run.get("plan"):
        rows += [
            (
                "tokens per step",
                stages_in_words(stages if isinstance(stages, list) else plan["tokens_per_step"] or stages),
            ),
            ("precision", {"no": "float32"}.get(plan["precision"]["name"], plan["precision"]["name"])),
            ("hardware", run["device"] + (f", {plan['processes']} processes" if plan["processes"] > 1 else "")),
        ]
    rows.append(("seconds of training", f"{trainer['wall_seconds']:,.1f}"))
    if versions := run.get("versions"):
        rows.append(("versions", ", ".join(f"{package} {number}" for package, number in versions.items())))
    return rows


def _speed_rows(records: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return median throughput and MFU over the records with the same peak as the last one."""
    timed = [record for record in records if record.get("tokens_per_second")]
    if not timed:
        return []
    peak, source = timed[-1]["peak_tflops"], timed[-1]["peak_source"]
    timed = [record for record in timed if record["peak_source"] == source]
    rate = statistics.median(record["tokens_per_second"] for record in timed)
    rows = [("tokens per second", f"{rate:,.0f} (median of {len(timed)} records)")]
    if mfus := [record["mfu"] for record in timed if record.get("mfu") is not None]:
        rows.append(("MFU", f"{100 * statistics.median(mfus):.3g} % of {peak:.4g} TFLOP/s per device ({source})"))
    return rows
