"""Display units of sizes, so that a tiny model does not show as 0.0 GiB. Pure."""

from __future__ import annotations

from typing import NamedTuple

TIB, GIB, MIB = 2**40, 2**30, 2**20


class Unit(NamedTuple):
    """One unit for all numbers of a table, so that they can be compared."""

    name: str
    size: int

    @classmethod
    def of(cls, most: float) -> Unit:
        """Return the unit of a table with `most` as its largest number of bytes, and of sentences about it."""
        return cls("GiB", GIB) if most >= GIB else cls("MiB", MIB)

    @classmethod
    def for_size(cls, size: float) -> Unit:
        """Return the unit of a single number."""
        return cls("TiB", TIB) if size >= TIB else cls.of(size)

    @classmethod
    def of_parameters(cls, most: int) -> Unit:
        return cls("B", 10**9) if most >= 10**8 else cls("M", 10**6)

    def show(self, size: float | None) -> str:
        """Format with readable digits: 0.04, 1.2, 53.1, 1,234."""
        if size is None:
            return "–"
        value = size / self.size
        return f"{value:,.0f}" if value >= 1000 or value == 0 else f"{value:.2f}" if value < 1 else f"{value:.1f}"

    def whole(self, size: float) -> str:
        """Format a user's number without rounding: 64, 22.5."""
        return f"{size / self.size:,.10g}"

    def tenths(self, size: float) -> str:
        """Format with one decimal, as in a column: 0.0, 53.1, 1,234.0."""
        return f"{size / self.size:,.1f}"


def sized(size: float) -> str:
    """Format a single number: ``0.41 MiB``, ``57.6 GiB``, ``1.2 TiB``."""
    unit = Unit.for_size(size)
    return f"{unit.show(size)} {unit.name}"


def decimal(count: int) -> str:
    """Format bytes in decimal units, as disks and links are sold: ``0.87 MB``, ``427 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 100 * size else f"{count / size:.0f} {unit}"
    return f"{count / 1e3:.3g} kB" if count else "0"
