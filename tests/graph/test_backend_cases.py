"""A sample of ONNX's own operator cases: preparation changes nothing of what the runtime computes."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.rewrite import PREPARATION
from kenosis_ort.runtime.limits import runtime_limits
from tests.graph.build import ready, session

EVERY = 6
RANDOM = ("Bernoulli", "Dropout", "Multinomial", "Random")
HALF = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


@functools.cache
def cases():
    def pooled(padded, x_shape, kernel, strides, out_shape, *_, **__):
        """Zeros: onnx pools in Python, for many seconds, and what it expects is not looked at here."""
        return np.zeros((*x_shape[:2], *out_shape), padded.dtype)

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr("onnx.reference.ops.op_pool_common.pool", pooled, raising=False)
        from onnx.backend.test.case.node import collect_testcases

        return [case for case in collect_testcases(None) if case.model is not None][::EVERY]


def outputs(proto, arrays):
    """The model's outputs, None where the runtime does not run it."""
    lowered = copy_model(proto)
    lowered.ir_version = min(proto.ir_version, runtime_limits().max_ir)
    try:
        run = session(lowered)
        return run.run(None, {entry.name: a for entry, a in zip(run.get_inputs(), arrays, strict=False)})
    except Exception:
        return None


def same(a, b):
    if a is None or b is None:
        return a is b
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind in "fc":
        return a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
    return np.array_equal(a, b)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="some of onnx's own cases need numpy 2")
@pytest.mark.parametrize("min_opset", [13, 22])
def test_what_ran_before_runs_the_same(min_opset):
    compared, refused = 0, []
    for case in cases():
        nodes = case.model.graph.node
        half = any(i.type.tensor_type.elem_type in HALF for i in case.model.graph.input)
        if half or any(node.op_type.startswith(RANDOM) for node in nodes):
            continue
        given = case.data_sets[0][0]
        arrays = [numpy_helper.to_array(a) if isinstance(a, onnx.TensorProto) else a for a in given]
        before = outputs(case.model, arrays)
        if before is None:
            continue
        try:
            prepared = ready(case.model, rewrites=PREPARATION, min_opset=min_opset)
        except UnsupportedModelError:
            refused.append(case.name)
            continue
        after = outputs(prepared.proto, arrays)
        newest = case.model.opset_import[0].version > runtime_limits().max_opset
        if after is None and (newest or nodes[0].op_type == "RoiAlign"):
            continue  # refused: types of an operator set that nothing is quantized in, RoiAlign of operator set 22
        assert same(before, after), case.name
        compared += 1
    assert compared > 100
    known = "test_scan_sum"  # of operator set 8, with a batch axis of its own
    if runtime_limits().max_opset < 23:  # RMSNormalization came with it, and the runtime quantizes below only
        known = (known, "test_rms_normalization")
    assert [name for name in refused if not name.startswith(known)] == []
