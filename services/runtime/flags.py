"""A command line for a class of settings: the common options first, the rest in groups by what they are about."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from common import PREFIX
from common.settings import ConfigError, Word
from services.runtime import foreign
from services.runtime.commands import COMMANDS, settings_of
from services.runtime.removed import removed_from

# Where a field cannot have the name of its flag.
FLAGS = {"print_json": "--json"}
FLAGS |= {  # gone
    "compare_files": "--compare",
    "json_file": "--json",
    "html_file": "--html",
    "csv_file": "--csv",
    "requests_file": "--per-request",
}
# Words without a flag, by command; those that are arguments have no flag, no variable and no key of a file either.
POSITIONAL: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("up", "gateway", "prefill", "decode", "worker", "doctor"), ("model",)
)
POSITIONAL |= {"trace": ("request",), "batch": ("action", "name"), "bench": ("action", "before", "after")}
POSITIONAL |= {"users": ("folder", "members")}
ARGUMENTS = ("request", "action", "name", "before", "after", "folder", "members")
# A flag for each entry, or one with commas.
SERVE_SEVERAL = ("up", "gateway")  # commands whose --model may come again
REPEATABLE = {"alias": "NAME=MODEL", "output": "FILE", "set": "NAME=VALUE", "metadata": "NAME=VALUE"}
SERVERS = ("nats_url", "redis_url")
# A command that is not here has so few options that it shows them all.
COMMON = {
    "up": (
        *("model", "prefill", "decode", "device", "port", "host", "api_keys", "served_model_name"),
        *("tensor_parallel_size", "kv_memory_mb", "max_model_len", "planner", "data_dir"),
    ),
    "gateway": ("model", "port", "host", "api_keys", "tenants", "served_model_name", "served_models", *SERVERS),
    "planner": ("nats_url", "ttft_slo_ms", "tpot_slo_ms", "plan_dry_run"),
    "bench": (
        *("url", "num_prompts", "request_rate", "max_concurrency", "input_len", "output_len", "dataset_path"),
        *("sweep", "ttft_slo_ms", "tpot_slo_ms", "output"),
    ),
    "doctor": ("model", "device", "url", *SERVERS, "data_dir", "print_json"),
}
_WORKER = (
    "model",
    "device",
    *SERVERS,
    "served_model_name",
    "tensor_parallel_size",
    "kv_memory_mb",
    "max_model_len",
    "transport",
)
COMMON |= {"prefill": _WORKER, "decode": _WORKER, "worker": _WORKER}
GROUPS = (  # title, beginnings of names; the first that fits counts
    ("Batch API", ("batch_",)),
    ("Planner", ("plan_", "planner")),
    ("NATS and Redis", ("nats_", "redis_", "servers_")),
    ("Logs and traces", ("log_", "otlp_", "trace_")),
    ("Service levels", ("ttft_slo", "tpot_slo", "e2e_slo")),
    (
        "HTTP, keys and web pages",
        (
            "host",
            "port",
            "ollama_port",
            "grpc_port",
            "api_key",
            "admin_key",
            "metrics_key",
            "tenants",
            "cors_",
            "allowed_",
            "tls_",
            "unknown_fields",
        ),
    ),
    (
        "Model and answers",
        (
            "model",
            "served_",
            "worker_models",
            "alias",
            "dtype",
            "max_model_len",
            "tool_call_parser",
            "reasoning_parser",
            "chat_",
        ),
    ),
    (
        "Limits",
        ("max_requests", "max_queued", "max_connections", "max_body", "request_timeout", "admit_by"),
    ),
    (
        "Workers",
        (
            "transport",
            "device",
            "tensor_",
            "enable_expert",
            "pipeline_",
            "nnodes",
            "kv_",
            "block_size",
            "max_",
            "step_",
            "threads",
            "local_prefill",
            "worker_id",
        ),
    ),
)


class Choices(NamedTuple):
    """The values of a setting that has few, and as people write them."""

    values: tuple[Any, ...]
    written: tuple[str, ...]

    @property
    def are_numbers(self) -> bool:
        return bool(self.values) and all(isinstance(value, int) for value in self.values)


def choices_of(field: FieldInfo) -> Choices:
    values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    words = words_of(field)
    return Choices(values, tuple(str(words.get(value, value)) for value in values))


def number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def flag_of(name: str) -> str:
    """The setting's name on the command line."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def default_of(field: FieldInfo) -> str:
    """The default as a person would write it; "" where there is none to speak of."""
    return "" if field.annotation is bool else str(words_of(field).get(field.default, field.default))


def words_of(field: FieldInfo) -> dict[Any, str]:
    """Numbers that have words, like auto."""
    found = (getattr(item, "func", None) for item in field.metadata)
    return {word.number: word.word for word in found if isinstance(word, Word)}


class Parser(argparse.ArgumentParser):
    """Errors are ConfigErrors that say the nearest option, or what an option of vLLM is called here."""

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if not unknown:
            raise ConfigError(f"{message}; see {self.prog} --help")
        flag = unknown[0].partition("=")[0]
        for name, said in removed_from(self.prog.removeprefix("baton ")).items():
            if flag in (flag_of(name), f"--no-{flag_of(name)[2:]}"):
                raise ConfigError(f"{flag}: {said}")
        known = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(flag, known, n=1)
        meant = foreign.ELSEWHERE.get(flag) or _owners(flag) or (f"did you mean {near[0]}?" if near else "")
        raise ConfigError(f"unknown option {flag}{f' ({meant})' if meant else ''}; see {self.prog} --help")


def _owners(flag: str) -> str:
    """The words for an option of other commands; "" if none has it."""
    kinds = {name: settings_of(name) for name in COMMANDS}
    owners = [name for name, kind in kinds.items() if kind is not None and flag in map(flag_of, kind.model_fields)]
    return f"it is an option of {', '.join(f'baton {name}' for name in owners)}" if owners else ""


def parser_of(kind: type[BaseModel], command: str, *, everything: bool = False) -> argparse.ArgumentParser:
    """Options of `kind`. Without `everything`, help shows those that a command is mostly started with."""
    fields = {name: field for name, field in kind.model_fields.items() if name not in ARGUMENTS}
    words = _words(kind, command)
    again = REPEATABLE | ({"model": "MODEL"} if command in SERVE_SEVERAL else {})
    first = [name for name in COMMON.get(command, ()) if name in fields]
    short = bool(first) and not everything
    hint = "--help-all lists all options. " if short else ""
    parser = Parser(
        prog=f"baton {command}",
        usage=" ".join((f"baton {command}", *(f"[{word.upper()}]" for word in words), "[options]")),
        allow_abbrev=False,
        add_help=False,
        description=(kind.__doc__ or "").strip(),
        epilog=f"{hint}Each option is also a variable ({PREFIX}NAME) and a key of --config's file.",
    )
    _take_words(parser, words)
    for title, names in _groups(fields, first):
        group = parser.add_argument_group(title)
        for name in names:
            _add(group, name, fields[name], again.get(name, ""), hidden=short and name not in first)
    group = parser.add_argument_group("Help")
    group.add_argument("--config", metavar="FILE", help="TOML file with settings")
    group.add_argument("-h", "--help", action="help", help="the common options" if short else "this text")
    group.add_argument("--help-all", action="help", help="all options" if short else argparse.SUPPRESS)
    _take_vllms(parser, fields)
    return parser


def _words(kind: type[BaseModel], command: str) -> dict[str, FieldInfo]:
    return {name: kind.model_fields[name] for name in POSITIONAL.get(command, ()) if name in kind.model_fields}


def _take_words(parser: argparse.ArgumentParser, words: dict[str, FieldInfo]) -> None:
    """Add the words without a flag; of those that have one, too, help shows that."""
    for word, field in words.items():
        said = field.description if word in ARGUMENTS else argparse.SUPPRESS
        parser.add_argument(word, nargs="?", default=argparse.SUPPRESS, metavar=word.upper(), help=said)


def _take_vllms(parser: argparse.ArgumentParser, fields: dict[str, FieldInfo]) -> None:
    """Add vLLM's options where the command has no such flag of its own."""
    own = parser._option_string_actions
    for flag, name in foreign.ALIASES.items():
        if name in fields and flag not in own:
            parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    if "model" in fields:
        for flag in foreign.IS_SO.keys() - own.keys():
            nargs = 0 if foreign.IS_SO[flag] is None else None
            parser.add_argument(flag, dest="_", nargs=nargs, action=_IsSo, help=argparse.SUPPRESS)


class _IsSo(argparse.Action):
    """An option of vLLM for what Baton always does: taken without effect, unless it asks for something else."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, **(options | {"default": argparse.SUPPRESS}))

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, flag: str | None = None) -> None:
        wanted = foreign.IS_SO[flag or ""]
        if wanted is not None and value != wanted:
            raise ConfigError(f"{flag} {value}: {foreign.ELSEWHERE.get(flag or '', f'Baton has {wanted} alone')}")


class _Joined(argparse.Action):
    """A flag that may come again: its entries, by commas."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, flag: str | None = None) -> None:
        said = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, value if said is None else f"{said},{value}")


def _groups(fields: dict[str, FieldInfo], first: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Titles and names: the common ones, what is the command's own, then by subject."""
    if not first:
        yield "Options", list(fields)
        return
    yield "Common options", first
    titles = {name: title for name in fields for title in [_title(name)]}
    rest = [name for name in fields if name not in first]
    for title in ("Further options", *(title for title, _ in reversed(GROUPS))):
        names = [name for name in rest if titles[name] == (title if title in dict(GROUPS) else "")]
        if names:
            yield title, names


def _title(name: str) -> str:
    return next((title for title, beginnings in GROUPS if name.startswith(beginnings)), "")


def _add(group: argparse._ArgumentGroup, name: str, field: FieldInfo, again: str, *, hidden: bool) -> None:
    """Add an option. `again`: what help calls an entry of one that may come more than once."""
    default = default_of(field)
    text = f"{field.description}{f' (default: {default})' if default else ''}".replace("%", "%%")
    flag, help_text = flag_of(name), argparse.SUPPRESS if hidden else text
    if field.annotation is bool:
        # The one that changes something is shown; the other undoes a variable.
        shown, other = (help_text, argparse.SUPPRESS) if not field.default else (argparse.SUPPRESS, help_text)
        group.add_argument(flag, dest=name, action="store_const", const=True, help=shown)
        off = other if hidden or not field.default else f"switch off: {text}"
        group.add_argument(f"--no-{flag[2:]}", dest=name, action="store_const", const=False, help=off)
        return
    if again:
        group.add_argument(flag, dest=name, action=_Joined, metavar=again, help=help_text)
        return
    choices = choices_of(field)
    metavar = "{" + ",".join(choices.written) + "}" if choices.values else name.rpartition("_")[2].upper()
    group.add_argument(flag, dest=name, metavar=metavar, help=help_text, type=number if choices.are_numbers else str)
