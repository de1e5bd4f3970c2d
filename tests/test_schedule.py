"""Programs of jax 0.10 and 0.12 for CPU, TPU and GPU, kept as the compilers wrote them.

All are one step: a residual network scanned over 4 layers, two microbatches, AdamW, on a mesh
(node 2, device), with all_reduce ("ar") or zero3. A device's gradients are 2,621,440 bytes.
"""

import gzip
import math
import pathlib
import re
import types

import numpy as np
import pytest

from jdp.groups import axes_of, groups
from jdp.hardware import CHIPS
from jdp.hlo import Instruction
from jdp.origin import Frames, origin
from jdp.roofline import Roofline
from jdp.schedule import walk

FOLDER = pathlib.Path(__file__).parent / "programs_stored"
KINDS = {"cpu": "cpu", "gpu": "NVIDIA H100 80GB HBM3", "tpu": "TPU v5 lite"}
COUNTS = {"cpu": 8, "gpu": 8, "tpu": 16}
VERSIONS = ("0.10.2", "0.12.0.1")
GRADIENTS = 4 * (2 * 4 * 256 * 256 + 256 * 512)


def stored(platform, name, version):
    return gzip.decompress((FOLDER / f"{platform}_{name}_{version}.hlo.gz").read_bytes()).decode()


def mesh_of(platform, **sizes):
    """Looks like a mesh of devices that are not here."""
    sizes = sizes or {"node": 2, "device": COUNTS[platform] // 2}
    device = types.SimpleNamespace(platform=platform, device_kind=KINDS[platform])
    devices = np.full(tuple(sizes.values()), device, dtype=object)
    return types.SimpleNamespace(
        devices=devices, size=devices.size, shape=sizes, axis_names=tuple(sizes)
    )


def slow(kind, size, group, found):
    """A link of 1 GB/s."""
    return size / 1e9


def instruction(attributes, name="x"):
    return Instruction(name, "all-reduce", [], (), 0, attributes, "")


@pytest.mark.parametrize(
    ("text", "expected", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ((0, 1, 2, 3), (4, 5, 6, 7)), ("b",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ((0, 4), (1, 5), (2, 6), (3, 7)), ("a",)),
        ("replica_groups={}", (tuple(range(8)),), ("a", "b")),
        ("channel_id=1", (tuple(range(8)),), ("a", "b")),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7)), ("b",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7)), ("a",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7)), ("b",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7)), ("a",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),), ("a", "b")),
        ("replica_groups=mesh['z'=8] {'z':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7)), ("b",)),
        (
            "replica_groups=mesh['m'=2,'n'=4], device_ids=([4,2]T(1,0)) {'n'}",
            ((0, 2, 4, 6), (1, 3, 5, 7)),
            ("a", "b"),
        ),
        (
            "replica_groups=mesh['m'=4,'n'=2], device_ids=(0,4,1,5,2,6,3,7) {'n'}",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
            ("a",),
        ),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", ((0, 1), (1, 2), (2, 3), (3, 0)), ("b",)),
    ],
)
def test_every_way_to_write_groups(text, expected, axes):
    found = groups(instruction(f"channel_id=1, {text}, use_global_device_ids=true"), 8)
    assert found == expected
    assert axes_of(found, mesh_of("cpu", a=2, b=4)) == axes


def test_groups_that_cannot_be_read_are_an_error():
    with pytest.raises(ValueError, match="x writes its groups of devices as 'replica_groups=<new"):
        groups(instruction("replica_groups=<new form>"), 8)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("platform", KINDS)
def test_one_all_reduce_of_all_gradients(platform, version):
    text = stored(platform, "ar", version)
    walked = walk(text, mesh_of(platform), seconds=slow)
    (one,) = walked.collectives
    count = COUNTS[platform]
    assert (one.kind, one.dtypes, one.axes, one.group) == (
        "all-reduce",
        ("f32",),
        ("node", "device"),
        count,
    )
    assert one.bytes == GRADIENTS + 8  # loss and weight ride along
    assert one.wire_bytes == pytest.approx(2 * (count - 1) / count * one.bytes)
    assert (one.times, one.in_loop, one.floor, one.source) == (1, False, 1.0, "")
    # XLA:GPU of 0.10 leaves nothing behind when it joins what is reduced
    made = "the compiler" if (platform, version) == ("gpu", "0.10.2") else "jdp.all_reduce"
    assert one.made_by == made
    assert one.asynchronous == (platform == "gpu")
    if platform == "cpu":
        assert walked.step_us is walked.sent_us is one.us is None
    else:
        assert walked.step_us == pytest.approx(walked.compute_us + walked.exposed_us)
        assert 0 < one.exposed_us <= one.us
        assert walked.spans[-1].end_us == pytest.approx(walked.step_us)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("platform", KINDS)
def test_zero3_gathers_each_layer_twice_in_each_microbatch(platform, version):
    walked = walk(stored(platform, "zero3", version), mesh_of(platform), seconds=slow)
    gathered = [x for x in walked.collectives if x.kind == "all-gather"]
    width = 2 if platform == "tpu" else 4  # XLA:TPU multiplies, and gathers, in bfloat16
    # microbatches x (forward and backward) x bytes; 0.10 on CPU keeps the last product's gather
    total = sum(x.bytes * x.times for x in gathered) * 4 // width
    last = 4 * 256 * 512
    assert total in (4 * GRADIENTS, 4 * GRADIENTS - 2 * last)
    assert {x.axes for x in walked.collectives} == {("node", "device")}
    layers = [x for x in gathered if x.in_loop and x.times > 2]
    assert {x.source for x in layers} == {"model.py:12"}
    assert {x.made_by for x in layers} == {"jdp.zero gather"}
    scattered = [x for x in walked.collectives if x.kind == "reduce-scatter"]
    assert bool(scattered) == (platform != "tpu")  # a square slice all-reduces instead


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_sent_again_for_each_microbatch_is_twice_the_least(version):
    walked = walk(stored("cpu", "zero3", version), mesh_of("cpu"))
    assert {x.floor for x in walked.collectives if x.in_loop} == {2.0}
    assert {x.times for x in walked.collectives if x.in_loop} == {2, 8}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_computes_beside_a_gather_on_a_tpu(version):
    walked = walk(stored("tpu", "zero3", version), mesh_of("tpu"), seconds=slow)
    beside = [x for x in walked.collectives if x.asynchronous]
    assert len(beside) == 2
    assert {x.beside for x in beside} == {("dot_general",)}
    assert all(x.exposed_us < x.us for x in beside)
    waiting = [x for x in walked.collectives if not x.asynchronous]
    assert all(x.exposed_us == pytest.approx(x.us) and not x.beside for x in waiting)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["ar", "zero3"])
def test_where_no_times_are_told_a_roofline_gives_them(name, version):
    told = stored("gpu", name, version)
    untold = re.sub(r'"reification_cost":\[[^\]]*\],?', "", told)
    chip = CHIPS["h100"]
    assert walk(untold, mesh_of("gpu")).compute_us is None
    memory = Roofline(chip.flops, chip.memory_bytes_per_s)
    found = walk(untold, mesh_of("gpu"), roofline=memory)
    assert "those of a roofline" in found.notes[-1]
    theirs = walk(told, mesh_of("gpu"), roofline=memory)
    assert not any("roofline" in note for note in theirs.notes)
    assert 0.9 < found.compute_us / theirs.compute_us < 1.2  # what caches hold counts, too
    # with a memory that takes no time there are the products only: forward, and twice that back
    least = walk(untold, mesh_of("gpu"), roofline=Roofline(chip.flops, math.inf)).compute_us
    rows, microbatches = 16, 2
    count = 3 * 2 * rows * microbatches * (GRADIENTS // 4)
    assert least == pytest.approx(1e6 * count / chip.flops["f32"])


def test_loops_are_counted_as_if_each_round_were_walked():
    text = LOOP.replace("TRIPS", "9")
    walked = walk(text, mesh_of("tpu", data=4), seconds=slow)
    (one,) = walked.collectives
    assert (one.times, one.bytes, one.in_loop) == (9, 4000, True)
    assert one.us == pytest.approx(9 * 4.0)  # 4000 bytes at 1 GB/s
    assert one.exposed_us == pytest.approx(9 * 3.0)  # 1500 cycles beside it are 1 us
    assert walked.compute_us == pytest.approx(9.0)
    assert walked.step_us == pytest.approx(36.0)


def test_a_loop_of_unknown_length_is_said_to_count_once():
    unknown = LOOP.replace('"known_trip_count":{"n":"TRIPS"}', '"k":1').replace("LT", "NE")
    walked = walk(unknown, mesh_of("tpu", data=4), seconds=slow)
    assert walked.collectives[0].times == 1
    assert walked.notes == ("How often the loop w runs is not known: its body is counted once.",)


LOOP = """HloModule m, is_scheduled=true

%fused (q: f32[1000]) -> f32[1000] {
  ROOT %q = f32[1000] parameter(0)
}

%body (p: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %p = (s32[], f32[1000]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1000] get-tuple-element(%p), index=1
  %s = f32[1000] all-reduce-start(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %f = f32[1000] fusion(%x), calls=%fused, backend_config={"estimated_cycles":"1500"}
  %d = f32[1000] all-reduce-done(%s)
  ROOT %t = (s32[], f32[1000]) tuple(%i, %d)
}

%cond (p: (s32[], f32[1000])) -> pred[] {
  %p = (s32[], f32[1000]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(9)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %a = (s32[], f32[1000]) parameter(0)
  ROOT %w = (s32[], f32[1000]) while(%a), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"TRIPS"}}
}
"""  # noqa: E501


FRAMES = """HloModule m

FileNames
1 "/usr/lib/python3.13/site-packages/optax/x.py"
2 "/home/user/jdp/reduce.py"
3 "/home/user/model.py"
4 "/home/user/jdp/train.py"

FunctionNames
1 "f"
2 "train_step.<locals>.step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1}
2 {file_name_id=2 function_name_id=1 line=2 end_line=2}
3 {file_name_id=3 function_name_id=1 line=41 end_line=41}
4 {file_name_id=4 function_name_id=2 line=9 end_line=9}

StackFrames
"""
SHIFTED = """1 {file_location_id=3 parent_frame_id=1}
2 {file_location_id=4 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=2 parent_frame_id=4}
5 {file_location_id=1 parent_frame_id=5}
6 {file_location_id=2 parent_frame_id=3}
"""
PLAIN = """1 {file_location_id=3}
2 {file_location_id=4 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=2}
4 {file_location_id=2 parent_frame_id=3}
5 {file_location_id=1 parent_frame_id=4}
6 {file_location_id=2 parent_frame_id=2}
"""


@pytest.mark.parametrize("stack", [SHIFTED, PLAIN])
def test_the_users_line_is_the_innermost_that_is_no_library(stack):
    frames = Frames(FRAMES + stack + "\n")
    inside = frames.of(instruction("metadata={stack_frame_id=5}"))
    assert len(inside) == 5
    assert origin(inside) == ("model.py:41", "jdp.all_reduce")
    # what called the step is not where the operation comes from
    outside = frames.of(instruction("metadata={stack_frame_id=6}"))
    assert origin(outside) == ("", "jdp.all_reduce")


def test_source_lines_of_older_programs():
    attributes = 'metadata={op_name="a" source_file="/home/user/model.py" source_line=7}'
    assert origin(Frames("HloModule m\n").of(instruction(attributes))) == ("model.py:7", "")
