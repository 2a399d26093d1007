from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx.checker
import pytest
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.graph.load import check_not_quantized, load_model
from kenosis_ort.graph.opset import PRE_PROCESSED_KEY, PRE_PROCESSED_VALUE
from kenosis_ort.graph.view import has_rank
from kenosis_ort.rewrite import PREPARATION
from kenosis_ort.runtime.limits import RuntimeLimits, runtime_limits
from tests.graph.build import assert_same, model, ops, ready, run, session, value

ZOO = Path(__file__).resolve().parents[2] / "../shared/zoo"
NETS = sorted(ZOO.glob("*.onnx")) if ZOO.is_dir() else []
RNG = np.random.default_rng(0)


def relu(*names, opset=13, ir=8, **kwargs) -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", [a], [b]) for a, b in pairwise(names)]
    return model(nodes, [value(names[0], [2, 3])], [value(names[-1], [2, 3])], opset=opset, ir=ir, **kwargs)


def feeds_of(path: Path) -> dict[str, np.ndarray]:
    sizes = {"sequence": 576, "H": 40, "W": 56}
    feeds = {}
    for entry in session(str(path)).get_inputs():
        shape = [d if isinstance(d, int) else sizes.get(d, 2) for d in entry.shape]
        integer = entry.type == "tensor(int64)"
        feeds[entry.name] = np.array(16000) if integer else RNG.normal(size=shape).astype(np.float32)
    return feeds


@pytest.mark.parametrize("min_opset", [13, 21])
@pytest.mark.parametrize("path", NETS, ids=lambda p: p.stem)
def test_every_net_of_the_zoo(path, min_opset):
    loaded = load_model(path)
    check_not_quantized(loaded.proto)
    before = loaded.proto.SerializeToString()
    prepared = ready(loaded.proto, min_opset=min_opset, rewrites=PREPARATION)
    proto = prepared.proto
    assert loaded.proto.SerializeToString() == before
    assert_same(str(path), proto, feeds_of(path))
    assert max(e.version for e in proto.opset_import if e.domain == "") >= min_opset
    assert [i.name for i in session(proto).get_inputs()] == [i.name for i in session(str(path)).get_inputs()]
    assert [o.name for o in proto.graph.output] == [o.name for o in loaded.proto.graph.output]
    names = [node.name for node in proto.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)
    originals = {node.name for node in loaded.proto.graph.node if node.name}
    assert originals <= set(names) | set(prepared.nodes)
    assert all(now in names for nodes in prepared.nodes.values() for now in nodes)
    known = {v.name for v in proto.graph.value_info if has_rank(v)} | {v.name for v in proto.graph.output}
    if path.stem != "silero_vad_16k":  # its If branches give different ranks
        assert all(name in known for node in proto.graph.node for name in node.output if name)
        onnx.checker.check_model(proto, full_check=True)
    assert all(note.endswith(".") for note in prepared.notes)


def test_the_runtimes_limits_are_true():
    """1.23 reads operator set 23, but has no QuantizeLinear of it."""
    limits = runtime_limits()
    x = {"x": np.ones((2, 3), np.float32)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    constants = {"s": np.float32(0.5), "z": np.uint8(0)}

    def try_(opset: int, ir: int) -> None:
        run(model(nodes, [value("x", [2, 3])], [value("y", [2, 3])], constants, opset=opset, ir=ir), x)

    try_(limits.max_opset, limits.max_ir)
    for opset, ir in [(limits.max_opset + 1, limits.max_ir), (limits.max_opset, limits.max_ir + 1)]:
        with pytest.raises(Exception, match=r"(?i)support|implementation"):
            try_(opset, ir)


def test_max_pool_is_wanted_in_the_operator_set_in_which_it_fuses():
    old, new = RuntimeLimits(11, 22, "1.23.2"), RuntimeLimits(13, 26, "1.28.0")
    assert old.best_opset({"Conv"}) == 22
    assert old.best_opset({"Conv", "MaxPool"}) == 21
    assert new.best_opset({"Conv", "MaxPool"}) == 26
    assert RuntimeLimits(10, 20, "1.27.1").best_opset({"MaxPool"}) == 20


def test_the_ir_version_is_lowered_before_anything_else_fails():
    newest = relu("x", "y", ir=runtime_limits().max_ir + 1)
    prepared = ready(newest)
    assert prepared.proto.ir_version == runtime_limits().max_ir
    assert any("lowered" in note for note in prepared.notes)
    run(prepared.proto, {"x": np.ones((2, 3), np.float32)})
    assert newest.ir_version == runtime_limits().max_ir + 1


def test_initializers_leave_the_inputs():
    proto = relu("x", "y", opset=9, ir=3)
    weight = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    proto.graph.initializer.append(weight)
    proto.graph.input.append(value("w", [2, 3]))
    proto.graph.node.append(helper.make_node("Add", ["y", "w"], ["z"]))
    proto.graph.output[0].name = "z"
    prepared = ready(proto)
    assert [v.name for v in prepared.proto.graph.input] == ["x"]
    assert prepared.proto.ir_version >= 4
    assert_same(proto, prepared.proto, {"x": np.ones((2, 3), np.float32)})
    assert [v.name for v in ready(proto, keep_inputs=["w"]).proto.graph.input] == ["x", "w"]
    assert [v.name for v in ready(proto, keep_values=["w"]).proto.graph.input] == ["x"]


class TestNames:
    def test_unnamed_nodes_are_named_and_names_stay(self):
        proto = relu("x", "a", "b", "y")
        proto.graph.node[1].name = "mine"
        prepared = ready(proto)
        assert [n.name for n in prepared.proto.graph.node] == ["Relu_a", "mine", "Relu_y"]

    def test_a_generated_name_never_takes_one_that_is_there(self):
        proto = relu("x", "a", "y")
        proto.graph.node[1].name = "Relu_a"
        assert [n.name for n in ready(proto).proto.graph.node] == ["Relu_a_1", "Relu_a"]

    def test_shared_names_are_told_apart_and_reported(self):
        proto = relu("x", "a", "b", "y")
        for node in proto.graph.node:
            node.name = "same"
        prepared = ready(proto)
        assert [n.name for n in prepared.proto.graph.node] == ["same", "same_1", "same_2"]
        assert prepared.nodes == {"same": ("same", "same_1", "same_2")}


class TestConstants:
    def test_each_kind_of_constant(self):
        attributes = [
            {"value": numpy_helper.from_array(np.float32([1, 2]))},
            {"value_float": 1.5},
            {"value_floats": [1.0, 2.0]},
        ]
        nodes = [helper.make_node("Constant", [], [f"c{i}"], **a) for i, a in enumerate(attributes)]
        nodes += [helper.make_node("Sum", ["x", "c0", "c1", "c2"], ["y"])]
        proto = model(nodes, [value("x", [2])], [value("y", [2])])
        prepared = ready(proto)
        assert ops(prepared.proto) == ["Sum"]
        assert {t.name for t in prepared.proto.graph.initializer} == {"c0", "c1", "c2"}
        assert prepared.nodes == {"Constant_c0": (), "Constant_c1": (), "Constant_c2": ()}
        assert_same(proto, prepared.proto, {"x": np.float32([3, 4])})

    def test_integers_and_strings(self):
        nodes = [
            helper.make_node("Constant", [], ["i"], value_int=3),
            helper.make_node("Constant", [], ["s"], value_strings=[b"a", b"b"]),
            helper.make_node("Identity", ["i"], ["y"]),
            helper.make_node("Identity", ["s"], ["z"]),
        ]
        proto = model(nodes, [], [value("y", [], TensorProto.INT64), value("z", [2], TensorProto.STRING)])
        assert_same(proto, ready(proto).proto, {})

    def test_a_constant_that_is_an_output_stays(self):
        nodes = [helper.make_node("Constant", [], ["y"], value_float=1.0)]
        proto = model(nodes, [], [value("y", [])])
        assert ops(ready(proto).proto) == ["Constant"]
        assert_same(proto, ready(proto, rewrites=PREPARATION).proto, {})


def if_model(*, opset=13) -> onnx.ModelProto:
    """A Conv, BatchNormalization and Relu whose values the branches capture."""
    then = helper.make_graph([helper.make_node("Add", ["b", "k"], ["t"])], "then", [], [value("t", None)])
    otherwise = helper.make_graph([helper.make_node("Identity", ["c"], ["e"])], "else", [], [value("e", None)])
    nodes = [
        helper.make_node("Constant", [], ["k"], value_float=1.0),
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("BatchNormalization", ["c", "g", "h", "m", "v"], ["b"], name="bn"),
        helper.make_node("Identity", ["b"], ["i"], name="copy"),
        helper.make_node("If", ["flag"], ["y"], then_branch=then, else_branch=otherwise, name="if"),
        helper.make_node("Relu", ["i"], ["z"], name="relu"),
    ]
    weights = {n: np.abs(RNG.normal(size=3)).astype(np.float32) + 0.5 for n in "ghmv"}
    weights["w"] = RNG.normal(size=(3, 3, 1, 1)).astype(np.float32)
    inputs = [value("x", [1, 3, 4, 4]), value("flag", [], TensorProto.BOOL)]
    return model(nodes, inputs, [value("y", [1, 3, 4, 4]), value("z", [1, 3, 4, 4])], weights, opset=opset)


def test_values_that_bodies_capture_keep_their_meaning():
    proto = if_model()
    prepared = ready(proto, rewrites=PREPARATION).proto
    assert "BatchNormalization" in ops(prepared)  # a branch reads the Conv's own output
    assert "Identity" not in ops(prepared)
    for flag in (True, False):
        assert_same(proto, prepared, {"x": RNG.normal(size=(1, 3, 4, 4)).astype(np.float32), "flag": np.array(flag)})


def test_models_marked_as_pre_processed_are_not_rewritten():
    nodes = [helper.make_node("Identity", ["x"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    proto = model(nodes, [value("x", [2])], [value("y", [2])], opset=11)
    assert ops(ready(proto, rewrites=PREPARATION).proto) == ["Relu"]
    assert ops(ready(proto, rewrites=PREPARATION, preprocessed=True).proto) == ["Identity", "Relu"]
    proto.metadata_props.add(key=PRE_PROCESSED_KEY, value=PRE_PROCESSED_VALUE)
    prepared = ready(proto, rewrites=PREPARATION)
    assert ops(prepared.proto) == ["Identity", "Relu"]
    assert prepared.proto.opset_import[0].version == 13
    assert [p.key for p in prepared.proto.metadata_props] == [PRE_PROCESSED_KEY]
    assert ops(ready(proto, rewrites=PREPARATION, preprocessed=False).proto) == ["Relu"]


def test_operators_of_unknown_domains_pass():
    nodes = [
        helper.make_node("Strange", ["x"], ["h"], domain="ai.onnx.contrib"),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    proto = model(nodes, [value("x", [2, 3])], [value("y", [2, 3])], opset=11, domains={"ai.onnx.contrib": 1})
    prepared = ready(proto, rewrites=PREPARATION)
    assert ops(prepared.proto) == ["Strange", "Relu"]
    assert any("without type or rank" in note for note in prepared.notes)


def test_a_registered_library_gives_the_types_of_its_operators():
    extensions = pytest.importorskip("onnxruntime_extensions")
    nodes = [
        helper.make_node("StringUpper", ["s"], ["u"], domain="ai.onnx.contrib"),
        helper.make_node("Identity", ["u"], ["y"]),
    ]
    kinds = [value(n, [2], TensorProto.STRING) for n in "sy"]
    proto = model(nodes, kinds[:1], kinds[1:], domains={"ai.onnx.contrib": 1})
    prepared = ready(proto, custom_op_libraries=[extensions.get_library_path()])
    types = {v.name: v.type.tensor_type.elem_type for v in prepared.proto.graph.value_info}
    assert types["u"] == TensorProto.STRING


def test_the_runtimes_own_operators_get_types():
    nodes = [
        helper.make_node("FusedMatMul", ["x", "w"], ["h"], domain="com.microsoft", alpha=0.5),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    proto = model(
        nodes,
        [value("x", [2, 3])],
        [value("y", [2, 3])],
        {"w": np.eye(3, dtype=np.float32)},
        domains={"com.microsoft": 1},
    )
    prepared = ready(proto).proto
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in prepared.graph.value_info}
    assert shapes["h"] == [2, 3]


def test_sequences_optionals_and_strings_pass():
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x"], ["seq"]),
        helper.make_node("SequenceAt", ["seq", "i"], ["h"]),
        helper.make_node("Optional", ["h"], ["o"]),
        helper.make_node("OptionalGetElement", ["o"], ["g"]),
        helper.make_node("Identity", ["g"], ["y"]),
        helper.make_node("Identity", ["t"], ["s"]),
    ]
    inputs, outputs = [value("x", [2])], [value("y", [2]), value("s", [1], TensorProto.STRING)]
    proto = model(nodes, inputs, outputs, {"i": np.int64(1)}, opset=15)
    proto.graph.initializer.append(helper.make_tensor("t", TensorProto.STRING, [1], [b"text"]))
    prepared = ready(proto, rewrites=PREPARATION, min_opset=18).proto
    assert_same(proto, prepared, {"x": np.float32([1, 2])})


def test_wrong_value_info_does_not_stop_preparation():
    proto = relu("x", "a", "y")
    proto.graph.value_info.append(value("a", [7, 7, 7], TensorProto.INT64))
    proto.graph.value_info.append(value("ghost", [1]))
    prepared = ready(proto, rewrites=PREPARATION).proto
    assert "ghost" not in {v.name for v in prepared.graph.value_info}


@pytest.mark.parametrize("dims", [[1, 3], [1, 8, 3, 3], None])
def test_declarations_that_are_wrong_are_not_believed(dims):
    """The runtime infers the truth; a rank that we believed would spread through what is built on it."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c"], ["y"])]
    weights = {"w": np.ones((8, 2, 3, 3), np.float32)}
    proto = model(nodes, [value("x", ["n", 2, 5, 5])], [value("y", None)], weights)
    proto.graph.value_info.append(value("c", dims, TensorProto.DOUBLE if dims is None else TensorProto.FLOAT))
    (found,) = (v for v in ready(proto).proto.graph.value_info if v.name == "c")
    assert found.type.tensor_type.elem_type == TensorProto.FLOAT
    assert [d.dim_value or d.dim_param for d in found.type.tensor_type.shape.dim] == ["n", 8, 5, 5]


def test_guessed_dimensions_are_not_trusted():
    """Symbolic inference takes a Split by computed sizes for one into equal parts; only its ranks are used."""
    nodes = [
        helper.make_node("Shape", ["x"], ["n"], start=1, end=2),
        helper.make_node("Sub", ["n", "n"], ["zero"]),
        helper.make_node("Concat", ["n", "zero"], ["sizes"], axis=0),
        helper.make_node("Split", ["x", "sizes"], ["a", "b"], axis=1),
        helper.make_node("Mul", ["a", "w"], ["y"]),
    ]
    proto = model(nodes, [value("x", ["N", "M"])], [value("y", ["N", "M"])], {"w": np.ones((1, 6), np.float32)})
    prepared = ready(proto, rewrites=PREPARATION).proto
    for known in prepared.graph.value_info:
        if known.name == "a":
            assert not any(d.dim_value for d in known.type.tensor_type.shape.dim)
    assert_same(proto, prepared, {"x": np.ones((2, 6), np.float32)})


def test_nothing_is_left_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ready(if_model(), rewrites=PREPARATION)
    assert list(tmp_path.iterdir()) == []


def test_the_given_model_is_never_changed():
    proto = if_model(opset=11)
    before = proto.SerializeToString(deterministic=True)
    ready(proto, rewrites=PREPARATION, min_opset=18)
    assert proto.SerializeToString(deterministic=True) == before


def long_chain(count: int) -> onnx.ModelProto:
    nodes, weights, last = [], {}, "x"
    for i in range(count // 4):
        weights[f"w{i}"] = np.eye(2, dtype=np.float32).reshape(2, 2, 1, 1)
        weights |= {f"{k}{i}": np.ones(2, np.float32) for k in "gbmv"}
        params = [f"{k}{i}" for k in "gbmv"]
        nodes += [
            helper.make_node("Conv", [last, f"w{i}"], [f"c{i}"]),
            helper.make_node("BatchNormalization", [f"c{i}", *params], [f"n{i}"]),
            helper.make_node("Relu", [f"n{i}"], [f"r{i}"]),
            helper.make_node("Identity", [f"r{i}"], [f"d{i}"]),
        ]
        last = f"d{i}"
    return model(nodes, [value("x", ["N", 2, 1, 1])], [value(last, ["N", 2, 1, 1])], weights, opset=9)


def test_time_grows_linearly():
    """Four times the nodes take about four times as long; quadratic steps would take sixteen times."""

    def seconds(count: int) -> float:
        proto = long_chain(count)
        start = time.process_time()
        ready(proto, rewrites=PREPARATION)
        return time.process_time() - start

    assert seconds(6000) < 10 * min(seconds(1500) for _ in range(2))


def test_an_operator_of_which_inference_dies_behind_one_that_it_does_not_know():
    """The process would end with a segmentation fault."""
    nodes = [
        helper.make_node("QuickGelu", ["x"], ["g"], domain="com.microsoft"),
        helper.make_node("EyeLike", ["g"], ["e"], dtype=TensorProto.FLOAT),
        helper.make_node("Add", ["g", "e"], ["y"]),
    ]
    proto = model(nodes, [value("x", [4, 4])], [value("y", [4, 4])], domains={"com.microsoft": 1})
    prepared = ready(proto).proto
    assert {v.name for v in prepared.graph.value_info} == {"g", "e"}
    assert [n.domain for n in prepared.graph.node] == ["com.microsoft", "", ""]
    assert_same(proto, prepared, {"x": np.eye(4, dtype=np.float32)})
