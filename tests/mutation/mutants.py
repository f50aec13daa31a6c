"""Small faults that can be put into a module, one at a time."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Add,
}


@dataclass(frozen=True)
class Mutant:
    """A module's source with one fault in it.

    Attributes:
        line: where the fault is.
        fault: what was changed, in words.
        source: the whole module.
    """

    line: int
    fault: str
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """Yield a mutant for every comparison, arithmetic operation, number, negation and joint condition of a module.

    What no result depends on is left alone: messages, annotations, what stands under `if TYPE_CHECKING`, whether `zip`
    is strict, whether the field of a dataclass is an argument or shown, the line that a warning names, and the default
    of `batch_tokens`, which is how much runs at once. So are comparisons with a device, since the tests run on one, and
    seeds, since any would do.
    """
    tree = ast.parse(source)
    for node, fault, change, undo in list(_changes(tree)):
        change()
        mutant = Mutant(getattr(node, "lineno", 0), fault, ast.unparse(tree))
        undo()
        yield mutant


_Change = tuple[ast.AST, str, Callable[[], None], Callable[[], None]]


def _changes(tree: ast.AST) -> Iterator[_Change]:
    for node in _deciding(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
            yield _replacement(node, node.ops, 0, _COMPARISONS[type(node.ops[0])]())
        elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPERATIONS:
            yield _replacement(node, node, "op", _OPERATIONS[type(node.op)]())
        elif isinstance(node, ast.BoolOp):
            yield _replacement(node, node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            kept: ast.unaryop = ast.UAdd() if isinstance(node.op, ast.USub) else ast.Not()
            if isinstance(node.op, ast.USub):
                yield _replacement(node, node, "op", kept)
            else:
                yield _replacement(node, node, "operand", ast.UnaryOp(ast.Not(), node.operand))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield _replacement(node, node, "value", not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield _replacement(node, node, "value", node.value + 1)


def _replacement(node: ast.AST, holder: object, where: str | int, new: object) -> _Change:
    def put(value: object) -> None:
        if isinstance(where, int):
            holder[where] = value  # type: ignore[index]
        else:
            setattr(holder, where, value)

    old = holder[where] if isinstance(where, int) else getattr(holder, where)  # type: ignore[index]
    fault = f"{_in_words(old)} became {_in_words(new)}"
    return node, fault, lambda: put(new), lambda: put(old)


def _in_words(value: object) -> str:
    if isinstance(value, ast.expr):
        return ast.unparse(value)
    return type(value).__name__ if isinstance(value, ast.AST) else repr(value)


def _deciding(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes on which a result can depend."""
    yield node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "manual_seed":
        return
    at_once = _defaults_of_batch_tokens(node)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.JoinedStr) or child in at_once:
                continue
            if isinstance(child, ast.keyword) and child.arg in ("strict", "init", "repr", "stacklevel"):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Compare) and "attr='device'" in ast.dump(child.left):
                continue
            yield from _deciding(child)


def _defaults_of_batch_tokens(node: ast.AST) -> list[ast.AST]:
    """The default of a keyword, or of a field, of that name."""
    defaults: list[tuple[str, ast.expr | None]] = []
    if isinstance(node, ast.arguments):
        names = (keyword.arg for keyword in node.kwonlyargs)
        defaults = list(zip(names, node.kw_defaults, strict=True))
    elif isinstance(node, ast.AnnAssign):
        defaults = [(ast.unparse(node.target), node.value)]
    return [value for name, value in defaults if name == "batch_tokens" and value is not None]
