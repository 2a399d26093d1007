"""The gated model: all gates on is the quantized model, all off the float one, and single gates are single tensors."""

import numpy as np
import pytest

from kenosis_ort.errors import UnsupportedModelError, VerificationError
from kenosis_ort.passes.gates import GatedModel, GateKind
from kenosis_ort.plan import Kind
from tests import models, planning
from tests.graph.build import run
from tests.passes.support import everything


@pytest.mark.parametrize("name", models.ALL)
def test_all_on_is_the_quantized_model_and_all_off_the_float_one(name: str) -> None:
    made = planning.quantize(models.ALL[name]())
    before = made.quantized.SerializeToString(), made.model.SerializeToString()
    with GatedModel(made.model, made.quantized) as gated:
        assert gated.on_in(made.plan) == everything(gated)
        groups = {kind: {g.group for g in gated.gates if g.kind is kind} for kind in GateKind}
        assert groups[GateKind.BIAS] <= groups[GateKind.WEIGHT], "weight and bias of a node are one group"
        outputs = {o.name for o in made.model.graph.output}
        assert all(("" in g.consumers) == (g.value in outputs) for g in gated.gates), "who reads beside the nodes"
        for feed in made.feeds[:2]:
            (on,), (off,) = gated.outputs([feed], [everything(gated), ()])
            for a, b in zip(on.values(), run(made.quantized, feed), strict=True):
                # the float kernels differ in the last digits, which moves a rounding now and then
                np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max(initial=1e-6))
                assert np.mean(np.abs(a - b)) <= 1e-3 * np.abs(b).max(initial=1e-6)
            for a, b in zip(off.values(), run(made.model, feed), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert before == (made.quantized.SerializeToString(), made.model.SerializeToString())


def test_gates_follow_the_plan_of_a_node_left_float() -> None:
    net = models.conv_relu_chain(8)
    made = planning.quantize(net)
    convs = [n.node for n in made.plan.nodes if n.op_type == "Conv" and n.kind is Kind.INTEGER]
    with GatedModel(made.model, made.quantized) as gated:
        one = gated.on_in(planning.plan_of(net, keep_float={convs[1]: "test"}))
        two = gated.on_in(planning.plan_of(net, keep_float={convs[0]: "test", convs[1]: "test"}))
        gone = {gated.gates[i].kind for i in everything(gated) - one}
        assert gone == {GateKind.WEIGHT, GateKind.BIAS}  # its neighbours still hand it integers
        kinds = [gated.gates[i].kind for i in one - two]
        assert GateKind.ACTIVATION in kinds  # what lies between two float nodes is float


def test_gemm_beta_is_part_of_the_float_bias() -> None:
    made = planning.quantize(
        "net (float[2,8] x) => (y) <float[8,4] w, float[4] b> { y = Gemm <beta=0.5> (x, w, b) }", protect_outputs="int8"
    )
    with GatedModel(made.model, made.quantized) as gated:
        ((off,),) = gated.outputs(made.feeds[:1], [()])
        np.testing.assert_allclose(off["y"], run(made.model, made.feeds[0])[0], rtol=1e-5, atol=1e-6)


def test_models_that_do_not_belong_together_are_refused() -> None:
    made, other = planning.quantize(models.conv_relu_chain(2)), planning.quantize(models.mlp())
    with pytest.raises(UnsupportedModelError, match="very model"):
        GatedModel(other.model, made.quantized)
    with pytest.raises(UnsupportedModelError, match="nothing can be switched"):
        GatedModel(made.model, made.model)
    with GatedModel(made.model, made.quantized) as gated, pytest.raises(VerificationError, match="does not run"):
        next(gated.outputs([{"nonsense": np.zeros(1, np.float32)}], [()]))
