"""Short forms for what the tests assert about a fusion report."""

from kenosis_ort.graph.walk import known_as
from kenosis_ort.verify import Status, verify_fusion


def report(model):
    """Returns the report, after checking what holds for every report."""
    found = verify_fusion(model)
    check_complete(model, found)
    return found


def check_complete(model, found):
    """Every compute node of the main graph has exactly one entry, and absorbers know what they absorbed."""
    compute = [n for n in model.graph.node if n.op_type not in ("QuantizeLinear", "DequantizeLinear", "Constant")]
    main = [k for k in found.kernels if not k.graph]
    assert [k.op_type for k in main] == [known_as(n.domain, n.op_type) for n in compute]
    for k in found.kernels:
        if k.absorbed_into is not None:
            owner = next(o for o in found.kernels if o.node == k.absorbed_into)
            assert k.node in owner.absorbed
            assert k.kernel == owner.kernel
            assert k.status is Status.ABSORBED
        if k.status is Status.FLOAT:
            assert k.reason
            assert not k.integer


def one(found, op_type):
    """Returns the only entry of an operator type."""
    entries = [k for k in found.kernels if k.op_type == op_type]
    assert len(entries) == 1, f"{len(entries)} nodes of type {op_type}"
    return entries[0]
