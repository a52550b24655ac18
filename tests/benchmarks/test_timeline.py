"""Timelines of small traces whose times can be added up by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from jax.profiler import ProfileData

from benchmarks.timeline.__main__ import main as command
from benchmarks.timeline.analysis import (
    DeviceTimeline,
    Kind,
    Row,
    analyze,
    kernel_name,
    kind_of,
    rows,
)
from benchmarks.timeline.intervals import gaps, intersection, length, union
from benchmarks.timeline.trace import Event, TraceError, read_trace

GPU = "/device:GPU:0"
COMPUTE, COPIES = "Stream #13(Kernel,MemcpyD2D)", "Stream #15(MemcpyP2P)"
GEMM, PERMUTE = "nvjet_tst_128x256_NTN", "MemcpyP2P"


def event(line: str, name: str, start: float, end: float, op: str, plane: str = GPU) -> Event:
    return Event(plane, line, name, start, end, op)


def execution(start: float, plane: str = GPU) -> list[Event]:
    """100 µs: two matmuls, 10 µs of idle time between, a copy that is hidden for 3/4."""
    events = [
        event(COMPUTE, "loop_convert_fusion", 0, 10, "loop_convert_fusion"),
        event(COMPUTE, GEMM, 10, 50, "custom-call.1"),
        event(COPIES, PERMUTE, 20, 60, "collective-permute-start.1"),
        event(COMPUTE, GEMM, 70, 90, "custom-call.2"),
        event(COMPUTE, "loop_add_fusion_3", 90, 100, "loop_add_fusion.3"),
    ]
    return [Event(plane, e.line, e.name, start + e.start, start + e.end, e.hlo_op) for e in events]


def write_xplane(directory: Path, events: Sequence[Event]) -> Path:
    """Writes the profiler's format: one plane per device, one line per stream, names by number."""
    if all(event.plane.startswith("/device") for event in events):
        events = [*events, event("python", "timed", 0, 1, "", plane="/host:CPU")]
    planes = []
    for plane in dict.fromkeys(e.plane for e in events):
        names: dict[str, int] = {}
        lines = []
        for line in dict.fromkeys(e.line for e in events if e.plane == plane):
            records = [
                f"events {{ metadata_id: {names.setdefault(e.name, len(names) + 1)}"
                f" offset_ps: {round(e.start * 1e6)} duration_ps: {round(e.duration * 1e6)}"
                f' stats {{ metadata_id: 1 str_value: "{e.hlo_op}" }} }}'
                for e in events
                if e.plane == plane and e.line == line
            ]
            lines.append(f'lines {{ id: {len(lines)} name: "{line}" {" ".join(records)} }}')
        metadata = [
            f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
            for name, i in names.items()
        ]
        metadata.append('stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }')
        planes.append(f'planes {{ name: "{plane}" {" ".join([*metadata, *lines])} }}')
    path = directory / "plugins" / "profile" / "date" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace("\n".join(planes)))
    return directory


def timeline_of(
    directory: Path, events: Sequence[Event], executions: int = 1, since: str = "timed"
) -> DeviceTimeline:
    trace = read_trace(write_xplane(directory, events))
    (timeline,) = analyze(trace, executions=executions, since=since)
    return timeline


def test_times_add_up(tmp_path: Path) -> None:
    timeline = timeline_of(tmp_path, execution(0))
    assert timeline.duration == 100
    assert timeline.busy == {
        Kind.MATMUL: 60,
        Kind.KERNEL: 20,
        Kind.LOCAL_COPY: 0,
        Kind.PEER_COPY: 40,
        Kind.COLLECTIVE: 0,
    }
    assert timeline.idle == 10
    assert timeline.communication == 40
    assert timeline.hidden_under_matmul == timeline.hidden_under_compute == 30
    assert timeline.hidden_share == 0.75


def test_executions_are_averaged(tmp_path: Path) -> None:
    timeline = timeline_of(tmp_path, [*execution(0), *execution(100)], executions=2)
    assert timeline.window == (0, 200)
    by_name = {(row.kind, row.name): row for row in rows([timeline])}
    assert by_name["matmul", GEMM] == Row("matmul", GEMM, "custom-call", 2, 60)


def test_an_annotation_says_where_to_begin(tmp_path: Path) -> None:
    annotations = [
        event("python", "timed", start, start + 100, "", plane="/host:CPU") for start in (95, 195)
    ]
    events = [*execution(0), *execution(100), *execution(200), *annotations]
    assert timeline_of(tmp_path, events, since="timed").window == (200, 300)


def test_an_annotation_at_the_beginning_is_one_too(tmp_path: Path) -> None:
    annotation = event("python", "timed", 0, 300, "", plane="/host:CPU")
    events = [*execution(0), *execution(100), annotation]
    assert timeline_of(tmp_path, events, since="timed").window == (0, 200)


def test_every_device_has_its_own_window(tmp_path: Path) -> None:
    events = [*execution(0), *execution(7, plane="/device:GPU:1")]
    timelines = analyze(read_trace(write_xplane(tmp_path, events)), executions=1, since="timed")
    assert [(t.device, t.window) for t in timelines] == [
        (GPU, (0, 100)),
        ("/device:GPU:1", (7, 107)),
    ]
    # Rows are of the average GPU.
    assert {row.count for row in rows(timelines) if row.kind == "matmul"} == {2}


@pytest.mark.parametrize("stream", ["Stream #13(Kernel)", "compute"])
def test_lines_that_sum_up_the_streams_are_left_out(tmp_path: Path, stream: str) -> None:
    """Whatever they are called, where streams are called streams; else the known ones."""
    summaries = ["XLA Modules", "XLA Ops", "Steps", *(["new"] if "Stream" in stream else [])]
    work = [event(stream, GEMM, start, start + 40, f"dot.{start}") for start in (0, 60)]
    sums = [event(line, "jit_f", 0, 100, "") for line in summaries]
    assert timeline_of(tmp_path, [*work, *sums]).idle == 20


def test_rows_say_what_the_time_went_to(tmp_path: Path) -> None:
    timeline = timeline_of(tmp_path, execution(0))
    assert rows([timeline]) == [
        Row("matmul", GEMM, "custom-call", 2, 60),
        Row("peer copy", PERMUTE, "collective-permute-start", 1, 40, 0.75),
        Row("other kernel", "loop_convert_fusion", "", 1, 10),
        Row("other kernel", "loop_add_fusion", "", 1, 10),
        Row("idle", f"before {GEMM}", "custom-call", 1, 10),
    ]


@pytest.mark.parametrize(
    ("name", "op", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NTN", "custom-call.3", Kind.MATMUL),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "custom-call.3", Kind.MATMUL),
        ("gemm_fusion_dot_12", "gemm_fusion_dot.12", Kind.MATMUL),
        ("ring_chunk_mosaic_gpu_kernel", "custom-call.3", Kind.MATMUL),
        ("loop_dynamic_update_slice_fusion_2", "loop_dynamic_update_slice_fusion.2", Kind.KERNEL),
        ("input_concatenate_fusion", "input_concatenate_fusion", Kind.KERNEL),
        ("MemcpyP2P", "collective-permute-start.1", Kind.PEER_COPY),
        ("MemcpyD2D", "copy.4", Kind.LOCAL_COPY),
        ("Memset", "custom-call.3", Kind.LOCAL_COPY),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "all-gather", Kind.COLLECTIVE),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgs)", "", Kind.COLLECTIVE),
        ("all_reduce_one_shot_kernel", "all-reduce-start.2", Kind.COLLECTIVE),
        ("loop_add_fusion", "send_buffer_fusion", Kind.KERNEL),
    ],
)
def test_kinds(name: str, op: str, kind: Kind) -> None:
    assert kind_of(event(COMPUTE, name, 0, 1, op)) is kind


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("loop_add_fusion_12", "loop_add_fusion"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_NTN", "nvjet_tst_128x256_64x4_1x2_h_bz_NTN"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs4K)", "ncclDevKernel_AllGather_RING_LL"),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_align8>(cutlass_80_align8::Params)",
            "cutlass::Kernel2[cutlass_80_tensorop_bf16_align8]",
        ),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, a<b<c> > >(x)", "splitKreduce_kernel"),
        ("void (anonymous namespace)::copy<4>(int)", "copy"),
        ("MemcpyP2P", "MemcpyP2P"),
    ],
)
def test_kernels_keep_the_telling_part_of_their_names(name: str, short: str) -> None:
    assert kernel_name(name).removeprefix("cublasLt::") == short


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"executions": 0}, "executions=0: give how many to average"),
        ({"since": "missing"}, "since='missing': the host has no annotation of that name"),
    ],
)
def test_refusals(tmp_path: Path, options: dict, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        timeline_of(tmp_path, [*execution(0), *execution(200)], **options)


def test_a_directory_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no \.xplane\.pb there"):
        read_trace(tmp_path)


def test_a_trace_without_gpus_is_refused(tmp_path: Path) -> None:
    host = [event("python", "work", 0, 1, "", plane="/host:CPU")]
    with pytest.raises(TraceError, match="no work of GPUs, only of: /host:CPU"):
        read_trace(write_xplane(tmp_path, host))


def test_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    command(write_xplane(tmp_path, execution(0)), executions=1, since="timed")
    output = capsys.readouterr().out
    for text in ("GPU:0", "75.0%", GEMM, "collective-permute-start"):
        assert text in output


def test_intervals() -> None:
    merged = union([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7)])
    assert merged == [(0, 4), (5, 6)]
    assert length(merged) == 5
    assert gaps(merged, (-1, 8)) == [(-1, 0), (4, 5), (6, 8)]
    assert gaps([], (0, 2)) == [(0, 2)]
    assert intersection(merged, [(1, 2), (3, 5.5)]) == [(1, 2), (3, 4), (5, 5.5)]
