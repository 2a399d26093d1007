"""How a rule that changes one kind of node is written: a function that changes one, made one that changes all.

The function gets a view of the model and a node, and returns, or raises `NotCollapsibleError` before it has changed
anything, if the node stays. What it becomes keeps its name and its docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import onnx

from kenosis_ort.graph.prepare import RewriteResult
from kenosis_ort.graph.walk import opset_of
from kenosis_ort.rewrite.editing import Editor
from kenosis_ort.rewrite.integer_form import IntegerForm, has_candidate
from kenosis_ort.rewrite.matching import NotCollapsibleError

View = TypeVar("View", bound=Editor)
Rewrite = Callable[..., RewriteResult]


def float_rule(
    *op_types: str, did: str, stays: str, least_opset: int = 0
) -> Callable[[Callable[[Editor, onnx.NodeProto], None]], Rewrite]:
    """Makes ``(model, *, keep_values=())`` of a function, for all nodes of the main graph of these operators.

    The model's types and shapes have to be inferred; values of the names in ``keep_values`` keep their meaning.

    Args:
        op_types: The operators.
        did: What became of nodes, behind their number.
        stays: The same of those that stay.
        least_opset: Operator set below which nothing is done.
    """

    def decorate(change: Callable[[Editor, onnx.NodeProto], None]) -> Rewrite:
        def rewrite(model: onnx.ModelProto, *, keep_values: Collection[str] = ()) -> RewriteResult:
            if opset_of(model) < least_opset or not any(node.op_type in op_types for node in model.graph.node):
                return RewriteResult()
            editor = Editor(model, keep_values)
            for node in editor.nodes(*op_types):
                _attempt(change, editor, node)
            return editor.finish(did, stays)

        return _named_after(change, rewrite)

    return decorate


def integer_rule(
    *op_types: str, did: str, stays: str
) -> Callable[[Callable[[IntegerForm, onnx.NodeProto], None]], Rewrite]:
    """Makes ``(model, *, nodes, keep_values=())`` of a function, for the nodes of these operators named in ``nodes``.

    The model's nodes have to be named; the rest is as with `float_rule`.
    """

    def decorate(change: Callable[[IntegerForm, onnx.NodeProto], None]) -> Rewrite:
        def rewrite(
            model: onnx.ModelProto, *, nodes: Collection[str], keep_values: Collection[str] = ()
        ) -> RewriteResult:
            if not has_candidate(model, nodes, *op_types):
                return RewriteResult()
            form = IntegerForm(model, nodes, keep_values)
            for node in form.candidates(*op_types):
                _attempt(change, form, node)
            return form.finish(did, stays)

        return _named_after(change, rewrite)

    return decorate


def _attempt(change: Callable[[View, onnx.NodeProto], None], view: View, node: onnx.NodeProto) -> None:
    try:
        change(view, node)
    except NotCollapsibleError as reason:
        view.refuse(node, reason)


def _named_after(change: Callable[..., None], rewrite: Rewrite) -> Rewrite:
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(rewrite, name, getattr(change, name))
    return rewrite
