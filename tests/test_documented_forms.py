"""What DeepSpeed's configuration documentation shows is accepted where DeepSpeed 0.19.8 still has it: each section in its documented form.

The keys and values are those of docs/_pages/config-json.md, beside a shipped JSON; where that page offers a choice, one of each is taken.
A section that means nothing in this training loop is accepted with a word; one that asks for another loop is refused where it is on; one
that needs what this machine lacks says so in `--explain`.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from launch.config.deepspeed_json import value_at
from launch.config.deepspeed_schema import deepspeed_schema
from launch.config.run_config import resolve
from launch.errors import UsageError
from launch.formats.files import read_json
from tests.commands import run_script

ROOT = Path(__file__).resolve().parents[1]
BF16 = read_json(ROOT / "ds_configs" / "zero1_bf16.json")[0]
OFFLOAD = {"pin_memory": False, "nvme_path": "/local_nvme"}
ZERO = {
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_prefetch_bucket_size": 5e8,
    "stage3_param_persistence_threshold": 1e6,
    "sub_group_size": 1e12,
    "elastic_checkpoint": False,
    "stage3_gather_16bit_weights_on_model_save": True,
    "ignore_unused_parameters": True,
    "round_robin_gradients": True,
    "zero_hpz_partition_size": 1,
    "log_trace_cache_warnings": False,
}
FP16 = {"auto_cast": False, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}
MIXED = {"consecutive_hysteresis": False, "min_loss_scale": 1, "fp16_master_weights_and_grads": False}
LTD = {"total_layer_num": 24, "random_ltd_layer_num": 22, "model_type": "decoder", "hidden_state_order": "seq_batch_dim"}
MONITOR = {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"}

SECTIONS = {
    "optimizer": {"optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}},
    "scheduler": {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
    },
    "fp16": {"bf16": {"enabled": False}, "fp16": {"enabled": True, **FP16, **MIXED}},
    "bf16": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    "data_types": {"data_types": {"grad_accum_dtype": "fp32"}},
    **{f"zero_{stage}": {"zero_optimization": {"stage": stage, **ZERO}} for stage in range(4)},
    "zero_quantized": {"zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 4}},
    **{
        f"offload_{device}": {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": device, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9, **OFFLOAD},
                "offload_optimizer": {"device": device, "ratio": 1.0, "buffer_count": 4, "fast_init": False, **OFFLOAD},
            }
        }
        for device in ("cpu", "nvme")
    },
    "aio": {"aio": {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True}},
    "hybrid_engine": {"hybrid_engine": {"enabled": True, "max_out_tokens": 512, "inference_tp_size": 1, "enable_cuda_graph": False}},
    "autotuning": {
        "autotuning": {"enabled": False, "metric": "throughput", "max_train_batch_size": None, "fast": True, "arg_mappings": None},
    },
    "autotuning_on": {"autotuning": {"enabled": True, "results_dir": "results", "tuner_type": "model_based"}},
    "flops_profiler": {"flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "detailed": True, "output_file": None}},
    "activation_checkpointing": {
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": None},
    },
    "activation_checkpointing_on": {"activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4}},
    "data_efficiency": {
        "data_efficiency": {
            "enabled": True,
            "seed": 1234,
            "data_routing": {"enabled": True, "random_ltd": {"enabled": False, **LTD, "random_ltd_schedule": {"min_value": 128}}},
            "data_sampling": {"enabled": True, "num_epochs": 1, "num_workers": 0, "curriculum_learning": {"enabled": True}},
        }
    },
    "tensorboard": {"tensorboard": MONITOR},
    "csv_monitor": {"csv_monitor": MONITOR},
    "wandb": {"wandb": {"enabled": True, "group": "my_group", "team": "my_team", "project": "my_project"}},
    "comet": {"comet": {"enabled": True, "workspace": "w", "project": "p", "samples_log_interval": 50, "online": False, "mode": "get"}},
    "comms_logger": {"comms_logger": {"enabled": True, "verbose": False, "prof_all": False, "debug": False, "prof_ops": ["all_reduce"]}},
    "checkpoint": {"checkpoint": {"tag_validation": "Warn", "load_universal": False, "parallel_write": {"pipeline_stage": False}}},
    "disable_allgather": {"disable_allgather": True},
    "seq_parallel_communication_data_type": {"seq_parallel_communication_data_type": "fp32"},
}
#: Without effect in this loop: accepted with a word.
WITH_A_WORD = {"hybrid_engine", "autotuning_on", "activation_checkpointing_on", "data_efficiency"}
WITH_A_WORD |= {"disable_allgather", "seq_parallel_communication_data_type"}
#: For other layouts of the ranks, switched off; tests/test_json_faults.py switches them on.
OFF = {
    "tensor_parallel": {"preset_model": "llama", "partition_config": {"use_default_specs": False}, "autotp_size": 1},
    "expert_parallel": {"enabled": False, "autoep_size": 4},
    "pipeline": {"stages": "auto", "partition": "best", "seed_layers": False, "activation_checkpoint_interval": 2},
    "compile": {"deepcompile": False, "free_activation": True},
    "sequence_parallel_size": 1,
    "data_parallel_size": 8,
    "mesh_param": None,
    "weight_quantization": {},
}
#: DeepSpeed's pydantic models drop "auto"; the others have no effect here.
DROPPED_AUTO = {
    "zero_optimization": {"stage": 3, "stage3_max_live_parameters": "auto", "allgather_bucket_size": "auto", "offload_param": "auto"},
    "activation_checkpointing": {"partition_activations": "auto"},
    **dict.fromkeys(("compile", "data_efficiency", "dataloader_drop_last", "hybrid_engine"), "auto"),
    **dict.fromkeys(("pipeline", "sequence_parallel_size", "tensor_parallel"), "auto"),
}
#: What they need may not be here: accepted by --explain, refused by training where it is missing.
NEEDING = {"comet", "offload_nvme"} | ({"wandb"} if importlib.util.find_spec("wandb") is None else set())


def written(values: dict, folder: Path) -> str:
    file = folder / "documented.json"
    file.write_text(json.dumps(values, indent=1))
    return str(file)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_documented_section_is_accepted(name, corpus, tmp_path):
    config, _ = resolve(["--deepspeed_config", written(BF16 | SECTIONS[name], tmp_path), "--data", str(corpus)], ranks=8)
    if name in WITH_A_WORD:
        (note,) = config.notes
        assert "has no effect here and is left out" in note
        assert name.removesuffix("_on") not in config.ds_config
    else:
        assert config.notes == ()
    assert bool(config.lacks) == (name in NEEDING)


@pytest.mark.parametrize(("ranks", "of_a_host", "found"), [(16, 8, "lacks"), (8, 8, None), (16, None, "notes"), (8, None, None)])
def test_the_runs_folder_is_no_nvme_drive_of_several_hosts(ranks, of_a_host, found, corpus, monkeypatch, tmp_path):
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of_a_host or ""))
    offload = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "auto"}}
    file = written(BF16 | {"zero_optimization": offload}, tmp_path)
    config, _ = resolve(["--deepspeed_config", file, "--data", str(corpus), "--global_batch_size", "16"], ranks)
    said = "'zero_optimization.offload_optimizer.nvme_path': \"auto\" is in --runs_dir, which several hosts share; write a folder on each"
    assert {name for name in ("lacks", "notes") if any(said in line for line in getattr(config, name))} == {found} - {None}


def test_what_this_machine_lacks_is_explained_and_not_trained(corpus, tmp_path):
    file = written(BF16 | SECTIONS["offload_nvme"], tmp_path)
    command = ["launch/pretrain.py", "--deepspeed_config", file, "--data", corpus, "--runs_dir", tmp_path / "runs"]
    explained = run_script(*command, "--explain")
    assert explained.returncode == 0
    assert "nvme_path' is '/local_nvme', which is not a folder on this host" in explained.stdout
    trained = run_script(*command)
    assert trained.returncode == 2
    assert len(trained.stderr.splitlines()) == 2, "a line for each of the two paths"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("values", [OFF, DROPPED_AUTO], ids=["off", "auto"])
def test_what_is_off_or_auto_is_accepted(values, corpus, tmp_path):
    config, _ = resolve(["--deepspeed_config", written(BF16 | values, tmp_path), "--data", str(corpus)], ranks=8)
    assert not set(values) - {"zero_optimization"} & set(config.ds_config)
    assert "auto" not in config.ds_config["zero_optimization"].values()


def test_set_changes_a_section_by_its_other_name(corpus, tmp_path):
    command = ["--data", str(corpus), "--deepspeed_config"]
    config, _ = resolve([*command, written({"bfloat16": {"enabled": True}}, tmp_path), "--set", "bfloat16.enabled=false"])
    assert config.precision == "fp32"
    both = 'zero_optimization={"stage":3,"max_live_parameters":4,"stage3_max_live_parameters":5}'
    with pytest.raises(UsageError, match=r"max_live_parameters is another name of .*, which is given too"):
        resolve([*command, written(BF16, tmp_path), "--set", both])


def test_auto_is_accepted_for_parameters_without_effect(corpus):
    params = [word for key in ("cuda_aware", "comm_backend_name") for word in ("--set", f"optimizer.params.{key}=auto")]
    config, _ = resolve(["--deepspeed_config", "ds_configs/one_bit_adam.json", "--data", str(corpus), *params], ranks=2)
    assert sum("has no effect here" in note for note in config.notes) == 2


def test_other_names_that_deepspeed_reads_stand_for_the_documented_ones(corpus, tmp_path):
    schema = deepspeed_schema()
    prefixed = {
        f"zero_optimization.{name}" for name in ("max_live_parameters", "prefetch_bucket_size", "gather_16bit_weights_on_model_save")
    }
    assert {"bfloat16", "zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param"} | prefixed < set(schema.other_names)

    def run(keys: dict, *flags: str):
        base = {key: value for key, value in BF16.items() if key != "bf16"} | {"zero_optimization": {"stage": 3}}
        for key, value in keys.items():
            section, _, last = key.rpartition(".")
            (base[section] if section else base)[last] = value
        return resolve(["--deepspeed_config", written(base, tmp_path), "--data", str(corpus), *flags], ranks=2)[0].ds_config

    for name, (documented, if_true) in schema.other_names.items():
        section, _, last = documented.rpartition(".")
        (kind, *_) = (schema.keys[section]["keys"] if section else schema.keys)[last]["types"]
        right = True if if_true else {"boolean": True, "integer": 0, "object": {"enabled": True}}[kind]
        assert value_at(run({name: right}), documented.split(".")) == (if_true or right)
        with pytest.raises(UsageError, match=rf': line \d+: \'{name}\' is "x"; write'):
            run({name: "x"})
        with pytest.raises(UsageError, match=f"'{name}' is another name of '{documented}', which is given too"):
            run({name: right, documented: if_true or right})
        changed = run({documented: if_true or right}, "--set", f"{name}={json.dumps(right)}")
        assert value_at(changed, documented.split(".")) == (if_true or right)


def test_a_file_for_a_trainer_with_its_own_optimizer_gets_adamw(corpus, tmp_path):
    values = {"fp16": {"enabled": False}, "zero_optimization": {"stage": 2}, "train_batch_size": "auto"}
    config, _ = resolve(["--deepspeed_config", written(values, tmp_path), "--data", str(corpus)])
    assert config.optimizer == {"type": "AdamW", "params": {"lr": config.lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
    assert config.scheduler["type"] == "WarmupCosineTokens"
