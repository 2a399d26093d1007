"""Small reports to test with."""

from kenosis_ort import RECIPES, QuantizationReport
from kenosis_ort.accuracy.outputs import OutputComparison
from kenosis_ort.calibration.trust_summary import TensorTrust, TrustSummary
from kenosis_ort.options import OptionChoice
from kenosis_ort.passes.journal import PassOutcome
from kenosis_ort.plan import Decision, Edge, EdgeRole, How, Kind, NodeDecision, PlacementPlan
from kenosis_ort.report import evidence as told
from kenosis_ort.report.evidence import Bars, LayerSignal, OpTime, OpTimes, ReportEvidence, SketchNode, TensorProfile
from kenosis_ort.report.facts import CalibrationSummary, SpeedCandidate, SpeedSummary
from kenosis_ort.targets.proof import FusionReport, KernelReport, Status


def kernel(node, op_type="Conv", **changes):
    values = {"kernel": "com.microsoft.QLinearConv", "integer": True, "status": Status.INTEGER, **changes}
    return KernelReport(node=node, op_type=op_type, **{**values, "status": Status(values["status"])})


def compared(name, sqnr_db):
    return OutputComparison(name, sqnr_db, cosine=1.0, max_abs=0.25, agreement=None, equal=0.5, elements=10, samples=8)


def fusion(*kernels):
    return FusionReport(kernels=kernels, runtime_version="1.2.3", overhead={"Transpose": 2})


def plan(*integer):
    decided = (EdgeRole.ACTIVATION, How.OWN, "rule", "because")
    decisions = tuple(Decision(Edge(f"{node}.in", node, 0), *decided) for node in integer)
    nodes = tuple(NodeDecision(node, "Conv", Kind.INTEGER, "rule", "because") for node in integer)
    return PlacementPlan(target="ort-cpu", decisions=decisions, nodes=nodes)


def report(**changes):
    proof = fusion(
        kernel("stem", absorbed=("stem_relu",)),
        kernel("stem_relu", op_type="Relu", kernel="", integer=False, status="absorbed"),
        kernel("head", integer=False, kernel="Conv", status="float", reason="no Q on its output"),
    )
    values = {
        "model_input": "in.onnx", "model_output": "out.onnx", "target": "ort-cpu", "fusion": proof,
        "options": {"per_channel": OptionChoice(True, "host default")}, "plan": plan("stem", "head"),
        "calibration": CalibrationSummary("minmax", 8, 5, 0.25), "notes": ("opset raised from 9 to 13",),
        "warnings": ("one [odd] thing",), "size_before": 4_000_000, "size_after": 1_000_000,
        "seconds": {"calibrate": 0.25, "quantize": 0.5}, "outputs": (compared("logits", 31.25),),
        "versions": {"onnxruntime": "1.2.3"},
    }  # fmt: skip
    return QuantizationReport(**{**values, **changes})


def passes():
    return (
        PassOutcome("equalize", True, 0.02, 0.015, "relative noise", "the error falls", 0.5),
        PassOutcome("bias_correction", False, 0.015, 0.016, "relative noise", "the error does not fall", 0.2),
        PassOutcome("smooth", False, reason="nothing to gain"),
    )


def speed():
    slower = ("int8 as planned", "slower", "only 0.80x", 0.8, 0.75, 0.85, "slower", 2.0, 0.5)
    taken = ("first node float", "taken", "1.50x", 1.5, 1.25, 1.75, "faster", 1.0, 0.5)
    forms = {"int8": slower, "int8-first-float": taken, "float": ("the float model", "spare", "not needed")}
    candidates = tuple(SpeedCandidate(name, *said) for name, said in forms.items())
    notes = ("the pools were merged",)
    return SpeedSummary(candidates, float_milliseconds=1.5, tune="model", notes=notes)


def trust():
    seen = (TensorTrust("a", "seen", 0.4, "unstable"),)
    return TrustSummary("usable", "two ranges vary", "synthetic", "ten real samples", seen)


def evidence(*names):
    """Evidence about a chain of nodes of these names, ``stem``, ``stem_relu`` and ``head`` by default."""
    nodes, layers, value = [], [], "image"
    for index, name in enumerate(names or ("stem", "stem_relu", "head")):
        made = f"{name}.out"
        op_type = "Relu" if "relu" in name else "Conv"
        nodes.append(SketchNode(name, op_type, (value,), (made,), "1x8x4x4", "" if op_type == "Relu" else "8x8x3x3"))
        layers.append(LayerSignal(made, name, 40.0 - index))
        value = made
    bars = Bars(-1.0, 2.0, (1, 5, 20, 3))
    float_times = OpTime("stem", "Conv", "Conv", 2.0), OpTime("head", "Conv", "Conv", 1.0)
    int8_times = OpTime("stem", "Conv", "QLinearConv", 0.5), OpTime("q", "QuantizeLinear", "QuantizeLinear", 0.05)
    return ReportEvidence(
        graph=told.GraphSketch(tuple(nodes), ("image",), (value,)),
        tensors=(
            TensorProfile(nodes[0].outputs[0], "activation", -1.0, 2.0, (-0.5, 1.5), bits=8, bars=bars),
            TensorProfile("stem.weight", "weight", -0.5, 0.5, (-0.5, 0.5), 8, 8, 41.5, Bars(-0.5, 0.5, (2, 9, 2))),
        ),
        layers=tuple(layers),
        times=OpTimes(float_times, int8_times, threads=1, runs=10),
    )


def full_report(**changes):
    """A report in which every section has something to show."""
    values = {"recipe": RECIPES["fast"], "passes": passes(), "speed": speed(), "trust": trust(), "evidence": evidence()}
    return report(**{**values, **changes})
