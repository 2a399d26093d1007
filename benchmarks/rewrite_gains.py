"""What each rewrite is worth by itself, on a small net that has what it changes.

Every net is quantized twice from the same calibration data: with all rewrites that are applied by default, and with all
but one (a rewrite that is off by default is added instead). Speed is against FP32, the median over rounds of fresh
sessions in random order, one pinned thread; ``gain`` is the ratio of the two. The nets are repeated blocks at the
widths and resolutions of well-known architectures, with random weights: a rewrite gains less in a whole net, where only
some layers have the pattern (`rewrites.py`, `architectures.py`).

    python benchmarks/rewrite_gains.py
    python benchmarks/rewrite_gains.py --rules residual_to_sum lrn_to_pool --rounds 15

With ``--joined`` it prints what joining layers over one input would gain, which no rewrite does (`_one_input.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _one_input as one_input
import numpy as np
import onnx
from _timing import interleaved
from _zoo import OneShotReader, quiet_folder
from nets.builder import Net
from onnx import helper

import kenosis_ort
from kenosis_ort.rewrite import FLOAT_FORMS, INTEGER_FORMS, OPTIONAL_FORMS
from kenosis_ort.targets.ort_cpu.rewrites import OWN_FORMS

Block = Callable[[Net, str], str]
TOKENS, WIDTH = 128, 256


def pictures(block: Block, *, channels: int, side: int, repeat: int = 3, stem: bool = True) -> onnx.ModelProto:
    """Repeats a block over pictures between two Convs."""
    n = Net()
    x = n.input("x", [1, channels, side, side])
    x = n.conv_relu(x, channels, 3) if stem else x
    for _ in range(repeat):
        x = block(n, x)
    return n.model(n.head(x, 100))


def tokens(block: Block, *, opset: int = 17, symbolic: bool = False, repeat: int = 6) -> onnx.ModelProto:
    """Repeats a block over tokens, a linear layer behind it."""
    n = Net(opset=opset)
    x = n.input("x", ["batch", "tokens", WIDTH] if symbolic else [1, TOKENS, WIDTH], axis=2)
    for _ in range(repeat):
        x = block(n, x)
    return n.model(n.linear(x, 64))


# -- pictures -----------------------------------------------------------------------------------------------------


def _silu(n: Net, x: str) -> str:
    return n.silu(n.conv(x, n.channels[x], 3))


def _gelu(n: Net, x: str) -> str:
    return n.conv(n.gelu(n.conv(x, 4 * n.channels[x])), n.channels[x])


def _hard_swish(n: Net, x: str) -> str:
    y = n.conv(x, n.channels[x], 3)
    gate = n.clip(n.op("Add", y, n.constant(3.0)), 0, 6)
    return n.op("Mul", y, n.op("Div", gate, n.constant(6.0)))


def _relu6(n: Net, x: str) -> str:
    y = n.op("Max", n.conv(x, n.channels[x], 3), n.constant(0.0))
    return n.op("Min", y, n.constant(6.0))


def _mean(n: Net, x: str) -> str:
    y = n.conv_relu(x, n.channels[x], 3)
    gate = n.conv_relu(n.op("ReduceMean", y, axes=[2, 3], keepdims=1), n.channels[x] // 4)
    return n.op("Mul", y, n.op("Sigmoid", n.conv(gate, n.channels[x])))


def _lrn(n: Net, x: str) -> str:
    return n.op("LRN", n.conv_relu(x, n.channels[x], 3), size=5, alpha=1e-4, beta=0.75)


def _norm(n: Net, x: str) -> str:
    return n.op("Add", x, n.conv(n.relu(n.norm(x)), n.channels[x], 3, bias=False))


def _scale(n: Net, x: str) -> str:
    c = n.channels[x]
    y = n.op("Mul", n.conv(x, c, 3, bias=False), n.constant(n.rng.uniform(0.5, 1.5, (c, 1, 1))))
    return n.relu(n.op("Add", y, n.constant(n.rng.normal(0, 0.1, (c, 1, 1)))))


def _average(n: Net, x: str) -> str:
    return n.conv_relu(n.average_pool(x, 3, 1, -1), n.channels[x])


def _sum(n: Net, x: str) -> str:
    return n.relu(n.op("Sum", x, n.conv(n.conv_relu(x, n.channels[x], 3), n.channels[x], 3)))


def _shuffle(n: Net, x: str) -> str:
    c, groups, side = n.channels[x], 4, 28
    y = n.reshape(n.conv_relu(x, c // 4, group=groups), [0, groups, c // 4 // groups, side, side])
    y = n.reshape(n.transpose(y, 0, 2, 1, 3, 4), [0, c // 4, side, side])
    n.channels[y] = c // 4
    y = n.conv(n.conv(y, c // 4, 3, group=c // 4), c, group=groups)
    return n.relu(n.op("Add", x, y))


def _channels_last(n: Net, x: str) -> str:
    y = n.transpose(n.conv(x, n.channels[x], 3), 0, 2, 3, 1)
    gate = n.clip(n.op("Add", y, n.constant(3.0)), 0, 6)
    y = n.transpose(n.op("Mul", y, n.op("Mul", gate, n.constant(1 / 6))), 0, 3, 1, 2)
    n.channels[y] = n.channels[x]
    return y


def _padded(n: Net, x: str) -> str:
    edges = n.constant(np.array([0, 0, 0, 0, 0, 0, 1, 1]), np.int64)
    return n.conv_relu(n.op("Pad", n.conv_relu(x, n.channels[x]), edges), n.channels[x], 3, pads=0)


def _stem(n: Net, x: str) -> str:
    return n.conv_relu(n.conv_relu(x, 32, 3, 2), 32, 3)


def _plain_stem(n: Net, x: str) -> str:
    return n.conv_relu(n.conv_relu(x, 32, 3), 32, 3, 2)


def _depthwise(n: Net, x: str) -> str:
    y = n.relu(n.conv(x, 72))
    return n.conv(n.relu(n.conv(y, 72, 3, group=72)), n.channels[x])


# -- tokens -------------------------------------------------------------------------------------------------------


def _layer_norm(n: Net, x: str) -> str:
    y = n.linear(x, WIDTH)
    centred = n.op("Sub", y, n.op("ReduceMean", y, axes=[-1]))
    variance = n.op("ReduceMean", n.op("Mul", centred, centred), axes=[-1])
    normal = n.op("Div", centred, n.op("Sqrt", n.op("Add", variance, n.constant(1e-5))))
    return n.op("Mul", normal, n.constant(np.ones(WIDTH)))


def _affine_norm(n: Net, x: str) -> str:
    y = n.linear(x, WIDTH)
    mean = n.op("ReduceMean", y, axes=[-1])
    centred = n.op("Sub", y, mean)
    variance = n.op("ReduceMean", n.op("Mul", centred, centred), axes=[-1])
    inverse = n.op("Reciprocal", n.op("Sqrt", n.op("Add", variance, n.constant(1e-5))))
    factor = n.op("Mul", inverse, n.constant(np.ones(WIDTH)))
    shift = n.op("Sub", n.constant(np.zeros(WIDTH)), n.op("Mul", mean, factor))
    return n.op("Add", n.op("Mul", y, factor), shift)


def _rms_norm(n: Net, x: str) -> str:
    y = n.linear(x, WIDTH)
    mean = n.op("ReduceMean", n.op("Pow", y, n.constant(2.0)), axes=[-1])
    inverse = n.op("Reciprocal", n.op("Sqrt", n.op("Add", mean, n.constant(1e-6))))
    return n.op("Mul", n.constant(np.ones(WIDTH)), n.op("Mul", y, inverse), channels=WIDTH)


def _residual(n: Net, x: str) -> str:
    return n.layer_norm(n.op("Add", n.linear(x, WIDTH), x, channels=WIDTH))


def _joined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Joins every Add with the LayerNormalization behind it, as offline tools do."""
    adds = {node.output[0]: node for node in model.graph.node if node.op_type == "Add"}
    for norm in [node for node in model.graph.node if node.op_type == "LayerNormalization"]:
        residual = adds[norm.input[0]]
        inputs = [*residual.input, *norm.input[1:]]
        norm.CopyFrom(
            helper.make_node(
                "SkipLayerNormalization", inputs, norm.output, norm.name, domain="com.microsoft", epsilon=1e-5
            )
        )
        model.graph.node.remove(residual)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def _linear(n: Net, x: str) -> str:
    return n.op("Tanh", n.linear(x, WIDTH))


NETS: dict[str, Callable[[], onnx.ModelProto]] = {
    "cancel_transposes": lambda: pictures(_channels_last, channels=64, side=56),
    "fold_padding": lambda: pictures(_padded, channels=64, side=56),
    "collapse_silu": lambda: pictures(_silu, channels=64, side=56),
    "collapse_gelu": lambda: pictures(_gelu, channels=96, side=28),
    "collapse_hard_swish": lambda: pictures(_hard_swish, channels=64, side=56),
    "collapse_clip": lambda: pictures(_relu6, channels=64, side=56),
    "collapse_layer_norm": lambda: tokens(_layer_norm),
    "collapse_affine_norm": lambda: tokens(_affine_norm),
    "spell_norm": lambda: tokens(_rms_norm),
    "split_skip_norm": lambda: _joined(tokens(_residual)),
    "residual_to_sum": lambda: tokens(_residual),
    "linear_to_gemm": lambda: tokens(_linear, symbolic=True),
    "pool_from_mean": lambda: pictures(_mean, channels=64, side=56),
    "lrn_to_pool": lambda: pictures(_lrn, channels=64, side=56, repeat=2),
    "batch_norm_to_conv": lambda: pictures(_norm, channels=64, side=56),
    "fold_scale": lambda: pictures(_scale, channels=64, side=56),
    "average_pool_to_conv": lambda: pictures(_average, channels=192, side=28),
    "sum_to_add": lambda: pictures(_sum, channels=64, side=56),
    "fold_channel_shuffle": lambda: pictures(_shuffle, channels=272, side=28),
    "space_to_depth_stem": lambda: pictures(_stem, channels=3, side=224, repeat=1, stem=False),
    "pad_stem_channels": lambda: pictures(_plain_stem, channels=3, side=112, repeat=1, stem=False),
    "pad_depthwise": lambda: pictures(_depthwise, channels=24, side=56),
}


def samples(model: onnx.ModelProto, count: int) -> list[dict[str, Any]]:
    """Normal noise, over `TOKENS` tokens where their number is open."""
    rng = np.random.default_rng(1)
    dims = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    shape = dims if all(dims) else [1, TOKENS, WIDTH]
    return [{"x": rng.normal(size=shape).astype(np.float32)} for _ in range(count)]


def measure(rule: str, folder: Path, **timing: Any) -> str:
    """Returns the line of a rule."""
    model = NETS[rule]()
    feeds = samples(model, 4)
    default = [form.__name__ for form in (*FLOAT_FORMS, *INTEGER_FORMS, *OWN_FORMS) if form not in OPTIONAL_FORMS]
    choices = {"without": [name for name in default if name != rule], "with": [*{*default, rule}]}
    files = {name: folder / f"{name}.onnx" for name in ("fp32", *choices)}
    onnx.save(model, str(files["fp32"]))
    notes = {
        name: kenosis_ort.quantize_static(
            model, files[name], OneShotReader(feeds), rewrites=chosen, promise=False
        ).notes
        for name, chosen in choices.items()
    }
    times = interleaved(files, feeds[0], baseline="fp32", **timing)
    own = [note for note in notes["with"] if note not in notes["without"]]
    speeds = {name: times[name].speed for name in choices}
    return (
        f"{rule:22s} FP32 {times['fp32'].milliseconds:6.2f} ms   without {speeds['without']:5.2f}x   with "
        f"{speeds['with']:5.2f}x +-{times['with'].spread:.2f}   gain {speeds['with'] / speeds['without']:5.2f}   "
        f"{own[0] if own else 'NOT APPLIED'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line a rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", choices=list(NETS), default=list(NETS), metavar="RULE")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of fresh sessions (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of one block (%(default)s)")
    parser.add_argument("--joined", action="store_true", help="only: layers over one input as one wider layer")
    args = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if args.joined:
        for line in one_input.rows(args.rounds, args.seconds):
            print(line, flush=True)
        return 0
    for rule in args.rules:
        with quiet_folder() as folder:
            print(measure(rule, folder, rounds=args.rounds, seconds=args.seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
