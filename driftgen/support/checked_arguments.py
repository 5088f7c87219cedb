"""Check the arguments of public functions against their annotations."""

from __future__ import annotations

import errno
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.support.dense_tensors import check_dense

__all__ = ["checked", "fits", "show_value"]

P = ParamSpec("P")
R = TypeVar("R")

WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "True or False",
    str: "text",
    type(None): "None",
    Tensor: "a tensor",
    torch.dtype: "a dtype such as torch.float32",
    torch.Generator: "a torch.Generator",
}
LARGEST = 2**63  # integers of PyTorch are smaller


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Raise ``InputError`` for arguments of a wrong type, for sizes that no memory holds, and for impossible
    file names, instead of the errors of the libraries below.

    The check takes some microseconds: it is meant for constructors and loaders, not for the inside of a
    training step. Numbers must be finite, tensors dense.
    """
    signature, hints = inspect.signature(function), cache(lambda: _hints(function))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in _bound(signature, args, kwargs).items():
            if name in hints():
                _check(name, value, hints()[name])
        try:
            return function(*args, **kwargs)
        except OSError as error:
            if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
                raise
            raise InputError(f"{show_value(error.filename)}: {error.strerror}") from None
        except ValueError as error:
            if "embedded null" not in str(error):
                raise
            raise InputError("a file name holds a null character") from None
        except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
            if not is_too_large(error):
                raise
            owner = function.__qualname__.removesuffix(".__init__")
            raise InputError(f"{owner}: the sizes need more memory than there is; lower them") from None

    return call


def is_too_large(error: BaseException) -> bool:
    """Return True for an error of host memory, or of a size that no integer holds. A full GPU is another
    error, which training reports with advice.
    """
    words = ("not enough memory", "can't allocate memory", "overflow", "Overflow when unpacking", "numel")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def fits(value: Any, hint: Any) -> bool:
    """Return True if a value has the type of an annotation."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or origin is type:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin is not None and issubclass(origin, Mapping):
        keys, values = inner or (Any, Any)
        return isinstance(value, Mapping) and all(fits(k, keys) and fits(v, values) for k, v in value.items())
    if origin is tuple and inner[-1] is not Ellipsis:
        return _is_sequence(value) and len(value) == len(inner) and all(map(fits, value, inner))
    if origin is not None and issubclass(origin, Sequence):
        return _is_sequence(value) and all(fits(each, inner[0]) for each in value)
    if origin is Callable or hint is Callable:
        return callable(value)
    if hint is bool:
        return isinstance(value, bool | np.bool_)
    if hint in (int, float):
        number = isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
        return number and (abs(int(value)) < LARGEST if hint is int else _is_finite(value))
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) and not _is_protocol(kind) else True


def show_value(value: Any) -> str:
    """Return a value in a few words, on one line."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} of {value.dtype}"
    if isinstance(value, str | bytes | list) and len(value) > 100:
        value = value[:100]  # more than is shown; the whole may have millions of entries
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check(name: str, value: Any, hint: Any) -> None:
    if not fits(value, hint):
        raise InputError(f"{name}={show_value(value)} must be {_words(hint)}")
    if isinstance(value, Tensor):
        check_dense(name, value)


def _words(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(each) for each in inner)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping" + (f" to {_words(inner[1])}" if inner and inner[1] is not Any else "")
    if origin is not None and issubclass(origin, Sequence):
        return "a sequence" + (f" of {_words(inner[0])}" if inner[0] is not Any else "")
    return WORDS.get(hint, getattr(hint, "__name__", "of another type"))


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of the arguments, without those of ``*args`` and ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    single = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return {name: hint for name, hint in get_type_hints(function).items() if name in single}


def _bound(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the given arguments by name; none if Python itself will refuse the call."""
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError:
        return {}


def _is_protocol(kind: type) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer above 1e308
        return False
