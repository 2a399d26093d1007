"""Why a node is integer or float, and what would change it: one table of remedies by rule and by cause.

What the report says of the fusion proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kenosis_ort.errors import printable
from kenosis_ort.graph.constants import HEAVY, Is, having
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.targets.proof import ClippingLoss, FusionReport, KernelReport

_NAMED = 3
_IN_BLOCKS: Final = frozenset({"MatMulNBits", "GatherBlockQuantized"})


def heavy_kernels(fusion: FusionReport) -> tuple[KernelReport, ...]:
    """The kernels of the nodes that carry the arithmetic, Conv, Gemm and MatMul, unless computed at load."""
    return tuple(k for k in fusion.kernels if k.op_type in having(Is.HEAVY) and k.status != "removed")


def fusion_verdict(fusion: FusionReport, plan: PlacementPlan | None = None) -> str:
    """The outcome of a fusion proof in one sentence, compared with the plan if there is one."""
    heavy = heavy_kernels(fusion)
    blocks = sum(k.op_type in _IN_BLOCKS for k in fusion.kernels)
    weights = f"{blocks} layers and embeddings have weights in blocks, with float data" if blocks else ""
    recurrent = Counter(k.op_type for k in fusion.kernels if k.op_type in having(Is.RECURRENT) and not k.integer)
    floats = "".join(f"; {count} {op_type} in float" for op_type, count in sorted(recurrent.items()))
    if not heavy:
        return f"{weights or 'There is no Conv, Gemm or MatMul to run'}{floats}."
    integer = sum(k.integer for k in heavy)
    text = f"{integer} of {len(heavy)} Conv/Gemm/MatMul run on integer kernels{floats}"
    text += f"; {weights}" if weights else ""
    broken = 0 if plan is None else len(left_float(fusion, plan))
    if broken:
        return f"{text}; {broken} planned as integer run in float, see the table."
    if plan and integer < len(heavy):
        return f"{text}; the others stay float as planned."
    return f"{text}."


def processors_line(fusion: FusionReport, losses: Sequence[ClippingLoss] = ()) -> str:
    """Note on the file's results on other x86-64 processors, in one sentence; "" where nothing runs on integers."""
    if not fusion.processors or not any(k.integer for k in fusion.kernels):
        return ""
    clipping = fusion.clipping()
    if not clipping:
        return f"the same integers on every processor: {', '.join(p.name for p in fusion.processors)}"
    named = ", ".join(f"'{k.node}' ({k.clipping})" for k in clipping[:_NAMED])
    more = f" and {len(clipping) - _NAMED} more" if len(clipping) > _NAMED else ""
    others = ", ".join(p.name for p in fusion.processors if not p.exact)
    what = f"products of 8-bit weights clip on {others}: layers (channels) {named}{more}"
    return "; ".join([what, *map(str, losses)])


def left_float(fusion: FusionReport, plan: PlacementPlan) -> tuple[KernelReport, ...]:
    """The nodes that the plan calls integer and the runtime runs in float (empty is the goal)."""
    planned = set(plan.integer_nodes())
    running = ("float", "absorbed")
    return tuple(k for k in fusion.kernels if k.node in planned and not k.integer and k.status in running)


# What the caller can do about a float node, by the plan's rule. A rule that is not here has no remedy but another net.
_BY_RULE: Final[Mapping[str, str]] = {
    "caller-excluded": "take the node out of nodes_to_exclude",
    "caller-op-types": "add its operator to op_types_to_quantize, or leave that option out",
    "output-protection": "protect_outputs='int8' quantizes it; compare accuracy before and after",
    "protected-input": "if this input carries the data proper, name it in primary_inputs",
    "float-prefix": "nodes_to_quantize quantizes it all the same, placed as stock does; compare accuracy and speed",
    "verified-float": "see the reason: the runtime refused the integer kernel",
    "matmul-activations": "attention products stay float on purpose: in int8 they gain 1 % and lose accuracy",
    "not-float32": "convert the model to float32 first; integer kernels read float32 tensors",
    "reduce-mean-float": "write the mean over height and width as GlobalAveragePool",
    "bn-unfolded-float": "place the BatchNormalization right behind a Conv without other readers, so that it folds",
    "conv-transpose-float": "the runtime has no integer ConvTranspose; Resize and Conv would run in integer",
}
# The same for a node that misses what its rule asks for, by words of the reason.
_BY_REASON: Final[Mapping[str, str]] = {
    "needs opset": "export the model with that operator set or a later one",
    "is not a constant": "keep the value in the model as an initializer",
    "not float32": "convert the model to float32 first; integer kernels read float32 tensors",
    "is not a vector of one value a channel": "give the bias one value a channel",
    "alpha is not 1": "multiply alpha into the weight",
    "operand is transposed": "transpose the operand where it is made",
    "interpolation runs in float": "mode='nearest' runs in integer; compare accuracy before and after",
    "one scale would blur": "multiply the constant into the weights of a neighbouring Conv, Gemm or MatMul",
    "8 bits would blur": "multiply the constant into the weights of a neighbouring Conv, Gemm or MatMul",
}
# The same, by why the runtime runs a node of a finished model in float.
_BY_CAUSE: Final[Mapping[str, str]] = {
    "no-q-on-input": "quantize the float model anew: something before the node stayed float",
    "no-q-on-output": "quantize the float model anew: Q is missing behind the node",
    "second-consumer": "quantize the float model with kenosis_ort: the Q has to sit on the branching value",
    "graph-output": "protect_outputs='int8'",
    "non-absorbable-activation": "quantize the float model with kenosis_ort: this activation needs Q on both sides",
    "16-bit": "use 8-bit activations: no 16-bit type has integer kernels in this runtime",
    "type-mismatch": "give all of its inputs the same 8-bit type",
    "signed-branch": "activation_type=QuantType.QUInt8, or leave it out on x86-64",
    "scale-mismatch": "quantize the float model with kenosis_ort: both sides have to share scale and zero point",
    "bias-scale": "quantize the float model with kenosis_ort: the bias has to be at input_scale * weight_scale",
    "bias-not-int32": "quantize the float model with kenosis_ort: the bias has to be int32",
    "float-weight": "its weights are float: quantize the float model anew",
    "weight-type": "weight_type=QuantType.QInt8",
    "opset": "raise the operator set of the model",
}


@dataclass(frozen=True)
class Explanation:
    """One node explained.

    Attributes:
        node: Its name.
        op_type: Its operator.
        kind: ``integer``, ``float``, ``absorbed``, ``pass-through``, or what else the runtime made of it.
        rule: The rule or cause.
        reason: One sentence.
        remedy: What would change it; empty where there is nothing to change or no way.
        inputs: One line per input edge, for a planned node.
    """

    node: str
    op_type: str
    kind: str
    rule: str
    reason: str
    remedy: str = ""
    inputs: tuple[str, ...] = ()

    @property
    def is_heavy(self) -> bool:
        """Whether the node carries arithmetic worth an integer kernel."""
        return self.op_type in HEAVY or self.op_type == "ConvTranspose"

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.op_type} '{self.node}': {self.kind}" + (f", by {self.rule}" if self.rule else "")]
        lines += [f"  {self.reason}"] if self.reason else []
        lines += [f"  what would change it: {self.remedy}"] if self.remedy else []
        return printable("\n".join([*lines, *(f"  {line}" for line in self.inputs)]))


def explain_plan(plan: PlacementPlan) -> list[Explanation]:
    """An explanation of every planned node."""
    inputs: dict[str, list[str]] = {}
    for d in plan.decisions:
        text = f"input {d.edge.index} '{d.edge.value}': {d.how.value} by {d.rule}: {d.reason}"
        inputs.setdefault(d.edge.consumer, []).append(text)
    return [
        Explanation(
            n.node,
            n.op_type,
            n.kind.value,
            n.rule,
            n.reason,
            _remedy(n.rule, n.reason) if n.kind is Kind.FLOAT else "",
            tuple(inputs.get(n.node, ())),
        )
        for n in plan.nodes
    ]


def _remedy(rule: str, reason: str) -> str:
    by_reason = (remedy for words, remedy in _BY_REASON.items() if words in reason)
    return _BY_RULE.get(rule) or next(by_reason, "")


def explain_kernel(kernel: KernelReport) -> Explanation:
    """Explanation of the kernel that the runtime chose for a node."""
    status, cause = kernel.status.value, kernel.cause.value
    if status == "float":
        return Explanation(kernel.node, kernel.op_type, status, cause, kernel.reason, _BY_CAUSE.get(cause, ""))
    executed = f"runs as {kernel.kernel}" + (f" with {', '.join(kernel.absorbed)}" if kernel.absorbed else "")
    return Explanation(kernel.node, kernel.op_type, status, "", executed if kernel.kernel else kernel.reason)
