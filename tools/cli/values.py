"""The types of option values.

Values are checked against the tables of ``converters`` when they are parsed, so a misspelt one is wrong usage (exit 2);
those tables are loaded only then, for ``--help`` needs click alone.
"""

from __future__ import annotations

import re
from typing import Any

import click
from click.shell_completion import CompletionItem

_FACTORS = {
    unit.lower(): factor
    for power, (decimal, binary) in enumerate((("KB", "KiB"), ("MB", "MiB"), ("GB", "GiB"), ("TB", "TiB")), 1)
    for unit, factor in ((decimal, 1000**power), (binary, 1024**power))
} | {"": 1, "b": 1}


class Size(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """Bytes: ``5GB`` and ``500MB`` count in thousands, as the hub does, ``2GiB`` in 1024s; a bare number is bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes, at least 1."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", value.strip())
        factor = _FACTORS.get(found[2].lower()) if found else None
        size = int(float(found[1]) * factor) if found and factor else 0
        if size < 1:
            self.fail(f"{value!r} is not a size; give bytes, or a number with KB, MB, GB, TB (thousands) or KiB, MiB, "
                      "GiB, TiB (1024s), such as 5GB", param, ctx)  # fmt: skip
        return size


class FormatName(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """A format of ``qwen3conv formats``; of one that is only read, the conversion says what to do instead."""

    name = "format"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name, known to be in the table."""
        from qwen3conv.converters.formats import FORMATS

        if value not in FORMATS:
            known = ", ".join(f.name for f in FORMATS.values() if f.writable)
            self.fail(f"{value!r} is not a format; choose one of {known}", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Formats that can be written."""
        from qwen3conv.converters.formats import FORMATS

        return [
            CompletionItem(f.name, help=f.summary)
            for f in FORMATS.values()
            if f.writable and f.name.startswith(incomplete)
        ]


class TitanSchema(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """A key schema (``T7``) or a torchtitan release (``0.3``)."""

    name = "schema"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The schema, known to be in the table."""
        from qwen3conv.converters.errors import PolicyError
        from qwen3conv.converters.layouts import titan_layout

        try:
            titan_layout(value)
        except PolicyError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Flavor(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """A row of torchtitan's table of Qwen3 models."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The flavor, known to be in the table."""
        from qwen3conv.converters.variants import FLAVORS

        known = [flavor.name for flavor in FLAVORS]
        if value not in known:
            self.fail(f"torchtitan has no Qwen3 flavor {value!r}; it has {', '.join(known)}", param, ctx)
        return str(value)


class ModelSize(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """A size that there is a layout for."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The size as the table has it, whatever its case."""
        from difflib import get_close_matches

        from qwen3conv.training.layouts import LAYOUT

        known = {size.lower(): size for size in LAYOUT}
        text = str(value).lower().removeprefix("qwen3-")
        if text not in known:
            near = get_close_matches(text, known, n=2, cutoff=0.4)
            hint = f"did you mean {' or '.join(known[one] for one in near)}? " if near else ""
            self.fail(f"{value!r} is no size; {hint}There are {', '.join(LAYOUT)}", param, ctx)
        return known[text]


class Setting(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """``KEY=VALUE`` for a config.json that is made from shapes."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, object]:
        """Key, and value of the key's own type."""
        from qwen3conv.converters.config_derive import parse_setting
        from qwen3conv.converters.errors import PolicyError

        if isinstance(value, tuple):
            return value
        try:
            return parse_setting(value)
        except PolicyError as error:
            self.fail(str(error), param, ctx)


class Place(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """A folder or a hub id; which of the two is for ``qwen3conv.tools.hub`` to say."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as typed."""
        if not value:
            self.fail("an empty text names no folder", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Folders."""
        return [CompletionItem(incomplete, type="dir")]
