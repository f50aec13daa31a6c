"""Files of numpy: one array or an archive of them, wrong in the header, in the bytes or in what they hold."""

import io
import random
import struct
import zipfile

import numpy as np
from qkov.circuits.architectures.families import architectures

from .inputs import Input
from .mutations import NUMBERS, as_json, mutated_bytes
from .weights import config_of, tensors_of


def array_input(order: random.Random) -> Input:
    """A .npz archive, or a single array, that is wrong."""
    family = order.choice(list(architectures().values()))
    members = {f"{name}.npy": _array(tensor, order) for name, tensor in tensors_of(family, order).items()}
    if order.random() < 0.2:
        name, content = order.choice(list(members.items()))
        return Input("checkpoint", {"a.npy": mutated_bytes(content, order) if order.random() < 0.5 else content})
    for name in members:
        if order.random() < 0.02:
            members[name] = mutated_bytes(members[name], order)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", order.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        if order.random() < 0.1:
            archive.writestr("zeros.npy", bytes(10**7))
    content = buffer.getvalue()
    files = {"a.npz": mutated_bytes(content, order) if order.random() < 0.3 else content}
    if order.random() < 0.8:
        files["config.json"] = as_json(config_of(family, order), order)
    return Input("checkpoint", files)


def _array(tensor: np.ndarray, order: random.Random) -> bytes:
    if order.random() < 0.97:
        buffer = io.BytesIO()
        np.save(buffer, tensor)
        return buffer.getvalue()
    shape = [order.choice((*NUMBERS, 8)) for _ in tensor.shape]
    kinds = ("<f4", "|O", ">f8", "<c8", "|S9", "<U4", [("a", "<f4")], "<M8[s]", "e", "no type", "|V4")
    header = {"descr": order.choice(kinds), "fortran_order": order.choice((True, False, 3)), "shape": tuple(shape)}
    text = (order.choice((repr(header), "{" * 3000, "__import__('os')", repr(shape))) + "\n").encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + tensor.tobytes()
