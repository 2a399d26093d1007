"""Rewrites for the tiles of ONNX Runtime's integer kernels on x86-64, each with its algebra."""

from kenosis_ort.targets.ort_cpu.rewrites.pad_depthwise import pad_depthwise
from kenosis_ort.targets.ort_cpu.rewrites.space_to_depth_stem import pad_stem_channels, space_to_depth_stem

OWN_FORMS = (space_to_depth_stem, pad_stem_channels, pad_depthwise)
"""In the order they are applied, behind those for integer kernels of all targets."""

__all__ = ["OWN_FORMS", "pad_depthwise", "pad_stem_channels", "space_to_depth_stem"]
