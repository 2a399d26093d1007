"""Small breaks of the package, each with the tests that must notice it."""

from __future__ import annotations

from typing import NamedTuple


class Break(NamedTuple):
    """One change of the source.

    Attributes:
        file: Below ``kenosis_ort``.
        old: What stands there, once.
        new: What stands there instead.
        tests: Files and folders below ``tests`` of which one test has to fail.
    """

    file: str
    old: str
    new: str
    tests: str


BREAKS = (
    Break(
        "graph/product_pairs.py",
        "PairOrder((0, *range(2, rank), 1), 1)",
        "PairOrder(tuple(range(rank)), 1)",
        "graph/test_product_pairs.py",
    ),
    Break(
        "graph/product_pairs.py",
        "np.abs(sums) > LARGEST_PAIR",
        "np.abs(sums) > 2 * LARGEST_PAIR",
        "graph/test_product_pairs.py",
    ),
    Break(
        "quantizer/parameters.py",
        "low, high = min(low, 0.0), max(high, 0.0)",
        "low, high = low, max(high, 0.0)",
        "quantizer/test_parameters.py",
    ),
    Break(
        "quantizer/parameters.py",
        "if ceiling is not None and zero_point < qmax:",
        "if ceiling is None:",
        "quantizer/test_parameters.py",
    ),
    Break(
        "quantizer/weights.py",
        "np.clip(np.rint(np.asarray(",
        "np.clip(np.trunc(np.asarray(",
        "quantizer/test_weights.py",
    ),
    Break(
        "quantizer/weights.py",
        "np.maximum(np.maximum(scale, needed),",
        "np.maximum(scale,",
        "quantizer/test_weights.py",
    ),
    Break(
        "quantizer/weights.py",
        "largest / top, largest.max(initial=0.0) / top or 1.0)",
        "largest / top, 1.0)",
        "quantizer/test_weights.py flow/test_ablation.py",
    ),
    Break(
        "calibration/minmax.py",
        "self._count[name] += reduction.count",
        "self._count[name] = reduction.count",
        "calibration/test_minmax.py calibration/test_table.py",
    ),
    Break(
        "calibration/histogram.py",
        "exponent = max(self.exponent, other.exponent)",
        "exponent = self.exponent",
        "calibration/test_histogram.py",
    ),
    Break(
        "accuracy/error.py",
        "_SPARSE = 0.25",
        "_SPARSE = 2.5",
        "accuracy",
    ),
    Break(
        "passes/runner.py",
        "after.beats(before) if each.must_beat else after.is_better(before)",
        "True",
        "passes flow/test_ladder.py flow/test_recipes.py",
    ),
    Break(
        "passes/runner.py",
        "if held_out < each.least_held_out and not forced:",
        "if False:",
        "passes flow/test_ladder.py flow/test_held_out.py",
    ),
    Break(
        "placement/decisions.py",
        "if missing is not None:",
        "if missing is None and False:",
        "placement flow/test_explicit.py contracts",
    ),
    Break(
        "placement/cost.py",
        "if level[number] >= 0}",
        "if level[number] < 0}",
        "placement",
    ),
    Break(
        "rewrite/collapse_silu.py",
        "if gate.input[0] == x:",
        "if gate.input:",
        "rewrite contracts/test_rewrites.py",
    ),
    Break(
        "weights/blocks.py",
        "np.rint(values / scale) + zero, 0, self.top",
        "np.rint(values / scale) + zero, 0, self.top + 1",
        "weights/test_blocks.py weights/test_rounding.py",
    ),
    Break("bench/noise.py", "if low > 0 and middle > margin:", "if middle > margin:", "bench"),
    Break("bench/noise.py", "if 1 - 2 * tail < confidence:", "if 1 - tail < confidence:", "bench"),
    Break("checks.py", "if number < least or (", "if (", "cli/test_values.py test_recipe.py flow/test_bad_input.py"),
    Break("cli/exits.py", "ERROR: Final = 2", "ERROR: Final = 1", "cli/test_errors.py cli/test_mistakes.py"),
    Break("storage/writing.py", "            sync(made)\n", "", "storage/test_writing.py"),
    Break(
        "storage/scratch.py",
        "    lock = lock_folder(path)\n    if lock is None:\n        return\n",
        "    lock = os.open(path, os.O_RDONLY)\n",
        "storage/test_scratch.py",
    ),
    Break("errors.py", "if c in keep or unicodedata.category(c) not in _SPELLED_OUT", "if c", "test_errors.py"),
    Break(
        "verify/numerics.py",
        "axis = -1 if a.ndim <= 3 else 1",
        "axis = -1",
        "verify/test_numerics.py",
    ),
    Break("clients/patching.py", "if name not in _OPTIONS:", "if not name:", "clients/test_patching.py"),
    Break(
        "cluster/worker.py",
        '{"python": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()}',
        "{}",
        "cluster/test_shards.py",
    ),
)
