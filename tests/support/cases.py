"""Cases of parametrized tests: a few for ``make test``, the others marked slow."""

import pytest


def slow_after(count, cases):
    """Mark all cases but the first ``count`` as slow."""
    rest = [case if isinstance(case, tuple) else (case,) for case in list(cases)[count:]]
    return [*list(cases)[:count], *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]
