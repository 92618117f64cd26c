"""Mutants of the shipped JSONs: misspelt keys, wrong types, numbers out of range, removed keys, impossible pairs. Each is refused, its
path named with its line, and nothing ends in a traceback.

The mutants are drawn by hypothesis from fixed seeds (`derandomize`): every run has the same ones.

    python -m pytest tests/test_mutated_configs.py
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from launch.config.deepspeed_keys import section_rule
from launch.config.deepspeed_schema import SCHEDULES, deepspeed_schema
from launch.config.optimizer import ADAM_TYPES
from launch.config.run_config import resolve
from launch.errors import UsageError
from recipes.registry import technique_classes

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "ds_configs").glob("*.json"))}
SCHEMA = deepspeed_schema()
#: Top-level keys that a recipe of this project claims; no mutant of DeepSpeed's keys touches them.
CLAIMED = {name for cls in technique_classes() if (name := cls.declaration.section)}
OURS = {name: section_rule(cls) for cls in technique_classes() if (name := cls.declaration.section)}
#: The parameters of what this project builds itself, which are not in DeepSpeed's schema.
TOKEN_SCHEDULE_PARAMS = {"min_lr": {}, "warmup_steps": {}, "total_tokens": {}}
SGD_PARAMS: dict[str, Any] = {"lr": {}, "momentum": {}, "weight_decay": {}}
SWITCH = {"types": ["boolean"]}
ADAM_PARAMS = {"lr": {}, "betas": {}, "eps": {}, "weight_decay": {}, "amsgrad": SWITCH, "adam_w_mode": SWITCH, "torch_adam": SWITCH}
#: What may stand in the params of the optimizers that recipes bring.
BROUGHT = {
    kind: {**{key: {} for key in ("lr", "betas", "eps", "weight_decay")}, **cls.declaration.keys}
    for cls in technique_classes()
    if (kind := cls.declaration.optimizer_type)
}
#: What may be refused as a whole, because nothing in this project drives it: a fault in it may name the section instead of the key.
UNDRIVEN = {
    *("activation_checkpointing", "autotuning", "compile", "datastates_ckpt", "data_efficiency", "expert_parallel", "hybrid_engine"),
    *("pipeline", "tensor_parallel", "torch_autocast", "weight_quantization", "zero_optimization.zenflow"),
}

KeyPath = tuple[str, ...]
Values = dict[str, Any]


# --- the instruments ----------------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What `resolve` made of a mutant: the faults it raised (none: accepted), or the exception that was not a UsageError."""

    faults: tuple[str, ...]
    crash: str | None
    lines: dict[KeyPath, int]

    def names(self, path: KeyPath) -> list[str]:
        """The faults that name `path` as the user wrote it, with its line where it has one."""
        where = f"line {self.lines[path]}: " if path in self.lines else ""
        return [fault for fault in self.faults if f"{where}'{'.'.join(path)}'" in fault]


def render(values: Any, path: KeyPath = (), line: int = 1) -> tuple[str, dict[KeyPath, int]]:
    """`values` as JSON, a key a line, and the line of each key: what the reader of the file under test must find by itself."""
    if not isinstance(values, dict) or not values:
        return json.dumps(values), {}
    out, lines = "{", {}
    for key, value in values.items():
        out += ("," if lines else "") + "\n"
        here = (*path, key)
        lines[here] = line + out.count("\n")
        text, below = render(value, here, lines[here])
        out += f"{json.dumps(key)}: {text}"
        lines |= below
    return out + "\n}", lines


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, corpus) -> Callable[..., Outcome]:
    """A function that resolves values on two ranks."""
    file = tmp_path_factory.mktemp("mutants") / "engine.json"

    def run(values: Values, *flags: str, ranks: int = 2) -> Outcome:
        text, lines = render(values)
        file.write_text(text)
        try:
            # With dropout, for the sections that are refused without.
            resolve(["--deepspeed_config", str(file), "--data", str(corpus), "--dropout", "0.1", *flags], ranks=ranks)
        except UsageError as mistake:
            return Outcome(mistake.faults, None, lines)
        except Exception as crash:
            return Outcome((), f"{type(crash).__name__}: {crash}", lines)
        return Outcome((), None, lines)

    return run


def changed(values: Values, changes: dict[str, Any]) -> Values:
    """`values` with each dotted key set."""
    values = copy.deepcopy(values)
    for key, value in changes.items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = copy.deepcopy(value)
    return values


def walk(values: Values, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The path of every key, at every depth."""
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from walk(value, (*path, key))


def at(values: Values, path: KeyPath) -> Any:
    for part in path:
        values = values[part]
    return values


def renamed(values: Values, path: KeyPath, name: str) -> Values:
    """`values` with the last key of `path` called `name`, in the same place."""
    if len(path) > 1:
        return {key: renamed(value, path[1:], name) if key == path[0] else value for key, value in values.items()}
    return {name if key == path[0] else key: value for key, value in values.items()}


def rules_at(values: Values, path: KeyPath) -> dict[str, Any]:
    """The keys that are valid beside `path`, each with the schema's rule."""
    section = path[:-1]
    if section == ("optimizer", "params"):
        kind = values["optimizer"]["type"]
        return ADAM_PARAMS if kind in ("Adam", "AdamW") else BROUGHT.get(kind) or SGD_PARAMS
    if section == ("scheduler", "params"):
        return SCHEDULES.get(values["scheduler"]["type"], TOKEN_SCHEDULE_PARAMS)
    rules = {**OURS, **SCHEMA.keys}
    for part in section:
        rules = rules[part].get("keys", {})
    return rules


def named(result: Outcome, path: KeyPath) -> bool:
    """Whether a fault names `path`; or, where the whole section has no place in this project, the section."""
    return any(result.names(path[:n]) for n in range(1, len(path) + 1) if n == len(path) or ".".join(path[:n]) in UNDRIVEN)


def tell(found: dict[str, list[str]], what: str, result: Outcome, path: KeyPath) -> None:
    """Note into `found` how a mutant that must be refused at `path` was not."""
    if result.crash:
        found["crashed"].append(f"{what}: {result.crash}")
    elif not result.faults:
        found["accepted"].append(what)
    elif not named(result, path):
        found["not named"].append(f"{what}: {result.faults}")


def troubles() -> dict[str, list[str]]:
    return {"crashed": [], "accepted": [], "not named": []}


def judge(found: dict[str, list[str]], allowed: int = 0) -> None:
    """Fail with every kind of trouble and a few of its mutants."""
    trouble = {kind: mutants for kind, mutants in found.items() if mutants}
    report = "\n".join(f"{kind}: {len(mutants)}\n    " + "\n    ".join(mutants[:60]) for kind, mutants in trouble.items())
    assert sum(map(len, trouble.values())) <= allowed, "\n" + report


DETERMINISTIC = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def drawn(strategy: st.SearchStrategy, number: int) -> list[Any]:
    """`number` different examples of `strategy`, the same ones at every run."""
    examples: dict[str, Any] = {}

    @settings(DETERMINISTIC, max_examples=3 * number)
    @given(strategy)
    def collect(example: Any) -> None:
        if len(examples) < number:
            examples.setdefault(repr(example), example)

    collect()
    return list(examples.values())


# --- what else may stand in a file: without these, most depths would have no key to misspell -------------------------------------------


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": "auto", **params}}, "zero_allow_untested_optimizer": True}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


#: Name -> (the changes, the stages at which they are right). All of them are in use, or switched off as DeepSpeed documents it.
ADDITIONS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Adam": (optimizer("Adam", betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, adam_w_mode=True, amsgrad=False), (0, 1, 2, 3)),
    "SGD": (optimizer("SGD", momentum=0.9, weight_decay=0.1), (0, 1, 2, 3)),
    "WarmupLR": (
        scheduler("WarmupLR", warmup_min_lr=0.0, warmup_max_lr="auto", warmup_num_steps=10, warmup_type="linear"),
        (0, 1, 2, 3),
    ),
    "WarmupDecayLR": (
        scheduler("WarmupDecayLR", total_num_steps="auto", warmup_min_lr=0.0, warmup_max_lr="auto", warmup_num_steps=10, warmup_type="log"),
        (0, 1, 2, 3),
    ),
    "WarmupCosineLR": (
        scheduler("WarmupCosineLR", total_num_steps="auto", warmup_min_ratio=0.0, warmup_num_steps=10, cos_min_ratio=0.1),
        (0, 1, 2, 3),
    ),
    "offload_optimizer": (
        {"zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": False, "pipeline_read": False, "pipeline_write": False}},
        (1, 2, 3),
    ),
    "offload_param": ({"zero_optimization.offload_param": {"device": "cpu", "pin_memory": False, "buffer_count": 5}}, (3,)),
    "zero 3": (
        {
            "zero_optimization.sub_group_size": 100000000,
            "zero_optimization.stage3_model_persistence_threshold": 100000000,
            "zero_optimization.stage3_module_granularity_threshold": 0,
            "zero_optimization.stage3_use_all_reduce_for_fetch_params": False,
            "zero_optimization.memory_efficient_linear": False,
        },
        (3,),
    ),
    "zero 1 and 2": (
        {
            "zero_optimization.round_robin_gradients": False,
            "zero_optimization.ignore_unused_parameters": True,
            "zero_optimization.allgather_partitions": True,
            "zero_optimization.use_multi_rank_bucket_allreduce": True,
        },
        (1, 2),
    ),
    "tensorboard": ({"tensorboard": {"enabled": False, "output_path": "logs", "job_name": "first"}}, (0, 1, 2, 3)),
    "csv_monitor": ({"csv_monitor": {"enabled": False, "output_path": "logs", "job_name": "first"}}, (0, 1, 2, 3)),
    "wandb": ({"wandb": {"enabled": False, "group": "g", "team": "t", "project": "p"}}, (0, 1, 2, 3)),
    "flops_profiler": (
        {
            "flops_profiler": {
                "enabled": False,
                "profile_step": 1,
                "module_depth": -1,
                "top_modules": 1,
                "detailed": True,
                "recompute_fwd_factor": 0.0,
                "output_file": None,
            }
        },
        (0, 1, 2, 3),
    ),
    "comms_logger": (
        {"comms_logger": {"enabled": False, "verbose": False, "prof_all": True, "debug": False, "prof_ops": ["all_reduce"]}},
        (0, 1, 2, 3),
    ),
    "aio": (
        {"aio": {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True}},
        (0, 1, 2, 3),
    ),
    "checkpoint": ({"checkpoint": {"tag_validation": "Warn", "use_node_local_storage": False}}, (0, 1, 2, 3)),
    "data_types": ({"data_types": {"grad_accum_dtype": None, "param_dtype": None, "buffer_dtype": None}}, (0, 1, 2, 3)),
    "activation_checkpointing": (
        {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": None}},
        (0, 1, 2, 3),
    ),
    "logging": (
        {"steps_per_print": 100, "wall_clock_breakdown": False, "memory_breakdown": False, "dump_state": False, "log_level": "warning"},
        (0, 1, 2, 3),
    ),
    "communication": (
        {"communication_data_type": "fp32", "prescale_gradients": False, "gradient_predivide_factor": 1.0, "gradient_allreduce_op": "mean"},
        (0, 1, 2, 3),
    ),
}


#: Sections under which a run has more steps than were asked for, which a schedule by steps does not know.
LONGER = {"batch_size_warmup", "curriculum_learning"}


def fits(name: str, addition: str) -> bool:
    if "scheduler" in ADDITIONS[addition][0] and LONGER & set(SHIPPED[name]):
        return False
    if SHIPPED[name]["zero_optimization"].get("offload_optimizer") and "optimizer" in ADDITIONS[addition][0]:
        return False  # an offloaded optimizer is Adam
    if addition == "offload_optimizer" and SHIPPED[name]["optimizer"]["type"] not in ADAM_TYPES:
        return False
    return SHIPPED[name]["zero_optimization"]["stage"] in ADDITIONS[addition][1]


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_mutated_is_right(name, outcome):
    assert outcome(SHIPPED[name]) == ((), None, render(SHIPPED[name])[1])
    for addition in ADDITIONS:
        if fits(name, addition):
            right = outcome(changed(SHIPPED[name], ADDITIONS[addition][0]))
            assert (right.faults, right.crash) == ((), None), addition


# --- misspelt keys ------------------------------------------------------------------------------------------------------------------

KEYBOARD = ("1234567890-", "qwertyuiop", "asdfghjkl", "zxcvbnm")
SPELLINGS = [("optimization", "optimisation"), ("optimizer", "optimiser"), ("synchronize", "synchronise"), ("quantized", "quantised")]
SPELLINGS += [("serialization", "serialisation"), ("optimization", "optimzation"), ("parallelism", "paralellism"), ("adam", "adamw")]
#: What people leave out at the front of a name.
PREFIXES = ("stage3_", "train_", "zero_", "gradient_", "warmup_", "initial_", "cycle_", "lr_range_test_", "loss_", "param_", "total_")


def neighbours(letter: str) -> str:
    """The keys around `letter` on a keyboard."""
    for row, keys in enumerate(KEYBOARD):
        if (column := keys.find(letter)) >= 0:
            beside = keys[max(0, column - 1) : column + 2].replace(letter, "")
            above = KEYBOARD[row - 1][column : column + 2] if row else ""
            below = KEYBOARD[row + 1][max(0, column - 1) : column + 1] if row + 1 < len(KEYBOARD) else ""
            return "".join(char for char in beside + above + below if char.isalnum())
    return ""


def other_number(word: str) -> str:
    return word[:-1] if word.endswith("s") else word + "s"


def misspellings(name: str) -> dict[str, list[str]]:
    """What a human makes of `name`, by the kind of the slip."""
    spots = range(len(name))
    words = name.split("_")
    camel = "".join(word.capitalize() for word in words)
    return {
        "swapped letters": [name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in spots[:-1]],
        "dropped letter": [name[:i] + name[i + 1 :] for i in spots],
        "doubled letter": [name[:i] + name[i] + name[i:] for i in spots if name[i] != "_"],
        "neighbouring key": [name[:i] + key + name[i + 1 :] for i in spots for key in neighbours(name[i])],
        "wrong case": [name.upper(), name.capitalize(), *(name[:i] + name[i].upper() + name[i + 1 :] for i in spots)],
        "wrong separator": [name.replace("_", mark) for mark in ("-", " ", ".", "", "__")],
        "camel case": [camel, camel[:1].lower() + camel[1:]] if len(words) > 1 else [],
        "plural": ["_".join([*words[:i], other_number(word), *words[i + 1 :]]) for i, word in enumerate(words)],
        "forgotten prefix": [name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)],
        "other spelling": [name.replace(one, other) for one, other in SPELLINGS if one in name],
    }


class Typo(NamedTuple):
    file: str
    addition: str | None
    path: KeyPath
    kind: str
    name: str

    @property
    def right(self) -> Values:
        return changed(SHIPPED[self.file], ADDITIONS[self.addition][0]) if self.addition else SHIPPED[self.file]

    def mutant(self) -> tuple[Values, KeyPath]:
        return renamed(self.right, self.path, self.name), (*self.path[:-1], self.name)

    def is_one(self) -> bool:
        """Whether the name is no valid key at its place, and none that stands for another one by losing its prefix."""
        rules = rules_at(self.right, self.path)
        beside = at(self.right, self.path[:-1])
        original = self.path[-1]
        others = {key.removeprefix(prefix) for key in rules for prefix in PREFIXES if key != original}
        return bool(self.name) and self.name not in {*rules, *beside, *others, *CLAIMED} and self.name not in SCHEMA.removed


@st.composite
def typos(draw: st.DrawFn) -> Typo:
    file = draw(st.sampled_from(sorted(SHIPPED)))
    addition = draw(st.sampled_from([None, *(addition for addition in ADDITIONS if fits(file, addition))]))
    right = Typo(file, addition, (), "", "").right
    # A key of the addition where there is one: the shipped keys come up often enough.
    paths = list(walk(right))
    new = [path for path in paths if path not in set(walk(SHIPPED[file]))] if addition else []
    path = draw(st.sampled_from(new or paths))
    found = {kind: names for kind, names in misspellings(path[-1]).items() if names}
    kind = draw(st.sampled_from(sorted(found)))
    return Typo(file, addition, path, kind, draw(st.sampled_from(found[kind])))


TYPOS = 500


@pytest.fixture(scope="module")
def misspelt(outcome) -> list[tuple[Typo, Outcome]]:
    examples = drawn(typos().filter(Typo.is_one), TYPOS)
    assert len(examples) == TYPOS
    assert {len(typo.path) for typo in examples} == {1, 2, 3}
    return [(typo, outcome(typo.mutant()[0])) for typo in examples]


def test_a_misspelt_key_is_refused_and_named_with_its_line(misspelt):
    found: dict[str, list[str]] = {"crashed": [], "accepted": [], "not named": []}
    for typo, result in misspelt:
        path = typo.mutant()[1]
        if result.crash:
            found["crashed"].append(f"{path}: {result.crash}")
        elif not result.faults:
            found["accepted"].append(str(path))
        elif not result.names(path):
            found["not named"].append(f"{path}, line {result.lines[path]}: {result.faults}")
    judge(found)


def test_the_suggestion_is_the_original_name(misspelt):
    """In at least 95 % of the mutants: a name of two letters that lost one has no one original."""
    wrong: dict[str, list[str]] = {}
    for typo, result in misspelt:
        original, path = typo.path[-1], typo.mutant()[1]
        said = [match.group(1) for fault in result.names(path) for match in re.finditer(r"did you mean '([^']*)'\?", fault)]
        if original not in [name.rpartition(".")[2] for name in said]:
            wrong.setdefault(typo.kind, []).append(f"{'.'.join(path)}: {original} -> {', '.join(said) or 'no suggestion'}")
    judge(wrong, allowed=TYPOS * 5 // 100)


def test_a_misspelt_key_is_the_only_fault(misspelt):
    """What was meant is known: nobody is told beside it that something is missing."""
    several = [f"{typo.mutant()[1]}: {result.faults}" for typo, result in misspelt if len(result.faults) > 1]
    judge({"more than one fault": several}, allowed=TYPOS // 100)


@st.composite
def several_typos(draw: st.DrawFn) -> list[Typo]:
    """Two to five typos of one file, none of them within another; without a type no parameter could be checked."""
    file = draw(st.sampled_from(sorted(SHIPPED)))
    paths = [path for path in walk(SHIPPED[file]) if path[-1] != "type"]
    chosen: list[Typo] = []
    for path in draw(st.lists(st.sampled_from(paths), min_size=2, max_size=5, unique=True)):
        names = [name for names in misspellings(path[-1]).values() for name in names]
        typo = Typo(file, None, path, "", draw(st.sampled_from(names)))
        within = any(path[: len(other.path)] == other.path or other.path[: len(path)] == path for other in chosen)
        if typo.is_one() and not within:
            chosen.append(typo)
    return chosen


def test_several_misspelt_keys_are_all_named(outcome):
    found = troubles()
    for chosen in drawn(several_typos().filter(lambda chosen: len(chosen) > 1), 100):
        values = SHIPPED[chosen[0].file]
        for typo in chosen:
            values = renamed(values, typo.path, typo.name)
        result = outcome(values)
        for typo in chosen:
            tell(found, ".".join(typo.mutant()[1]), result, typo.mutant()[1])
    judge(found)


#: What must be in a file; everything else has a default, and may be left out.
NEEDED = {"optimizer.type": "optimizer.type", "scheduler.type": "scheduler.type"}
#: What offload cannot do without, and the words it is asked for with.
NEEDED_BY_OFFLOAD = {"zero_optimization.stage": "offload works at stage"}
NEEDED_BY_OFFLOAD |= {f"zero_optimization.offload_{what}.nvme_path": 'needs "nvme_path"' for what in ("optimizer", "param")}
#: What a recipe's JSON cannot do without.
NEEDED_BY_RECIPE = {("fp8", "bf16"): "is for bf16 runs", ("fp8", "bf16.enabled"): "is for bf16 runs"}
NEEDED_BY_RECIPE |= {("zeropp", "zero_optimization.stage"): "works at stage 3 only"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_key_left_out_has_its_default_or_is_asked_for(name, outcome):
    found: dict[str, list[str]] = {"crashed": [], "not asked for": [], "asked for": []}
    for path in walk(SHIPPED[name]):
        *sections, last = path
        values = copy.deepcopy(SHIPPED[name])
        del at(values, tuple(sections))[last]
        result, key = outcome(values), ".".join(path)
        if result.crash:
            found["crashed"].append(f"{key}: {result.crash}")
        elif key in NEEDED_BY_OFFLOAD and any(fault.count(NEEDED_BY_OFFLOAD[key]) for fault in result.faults):
            if not all(last in fault and "zero_optimization.offload_" in fault for fault in result.faults):
                found["not asked for"].append(f"{key}: {result.faults}")
        elif (words := NEEDED_BY_RECIPE.get((name, key))) is not None:
            if len(result.faults) != 1 or words not in result.faults[0]:
                found["not asked for"].append(f"{key}: {result.faults}")
        elif key in NEEDED:
            asked = result.names(tuple(NEEDED[key].split("."))) or result.names(path)
            if len(asked) != len(result.faults) or not asked or "null" in asked[0]:  # it is not null, it is not there
                found["not asked for"].append(f"{key}: {result.faults}")
        elif result.faults:
            found["asked for"].append(f"{key}: {result.faults}")
    judge(found)


@pytest.mark.parametrize(
    ("key", "names", "values"),
    [
        (
            "optimizer.type",
            ("Adam", "AdamW", "SGD"),
            ("AdmaW", "adamW2", "AdamWW", "RMSprop", "SDG", "Adagrad", "Adam W"),
        ),
        (
            "scheduler.type",
            ("WarmupCosineTokens", *SCHEDULES),
            ("WarmupCosineToken", "WarmUpDecay", "warmuplr", "Warmup_LR", "OneCycle", "LRRangeTest", "WarmupCosinLR"),
        ),
        ("zero_optimization.offload_optimizer.device", ("none", "cpu", "nvme"), ("CPU", "cpus", "nvm", "NVMe", "non")),
        ("communication_data_type", ("fp32", "fp16", "bf16"), ("fp23", "bfp16", "b16", "FP-16")),
    ],
)
def test_a_misspelt_choice_lists_what_there_is(key, names, values, outcome):
    path = tuple(key.split("."))
    for value in values:
        changes = {key: value} | ({key.replace("type", "params"): {}} if key.endswith("type") else {})
        result = outcome(changed(SHIPPED["zero2_bf16"], changes))
        assert result.crash is None, (value, result.crash)
        (fault, *more) = result.names(path) or ["not named"]
        assert not more and all(name in fault for name in names), (value, result.faults)


#: A key that stands in the wrong section, or under the name of an older DeepSpeed: what people write -> where it belongs.
MISPLACED = {
    "stage": "zero_optimization.stage",
    "offload_optimizer": "zero_optimization.offload_optimizer",
    "overlap_comm": "zero_optimization.overlap_comm",
    "lr": "optimizer.params.lr",
    "betas": "optimizer.params.betas",
    "optimizer.lr": "optimizer.params.lr",
    "optimizer.weight_decay": "optimizer.params.weight_decay",
    "scheduler.warmup_steps": "scheduler.params.warmup_steps",
    "loss_scale": "fp16.loss_scale",
    "zero_optimization.gradient_clipping": "gradient_clipping",
    "zero_optimization.gradient_accumulation_steps": "gradient_accumulation_steps",
    "bf16.gradient_clipping": "gradient_clipping",
    "optimizer.gradient_clipping": "gradient_clipping",
    "zero_optimization.communication_data_type": "communication_data_type",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "tag_validation": "checkpoint.tag_validation",
    "partition_activations": "activation_checkpointing.partition_activations",
    "block_size": "aio.block_size",
    "profile_step": "flops_profiler.profile_step",
}


def misplaced_faults(key: str, outcome: Callable[..., Outcome]) -> list[str]:
    result = outcome(changed(SHIPPED["zero2_bf16"], {key: 1}))
    assert result.crash is None
    assert result.names(tuple(key.split("."))), result.faults
    return result.names(tuple(key.split(".")))


@pytest.mark.parametrize("key", MISPLACED)
def test_a_key_in_the_wrong_section_is_refused(key, outcome):
    assert all(len(fault) < 900 for fault in misplaced_faults(key, outcome))  # no list of everything that there is


@pytest.mark.parametrize("key", MISPLACED)
def test_a_key_in_the_wrong_section_is_told_where_it_belongs(key, outcome):
    assert any(f"'{MISPLACED[key]}'" in fault for fault in misplaced_faults(key, outcome)), misplaced_faults(key, outcome)


# --- wrong types --------------------------------------------------------------------------------------------------------------------

KINDS: dict[str, list[Any]] = {
    "null": [None],
    "boolean": [True],
    "number": [7, 1.5],
    "string": ["nonsense", "", "7", "true"],
    "array": [[], [1]],
    "object": [{}, {"nonsense": 1}],
}
#: What is right where the schema's rule is empty: it was read off a signature or a `.get()` that says nothing of the type.
UNRULED: dict[str, tuple[str, ...]] = {
    "activation_checkpointing.number_checkpoints": ("null", "number"),
    "autotuning.arg_mappings": ("null", "object"),
    "autotuning.max_train_batch_size": ("null", "number"),
    "autotuning.metric_path": ("null", "string"),
    "autotuning.model_info": ("null", "object"),
    "autotuning.model_info_path": ("null", "string"),
    "checkpoint.writer": ("null", "object"),
    "data_types.keep_in_fp32_modules": ("array",),  # of strings; and "auto"
    "datastates_ckpt": ("null", "object"),
    "flops_profiler.output_file": ("null", "string"),
    "zero_optimization.offload_optimizer.nvme_path": ("null", "string"),
    "zero_optimization.offload_param.nvme_path": ("null", "string"),
    "optimizer.params.lr": ("number",),
    "optimizer.params.betas": ("array",),
    "optimizer.params.eps": ("number",),
    "optimizer.params.weight_decay": ("number",),
    "optimizer.params.momentum": ("number",),
    "scheduler.params.min_lr": ("number",),
    "scheduler.params.warmup_steps": ("number",),
    "scheduler.params.total_tokens": ("number",),
}


def allows(path: KeyPath, rule: dict[str, Any], kind: str, value: Any) -> bool:
    """Whether the type of `value` is right at `path`: what its number is, is another test's matter."""
    if "enum" in rule:
        return any(value == choice and type(value) is type(choice) for choice in rule["enum"])
    types = rule.get("types") or UNRULED[".".join(path)]
    if kind == "number" and "integer" in types:
        return isinstance(value, int) or value.is_integer()
    return kind in types


def schema_keys() -> Iterator[tuple[Values, KeyPath, dict[str, Any]]]:
    """Every key of the schema: the values that it goes into, its path and its rule."""

    def below(rules: dict[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
        for key, rule in rules.items():
            if key not in CLAIMED or path:
                yield (*path, key), rule
                yield from below(rule.get("keys", {}), (*path, key))

    base = SHIPPED["zero3_fp32"]
    for path, rule in below(SCHEMA.keys, ()):
        values = base
        if path[:2] == ("zero_optimization", "zenflow"):  # it works with an offloaded optimizer only
            values = changed(base, {"zero_optimization.offload_optimizer": {"device": "cpu"}})
        yield values, path, rule
    for key, rule in SGD_PARAMS.items():
        yield changed(SHIPPED["zero0_fp32"], {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}), ("optimizer", "params", key), rule
    for key, rule in ADAM_PARAMS.items():
        yield SHIPPED["zero1_bf16"], ("optimizer", "params", key), rule
    for kind, rules in SCHEDULES.items():
        for key, rule in rules.items():
            yield changed(base, {"scheduler": {"type": kind, "params": {}}}), ("scheduler", "params", key), rule
    for key, rule in TOKEN_SCHEDULE_PARAMS.items():
        yield base, ("scheduler", "params", key), rule


def test_a_value_of_the_wrong_type_is_refused(outcome):
    found, mutants = troubles(), 0
    for values, path, rule in schema_keys():
        key = ".".join(path)
        for kind, candidates in KINDS.items():
            for value in candidates:
                if not allows(path, rule, kind, value) and value != "auto":
                    result = outcome(changed(values, {key: value}))
                    tell(found, f"{key} = {json.dumps(value)}", result, path)
                    mutants += 1
    assert mutants > 1000
    judge(found)


def test_a_value_of_the_right_type_is_never_a_traceback(outcome):
    """The numbers and strings that the types allow may be refused or not; either is said, and nothing else happens."""
    crashes = []
    for values, path, rule in schema_keys():
        key = ".".join(path)
        for kind, candidates in KINDS.items():
            for value in (value for value in candidates if allows(path, rule, kind, value)):
                result = outcome(changed(values, {key: value}))
                if result.crash:
                    crashes.append(f"{key} = {json.dumps(value)}: {result.crash}")
    judge({"crashed": crashes})


def test_a_section_within_itself_is_refused(outcome):
    found = troubles()
    for key, rule in SCHEMA.keys.items():
        if "keys" in rule and key not in CLAIMED:
            tell(found, f"{key}.{key}", outcome(changed(SHIPPED["zero2_bf16"], {f"{key}.{key}": {}})), (key, key))
    judge(found)


NESTED = {
    "optimizer.params.betas": [[0.9], [0.9, 0.95, 0.99], [0.9, "0.95"], [[0.9, 0.95]], [0.9, None], [True, 0.95], {"0": 0.9}],
    "comms_logger.prof_ops": [[1], [None], ["all_reduce", 3], [["all_reduce"]]],
    "data_types.keep_in_fp32_modules": [[1], "norm", [None]],
    "zero_optimization.leaf_module": [{"classes": "Block"}, {"names": [1]}, {"clases": []}, []],
    "zero_optimization.offload_optimizer.nvme_path": [5, True, [], {}],
    "timers": [{"throughput": 5}, {"throughput": {"enabled": 3}}, {"throughput": {"enable": True}}, {"troughput": {}}],
    "checkpoint.parallel_write": [{"pipeline_stage": "yes"}, {"pipeline_stag": True}, {"pipeline_stage": 3}],
}


@pytest.mark.parametrize("key", NESTED)
def test_what_is_inside_a_list_or_a_free_object_is_checked(key, outcome):
    found = troubles()
    for value in NESTED[key]:
        result = outcome(changed(SHIPPED["zero3_bf16"], {key: value}))
        what = f"{key} = {json.dumps(value)}"
        if result.crash:
            found["crashed"].append(f"{what}: {result.crash}")
        elif not result.faults:
            found["accepted"].append(what)
        elif not any(f"'{key}" in fault for fault in result.faults):  # the key, or what is below it
            found["not named"].append(f"{what}: {result.faults}")
    judge(found)


# --- numbers out of range -----------------------------------------------------------------------------------------------------------

NOT_FINITE = [float("nan"), float("inf"), float("-inf"), 1e30, -1e30]
HUGE = 2**62  # as large as a number of the file may be
OFFLOADED = {"zero_optimization.offload_optimizer": {"device": "cpu"}}
ZENFLOW = {**OFFLOADED, "zero_optimization.zenflow": {"topk_ratio": 0.1}}

#: Dotted key -> (file, what must stand beside it, wrong numbers). What is in range is DeepSpeed's or torch's own check, or arithmetic.
RANGES: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
    "train_batch_size": ("zero2_fp32", {}, [0, -1, -16, 1.5, HUGE]),
    "train_micro_batch_size_per_gpu": ("zero2_fp32", {}, [0, -1, 0.5, HUGE]),
    "gradient_accumulation_steps": ("zero2_fp32", {}, [0, -1, 2.5, HUGE]),
    "gradient_clipping": ("zero2_fp32", {}, [-1, -1e-9]),
    "gradient_predivide_factor": ("zero1_fp32", {}, [0, -1]),
    "steps_per_print": ("zero2_fp32", {}, [0, -1, 0.5]),
    "vocabulary_size": ("zero2_fp32", {}, [0, -1, 0.5]),
    "sequence_parallel_size": ("zero2_fp32", {}, [0, -1, 1.5]),
    "optimizer.params.lr": ("zero2_fp32", {}, [0, -1e-3, 101, HUGE]),
    "optimizer.params.betas": ("zero2_fp32", {}, [[-0.1, 0.95], [0.9, 1], [1.0, 0.95], [0.9, 95], [9, 0.95]]),
    "optimizer.params.eps": ("zero2_fp32", {}, [0, -1e-8, 2]),
    "optimizer.params.weight_decay": ("zero2_fp32", {}, [-0.1, 10]),
    "scheduler.params.min_lr": ("zero2_fp32", {}, [-1e-5, 99, 1e6]),
    "scheduler.params.warmup_steps": ("zero2_fp32", {}, [-1, 0.5, 10**9, HUGE]),
    "scheduler.params.total_tokens": ("zero2_fp32", {}, [0, -1, 0.5, HUGE]),
    "zero_optimization.stage": ("zero2_fp32", {}, [-1, 4, 1.5, 100]),
    "zero_optimization.reduce_bucket_size": ("zero2_fp32", {}, [0, -1, 0.5]),
    "zero_optimization.allgather_bucket_size": ("zero2_fp32", {}, [0, -2, 0.5]),
    "zero_optimization.sub_group_size": ("zero3_fp32", {}, [-1, 0.5]),
    "zero_optimization.stage3_prefetch_bucket_size": ("zero3_fp32", {}, [-1, 0.5]),
    "zero_optimization.stage3_param_persistence_threshold": ("zero3_fp32", {}, [-1, 0.5]),
    "zero_optimization.stage3_model_persistence_threshold": ("zero3_fp32", {}, [-1, 0.5]),
    "zero_optimization.stage3_max_live_parameters": ("zero3_fp32", {}, [-1, 0.5]),
    "zero_optimization.stage3_max_reuse_distance": ("zero3_fp32", {}, [-1, 0.5]),
    "zero_optimization.zero_hpz_partition_size": ("zero3_fp32", {}, [-1, 0.5]),
    "zero_optimization.offload_optimizer.ratio": ("zero3_fp32", OFFLOADED, [-0.1, 1.1, HUGE]),
    "zero_optimization.offload_optimizer.buffer_count": ("zero3_fp32", OFFLOADED, [-1, 0.5]),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": ("zero3_fp32", OFFLOADED, [-0.1, 80]),
    "zero_optimization.offload_param.buffer_count": ("zero3_fp32", {"zero_optimization.offload_param": {"device": "cpu"}}, [-1, 0.5]),
    "zero_optimization.offload_param.buffer_size": ("zero3_fp32", {"zero_optimization.offload_param": {"device": "cpu"}}, [-1, 0.5]),
    "zero_optimization.offload_param.max_in_cpu": ("zero3_fp32", {"zero_optimization.offload_param": {"device": "cpu"}}, [-1, 0.5]),
    "zero_optimization.zenflow.topk_ratio": ("zero2_fp32", ZENFLOW, [0, 1, -0.1, 1.5]),
    "zero_optimization.zenflow.update_interval": ("zero2_fp32", ZENFLOW, [0, -1, "often"]),
    "zero_optimization.zenflow.select_interval": ("zero2_fp32", ZENFLOW, [0, -1, "often"]),
    "zero_optimization.zenflow.full_warm_up_rounds": ("zero2_fp32", ZENFLOW, [-1, 0.5]),
    "fp16.loss_scale": ("zero2_fp16", {}, [-1, 1e12]),  # fp16 ends at 65504
    "fp16.initial_scale_power": ("zero2_fp16", {}, [-1, 33, 1.5, 1000]),
    "fp16.loss_scale_window": ("zero2_fp16", {}, [0, -1, 0.5]),
    "fp16.hysteresis": ("zero2_fp16", {}, [0, -1, 0.5]),
    "fp16.min_loss_scale": ("zero2_fp16", {}, [0, -1, 0.5, 2**40]),
    "flops_profiler.profile_step": ("zero2_fp32", {}, [-1, 0.5]),
    "flops_profiler.module_depth": ("zero2_fp32", {}, [-5, 0.5]),  # -1 is all
    "flops_profiler.top_modules": ("zero2_fp32", {}, [-1, 0.5]),
    "flops_profiler.recompute_fwd_factor": ("zero2_fp32", {}, [-1]),
    "aio.block_size": ("zero2_fp32", {}, [0, -1, 0.5]),
    "aio.queue_depth": ("zero2_fp32", {}, [0, -1, 0.5]),
    "aio.intra_op_parallelism": ("zero2_fp32", {}, [0, -1, 0.5]),
    "comet.samples_log_interval": ("zero2_fp32", {}, [0, -1]),
}
#: Those of DeepSpeed's schedules and of torch's optimizers: (type, what must stand beside it) -> parameter -> wrong numbers.
PARAM_RANGES: list[tuple[dict[str, Any], dict[str, list[Any]]]] = [
    (
        scheduler("WarmupLR"),
        {"warmup_min_lr": [-1e-3, 1e3], "warmup_max_lr": [-1, 0, 1e3], "warmup_num_steps": [0, -1, 1.5, HUGE]},
    ),
    (
        scheduler("WarmupDecayLR"),
        {"total_num_steps": [0, -1, 1.5], "warmup_max_lr": [-1, 0], "warmup_num_steps": [0, -1, 1.5, HUGE]},
    ),
    (
        scheduler("WarmupCosineLR"),
        {
            "total_num_steps": [0, -1, 1.5],
            "warmup_num_steps": [0, -1, 1.5, HUGE],
            "warmup_min_ratio": [-1, 5.0],  # of the peak: the rate went to five times it, and below 0
            "cos_min_ratio": [-2, 7.0],
        },
    ),
    (optimizer("SGD"), {"momentum": [-1, 1, 1.5], "weight_decay": [-1, 5], "lr": [0, -1]}),
]


def wrong_numbers() -> Iterator[tuple[Values, KeyPath, Any]]:
    """Values, the path to set in them, and a number that is out of range there."""
    for key, (file, beside, numbers) in RANGES.items():
        for number in numbers:
            yield changed(SHIPPED[file], beside), tuple(key.split(".")), number
    for beside, params in PARAM_RANGES:
        section = next(iter(beside))
        for name, numbers in params.items():
            for number in numbers:
                yield changed(SHIPPED["zero0_fp32"], beside), (section, "params", name), number


def test_a_number_out_of_range_is_refused(outcome):
    found = troubles()
    for values, path, number in wrong_numbers():
        kind = values.get(path[0], {}).get("type", "") if len(path) == 3 else ""
        tell(found, f"{kind} {'.'.join(path)} = {json.dumps(number)}", outcome(changed(values, {".".join(path): number})), path)
    judge(found)


def test_no_number_is_infinite_or_nan(outcome):
    """Python's reader takes NaN, Infinity and 1e999 from a file; they are refused for every number of the shipped files and the schema."""
    found = troubles()
    for values, path, rule in schema_keys():
        if {"integer", "number"} & set(rule.get("types") or UNRULED.get(".".join(path), ())):
            for number in NOT_FINITE:
                result = outcome(changed(values, {".".join(path): number}))
                tell(found, f"{'.'.join(path)} = {json.dumps(number)}", result, path)
    judge(found)


# --- removed keys -------------------------------------------------------------------------------------------------------------------

#: Each key that DeepSpeed 0.19.8 has removed, as its own documents still show it.
REMOVED: dict[str, Any] = {
    "amp": {"enabled": True, "opt_level": "O1"},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}, "different_groups": {}}},
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 1024,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 15000, "difficulty_step": 8},
    },
    "eigenvalue": {"enabled": True, "verbose": True, "max_iter": 50, "tol": 1e-2, "layer_name": "bert.encoder.layer", "layer_num": 12},
    "elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "min_gpus": 1, "max_gpus": 10000},
    "graph_harvesting": True,
    "nebula": {"enabled": True, "persistent_storage_path": "/data", "persistent_time_interval": 100},
    "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001},
    "quantize_training": {"enabled": True, "quantize_verbose": True, "quantize_bits": {"start_bits": 16, "target_bits": 8}},
    "sparse_attention": {"mode": "fixed", "block": 16, "num_local_blocks": 4, "attention": "bidirectional"},
    "sparse_gradients": True,
    "zero_optimization.mics_hierarchical_params_gather": True,
    "zero_optimization.mics_shard_size": 2,
    "zero_optimization.zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
}
GONE = {key: value for key, value in REMOVED.items() if key not in CLAIMED}


def test_every_removed_key_is_here():
    assert set(REMOVED) == set(SCHEMA.removed)


@pytest.mark.parametrize("key", GONE)
def test_a_removed_key_is_refused_with_what_to_write_instead(key, outcome):
    result = outcome(changed(SHIPPED["zero3_bf16"], {key: GONE[key]}))
    assert result.crash is None
    assert len(result.faults) == 1, result.faults
    (fault,) = result.names(tuple(key.split("."))) or ["not named"]
    assert "no longer in DeepSpeed" in fault and ("remove it" in fault or "use " in fault), fault
    # What it sends the reader to must not be refused in its turn.
    for section in UNDRIVEN - CLAIMED:
        assert not re.search(rf"(?<![\w.]){section}\b", fault), f"{section} is refused too: {fault}"


def test_removed_keys_are_all_named_at_once(outcome):
    result = outcome(changed(SHIPPED["zero3_bf16"], GONE))
    assert result.crash is None
    assert [key for key in GONE if len(result.names(tuple(key.split(".")))) != 1] == []
    assert len(result.faults) == len(GONE)


# --- impossible pairs ---------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Two or more values, each right alone, that cannot be right together; a fault must name one of `paths`."""

    file: str
    changes: dict[str, Any]
    paths: tuple[str, ...]
    why: str
    flags: tuple[str, ...] = ()
    ranks: int = 2


def pair(file: str, changes: dict[str, Any], paths: str, why: str, *flags: str, ranks: int = 2) -> Pair:
    return Pair(file, changes, tuple(paths.split()), why, flags, ranks)


ZERO = "zero_optimization"
MASTER16, MASTER_BF16 = "fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads"
HALF = {"device": "cpu", "ratio": 0.5}
#: What DeepSpeed 0.19.8 makes of each: an assertion's line, "no word" where it trains something else than the file says. Paths are below
#: deepspeed/runtime. Tried through launch/pretrain.py on two ranks of a CPU; pairs.md has the figures.
PAIRS: dict[str, Pair] = {
    # precision
    "fp16 and bf16": pair("zero1_bf16", {"fp16": {"enabled": True}}, "fp16.enabled bf16.enabled", "config.py:511"),
    "minimum loss scale above the initial one": pair(
        "zero1_fp16",
        {"fp16.min_loss_scale": 2**17},
        "fp16.min_loss_scale fp16.initial_scale_power",
        "no word: the scale grows by overflows",
    ),
    "fp16 master weights at stage 0": pair("zero0_fp16", {MASTER16: True}, MASTER16, "config.py:703"),
    "bf16 master weights at stage 0": pair("zero0_bf16", {MASTER_BF16: True}, MASTER_BF16, "config.py:707"),
    "fp16 master weights without offload": pair("zero1_fp16", {MASTER16: True}, MASTER16, "zero/stage_1_and_2.py:332"),
    "fp16 master weights": pair("zero1_fp16", {MASTER16: True, **OFFLOADED}, MASTER16, "no word: a resume sets Adam's variance to 0"),
    "bf16 master weights without offload": pair("zero3_bf16", {MASTER_BF16: True}, MASTER_BF16, "zero/stage3.py:300"),
    "bf16 master weights with fp32 moments": pair(
        "zero2_bf16", {MASTER_BF16: True, **OFFLOADED}, MASTER_BF16, "no word: a resume rounds the moments to bf16"
    ),
    **{
        f"bf16 master weights in {precision}": pair(
            f"zero2_{precision}",
            {MASTER_BF16: True, "bf16.bf16_optimizer_states": True, **OFFLOADED},
            MASTER_BF16,
            "no word: the master weights are rounded",
        )
        for precision in ("fp16", "fp32")
    },
    "buffers in fp32": pair(
        "zero1_bf16",
        {"data_types.keep_in_fp32_modules": ["lm_head"]},
        "data_types.keep_in_fp32_modules",
        "no word: there is no buffer to round",
    ),
    "master weights from rounded ones": pair(
        "zero1_bf16", {f"{ZERO}.load_from_fp32_weights": False}, f"{ZERO}.load_from_fp32_weights", "no word: a resume trains other weights"
    ),
    **{
        f"ranks that load one by one at stage {stage}": pair(
            f"zero{stage}_bf16",
            {f"{ZERO}.pipeline_loading_checkpoint": True},
            f"{ZERO}.pipeline_loading_checkpoint",
            "engine.py:4739, in the resume",
        )
        for stage in (1, 2)
    },
    **{
        f"{key} of fp16 in {precision}": pair(
            f"zero1_{precision}", {key: value}, key, "no word: without a loss scale, small gradients are 0"
        )
        for key, value in (("communication_data_type", "fp16"), ("data_types.grad_accum_dtype", "float16"))
        for precision in ("bf16", "fp32")
    },
    "gradients summed in fp32 at stage 0": pair(
        "zero0_bf16", {"data_types.grad_accum_dtype": "fp32"}, "data_types.grad_accum_dtype", "engine.py:2323"
    ),
    **{
        f"weights of another type in {precision}": pair(
            f"zero1_{precision}", {"data_types.param_dtype": "float16"}, "data_types.param_dtype", "engine.py:1827"
        )
        for precision in ("bf16", "fp32")
    },
    "gradients that are not looked at": pair(
        "zero1_bf16", {"bf16.check_grad_overflow": False}, "bf16.check_grad_overflow", "no word: the weights become NaN"
    ),
    "autocast": pair("zero1_fp32", {"torch_autocast": {"enabled": True}}, "torch_autocast.enabled", "not supported here"),
    "bf16 optimizer states without master weights": pair(
        "zero1_bf16", {"bf16.bf16_optimizer_states": True}, "bf16.bf16_optimizer_states", "config.py:714"
    ),
    "bf16 optimizer states at stage 0": pair(
        "zero0_bf16", {MASTER_BF16: True, "bf16.bf16_optimizer_states": True}, f"bf16.bf16_optimizer_states {MASTER_BF16}", "config.py:711"
    ),
    # gradients
    "prescaled gradients at stage 2": pair("zero2_bf16", {"prescale_gradients": True}, "prescale_gradients", "zero/stage_1_and_2.py:351"),
    "prescaled gradients at stage 3": pair("zero3_bf16", {"prescale_gradients": True}, "prescale_gradients", "zero/stage3.py:396"),
    "predivided gradients at stage 2": pair(
        "zero2_bf16", {"gradient_predivide_factor": 2.0}, "gradient_predivide_factor", "zero/stage_1_and_2.py:350"
    ),
    "predivided gradients at stage 3": pair(
        "zero3_bf16", {"gradient_predivide_factor": 2.0}, "gradient_predivide_factor", "zero/stage3.py:395"
    ),
    "predivided gradients at stage 3 without reduce-scatter": pair(
        "zero3_bf16",
        {"gradient_predivide_factor": 2.0, f"{ZERO}.reduce_scatter": False},
        f"gradient_predivide_factor {ZERO}.reduce_scatter",
        "no word: the gradients are half of the right ones",
    ),
    "summed gradients at stage 3": pair("zero3_bf16", {"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "config.py:696"),
    "no gradient norm, with clipping": pair(
        "zero1_bf16", {f"{ZERO}.compute_grad_norm": False}, f"{ZERO}.compute_grad_norm", "zero/stage_1_and_2.py:213"
    ),
    "no gradient norm at stage 3": pair(
        "zero3_bf16", {f"{ZERO}.compute_grad_norm": False, "gradient_clipping": 0}, f"{ZERO}.compute_grad_norm", "zero/config.py:392"
    ),
    # ZeRO
    "the first ZeRO-1": pair("zero1_bf16", {f"{ZERO}.legacy_stage1": True}, f"{ZERO}.legacy_stage1", "engine.py:2651"),
    **{
        f"{key} at stage {stage}": pair(f"zero{stage}_bf16", {f"{ZERO}.{key}": value}, f"{ZERO}.{key}", "no word, or a CUDA op is missing")
        for key, value in (("zero_quantized_weights", True), ("zero_quantized_gradients", True), ("zero_hpz_partition_size", 2))
        for stage in (0, 1, 2)
    },
    "quantized gradients": pair(
        "zero3_bf16", {f"{ZERO}.zero_quantized_gradients": True}, f"{ZERO}.zero_quantized_gradients", "no word: sums of fp16's bits"
    ),
    "quantized weights that are not trained": pair(
        "zero3_bf16",
        {f"{ZERO}.zero_quantized_nontrainable_weights": True},
        f"{ZERO}.zero_quantized_nontrainable_weights",
        "no word: there are none",
    ),
    "quantized weights in parts that are no multiples of 8": pair(
        "zero3_bf16",
        {f"{ZERO}.zero_quantized_weights": True, "train_batch_size": 64},
        f"{ZERO}.zero_quantized_weights",
        "zero/partition_parameters.py:883",
        ranks=64,
    ),
    "modules too coarse for stage 3": pair(
        "zero3_bf16",
        {f"{ZERO}.stage3_module_granularity_threshold": 10**6},
        f"{ZERO}.stage3_module_granularity_threshold",
        "a RuntimeError in the backward pass: tensors of parameters that were released",
    ),
    # offload
    **{
        f"optimizer on {device} at stage 0": pair(
            "zero0_bf16", {f"{ZERO}.offload_optimizer": {"device": device, "nvme_path": "/tmp"}}, f"{ZERO}.offload_optimizer", "no word"
        )
        for device in ("cpu", "nvme")
    },
    **{
        f"optimizer on nvme at stage {stage}": pair(
            f"zero{stage}_bf16",
            {f"{ZERO}.offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
            f"{ZERO}.offload_optimizer {ZERO}.offload_optimizer.device",
            "no word: it goes to the CPU (zero/stage_1_and_2.py:222)",
        )
        for stage in (1, 2)
    },
    **{
        f"parameters on {device} at stage {stage}": pair(
            f"zero{stage}_bf16", {f"{ZERO}.offload_param": {"device": device, "nvme_path": "/tmp"}}, f"{ZERO}.offload_param", "no word"
        )
        for device in ("cpu", "nvme")
        for stage in (0, 1, 2)
    },
    "optimizer on nvme without a path": pair(
        "zero3_bf16", {f"{ZERO}.offload_optimizer": {"device": "nvme"}}, f"{ZERO}.offload_optimizer", "a TypeError of os.path.join"
    ),
    "parameters on nvme without a path": pair(
        "zero3_bf16", {f"{ZERO}.offload_param": {"device": "nvme"}}, f"{ZERO}.offload_param", "zero/partition_parameters.py:1229"
    ),
    **{
        f"half an optimizer offloaded at stage {stage}": pair(
            f"zero{stage}_bf16", {f"{ZERO}.offload_optimizer": HALF}, f"{ZERO}.offload_optimizer.ratio {ZERO}.stage", "zero/config.py:399"
        )
        for stage in (1, 2)
    },
    "a ratio without a device": pair(
        "zero2_bf16",
        {f"{ZERO}.offload_optimizer": {"device": "none", "ratio": 0.5}},
        f"{ZERO}.offload_optimizer.ratio {ZERO}.stage",
        "zero/config.py:399, which does not look at the device",
    ),
    "super-offload": pair(
        "zero3_bf16",
        {f"{ZERO}.offload_optimizer": {"device": "cpu", "super_offload": True}},
        f"{ZERO}.offload_optimizer.super_offload",
        "no word: a resume starts Adam again",
    ),
    "SGD offloaded": pair(
        "zero2_bf16", {**optimizer("SGD"), f"{ZERO}.offload_optimizer": {"device": "cpu"}}, "optimizer.type", "engine.py:2346"
    ),
    "torch's Adam offloaded, with bias correction": pair(
        "zero1_bf16",
        {
            "optimizer.params.torch_adam": True,
            "optimizer.params.bias_correction": True,
            f"{ZERO}.offload_optimizer": {"device": "cpu"},
        },
        "optimizer.params.bias_correction",
        "runtime/engine.py:2385",
    ),
    "AMSGrad offloaded": pair(
        "zero1_bf16",
        {"optimizer.params.amsgrad": True, f"{ZERO}.offload_optimizer": {"device": "cpu"}},
        "optimizer.params.amsgrad",
        "ops/adam/cpu_adam.py:108",
    ),
    "zenflow without offload": pair("zero2_bf16", {f"{ZERO}.zenflow": {}}, f"{ZERO}.zenflow", "zenflow/zenflow_stage_1_and_2.py:116"),
    "zenflow with summed gradients": pair(
        "zero2_bf16", {**ZENFLOW, "gradient_allreduce_op": "sum"}, f"gradient_allreduce_op {ZERO}.zenflow", "config.py:698"
    ),
    # checkpoints
    **{
        f"checkpoint.{key}": pair("zero1_bf16", {f"checkpoint.{key}": value}, f"checkpoint.{key}", "a resume does not find all files")
        for key, value in (("use_node_local_storage", True), ("writer", {"type": "FAST"}))
    },
    # the optimizer
    **{
        f"untested SGD at stage {stage}": pair(
            f"zero{stage}_fp32", {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}, "optimizer.type", "engine.py:2299"
        )
        for stage in (1, 2, 3)
    },
    "AdamW that is not AdamW": pair(
        "zero1_bf16", {"optimizer.params.adam_w_mode": False}, "optimizer.params.adam_w_mode", "engine.py:2490: no word, AdamW all the same"
    ),
    "clipping among the optimizer's parameters": pair(
        "zero1_bf16", {"optimizer.params.max_grad_norm": 1.0}, "optimizer.params.max_grad_norm", "engine.py:2481"
    ),
    # the schedule
    "warm-up that ends below where it starts": pair(
        "zero1_bf16",
        scheduler("WarmupLR", warmup_min_lr=1e-2, warmup_max_lr=1e-3, warmup_num_steps=5),
        "scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr",
        "no word: the rate falls",
    ),
    "warm-up that starts above the peak": pair(
        "zero1_bf16",
        {**scheduler("WarmupLR", warmup_min_lr=1e-2, warmup_num_steps=5), "optimizer.params.lr": 1e-3},
        "scheduler.params.warmup_min_lr",
        "no word: the rate falls",
    ),
    **{
        f"{kind} longer than the run": pair(
            "zero1_bf16", scheduler(kind, warmup_num_steps=40), "scheduler.params.warmup_num_steps", "no word: no peak", "--steps", "20"
        )
        for kind in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
    },
    "our warm-up longer than the run": pair(
        "zero1_bf16", {"scheduler.params.warmup_steps": 40}, "scheduler.params.warmup_steps", "no peak", "--steps", "20"
    ),
    **{
        f"{kind} that ends before its warm-up": pair(
            "zero1_bf16",
            scheduler(kind, warmup_num_steps=15, total_num_steps=10),
            "scheduler.params.total_num_steps scheduler.params.warmup_num_steps",
            "lr_schedules.py: a warning, then a rate of 0",
            *("--tokens", "163840", "--global_batch_size", "16", "--seq_len", "1024"),  # 10 steps
        )
        for kind in ("WarmupDecayLR", "WarmupCosineLR")
    },
    **{
        f"{kind} that ends {when} the run": pair(
            "zero1_bf16",
            scheduler(kind, warmup_num_steps=2, total_num_steps=total),
            "scheduler.params.total_num_steps",
            "no word: a rate of 0 from there on, or none that falls",
            *("--steps", "20"),
        )
        for kind in ("WarmupDecayLR", "WarmupCosineLR")
        for when, total in (("before", 10), ("after", 10**6))
    },
    "a schedule of the preset's steps": pair(
        "zero1_bf16",
        scheduler("WarmupDecayLR", warmup_num_steps=2, total_num_steps=10**6),
        "scheduler.params.total_num_steps",
        "no word: the run is as long as the preset says",
    ),
    "a minimum above the peak": pair(
        "zero1_bf16",
        {"scheduler.params.min_lr": 1e-2, "optimizer.params.lr": 1e-3},
        "scheduler.params.min_lr optimizer.params.lr",
        "arithmetic",
    ),
    # the batch: what does not multiply is named by the keys that the user wrote
    "a batch that the ranks do not share": pair("zero1_bf16", {"train_batch_size": 9}, "train_batch_size", "config.py:602"),
    "a batch that the micro-batch does not divide": pair(
        "zero1_bf16",
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 3},
        "train_batch_size train_micro_batch_size_per_gpu",
        "config.py:602",
    ),
    "a batch that the accumulation does not divide": pair(
        "zero1_bf16",
        {"train_batch_size": 16, "gradient_accumulation_steps": 3},
        "train_batch_size gradient_accumulation_steps",
        "config.py:602",
    ),
    "three sizes that do not multiply": pair(
        "zero1_bf16",
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8},
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps",
        "config.py:602",
    ),
    "more accumulation than sequences": pair(
        "zero1_bf16",
        {"train_batch_size": 4, "gradient_accumulation_steps": 8},
        "train_batch_size gradient_accumulation_steps",
        "config.py:596: a micro-batch of 0",
    ),
    "a batch and a flag": pair("zero1_bf16", {"train_batch_size": 16}, "train_batch_size", "two truths", "--global_batch_size", "32"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_an_impossible_pair_is_refused(name, outcome):
    file, changes, paths, why, flags, ranks = PAIRS[name]
    result = outcome(changed(SHIPPED[file], changes), *flags, ranks=ranks)
    assert result.crash is None, (why, result.crash)
    assert result.faults, f"accepted, though: {why}"
    named_faults = {fault for path in paths for fault in result.names(tuple(path.split(".")))}
    assert set(result.faults) == named_faults, (why, result.faults)  # one of them is named, and nothing else is
