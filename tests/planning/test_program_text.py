"""Texts of compiled programs, as JAX 0.10.2 with libtpu 0.0.42.1 writes them, cut down."""

import pytest

from replicax.planning._collectives import Collective, find_collectives
from replicax.planning._program_text import arrays, bits, elements, parse

HEAD = """HloModule m, is_scheduled=true, num_partitions=8

FileNames
1 "/home/user/train.py"
2 "/lib/python3/site-packages/optax/transform.py"

FunctionNames
1 "step"
2 "update"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=1}
2 {file_name_id=2 function_name_id=2 line=99 end_line=99 column=1 end_column=1}
3 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=1 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=1}

"""


def collectives(body: str, others: str = "") -> tuple[Collective, ...]:
    entry = f"ENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"
    return find_collectives(parse(HEAD + others + entry))


def test_one_all_reduce_for_several_lines():
    (found,) = collectives(
        """
  %p = f32[4]{0} parameter(0)
  %ar = (f32[784,2048]{1,0:T(8,128)S(1)}, /*index=1*/f32[10]{0:T(128)}) all-reduce(%p, %p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%r, metadata={op_name="a" stack_frame_id=2}
  %g = f32[784,2048]{1,0:T(8,128)} get-tuple-element(%ar), index=0, metadata={op_name="jit(f)/psum" stack_frame_id=2}
  ROOT %h = f32[10]{0} get-tuple-element(%ar), index=1, metadata={op_name="jit(f)/pmean" stack_frame_id=3}"""  # noqa: E501  as it is
    )
    assert (found.kind, found.group_size, found.groups) == ("all-reduce", 4, 2)
    assert found.bytes == 784 * 2048 * 4 + 40
    assert found.sent_bytes == 2 * 3 / 4 * found.bytes
    # The first comes from a line of Optax, which the user's line 7 has called.
    assert [str(origin) for origin in found.origins] == ["train.py:7", "train.py:9"]
    assert [origin.bytes for origin in found.origins] == [784 * 2048 * 4, 40]
    assert found.origins[0].function == "step"


def test_collectives_that_are_started_and_awaited():
    gather, permute = collectives(
        """
  %s = (bf16[64,2048]{1,0}, bf16[64,4096]{1,0}) all-gather-start(%p), replica_groups=[4,2]<=[2,2,2]T(1,0,2), dimensions={1}, metadata={stack_frame_id=1}
  %d = bf16[64,4096]{1,0} all-gather-done(%s)
  %c = (f32[256,4096]{1,0:T(8,128)S(1)}, f32[256,4096]{1,0:T(8,128)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %e = f32[256,4096]{1,0} collective-permute-done(%c)"""  # noqa: E501  as it is
    )
    assert (gather.kind, gather.group_size, gather.groups) == ("all-gather", 2, 4)
    assert gather.bytes == 64 * 4096 * 2
    assert gather.sent_bytes == gather.bytes / 2
    assert (permute.kind, permute.bytes) == ("collective-permute", 256 * 4096 * 4)
    assert permute.sent_bytes == permute.bytes
    assert str(permute.origins[0]) == "not known"


LOOP = """%cond (t: (s32[], f32[8])) -> pred[] {
  %k = s32[]{:T(128)} constant(80), metadata={op_name="x"}
  %t = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %k), direction=LT
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %rs = f32[8]{0} reduce-scatter(%x), replica_groups={}, dimensions={0}, to_apply=%add
  ROOT %o = (s32[], f32[8]) tuple(%t, %rs)
}

"""
WHILE = "  ROOT %w = (s32[], f32[8]) while(%p), condition=%cond, body=%body"


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    (found,) = collectives(WHILE, LOOP)
    assert (found.kind, found.times, found.exact) == ("reduce-scatter", 80, True)
    assert (found.group_size, found.bytes) == (8, 8 * 4 * 8)  # each has a share of the sum
    assert found.sent_bytes == 80 * 7 / 8 * found.bytes


def test_loops_of_unknown_length_and_conditions_are_not_exact():
    (found,) = collectives(WHILE, LOOP.replace("direction=LT", "direction=NE"))
    assert (found.times, found.exact) == (1, False)
    (found,) = collectives(f'{WHILE}, backend_config={{"known_trip_count":{{"n":"5"}}}}', LOOP)
    assert (found.times, found.exact) == (5, True)
    conditional = "  ROOT %c = f32[8] conditional(%p), branch_computations={%body, %cond}"
    (found,) = collectives(conditional, LOOP)
    assert (found.times, found.exact) == (1, False)


def test_collectives_in_fusions_and_calls():
    others = """%all-reduce-scatter (i: f32[64,4096]) -> f32[64,512] {
  %i = f32[64,4096]{1,0} parameter(0)
  %ar = f32[64,4096]{1,0} all-reduce(%i), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %ds = f32[64,512]{1,0} dynamic-slice(%ar, %i), dynamic_slice_sizes={64,512}
}

%called (i: f32[64]) -> f32[64] {
  %i = f32[64]{0} parameter(0)
  ROOT %ar2 = f32[64]{0} all-reduce(%i), replica_groups=[1,8]<=[8], to_apply=%add, metadata={op_name="psum" stack_frame_id=1}
}

"""  # noqa: E501  as it is
    fused, called = collectives(
        """
  %f = f32[64,512]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter, metadata={op_name="rs" stack_frame_id=3}
  %s = ((f32[64]{0}), f32[64]{0}) call-start(%p), async_execution_thread="sparsecore", to_apply=%called, metadata={op_name="psum" stack_frame_id=1}
  ROOT %d = f32[64]{0} call-done(%s)""",  # noqa: E501  as it is
        others,
    )
    assert (fused.kind, fused.bytes) == ("reduce-scatter", 64 * 4096 * 4)
    assert str(fused.origins[0]) == "train.py:9"  # of the fusion: inside there is none
    assert (called.kind, called.bytes) == ("all-reduce", 256)


def test_pieces_of_one_collective_count_once():
    piece = (
        "  %{name} = bf16[64]{{0}} all-gather(%p), replica_groups=[1,8]<=[8], "
        'frontend_attributes={{chain_id="0"}}'
    )
    found = collectives("\n".join(piece.format(name=name) for name in ("start", "step", "done")))
    assert len(found) == 1


def test_a_group_of_one_communicates_nothing():
    assert not collectives("  %a = f32[8]{0} all-reduce(%p), replica_groups=[8,1]<=[8]")


@pytest.mark.parametrize(
    ("dtype", "size"), [("f32", 32), ("bf16", 16), ("s4", 4), ("c64", 64), ("token", 0)]
)
def test_dtypes(dtype, size):
    assert bits(dtype) == size


def test_shapes():
    shape = "((f32[2,3]{1,0}, s8[]), /*index=1*/pred[5]{0:T(512)})"
    assert elements(shape) == ["(f32[2,3]{1,0}, s8[])", "pred[5]{0:T(512)}"]
    assert [array.bytes for array in arrays(shape)] == [24, 1, 5]


def test_what_is_no_program_has_no_collectives():
    assert find_collectives(parse("")) == ()
    assert find_collectives(parse("HloModule broken\n\nENTRY %main (")) == ()
