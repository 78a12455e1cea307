"""Whether borrowing pays (the rule of PEARL, 2609.35158): what it saves over the remaining steps, against its start."""

from __future__ import annotations

from typing import NamedTuple


class Worth(NamedTuple):
    """Of borrowed engines."""

    saved_s: float
    """Over the remaining steps, until they are over."""
    needed_s: float
    """Activation, times a margin."""

    @property
    def pays(self) -> bool:
        return self.saved_s > self.needed_s


def worth(saved_s: float, steps_left: int, activation_s: float, margin: float) -> Worth:
    """``saved_s``: of each batch; ``activation_s``: until borrowed engines take turns."""
    return Worth(saved_s * steps_left, margin * activation_s)
