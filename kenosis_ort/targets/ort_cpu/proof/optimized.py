"""Asks the installed runtime what it makes of a model: loads it at full optimization and reads the graph back."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from kenosis_ort.graph.source import LoadedSource, full_optimization, open_with
from kenosis_ort.runtime.session import write_optimized
from kenosis_ort.storage.scratch import Scratch


def optimize(
    models: Sequence[onnx.ModelProto],
    source: LoadedSource,
    labels: Sequence[str],
    *,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
) -> list[onnx.GraphProto]:
    """Loads models at ORT_ENABLE_ALL on the CPU provider and returns the optimized graphs, large initializers left out.

    Nothing is left on disk.

    Args:
        models: The tagged model, or its pieces.
        source: The model they come from.
        labels: What its nodes are called in messages.
        custom_op_libraries: Shared libraries of custom operators to register.
        threads: Threads of the sessions.

    Raises:
        VerificationError: The runtime refuses a model.
    """
    graphs = []
    with Scratch("verify") as folder:
        for number, model in enumerate(models):
            target = folder / f"{number}.onnx"
            options = full_optimization(source.folder, threads)
            write_optimized(options, target, 4096)
            open_with(model, options, custom_op_libraries, source.name, labels)
            graphs.append(onnx.load(target, load_external_data=False).graph)
    return graphs
