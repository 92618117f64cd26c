"""The README.md of an exported model: its sizes, and the figures of the run that trained it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from data_pipeline.shards import Corpus
from launch.formats.metrics import recent_loss
from launch.trained_model.load import TrainedModel
from launch.training.run_folder.run_json import commits_of
from model.accounting import active_in_words
from model.hf import CLASSES, hf_form, hf_tensors

_HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- {form}
- causal-lm
---

# {name}

A {kind} of {millions:,.1f} M parameters."""
_USE = """\
## Use it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{name}"  # this folder; on the hub USER/{name}
model = AutoModelForCausalLM.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)
```"""


def model_card(name: str, trained: TrainedModel, dtype: str, lines: list[dict[str, Any]], notes: list[str]) -> str:
    """Markdown with the front matter that the Hugging Face hub reads.

    Args:
        name: of the folder.
        dtype: of the weights.
        lines: of the run's `metrics.jsonl`, up to the exported step.
        notes: what a user should know, a sentence each.
    """
    config, run, state = trained.config, trained.description, trained.state
    form = hf_form(config)
    parameters = sum(math.prod(part.shape) for parts in hf_tensors(config).values() for part in parts)
    heads = f"{config.n_head}" if config.n_kv_head == config.n_head else f"{config.n_head} ({config.n_kv_head} of keys and values)"
    sizes = {
        "parameters": f"{parameters:,}{active_in_words(config)}",
        "layers, heads, width": f"{config.n_layer}, {heads}, {config.d_model}",
        "context": f"{config.seq_len:,} tokens",
        "vocabulary": f"{config.vocab_size:,}",
        "weights": f"{dtype}, {'the head tied to the token embedding' if config.tied_head else 'a head of its own'}",
    }
    parts = [_HEAD.format(name=name, form=form, kind=f"`{CLASSES[form]}`", millions=parameters / 1e6), _table(sizes)]
    if run is not None and state is not None:
        parts += ["## The run", _table(_run_rows(run, state, lines, trained.corpus))]
        if state["val_loss"] is not None:
            parts += ["The validation loss is that of the run's log: nats per token, in the run's precision."]
    parts += [_USE.format(name=name), *(["\n".join(f"- {note}" for note in notes)] if notes else [])]
    return "\n\n".join(parts) + "\n"


def _run_rows(run: dict[str, Any], state: dict[str, Any], lines: list[dict[str, Any]], corpus: Corpus | None) -> dict[str, Any]:
    text, machine, optimizer = (run[key] for key in ("corpus", "machine", "optimizer"))
    sources = [str(source.get("name", source)) if isinstance(source, dict) else str(source) for source in text.get("sources", [])]
    losses = [line["loss"] for line in lines if "loss" in line]
    loss, tokenizer = state["val_loss"], {} if corpus is None else corpus.manifest["tokenizer"]
    return {
        "step": f"{state['step']:,}",
        "tokens seen": f"{state['tokens']:,} of {run['total_tokens']:,}",
        "validation loss": None if loss is None else f"{loss:.4f} (perplexity {math.exp(min(loss, 700)):,.2f})",
        "training loss": recent_loss(losses) if losses else None,
        "corpus": f"{without_folders(', '.join(sources))} (`{run['corpus_fingerprint'][:16]}`)",
        "tokenizer": tokenizer.get("name") or tokenizer.get("kind"),
        "recipe": run.get("recipe"),
        "DeepSpeed JSON": f"`{'/'.join(Path(run['config_file']).parts[-2:])}`",
        "ZeRO stage, precision, ranks": ", ".join(str(run[key]) for key in ("zero_stage", "precision", "ranks")),
        "techniques": ", ".join(run["techniques"]),
        "optimizer": f"{optimizer.get('type')} `{json.dumps(optimizer.get('params', {}))}`",
        "peak learning rate, warm-up steps": ", ".join(str(run.get(key)) for key in ("lr", "warmup_steps")),
        "sequences per step": f"{run['global_batch_size']:,}",
        "initial weights": without_folders(str(run.get("init_from") or "")),
        "seed": run["seed"],
        "machine": ", ".join(map(str, machine.get("gpus") or [machine.get("processor")])),
        "versions": ", ".join(f"{key} {value}" for key, value in run["versions"].items() if value),
        "commit": ", ".join(dict.fromkeys(str(commit) for commit in commits_of(run) if commit)),
    }


def without_folders(text: str) -> str:
    """`text` without folders of the machine: the last part of each absolute path stays."""
    return re.sub(r"(^|, |: ?(?=/[^/])|file://)/([^,]*/)?(?=[^/])", r"\1", text)


def _table(rows: dict[str, Any]) -> str:
    """Two columns; rows without a value are left out."""
    cells = ((key, str(value).replace("|", "\\|").replace("\n", " ")) for key, value in rows.items() if value not in (None, ""))
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in cells)])
