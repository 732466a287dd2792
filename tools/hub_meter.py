"""How many bytes of a download came: what huggingface_hub takes for the class of a progress bar."""

from __future__ import annotations

from collections.abc import Callable


class Meter:
    """A bar that shows nothing and passes on what it is told.

    Plain downloads call ``update``. Those of Xet call it with bytes of the file, and ``update_transfer`` with bytes on
    the wire; two bars are made where a class lacks the latter, and everything would count twice (huggingface_hub 1.33,
    ``utils/_xet_progress_reporting.py``).
    """

    came: Callable[[int], None]

    def __init__(self, *arguments: object, **named: object) -> None:
        self.n, self.total = 0, 0

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *arguments: object) -> None:
        pass

    def update(self, count: float | None = 1) -> None:
        """``count`` more bytes have come."""
        self.n += int(count or 0)
        type(self).came(int(count or 0))

    def update_transfer(self, count: float | None = 1) -> None:
        """Nothing to tell: compressed or not, the file's bytes count."""

    def set_postfix_str(self, text: str = "", refresh: bool = True) -> None:
        """Nothing to show."""

    def set_transfer_postfix_str(self, text: str = "", refresh: bool = True) -> None:
        """Nothing to show."""

    def refresh(self) -> None:
        """Nothing to show."""

    def close(self) -> None:
        """Nothing to end."""


def meter_class(came: Callable[[int], None]) -> type[Meter]:
    """A class of bars that call ``came`` with each count of bytes. What it raises ends the download."""
    return type("BoundMeter", (Meter,), {"came": staticmethod(came)})
