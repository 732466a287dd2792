"""How much of SBUF and PSUM a kernel's tiles need at one moment, from the instructions that use them.

A tile lives from the first instruction that touches it to the last, both included, wherever Python holds it: that is
the least that any allocator needs, so a kernel refused here fits in no way. In a run-time loop the compiler allocates a
body's tiles once for all iterations: they live through the whole loop, and so does a tile from outside that the body
touches. SBUF is counted in bytes per partition, PSUM in whole banks per tile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import CapacityError

SBUF_BYTES = 224 * 1024 - 16384 - 8 - 520
"""Usable bytes per partition on trn2; what is taken off is what nkilib's planners of Neuron 2.29 leave free."""
PSUM_BANKS = 8
BANK_BYTES = 2048

_LIMITS = {"sbuf": (SBUF_BYTES, "bytes per partition"), "psum": (PSUM_BANKS, "banks of 2 KiB per partition")}


@dataclass(slots=True, eq=False)
class Lifetime:
    """The instructions, by number, between which a tile holds its place."""

    name: str
    buffer: str
    amount: int
    first: int = -1
    last: int = -1


@dataclass(slots=True)
class Peak:
    """The most that lived at one moment, and which tiles did."""

    amount: int = 0
    tiles: list[Lifetime] = field(default_factory=list)


@dataclass(slots=True)
class Capacity:
    """Lifetimes of one core's tiles."""

    lifetimes: list[Lifetime] = field(default_factory=list)
    _loop: int | None = None
    _of_loop: list[Lifetime] = field(default_factory=list)
    _from_outside: set[Lifetime] = field(default_factory=set)

    def allocate(self, name: str, buffer: str, bytes_per_partition: int, counted: bool) -> Lifetime:
        """Note a tile; ``counted`` is false for one that an earlier iteration of the same body allocated already."""
        amount = bytes_per_partition if buffer == "sbuf" else -(-bytes_per_partition // BANK_BYTES)
        tile = Lifetime(name, buffer, amount)
        limit, unit = _LIMITS[buffer]
        if amount > limit:
            raise CapacityError(f"{name} alone takes {amount} {unit} of {buffer}, which has {limit}")
        if counted:
            self.lifetimes.append(tile)
            if self._loop is not None:
                self._of_loop.append(tile)
        return tile

    def touch(self, tile: Lifetime, instruction: int) -> None:
        """An instruction reads or writes the tile."""
        if tile.first < 0:
            tile.first = instruction
        tile.last = instruction
        if self._loop is not None:
            self._from_outside.add(tile)

    def open_loop(self, instruction: int) -> None:
        """A run-time loop starts."""
        self._loop = instruction

    def close_loop(self, instruction: int) -> None:
        """It ends: everything it touched lived through all of it."""
        start, self._loop = self._loop, None
        assert start is not None
        for tile in (*self._of_loop, *self._from_outside):
            if tile.first >= 0:
                tile.first, tile.last = min(tile.first, start), instruction
        self._of_loop, self._from_outside = [], set()

    def peak(self, buffer: str) -> Peak:
        """The fullest moment of ``buffer``."""
        tiles = [tile for tile in self.lifetimes if tile.buffer == buffer and tile.first >= 0]
        changes = sorted(
            [(tile.first, 1, tile.amount) for tile in tiles] + [(tile.last + 1, 0, -tile.amount) for tile in tiles]
        )
        most = now = at = 0
        for moment, _, amount in changes:
            now += amount
            if now > most:
                most, at = now, moment
        return Peak(most, [tile for tile in tiles if tile.first <= at <= tile.last])

    def check(self) -> None:
        """Raise CapacityError, naming the largest tiles that live together, where one memory overflows."""
        for buffer, (limit, unit) in _LIMITS.items():
            peak = self.peak(buffer)
            if peak.amount > limit:
                largest = sorted(peak.tiles, key=lambda tile: -tile.amount)[:6]
                named = ", ".join(f"{tile.name} ({tile.amount})" for tile in largest)
                raise CapacityError(
                    f"{buffer} needs {peak.amount} {unit} and has {limit}: {len(peak.tiles)} tiles live at once, "
                    f"the largest {named}; use smaller tiles, or end the use of one before the next is written"
                )
