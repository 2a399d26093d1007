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
        "graph/qdq.py",
        "PairOrder((0, *range(2, rank), 1), 1)",
        "PairOrder(tuple(range(rank)), 1)",
        "graph/test_product_pairs.py",
    ),
    Break(
        "graph/qdq.py",
        "np.abs(sums) > LARGEST_PAIR",
        "np.abs(sums) > 2 * LARGEST_PAIR",
        "graph/test_product_pairs.py",
    ),
    Break(
        "quantizer/editor.py",
        "low, high = min(low, 0.0), max(high, 0.0)",
        "low, high = low, max(high, 0.0)",
        "quantizer/test_parameters.py",
    ),
    Break(
        "quantizer/editor.py",
        "if ceiling is not None and zero_point < qmax:",
        "if ceiling is None:",
        "quantizer/test_parameters.py",
    ),
    Break(
        "graph/qdq.py",
        "np.clip(np.rint(np.asarray(",
        "np.clip(np.trunc(np.asarray(",
        "quantizer/test_weights.py",
    ),
    Break(
        "quantizer/constant_scales.py",
        "np.maximum(np.maximum(scale, least_scale(biases, scale)),",
        "np.maximum(scale,",
        "quantizer/test_weights.py",
    ),
    Break(
        "quantizer/constant_scales.py",
        "largest / top, largest.max(initial=0.0) / top or 1.0)",
        "largest / top, 1.0)",
        "quantizer/test_weights.py flow/test_ablation.py",
    ),
    Break(
        "calibration/accumulators.py",
        "self._count += seen.count",
        "self._count = seen.count",
        "calibration/test_collector.py calibration/test_table.py",
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
        "passes/contract.py",
        "if nodes is None or node in nodes)",
        "if True)",
        "contracts/test_passes.py",
    ),
    Break(
        "passes/equalize_layers.py",
        "index = GraphIndex.of_copy(model)",
        "index = GraphIndex(model)",
        "contracts/test_passes.py",
    ),
    Break(
        "passes/runner.py",
        "self.attempt(each.title, partial(self._try, each, state, passes[at + 1 :]), None)",
        "self._try(each, state, passes[at + 1 :])",
        "contracts/test_passes.py",
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
        "rewrite/rule.py",
        "if value and (outside or self.is_pinned(value)):",
        "if value and outside:",
        "contracts/test_rewrites.py",
    ),
    Break("rewrite/rule.py", "if editor.may_change(node) and not", "if not", "contracts/test_rewrites.py"),
    Break("rewrite/rule.py", "!= _FLOAT32:", "is None:", "contracts/test_rewrites.py"),
    Break("graph/constants.py", "and self.readers.get(old) == [node] and", "and", "contracts/test_rewrites.py"),
    Break(
        "rewrite/activations.py",
        "if gate.input[0] == x:",
        "if gate.input:",
        "rewrite contracts/test_rewrites.py",
    ),
    Break(
        "weights/blocks.py",
        "on_grid(values, scale, zero, 0, self.top)",
        "on_grid(values, scale, zero, 0, self.top + 1)",
        "weights/test_blocks.py weights/test_rounding.py",
    ),
    Break("bench/harness.py", "if low > 0 and middle > margin:", "if middle > margin:", "bench"),
    Break("bench/harness.py", "if 1 - 2 * tail < confidence:", "if 1 - tail < confidence:", "bench"),
    Break("checks.py", "if number < least or (", "if (", "cli/test_mistakes.py test_recipe.py flow/test_bad_input.py"),
    Break("cli/exits.py", "ERROR: Final = 2", "ERROR: Final = 1", "cli/test_mistakes.py"),
    Break(
        "storage/writing.py",
        "    lock = lock_folder(path)\n    if lock is None:\n        return\n",
        "    lock = os.open(path, os.O_RDONLY)\n",
        "storage/test_scratch.py",
    ),
    Break("errors.py", "if c in keep or unicodedata.category(c) not in _SPELLED_OUT", "if c", "test_errors.py"),
    Break(
        "accuracy/outputs.py",
        "axis = -1 if a.ndim <= 3 else 1",
        "axis = -1",
        "accuracy/test_outputs.py",
    ),
    Break("clients/patching.py", "if name not in _OPTIONS:", "if not name:", "clients/test_patching.py"),
    Break(
        "cluster/worker.py",
        '{"python": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()}',
        "{}",
        "cluster/test_shards.py",
    ),
    Break(
        "flow/preparation.py",
        "if gain < _WORTH_AN_OPSET:",
        "if gain < 0:",
        "flow/test_stated.py",
    ),
    Break(
        "flow/call.py",
        '        if "float_because" in more or (taken is not None and not taken.is_planned):',
        "        if taken is not None and not taken.is_planned:",
        "report/test_of_the_file.py",
    ),
    Break(
        "flow/run.py",
        '                if request.on_failure == "error":',
        '                if request.on_failure != "error":',
        "flow/test_ladder.py",
    ),
    Break(
        "flow/speed.py",
        "    recorded = None if recorded is None or recorded.model != model else recorded\n",
        "",
        "flow/test_recorded_speed.py",
    ),
    Break(
        "flow/finish.py",
        "        if in_place and same_file(model, output):",
        "        if in_place:",
        "flow/test_files.py",
    ),
    Break(
        "flow/speed.py",
        "        is_faster = found is not None and found.tells_faster()",
        "        is_faster = found is not None",
        "flow/test_speed.py tuning",
    ),
    Break(
        "flow/finish.py",
        "if bad is None or (bad.sqnr_db >= 0 and",
        "if bad is None or (bad.sqnr_db >= -100 and",
        "flow/test_ladder.py",
    ),
    Break(
        "tuning/promise.py",
        "            return self.speed >= self.error",
        "            return self.speed >= 1 / self.error",
        "tuning flow/test_speed.py",
    ),
    Break(
        "tuning/promise.py",
        "(1 + trust) >= math.log(_BORDER)",
        "(1 + trust) >= -1",
        "tuning",
    ),
    Break(
        "tuning/promise.py",
        "_REFUSED: Final = (FormStatus.SLOWER, FormStatus.UNDECIDED, FormStatus.DROPPED)",
        "_REFUSED: Final = (FormStatus.SLOWER,)",
        "tuning flow/test_speed.py",
    ),
    Break(
        "graph/outside.py",
        '    if ".." in windows.parts or ".." in Path(location).parts:',
        "    if False:",
        "graph/test_load.py",
    ),
    Break(
        "graph/outside.py",
        "    if not any(target.is_relative_to(folder) for folder in folders):",
        "    if False:",
        "graph/test_load.py",
    ),
    Break(
        "graph/outside.py",
        "    if length < 0 or span.offset + length > size:",
        "    if length < 0:",
        "graph/test_load.py",
    ),
    Break(
        "graph/outside.py",
        "        if path.exists() and not stat.S_ISREG(path.stat().st_mode):",
        "        if False:",
        "graph/test_load.py",
    ),
    Break(
        "storage/writing.py",
        "    if os.path.exists(file) and not (os.path.isfile(file) or os.path.isdir(file)):",
        "    if False:",
        "storage/test_untrusted_files.py",
    ),
    Break(
        "storage/writing.py",
        "        if other != role:",
        "        if False:",
        "storage flow/test_files.py cli/test_mistakes.py",
    ),
    Break(
        "formats/to_qop.py",
        "    if narrow is not None and not clip:",
        "    if False:",
        "formats",
    ),
    Break(
        "formats/to_qop.py",
        "            and np.array_equal(mine.zero_point, its.zero_point)\n",
        "",
        "formats interop",
    ),
    Break(
        "interop.py",
        '    what = "activations" if tensor.constant is None else "constants"',
        '    what = "activations" if tensor.constant is not None else "constants"',
        "interop cli/test_commands.py",
    ),
    Break(
        "report/quantization_report.py",
        "'smaller' if ratio > 1 else 'larger'",
        "'smaller' if ratio < 1 else 'larger'",
        "report",
    ),
    Break(
        "report/evidence.py",
        "    if plan and integer < len(heavy):",
        "    if False:",
        "report cli",
    ),
    Break(
        "report/evidence.py",
        "    return tuple(k for k in fusion.kernels if k.node in planned and not k.integer and k.status in running)",
        "    return ()",
        "report flow/test_repair.py cli",
    ),
    Break(
        "verify/processors.py",
        "    clipped = [simulation.run(feed, clips=True) for feed in taken] if simulation.layers else exact",
        "    clipped = exact",
        "verify",
    ),
    Break(
        "recipe.py",
        "        if regular(file).stat().st_size > _LARGEST_FILE:",
        "        if regular(file).stat().st_size < 0:",
        "test_recipe.py test_recipe_file.py flow/test_bad_input.py",
    ),
    Break(
        "option_types.py",
        '    if name == "custom_op_libraries":',
        "    if False:",
        "storage/test_untrusted_files.py",
    ),
    Break(
        "option_types.py",
        "    return {name: OPTIONS[name].check(name, value) for name, value in given.items() if value is not UNSET}",
        "    return {name: value for name, value in given.items() if value is not UNSET}",
        "flow/test_option_types.py",
    ),
    Break(
        "cli/flags.py",
        '            return name if text == "True" else f"--no-{name.removeprefix(\'--\')}"',
        "            return name",
        "cli/test_options.py",
    ),
    Break(
        "cli/screen.py",
        "    if isinstance(value, float) and not math.isfinite(value):",
        "    if False:",
        "cli",
    ),
    Break(
        "runtime/session.py",
        "        _count(sessions=1)\n",
        "",
        "runtime flow/test_cost.py",
    ),
    Break(
        "api.py",
        "    if eval_reader is not None and eval_reader is calibration_data_reader:",
        "    if False:",
        "flow/test_validation.py",
    ),
    Break(
        "api.py",
        "        per_channel=c.per_channel or UNSET,",
        "        per_channel=c.per_channel,",
        "flow/test_configs.py",
    ),
    Break(
        "quantizer/int8_cache.py",
        "moved = integers.get(node.input[0]) if node.op_type in _REORDERING",
        "moved = None if node.op_type in _REORDERING",
        "flow/test_kv_cache.py",
    ),
    Break(
        "calibration/table.py",
        "        if self.model_fingerprint != other.model_fingerprint:",
        "        if False:",
        "calibration/test_table.py",
    ),
    Break(
        "calibration/table.py",
        "        if differing:",
        "        if False:",
        "calibration/test_table.py flow/test_cache.py",
    ),
    Break(
        "runtime/limits.py",
        '    if not fits or facts.get("version") != onnxruntime.__version__:',
        "    if not fits:",
        "runtime",
    ),
    Break(
        "verify/fusion.py",
        "    if params.zero_point is not None and np.any(params.zero_point != 0):",
        "    if False:",
        "verify",
    ),
    Break(
        "weights/blocks.py",
        "    while block > LEAST_BLOCK and block > rows:",
        "    while False:",
        "weights",
    ),
    Break(
        "targets/ort_cpu/rules.py",
        "        single_reader=() if signed else (TensorProto.INT8,),",
        "        single_reader=(),",
        "flow/test_host_defaults.py",
    ),
    Break(
        "targets/profile.py",
        "        return processor_class(self.features) == processor_class(features)",
        "        return True",
        "targets/test_profile.py",
    ),
    Break(
        "targets/proof.py",
        "        return sum(k.integer for k in heavy) / len(heavy) if heavy else 1.0",
        "        return sum(k.integer for k in heavy) / len(heavy) if heavy else 0.0",
        "verify",
    ),
    Break(
        "clients/calibrator.py",
        '    if kind is None or options.get("per_channel"):',
        "    if kind is None:",
        "clients/test_calibrator.py",
    ),
    Break(
        "cluster/sweep.py",
        '            if isinstance(failure, ClusterError) or self._cluster.bad_shards == "stop":',
        "            if isinstance(failure, ClusterError):",
        "cluster",
    ),
    Break(
        "quantizer/constant_scales.py",
        "            if not np.array_equal(widened(biases.get(weight, ())), self._scales[weight]):",
        "            if False:",
        "flow/test_patched.py",
    ),
    Break(
        "quantizer/constant_scales.py",
        "        if len(set(made.values())) != len(made):",
        "        if False:",
        "flow/test_patched.py",
    ),
)
