"""What counts as a checkpoint, and what its `state.json` protects."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from launch.formats.checkpoint_files import (
    DamagedCheckpoint,
    checkpoint_name,
    complete_checkpoints,
    file_entry,
    read_state,
    state_text,
    verify,
)
from launch.formats.deepspeed_files import DeepSpeedLayout
from launch.formats.tensor_files import Ignored, UnreadableFile, load_tensors

STATE = {"step": 20, "tokens": 5120, "samples": 160, "val_loss": 6.123456789012345}
EMPTY = {"bytes": 0, "xxh128": "99aa06d3014798d86001c324468d497f"}
#: Names beside checkpoints that are not ours: a user's copies, notes and tries.
FOREIGN = [
    *("step-best", "step-last", "step-", "step", "step-20", "step-0020", "step-0000020", "step-000000020", "step-00000020.bak"),
    *("step-00000020.unusable", "step-00000020.old", "step-00000020~", "step-00000020 (copy)", "step-00000020_", "step-00000020-1"),
    *("step-+0000020", "step--0000020", "step-0000_0020", "step-000000x0", "step-0x000020", "step-2e000001", "step-٠٠٠٠٠٠٢٠"),
    *("Step-00000020", "STEP-00000020", "step_00000020", "xstep-00000020", "step-00000020\n", " step-00000020", "step-00000020 "),
    *(".step-00000020", "step-00000020.tar", "step-00000020.json", "checkpoint-20", "latest", "best", "note.txt"),
    *(".tmp-note.txt", ".tmp-", ".tmp-step-best", ".tmp-step-00000020.bak", ".trash-note", ".trash-step-", ".trash-step-20"),
]


def written(folder: Path, step: int = 20, run_id: str | None = "a run") -> Path:
    checkpoint = folder / checkpoint_name(step)
    (checkpoint / "engine").mkdir(parents=True)
    for name, content in (("engine/a.pt", b"weights" * 99), ("engine/b.pt", b"moments" * 99), ("latest", b"engine")):
        (checkpoint / name).write_bytes(content)
    entries = {name: file_entry(checkpoint / name) for name in ("engine/a.pt", "engine/b.pt", "latest")}
    (checkpoint / "state.json").write_text(state_text(STATE | {"step": step}, run_id, 2, entries))
    return checkpoint


def test_only_names_that_a_run_gives_are_checkpoints_in_the_order_of_their_steps(tmp_path):
    assert len(FOREIGN) >= 40
    ours = [written(tmp_path, step) for step in (20, 3, 100_000_000, 99_999_999)]
    for name in FOREIGN:
        written(tmp_path / "other" / name)
        os.rename(tmp_path / "other" / name / "step-00000020", tmp_path / name)
    assert complete_checkpoints(tmp_path) == [ours[1], ours[0], ours[3], ours[2]]


def test_no_flipped_bit_of_state_json_changes_what_is_read(tmp_path):
    checkpoint = written(tmp_path)
    good, content = read_state(checkpoint), (checkpoint / "state.json").read_bytes()
    assert {key: good[key] for key in STATE} == STATE
    refused = 0
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (checkpoint / "state.json").write_bytes(changed)
        try:
            assert read_state(checkpoint) == good  # white space
        except DamagedCheckpoint as reason:
            refused += "state.json" in str(reason)
    assert refused > 7 * len(content)


@pytest.mark.parametrize(
    "edit",
    [
        *(
            {key: value}
            for key, value in (("step", 21), ("tokens", 0), ("samples", 161), ("val_loss", 1.0), ("val_loss", None), ("ranks", 1))
        ),
        *({"run_id": value} for value in ("another run", None)),
        *({"xxh128": value} for value in ("", "0" * 32, None)),
        *({"files": value} for value in ({}, [], {"../../x": 3})),
        {"more": 1},
    ],
    ids=str,
)
def test_an_edited_state_is_refused(edit, tmp_path):
    checkpoint = written(tmp_path)
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(state | edit))
    with pytest.raises(DamagedCheckpoint, match=r"state\.json"):
        read_state(checkpoint)


@pytest.mark.parametrize("key", ["xxh128", "run_id", "files", "step", "val_loss"])
def test_a_state_without_one_of_its_keys_is_refused(key, tmp_path):
    checkpoint = written(tmp_path)
    state = json.loads((checkpoint / "state.json").read_text())
    del state[key]
    (checkpoint / "state.json").write_text(json.dumps(state))
    with pytest.raises(DamagedCheckpoint, match=r"state\.json"):
        read_state(checkpoint)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"step": 1e400}'], ids=lambda content: str(content[:9])
)
def test_a_state_that_is_none_is_refused(content, tmp_path):
    checkpoint = written(tmp_path)
    (checkpoint / "state.json").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"state\.json"):
        read_state(checkpoint)
    (checkpoint / "state.json").unlink()
    os.mkfifo(checkpoint / "state.json")  # which a reader would wait at
    with pytest.raises(DamagedCheckpoint, match=r"state\.json"):
        read_state(checkpoint)


def test_every_file_is_compared_by_one_of_the_ranks(tmp_path):
    for name in ("engine/a.pt", "engine/b.pt", "latest"):
        checkpoint = written(tmp_path / name.replace("/", "-"))
        verify(checkpoint, "a run")
        content = bytearray((checkpoint / name).read_bytes())
        content[len(content) // 2] ^= 1
        (checkpoint / name).write_bytes(content)
        found = []
        for rank in range(2):
            try:
                verify(checkpoint, "a run", slice(rank, None, 2))
            except DamagedCheckpoint as reason:
                found.append(str(reason))
        assert len(found) == 1 and str(checkpoint / name) in found[0]


@pytest.mark.parametrize("name", ["engine/c.pt", "technique-00000.pt", "engine/offloaded_tensors/rank00/1_2.tensor.swp"])
def test_a_file_that_a_reader_would_find_and_the_run_did_not_write_is_a_fault(name, tmp_path):
    checkpoint = written(tmp_path)
    (checkpoint / "pytorch_model.bin").write_bytes(b"of zero_to_fp32.py")  # which no reader of ours looks for
    verify(checkpoint, "a run")
    (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
    (checkpoint / name).write_bytes(b"x")
    with pytest.raises(DamagedCheckpoint, match=name):
        verify(checkpoint, "a run")


def test_what_cannot_be_read_is_a_fault_and_not_waited_for(tmp_path):
    fresh = (written(tmp_path / str(number)) for number in range(9))
    (dangling := next(fresh)).rename(tmp_path / "elsewhere")
    dangling.symlink_to(tmp_path / "not mounted")
    os.truncate((large := next(fresh)) / "state.json", 2**40)
    (pipe := next(fresh) / "engine/a.pt").unlink()
    os.mkfifo(pipe)
    (empty := next(fresh) / "engine/b.pt").unlink()  # of the size of a pipe
    state = json.loads((empty.parents[1] / "state.json").read_text())
    (empty.parents[1] / "state.json").write_text(state_text(STATE, "a run", 2, state["files"] | {"engine/b.pt": EMPTY}))
    os.mkfifo(empty)
    names = []
    for name in ("engine/\0.pt", "engine/\ud800.pt", "/etc/passwd", "../x"):
        names.append(next(fresh) / "state.json")
        names[-1].write_text(state_text(STATE, "a run", 2, {name: EMPTY}))
    for place in (dangling / "state.json", large / "state.json", pipe, empty, *names):
        checkpoint = next(path for path in place.parents if path.name == "step-00000020")
        assert complete_checkpoints(checkpoint.parent) == [checkpoint]
        with pytest.raises(DamagedCheckpoint, match=str(place)):
            verify(checkpoint, "a run")


def test_a_folder_of_a_checkpoint_may_be_a_link_and_hides_nothing(tmp_path):
    checkpoint = written(tmp_path)
    (checkpoint / "engine").rename(tmp_path / "engine")
    (checkpoint / "engine").symlink_to(tmp_path / "engine")
    verify(checkpoint, "a run")
    (tmp_path / "engine" / "mp_rank_01_model_states.pt").touch()
    with pytest.raises(DamagedCheckpoint, match="mp_rank_01"):
        verify(checkpoint, "a run")


@pytest.mark.parametrize(
    ("stage", "defaults"), [(1, {"round_robin_gradients": False}), (2, {"parameter_alignment": False}), (3, {"sub_group_size": 10**9})]
)
def test_a_default_that_is_written_out_is_no_other_layout(stage, defaults):
    """DeepSpeed loads it itself. A move would refuse an optimizer on NVMe."""
    plain = DeepSpeedLayout.of({"zero_optimization": {"stage": stage}}, 2)
    assert DeepSpeedLayout.of({"zero_optimization": {"stage": stage, **defaults}}, 2) == plain
    others = dict.fromkeys(defaults, 1)
    assert DeepSpeedLayout.of({"zero_optimization": {"stage": stage, **others}}, 2) != plain


class Attribute:
    """Pickled as `getattr(of, name)`, as Python 3.11.0 to 3.11.3 pickles an enum's member."""

    def __init__(self, of: object, name: str):
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


def test_an_enum_that_an_early_python_3_11_pickled_is_read(tmp_path):
    torch.save({"weight": torch.ones(2), "stage": Attribute(ZeroStageEnum, "weights")}, tmp_path / "states.pt")
    assert load_tensors(tmp_path / "states.pt", deepspeed_objects=True)["stage"] is ZeroStageEnum.weights
    assert load_tensors(tmp_path / "states.pt")["weight"].tolist() == [1, 1]


@pytest.mark.parametrize("deepspeed_objects", [False, True])
@pytest.mark.parametrize(
    ("of", "name"), [(ZeroStageEnum, "__members__"), (LossScaler, "backward"), (LossScaler, "__init__"), ("text", "join")]
)
def test_no_other_attribute_is_read_from_a_pickle(of, name, deepspeed_objects, tmp_path):
    torch.save({"weight": torch.ones(2), "x": Attribute(of, name)}, tmp_path / "states.pt")
    if of != "text" and not deepspeed_objects:  # of the stand-in for DeepSpeed's classes, which has no attributes
        assert type(load_tensors(tmp_path / "states.pt")["x"]) is Ignored
        return
    with pytest.raises(UnreadableFile, match=r"holds builtins\.getattr, and only tensors are loaded"):
        load_tensors(tmp_path / "states.pt", deepspeed_objects=deepspeed_objects)
