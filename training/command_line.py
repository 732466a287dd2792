"""torchtitan's command line, with one line for what is wrong with it.

Import this module after ``devices.prepare_torchtitan``. Source of the forms: torchtitan 0.3.0, ``config/manager.py``,
and tyro, which writes a page with a frame and ends the process.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import io
import itertools
import logging
import math
import re
from types import FunctionType, ModuleType

from . import recipes
from .launch import CommandLineError
from .titan import ConfigManager, ParallelismConfig, _supported_experiments, _supported_models

_BACKENDS = ("native", "transformers", "nki_moe")
_REST = -1
"""A degree that takes the ranks that the others leave."""
_SHOWN = 3


def check_command_line(arguments: list[str], *, ranks: int) -> None:
    """Return when torchtitan takes ``arguments`` on so many ranks; a request for help is answered there.

    Raises:
        CommandLineError: it does not; the message has what is wrong, and what is like it.
    """
    if any(word in ("-h", "--help") for word in arguments):
        return
    _check_recipe(_value("--module", arguments), _value("--config", arguments))
    said = io.StringIO()
    logging.disable()  # torchtitan parses again, and says then what it has to say
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            config = ConfigManager().parse_args(list(arguments))
    except SystemExit as stop:
        if stop.code:
            raise CommandLineError(f"torchtitan's command line: {_in_one_line(said.getvalue())}") from None
        return
    finally:
        logging.disable(logging.NOTSET)
    _check_degrees(config.parallelism, ranks)


def _value(flag: str, arguments: list[str]) -> str:
    """What follows ``flag``, in torchtitan's two forms; the last one counts."""
    found = [word.removeprefix(f"{flag}=") for word in arguments if word.startswith(f"{flag}=")]
    found += [after for word, after in itertools.pairwise(arguments) if word == flag]
    if not found:
        example = "--module qwen3conv.training.recipes.native --config pretrain"
        raise CommandLineError(f"{flag} is missing, which names what to train: {example}")
    return found[-1]


def _check_recipe(module: str, name: str) -> None:
    """Refuse a module or a recipe that there is not; torchtitan's own models, by their short names, are left to it."""
    if module in _supported_models | _supported_experiments:
        return
    try:
        found = importlib.import_module(module)
    except (ImportError, TypeError, ValueError) as error:  # the latter two of what is no module's name
        if isinstance(error, ImportError) and not _is_absent(module, error):
            raise CommandLineError(f"--module {module} cannot be imported: {error}") from error
        known = [f"{recipes.__name__}.{backend}" for backend in _BACKENDS]
        raise CommandLineError(f"there is no --module {module}; {_nearest(module, known)}") from None
    if hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.config_registry") is not None:
        return
    if not (name in dir(found) and isinstance(getattr(found, name), FunctionType)):
        raise CommandLineError(f"{module} has no recipe {name}; {_nearest(name, _recipes_in(found))}")


def _is_absent(module: str, error: ImportError) -> bool:
    """Whether it is the module itself, or a package that it is in, that is not there."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return name is not None and (module == name or module.startswith(f"{name}."))


def _recipes_in(module: ModuleType) -> list[str]:
    """Functions that the module made, rather than classes and what it imports. Ours list nothing but recipes."""
    is_ours = module.__name__.startswith(f"{recipes.__name__}.")
    functions = {name: found for name in dir(module) if isinstance(found := getattr(module, name), FunctionType)}
    return [
        name
        for name, found in functions.items()
        if is_ours or (found.__module__ == module.__name__ and not name.startswith("_"))
    ]


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _check_degrees(degrees: ParallelismConfig, ranks: int) -> None:
    """Refuse degrees whose product is not the number of ranks; a shard degree of -1 takes what is left."""
    given = {
        "data_parallel_replicate": degrees.data_parallel_replicate_degree,
        "data_parallel_shard": degrees.data_parallel_shard_degree,
        "context_parallel": degrees.context_parallel_degree,
        "tensor_parallel": degrees.tensor_parallel_degree,
        "pipeline_parallel": degrees.pipeline_parallel_degree,
    }
    wrong = [f"{name}_degree {degree}" for name, degree in given.items() if degree < 1 and degree != _REST]
    if wrong:
        raise CommandLineError(
            f"{' and '.join(wrong)}: a degree is 1 or more, and that of data_parallel_shard may be -1"
        )
    product = math.prod(degree for degree in given.values() if degree != _REST)
    fits = ranks % product == 0 if degrees.data_parallel_shard_degree == _REST else ranks == product
    if not fits:
        listed = " x ".join(f"{name} {degree}" for name, degree in given.items() if degree not in (1, _REST)) or "1"
        raise CommandLineError(
            f"{listed} needs {product} ranks, or a multiple with data_parallel_shard -1, and torchrun started {ranks}: "
            f"give it --nproc_per_node {product}, or change --parallelism.*_degree"
        )


def _in_one_line(page: str) -> str:
    """What tyro's page says first, and the flags that it proposes. Its frame is of box characters, or of hyphens."""
    rows = [re.sub(r"[\u2500-\u257f]", " ", line).rstrip() for line in page.splitlines()]
    parts = [row.strip() if row.strip("- ") else "" for row in rows]
    title = next((number for number, part in enumerate(parts) if part), 0)
    begin = next((number for number in range(title + 1, len(parts)) if parts[number]), title)
    end = next((number for number in range(begin, len(parts)) if not parts[number]), len(parts))
    alike = [match[1] for row in rows[end:] if (match := re.match(r"\s{4,8}(--[\w.-]+)", row))]
    proposed = f"; perhaps {' or '.join(dict.fromkeys(alike[:_SHOWN]))}" if alike else ""
    return " ".join(parts[begin:end]) + proposed
