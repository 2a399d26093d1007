"""The proof in ONNX Runtime Web: which kernel of the WASM build runs each node of a model.

Source: the optimized graph of the very build, as that of stock ONNX Runtime is read. The build has no file system to
write it to; it is taken at the system call (``bridge.mjs``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.external_data import read_external_data
from kenosis_ort.graph.source import LoadedSource, read_source
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.targets.ort_cpu.proof.prove import prove_by
from kenosis_ort.targets.ort_web.node import WholeFile, node, refuse_libraries
from kenosis_ort.targets.proof import FusionReport


def prove(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    plan: PlacementPlan | None = None,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
) -> FusionReport:
    """Loads a model in ONNX Runtime Web at full optimization and reports what executes each of its nodes.

    Args:
        model: Path, serialized model or `ModelProto`. Not changed.
        plan: The plan behind the model; its reasons are reported for the nodes that it keeps in float.
        custom_op_libraries: Refused: the runtime does not load them.
        threads: Threads of a run.

    Returns:
        One entry per compute node, in the model's order.

    Raises:
        ModelLoadError: The file is missing or is not an ONNX model.
        VerificationError: Node or onnxruntime-web is not there, does not tell, or refuses the model.
    """
    refuse_libraries(custom_op_libraries)
    process = node(threads)

    def optimize(models: Sequence[onnx.ModelProto], source: LoadedSource, _: Sequence[str]) -> list[onnx.GraphProto]:
        graphs = []
        for piece in models:
            if source.folder is not None:
                read_external_data(piece, source.folder / "model.onnx")
            with WholeFile(process, piece) as file:
                to = file.with_suffix(".optimized")
                try:
                    process.ask("optimized", file=str(file), to=str(to))
                except VerificationError as error:
                    raise VerificationError(error.what, where=source.name, fix=error.fix) from error
                graphs.append(onnx.load_model_from_string(to.read_bytes()).graph)
                to.unlink()
        return graphs

    return prove_by(optimize, read_source(model), plan, version=process.version, runtime="ONNX Runtime Web")
