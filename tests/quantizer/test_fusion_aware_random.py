"""Any net: the quantized model is what the plan says, loads, and every node planned integer is integer."""

from __future__ import annotations

import onnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kenosis_ort.verify import verify_fusion
from tests import planning
from tests.quantizer.performed import Performed
from tests.quantizer.random_nets import nets


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(nets(), st.data())
def test_every_edge_is_as_decided_and_the_model_loads(model: onnx.ModelProto, data: st.DataObject) -> None:
    names = [node.name for node in planning.prepared(model).graph.node]
    done = planning.quantize(
        model,
        nodes_to_exclude=frozenset(data.draw(st.lists(st.sampled_from(names), max_size=2))),
        protect_outputs=data.draw(st.sampled_from(["auto", "float", "int8", None])),
        per_channel=data.draw(st.booleans()),
    )
    Performed(done.model, done.quantized, done.plan).check()
    report = verify_fusion(done.quantized, plan=done.plan)
    assert [k.node for k in report.avoidable(done.plan)] == []
