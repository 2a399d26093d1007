"""Other functions under the names of stock's, for the running process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import onnxruntime.quantization as stock
from onnxruntime.quantization import StaticQuantConfig
from onnxruntime.quantization import quantize as stock_quantize

_MODULE = "onnxruntime.quantization.quantize"


@contextmanager
def substituted(quantize_static: Callable[..., Any], quantize: Callable[..., Any]) -> Iterator[None]:
    """Puts functions in place of ``onnxruntime.quantization``'s ``quantize_static`` and ``quantize``.

    Args:
        quantize_static: In place of stock's.
        quantize: In place of stock's where the configuration is static; another configuration goes to stock.
    """

    @functools.wraps(stock_quantize)
    def either(model_input: Any, model_output: Any, quant_config: Any) -> Any:
        static = isinstance(quant_config, StaticQuantConfig)
        return (quantize if static else stock_quantize)(model_input, model_output, quant_config)

    module = sys.modules[_MODULE]
    with (
        patch.object(stock, "quantize_static", quantize_static),
        patch.object(stock, "quantize", either),
        patch.object(module, "quantize_static", quantize_static),
        patch.object(module, "quantize", either),
    ):
        yield
