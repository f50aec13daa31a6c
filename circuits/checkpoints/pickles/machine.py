"""The pickle machine: it executes a pickle's opcodes on our own objects, imports nothing and calls nothing else."""

import pickletools
from collections.abc import Callable
from io import BytesIO
from mmap import mmap
from typing import Any

from .arrays import PickledArray, PickledType
from .constructors import CONSTRUCTORS, DTYPES, Machine
from .placeholders import Budget, DamagedError, Named, Placeholder, dictionary

#: Where a pickle is read from.
Stream = BytesIO | mmap
#: Opcodes that push their argument.
_LITERALS = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
#: Whole numbers beyond this are not kept: no count, step or size needs them, and Python refuses to print them.
_LARGEST = 2**63


class InertUnpickler(Machine):
    """Builds tensors, arrays and plain containers, and puts a placeholder wherever another object stands."""

    def __init__(
        self,
        stream: Stream,
        budget: Budget,
        persistent: Callable[[Any], Any],
        load_nested: Callable[[bytes, Budget], Any],
    ) -> None:
        """Prepare to read one pickle.

        Args:
            stream: Where the pickle begins; afterwards, where it ends.
            budget: Bounds the work.
            persistent: Returns the object that an identifier stands for, such as a storage.
            load_nested: Loads bytes that torch.save wrote, which a tensor pickled by itself contains.
        """
        self._stream = stream
        self._budget = budget
        self._persistent = persistent
        self._load_nested = load_nested
        self._memo: dict[int, Any] = {}
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []

    def load(self) -> Any:
        """Return the object that the pickle describes.

        Raises:
            DamagedError: The bytes are not a pickle, end too early, or ask for more work than their number allows.
        """
        try:
            stream: Any = self._stream  # a mapped file reads like an open one
            for opcode, argument, _ in pickletools.genops(stream):
                name = opcode.name
                if name in _LITERALS:
                    self._stack.append(_bounded(argument))
                elif name == "STOP":
                    break
                else:
                    _HANDLERS[name](self, argument)
            return self._stack.pop()
        except (IndexError, KeyError) as error:
            raise DamagedError("its instructions do not fit together") from error
        except (ValueError, OverflowError, TypeError) as error:
            raise error if isinstance(error, DamagedError) else DamagedError(str(error).partition("\n")[0]) from error

    def spend(self, work: int) -> None:
        """Count work whose result takes no bytes of the file."""
        self._budget.spend(work)

    def load_nested(self, content: bytes) -> Any:
        """Load bytes that torch.save wrote, within the same bounds."""
        return self._load_nested(content, self._budget)

    def _items_since_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marked.pop()
        return items

    def _mark(self, _: Any) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _global(self, name: str) -> None:
        self._stack.append(_named(name.replace(" ", ".", 1)))

    def _stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise DamagedError("a class has no name")
        self._stack.append(_named(f"{module}.{name}"))

    def _call(self, called: Any, arguments: Any, entries: Any = None) -> None:
        if not isinstance(arguments, tuple):
            raise DamagedError("something is called with arguments that are not a tuple")
        if isinstance(called, Named):
            self._stack.append(self.build(called, arguments, entries))
        elif isinstance(called, Placeholder):
            self._stack.append(Placeholder(called.name, arguments))
        else:
            raise DamagedError("something is called that is not a class or function")

    def build(self, called: Named, arguments: tuple[Any, ...], keywords: Any = None) -> Any:
        """Return what our own table of constructors builds for a name, or else a placeholder."""
        constructor = CONSTRUCTORS.get(called.name)
        if constructor is not None and not keywords:
            try:
                return constructor(self, *arguments)
            except (TypeError, ValueError, AttributeError, OverflowError) as error:
                if isinstance(error, DamagedError):
                    raise
                # Called in a way that its library does not: named, like everything that is not known.
        placeholder = Placeholder(called.name, arguments)
        if isinstance(keywords, dict):
            placeholder.entries.update(keywords)
        return placeholder

    def _reduce(self, _: Any) -> None:
        arguments = self._stack.pop()
        self._call(self._stack.pop(), arguments)

    def _newobj_ex(self, _: Any) -> None:
        keywords, arguments = self._stack.pop(), self._stack.pop()
        self._call(self._stack.pop(), arguments, keywords)

    def _inst(self, name: str) -> None:
        items = self._items_since_mark()
        self._call(_named(name.replace(" ", ".", 1)), tuple(items))

    def _obj(self, _: Any) -> None:
        called, *arguments = self._items_since_mark()
        self._call(called, tuple(arguments))

    def _build(self, _: Any) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        # The attributes of a plain container, such as the versions beside a state dict, are not part of its content.
        if isinstance(target, (Placeholder, PickledArray, PickledType)):
            target.set_state(state)

    def _persistent_id(self, _: Any) -> None:
        self._stack.append(self._persistent(self._stack.pop()))

    def _extension(self, code: int) -> None:
        self._stack.append(Named(f"the extension {code}"))

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _pop(self, _: Any) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._items_since_mark()

    def _tuple(self, length: int) -> None:
        if len(self._stack) < length:
            raise DamagedError("a tuple lacks elements")
        self._stack[-length:] = [tuple(self._stack[-length:])]

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _duplicate(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def _pop_mark(self, _: Any) -> None:
        self._items_since_mark()

    def _tuple_from_mark(self, _: Any) -> None:
        self._push(tuple(self._items_since_mark()))

    def _list_from_mark(self, _: Any) -> None:
        self._push(self._items_since_mark())

    def _dictionary_from_mark(self, _: Any) -> None:
        self._push(dictionary(self._items_since_mark()))

    def _nothing(self, _: Any) -> None:
        """Do nothing: the opcode only states how the pickle is written."""

    def _append(self, _: Any) -> None:
        self._extend([self._stack.pop()])

    def _extend_from_mark(self, _: Any) -> None:
        self._extend(self._items_since_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Placeholder):
            target.elements.extend(items)
        elif isinstance(target, list):
            target.extend(items)
        else:
            raise DamagedError("elements are appended to something that is not a list")

    def _set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def _set_items_from_mark(self, _: Any) -> None:
        self._set_items(self._items_since_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        entries = target.entries if isinstance(target, Placeholder) else target
        if not isinstance(entries, dict):
            raise DamagedError("entries are set in something that is not a dictionary")
        entries.update(dictionary(items))


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        return Placeholder("a huge number")
    return value


def _named(name: str) -> Any:
    return DTYPES.get(name) or Named(name)


#: What is done for each opcode; those that are missing have no place in a file.
_HANDLERS: dict[str, Callable[[InertUnpickler, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), InertUnpickler._nothing),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), InertUnpickler._put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), InertUnpickler._get),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), InertUnpickler._extension),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), InertUnpickler._reduce),
    "MEMOIZE": InertUnpickler._memoize,
    "MARK": InertUnpickler._mark,
    "POP": InertUnpickler._pop,
    "POP_MARK": InertUnpickler._pop_mark,
    "DUP": InertUnpickler._duplicate,
    "GLOBAL": InertUnpickler._global,
    "STACK_GLOBAL": InertUnpickler._stack_global,
    "NEWOBJ_EX": InertUnpickler._newobj_ex,
    "INST": InertUnpickler._inst,
    "OBJ": InertUnpickler._obj,
    "BUILD": InertUnpickler._build,
    "BINPERSID": InertUnpickler._persistent_id,
    "NONE": lambda machine, _: machine._push(None),
    "NEWTRUE": lambda machine, _: machine._push(True),
    "NEWFALSE": lambda machine, _: machine._push(False),
    "EMPTY_TUPLE": lambda machine, _: machine._push(()),
    "EMPTY_LIST": lambda machine, _: machine._push([]),
    "EMPTY_DICT": lambda machine, _: machine._push({}),
    "EMPTY_SET": lambda machine, _: machine._push([]),
    "TUPLE1": lambda machine, _: machine._tuple(1),
    "TUPLE2": lambda machine, _: machine._tuple(2),
    "TUPLE3": lambda machine, _: machine._tuple(3),
    "TUPLE": InertUnpickler._tuple_from_mark,
    "LIST": InertUnpickler._list_from_mark,
    "FROZENSET": InertUnpickler._list_from_mark,
    "DICT": InertUnpickler._dictionary_from_mark,
    "APPEND": InertUnpickler._append,
    "APPENDS": InertUnpickler._extend_from_mark,
    "ADDITEMS": InertUnpickler._extend_from_mark,
    "SETITEM": InertUnpickler._set_item,
    "SETITEMS": InertUnpickler._set_items_from_mark,
}
