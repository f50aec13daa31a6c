"""Files that torch.save might have written, in both of its formats, and pickles that want to run code."""

import io
import pickle
import random
import warnings
import zipfile
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch
from qkov.circuits.architectures.families import Architecture, architectures

from .inputs import Input
from .mutations import NUMBERS, STRINGS, as_json, junk, mutated_bytes, mutated_table
from .weights import config_of, tensors_of, torch_tensors

#: Files of this name are written by code that should not have run.
CANARY = "canary-of-the-fuzzer"
#: Callables that a pickle may name, with arguments by which running them is noticed.
_WANTED = (
    ("os", "system", (f"touch ../{CANARY}",)),
    ("posix", "system", (f"touch ../{CANARY}",)),
    ("subprocess", "Popen", (["touch", f"../{CANARY}"],)),
    ("builtins", "eval", (f"open('../{CANARY}', 'w')",)),
    ("builtins", "exec", (f"open('../{CANARY}', 'w')",)),
    ("builtins", "open", (f"../{CANARY}", "w")),
    ("io", "open", (f"../{CANARY}", "w")),
    ("builtins", "getattr", ("a", "upper")),
    ("builtins", "__import__", ("antigravity",)),
    ("importlib", "import_module", ("this",)),
    ("shutil", "rmtree", (f"../{CANARY}",)),
    ("pathlib", "Path.touch", (f"../{CANARY}",)),
    ("torch", "load", (f"../{CANARY}",)),
    ("torch.hub", "load_state_dict_from_url", ("http://127.0.0.1:9/a",)),
    ("torch", "zeros", (10**9,)),
    ("torch.serialization", "load", (f"../{CANARY}",)),
    ("numpy", "zeros", (10**9,)),
    ("numpy", "fromfile", ("/etc/passwd",)),
    ("numpy.core.multiarray", "_reconstruct", ("a", (10**9,), b"b")),
    ("collections", "OrderedDict", ([["a", 1]],)),
    ("collections", "Counter", ("a" * 10,)),
    ("builtins", "bytearray", (10**10,)),
    ("builtins", "list", ("ab",)),
    ("builtins", "range", (10**12,)),
    ("argparse", "Namespace", ()),
    ("nobody.knows", "this", (1,)),
    ("socket", "create_connection", (("127.0.0.1", 9),)),
    ("webbrowser", "open", ("http://127.0.0.1:9",)),
)


class _Wants:
    """Pickled, it is a call of a callable that need not exist here."""

    def __init__(self, order: random.Random) -> None:
        self.module, self.name, self.arguments = order.choice(_WANTED)


_InPython: Any = pickle._Pickler  # type: ignore[attr-defined]


class _Pickler(_InPython):  # The one in Python can be taught to write any name.
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, _Wants):
            self.write(b"c" + obj.module.encode() + b"\n" + obj.name.encode() + b"\n")
            self.save(obj.arguments)
            self.write(b"R")
            return
        super().save(obj, save_persistent_id)


#: What torch.save takes for the module pickle.
_AS_PICKLE = SimpleNamespace(__name__="pickle", Pickler=_Pickler, dump=pickle.dump, DEFAULT_PROTOCOL=2)


def torch_input(order: random.Random) -> Input:
    """A file of torch.save that is wrong in its bytes, in its pickle, or in what it holds."""
    family = order.choice(list(architectures().values()))
    tensors: dict[str, Any] = torch_tensors(tensors_of(family, order))
    with warnings.catch_warnings():
        # torch warns of tensors as odd as these.
        warnings.simplefilter("ignore")
        return _torch_input(tensors, family, order)


def _torch_input(tensors: dict[str, Any], family: Architecture, order: random.Random) -> Input:
    saved = _wrapped(_with_odd_tensors(tensors, order), family, order)
    match order.randrange(10):
        case 0:
            content = _saved(saved, zipped=False)
            content = mutated_bytes(content, order) if order.random() < 0.8 else content[: order.randrange(4000)]
        case 1:
            content = mutated_bytes(_saved(saved), order)
        case 2 | 3:
            content = _with_pickle(_saved(saved), lambda pickled: mutated_bytes(pickled, order), order)
        case 4:
            wants = _Wants(order)
            held = {**saved, "extra": wants} if isinstance(saved, dict) else [*saved, wants]
            content = _saved(order.choice((held, wants, {"model": tensors, "args": [wants]})), order.random() < 0.5)
        case 5:
            held = (_Wants(order), {"a": _Wants(order)}, [_Wants(order)], _shared(order), junk(order))
            content = _pickled(order.choice(held))
        case _:
            content = _saved(saved, zipped=order.random() < 0.7)
    name = order.choice(
        ("model.pt", "pytorch_model.bin", "ckpt_7.pt", "lit_model.pth", "a.ckpt", "consolidated.00.pth")
    )
    files = {name: content}
    if order.random() < 0.8:
        files["config.json"] = as_json(config_of(family, order), order)
    return Input("checkpoint", files)


def _saved(value: Any, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_AS_PICKLE, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


def _with_pickle(archive: bytes, change: Any, order: random.Random) -> bytes:
    """Return an archive whose pickle was changed and whose checksums are right."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(buffer, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith("data.pkl"):
                content = change(content)
            elif order.random() < 0.05:
                content = order.choice((b"", content[:3], content * 2))
            new.writestr(entry, content)
        if order.random() < 0.05:
            new.writestr(order.choice(("../evil", "/evil", "archive/data.pkl", "x/byteorder")), b"evil")
    return buffer.getvalue()


def _with_odd_tensors(tensors: dict[str, Any], order: random.Random) -> dict[str, Any]:
    odd = dict(tensors)
    for name in tensors:
        if order.random() < 0.07:
            odd[name] = order.choice(
                (
                    lambda: torch.zeros(1).expand(10**7, 3 * 10**7 + 1),
                    lambda: torch.zeros(1).expand(10**7 + 7, 10**7 + 9),
                    lambda: torch.zeros(1).expand(2**40, 8),
                    lambda: torch.zeros(0, 10**9),
                    lambda: torch.tensor(3.0),
                    lambda: torch.zeros(8, 8, dtype=torch.complex64),
                    lambda: torch.zeros(8, 8, dtype=torch.int64),
                    lambda: torch.zeros(8, 8, dtype=torch.bfloat16),
                    lambda: torch.full((8, 8), torch.nan),
                    lambda: torch.eye(8).to_sparse(),
                    lambda: torch.sparse_coo_tensor(torch.tensor([[0], [0]]), torch.ones(1), (10**6, 10**6)),
                    lambda: torch.zeros(8, 8, device="meta"),
                    lambda: torch.zeros(8, 8, dtype=torch.float8_e4m3fn),
                    lambda: torch.quantize_per_tensor(torch.ones(8, 8), 0.1, 0, torch.qint8),
                    lambda: torch.nn.Parameter(torch.ones(8, 8)),
                    lambda: torch.ones(64).as_strided((8, 8), (1, 1)),
                )
            )()
    return odd


def _wrapped(tensors: dict[str, Any], family: Any, order: random.Random) -> Any:
    config = mutated_table(config_of(family, order), order)
    return order.choice(
        (
            lambda: tensors,
            lambda: OrderedDict(tensors),
            lambda: {"model": tensors, "iter_num": order.choice(NUMBERS), "best_val_loss": torch.tensor(1.5)},
            lambda: {"state_dict": tensors, "epoch": junk(order), "hyper_parameters": config},
            lambda: {"model": tensors, "model_args": config, "config": junk(order)},
            lambda: {"a": {"b": {"c": tensors}}, order.choice(STRINGS): junk(order)},
            lambda: {**tensors, 3: 4, None: 5, (1, 2): torch.ones(2), "itself": [tensors]},
            lambda: {"epochs": [0, 100], "state_dicts": [tensors, tensors]},
            lambda: [{"step": 0, "model": tensors}, {"step": order.choice(NUMBERS), "model": tensors}],
            lambda: {order.choice((0, 100, "step_5")): tensors, 200: tensors},
            lambda: {"model": tensors, "shared": _shared(order)},
            lambda: _holding_itself(tensors),
            lambda: {f"{name}": tensor for name, tensor in tensors.items()} | {"x" * 100: tensors},
        )
    )()


def _shared(order: random.Random) -> Any:
    """Return dictionaries that share themselves: few bytes, and 2^40 entries for whoever follows all of them."""
    shared: Any = {"weight": torch.ones(1), "n": 1}
    for _ in range(40):
        shared = order.choice(({"a": shared, "b": shared}, [shared, shared], {"a": [shared, shared]}))
    return shared


def _holding_itself(tensors: dict[str, Any]) -> dict[str, Any]:
    held: dict[str, Any] = {"model": dict(tensors)}
    held["model"]["again"] = held
    return held
