"""`--explain`: the resolved run, with the origin of each value, and its memory, FLOPs and traffic. Does not train.

    python launch/pretrain.py --deepspeed_config ds_configs/zero3_bf16.json --preset gpt3-13b --ranks 64 --explain
    python launch/pretrain.py --recipe recipes/zero_2 --explain json

`explain` makes one dictionary, which `--explain json` prints as it is and `as_text` lays out as tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from launch.config.deepspeed_json import defaults_left_open, leaves, value_at
from launch.config.deepspeed_schema import DTYPES, deepspeed_silenced, quiet_deepspeed
from launch.config.flags import EVALUATION, LENGTH, MODEL, RUN, flags_of
from launch.config.memory import bytes_sent_per_step, memory_per_rank
from launch.config.run_config import RunConfig, cuda_requirement
from launch.config.step_time import Hardware, time_of
from launch.errors import printable_line
from launch.formats.files import dotted
from model.accounting import flops_per_token, parameter_count
from model.presets import FIELDS, SIZES, GPTConfig
from recipes import registry
from recipes.technique import planned_steps

#: The columns of the table over the run: percentages of its tokens.
PERCENTS = (0, 25, 50, 75, 100)
#: Longer runs are gone through several steps at a time.
MAX_PLANNED_STEPS = 200_000
DEVICES = {"cuda": "on a GPU", "cpu": "on a CPU"}
#: The rows of a table of plans: the parts of a rank's memory, and what follows from them.
ROWS = {
    "weights": "weights",
    "gradients": "gradients",
    "master_weights": "master weights",
    "optimizer_states": "optimizer states",
    "buffers": "buffers",
    "update": "update only",
    "loss_head": "loss head",
    "activations": "activations",
    "host": "offloaded, in the host's memory",
    "drive": "offloaded, on NVMe",
    "snapshot": "copy for checkpoints, in the host's memory",
    "model_states": "model states, the first four",
    "peak": "peak",
    "checkpointed_activations": "activations, checkpointed",
    "checkpointed_peak": "peak, checkpointed",
    "sent": "sent a step, mean",
}
#: The rows of a plan of time.
TIME_ROWS = {
    "arithmetic_seconds": "arithmetic, s a step",
    "communication_seconds": "communication, s a step",
    "overlapped_seconds": "of it overlapped, s a step",
    "step_seconds": "step, s",
    "tokens_per_second_and_gpu": "tokens/s per GPU",
    "days": "days",
    "days_without_overlap": "days, if nothing overlaps",
    "gpu_hours": "GPU-hours",
}
#: Keys that change memory or bytes sent, and that the plan ignores.
NOT_PLANNED = (
    "communication_data_type",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    *(
        f"zero_optimization.{key}"
        for key in (
            *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "stage3_model_persistence_threshold"),
            *("round_robin_gradients", "parameter_alignment", "leaf_module"),
        )
    ),
)
#: The names of the entries of `flops`.
FLOPS = {"per_token": "a token", "per_step": "a step", "per_step_and_rank": "a step and rank", "run": "the run"}


def explain(config: RunConfig, hardware: Hardware | None = None) -> dict[str, Any]:
    """Everything that `--explain` prints, as JSON values. Bytes and FLOPs are whole numbers. hardware: to plan the time for."""
    model = config.model_config
    parameters, per_token = parameter_count(model), flops_per_token(model)
    flops_per_step = round(per_token * config.tokens_per_step)
    over_the_run, run_flops = over_the_run_of(config, model)
    sent = bytes_of(config, model)
    return {
        "config_file": config.config_file,
        "recipe": config.recipe,
        "run": dict(_run_values(config)),
        "engine": dict(_engine_values(config)),
        "left_out": [path for path, _ in defaults_left_open(config.ds_config)],
        "batch": {
            "micro_batch_size": config.micro_batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
            "ranks": config.ranks,
            "ranks_per_row": config.ranks_per_row,
            "ranks_in_words": config.ranks_in_words,
            "global_batch_size": config.global_batch_size,
            "seq_len": config.shape.seq_len,
            "tokens_per_step": config.tokens_per_step,
        },
        "length": {
            "steps": over_the_run[-1]["step"],
            "total_tokens": config.total_tokens,
            "corpus_tokens": config.corpus.train.n_tokens if config.found_corpus else None,
            "tokens_per_parameter": config.total_tokens / parameters,
        },
        "model": {
            "parameters": parameters,
            "active": parameter_count(model, active=True),
            "vocab_size": config.vocab_size,
            "padded_vocab_size": model.padded_vocab_size,
        },
        "flops": {
            "per_token": round(per_token),
            "per_step": flops_per_step,
            "per_step_and_rank": flops_per_step // config.ranks,
            "run": run_flops,
        },
        "memory_per_rank": {device: memory_of(config, model, device) for device in DEVICES},
        "bytes_sent_per_step": sent,
        "hardware": hardware._asdict() if hardware else None,
        "time": time_of(config, hardware, sent, run_flops, over_the_run[-1]["step"]) if hardware else None,
        "techniques": [type(member).__module__.split(".")[-2] for member in registry.make_techniques(config).members],  # their folders
        "over_the_run": over_the_run,
        "notes": [
            *config.notes,
            *(f"'{path}' changes memory or bytes sent, which the plan ignores" for path in not_planned(config)),
        ],
        "needs": [cuda_requirement(place, capability) for place, capability in config.cuda_only.items()],
        "lacks": list(config.lacks),
    }


def not_planned(config: RunConfig) -> Iterator[str]:
    """The keys of `NOT_PLANNED` that the run sets."""
    for path in NOT_PLANNED:
        if value_at(config.ds_config, path.split(".")) not in (None, False, *DTYPES[config.precision]):
            yield path


def memory_of(config: RunConfig, model: GPTConfig, device: str) -> dict[str, Any]:
    """Bytes of a rank's memory by part, on "cuda" or "cpu"; without activation checkpointing, also its peak with it."""
    checkpoints = registry.make_techniques(config).checkpointed_segments
    plan, checkpointed = (memory_per_rank(config, model, device, segments) for segments in (checkpoints, model.n_layer))
    return {
        **plan.parts,
        "model_states": plan.model_states,
        "peak": plan.peak,
        "peak_moment": plan.peak_moment,
        "checkpointed_activations": 0 if checkpoints else checkpointed.parts["activations"],
        "checkpointed_peak": 0 if checkpoints else checkpointed.peak,
    }


def bytes_of(config: RunConfig, model: GPTConfig) -> int:
    """Bytes that a rank sends per step, mean over the run."""
    techniques = registry.make_techniques(config)
    steps_with = Counter[int]()  # accumulation -> steps
    for steps in planned_steps(config, techniques, stride=config.total_tokens):
        steps_with[steps.work.accumulation] += steps.repeats
    sent = sum(bytes_sent_per_step(config, model, accumulation) * steps for accumulation, steps in steps_with.items())
    made = steps_with.total()
    return techniques.bytes_sent(round(sent / made), made) + techniques.bytes_sent_in_blocks(made)


def _run_values(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """The values of the run with a flag, in the order of --help, except those that are shown with the JSON."""
    for group in (MODEL, LENGTH, EVALUATION, RUN):
        for name in flags_of(group):
            value = getattr(config.shape if name in (*SIZES, *FIELDS) else config, name, None)
            if value is not None:
                yield name, _valued(value, config.origins[name])


def _engine_values(config: RunConfig) -> list[tuple[str, Any]]:
    """All values of the JSON by dotted path, including DeepSpeed's defaults for keys that are left out."""
    sections = {"optimizer": config.optimizer, "scheduler": config.scheduler, **config.ds_config, **config.techniques}
    values = [(dotted(path), _valued(value, config.origins.get(dotted(path), "default"))) for path, value in leaves(sections)]
    open_ends = defaults_left_open(config.ds_config)
    values += [(path, _valued(value, "DeepSpeed's default")) for path, value in open_ends]
    # Top-level values first, then section by section; the stable sort keeps defaults after written values.
    return sorted(values, key=lambda item: item[0].rpartition(".")[0].partition(".")[0])


def _valued(value: Any, origin: str) -> dict[str, Any]:
    return {"value": value, "from": origin}


def over_the_run_of(config: RunConfig, model: GPTConfig) -> tuple[list[dict[str, Any]], int]:
    """The schedules' values at 0, 25, 50, 75 and 100% of the run's tokens, and the FLOPs of the run, without skipped blocks.

    The techniques are asked for every step by `on_step` and `metrics`, or one of several steps in a very long run.
    """
    techniques = registry.make_techniques(config)
    marks = [(percent, -(-config.total_tokens * percent // 100)) for percent in PERCENTS]
    rows: list[dict[str, Any]] = []
    flops: float = 0
    before = 0
    rate = learning_rate(config)
    stride = -(-config.steps_to_make // MAX_PLANNED_STEPS) if techniques.members else config.steps
    for steps in planned_steps(config, techniques, stride):
        flops += steps.repeats * steps.tokens * flops_per_token(model, steps.work.seq_len, steps.work.equivalent_blocks)
        while marks and steps.consumed >= marks[0][1]:
            percent, mark = marks.pop(0)
            place = max(1, -(-(mark - before) // steps.tokens))  # of the mark's step among these
            step, tokens = steps.number + place - 1, before + place * steps.tokens
            rows.append(dict(percent=percent, step=step, tokens=tokens, lr=rate(step, tokens), **steps.reported))  # no name may occur twice
        before = steps.consumed
    return rows, round(flops)


def learning_rate(config: RunConfig) -> Callable[[int, int], float]:
    """A function from a step (from 1) and the run's tokens after it to the learning rate. Imports DeepSpeed if the schedule is its own."""
    if (by_tokens := config.token_schedule) is not None:
        return lambda step, tokens: by_tokens.rate(tokens)
    import torch  # seconds to import, which --help does without

    quiet_deepspeed()
    from deepspeed.runtime import lr_schedules  # once it is silenced

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.lr)
    with deepspeed_silenced():  # its warnings would go to standard output
        schedule = getattr(lr_schedules, config.scheduler["type"])(optimizer, **config.scheduler["params"])

    def rate(step: int, tokens: int) -> float:
        schedule.step(step)  # step k, as in launch/training/deepspeed_fixes/resume.py
        return float(optimizer.param_groups[0]["lr"])

    return rate


# --- the page -----------------------------------------------------------------------------------------------------------------------


def as_text(explained: dict[str, Any], full: bool = False) -> str:
    """`explained` for a reader: short tables, at most about 120 columns wide. full: with DeepSpeed's defaults."""
    batch, length, model, flops = (explained[key] for key in ("batch", "length", "model", "flops"))
    plans = {heading: explained["memory_per_rank"][key] | {"sent": explained["bytes_sent_per_step"]} for key, heading in DEVICES.items()}
    counts = f"{model['parameters']:,} parameters" + (f", {model['active']:,} active" if model["active"] < model["parameters"] else "")
    lines = [f"{explained['config_file']}" + (f" (recipes/{explained['recipe']})" if explained["recipe"] else "")]
    lines += ["", "The run", *_value_rows(explained["run"])]
    left_out = [] if full else explained["left_out"]
    lines += ["", "The DeepSpeed JSON", *_value_rows({name: item for name, item in explained["engine"].items() if name not in left_out})]
    if left_out:
        lines.append(f"  {len(left_out)} keys that are left out have DeepSpeed's defaults; --explain full shows them.")
    lines += [
        "",
        "Batch, length and arithmetic",
        f"  {batch['global_batch_size']:,} sequences per step = micro-batch {batch['micro_batch_size']} x accumulation "
        f"{batch['gradient_accumulation_steps']} x {batch['ranks_in_words']}",
        f"  {batch['tokens_per_step']:,} tokens per step = {batch['global_batch_size']:,} x {batch['seq_len']:,}",
        f"  {length['total_tokens']:,} tokens in {length['steps']:,} steps: {length['tokens_per_parameter']:,.2f} per parameter"
        + (f", {length['total_tokens'] / length['corpus_tokens']:,.2f} epochs of the corpus" if length["corpus_tokens"] else ""),
        f"  {counts}, with a vocabulary of {model['vocab_size']:,} padded to {model['padded_vocab_size']:,}",
        "  " + ", ".join(f"{tqdm.format_sizeof(flops[key])}FLOP {what}" for key, what in FLOPS.items()),
    ]
    lines += ["", "Memory of a rank, and what it sends", *memory_table(plans)]
    if explained["time"]:
        lines += ["", *time_table(batch["ranks"], length["total_tokens"], explained["hardware"], {"the run": explained["time"]})]
    lines += ["", f"Over the run ({', '.join(explained['techniques']) or 'no technique'})", *_columns(explained["over_the_run"])]
    for key, title in (("notes", "Note"), ("needs", "Needs"), ("lacks", "Missing on this machine (training would be refused)")):
        if explained[key]:
            lines += ["", title, *(f"  {line}" for line in explained[key])]
    return "\n".join(lines)


def memory_table(columns: dict[str, dict[str, Any]]) -> list[str]:
    """Plans side by side, a row for each part that any of them has: the lines of a table."""
    rows = [["", *columns]]
    for part, name in ROWS.items():
        if any(plan.get(part) for plan in columns.values()):
            rows.append([name, *(_bytes(plan[part]) for plan in columns.values())])
    rows.append(["peak in", *(plan["peak_moment"] for plan in columns.values())])
    notes = ["  The parts do not all live at once: the peak is less than their sum."]
    if any(plan["host"] or plan["drive"] for plan in columns.values()):
        notes.append("  Offloaded states are in their own rows too. On a GPU the peak leaves them out.")
    return [*_aligned(rows), *notes]


def time_table(ranks: int, total_tokens: int, hardware: dict[str, Any], columns: dict[str, dict[str, float]]) -> list[str]:
    """Plans of time side by side: the lines of a table, below what they assume."""
    network = f"network of {hardware['network'] / 1e9:,.4g} Gbit/s" if hardware["network"] else "communication in no time (--interconnect)"
    network += f"; slices are exchanged at {hardware['link'] / 1e9:,.4g} Gbit/s (--gpu_link)" if hardware["link"] else ""
    rows = [["", *columns], *([name, *(_number(plan[key]) for plan in columns.values())] for key, name in TIME_ROWS.items())]
    return [
        f"Time of {total_tokens:,} tokens on {ranks} x {hardware['device']}",
        f"  assumed: {hardware['assumed']}; {network}",
        *_aligned(rows),
    ]


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}" if number else "-"


def _bytes(number: int) -> str:
    if not number:
        return "-"
    return f"{number / 2**30:,.2f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"


def _value_rows(values: dict[str, dict[str, Any]]) -> list[str]:
    name_width = max(map(len, values))
    rows = [(name, _shown(item["value"]), item["from"]) for name, item in values.items()]
    value_width = min(24, max(len(value) for _, value, _ in rows))
    return [f"  {name:<{name_width}}  {value:<{value_width}}  {origin}" for name, value, origin in rows]


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    """One line per quantity, one column per point of the run."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != "percent"))
    table = [["", *(f"{row['percent']}%" for row in rows)]]
    table += [[name, *(_shown(row.get(name, "-")) for row in rows)] for name in names]
    return _aligned(table)


def _aligned(rows: list[list[str]]) -> list[str]:
    """The lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        lines.append(f"  {name:<{widths[0]}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)))
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else printable_line(str(value)) if value != "" else '""'
