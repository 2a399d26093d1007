"""Rewrites for the tiles of ONNX Runtime's integer kernels, each with its algebra."""

from kenosis_ort.targets.ort_cpu.rewrites.pad_depthwise import pad_depthwise
from kenosis_ort.targets.ort_cpu.rewrites.pad_stem_channels import pad_stem_channels

OWN_FORMS = (pad_stem_channels, pad_depthwise)
"""In the order they are applied, behind those for integer kernels of all targets."""

__all__ = ["OWN_FORMS", "pad_depthwise", "pad_stem_channels"]
