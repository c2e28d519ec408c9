"""The model card of a checkpoint: Hub metadata, and what a reader must know, from facts of the run alone."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

# What others may know of a run's records: figures, never text or paths.
PUBLIC = (
    *("step", "num_input_tokens_seen", "wall_seconds", "loss", "learning_rate", "grad_norm", "tokens_per_second"),
    *("mfu", "peak_tflops", "peak_source", "eval_loss", "eval_perplexity", "eval_bits_per_byte", "eval_tokens"),
)
HYPERPARAMETERS = (
    *("learning_rate", "min_learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "muon_learning_rate"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "sequence_length"),
    *("document_masking", "seed"),
)
PLOT = "loss.png"
# Figures of a text, and of HellaSwag by type and name, as the Hub's metadata have them.
TEXT = ("loss", "perplexity", "bits_per_byte")
HELLASWAG = {"accuracy_norm": ("acc_norm", "accuracy by loss per token"), "accuracy": ("acc", "accuracy by loss")}
# How a model of the Hub is recorded that a run began from; anything else is a path, of which only the end is told.
HUB_MODEL = re.compile(r"([\w.-]+(?:/[\w.-]+)?)@[0-9a-f]{40}")


HERE = "# this folder, or its name on the Hub\n"
USAGE = (
    "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
    f'{HERE}model = AutoModelForCausalLM.from_pretrained(".")\ntokenizer = AutoTokenizer.from_pretrained(".")\n```\n\n'
    "Prompt and continuation together have at most `model.config.n_positions` tokens: give `max_new_tokens`, for which "
    '`pipeline("text-generation")` otherwise takes 256.'
)
CHARACTERS = """## Tokenizer

One token for each character, and no special tokens. Stock transformers leaves out characters that it does not know,
without a warning: check that `set(text) <= tokenizer.get_vocab().keys()`. For prompts of different lengths:

```python
tokenizer.pad_token = "\\n"  # is special from now on: skip_special_tokens would drop line ends
inputs = tokenizer(prompts, padding=True, return_tensors="pt")
new = model.generate(**inputs, max_new_tokens=20)[:, inputs["input_ids"].shape[1] :]
texts = tokenizer.batch_decode(new)
```

lm-evaluation-harness needs the id of the line end: `--model_args pretrained=FOLDER,prefix_token_id=0`."""


def _characters(tokenizer: Any) -> list[str]:
    """The section on a tokenizer of characters, if it is one."""
    if tokenizer is None or tokenizer.all_special_ids or any(len(token) > 1 for token in tokenizer.get_vocab()):
        return []
    line_end = tokenizer.get_vocab().get("\n", 0)
    return [CHARACTERS.replace("prefix_token_id=0", f"prefix_token_id={line_end}")]


def model_card(
    run: dict[str, Any],
    fingerprint: dict[str, Any],
    trainer: dict[str, Any],
    records: Sequence[dict[str, Any]] = (),
    name: str | None = None,
    later: Sequence[dict[str, Any]] = (),
    tokenizer: Any = None,
) -> str:
    """README.md of a checkpoint folder.

    run: content of run.json, or empty where that is not at hand. fingerprint: of the text. trainer: the trainer state.
    records: `public` ones of metrics.jsonl; with them the card has speed, and shows the loss curve in PLOT.
    name: of the model. later: records of what was measured of this very checkpoint after it was written. tokenizer:
    of the checkpoint. What is not known is left out.
    """
    config = trainer["config"]
    name = name or config["run_name"] or Path(config["output_dir"]).name or "GPT-2-style model"
    text, commit = _text(config, fingerprint), fingerprint.get("dataset.commit")
    base = HUB_MODEL.fullmatch(config.get("init_from") or "")
    data = ModelCardData(
        license=config.get("hub_license"),
        language=languages(config.get("hub_language")),
        datasets=[config["dataset"]] if commit else None,
        base_model=base[1] if base else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gpt2", "hfgpt", "pretraining"],
        model_name=name,
        eval_results=_results(trainer, text, config if commit else {}, commit, later) or None,
    )
    model = run.get("model", {})
    shape = ""
    if model:
        shape = f" with {model['n_layer']} layers, {model['n_head']} heads, width {model['n_embd']}"
        shape += f" and {model['parameters']:,} parameters"
    tokens = trainer["num_input_tokens_seen"]
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        f"A GPT-2-style language model{shape}, pretrained with hfgpt on {tokens:,} tokens.",
        "## Use",
        USAGE,
        *_characters(tokenizer),
        "## Results",
        *([_measured(trainer)] if trainer["evaluation"] or not later else []),
        *([_table(map(_told, later))] if later else []),
        *([f"![Loss over tokens]({PLOT})"] if curves(records) else []),
        "## Training",
        _table([("text", text), *_training(config, fingerprint, trainer, run, records)]),
        "### Hyperparameters",
        _table((key, config[key]) for key in HYPERPARAMETERS if config.get(key) is not None),
        "## Limits",
        "The model continues text. It was not tuned to follow instructions, and nothing was done to keep it from "
        "wrong, biased or offensive statements. "
        f"It was trained on sequences of {config['sequence_length']:,} tokens; longer ones were not tried.",
    ]
    return "\n\n".join(parts) + "\n"


def plain_card(name: str, parameters: int, story: str, tokenizer: Any = None) -> str:
    """README.md of a model that no run of ours made: where it is from, how to load it."""
    data = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=["gpt2"])
    about = f"A GPT-2-style language model of {parameters / 1e6:,.1f} M parameters, {story}"
    parts = [f"---\n{data.to_yaml()}\n---", f"# {name}", about, USAGE, *_characters(tokenizer)]
    return "\n\n".join(parts) + "\n"


def addressed(card: str, repo_id: str, revision: str | None) -> str:
    """One of our cards as it stands in a repository: under its name, with code that loads it from there."""
    if HERE not in card:
        return card
    where = f'"{repo_id}"' + (f', revision="{revision}"' if revision else "")
    card = re.sub(r"(?m)^# .*$", f"# {repo_id}", card, count=1)
    return card.replace(HERE, "").replace('from_pretrained(".")', f"from_pretrained({where})")


def exported(card: str, dtype: str, parameters: int) -> str:
    """The card of a checkpoint for an export of it. What was measured was measured in float32."""
    parts = ModelCard(card)
    data: Any = parts.data
    told = f"This is an export of the checkpoint: {parameters:,} parameters in {dtype}."
    if dtype != "float32":
        data.eval_results = None
        told += " What is measured below was measured on float32."
    return re.sub(r"(?m)^(# .*)$", lambda title: f"{title[1]}\n\n{told}", str(parts), count=1)


def curves(records: Iterable[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and losses of the `training` and `held-out` curves; a curve without a point is left out."""
    records = list(records)
    found = {}
    for label, key in (("training", "loss"), ("held-out", "eval_loss")):
        points = [(record["num_input_tokens_seen"], record[key]) for record in records if record.get(key) is not None]
        if points:
            found[label] = ([tokens for tokens, _ in points], [loss for _, loss in points])
    return found


def loss_plot(records: Iterable[dict[str, Any]]) -> bytes:
    """The loss curve as a PNG; the same bytes for the same records."""
    from matplotlib.figure import Figure  # takes a second, and needs no display used like this

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, (tokens, losses) in curves(records).items():
        axes.plot(tokens, losses, label=label, marker="o" if len(tokens) < 50 else None, markersize=3)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
    return file.getvalue()


def _text(config: dict[str, Any], fingerprint: dict[str, Any]) -> str:
    """The text in words that hold no local path."""
    if commit := fingerprint.get("dataset.commit"):
        part = f", configuration {config['dataset_name']}" if config["dataset_name"] else ""
        return f"{config['dataset']}{part}, split {config['dataset_split']}, commit {commit}"
    if config["dataset"] == "embedded":
        return "Python's own documentation"
    files = [key.removeprefix("dataset.file ") for key in fingerprint if key.startswith("dataset.file ")]
    return Path(files[0]).name if len(files) == 1 else f"{fingerprint.get('dataset.files', len(files))} local files"


def _beginning(config: dict[str, Any]) -> str:
    """Where the weights were from: a path is told by its last part."""
    base = config.get("init_from")
    if not base:
        return "random weights"
    return f"the weights of {base if HUB_MODEL.fullmatch(base) else Path(base).name}"


def _held_out(config: dict[str, Any], fingerprint: dict[str, Any]) -> str:
    if config["eval_dataset"] is not None:
        return f"eval_dataset {Path(config['eval_dataset']).name}"
    return str(fingerprint["held_out"]).removeprefix("held out: ")


def _results(
    trainer: dict[str, Any], text: str, hub: dict[str, Any], commit: str | None, later: Sequence[dict[str, Any]]
) -> list[EvalResult]:
    """Figures of the checkpoint as it is; `hub`: the settings where the text is a dataset of the Hub."""
    results = [result for record in later for result in _later_results(record)]
    if not _is_evaluated(trainer):
        return results
    where = {
        "dataset_type": hub.get("dataset", "text"),
        "dataset_name": hub.get("dataset", text),
        "dataset_config": hub.get("dataset_name"),
        "dataset_split": hub.get("dataset_split"),
        "dataset_revision": commit,
    }
    held_out = [(metric, f"{metric} of held-out text", trainer["evaluation"].get(f"eval_{metric}")) for metric in TEXT]
    return _metrics(held_out, where) + results


def _later_results(record: dict[str, Any]) -> list[EvalResult]:
    """Those of a record of `hfgpt.evaluation.results`."""
    is_text, on_hub, name = record["task"] == "text", record.get("dataset_revision"), _source(record)
    where = {
        "dataset_type": record["dataset"] if on_hub else record["task"],
        "dataset_name": name if is_text else f"HellaSwag ({name})",
        # The Hub tells datasets apart by type, configuration, split and revision, but not by name.
        "dataset_config": record.get("dataset_name") if on_hub else name,
        "dataset_split": record.get("dataset_split"),
        "dataset_revision": record.get("dataset_revision"),
        "dataset_args": None if is_text else {"examples": record.get("examples")},
    }
    names = {metric: (metric, metric) for metric in TEXT} if is_text else HELLASWAG
    return _metrics([(kind, name, record.get(key)) for key, (kind, name) in names.items()], where)


def _metrics(figures: Iterable[tuple[str, str, float | None]], where: dict[str, Any]) -> list[EvalResult]:
    """One for each (type, name, value) whose value is known."""
    return [
        EvalResult(
            task_type="text-generation",
            metric_type=kind,
            metric_name=name.replace("_", " "),
            metric_value=value,
            **where,
        )
        for kind, name, value in figures
        if value is not None
    ]


def _source(record: dict[str, Any]) -> str:
    """The data of a record in words that hold no local path."""
    if record.get("dataset_revision"):
        about = {"dataset_name": "configuration", "dataset_split": "split", "dataset_revision": "commit"}
        told = [f"{word} {record[key]}" for key, word in about.items() if record.get(key)]
        return ", ".join([record["dataset"], *told])
    return "Python's own documentation" if record["dataset"] == "embedded" else Path(record["dataset"]).name


def _told(record: dict[str, Any]) -> tuple[str, str]:
    """The row of a record in the table of results."""
    if record["task"] == "text":
        units = {"loss": "loss {:.4f} nats per token", "perplexity": "perplexity {:.2f}"}
        units["bits_per_byte"] = "{:.4f} bits per byte"
        told = [text.format(record[key]) for key, text in units.items() if record.get(key) is not None]
        return "text", f"{_source(record)}, {record['scored_tokens']:,} tokens: {', '.join(told)}"
    told = []
    for key, (_, name) in HELLASWAG.items():
        error = record.get(f"{key}_stderr")
        told.append(f"{name} {record[key]:.2%}" + (f" (standard error {error:.2%})" if error is not None else ""))
    return "HellaSwag", f"{_source(record)}, {record['examples']:,} examples: {', '.join(told)}"


def _is_evaluated(trainer: dict[str, Any]) -> bool:
    return bool(trainer["evaluation"]) and trainer["evaluation_step"] == trainer["step"]


def _measured(trainer: dict[str, Any]) -> str:
    if not (figures := trainer["evaluation"]):
        return "The model was not evaluated."
    bits = figures.get("eval_bits_per_byte")
    when = "" if _is_evaluated(trainer) else f", measured at step {trainer['evaluation_step']:,}, not on this model"
    return (
        f"On {figures['eval_tokens']:,} held-out tokens: loss {figures['eval_loss']:.4f} nats per token, "
        f"perplexity {figures['eval_perplexity']:.2f}" + (f", {bits:.4f} bits per byte" if bits else "") + f"{when}."
    )


def _training(
    config: dict[str, Any],
    fingerprint: dict[str, Any],
    trainer: dict[str, Any],
    run: dict[str, Any],
    records: Sequence[dict[str, Any]],
) -> list[tuple[str, str]]:
    """Rows of the table on training: what, on which device, how fast."""
    tokens, steps = trainer["num_input_tokens_seen"], trainer["step"]
    tokenizer = config["tokenizer"]
    if tokenizer == "auto":
        tokenizer = "that of the weights it began from"
    rows = [
        ("held out", _held_out(config, fingerprint)),
        ("begun from", _beginning(config)),
        ("tokens", f"{tokens:,} in {steps:,} steps"),
        ("tokenizer", Path(tokenizer).name if Path(tokenizer).is_absolute() else tokenizer),
    ]
    if plan := run.get("plan"):
        rows += [
            ("tokens per step", f"{plan['tokens_per_step']:,}"),
            ("precision", {"no": "float32"}.get(plan["precision"]["name"], plan["precision"]["name"])),
            ("hardware", run["device"] + (f", {plan['processes']} processes" if plan["processes"] > 1 else "")),
        ]
    rows.append(("seconds of training", f"{trainer['wall_seconds']:,.1f}"))
    source = next((record["peak_source"] for record in reversed(records) if record.get("tokens_per_second")), None)
    timed = [record for record in records if record.get("tokens_per_second") and record["peak_source"] == source]
    if timed:
        rate = statistics.median(record["tokens_per_second"] for record in timed)
        rows.append(("tokens per second", f"{rate:,.0f} (median of {len(timed)} records)"))
    if fractions := [record["mfu"] for record in timed if record.get("mfu") is not None]:
        peak = timed[-1]["peak_tflops"]
        rows.append(("MFU", f"{100 * statistics.median(fractions):.3g} % of {peak:.4g} TFLOP/s per device ({source})"))
    if versions := run.get("versions"):
        rows.append(("versions", ", ".join(f"{package} {number}" for package, number in versions.items())))
    return rows


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    lines = [f"| {key.replace('_', ' ')} | {str(value).replace('|', '/')} |" for key, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines])


def languages(names: str | None) -> list[str] | None:
    """Those of a comma-separated list."""
    return [name.strip() for name in names.split(",")] if names else None


def public(records: Iterable[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The training and evaluation records up to a step, without what is nobody else's business."""
    kept = [r for r in records if r.get("loss") is not None or r.get("eval_loss") is not None]
    return [{key: record[key] for key in PUBLIC if key in record} for record in kept if record["step"] <= step]
