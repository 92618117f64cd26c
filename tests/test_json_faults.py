"""Every kind of fault in a DeepSpeed JSON ends in one line: its place, what is wrong, and what is allowed or the fix.

python -m pytest tests/test_json_faults.py
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.config.deepspeed_schema import WITHOUT_EFFECT, deepspeed_schema
from launch.config.run_config import resolve
from launch.errors import UsageError
from recipes.registry import technique_classes

pytestmark = pytest.mark.usefixtures("fixed_nano")

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "ds_configs").glob("*.json"))}
SCHEMA = deepspeed_schema()
OURS = {cls.declaration.section for cls in technique_classes()}
OFFLOAD = 'zero_optimization.offload_optimizer.device="cpu"'
NVME = 'zero3_bf16 zero_optimization.offload_param={"device":"nvme","nvme_path":"auto"}'
SGD = 'optimizer.params={} optimizer.type="SGD"'
DECAY = 'scheduler={"type":"WarmupDecayLR","params":{"total_num_steps":500}}'

#: What is written into a shipped JSON (zero1_bf16 if none is named), the wrong key last, and flags -> the beginning of the message.
FAULTS = [
    # a misspelt key
    ("zero_optimisation={}", "unknown key, which DeepSpeed would ignore; did you mean 'zero_optimization'?"),
    ("zero_optimization.stag=1", "unknown key; did you mean 'stage'?"),
    ('zero_optimization.offload_optimizer.devcie="cpu"', "unknown key; did you mean 'device'?"),
    ("optimizer.parms={}", "unknown key; did you mean 'params'?"),
    ("optimizer.params.beta=[0,0]", "unknown key; did you mean 'betas'?"),
    ("optimizer.params.wd=0.1", "unknown key; allowed are adam_w_mode, amsgrad, betas, bias_correction, eps, lr, torch_adam, weight_decay"),
    ("scheduler.params.warmup_step=3", "unknown key; did you mean 'warmup_steps'?"),
    ("checkpoint.parallel_write.pipeline_stag=true", "unknown key; did you mean 'pipeline_stage'?"),
    ("curriculum_learning.enable=true", "unknown key; did you mean 'enabled'?"),
    ("nonsense=1", "unknown key, which DeepSpeed would ignore; remove it"),
    # a key in the wrong section
    ("stage=1", "unknown key, which DeepSpeed would ignore; it belongs to 'zero_optimization.stage'"),
    ("lr=0.1", "unknown key, which DeepSpeed would ignore; it belongs to 'optimizer.params.lr'"),
    ("optimizer.weight_decay=0.1", "unknown key; it belongs to 'optimizer.params.weight_decay'"),
    ("optimizer.params.max_grad_norm=1", "unknown key; it belongs to 'gradient_clipping'"),
    ("partition_activations=true", "unknown key, which DeepSpeed would ignore; it belongs to"),
    ("zero_optimization.zero_optimization={}", "unknown key; it belongs to 'zero_optimization'"),
    ('data_efficiency.data_routing.random_ltd={"enabled":true}', "is read at the top level only; move it to 'random_ltd'"),
    # an old name
    ("aio.thread_count=2", "is no longer in DeepSpeed 0.19.8; remove it. Write 'intra_op_parallelism' instead."),
    ("zero_optimization.cpu_offload_use_pin_memory=false", "is no longer in DeepSpeed 0.19.8; remove it. Write 'pin_memory' in"),
    # a misspelt choice
    ('optimizer.type="AdmaW"', "is \"AdmaW\"; did you mean 'AdamW'?; there are Adam, AdamW, SGD, Lamb, Muon, OneBitAdam, OneBitLamb,"),
    ('optimizer.type="OneBitLam"', "is \"OneBitLam\"; did you mean 'OneBitLamb'?; there are Adam, AdamW, SGD, Lamb, Muon, OneBitAdam,"),
    ('scheduler.type="WarmupCosine"', "is \"WarmupCosine\"; did you mean 'WarmupCosineLR'?; there are WarmupCosineTokens,"),
    ('scheduler.type="OneCycle"', 'is "OneCycle"; there are WarmupCosineTokens, WarmupLinearTokens, WarmupStableDecayTokens, WarmupLR,'),
    ('zero_optimization.offload_optimizer.device="NVMe"', 'is "NVMe"; write one of "none", "cpu", "nvme"'),
    ('communication_data_type="fp23"', 'is "fp23"; write one of "fp32", "fp16", "bf16", null'),
    # another type
    ('train_batch_size="16"', 'is "16"; write a whole number, or "auto"'),
    ("gradient_accumulation_steps=true", 'is true; write a whole number, or "auto"'),
    ("bf16.enabled=1", 'is 1; write true or false, or "auto"'),
    ("bf16=[]", "is []; write an object with keys such as enabled, immediate_grad_update, check_grad_overflow"),
    ("optimizer.type=null", "is null; write a string"),
    ("optimizer.params.betas=[0.9]", "is [0.9]; write two numbers from 0 to below 1"),
    ("optimizer.params.betas=[true,0.95]", "is [true, 0.95]; write two numbers from 0 to below 1"),
    ("comms_logger.prof_ops=[1]", "is [1]; write a list of strings"),
    ('zero_optimization.leaf_module.names="Block"', 'is "Block"; write a list'),
    ('scheduler={"type":"WarmupLR"} scheduler.params=null', "is null; write an object"),
    ('zero_optimization.stage="auto"', '"auto" has no meaning here; write a value or leave the key out'),
    ('wall_clock_breakdown="auto"', '"auto" has no meaning here; write a value or leave the key out'),
    # another stage
    ("zero2_bf16 zero_optimization.pipeline_loading_checkpoint=true", "works at stage 3 only, and this JSON is at stage 2; leave it out,"),
    ("zero2_bf16 zero_optimization.zero_quantized_weights=true", "works at stage 3 only, and this JSON is at stage 2; leave it out, or"),
    ('zero0_bf16 data_types.grad_accum_dtype="fp32"', "works at stage 1, 2 or 3 only, and this JSON is at stage 0; leave it out, or"),
    ("zero3_bf16 prescale_gradients=true", "works at stage 0 or 1 only, and this JSON is at stage 3; leave it out, or change the stage"),
    ("zero2_bf16 gradient_predivide_factor=0.5", "works at stage 0 or 1 only, and this JSON is at stage 2; leave it out, or change the"),
    ('zero0_bf16 zero_optimization.offload_optimizer={"device":"cpu"}', "cpu offload works at stage 1, 2 or 3, and this JSON is at stage"),
    ('zero2_bf16 zero_optimization.offload_optimizer={"device":"nvme"}', "nvme offload works at stage 3, and this JSON is at stage 2"),
    ('zero_optimization.offload_param={"device":"cpu"}', "cpu offload works at stage 3, and this JSON is at stage 1; change one of them"),
    ('zero3_bf16 zero_optimization.offload_param={"device":"nvme"}', 'device "nvme" needs "nvme_path": a folder on the drive, or "auto"'),
    # what trains something else, or fails later
    ("zero2_bf16 zero_optimization.zenflow={}", "gives wrong losses, or NaN, from the first step on (DeepSpeed 0.19.8, measured); leave"),
    ("zero3_bf16 zero_optimization.zero_quantized_gradients=true", "gives wrong gradients over several hosts in DeepSpeed 0.19.8; leave"),
    ("zero3_bf16 zero_optimization.stage3_module_granularity_threshold=1", "releases parameters that the backward pass still needs;"),
    ("zero3_bf16 zero_optimization.offload_optimizer.super_offload=true", "loses Adam's moments on a resume in DeepSpeed 0.19.8; leave"),
    ("zero_optimization.elastic_checkpoint=true", "writes checkpoints that DeepSpeed 0.19.8 cannot load; a resume may change the ranks;"),
    ("zero_optimization.compute_grad_norm=false", "is false, but every step clips the gradients by their norm and logs it; leave it out"),
    ("zero_optimization.load_from_fp32_weights=false", "is false, so a resume would round the master weights; leave it out"),
    ("bf16.check_grad_overflow=false", "is false, so a non-finite gradient would corrupt the weights; leave it out"),
    ('gradient_allreduce_op="sum"', 'is "sum", so training would depend on the number of ranks; leave it out'),
    ("managed_gradient_accumulation=false", "is false, but the loop steps the engine once per micro-batch; leave it out"),
    ("torch_autocast.enabled=true", "is not supported: enable 'bf16', which keeps fp32 master weights; leave it out"),
    ('checkpoint.writer={"type":"FAST"}', "is not supported: a checkpoint must be complete when the engine returns; leave it out"),
    ("checkpoint.use_node_local_storage=true", "spreads a checkpoint over the hosts, but a resume reads all of its files; leave it out"),
    ('data_types.keep_in_fp32_modules=["lm_head"]', "has no effect here: it is for buffers, and the model has none; leave it out"),
    ("zero1_fp16 fp16.fp16_master_weights_and_grads=true", "rounds Adam's moments on a resume in DeepSpeed 0.19.8; leave it out"),
    ("compile.deepcompile=true", 'is not supported: "fused_kernels": "auto" compiles the blocks; leave it out'),
    ('weight_quantization={"quantized_initialization":{"num_bits":4}}', "is for weights that are not trained, and this project trains"),
    # ranks that share more than the data
    ("expert_parallel.enabled=true", "is for ranks that share a model, and these do not"),
    ("mesh_param=[4,2]", 'is not supported; "sequence_parallel_size" alone gives the slices of a sequence to several ranks'),
    ("pipeline.stages=2", "is for ranks that share a model, and these do not"),
    ("sequence_parallel_size=3", "is 3, which does not divide the run's 2 ranks; write a divisor, or start a multiple of 3 ranks"),
    ("tensor_parallel.autotp_size=4", "is for ranks that share a model, and these do not"),
    ("tensor_parallel.tp.tp_size=2", "is for ranks that share a model, and these do not"),
    ("data_parallel_size=4", "is not 2, the number of ranks that read different rows; leave it out"),
    # two values that do not go together
    ("fp16.enabled=true bf16.enabled=true", "DeepSpeed refuses this: bfloat16 and fp16 modes cannot be simultaneously enabled"),
    ("zero2_bf16 zero_optimization.offload_optimizer.ratio=0.0 zero_optimization.stage=2", "DeepSpeed refuses this: Partial"),
    (f"zero3_bf16 {OFFLOAD} zero_optimization.offload_optimizer.ratio=0.3", "is not 1: the weights that stay on the GPU do not follow"),
    ("zero2_fp16 bf16.bf16_master_weights_and_grads=true", "is for a run in bf16, and this run is in fp16; leave it out"),
    ("zero2_bf16 bf16.bf16_master_weights_and_grads=true", "rounds Adam's moments on a resume in DeepSpeed 0.19.8; add"),
    ("bf16.bf16_optimizer_states=true", "DeepSpeed refuses this: bf16_optimizer_states requires bf16_master_weights_and_grads to be"),
    ("zero1_fp16 fp16.min_loss_scale=131072", "is above the initial scale, 2^initial_scale_power; lower it, or raise"),
    ('communication_data_type="fp16"', 'is fp16 without its loss scale, so that small gradients vanish; write "fp32"'),
    ('zero1_fp32 data_types.param_dtype="float16"', "is not the type of the run, which is in fp32; leave it out"),
    (f"zero2_fp32 {SGD}", 'is SGD, which DeepSpeed has not tested with ZeRO; write "zero_allow_untested_optimizer": true, or use'),
    (f"zero_allow_untested_optimizer=true {OFFLOAD} {SGD}", "is SGD, which is not available as an offloaded optimizer; use AdamW, or do"),
    ("optimizer.params.adam_w_mode=false", 'is false, which turns AdamW into Adam; write "type": "Adam", or leave the key out'),
    (f"{OFFLOAD} optimizer.params.amsgrad=true", "is not available with an offloaded optimizer; leave it out, or do not offload it"),
    (f"{OFFLOAD} optimizer.params.torch_adam=true optimizer.params.bias_correction=true", "is unknown to the Adam of torch_adam;"),
    (f"{NVME} zero_optimization.offload_param.buffer_size=1000", "is 1000, but a rank's part of the largest weight has 131,072"),
    (f"{NVME} zero_optimization.offload_param.max_in_cpu=1000", "1,000 of a rank's 1,727,232 weights are kept in host memory"),
    # a schedule that does not fit
    ('scheduler={"type":"WarmupLR","params":{"warmup_max_lr":0.001}} scheduler.params.warmup_min_lr=0.01', "is 0.01, above"),
    ("scheduler.params.warmup_steps=40 --steps=20", "is 40, but the run has 20 steps; lower it (--warmup_steps), or raise --steps"),
    ('scheduler={"type":"WarmupCosineLR"} scheduler.params.warmup_num_steps=40 --steps=20', "is 40: the warm-up is longer than the run"),
    (f"{DECAY} scheduler.params.warmup_num_steps=500 --tokens=2e6", "is 500, and the schedule ends at step 500; lower it"),
    ("scheduler.params.min_lr=0.1", "is 0.1, above the peak learning rate of 0.003; lower it (--min_lr), or raise --lr"),
    # a batch that cannot be shared
    ("train_batch_size=9", "a global batch of 9 sequences cannot be shared evenly by 2 ranks; give 'train_batch_size' 8 or 10"),
    ("train_micro_batch_size_per_gpu=3 train_batch_size=16", "micro-batch 3 x accumulation 2 x 2 ranks = 12 sequences, but the global"),
    ("gradient_accumulation_steps=3 train_batch_size=16", "micro-batch 2 x accumulation 3 x 2 ranks = 12 sequences, but the global batch"),
    ("train_micro_batch_size_per_gpu=4 gradient_accumulation_steps=8 train_batch_size=32", "micro-batch 4 x accumulation 8 x 2 ranks ="),
    ("gradient_accumulation_steps=8 train_batch_size=4", "micro-batch 1 x accumulation 8 x 2 ranks = 16 sequences, but the global batch"),
    # a flag that says something else
    ("train_batch_size=16 --global_batch_size=32", 'is 16, but --global_batch_size is 32; write "auto" in the JSON or leave the flag out'),
    ("train_micro_batch_size_per_gpu=8 --micro_batch_size=4", 'is 8, but --micro_batch_size is 4; write "auto" in the JSON or leave the'),
    ("optimizer.params.lr=0.001 --lr=0.002", 'is 0.001, but --lr is 0.002; write "auto" in the JSON or leave the flag out'),
    ("scheduler.params.min_lr=0 --min_lr=0.001", 'is 0, but --min_lr is 0.001; write "auto" in the JSON or leave the flag out'),
    ("scheduler.params.warmup_steps=3 --warmup_steps=4", 'is 3, but --warmup_steps is 4; write "auto" in the JSON or leave the flag out'),
    ("scheduler.params.total_tokens=4096 --tokens=8192", 'is 4096, but --tokens is 8192; write "auto" in the JSON or leave the flag out'),
    ("scheduler.params.total_tokens=4096 --steps=3", 'is 4096, 2 steps of 2048 tokens, but --steps is 3; write "auto" in the JSON or'),
    ('scheduler={"type":"WarmupLR"} scheduler.params.warmup_max_lr=0.1 --lr=0.2', 'is 0.1, but --lr is 0.2; write "auto" in the JSON'),
    ('scheduler={"type":"WarmupDecayLR"} scheduler.params.total_num_steps=5 --steps=6', "is 5, but --steps is 6; write"),
]
#: Key -> numbers out of range. At stage 3, with `offload_optimizer` and `offload_param`.
RANGES: dict[str, list[float]] = {
    **{f"train_{key}": [0, -1, 1.5, 2**62] for key in ("batch_size", "micro_batch_size_per_gpu")},
    "gradient_accumulation_steps": [0, -1, 1.5, 2**62],
    **{key: [0, -1] for key in ("steps_per_print", "aio.block_size", "fp16.hysteresis", "comet.samples_log_interval")},
    "gradient_clipping": [-1e-9],
    "gradient_predivide_factor": [0, -1],
    "optimizer.params.lr": [0, -1e-3, 101, 2**62],
    "optimizer.params.eps": [0, -1e-8, 2],
    "optimizer.params.weight_decay": [-0.1, 10],
    "scheduler.params.min_lr": [-1e-5, 99],
    "scheduler.params.warmup_steps": [-1, 0.5, 10**9],
    "scheduler.params.total_tokens": [0, -1, 0.5, 2**62],
    "zero_optimization.stage": [-1, 4, 1.5],
    "zero_optimization.reduce_bucket_size": [0, 0.5, 10**12],
    "zero_optimization.stage3_prefetch_bucket_size": [-1, 0.5],
    "zero_optimization.offload_optimizer.ratio": [-0.1, 1.1],
    "zero_optimization.offload_optimizer.buffer_count": [3],
    "zero_optimization.offload_param.buffer_size": [0],
    "fp16.loss_scale": [-1, 1e12],
    "fp16.initial_scale_power": [-1, 33, 1.5],
    "flops_profiler.module_depth": [-2],
    "flops_profiler.recompute_fwd_factor": [-1],
}
#: Right for one type each, and wrong for the others.
VALUES = [None, True, 7, 1.5, "nonsense", [], [1], {}, {"nonsense": 1}]


def render(values: Any, path: str = "", line: int = 1) -> tuple[str, dict[str, int]]:
    """`values` as JSON, a key a line, and the line of each dotted key."""
    if not isinstance(values, dict) or not values:
        return json.dumps(values), {}
    out, lines = "{", {}
    for key, value in values.items():
        out += ("," if lines else "") + "\n"
        here = f"{path}.{key}" if path else key
        lines[here] = line + out.count("\n")
        text, below = render(value, here, lines[here])
        out += f"{json.dumps(key)}: {text}"
        lines |= below
    return out + "\n}", lines


def changed(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`values` with one dotted key set."""
    name, _, below = key.partition(".")
    return {**values, name: changed(values.get(name, {}), below, value) if below else copy.deepcopy(value)}


def walk(rules: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every dotted key of a schema, and its rule."""
    for key, rule in rules.items():
        yield path + key, rule
        yield from walk(rule.get("keys", {}), f"{path}{key}.")


@pytest.fixture
def faults(tmp_path, corpus) -> Callable[..., dict[str, str]]:
    """A function that resolves a JSON on two ranks: dotted key -> message of each fault; that the lines are right is checked."""

    def run(values: dict[str, Any], *flags: str) -> dict[str, str]:
        file = tmp_path / "engine.json"
        text, lines = render(values)
        file.write_text(text)
        try:
            resolve(["--deepspeed_config", str(file), "--data", str(corpus), *flags], ranks=2)
        except UsageError as mistake:
            said = mistake.faults
        else:
            return {}
        found = {}
        for fault in said:
            where, line, key, message = re.fullmatch(r"(.+?): (?:line (\d+): )?'([^']+)':? (.*)", fault).groups()
            assert where == str(file) and line in (None, str(lines.get(key))) and key not in found, said
            assert fault.isprintable() and len(fault) < 900
            found[key] = message
        return found

    return run


@pytest.mark.parametrize(("change", "words"), FAULTS)
def test_a_fault_is_one_line_with_its_place_and_the_fix(change, words, faults):
    base, *more = change.split(" ")
    keys = [word for word in (base, *more) if "=" in word and not word.startswith("--")]
    values = SHIPPED["zero1_bf16" if "=" in base else base]
    for key, _, value in (word.partition("=") for word in keys):
        values = changed(values, key, json.loads(value))
    found = faults(values, *(word for word in more if word.startswith("--")))
    assert list(found) == [keys[-1].partition("=")[0]]
    assert found[keys[-1].partition("=")[0]].startswith(words), found


def test_every_key_refuses_another_type_and_all_are_named_at_once(faults):
    typed = {key: rule for key, rule in walk(SCHEMA.keys) if key not in WITHOUT_EFFECT and not key.startswith(("optimizer.", "scheduler."))}
    assert all(rule.get("types") or "enum" in rule for rule in typed.values())
    leaves = [key for key, rule in typed.items() if "keys" not in rule]
    sections = [key for key, rule in typed.items() if "keys" in rule and "." not in key]
    for keys in (leaves, sections):
        values: dict[str, Any] = {}
        for key in keys:
            values = changed(values, key, "nonsense" if "object" in typed[key].get("types", ()) else {"nonsense": 1})
        assert set(faults(values)) == set(keys)


def test_a_number_out_of_range_is_refused(faults):
    offload = {f"zero_optimization.{key}": {"device": "cpu"} for key in ("offload_optimizer", "offload_param")}
    for place in range(max(map(len, RANGES.values()))):
        wrong = {key: numbers[place] for key, numbers in RANGES.items() if len(numbers) > place}
        values = SHIPPED["zero3_fp32"]
        for key, value in (offload | wrong).items():
            values = changed(values, key, value)
        found = faults(values)
        assert set(found) == set(wrong)
        assert all(f"is {json.dumps(wrong[key])}" in message for key, message in found.items())


def test_a_value_of_the_right_type_is_no_traceback(faults):
    keys = random.Random(0).sample([key for key, _ in walk(SCHEMA.keys)], 20)
    for key in keys:
        for value in VALUES:
            faults(changed(SHIPPED["zero3_fp32"], key, value))


def test_the_removed_keys_are_named_at_once_with_an_advice_that_works(faults):
    gone = [key for key in SCHEMA.removed if key not in OURS]
    values = SHIPPED["zero3_bf16"]
    for key in gone:
        values = changed(values, key, {"enabled": True})
    found = faults(values)
    assert set(found) == set(gone)
    assert all(message.startswith(f"is no longer in DeepSpeed {SCHEMA.version}; remove it. ") for message in found.values())
    assert not [key for key, message in found.items() if any(re.search(rf"\b{other}\b", message) for other in WITHOUT_EFFECT)]


#: What a human makes of a name.
SLIPS: dict[str, Callable[[str, int], str]] = {
    "swapped letters": lambda name, i: name[:i] + name[i + 1 : i + 2] + name[i] + name[i + 2 :],
    "dropped letter": lambda name, i: name[:i] + name[i + 1 :],
    "doubled letter": lambda name, i: name[:i] + name[i] + name[i:],
    "wrong case": lambda name, i: name.upper(),
    "wrong separator": lambda name, i: name.replace("_", "-"),
    "plural": lambda name, i: name + "s",
}


def renamed(values: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    """`values` with the last part of a dotted key called `name`, in the same place."""
    first, _, below = key.partition(".")
    return {
        (name if old == first and not below else old): renamed(value, below, name) if old == first and below else value
        for old, value in values.items()
    }


def test_of_fifty_misspelt_keys_the_right_names_are_suggested(faults):
    chosen = random.Random(1)
    places = [(file, key) for file, values in SHIPPED.items() for key in render(values)[1]]
    unsuggested = []
    for file, key in chosen.sample(places, 50):
        above, _, name = key.rpartition(".")
        slip = SLIPS[chosen.choice(list(SLIPS))](name, chosen.randrange(len(name)))
        if slip == name:
            continue
        found = faults(renamed(SHIPPED[file], key, slip), "--dropout", "0.1")
        wrong = f"{above}.{slip}" if above else slip
        assert list(found) == [wrong]
        if f"did you mean '{name}'?" not in found[wrong]:
            unsuggested.append(f"{key}: {found}")
    assert len(unsuggested) <= 2, unsuggested


def test_a_key_that_is_left_out_has_its_default_or_is_asked_for(faults):
    needed = {"optimizer.type": "must name an optimizer", "scheduler.type": "is missing; there are"}
    for key in render(SHIPPED["zero3_fp16"])[1]:
        values = copy.deepcopy(SHIPPED["zero3_fp16"])
        *sections, last = key.split(".")
        section = values
        for part in sections:
            section = section[part]
        del section[last]
        found = faults(values)
        assert list(found) == [key] * (key in needed)
        assert needed.get(key, "") in found.get(key, "")
