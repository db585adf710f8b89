"""From a JAX function to an ONNX model: the primitives of networks and of action selection, one rule for each.

What depends on no input is computed here and stored as a constant. bfloat16 becomes float32, which onnxruntime has on
every machine.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jaxrl.common.errors import UsageError
from jaxrl.integrations.export.greedy import Argument, Greedy

OPSET = 18  # December 2022: runtimes of the last years read it
IR = 9  # May 2023

SAME = {  # primitives with an ONNX operator of the same meaning
    "abs": "Abs", "add": "Add", "and": "And", "ceil": "Ceil", "copy": "Identity", "cos": "Cos", "div": "Div",
    "eq": "Equal", "erf": "Erf", "exp": "Exp", "floor": "Floor", "ge": "GreaterOrEqual", "gt": "Greater",
    "le": "LessOrEqual", "log": "Log", "logistic": "Sigmoid", "lt": "Less", "max": "Max", "min": "Min", "mul": "Mul",
    "neg": "Neg", "not": "Not", "optimization_barrier": "Identity", "or": "Or", "pow": "Pow", "sign": "Sign",
    "sin": "Sin", "sqrt": "Sqrt", "stop_gradient": "Identity", "sub": "Sub", "tanh": "Tanh", "xor": "Xor",
}  # fmt: skip
REDUCE = {"reduce_sum": "ReduceSum", "reduce_max": "ReduceMax", "reduce_min": "ReduceMin", "reduce_prod": "ReduceProd"}
LOOPS = ("scan", "while")
INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # parameters that hold the function of a call


def to_onnx(greedy: Greedy) -> bytes:
    """Return the serialised ONNX model of a greedy function; the batch size is free.

    Raises UsageError: the function has a primitive without a rule.
    """
    import onnx

    (batch,) = jax.export.symbolic_shape("batch")
    jaxpr = jax.make_jaxpr(greedy.function)(*greedy.structs(batch))
    graph = _Graph(batch)
    inputs = [*greedy.inputs, *greedy.carry]
    first = inputs[0].name
    graph.batch_size = graph.op("Slice", graph.op("Shape", first), np.array([0]), np.array([1]))
    results = graph.call(jaxpr, [argument.name for argument in inputs])
    outputs = [*greedy.actions, *(Argument(f"next_{x.name}", x.shape, x.dtype) for x in greedy.carry)]
    for result, argument in zip(results, outputs, strict=True):
        graph.op("Identity", result, name=argument.name)

    def describe(argument: Argument) -> Any:
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(argument.dtype))
        return onnx.helper.make_tensor_value_info(argument.name, kind, ["batch", *argument.shape])

    graph_proto = onnx.helper.make_graph(
        graph.nodes, "greedy", list(map(describe, inputs)), list(map(describe, outputs)), graph.constants
    )
    model = onnx.helper.make_model(
        graph_proto, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR, producer_name="jaxrl"
    )
    onnx.checker.check_model(model)
    return model.SerializeToString()


class _Graph:
    """Nodes and constants. A value is a name in the graph, or an array that is known.

    Attributes:
        batch: the symbolic dimension.
        batch_size: name of an int64[1] that holds it.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.batch_size = ""
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def op(self, kind: str, *values: Any, name: str = "", **attributes: Any) -> str:
        """Add a node with one result and return its name."""
        import onnx

        name = name or f"v{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(kind, list(map(self.name, values)), [name], **attributes))
        return name

    def name(self, value: Any) -> str:
        import onnx

        if isinstance(value, str):
            return value
        array = np.asarray(value)
        array = array.astype(_dtype(array.dtype))
        self.constants.append(onnx.numpy_helper.from_array(array, f"c{len(self.constants)}"))
        return f"c{len(self.constants) - 1}"

    def shape(self, sizes: Sequence[Any]) -> Any:
        """Return an int64 vector of sizes, some of which are multiples of the batch size."""
        if all(map(_is_static, sizes)):
            return np.array(sizes, np.int64)
        parts = [
            np.array([size], np.int64)
            if _is_static(size)
            else self.op("Mul", self.batch_size, np.array([size // self.batch], np.int64))
            for size in sizes
        ]
        return self.op("Concat", *parts, axis=0)

    def reshape(self, value: Any, sizes: Sequence[Any]) -> str:
        if sum(not _is_static(size) for size in sizes) == 1:
            sizes = [size if _is_static(size) else -1 for size in sizes]
        return self.op("Reshape", value, self.shape(sizes))

    def cast(self, value: Any, dtype: Any) -> str:
        import onnx

        return self.op("Cast", value, to=onnx.helper.np_dtype_to_tensor_dtype(_dtype(dtype)))

    def call(self, closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        """Add the nodes that the results of a function need, and return these."""
        jaxpr = closed.jaxpr
        values = dict(zip(jaxpr.constvars, closed.consts, strict=True)) | dict(
            zip(jaxpr.invars, arguments, strict=True)
        )

        def read(x: Any) -> Any:
            return x.val if isinstance(x, Literal) else values[x]

        for eqn in _needed_equations(jaxpr):
            operands = [read(x) for x in eqn.invars]
            inner = next((eqn.params[key] for key in INNER if key in eqn.params), None)
            if inner is not None and eqn.primitive.name not in LOOPS:
                results = self.call(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ()), operands)
            elif any(isinstance(x, str) for x in operands) or not all(
                _is_static(n) for x in eqn.outvars for n in _sizes(x)
            ):
                results = self._apply(eqn, operands)
            else:
                result = eqn.primitive.bind(*operands, **eqn.params)
                results = list(result) if eqn.primitive.multiple_results else [result]
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _apply(self, eqn: Any, operands: list[Any]) -> list[Any]:
        kind = eqn.primitive.name
        if kind in SAME:
            return [self.op(SAME[kind], *operands)]
        if kind in REDUCE:
            return [self.op(REDUCE[kind], operands[0], _int64(eqn.params["axes"]), keepdims=0)]
        if kind not in RULES:
            raise UsageError(
                f"the onnx format is not available because it has no rule for '{kind}', which this policy computes: "
                "choose --format stablehlo"
            )
        result = RULES[kind](self, eqn, *operands)
        return result if isinstance(result, list) else [result]


def _is_static(size: Any) -> bool:
    return isinstance(size, int | np.integer)


def _dtype(dtype: Any) -> np.dtype:
    return np.dtype(np.float32) if dtype == jnp.bfloat16 else np.dtype(dtype)


def _needed_equations(jaxpr: Any) -> list[Any]:
    """Return the equations that the results depend on, in order."""
    needed = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    equations = []
    for eqn in reversed(jaxpr.eqns):
        if needed & set(eqn.outvars):
            equations.append(eqn)
            needed |= {x for x in eqn.invars if not isinstance(x, Literal)}
    return equations[::-1]


def _sizes(variable: Any) -> tuple[Any, ...]:
    return variable.aval.shape


def _int64(numbers: Sequence[int]) -> np.ndarray:
    return np.array(numbers, np.int64)


# Rules: (graph, equation, *values) -> the result, or all results.


def _logical(operator: str) -> Callable[..., str]:
    """Return the rule of a reduction of bools, as one of integers."""

    def rule(graph: _Graph, eqn: Any, x: Any) -> str:
        reduced = graph.op(operator, graph.cast(x, np.int32), _int64(eqn.params["axes"]), keepdims=0)
        return graph.cast(reduced, np.bool_)

    return rule


def _arg(operator: str) -> Callable[..., str]:
    def rule(graph: _Graph, eqn: Any, x: Any) -> str:
        (axis,) = eqn.params["axes"]
        index = graph.op(operator, x, axis=int(axis), keepdims=0)  # the first of equals, as in JAX
        return graph.cast(index, eqn.params["index_dtype"])

    return rule


def _broadcast(graph: _Graph, eqn: Any, x: Any, *dynamic: Any) -> str:
    del dynamic
    shape = eqn.params["shape"]
    places = eqn.params["broadcast_dimensions"]
    inserted = [1] * len(shape)
    for place, size in zip(places, _sizes(eqn.invars[0]), strict=True):
        inserted[place] = size
    x = graph.reshape(x, inserted)
    return x if tuple(inserted) == tuple(shape) else graph.op("Expand", x, graph.shape(shape))


def _convolution(graph: _Graph, eqn: Any, x: Any, kernel: Any) -> str:
    params = eqn.params
    numbers = params["dimension_numbers"]
    padding = params["padding"]
    if any(dilation != 1 for dilation in params["lhs_dilation"]) or params["batch_group_count"] != 1:
        raise UsageError(
            "the onnx format is not available because the policy has a transposed convolution: choose --format "
            "stablehlo"
        )
    out = graph.op(
        "Conv",
        graph.op("Transpose", x, perm=_ints(numbers.lhs_spec)),
        graph.op("Transpose", kernel, perm=_ints(numbers.rhs_spec)),
        strides=_ints(params["window_strides"]),
        dilations=_ints(params["rhs_dilation"]),
        pads=[int(low) for low, _ in padding] + [int(high) for _, high in padding],
        group=int(params["feature_group_count"]),
    )
    return graph.op("Transpose", out, perm=_ints(np.argsort(numbers.out_spec)))


def _dot(graph: _Graph, eqn: Any, x: Any, y: Any) -> str:
    (contract_x, contract_y), (batch_x, batch_y) = eqn.params["dimension_numbers"]
    ranks = [len(_sizes(variable)) for variable in eqn.invars]
    if not batch_x and ranks[1] == 2 and tuple(contract_x) == (ranks[0] - 1,) and tuple(contract_y) == (0,):
        return graph.op("MatMul", x, y)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    left, right = [next(letters) for _ in range(ranks[0])], [next(letters) for _ in range(ranks[1])]
    for i, j in zip((*contract_x, *batch_x), (*contract_y, *batch_y), strict=True):
        right[j] = left[i]
    output = [left[i] for i in batch_x]
    output += [letter for i, letter in enumerate(left) if i not in (*contract_x, *batch_x)]
    output += [letter for j, letter in enumerate(right) if j not in (*contract_y, *batch_y)]
    return graph.op("Einsum", x, y, equation=f"{''.join(left)},{''.join(right)}->{''.join(output)}")


def _gather(graph: _Graph, eqn: Any, x: Any, index: Any) -> str:
    """Take whole slices at indices of one axis, or a window that begins at an index of each axis."""
    if (batch_axes := _window_batch_axes(eqn)) is not None:
        return _window(graph, eqn, x, index, batch_axes)
    numbers = eqn.params["dimension_numbers"]
    sizes = list(eqn.params["slice_sizes"])
    shape = _sizes(eqn.invars[0])
    axis = numbers.start_index_map[0] if len(numbers.start_index_map) == 1 else None
    rest = [size for i, size in enumerate(sizes) if i != axis] == [size for i, size in enumerate(shape) if i != axis]
    if axis is None or tuple(numbers.collapsed_slice_dims) != (axis,) or numbers.operand_batching_dims or not rest:
        raise UsageError("the onnx format is not available because the policy gathers entries by several indices: "
                         "choose --format stablehlo")  # fmt: skip
    index = graph.reshape(index, _sizes(eqn.invars[1])[:-1])
    index = graph.op("Min", graph.op("Max", graph.cast(index, np.int64), np.int64(0)), np.int64(shape[axis] - 1))
    slices = graph.op("Gather", x, index, axis=int(axis))
    indexed = len(_sizes(eqn.invars[1])) - 1
    places = [int(i) for i in numbers.offset_dims]
    others = [i for i in range(len(_sizes(eqn.outvars[0]))) if i not in places]
    order = places[:axis] + others + places[axis:]  # where each axis of `slices` goes
    assert len(others) == indexed
    return graph.op("Transpose", slices, perm=_ints(np.argsort(order)))


def _window_batch_axes(eqn: Any) -> int | None:
    """Return how many batch axes the indices of a gather have if it takes one window for each; None if it does not."""
    numbers = eqn.params["dimension_numbers"]
    axes = len(_sizes(eqn.invars[1])) - 1
    batched = [tuple(map(int, dims)) for dims in (numbers.operand_batching_dims, numbers.start_indices_batching_dims)]
    whole = not numbers.collapsed_slice_dims and _ints(numbers.offset_dims) == list(
        range(axes, len(_sizes(eqn.outvars[0])))
    )
    fits = batched[0] == batched[1] and batched[0] in ((), tuple(range(axes)))
    fills = "FILL" in str(eqn.params["mode"]) or eqn.invars[0].aval.dtype == np.bool_
    return axes if whole and fits and not fills else None


def _window(graph: _Graph, eqn: Any, x: Any, index: Any, batch_axes: int) -> str:
    """Select among the slices at all possible starts, axis after axis."""
    numbers = eqn.params["dimension_numbers"]
    shape = _sizes(eqn.invars[0])
    sizes = eqn.params["slice_sizes"]
    missing_axes = 0 if numbers.operand_batching_dims else batch_axes  # axes that x lacks
    if missing_axes:
        x = graph.op("Unsqueeze", x, _int64(range(missing_axes)))
    for k, axis in enumerate(map(int, numbers.start_index_map)):
        last = shape[axis] - sizes[axis]  # indices are clipped to the starts that leave the window inside
        if last == 0:
            continue
        start = graph.op("Slice", index, _int64([k]), _int64([k + 1]), _int64([batch_axes]))
        start = graph.op("Min", graph.op("Max", graph.cast(start, np.int64), np.int64(0)), np.int64(last))
        rest = len(shape) + missing_axes - batch_axes - 1
        start = graph.op("Unsqueeze", start, _int64(range(batch_axes + 1, batch_axes + 1 + rest))) if rest else start
        places = [
            graph.op("Slice", x, _int64([s]), _int64([s + sizes[axis]]), _int64([axis + missing_axes]))
            for s in range(last + 1)
        ]
        x = places[0]
        for s, place in enumerate(places[1:], start=1):
            x = graph.op("Where", graph.op("Equal", start, np.int64(s)), place, x)
    return x


def _reverse(graph: _Graph, eqn: Any, x: Any) -> str:
    axes = eqn.params["dimensions"]
    last = [-1] * len(axes)
    before_first = [np.iinfo(np.int64).min] * len(axes)
    return graph.op("Slice", x, _int64(last), _int64(before_first), _int64(axes), _int64([-1] * len(axes)))


def _pad(graph: _Graph, eqn: Any, x: Any, value: Any) -> str:
    low, high, inner = zip(*eqn.params["padding_config"], strict=True)
    if any(inner) or min(*low, *high) < 0:
        raise UsageError(
            "the onnx format is not available because the policy pads between entries: choose --format stablehlo"
        )
    return graph.op("Pad", x, _int64([*low, *high]), value)


def _power(graph: _Graph, eqn: Any, x: Any) -> str:
    return graph.op("Pow", x, np.array(eqn.params["y"], _dtype(eqn.invars[0].aval.dtype)))


def _scatter(graph: _Graph, eqn: Any, x: Any, index: Any, update: Any) -> str:
    """Replace the slice at one index of one axis."""
    numbers = eqn.params["dimension_numbers"]
    axes = tuple(numbers.inserted_window_dims)
    if len(axes) != 1 or tuple(numbers.scatter_dims_to_operand_dims) != axes or _sizes(eqn.invars[1]) != (1,):
        raise UsageError("the onnx format is not available because the policy scatters entries by several indices: "
                         "choose --format stablehlo")  # fmt: skip
    shape = _sizes(eqn.invars[0])
    line = np.arange(shape[axes[0]], dtype=np.int32).reshape([-1 if i == axes[0] else 1 for i in range(len(shape))])
    hit = graph.op("Equal", line, graph.cast(index, np.int32))
    return graph.op("Where", hit, graph.op("Unsqueeze", update, _int64(axes)), x)


def _select(graph: _Graph, eqn: Any, which: Any, *cases: Any) -> str:
    if len(cases) != 2 or eqn.invars[0].aval.dtype != np.bool_:
        raise UsageError(
            "the onnx format is not available because the policy selects among several cases: choose --format stablehlo"
        )
    if eqn.outvars[0].aval.dtype == np.bool_:  # which onnxruntime does not select
        first, second = graph.op("And", graph.op("Not", which), cases[0]), graph.op("And", which, cases[1])
        return graph.op("Or", first, second)
    return graph.op("Where", which, cases[1], cases[0])


def _slice(graph: _Graph, eqn: Any, x: Any) -> str:
    begin, end = eqn.params["start_indices"], eqn.params["limit_indices"]
    end = [size if _is_static(size) else np.iinfo(np.int64).max for size in end]
    strides = eqn.params["strides"] or [1] * len(end)
    return graph.op("Slice", x, _int64(begin), _int64(end), _int64(range(len(end))), _int64(strides))


def _split(graph: _Graph, eqn: Any, x: Any) -> list[str]:
    ends = np.cumsum([0, *eqn.params["sizes"]])
    axis = _int64([eqn.params["axis"]])
    return [graph.op("Slice", x, _int64([a]), _int64([b]), axis) for a, b in itertools.pairwise(ends)]


def _stack(graph: _Graph, eqn: Any, *parts: Any) -> str:
    axis = int(eqn.params["axis"])
    return graph.op("Concat", *(graph.op("Unsqueeze", part, _int64([axis])) for part in parts), axis=axis)


def _resize(graph: _Graph, eqn: Any, x: Any, *dynamic: Any) -> str:
    del dynamic
    return graph.reshape(x, _sizes(eqn.outvars[0]))


def _reshape(graph: _Graph, eqn: Any, x: Any, *dynamic: Any) -> str:
    if eqn.params["dimensions"] is not None:  # the axes are permuted first
        x = graph.op("Transpose", x, perm=_ints(eqn.params["dimensions"]))
    return _resize(graph, eqn, x, *dynamic)


def _ints(numbers: Any) -> list[int]:
    return [int(n) for n in numbers]


RULES: dict[str, Callable[..., Any]] = {
    "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"),
    "broadcast_in_dim": _broadcast,
    "clamp": lambda graph, eqn, low, x, high: graph.op("Min", graph.op("Max", x, low), high),
    "concatenate": lambda graph, eqn, *parts: graph.op("Concat", *parts, axis=int(eqn.params["dimension"])),
    "conv_general_dilated": _convolution,
    "convert_element_type": lambda graph, eqn, x: graph.cast(x, eqn.params["new_dtype"]),
    "dot_general": _dot,
    "expand_dims": _resize,
    "gather": _gather,
    "integer_pow": _power,
    "log1p": lambda graph, eqn, x: graph.op("Log", graph.op("Add", x, np.float32(1))),
    "ne": lambda graph, eqn, x, y: graph.op("Not", graph.op("Equal", x, y)),
    "pad": _pad,
    "reduce_and": _logical("ReduceMin"),
    "reduce_or": _logical("ReduceMax"),
    "reshape": _reshape,
    "rev": _reverse,
    "rsqrt": lambda graph, eqn, x: graph.op("Reciprocal", graph.op("Sqrt", x)),
    "scatter": _scatter,
    "select_n": _select,
    "slice": _slice,
    "split": _split,
    "square": lambda graph, eqn, x: graph.op("Mul", x, x),
    "squeeze": _resize,
    "stack": _stack,
    "transpose": lambda graph, eqn, x: graph.op("Transpose", x, perm=_ints(eqn.params["permutation"])),
}
