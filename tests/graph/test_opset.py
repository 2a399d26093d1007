"""Each change of an operator between operator sets 7 and 26, converted and compared on the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import onnx
import onnx.defs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.opset import fit_opset
from kenosis_ort.graph.opset_adapters import ADAPTERS
from kenosis_ort.graph.view import has_rank
from kenosis_ort.runtime.limits import runtime_limits
from tests.graph.build import assert_same, model, ops, ready, run, value

RNG = np.random.default_rng(0)
TARGETS = (13, 18, 21, runtime_limits().max_opset)


@dataclass
class Case:
    op: str
    opset: int
    attributes: dict = field(default_factory=dict)
    shape: tuple = (2, 6, 8, 10)
    extra: dict = field(default_factory=dict)
    outputs: int = 1
    elem_type: int = TensorProto.FLOAT
    out_type: int | None = None
    last: int = 99  # the last target that the runtime has a kernel for

    def build(self) -> onnx.ModelProto:
        names = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op, ["x", *self.extra], names, name="the_node", **self.attributes)
        outputs = [value(name, None, self.out_type or self.elem_type) for name in names]
        return model([node], [value("x", list(self.shape), self.elem_type)], outputs, self.extra, opset=self.opset)

    def feeds(self):
        dtype = helper.tensor_dtype_to_np_dtype(self.elem_type)
        return {"x": RNG.normal(size=self.shape).astype(dtype)}


CASES = [
    Case("Clip", 7, {"min": -0.5, "max": 0.5}),
    Case("Clip", 10, {"max": 0.25}),
    Case("Clip", 9, {}),
    Case("Slice", 9, {"starts": [1, 0], "ends": [5, -1], "axes": [1, 3]}),
    Case("Slice", 7, {"starts": [0, 1], "ends": [1, 9999]}),
    Case("Pad", 10, {"pads": [0, 0, 1, 2, 0, 0, 3, 0], "value": 1.5}),
    Case("Pad", 7, {"pads": [0, 0, 1, 2, 0, 0, 3, 0], "mode": "reflect"}),
    Case("Pad", 7, {"pads": [0, 0, 1, 2, 0, 0, 3, 0], "value": 2.0}, elem_type=TensorProto.DOUBLE),
    Case("Dropout", 7, {"ratio": 0.3}),
    Case("Dropout", 10, {}),
    Case("TopK", 9, {"k": 3, "axis": 2}, outputs=1),
    Case("Upsample", 7, {"scales": [1.0, 1.0, 2.0, 3.0]}),
    Case("Upsample", 8, {"scales": [1.0, 1.0, 2.0, 2.0], "mode": "linear"}),
    Case("Upsample", 9, {"mode": "nearest"}, extra={"s": np.array([1, 1, 1.7, 2.3], np.float32)}),
    Case("Upsample", 9, {"mode": "linear"}, extra={"s": np.array([1, 1, 2, 3], np.float32)}),
    *[
        Case("Resize", 10, {"mode": "nearest"}, extra={"s": np.array([1, 1, *scales], np.float32)})
        for scales in ((0.6, 2.5), (0.6, 0.7), (1.7, 2.5), (1, 0.3), (1.0, 1.0))
    ],
    Case("Resize", 10, {"mode": "linear"}, extra={"s": np.array([1, 1, 0.5, 2], np.float32)}),
    *[Case(op, 11, {"axis": axis}) for op in ("Softmax", "LogSoftmax") for axis in (0, 1, 2, 3, -1, -2)],
    Case("Softmax", 7, {}),
    Case("Softmax", 9, {}, shape=(3, 5)),
    Case("Hardmax", 11, {"axis": 2}),
    Case("Squeeze", 11, {"axes": [1, -1]}, shape=(3, 1, 4, 1)),
    Case("Squeeze", 7, {}, shape=(3, 1, 4, 1)),
    Case("Unsqueeze", 11, {"axes": [0, -1]}),
    Case("Split", 11, {"axis": 1, "split": [2, 4]}, outputs=2),
    Case("Split", 7, {"axis": -1}, outputs=2),
    Case("Split", 13, {"axis": 2}, outputs=4),
    Case("ReduceSum", 11, {"axes": [-1], "keepdims": 0}),
    Case("ReduceSum", 7, {}),
    *[
        Case(f"Reduce{kind}", 12, {"axes": [1, 3], "keepdims": 1})
        for kind in ("L1", "L2", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    ],
    Case("ReduceMean", 17, {"keepdims": 0}),
    Case("GridSample", 16, {"mode": "bicubic"}, extra={"g": RNG.uniform(-1, 1, (2, 4, 4, 2)).astype(np.float32)}),
    Case("GridSample", 16, {}, extra={"g": RNG.uniform(-1, 1, (2, 4, 4, 2)).astype(np.float32)}),
    Case(
        "GroupNormalization",
        18,
        {"num_groups": 3},
        extra={"s": RNG.normal(size=3).astype(np.float32), "b": RNG.normal(size=3).astype(np.float32)},
    ),
    Case("DFT", 17, {"axis": 2}, shape=(1, 6, 8, 2)),
    Case("DFT", 17, {}, shape=(1, 6, 2)),
    Case(
        "RoiAlign",
        10,
        {"output_height": 3, "output_width": 2, "spatial_scale": 0.5},
        last=21,
        extra={"r": np.array([[0, 0, 9, 9], [2, 1, 7, 8]], np.float32), "i": np.array([0, 1], np.int64)},
    ),
    Case(
        "Scatter",
        9,
        {"axis": 1},
        shape=(2, 4),
        extra={"i": np.array([[1], [3]], np.int64), "u": np.array([[9.0], [8.0]], np.float32)},
    ),
    Case(
        "BatchNormalization",
        7,
        {"epsilon": 1e-3, "spatial": 1},
        extra={name: np.abs(RNG.normal(size=6)).astype(np.float32) + 0.1 for name in "gbmv"},
    ),
    *[
        Case(op, 7)
        for op in ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "Softplus", "GlobalAveragePool", "Identity")
    ],
    Case("MaxPool", 7, {"kernel_shape": [3, 3], "strides": [2, 2]}),
    Case("AveragePool", 7, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    Case("Conv", 7, {"kernel_shape": [3, 3]}, extra={"w": RNG.normal(size=(4, 6, 3, 3)).astype(np.float32)}),
    Case(
        "Gemm",
        7,
        {"transB": 1},
        shape=(3, 6),
        extra={"w": RNG.normal(size=(4, 6)).astype(np.float32), "c": np.ones(4, np.float32)},
    ),
    Case("Flatten", 7, {"axis": 2}),
    Case("Transpose", 7, {"perm": [0, 2, 3, 1]}),
    Case("PRelu", 7, {}, extra={"s": np.full((6, 1, 1), 0.1, np.float32)}),
    Case("Cast", 9, {"to": TensorProto.INT32}, out_type=TensorProto.INT32),
    Case("ArgMax", 11, {"axis": 1}, out_type=TensorProto.INT64),
    Case("Pow", 7, {}, extra={"e": np.float32(2)}),
    Case("InstanceNormalization", 7, {}, extra={"s": np.ones(6, np.float32), "b": np.zeros(6, np.float32)}),
    Case("DepthToSpace", 7, {"blocksize": 2}, shape=(1, 8, 3, 3)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}{c.opset}{c.attributes}")
def test_converted_operators_compute_the_same(case):
    before = case.build()
    if case.op == "TopK":
        before.graph.node[0].output.append("indices")
    feeds = case.feeds()
    for target in TARGETS:
        if not case.opset < target <= case.last:
            continue
        after = ready(before, min_opset=target).proto
        assert onnx.defs.get_schema(after.graph.node[-1].op_type, target).deprecated is False
        assert {e.domain: e.version for e in after.opset_import} == {"": target}
        assert "the_node" in {node.name for node in after.graph.node}
        if all(has_rank(output) for output in after.graph.output):
            onnx.checker.check_model(after, full_check=True)
        assert_same(before, after, feeds, rtol=1e-6)


def test_every_changed_signature_has_an_adapter():
    """An operator whose later definition cannot read an earlier node must be listed."""
    latest = runtime_limits().max_opset
    history: dict[str, list] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= latest:
            history.setdefault(schema.name, []).append(schema)
    for name, schemas in history.items():
        schemas.sort(key=lambda s: s.since_version)
        for old, new in pairwise(schemas):
            if new.since_version <= 7:
                continue
            lost = set(old.attributes) - set(new.attributes)
            shifted = [i.name for i in old.inputs] != [i.name for i in new.inputs][: len(old.inputs)]
            changed = any(
                old.attributes[a].default_value != new.attributes[a].default_value
                for a in set(old.attributes) & set(new.attributes)
            )
            if new.deprecated or lost or changed or (shifted and name != "BatchNormalization"):
                listed = [version for version, _ in ADAPTERS.get(name, ())]
                assert any(v > old.since_version for v in listed), (name, new.since_version)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    data=st.data(),
    known=st.booleans(),
)
def test_softmax_over_any_axis(shape, data, known):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    dims = shape if known else [f"d{i}" for i in range(len(shape))]
    node = helper.make_node("Softmax", ["x"], ["y"], axis=axis)
    before = model([node], [value("x", dims)], [value("y", None)], opset=11)
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    assert_same(before, ready(before).proto, {"x": x}, rtol=1e-6)


def test_softmax_in_a_body_of_unknown_rank_is_right():
    body = helper.make_graph([helper.make_node("Softmax", ["x"], ["b"], axis=1)], "b", [], [value("b", None)])
    node = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    inputs = [value("c", [], TensorProto.BOOL), helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    before = model([node], inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], opset=11)
    after = ready(before).proto
    assert_same(before, after, {"c": np.array(True), "x": RNG.normal(size=(2, 3, 4)).astype(np.float32)})


def test_nested_bodies_are_converted():
    inner = helper.make_graph([helper.make_node("Unsqueeze", ["x"], ["i"], axes=[0])], "i", [], [value("i", None)])
    outer_nodes = [
        helper.make_node("If", ["c"], ["o"], then_branch=inner, else_branch=inner),
        helper.make_node("Softmax", ["o"], ["p"], axis=1),
    ]
    outer = helper.make_graph(outer_nodes, "o", [], [value("p", None)])
    nodes = [
        helper.make_node("If", ["c"], ["q"], then_branch=outer, else_branch=outer),
        helper.make_node("Softmax", ["q"], ["y"]),
    ]
    before = model(nodes, [value("c", [], TensorProto.BOOL), value("x", [2, 3])], [value("y", None)], opset=11)
    for flag in (True, False):
        feeds = {"c": np.array(flag), "x": RNG.normal(size=(2, 3)).astype(np.float32)}
        assert_same(before, ready(before).proto, feeds)


def test_the_domain_alias_is_normalized():
    before = model([helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx")], [value("x", [2])], [value("y", [2])])
    before.opset_import[0].domain = "ai.onnx"
    after = ready(before).proto
    assert [(e.domain, e.version) for e in after.opset_import] == [("", 17)]
    assert after.graph.node[0].domain == ""


def test_bounds_take_the_type_of_the_tensor():
    before = model(
        [helper.make_node("Clip", ["x"], ["y"], min=-0.5)],
        [value("x", [3], TensorProto.FLOAT16)],
        [value("y", [3], TensorProto.FLOAT16)],
        opset=10,
    )
    x = np.array([-1, 0, 1], np.float16)
    np.testing.assert_array_equal(run(ready(before).proto, {"x": x})[0], np.maximum(x, np.float16(-0.5)))


def test_a_model_of_an_older_operator_set_than_seven():
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["h"], broadcast=1), helper.make_node("Relu", ["h"], ["y"])]
    weights = {"w": RNG.normal(size=(4, 3)).astype(np.float32), "b": RNG.normal(size=(2, 3)).astype(np.float32)}
    before = model(nodes, [value("x", [2, 4])], [value("y", [2, 3])], weights, opset=6, ir=3)
    before.graph.input.extend([value("w", [4, 3]), value("b", [2, 3])])
    x = RNG.normal(size=(2, 4)).astype(np.float32)
    after = ready(before).proto
    assert [i.name for i in after.graph.input] == ["x"]
    expected = np.maximum(x @ weights["w"] + weights["b"], 0)
    np.testing.assert_allclose(run(after, {"x": x})[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [7, 10, 11])
def test_a_dropouts_mask_stays_what_the_runtime_makes_of_it(opset):
    kind = TensorProto.FLOAT if opset < 10 else TensorProto.BOOL
    node = helper.make_node("Dropout", ["x"], ["y", "mask"], ratio=0.25)
    before = model([node], [value("x", [2, 3])], [value("y", [2, 3]), value("mask", [2, 3], kind)], opset=opset)
    assert_same(before, ready(before).proto, {"x": RNG.normal(size=(2, 3)).astype(np.float32)})


def test_a_batch_norm_of_each_element():
    node = helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"], spatial=0, epsilon=0.1)
    weights = {name: RNG.uniform(0.5, 2, size=(3, 4, 4)).astype(np.float32) for name in "sbmv"}
    before = model([node], [value("x", [2, 3, 4, 4])], [value("y", [2, 3, 4, 4])], weights, opset=8)
    after = ready(before).proto
    assert ops(after) == ["Mul", "Add"]
    assert_same(before, after, {"x": RNG.normal(size=(2, 3, 4, 4)).astype(np.float32)})


def test_what_cannot_be_converted_is_named():
    node = helper.make_node("BatchNormalization", ["x", "a", "a", "a", "a"], ["y"], name="bad", spatial=0)
    before = model([node], [value("x", [2, 3]), value("a", [3])], [value("y", [2, 3])], opset=8)
    with pytest.raises(UnsupportedModelError, match="spatial") as caught:
        ready(before)
    assert "node 'bad'" in str(caught.value)
    assert caught.value.fix


class TestNewerThanTheRuntime:
    def test_a_relabel_is_enough_where_nothing_changed(self):
        limits = runtime_limits()
        newest = onnx.defs.onnx_opset_version()
        if newest <= limits.max_opset:
            pytest.skip("the installed onnx is not newer than the runtime")
        nodes = [
            helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT, saturate=1),
            helper.make_node("Relu", ["h"], ["y"]),
        ]
        before = model(nodes, [value("x", [2, 3])], [value("y", [2, 3])], opset=newest, ir=onnx.IR_VERSION)
        prepared = ready(before)
        assert prepared.proto.ir_version <= limits.max_ir
        assert any("lowered" in note for note in prepared.notes)
        x = RNG.normal(size=(2, 3)).astype(np.float32)
        np.testing.assert_array_equal(run(prepared.proto, {"x": x})[0], np.maximum(x, 0))

    def test_default_attributes_that_came_later_are_dropped(self):
        before = model(
            [helper.make_node("Cast", ["x"], ["y"], to=1, saturate=1)], [value("x", [2])], [value("y", [2])], opset=19
        )
        assert fit_opset(before, min_opset=13, max_opset=18)
        assert [a.name for a in before.graph.node[0].attribute] == ["to"]

    @pytest.mark.parametrize(
        ("node", "opset", "low"),
        [
            (helper.make_node("Cast", ["x"], ["y"], to=1, saturate=0, name="bad"), 19, 18),
            (helper.make_node("Gelu", ["x"], ["y"], name="bad"), 20, 19),
            (helper.make_node("ReduceMean", ["x", "a"], ["y"], name="bad"), 18, 17),
            (helper.make_node("GridSample", ["x", "a"], ["y"], name="bad"), 20, 19),
        ],
    )
    def test_what_the_runtime_cannot_read_is_refused(self, node, opset, low):
        before = model([node], [value("x", [2]), value("a", [1])], [value("y", [2])], opset=opset)
        with pytest.raises(UnsupportedModelError, match="bad"):
            fit_opset(before, min_opset=13, max_opset=low)

    def test_unknown_operator_sets_are_refused(self):
        before = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", [2])], [value("y", [2])], opset=999)
        with pytest.raises(UnsupportedModelError, match="operator set 999"):
            ready(before)


def test_nothing_changes_when_nothing_must():
    before = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", [2])], [value("y", [2])], opset=15)
    assert fit_opset(before, min_opset=13, max_opset=20) is None
    assert before.opset_import[0].version == 15
    assert ops(before) == ["Relu"]
