"""Class indices from labels as people write them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from driftgen.errors import InputError, unknown_name
from driftgen.support.checked_arguments import fits, show_value
from driftgen.support.dense_tensors import check_dense

__all__ = ["MOST_IMAGES", "Labels", "class_indices"]

Labels: TypeAlias = int | str | Sequence[int | str] | Tensor | NDArray[Any] | None
MOST_IMAGES = 10**7


def class_indices(
    labels: Labels, num_images: int | None, num_classes: int | None, class_names: Sequence[str] | None
) -> list[int]:
    """Return the class of each image.

    Args:
        labels: one class, or one per image, by index or by name; None cycles through all classes.
        num_images: number of images, with labels repeated in turn; one image per label if None.
        num_classes: number of classes; any index from 0 is one if None.
        class_names: name of each class, in order.
    """
    if num_images is not None and not (fits(num_images, int) and 1 <= num_images <= MOST_IMAGES):
        raise InputError(f"num_images={show_value(num_images)} must be from 1 to {MOST_IMAGES:,}")
    given: Sequence[Any]
    if labels is None:
        given = range(num_classes or 1)[:num_images]
    elif isinstance(labels, Tensor | np.ndarray):
        if isinstance(labels, Tensor):
            check_dense("labels", labels)
        given = labels.reshape(-1).tolist()
    elif isinstance(labels, Sequence) and not isinstance(labels, str):
        given = labels
    else:
        given = [labels]
    if len(given) == 0:
        raise InputError("labels is empty: give at least one class")
    if num_images is not None and num_images < len(given):
        raise InputError(f"num_images={num_images} is less than the {len(given)} labels")
    known = range(num_classes or 2**31)
    if set(map(type, given)) == {int} and min(given) in known and max(given) in known:
        indices = list(given)  # label by label, thousands would take milliseconds
    else:
        indices = [_class_index(label, num_classes, class_names) for label in given]
    count = num_images or len(indices)
    return (indices * -(-count // len(indices)))[:count]


def _class_index(label: Any, num_classes: int | None, class_names: Sequence[str] | None) -> int:
    if isinstance(label, str):
        if class_names is None:
            raise InputError(f"labels: the model has no class names, give an index instead of {label!r}")
        if label not in class_names:
            raise unknown_name("labels", label, class_names)
        return class_names.index(label)
    known = range(num_classes or 2**31)
    if isinstance(label, bool) or not isinstance(label, Integral) or label not in known:
        valid = "from 0" if num_classes is None else f"0 to {num_classes - 1}"
        raise InputError(f"labels: {show_value(label)} is not a class of this model, classes are {valid}")
    return int(label)
