"""The README.md of an exported model: what it is, with the figures of the run that trained it, and the command that trains it again."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.formats.metrics import recent_loss
from model.hf import hf_shapes
from model.presets import GPTConfig

if TYPE_CHECKING:
    from data_pipeline.shards import Corpus

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""


def model_card(
    name: str,
    config: GPTConfig,
    dtype: str,
    description: dict[str, Any] | None,
    state: dict[str, Any] | None,
    lines: list[dict[str, Any]],
    corpus: Corpus | None,
    notes: list[str],
) -> str:
    """Markdown with the front matter that the hub reads.

    Args:
        name: of the folder.
        dtype: of the weights.
        description, state: the run's `run.json` and its checkpoint's `state.json`; None where the model is of no run.
        lines: of the run's `metrics.jsonl`, up to that step.
        corpus: of the run, where it is still there.
        notes: what should be known, a sentence each.
    """
    parameters = sum(math.prod(shape) for shape in hf_shapes(config).values())
    state = state or {}
    loss = state.get("val_loss")
    meta = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- gpt2", "- causal-lm"]
    if description:
        meta.append("- deepspeed")
    rows = [
        ("parameters", f"{parameters:,}"),
        ("layers, heads, width", f"{config.n_layer}, {config.n_head}, {config.d_model}"),
        ("context", f"{config.seq_len:,} tokens"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("weights", f"{dtype}, the head tied to the token embedding"),
    ]
    parts = ["\n".join([*meta, "---"]), f"# {name}", f"A GPT-2 (`GPT2LMHeadModel`) of {parameters / 1e6:,.1f} M parameters.", _table(rows)]
    if description:
        parts += ["## The run", _table(_of_run(description, state, lines, corpus))]
        if loss is None:
            parts.append("This step was not evaluated, so that its validation loss is not known: `launch/score.py` measures it.")
        else:
            more = f"perplexity {math.exp(min(loss, 700)):,.2f}" + ("" if corpus is None else _bits_per_byte(loss, corpus))
            parts.append(
                f"The validation loss, {loss:.4f} nats a token ({more}), is that of the run's log:"
                f" the mean over {_windows(description, config, corpus)} of its validation text, in the run's own precision."
            )
            if corpus is None or corpus.eot_id is not None:
                parts.append("These are whole documents that the model was not trained on.")
        parts += ["## Train it again", "```sh\n" + _command(description) + "\n```"]
    parts += ["## Use it", _USE.format(name=name).rstrip()]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def _bits_per_byte(loss: float, corpus: Corpus) -> str:
    split, n_bytes = corpus.val, corpus.manifest["splits"]["val"].get("bytes")
    return f", {loss / math.log(2) * split.n_tokens / n_bytes:.4f} bits per byte" if n_bytes else ""


def _windows(description: dict[str, Any], config: GPTConfig, corpus: Corpus | None) -> str:
    """What an evaluation of the run reads."""
    asked = description.get("eval_batches", 0) * description.get("global_batch_size", 0)
    if corpus is None:
        return f"at most {asked:,} windows"
    total = corpus.val.windows(config.seq_len)
    return f"{min(asked, total):,} of the {total:,} windows of {config.seq_len:,} tokens"


def _tokenizer(corpus: Corpus) -> str:
    said = corpus.manifest["tokenizer"]
    return f"{said.get('name') or said.get('kind')}, {corpus.vocab_size:,} ids"


def _schedule(description: dict[str, Any]) -> str | None:
    if description.get("lr") is None:
        return None
    kind = (description.get("scheduler") or {}).get("type")
    return f"{description['lr']} after {description.get('warmup_steps', 0):,} steps, down to {description.get('min_lr')} ({kind})"


def _of_run(
    description: dict[str, Any], state: dict[str, Any], lines: list[dict[str, Any]], corpus: Corpus | None
) -> list[tuple[str, str]]:
    text, machine, versions = (description.get(key) or {} for key in ("corpus", "machine", "versions"))
    sources = [str(source.get("name", source)) if isinstance(source, dict) else str(source) for source in text.get("sources", [])]
    optimizer = description.get("optimizer") or {}
    val_loss = state.get("val_loss")
    seconds = lines[-1].get("seconds") if lines and lines[-1]["step"] == state.get("step") else None
    losses = [line["loss"] for line in lines if "loss" in line]
    rows: list[tuple[str, Any]] = [
        ("step", f"{state.get('step', 0):,}"),
        ("tokens seen", f"{state.get('tokens', 0):,} of {description.get('total_tokens', 0):,}"),
        ("validation loss", None if val_loss is None else f"{val_loss:.4f}"),
        ("training loss at that step", recent_loss(losses) if losses else None),
        ("corpus", f"{', '.join(sources)} (`{description.get('corpus_fingerprint', '')[:16]}`)"),
        ("training text", None if corpus is None else f"{corpus.train.n_tokens:,} tokens"),
        ("validation text", None if corpus is None else f"{corpus.val.n_tokens:,} tokens"),
        ("tokenizer", None if corpus is None else _tokenizer(corpus)),
        ("recipe", description.get("recipe")),
        ("engine JSON", f"`{_in_checkout(str(description.get('config_file')))}`"),
        ("ZeRO stage, precision, ranks", ", ".join(str(description.get(key)) for key in ("zero_stage", "precision", "ranks"))),
        ("techniques", ", ".join(description.get("techniques") or {})),
        ("optimizer", f"{optimizer.get('type')} `{json.dumps(optimizer.get('params', {}))}`"),
        ("sequences a step", f"{description.get('global_batch_size', 0):,}"),
        ("learning rate", _schedule(description)),
        ("gradient clipping", (description.get("engine") or {}).get("gradient_clipping")),
        ("started from", description.get("init_from")),
        ("attention within documents", "yes" if description.get("no_cross_document") else None),
        ("seed", description.get("seed")),
        ("time of training", None if seconds is None else f"{seconds:,.0f} s"),
        ("machine", ", ".join(map(str, machine.get("gpus") or [machine.get("processor")]))),
        ("versions", ", ".join(f"{key} {value}" for key, value in versions.items() if value)),
        ("commit", description.get("commit")),
    ]
    return [(key, str(value)) for key, value in rows if value not in (None, "")]


def _command(description: dict[str, Any]) -> str:
    said = [str(word) for word in description.get("command") or []]
    arguments = [_in_checkout(word) for word in said[1:] if not word.startswith("--local_rank")]
    ranks = description.get("ranks", 1)
    return f"deepspeed --num_gpus {ranks} launch/pretrain.py {shlex.join(arguments)}"


def _in_checkout(path: str) -> str:
    """A path as it is from the checkout, where it is in one: what leads there is nobody else's."""
    parts = Path(path).parts
    folder = next((index for index, part in enumerate(parts) if part in ("ds_configs", "recipes")), None)
    return path if folder is None else str(Path(*parts[folder:]))


def _table(rows: list[tuple[str, str]]) -> str:
    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    return "\n".join(["| | |", "|---|---|", *(f"| {cell(key)} | {cell(value)} |" for key, value in rows)])
