"""Sum as Add.

``Sum(a, b) = a + b`` is ``Add(a, b)``, and ``Sum(a, b, c, ...)`` is ``Add(Add(Add(a, b), c), ...)``: the runtime's Sum
adds in this order too, with the same broadcasting, so the result is the same to the bit.

Sum has no integer kernel, Add has one, into which the Relu behind a residual vanishes (a residual net 2.4x of FP32 for
1.6x). A Sum between float nodes had better stay one: the runtime fuses an Add and the LayerNormalization behind it into
a kernel that is slower than the two.

Not changed: a Sum of one value, types other than float32.
"""

from __future__ import annotations

import onnx

from kenosis_ort.rewrite.matching import NotCollapsibleError
from kenosis_ort.rewrite.rule import IntegerForm, integer_rule


@integer_rule("Sum", did="Sum nodes became Add", stays="Sum nodes stay")
def sum_to_add(form: IntegerForm, node: onnx.NodeProto) -> None:
    """Turns each named Sum into an Add, or into a chain of Adds whose last keeps the name and the output, in place."""
    inputs = list(node.input)
    if len(inputs) < 2:
        raise NotCollapsibleError("it has one operand only")
    for name in inputs:
        form.require_float32(name)
    total = inputs[0]
    for name in inputs[1:-1]:
        total = form.insert_before(node, "Add", [total, name])
    form.become(node, "Add", [total, inputs[-1]])
