"""Asks the installed runtime what it makes of a model: loads it at full optimization and reads the graph back."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from kenosis_ort.graph.source import LoadedSource, full_optimization, open_with
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
            options.optimized_model_filepath = str(target)
            options.add_session_config_entry(
                "session.optimized_model_external_initializers_file_name", f"{number}.data"
            )
            options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "4096")
            open_with(model, options, custom_op_libraries, source.name, labels)
            graphs.append(onnx.load(target, load_external_data=False).graph)
    return graphs
