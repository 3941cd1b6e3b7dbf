"""Shell completion of commands, options and values, generated from the settings; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from services.runtime.commands import COMMANDS, settings_of
from services.runtime.flags import ARGUMENTS, choices_of, flag_of

MAX_ABOUT = 70


class Option(NamedTuple):
    """A flag; `takes` if a value follows, `values` the few possible ones."""

    flag: str
    about: str
    takes: bool
    values: tuple[str, ...] = ()


HELP = (Option("--help", "the common options", False), Option("--help-all", "all options", False))
VALUES = {
    "keys": ("create", "list", "revoke", "new"),
    "alias": ("list", "set", "rollback", "rm"),
    "batch": ("submit", "run", "list", "watch", "cancel", "get", "errors"),
    "bench": ("send", "compare"),
    "completion": ("bash", "zsh", "fish"),
}


def options() -> dict[str, list[Option]]:
    """Each command's."""
    return {command: _of(command) for command in COMMANDS}


def _of(command: str) -> list[Option]:
    kind = settings_of(command)
    if kind is None:
        return [HELP[0]]
    found = [Option("--config", "TOML file with settings", True)]
    for name, field in kind.model_fields.items():
        if name in ARGUMENTS:
            continue
        flag, is_switch = flag_of(name), field.annotation is bool
        if is_switch and field.default:
            flag = f"--no-{flag[2:]}"
        values = choices_of(field).written
        found.append(Option(flag, str(field.description or ""), not is_switch, values))
    return [*found, *HELP]


def bash(known: Mapping[str, list[Option]]) -> str:
    """The script for `source <(baton completion bash)`."""
    cases, values = [], []
    for command, its in known.items():
        words = " ".join((*VALUES.get(command, ()), *(option.flag for option in its)))
        cases.append(f'    {command}) words="{words}" ;;')
        values += [
            f'    {command},{option.flag}) words="{" ".join(option.values)}" ;;' for option in its if option.values
        ]
        files = "|".join(f"{command},{option.flag}" for option in its if option.takes and not option.values)
        values += [f"    {files}) return ;;"] if files else []
    return "\n".join(
        (
            "_baton() {",
            '  local current="${COMP_WORDS[COMP_CWORD]}" words=""',
            "  COMPREPLY=()",
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f'    words="{" ".join((*known, "help", "--help", "--version"))}"',
            "  else",
            '    case "${COMP_WORDS[1]},${COMP_WORDS[COMP_CWORD-1]}" in',
            *values,
            '    *) case "${COMP_WORDS[1]}" in',
            *cases,
            "    esac ;;",
            "    esac",
            "  fi",
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _baton baton ./baton",
            "",
        )
    )


def zsh(known: Mapping[str, list[Option]]) -> str:
    """The script for `source <(baton completion zsh)`."""
    commands = "\n".join(f"    '{name}:{_plain(COMMANDS[name].about)}'" for name in known)
    cases = []
    for command, its in known.items():
        said = [f"'{option.flag}[{_plain(option.about)}]{_zsh_value(option)}'" for option in its]
        first = f"'1:what:({' '.join(VALUES[command])})' " if command in VALUES else "'*:file:_files' "
        cases.append(f"    {command}) shift words; (( CURRENT-- )); _arguments {first}{' '.join(said)} ;;")
    return "\n".join(
        (
            "#compdef baton",
            "_baton() {",
            "  local -a commands",
            f"  commands=(\n{commands}\n  )",
            "  if (( CURRENT == 2 )); then _describe command commands; return; fi",
            '  case "$words[2]" in',
            *cases,
            "  esac",
            "}",
            "compdef _baton baton ./baton",
            "",
        )
    )


def fish(known: Mapping[str, list[Option]]) -> str:
    """The script for `baton completion fish | source`."""
    lines = [
        f"complete -c baton -n __fish_use_subcommand -f -a {name} -d '{_plain(COMMANDS[name].about)}'" for name in known
    ]
    for command, its in known.items():
        seen = f"complete -c baton -n '__fish_seen_subcommand_from {command}'"
        lines += [f"{seen} -f -a '{value}'" for value in VALUES.get(command, ())]
        for option in its:
            value = f" -x -a '{' '.join(option.values)}'" if option.values else " -r" if option.takes else ""
            lines.append(f"{seen} -l {option.flag[2:]}{value} -d '{_plain(option.about)}'")
    return "\n".join([*lines, ""])


def _zsh_value(option: Option) -> str:
    if not option.takes:
        return ""
    return f":value:({' '.join(option.values)})" if option.values else ":value:_files"


def _plain(text: str) -> str:
    """Strip characters that are special in shell quotes and in zsh descriptions."""
    kept = "".join(char for char in text if char not in "'\"`[]:\\$")
    return kept if len(kept) <= MAX_ABOUT else kept[: MAX_ABOUT - 1] + "…"
