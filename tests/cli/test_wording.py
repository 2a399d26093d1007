"""Advice worded for Python, in the shell's words."""

from __future__ import annotations

import pytest

from kenosis_ort.cli.main import build_parser
from kenosis_ort.cli.screen import in_shell_words


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("nodes_to_exclude=['/a/Conv']", "--exclude '/a/Conv'"),
        ("take the node out of nodes_to_exclude", "take the node out of --exclude"),
        ("protect_outputs='int8' quantizes it", "--protect-outputs int8 quantizes it"),
        ("try recipe='data-free'", "try --recipe data-free"),
        ("activation_type=QuantType.QUInt8, or leave it out", "--activation-type uint8, or leave it out"),
        ("weight_type=QuantType.QInt8", "--weight-type int8"),
        ("per_channel=True", "--per-channel"),
        ("per_channel=False", "--no-per-channel"),
        ("or promise=False to get INT8", "or --no-promise to get INT8"),
        ("Give SyntheticReader(kinds={'x': kind}), the kind one", "Give --input-kind x=KIND, the kind one"),
        ("or input_ranges={'x': (low, high)}; or", "or --input-range x=LOW,HIGH; or"),
        ("Give SyntheticReader(input_shapes={name: shape}), or", "Give --input-shape name=1x3x224x224, or"),
        ("extra_options['BlockSize'] dictates", "extra_options['BlockSize'] dictates"),
        ("or mean= and std= of the preprocessing", "or --mean and --std of the preprocessing"),
        ("nothing to translate", "nothing to translate"),
    ],
)
def test_options_are_spelled_as_the_command_takes_them(python: str, shell: str):
    assert in_shell_words(python) == shell


def test_every_option_it_names_exists():
    texts = """nodes_to_exclude nodes_to_quantize op_types_to_quantize primary_inputs custom_op_libraries extra_options
        protect_outputs='float' recipe='fast' tune='off' per_channel=False reduce_range=True promise=False verify=False
        rewrites=False quant_format=QuantFormat.QDQ calibrate_method=CalibrationMethod.MinMax
        kinds={'x': k} input_ranges={'x': r} input_shapes={'x': s}"""
    named = {word for word in in_shell_words(texts).split() if word.startswith("--")}
    everything = build_parser().parse_args(["quantize", "m.onnx"]).parser.format_all()
    assert len(named) == 19
    assert all(option in everything for option in named)
