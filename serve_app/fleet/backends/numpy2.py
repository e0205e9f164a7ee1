"""Lets python models run with numpy 2 on the stubs of Triton 24.10, which were built for numpy 1.

Those stubs read an array's item size where numpy 1 had it, and with numpy 2 find a zero there: inputs repeat their
first element, outputs are empty, strings end the process. Two repairs: arrays that the stub makes get their strides
from numpy instead (`PyArray_NewFromDescr` in the table of numpy's C functions that the stub looks up on first use),
and arrays that it takes go through DLPack, which needs no item size. What is left are strings as outputs: they raise.

`serve_app.fleet.runtime` appends this text to `triton_python_backend_utils.py`. The stub puts its own classes into that
module afterwards, and only then is there something to replace. With numpy 1 nothing is changed. There is no numpy 1
for Python 3.13.
"""

import ctypes
import sys
import types

import numpy as np

NEW_FROM_DESCR = 94
"""Slot of `PyArray_NewFromDescr` in numpy's table of C functions; the same in numpy 1 and 2 (numpy_api.py)."""

NUM_SLOTS = 283
"""Slots that the stub looks into: the last is 282, `PyArray_SetBaseObject`."""

CAN_RETURN_STRINGS = int(np.__version__.split(".")[0]) < 2
"""Whether BYTES outputs work: the stub takes their length from an item size, and DLPack has no strings."""


def repair_inputs():
    """Have the stub's arrays made with the strides of contiguous memory, which is what it means."""
    import numpy.core.multiarray as multiarray

    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    theirs = (ctypes.c_void_p * NUM_SLOTS).from_address(api.PyCapsule_GetPointer(multiarray._ARRAY_API, None))
    pointer = ctypes.c_void_p
    kind = ctypes.PYFUNCTYPE(pointer, pointer, pointer, ctypes.c_int, pointer, pointer, pointer, ctypes.c_int, pointer)
    original = kind(theirs[NEW_FROM_DESCR])

    def new_from_descr(subtype, descr, num_dims, dims, strides, data, flags, base):
        return original(subtype, descr, num_dims, dims, None, data, flags, base)

    ours = (ctypes.c_void_p * NUM_SLOTS)(*theirs)
    replacement = kind(new_from_descr)
    ours[NEW_FROM_DESCR] = ctypes.cast(replacement, pointer).value
    multiarray._ARRAY_API = api.PyCapsule_New(ctypes.addressof(ours), None, None)
    # The stub keeps the address of both for as long as it runs.
    multiarray._serve_app_keep = (ours, replacement, original)


def repair_outputs(original):
    """A `Tensor` that takes numpy 2 arrays, in the place of the stub's own class."""

    class Kind(type(original)):
        def __call__(cls, name, array):
            array = np.asarray(array)
            if array.size == 0:
                return original(name, array)
            if array.dtype.kind in "OSU":
                raise TypeError(
                    f"output {name!r} holds strings, which this Triton can return with numpy 1 only; numpy is "
                    f"{np.__version__} (numpy 1 needs Python 3.12 or older)"
                )
            # DLPack has no read-only memory, and the stub takes none that is not contiguous.
            usable = array if array.flags.writeable and array.flags.c_contiguous else array.copy(order="C")
            return original.from_dlpack(name, usable)

        def __instancecheck__(cls, instance):
            return isinstance(instance, original)

        def __getattr__(cls, name):
            return getattr(original, name)

    return Kind("Tensor", (), {"__doc__": original.__doc__})


class RepairedModule(types.ModuleType):
    """Replaces `Tensor` when the stub puts it into the module."""

    def __setattr__(self, name, value):
        super().__setattr__(name, repair_outputs(value) if name == "Tensor" else value)


if not CAN_RETURN_STRINGS:
    repair_inputs()
    sys.modules[__name__].__class__ = RepairedModule
