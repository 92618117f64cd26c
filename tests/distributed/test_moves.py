"""A run is resumed on other ranks, at another ZeRO stage, with or without CPU offload, in another precision."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from launch.config.run_config import resolve
from launch.errors import UsageError
from tests.conftest import Pools
from tests.distributed.parity import cells, section
from tests.distributed.ranks import Ranks
from tests.helpers import losses, reseal, rewind

JOB, LOADED, BY_HAND = (f"tests.distributed.{name}" for name in ("jobs:pretrain", "move_jobs:loaded", "move_jobs:trained_by_hand"))
#: 35 and 105 elements of a bias, which two and four ranks do not share evenly.
SHAPE = ["--n_layer", "2", "--n_head", "5", "--d_model", "35", "--seq_len", "32", "--global_batch_size", "4", "--eval_every", "0"]
#: Flags of an architecture -> its number of tensors. The modern one has one head of keys and values, and a head of its own.
MODELS = {
    "gpt2": ([], 28),
    "qwen3": (["--architecture", "qwen3", "--n_kv_head", "1", "--d_head", "6", "--d_ff", "50", "--tied_head", "false"], 19),
    "qwen3_moe": (
        [
            *("--architecture", "qwen3_moe", "--n_kv_head", "1", "--d_head", "6", "--d_expert", "25", "--n_expert", "3"),
            *section("expert_balance", {"coefficient": 0.1}),
        ],
        21,
    ),
}
SAVED, STEPS = 3, 23
CPU = 'zero_optimization.offload_optimizer={"device": "cpu"}'
#: Sub-groups of a few parameters, and biases and norms that stay whole on every rank.
STAGE_3 = ["zero_optimization.sub_group_size=9000", "zero_optimization.stage3_param_persistence_threshold=100"]


class Layout(NamedTuple):
    stage: int
    ranks: int
    offload: bool = False
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"{self.stage}-{self.ranks}-{self.precision}" + ("-offload" if self.offload else "")

    def flags(self) -> list[str]:
        changes = [CPU] * self.offload + STAGE_3 * (self.stage == 3)
        config = ["--deepspeed_config", f"ds_configs/zero{self.stage}_{self.precision}.json"]
        return config + [text for change in changes for text in ("--set", change)]


L = Layout
long = pytest.mark.long


class Runs:
    """Runs that are trained once without a move, with a checkpoint after step `SAVED`, to which they are rewound."""

    def __init__(self, pools: Pools, corpus: Path, folder: Path):
        self._pools, self._corpus, self._folder = pools, corpus, folder
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._loaded: dict[str, dict[str, Any]] = {}

    def flags(self, layout: Layout, runs: Path, *more: str) -> list[str]:
        where = ["--data", str(self._corpus), "--runs_dir", str(runs), "--run_name", "r"]
        return [*layout.flags(), *SHAPE, *where, "--steps", str(STEPS), "--lr", "1e-3", "--save_every", "3", "--keep", "99", *more]

    def unmoved(self, layout: Layout, *more: str) -> tuple[Path, list[dict[str, Any]]]:
        """The folder of runs, and the lines of the metrics of all steps."""
        key = " ".join([str(layout), *more])
        runs = self._folder / re.sub(r"\W+", "-", key)
        if key not in self._lines:
            self._lines[key] = self._pools.of(layout.ranks).run(JOB, flags=self.flags(layout, runs, *more))[0]
            rewind(runs / "r", SAVED)
        return runs, self._lines[key]

    def copy(self, layout: Layout, folder: Path, *more: str) -> Path:
        """A copy of the unmoved run, which may be moved."""
        return Path(shutil.copytree(self.unmoved(layout, *more)[0], folder))

    def load(self, layout: Layout, runs: Path, *more: str, **options: Any) -> dict[str, Any]:
        return self._pools.of(layout.ranks).run(LOADED, flags=[*self.flags(layout, runs, *more), "--resume"], **options)[0]

    def loaded_by_deepspeed(self, layout: Layout, *more: str) -> dict[str, Any]:
        """What the ranks hold where nothing has changed."""
        key = " ".join([str(layout), *more])
        if key not in self._loaded:
            self._loaded[key] = self.load(layout, self.unmoved(layout, *more)[0], *more)
            assert self._loaded[key]["log"] == []
        return self._loaded[key]

    def resume(self, layout: Layout, runs: Path, *more: str, job: str = JOB, **options: Any) -> list[dict[str, Any]]:
        return self._pools.of(layout.ranks).run(job, flags=[*self.flags(layout, runs, *more), "--resume"], **options)[0]


@pytest.fixture(scope="module")
def runs(pools, corpus, tmp_path_factory) -> Runs:
    return Runs(pools, corpus, tmp_path_factory.mktemp("moves"))


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- fp32 -----------------------------------------------------------------------------------------------------------------------------

#: With `QUICK_MOVES` and the other models, every ordered pair of stages, on other ranks; and CPU offload on one side or both.
LONG = [
    *((L(0, 1), L(0, 2)), (L(0, 2), L(2, 4)), (L(1, 2), L(0, 1)), (L(1, 4), L(1, 2)), (L(1, 2), L(3, 4))),
    *((L(2, 2), L(0, 1)), (L(2, 2), L(2, 1)), (L(3, 4), L(1, 2)), (L(3, 1), L(2, 2)), (L(3, 2), L(3, 4))),
    *((L(1, 2, True), L(1, 1)), (L(2, 1), L(2, 2, True)), (L(3, 2, True), L(3, 2)), (L(0, 2), L(3, 2, True))),
    (L(3, 2, True), L(1, 2, True)),
]


#: Muon keeps other states of some parameters than of others.
MUON = section("optimizer", {"type": "Muon", "params": {"lr": 1e-3, "ns_dtype": "fp32"}})
#: Which flags the moved run has besides: the weights of stage 3 may be offloaded, too.
OFFLOADED_WEIGHTS = section("zero_optimization.offload_param", {"device": "cpu"})
MOVES = [
    *(("gpt2", [], *move, []) for move in LONG),
    *(("qwen3", [], *move, []) for move in ((L(0, 2), L(1, 4)), (L(1, 2), L(2, 1)))),
    *(("qwen3_moe", [], *move, []) for move in ((L(0, 1), L(3, 2)), (L(2, 2), L(1, 1)))),
    ("gpt2", MUON, L(1, 2), L(2, 1), []),
    ("qwen3", MUON, L(3, 2), L(0, 1), []),
    ("qwen3_moe", MUON, L(2, 1), L(3, 2), []),
    ("gpt2", MUON, L(3, 2), L(1, 4), []),
]
QUICK_MOVES = [
    ("gpt2", [], L(3, 2), L(0, 1), []),
    ("qwen3_moe", [], L(2, 2), L(3, 1), []),
    ("gpt2", MUON, L(0, 2), L(3, 1), []),
]
AT_THE_GATE = [("qwen3", [], L(3, 2), L(3, 1), []), ("gpt2", [], L(2, 2), L(3, 2), OFFLOADED_WEIGHTS)]


@pytest.mark.parametrize(("model", "optimizer", "before", "after", "own"), cells(MOVES, QUICK_MOVES, AT_THE_GATE), ids=str)
def test_a_moved_run_goes_on_as_the_unmoved_one(model, optimizer, before, after, own, runs, tmp_path):
    """Weights, moments and steps are those that DeepSpeed itself loads where nothing has changed, bit for bit."""
    more, tensors = [*MODELS[model][0], *optimizer], MODELS[model][1]
    folder = runs.copy(before, tmp_path / "moved", *more)
    checkpoint = folder / "r" / "checkpoints" / f"step-{SAVED:08d}"
    written = content_of(checkpoint)
    found, expected = runs.load(after, folder, *more, *own), runs.loaded_by_deepspeed(before, *more)
    assert found["content"] == expected["content"]
    assert any(key.endswith(" momentum") for key in found["content"]) if optimizer else len(found["content"]) == 3 * tensors
    assert (found["steps"], found["counters"]) == (expected["steps"], expected["counters"]) and found["steps"] == [SAVED]
    moved, unmoved = runs.resume(after, folder, *more, *own), runs.unmoved(before, *more)[1]
    assert losses(moved) == pytest.approx(losses(unmoved), abs=1e-5)
    balances = [[line["balance_loss"] for line in lines if "balance_loss" in line] for lines in (moved, unmoved)]
    assert balances[0] == pytest.approx(balances[1], abs=1e-5), "of experts: it depends on the choices of the step before"
    assert content_of(checkpoint) == written
    log = (folder / "r" / "log.txt").read_text()
    assert f"resumed step-{SAVED:08d}, written by {before.ranks} rank" in log and f"at stage {after.stage} in fp32" in log


@long
@pytest.mark.parametrize(("before", "after"), [(L(2, 2), L(3, 3)), (L(1, 3), L(0, 2))], ids=str)
def test_a_run_is_moved_to_three_ranks_and_from_them(before, after, runs, tmp_path):
    more = ["--global_batch_size", "12"]
    folder = runs.copy(before, tmp_path / "moved", *more)
    assert runs.load(after, folder, *more)["content"] == runs.loaded_by_deepspeed(before, *more)["content"]
    assert losses(runs.resume(after, folder, *more)) == pytest.approx(losses(runs.unmoved(before, *more)[1]), abs=1e-5)


def test_a_moved_run_is_resumed_and_moved_again(runs, tmp_path):
    """After the move it resumes bit for bit; and a start on a third layout finds what the second has written."""
    first, second, third = L(3, 2), L(1, 2), L(2, 1)
    folder = runs.copy(first, tmp_path / "moved")
    once = losses(runs.resume(second, folder))
    rewind(folder / "r", 9)
    assert losses(runs.resume(second, folder)) == once
    rewind(folder / "r", 9)
    assert losses(runs.resume(third, folder)) == pytest.approx(once, abs=1e-5)
    log = (folder / "r" / "log.txt").read_text()
    assert log.count("resumed step-") == 2 and "zero_stage: 3 -> 1" in log and "ranks: 2 -> 1" in log
    assert "resumed step-00000009, written by 2 ranks at stage 1 in fp32, on 1 rank at stage 2 in fp32" in log


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        pytest.param(3, ["zero_optimization.sub_group_size=3000"], marks=pytest.mark.gate),
        pytest.param(2, ["zero_optimization.round_robin_gradients=true", "zero_optimization.parameter_alignment=true"], marks=long),
    ],
)
def test_another_order_of_the_parameters_is_another_layout(stage, changes, runs, tmp_path):
    """DeepSpeed would load the files without a word, and train other weights."""
    layout, more = L(stage, 2), [text for change in changes for text in ("--set", change)]
    there, back = tmp_path / "there", tmp_path / "back"
    runs.copy(layout, there)
    assert runs.load(layout, there, *more)["content"] == runs.loaded_by_deepspeed(layout)["content"]
    runs.copy(layout, back, *more)
    assert runs.load(layout, back)["content"] == runs.loaded_by_deepspeed(layout, *more)["content"]


@long
def test_a_run_is_moved_to_weights_with_a_second_partition(runs, device, tmp_path):
    """In processes of its own, since DeepSpeed makes the groups of `zero_hpz_partition_size` once in a process, for good."""
    before, after, more = L(2, 2), L(3, 2), ["--set", "zero_optimization.zero_hpz_partition_size=2", "--resume"]
    folder = runs.copy(before, tmp_path / "moved")
    flags = runs.flags(after, folder, *more)
    with Ranks(2, device) as ranks:
        assert ranks.run(LOADED, flags=flags)[0]["content"] == runs.loaded_by_deepspeed(before)["content"]
    with Ranks(2, device) as ranks:
        assert losses(ranks.run(JOB, flags=flags)[0]) == pytest.approx(losses(runs.unmoved(before)[1]), abs=1e-5)


# --- precision ------------------------------------------------------------------------------------------------------------------------

PRECISIONS = [
    (L(3, 2), L(0, 2, precision="bf16")),
    (L(1, 2), L(2, 1, precision="bf16")),
    (L(0, 2), L(0, 1, precision="bf16")),
    (L(3, 2, precision="bf16"), L(1, 1)),
    (L(2, 2, precision="bf16"), L(0, 2)),
    (L(3, 2, precision="bf16"), L(2, 1, precision="bf16")),
    (L(2, 2, precision="fp16"), L(0, 2, precision="bf16")),
]


@pytest.mark.parametrize(
    ("model", "before", "after"),
    cells(
        [*(("gpt2", *move) for move in PRECISIONS), ("qwen3", *PRECISIONS[3]), ("qwen3_moe", *PRECISIONS[1])], [("gpt2", *PRECISIONS[0])]
    ),
    ids=str,
)
def test_in_another_precision_it_trains_like_an_engine_that_is_filled_by_hand(model, before, after, runs, tmp_path):
    saved, more = tmp_path / "states.pt", MODELS[model][0]
    expected = runs.load(before, runs.unmoved(before, *more)[0], *more, file=str(saved))
    folder, by_hand = (runs.copy(before, tmp_path / name, *more) for name in ("moved", "by-hand"))
    assert runs.load(after, folder, *more)["content"] == expected["content"]
    trained = losses(runs.resume(after, folder, *more))
    assert trained == losses(runs.resume(after, by_hand, *more, job=BY_HAND, file=str(saved), step=SAVED))
    assert trained != losses(runs.unmoved(before, *more)[1])
    if before.precision != after.precision:
        assert f'precision: "{before.precision}" -> "{after.precision}"' in (folder / "r" / "log.txt").read_text()


#: A scale that overflows in the first steps, and one that grows in the later ones.
SCALE = ["--set", 'fp16={"enabled": true, "initial_scale_power": 26, "loss_scale_window": 6, "hysteresis": 1}']


@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(2, 3, marks=pytest.mark.gate), pytest.param(0, 1, marks=long), pytest.param(3, 0, marks=long)]
)
def test_the_loss_scale_of_fp16_goes_on(before, after, runs, tmp_path):
    """It falls by overflows until step 10 and grows in step 17. Before the first update there is no optimizer state, and none is missed."""
    before, after = (L(stage, 2, precision="fp16") for stage in (before, after))
    lines = runs.unmoved(before, *SCALE)[1]
    assert lines[SAVED - 1]["skipped_steps"] == SAVED, "all steps before the checkpoint have overflowed"
    folder = runs.copy(before, tmp_path / "moved", *SCALE)
    assert runs.load(after, folder, *SCALE)["steps"] == []
    moved = runs.resume(after, folder, *SCALE)
    # Stage 0 sums the gradients of the ranks before it divides by their number, so that it overflows first when the scale has grown.
    compared = 17 if 0 in (before.stage, after.stage) else STEPS
    for key in ("loss_scale", "skipped_steps"):
        assert [line[key] for line in moved[:compared]] == [line[key] for line in lines[:compared]]
    assert moved[16]["loss_scale"] == 2 * moved[15]["loss_scale"] == 2**-8 * moved[0]["loss_scale"]


# --- techniques and optimizers ----------------------------------------------------------------------------------------------------------

#: What these do follows from the step, so nothing of theirs has to be moved.
BY_STEP = {
    "random_ltd": {
        "random_ltd_layer_id": [1],
        "random_ltd_schedule": {"min_value": 16, "max_value": 32, "schedule_config": {"require_steps": 15, "seq_per_step": 8}},
    },
    "batch_size_warmup": {"min_batch_size": 2, "increment": 2, "warmup_tokens": 1000},
}


@pytest.mark.parametrize(
    ("name", "key"),
    [pytest.param("random_ltd", "reserved_length", marks=pytest.mark.gate), pytest.param("batch_size_warmup", "batch_size", marks=long)],
)
def test_a_technique_that_follows_the_step_is_moved(name, key, runs, tmp_path):
    before, after, more = L(3, 2), L(2, 1), [*MODELS["qwen3"][0], *section(name, BY_STEP[name])]
    folder = runs.copy(before, tmp_path / "moved", *more)
    expected = runs.unmoved(before, *more)[1]
    moved = runs.resume(after, folder, *more)
    assert losses(moved) == pytest.approx(losses(expected), abs=1e-5)
    assert [line[key] for line in moved] == [line[key] for line in expected] and len({line[key] for line in moved[SAVED:]}) > 1


#: freeze_step is before the checkpoint, so that there are errors of the compression.
WHOLE = {
    "OneBitAdam": '{"lr": 1e-3, "freeze_step": 2}',
    "OneBitLamb": '{"lr": 1e-3, "freeze_step": 2}',
    "ZeroOneAdam": '{"lr": 1e-3, "var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4}',
    "Lamb": '{"lr": 1e-3}',
    "Muon": '{"lr": 1e-3, "adam_lr": 5e-4}',
}


@pytest.mark.parametrize(
    ("kind", "model"),
    cells(
        [("OneBitAdam", "qwen3"), ("OneBitLamb", "qwen3_moe"), ("ZeroOneAdam", "gpt2"), ("Lamb", "qwen3_moe"), ("Muon", "qwen3")],
        [("OneBitLamb", "gpt2")],
    ),
)
def test_the_state_of_an_optimizer_of_whole_tensors_is_moved(kind, model, runs, tmp_path):
    """To other ranks and another precision. The state of each rank is reset where there are other ranks, which the log says."""
    more = [*MODELS[model][0], "--set", f'optimizer={{"type": "{kind}", "params": {WHOLE[kind]}}}']
    before, expected = L(0, 2), runs.loaded_by_deepspeed(L(0, 2), *more)
    assert any(f" {key}" in " ".join(expected["content"]) for key in ("exp_avg_sq", "variance", "momentum"))
    for after in (L(0, 2, precision="bf16"), L(0, 1)):
        folder = runs.copy(before, tmp_path / str(after), *more)
        found = runs.load(after, folder, *more)
        if kind != "ZeroOneAdam" or after.ranks == 2:  # on other ranks, the steps since the last exchange are lost
            assert found["content"] == expected["content"]
        assert (found["steps"], found["counters"]) == (expected["steps"], expected["counters"])
        said = [note for note in found["notes"] if "written by 2 ranks, and this job has 1" in note]
        assert len(said) == (after.ranks == 1 and kind not in ("Lamb", "Muon"))
        moved, unmoved = losses(runs.resume(after, folder, *more)), losses(runs.unmoved(before, *more)[1])
        assert moved[SAVED] == pytest.approx(unmoved[SAVED], abs=1e-3 if after.precision == "fp32" else 0.05)
        assert len(moved) == STEPS
    if kind != "Muon":
        with pytest.raises(UsageError, match=r"'zero_optimization\.stage' is 1, but"):
            resolve(runs.flags(L(1, 2), tmp_path, *more), ranks=2)


@pytest.mark.parametrize("momentum", [0.9, pytest.param(0, marks=long)])
def test_another_optimizer_is_moved_with_what_it_has(momentum, runs, tmp_path):
    """SGD: one moment or none, and no count of steps."""
    more = ["--set", f'optimizer={{"type": "SGD", "params": {{"lr": 1e-3, "momentum": {momentum}}}}}']
    more += ["--set", "zero_allow_untested_optimizer=true"]
    folder, expected = runs.copy(L(2, 2), tmp_path / "moved", *more), runs.loaded_by_deepspeed(L(2, 2), *more)
    assert runs.load(L(3, 1), folder, *more)["content"] == expected["content"]
    assert any(key.endswith(" momentum_buffer") for key in expected["content"]) == bool(momentum)


# --- what is refused ------------------------------------------------------------------------------------------------------------------


def change(file: Path, edit: Any) -> None:
    """Replace one of DeepSpeed's files by an edited one, as if the run had written it."""
    content = torch.load(file, weights_only=False)
    edit(content)
    torch.save(content, file)
    reseal(file.parents[1])


def engine_file(runs: Path, name: str) -> Path:
    return runs / "r" / "checkpoints" / f"step-{SAVED:08d}" / "engine" / name


def shorten_moments(content: dict) -> None:
    for one in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        one["factored"] = torch.zeros(7)


MODEL, OWN = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
EDITS: dict[str, tuple[Layout, str, Callable[[dict], Any]]] = {
    "factored": (L(2, 2), OWN, shorten_moments),
    "step": (L(0, 2), MODEL, lambda content: content["optimizer"]["state"][3].update(step=torch.tensor(2.0))),
    "exp_avg": (L(0, 2), MODEL, lambda content: content["optimizer"]["state"][3].pop("exp_avg")),
    "h.7.ln_1.bias": (L(0, 2), MODEL, lambda content: content["module"].update({"h.7.ln_1.bias": content["module"].pop("h.1.ln_1.bias")})),
    "h.1.ln_1.bias": (L(0, 2), MODEL, lambda content: content["module"].update({"h.1.ln_1.bias": torch.zeros(34)})),
    "not as DeepSpeed writes them": (L(0, 2), MODEL, lambda content: content.update(optimizer={})),
}


@pytest.mark.parametrize("word", EDITS)
def test_what_cannot_be_moved_is_refused_in_a_line(word, runs, tmp_path):
    before, file, edit = EDITS[word]
    folder = runs.copy(before, tmp_path / "moved")
    for one in (file, file.replace("rank_1", "rank_0")) if file == OWN else (file,):
        change(engine_file(folder, one), edit)
    written = content_of(folder)
    (fault,) = runs.load(L(1, 1), folder)["refused"]
    assert f"step-{SAVED:08d}" in fault and word in fault
    assert content_of(folder) == written


@pytest.mark.gate
def test_a_checkpoint_is_moved_from_a_wrapper_of_deepspeeds_that_is_not_known_and_not_to_it(runs, tmp_path):
    """In bf16 at stage 1 with gradients in fp32, DeepSpeed has an optimizer of its own kind, BF16_Optimizer."""
    layout, own = L(1, 2, precision="bf16"), ["--set", "data_types.grad_accum_dtype=fp32"]
    expected = runs.loaded_by_deepspeed(layout)
    (fault,) = runs.load(layout, runs.copy(layout, tmp_path / "to"), *own)["refused"]
    assert "BF16_Optimizer" in fault
    folder, saved = runs.copy(layout, tmp_path / "from", *own), tmp_path / "states.pt"
    found = runs.load(L(2, 1), folder, file=str(saved))
    assert found["steps"] == expected["steps"] and found["content"].keys() == expected["content"].keys()
    halves = torch.load(engine_file(folder, "mp_rank_00_model_states.pt"), weights_only=False)["module"]
    for name, state in torch.load(saved).items():
        assert torch.equal(state["weight"].bfloat16(), halves[name])


def test_tensors_are_read_from_the_files_of_nvme(runs, tmp_path):
    """Named and padded as DeepSpeed's swapper does it, without a drive: every second sub-group is in files."""
    before = L(3, 2)
    folder = runs.copy(before, tmp_path / "moved")
    for rank in range(before.ranks):
        swapped = engine_file(folder, f"offloaded_tensors/rank{rank:02d}")
        swapped.mkdir(parents=True)

        def swap_out(content: dict, swapped: Path = swapped) -> None:
            content = content["optimizer_state_dict"]
            weights, states = content["fp32_flat_groups"], content["optimizer_state_dict"]["state"]
            assert len(weights) == 4
            for index in range(0, len(weights), 2):
                name = f"{10 * index}_{10 * index + 9}.tensor.swp"
                for file, of, key in (
                    (name, weights, index),
                    *((f"{key}-{name}", states[index], key) for key in ("exp_avg", "exp_avg_sq")),
                ):
                    torch.cat([of[key].detach(), torch.full((13,), 7.0)]).numpy().tofile(swapped / file)
                    of[key] = torch.empty(0)

        change(engine_file(folder, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"), swap_out)
    assert runs.load(L(1, 1), folder)["content"] == runs.loaded_by_deepspeed(before)["content"]
    next(swapped.glob("exp_avg_sq-*")).unlink()
    reseal(swapped.parents[2])
    (fault,) = runs.load(L(1, 1), folder)["refused"]
    assert "offloaded to NVMe" in fault


@long  # builds async_io
def test_a_checkpoint_is_moved_from_nvme_and_not_to_it(drive, runs, tmp_path):
    place = {"device": "nvme", "nvme_path": "auto"}
    nvme = ["--set", f"zero_optimization.offload_optimizer={json.dumps(place)}", "--d_model", "320", "--micro_batch_size", "1"]
    wide = ["--d_model", "320", "--micro_batch_size", "1"]
    on_nvme = runs.copy(L(3, 2), tmp_path / "nvme", *nvme)
    found = runs.load(L(1, 1), on_nvme, *wide)
    assert found["content"] == runs.loaded_by_deepspeed(L(3, 2, True), *wide)["content"] and found["steps"] == [SAVED]
    (fault,) = runs.load(L(3, 2), runs.copy(L(3, 2), tmp_path / "memory", *wide), *nvme)["refused"]
    assert "NVMe" in fault
