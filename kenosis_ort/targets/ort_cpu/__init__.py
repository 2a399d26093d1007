"""Target ``ort-cpu``: the CPU execution provider of stock ONNX Runtime, and all that is true of it alone.

`rules` is the table, what becomes of other data types and those of the machine at hand, and where float is better or a
Q stands elsewhere than the table says; `work`, `probes` and `profiles` say what kernels cost on which machine, and how
weights are stored for it; `rewrites` forms that suit the tiles of its kernels. `cpu_proof` reads its optimized
graphs, which `kernel_graph` indexes and `kernel_map` maps to nodes of the model; `pieces` cuts large models, and
`reasons` explains.
"""

from typing import Final

from kenosis_ort.graph.product_pairs import INT16_SUM
from kenosis_ort.targets.model import Hooks, Target, TimedRuntime
from kenosis_ort.targets.ort_cpu.cpu_proof import prove
from kenosis_ort.targets.ort_cpu.probes import probes
from kenosis_ort.targets.ort_cpu.rewrites import OWN_FORMS
from kenosis_ort.targets.ort_cpu.rules import (
    FACTS,
    PRECISIONS,
    RULES,
    find_barriers,
    for_this_machine,
    leave_slow_pools_float,
    writes_float,
)
from kenosis_ort.targets.ort_cpu.work import ORT_CPU_COSTS, PROFILES, open_runner, opener, with_matrix_products
from kenosis_ort.targets.prefix import leave_prefix_float
from kenosis_ort.targets.vocabulary import DataTypes

ORT_CPU: Final = Target(
    name="ort-cpu",
    rules=RULES,
    absorbs=("Relu", "Clip"),
    clamps=("Relu", "Clip"),
    float_output=("Gemm", "MatMul"),
    matmul_bias=True,
    types=DataTypes(largest_pair=INT16_SUM),
    own_forms=OWN_FORMS,
    formats=("qdq", "qop", "qcdq", "qop-clip"),
    precisions=PRECISIONS,
    facts=FACTS,
    costs=ORT_CPU_COSTS,
    profiles=PROFILES,
    hooks=Hooks(
        prove=prove,
        time=TimedRuntime(open_runner, opener, in_calling_thread=True, other_forms=("dynamic", "weight-only")),
        probes=probes,
        data_types=for_this_machine,
        reclass=leave_prefix_float,
        reclass_integers=leave_slow_pools_float,
        writes_float=writes_float,
        refine=with_matrix_products,
        barriers=find_barriers,
    ),
)

__all__ = ["ORT_CPU"]
