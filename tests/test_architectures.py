"""Architectures are data: flags, presets, run.json, arithmetic, and the folders of transformers that describe one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config.run_config import resolve
from launch.errors import UsageError
from launch.formats.hf_folder import open_hf_folder
from launch.formats.metrics import model_of_run
from model.accounting import block_flops_per_token, flops_per_token, parameter_count
from model.gpt import GPT
from model.hf import hf_form
from model.presets import ARCHITECTURES, FIELDS, PRESETS, SIZES, GPTConfig, ModelShape, shape_of, shared_heads
from tests.commands import run_script
from tests.helpers import config_of, explained, in_transformers, refusal

RUN = ("--deepspeed_config", "ds_configs/zero1_fp32.json", "--data", "no/corpus")
TINY = {"n_layer": 2, "n_head": 4, "d_model": 32, "seq_len": 16}


def test_every_preset_exists_in_every_architecture():
    for preset in PRESETS.values():
        counts = {}
        for architecture in ARCHITECTURES:
            shape = shape_of(preset.shape, architecture, {})
            assert hf_form(shape) == architecture
            assert shape.n_head // shape.n_kv_head <= 4
            short = replace(shape, seq_len=1024)  # learned positions of 131,072 tokens are a tenth of llama3.1-8b
            counts[architecture] = parameter_count(GPTConfig(**vars(short), vocab_size=256), active=True)
        assert max(counts.values()) < 1.2 * min(counts.values()), "the same size, but for the positions, the head and the shared keys"


def test_shared_heads_by_hand():
    assert [shared_heads(n) for n in (1, 2, 4, 6, 9, 12, 16, 25, 32, 40)] == [1, 2, 2, 2, 3, 3, 4, 25, 8, 10]


def test_explain_names_the_origin_of_each_field():
    said = explained(*RUN, "--architecture", "qwen3", "--n_kv_head", "1", "--tied_head", "false")["run"]
    assert said["n_kv_head"] == {"value": 1, "from": "--n_kv_head"}
    assert said["tied_head"] == {"value": False, "from": "--tied_head"}
    assert said["qk_norm"] == {"value": True, "from": "architecture qwen3"}
    assert said["d_model"] == {"value": 256, "from": "preset nano"}
    assert {name: explained(*RUN)["run"][name]["value"] for name in FIELDS} == {
        name: getattr(PRESETS["nano"].shape, name) for name in FIELDS
    }


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--architecture", "mamba"], "--architecture"),
        (["--architecture", "llama", "--n_kv_head", "3"], "n_head must be a multiple of n_kv_head"),
        (["--qk_norm", "yes"], "--qk_norm"),
        (["--architecture", "llama", "--d_head", "5"], "it must be even"),
        (["--rope_theta", "0"], "--rope_theta"),
    ],
)
def test_a_field_of_no_use_is_one_line(flags, said):
    assert said in refusal(*RUN, *flags)


def test_heads_that_do_not_divide_the_width_are_recorded_and_not_exported():
    shape = ModelShape(2, 3, 100, 16, d_head=33)
    assert ModelShape(**shape.recorded()) == shape
    with pytest.raises(ValueError, match=r"the nearest is gpt2, but for --d_head 33$"):
        hf_form(shape)
    with pytest.raises(ValueError, match=r"the nearest is llama, but for --d_head 10$"):
        hf_form(shape_of(PRESETS["nano"].shape, "llama", {"n_head": 3, "d_head": 10}))


def test_run_json_of_a_gpt2_is_as_before_there_were_architectures():
    shape = ModelShape(2, 4, 32, 16)
    assert shape.recorded() == {**TINY, "dropout": 0.0}
    assert tuple(shape.recorded()) == SIZES
    old = {"shape": shape.recorded(), "corpus": {"vocab_size": 100}, "seed": 3}
    assert model_of_run(old) == GPTConfig(2, 4, 32, 16, vocab_size=100, init_seed=3)
    for architecture in ("llama", "qwen3"):
        config = config_of(architecture, TINY, vocab_size=100, init_seed=3)
        recorded = shape_of(shape, architecture, {}).recorded()
        assert model_of_run({**old, "shape": json.loads(json.dumps(recorded))}) == config


def test_flops_by_hand():
    """Per token and block: 6 x its parameters, and 12 x length x the width of all query heads together, however few keys there are."""
    config = config_of("qwen3", {**TINY, "d_head": 16, "n_kv_head": 2, "d_ff": 48}, vocab_size=100)
    block = 32 * (64 + 32 + 32) + 64 * 32 + 2 * 16 + 2 * 32 + 3 * 32 * 48  # queries, keys, values; output; their norms; norms; MLP
    assert block_flops_per_token(config, 16) == 6 * block + 12 * 16 * 64
    assert flops_per_token(config) == 2 * (6 * block + 12 * 16 * 64) + 6 * (100 * 32 + 32)
    untied = config_of("qwen3", {**TINY, "d_head": 16, "n_kv_head": 2, "d_ff": 48, "tied_head": False}, vocab_size=100)
    assert flops_per_token(untied) == flops_per_token(config), "an embedding of its own is a lookup"
    assert parameter_count(untied) == parameter_count(config) + 128 * 32


def test_no_buffer_is_rounded_with_the_weights():
    """In bf16 a table of angles would have 8 bits."""
    model = GPT(config_of("llama", TINY, vocab_size=128)).bfloat16()
    assert not [name for name, _ in model.named_buffers()]
    cos, sin = model.wpe.rotation(torch.tensor([1025]), torch.bfloat16)
    exact = GPT(config_of("llama", TINY, vocab_size=128)).wpe.rotation(torch.tensor([1025]), torch.float32)
    assert torch.equal(cos, exact[0].bfloat16()) and torch.equal(sin, exact[1].bfloat16())


# --- folders of transformers


@pytest.fixture(params=["llama", "qwen3", "mixtral", "qwen3_moe"])
def folder(request, tmp_path) -> Path:
    """A folder as transformers writes it."""
    config = config_of(request.param, {**TINY, "rope_theta": 5e4}, vocab_size=100)
    in_transformers(GPT(config)).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def edit(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))


def faults(folder: Path) -> str:
    with pytest.raises(UsageError) as refused:
        open_hf_folder(folder)
    return "\n".join(refused.value.faults)


def test_a_configuration_of_transformers_is_read(folder):
    found = open_hf_folder(folder)
    architecture = found.content["model_type"]
    assert found.config == config_of(architecture, {**TINY, "rope_theta": 5e4}, vocab_size=100)
    model = GPT(found.config)
    found.fill(model)
    for name, tensor in GPT(found.config).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    edit(folder, rope_parameters="absent", rope_theta=5e4, rope_scaling=None)  # as before transformers 5
    assert open_hf_folder(folder).config == found.config
    edit(folder, rope_theta="absent", rms_norm_eps="absent")
    usual = (1e6, 1e-5) if architecture == "mixtral" else (10_000.0, 1e-6)
    assert (open_hf_folder(folder).config.rope_theta, open_hf_folder(folder).config.norm_eps) == usual


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}, '"rope_type": "llama3"'),
        ({"rope_parameters": "absent", "rope_scaling": {"type": "linear", "factor": 2.0}}, '"type": "linear"'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, '"rope_type": "yarn"'),  # beside the rope_parameters of an exported folder
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", must be "silu"'),
        ({"intermediate_size": 48}, "config.json says ["),
        ({"num_key_value_heads": 4}, "config.json says [32, 32]"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads"),
        ({"hidden_size": "32"}, 'hidden_size is "32", must be a whole number'),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only GPT2LMHeadModel, LlamaForCausalLM, Qwen3ForCausalLM, Mixtral"),
    ],
    ids=str,
)
def test_another_model_is_named(values, said, folder):
    if "intermediate_size" in values and open_hf_folder(folder).content["model_type"] == "qwen3_moe":
        values = {"moe_intermediate_size": values["intermediate_size"]}
    edit(folder, **values)
    assert said in faults(folder)


def test_experts_of_odd_widths_are_exported_with_a_word_on_how_to_load_them(tmp_path):
    from transformers import AutoModelForCausalLM

    model = GPT(config_of("qwen3_moe", {**TINY, "n_expert": 4, "d_expert": 25}, vocab_size=100))
    in_transformers(model).save_pretrained(tmp_path / "in")
    done = run_script("launch/export.py", tmp_path / "in", "--out", tmp_path / "out")
    assert 'load it with experts_implementation="eager"' in done.stdout
    read, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="eager"), torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits[0, -1], model(tokens)[0, -1], atol=1e-5, rtol=1e-5)


QWEN = [({"use_sliding_window": True}, "use_sliding_window is true, must be false"), ({"attention_bias": True}, "attention_bias is true")]
OF_ONE = {
    "llama": [({"mlp_bias": True}, "mlp_bias and attention_bias differ")],
    "qwen3": QWEN,
    "mixtral": [({"sliding_window": 4096}, "sliding_window is 4096, must be null"), ({"router_jitter_noise": 0.1}, "must be 0.0")],
    "qwen3_moe": [
        *QWEN,
        ({"norm_topk_prob": False}, "norm_topk_prob is false, must be true"),
        ({"norm_topk_prob": "absent"}, "norm_topk_prob is false, must be true"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is [0], must be []"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, must be 1"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1: the share of one expert is 1"),
    ],
}


def test_what_only_one_of_them_has_is_refused(folder):
    whole = (folder / "config.json").read_text()
    for values, said in OF_ONE[json.loads(whole)["model_type"]]:
        edit(folder, **values)
        assert said in faults(folder)
        (folder / "config.json").write_text(whole)


def test_a_start_has_the_shape_of_the_folder(folder):
    start = [*RUN, "--init_from", str(folder)]
    model, architecture = open_hf_folder(folder).config, open_hf_folder(folder).content["model_type"]
    for flags in ([], ["--preset", "micro", "--architecture", architecture, "--n_layer", "2"]):
        found, told = resolve([*start, *flags, "--explain"])[0], explained(*start, *flags)["run"]
        assert replace(found.model_config, vocab_size=model.vocab_size, init_seed=0) == model
        assert (told["architecture"]["value"], told["d_model"]["from"]) == (architecture, f"{folder}/config.json")
    assert resolve([*start, "--seq_len", "8", "--explain"])[0].shape.seq_len == 8
    longer = resolve([*start, "--seq_len", "32", "--rope_theta", "2e6", "--explain"])[0].shape
    assert (longer.seq_len, longer.rope_theta) == (32, 2e6)
    other = [*start, "--architecture", "gpt2", "--qk_norm", "false" if model.qk_norm else "true"]
    theirs = f"--architecture {architecture} --qk_norm {str(model.qk_norm).lower()}"
    assert f"its model has {theirs}, and the command --architecture gpt2 --qk_norm" in refusal(*other)
