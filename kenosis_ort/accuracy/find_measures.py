"""The measure that suits an output, chosen by the operator that computes it, its shape and its values.

All three have to agree. Where they do not, or little speaks for a decision, the measure is the relative error: an
agreement of what decides nothing reads better than it is, or worse.

* Scores of classes without Softmax look like the features of an embedding, like landmarks and like spectra. They are
  taken for classes only if the winner is clear, differs between samples, and if the mean over the samples explains
  little of them: it explains nearly all of landmarks.
* An output like an input is a reconstruction; scores of the shape of an input are taken for one.
* Probabilities are a mask only where most are near 0 or 1, as those of a depth map are not.
* Boxes have to be boxes: corners in order, or positive widths, inside a common frame. Raw heads, whose boxes are
  offsets from a grid, are none.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from kenosis_ort.accuracy import Array, Float64, Outputs, as_rows, measures as found_by, product
from kenosis_ort.accuracy.detections import BoxLayout, DetectionF1
from kenosis_ort.accuracy.measures import THRESHOLD, ClassAgreement, ClassOverlap, Measure, TokenAgreement, without_ones

_TRANSPARENT = frozenset({"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Cast", "Concat"})
_MEANS = frozenset({"ReduceMean", "ReduceMax"})  # of shares they are shares
_SOFTMAX = frozenset({"Softmax", "LogSoftmax"})
_YES_NO = frozenset({"Sigmoid", "HardSigmoid"})
_LINEAR = frozenset(
    {"Gemm", "MatMul", "Add", "Mul", "Conv", "ConvTranspose", "Resize"}
    | {"GlobalAveragePool", "AveragePool", "ReduceMean"}
)
_MOST_CLASSES = 2**15
_LEAST_ROWS = 8  # rows of scores that tell classes from features
_LEAST_PIXELS = 64
_CLEAR = 0.5  # share of the entropy of pure chance that decided scores stay below
_COMMON = 0.5  # share of the variance that the mean over the rows may explain of scores
_UNDECIDED = 0.25  # share of values between 0.1 and 0.9 that a mask may have
_LEAST_VOCABULARY = 1000
_LIKE = 0.9  # correlation with an input from which on an output is a reconstruction
_MOST_LOOKED_AT = 64  # samples
_MOST_VALUES = 2**16  # of a sample that are looked at
_ALMOST_ALL = 0.99


def find_measures(
    graph: onnx.GraphProto, reference: Sequence[Outputs], feeds: Sequence[Mapping[str, Array]] = ()
) -> tuple[Measure, ...]:
    """Measure for a model's outputs: decisions, and if there are none the relative error.

    Args:
        graph: Of the float model.
        reference: Its outputs by name, one entry a sample; those that are to be measured.
        feeds: What it was fed; for the shapes of its inputs.
    """
    seen = list(reference[:_MOST_LOOKED_AT])
    arrays = {name: [np.asarray(outputs[name]) for outputs in seen] for name in (seen[0] if seen else ())}
    arrays = {name: found for name, found in arrays.items() if any(a.size for a in found)}
    producers = _producers(graph)
    shapes = {np.shape(value) for feed in feeds[:1] for value in feed.values()}
    again = {name for name, found in arrays.items() if _are_reconstructions(found, feeds)}
    alone = len(arrays) == 1  # a head of boxes and scores has more than one thing behind it
    layout = _layout({n: found for n, found in arrays.items() if not (alone and producers[n] <= _SOFTMAX | _YES_NO)})
    if layout is not None:
        return (DetectionF1(layout),)
    decided = [_decision(n, found, producers[n], shapes) for n, found in arrays.items() if n not in again]
    measures = tuple(measure for measure in decided if measure is not None)
    return measures or tuple(found_by.RelativeError(name) for name, found in arrays.items() if _varies(found))


def _producers(graph: onnx.GraphProto) -> dict[str, frozenset[str]]:
    """Operators of each output behind which it only changes its shape; not of means of shares."""
    made = {output: node for node in graph.node for output in node.output if output}

    def behind(value: str, through: frozenset[str] = _TRANSPARENT) -> frozenset[str]:
        found: set[str] = set()
        left, known = [value], set()
        while left:
            name = left.pop()
            node = made.get(name)
            if node is None or name in known:
                continue
            known.add(name)
            if node.op_type in through and node.input:
                left += node.input if node.op_type == "Concat" else node.input[:1]
            else:
                found.add(node.op_type)
        return frozenset(found)

    found = {}
    for output in graph.output:
        beyond = behind(output.name, _TRANSPARENT | _MEANS)
        found[output.name] = beyond if beyond and beyond <= _YES_NO else behind(output.name)
    return found


# ---- decisions ------------------------------------------------------------------------------------------------------


def _decision(
    name: str, arrays: Sequence[Array], producers: frozenset[str], inputs: set[tuple[int, ...]]
) -> Measure | None:
    """The measure of an output that decides something; None for others, and where that is not sure."""
    first = arrays[0]
    if len({a.ndim for a in arrays}) > 1 or not producers:
        return None
    if first.dtype.kind in "iu":
        return _labels(name, arrays) if producers == {"ArgMax"} else None
    if first.dtype.kind != "f" or not all(np.isfinite(a).all() for a in arrays):
        return None
    flat = [without_ones(a) for a in arrays]
    if producers <= _SOFTMAX:
        return _of_softmax(name, flat)
    if producers <= _YES_NO:
        return _probabilities(name, arrays)
    if any(a.shape in inputs for a in arrays):
        return None
    if producers <= _LINEAR:
        return _of_scores(name, flat, inputs)
    return None


def _labels(name: str, arrays: Sequence[Array]) -> Measure | None:
    squeezed = [np.squeeze(a) for a in arrays]
    if all(a.ndim >= 2 and min(a.shape[-2:]) >= 8 for a in squeezed):
        classes = max(int(a.max(initial=0)) for a in arrays) + 2  # labels that only the quantized model knows: one more
        return ClassOverlap(name, None, classes) if all(a.min() >= 0 for a in arrays) else None
    return found_by.SameTokens(name)


def _probabilities(name: str, arrays: Sequence[Array]) -> Measure | None:
    values = np.concatenate([_some(a) for a in arrays])
    if not 0.0 <= values.min() <= 0.5 <= values.max() <= 1.0:
        return None  # always the same decision
    shape = np.squeeze(arrays[0]).shape
    if len(shape) >= 2 and min(shape[-2:]) >= 8 and arrays[0].ndim >= 3:
        undecided = float(np.mean((values > 0.1) & (values < 0.9)))
        return found_by.MaskOverlap(name) if undecided <= _UNDECIDED else None
    alone = all(a.size == a.shape[0] for a in arrays)
    return found_by.YesOrNo(name) if alone else None


def _of_softmax(name: str, arrays: Sequence[Array]) -> Measure | None:
    first = arrays[0]
    if first.ndim == 2 and first.shape[1] > 1:
        return ClassAgreement(name, logarithms=bool(first.min() >= 0.0))
    if first.ndim == 3 and first.shape[-1] > 1 and _sums_to_one(first, -1):
        return TokenAgreement(name)
    if first.ndim == 4:
        for axis in (1, -1):
            others = [n for at, n in enumerate(first.shape) if at not in (0, axis % 4)]
            if first.shape[axis] > 1 and min(others) >= 8 and _sums_to_one(first, axis):
                return ClassOverlap(name, axis, first.shape[axis])
    return None


def _of_scores(name: str, arrays: Sequence[Array], inputs: set[tuple[int, ...]]) -> Measure | None:
    first = arrays[0]
    if first.ndim == 2:
        same = len({a.shape[1] for a in arrays}) == 1 and 1 < first.shape[1] <= _MOST_CLASSES
        return ClassAgreement(name) if same and _are_scores(np.concatenate(arrays).astype(np.float64)) else None
    if first.ndim == 3 and first.shape[-1] >= _LEAST_VOCABULARY and len({a.shape[-1] for a in arrays}) == 1:
        rows = np.concatenate([a.reshape(-1, a.shape[-1])[:256] for a in arrays[:8]]).astype(np.float64)
        return TokenAgreement(name) if _are_scores(rows) else None
    pictures = [shape for shape in inputs if len(shape) == 4]
    if first.ndim == 4 and any(s[2:] == first.shape[2:] and s[1] != first.shape[1] for s in pictures):
        classes = first.shape[1]
        if not 1 < classes <= 256 or first.shape[2] * first.shape[3] < _LEAST_PIXELS:
            return None
        rows = np.concatenate([np.moveaxis(a, 1, -1).reshape(-1, classes)[::17] for a in arrays[:8]])
        return ClassOverlap(name, 1, classes) if _are_scores(rows.astype(np.float64)) else None
    return None


def _are_scores(rows: Float64) -> bool:
    """Whether rows are scores of classes: decided, not all for one, and no variation of one mean row."""
    if len(rows) < _LEAST_ROWS or len(set(rows.argmax(axis=1).tolist())) < 2:
        return False
    shifted = rows - rows.max(axis=1, keepdims=True)
    chances = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    entropy = -(chances * np.log(np.maximum(chances, 1e-30))).sum(axis=1)
    if float(np.median(entropy)) > _CLEAR * np.log(rows.shape[1]):
        return False
    centered = rows - rows.mean(axis=1, keepdims=True)
    total = float((centered**2).mean())
    common = float((centered.mean(axis=0) ** 2).mean())
    return total > 0.0 and common <= _COMMON * total


def _sums_to_one(array: Array, axis: int) -> bool:
    values = np.asarray(array, np.float64)
    sums = np.exp(values).sum(axis=axis) if values.max() <= 0.0 else values.sum(axis=axis)
    return bool(np.allclose(sums, 1.0, atol=1e-3))


def _are_reconstructions(arrays: Sequence[Array], feeds: Sequence[Mapping[str, Array]]) -> bool:
    """Whether outputs are much like an input of the same shape."""
    for name in feeds[0] if feeds else ():
        pairs = [(a, np.asarray(feed[name])) for a, feed in zip(arrays, feeds, strict=False) if name in feed]
        alike = [(a, b) for a, b in pairs if a.shape == b.shape and a.dtype.kind == b.dtype.kind == "f"]
        if alike:
            x, y = (np.concatenate([_some(array) for array in side]) for side in zip(*alike, strict=True))
            x, y = x - x.mean(), y - y.mean()
            size = np.sqrt(product(x, x) * product(y, y))
            if size > 0 and product(x, y) > _LIKE * size:
                return True
    return False


def _varies(arrays: Sequence[Array]) -> bool:
    if arrays[0].dtype.kind != "f":
        return False
    finite = [a[np.isfinite(a)] for a in arrays]
    ends = [float(end) for a in finite if a.size for end in (a.min(), a.max())]
    return bool(ends) and max(ends) > min(ends)


def _some(array: Array) -> Float64:
    """Some of the values of an array, spread over all of it, the same places for the same shape."""
    return np.asarray(array.ravel()[:: max(1, array.size // _MOST_VALUES)], np.float64)


# ---- boxes ----------------------------------------------------------------------------------------------------------


def _layout(arrays: Mapping[str, Sequence[Array]]) -> BoxLayout | None:
    """Layout of boxes and scores; None where they are not certain."""
    for boxes, found in arrays.items():
        if found[0].dtype.kind == "f" and found[0].ndim in (2, 3) and found[0].shape[-1] == 4:
            if found[0].ndim == 2 and all(len(a) == 1 for a in found):
                continue  # four numbers of each sample: the axis is the batch's
            layout = _beside(boxes, arrays)
            if layout is not None:
                return layout
    for name, found in arrays.items():
        if len(arrays) == 1 and found[0].dtype.kind == "f" and found[0].ndim in (2, 3):
            for transposed in (False, True) if found[0].ndim == 3 else (False,):
                layout = _in_columns(name, found, transposed=transposed)
                if layout is not None:
                    return layout
    return None


def _beside(boxes: str, arrays: Mapping[str, Sequence[Array]]) -> BoxLayout | None:
    """The layout of boxes and scores in outputs of their own."""
    positions = [a.shape[:-1] for a in arrays[boxes]]
    alike = {
        name: found
        for name, found in arrays.items()
        if name != boxes and all(a.shape[: len(p)] == p for a, p in zip(found, positions, strict=True))
    }
    labels = next((n for n, f in alike.items() if f[0].dtype.kind in "iu" and f[0].ndim == len(positions[0])), None)
    for scores, found in alike.items():
        if found[0].dtype.kind != "f" or any(a.size and (a.min() < 0.0 or a.max() > 1.0) for a in found):
            continue
        columns: tuple[int, ...] = ()
        if found[0].ndim == len(positions[0]) + 1:
            if len({a.shape[-1] for a in found}) > 1:
                continue
            rows = np.concatenate([a.reshape(-1, a.shape[-1]) for a in found])
            columns = tuple(int(at) for at in np.flatnonzero(rows.mean(axis=0) < 0.5))  # the rest is the background
            if not columns:
                continue
        for corners in (True, False):
            layout = BoxLayout(boxes, scores, corners, columns, labels)
            if _holds(layout, arrays):
                return layout
    return None


def _in_columns(name: str, arrays: Sequence[Array], *, transposed: bool) -> BoxLayout | None:
    """The layout of boxes and scores in the columns of one output."""
    samples = [as_rows(a, -2 if transposed else -1) for a in arrays]
    if len({sample.shape[1] for sample in samples}) > 1:
        return None  # what varies with the sample, as the length of a text does, are no columns
    rows = np.concatenate(samples)
    if rows.shape[1] < 5 or len(rows) == 0:
        return None
    rest = rows[:, 4:]
    shares = (rest.min(axis=0) >= 0.0) & (rest.max(axis=0) <= 1.0)
    whole = rest.shape[1] == 2 and bool(shares[0]) and bool((rest[:, 1] == np.round(rest[:, 1])).all())
    if not whole and (not shares.all() or arrays[0].ndim == 2):
        return None
    columns, label = ((4,), 5) if whole and not shares[1] else (tuple(range(4, rows.shape[1])), None)
    for corners in (True, False):
        layout = BoxLayout(name, name, corners, columns, label, transposed)
        if _holds(layout, {name: arrays}):
            return layout
    return None


def _holds(layout: BoxLayout, arrays: Mapping[str, Sequence[Array]]) -> bool:
    """Whether objects were detected, and each of them has a box."""
    found = []
    for index in range(len(next(iter(arrays.values())))):
        outputs = {name: values[index] for name, values in arrays.items()}
        scores, _ = layout.scores_of(outputs)
        boxes = layout.boxes_of(outputs)
        if boxes.shape[:-1] != scores.shape:
            return False
        found.append(boxes[scores >= THRESHOLD])
    boxes = np.concatenate(found) if found else np.zeros((0, 4))
    if len(boxes) == 0 or not np.isfinite(boxes).all():
        return False
    sizes = boxes[:, 2:] - boxes[:, :2]
    frame = float(np.abs(boxes).max())
    in_frame = (boxes >= -0.5 * frame).all(axis=1)
    return float(((sizes > 0).all(axis=1) & in_frame).mean()) >= _ALMOST_ALL
