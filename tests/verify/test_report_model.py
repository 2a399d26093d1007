"""The report is plain data: JSON round trip, counts, shares, short text."""

import json
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.verify import Cause, FusionReport, KernelReport, Status

kernels = st.builds(
    KernelReport,
    node=st.text(min_size=1, max_size=8), op_type=st.sampled_from(["Conv", "Gemm", "Relu", "Shape"]),
    kernel=st.sampled_from(["", "Conv", "com.microsoft.QLinearConv"]), integer=st.booleans(),
    absorbed=st.lists(st.text(max_size=4), max_size=2).map(tuple), absorbed_into=st.none() | st.text(max_size=4),
    reason=st.text(max_size=8), status=st.sampled_from(Status), cause=st.sampled_from(Cause),
    graph=st.sampled_from(["", "If.then_branch"]), silently_quantized=st.booleans(), weights_per_run=st.booleans(),
)  # fmt: skip
reports = st.builds(
    FusionReport,
    kernels=st.lists(kernels, max_size=12).map(tuple), runtime_version=st.just("1.2.3"),
    overhead=st.dictionaries(st.sampled_from(["Transpose", "QuantizeLinear"]), st.integers(1, 9)),
)  # fmt: skip


@given(reports)
def test_json_has_every_kernel(report: FusionReport) -> None:
    raw = json.loads(json.dumps(report.to_dict()))
    assert raw == {"schema": 1, **json.loads(json.dumps(asdict(report)))}


@given(reports)
def test_counts_and_shares(report: FusionReport) -> None:
    assert sum(report.counts().values()) == len(report.kernels)
    assert 0.0 <= report.integer_share() <= 1.0
    assert len(report.float_nodes()) == report.counts()["float"]
    assert len(str(report).splitlines()) <= 13


def test_absorbed_matmul_counts_by_its_kernel() -> None:
    report = FusionReport(
        (
            KernelReport("a", "MatMul", "com.microsoft.QGemm", True, absorbed=("b",), status=Status.INTEGER),
            KernelReport("b", "Add", "com.microsoft.QGemm", True, absorbed_into="a", status=Status.ABSORBED),
            KernelReport("c", "Conv", "Conv", False),
            KernelReport("d", "Conv", "", False, status=Status.REMOVED),
        ),
        "1.2.3",
    )
    assert report.integer_share() == 0.5
    assert report.kernel_counts() == {"com.microsoft.QGemm": 1, "Conv": 1}
