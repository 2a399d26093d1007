"""What the placement tests ask of a plan."""

from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import PlacementOptions
from kenosis_ort.placement.constraints import constrain
from kenosis_ort.placement.eligibility import classify
from kenosis_ort.targets.ort_cpu import ORT_CPU
from tests.planning import parse, prepared

IMAGE = "float[1,3,8,8] x"
CONV = "kernel_shape=[3,3], pads=[1,1,1,1]"


def view_of(model, weights=None):
    return GraphView(prepared(parse(model, weights) if isinstance(model, str) else model))


def classes_of(model, weights=None, *, protected=None, **options):
    """Returns the class of each node."""
    view = view_of(model, weights)
    return classify(constrain(view, ORT_CPU, PlacementOptions(**options)), protected or {})


def nodes_of(plan, kind):
    return [n.node for n in plan.nodes if n.kind is kind]


def pairs(plan):
    """Returns the values that get Q/DQ with the value whose parameters they take (None: their own)."""
    return {v: d.provider for v, d in plan.quantized_values()}


def how(plan, value, consumer):
    """Returns how a node ("" for the graph's outputs) reads a value."""
    (found,) = {d.how for d in plan.decisions if d.edge.value == value and d.edge.consumer == consumer}
    return found
