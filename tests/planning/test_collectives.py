"""The parser on texts in the forms that XLA writes, and the ring model of the time."""

import pytest

from dspark_jax.planning.chips import CHIPS, parse_topology
from dspark_jax.planning.collectives import Collective, dimensions_used, parse_collectives, seconds

# As libtpu 0.0.42 writes a train step, shortened: an asynchronous all-gather in three pieces with one channel, in a
# loop of 36 turns, the last of them in an inner loop that runs meanwhile; a fused reduce-scatter; several arrays in one
# all-reduce; and a loop whose end is not constant.
PROGRAM = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[]}

%add.clone (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %add.1 = f32[]{:T(128)} add(%x, %y)
}

%fused_computation.1 (param_0: bf16[64,2560]) -> (bf16[64,2560], bf16[2560,2560], u32[]) {
  %param_0 = bf16[64,2560]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[2560,2560]{1,0:T(8,128)(2,1)} all-gather(%param_0), channel_id=17, \
replica_groups=mesh['axis_0'=8,'axis_1'=8] {'axis_0','axis_1'}, dimensions={0}, use_global_device_ids=true
  ROOT %custom-call.1 = (bf16[64,2560]{1,0}, bf16[2560,2560]{1,0}, u32[]{:S(2)}) custom-call(%all-gather.1), \
custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (param_0.2: bf16[64,2560]) -> bf16[2560,2560] {
  %param_0.2 = bf16[64,2560]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.2 = bf16[2560,2560]{1,0:T(8,128)(2,1)} all-gather(%param_0.2), channel_id=17, \
replica_groups=mesh['axis_0'=8,'axis_1'=8] {'axis_0','axis_1'}, dimensions={0}, use_global_device_ids=true
}

%all-reduce-scatter.3 (input: f32[2560,2560]) -> f32[320,2560] {
  %input = f32[2560,2560]{1,0:T(8,128)} parameter(0)
  %all-reduce.5 = f32[2560,2560]{1,0:T(8,128)} all-reduce(%input), channel_id=20, replica_groups=[8,8]<=[64], \
use_global_device_ids=true, to_apply=%add.clone
  ROOT %dynamic-slice.1 = f32[320,2560]{1,0:T(8,128)} dynamic-slice(%all-reduce.5), dynamic_slice_sizes={320,2560}
}

%layer_condition (state.1: (s32[], bf16[64,2560])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(36)
  %state.1 = (s32[]{:T(128)}, bf16[64,2560]{1,0:T(8,128)(2,1)}) parameter(0)
  %get-tuple-element.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%get-tuple-element.1, %constant.1), direction=LT
}

%chunk_condition (state.5: (u32[], bf16[64,2560])) -> pred[] {
  %constant.5 = u32[]{:T(128)} constant(16)
  %state.5 = (u32[]{:T(128)}, bf16[64,2560]{1,0:T(8,128)(2,1)}) parameter(0)
  %get-tuple-element.5 = u32[]{:T(128)} get-tuple-element(%state.5), index=0
  ROOT %lt.5 = pred[]{:T(512)} compare(%get-tuple-element.5, %constant.5), direction=LT
}

%chunk_body (state.6: (u32[], bf16[64,2560])) -> (u32[], bf16[64,2560]) {
  %state.6 = (u32[]{:T(128)}, bf16[64,2560]{1,0:T(8,128)(2,1)}) parameter(0)
  %constant.6 = u32[]{:T(128)} constant(2)
  %get-tuple-element.6 = u32[]{:T(128)} get-tuple-element(%state.6), index=0
  %next.6 = u32[]{:T(128)} add(%get-tuple-element.6, %constant.6)
  %permute.6 = bf16[4096]{0} collective-permute(%v), channel_id=50, source_target_pairs={{0,1},{1,0}}
  %piece = bf16[2560,2560]{1,0} fusion(%w), kind=kCustom, calls=%async_collective_fusion.1
  ROOT %tuple.6 = (u32[]{:T(128)}, bf16[64,2560]{1,0:T(8,128)(2,1)}) tuple(%next.6, %x)
}

%layer_body (state.2: (s32[], bf16[64,2560])) -> (s32[], bf16[64,2560]) {
  %state.2 = (s32[]{:T(128)}, bf16[64,2560]{1,0:T(8,128)(2,1)}) parameter(0)
  %constant.2 = s32[]{:T(128)} constant(1)
  %get-tuple-element.2 = s32[]{:T(128)} get-tuple-element(%state.2), index=0
  %next.2 = s32[]{:T(128)} add(%get-tuple-element.2, %constant.2)
  %start = (bf16[64,2560]{1,0}, bf16[2560,2560]{1,0}, u32[]{:S(2)}) fusion(%w), kind=kCustom, calls=%fused_computation.1
  %while.3 = (s32[]{:T(128)}, bf16[64,2560]{1,0:T(8,128)(2,1)}) \
while(%init.3), condition=%chunk_condition, body=%chunk_body
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[64,2560]{1,0:T(8,128)(2,1)}) tuple(%next.2, %x)
}

%search_condition (state.3: (s32[], s32[])) -> pred[] {
  %state.3 = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.3 = s32[]{:T(128)} get-tuple-element(%state.3), index=0
  %get-tuple-element.4 = s32[]{:T(128)} get-tuple-element(%state.3), index=1
  ROOT %lt.3 = pred[]{:T(512)} compare(%get-tuple-element.3, %get-tuple-element.4), direction=LT
}

%search_body (state.4: (s32[], s32[])) -> (s32[], s32[]) {
  %state.4 = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %all-to-all.1 = pred[1000]{0:T(1024)} all-to-all(%p), channel_id=30, replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %tuple.2 = (s32[]{:T(128)}, s32[]{:T(128)}) tuple(%a, %b)
}

ENTRY %main.1 (param: bf16[64,2560]) -> f32[] {
  %param = bf16[64,2560]{1,0:T(8,128)(2,1)} parameter(0)
  %while.1 = (s32[]{:T(128)}, bf16[64,2560]{1,0:T(8,128)(2,1)}) while(%init), \
condition=%layer_condition, body=%layer_body
  %while.2 = (s32[]{:T(128)}, s32[]{:T(128)}) while(%init.2), condition=%search_condition, body=%search_body
  %gradient = f32[320,2560]{1,0:T(8,128)} fusion(%sum), kind=kCustom, calls=%all-reduce-scatter.3
  %all-reduce.9 = (f32[]{:T(128)}, /*index=1*/f32[256]{0:T(256)}) all-reduce(%a, %b), channel_id=40, \
replica_groups={}, to_apply=%add.clone
  %permute-start = (bf16[128]{0}, bf16[128]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%h), \
channel_id=41, source_target_pairs={{0,1},{1,0}}
  %permute-done = bf16[128]{0} collective-permute-done(%permute-start)
  %alone = f32[512]{0:T(512)} all-gather(%c), channel_id=42, replica_groups=[64,1]<=[64], dimensions={0}
  ROOT %done = f32[]{:T(128)} get-tuple-element(%all-reduce.9), index=0
}
"""


def test_kinds_sizes_and_loops():
    assert parse_collectives(PROGRAM, 64) == [
        Collective("all-gather", 2 * 2560 * 2560, 64, 36),
        Collective("reduce-scatter", 4 * 2560 * 2560, 8, 1),
        # Sixteen in steps of two.
        Collective("collective-permute", 8192, 64, 36 * 8),
        Collective("all-reduce", 4 * 257, 64, 1),
        Collective("all-to-all", 1000, 4, 1, counted_once=True),
        Collective("collective-permute", 256, 64, 1),
    ]


def test_a_count_that_the_compiler_tells():
    told = PROGRAM.replace("body=%search_body", 'body=%search_body, backend_config={"known_trip_count":{"n":"12"}}')
    assert Collective("all-to-all", 1000, 4, 12) in parse_collectives(told, 64)
    assert parse_collectives("", 64) == []


@pytest.mark.parametrize(("kind", "sent"), [("all-gather", 7 / 8), ("all-reduce", 14 / 8), ("collective-permute", 1)])
def test_ring(kind, sent):
    """Eight chips lie along one of v5e's two dimensions, and 64 use all links."""
    topology = parse_topology("v5e:8x8")
    along = seconds(Collective(kind, 10**9, 8, 3), topology)
    assert along == pytest.approx(3 * sent * 1e9 / (CHIPS["v5e"].link_bandwidth / 2))
    assert dimensions_used(topology, 9) == dimensions_used(topology, 64) == 2
    assert dimensions_used(parse_topology("v5p:2x2x4"), 4) == 1
    assert dimensions_used(parse_topology("v5p:2x2x4"), 16) == 3
