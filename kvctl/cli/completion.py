"""Writes the completion scripts from the command line itself.

The scripts are static: a press of Tab takes 1.5 ms. typer's own machinery starts Python each time. On an idle core that
takes 170 ms for the name of a command, and 300 ms for an option of describe-topology. Only names of engines, hosts,
leases and peers are asked for as they are wanted (`kvctl.cli.live_names`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvctl.cli.discovery import Row
from kvctl.cli.live_names import PROGRAM
from kvctl.cli.loading import LazyGroup, load
from kvctl.errors import KvctlError

SHELLS = ("bash", "zsh", "fish")
LIVE_OPTIONS = {"ENGINE": "engines", "HOST[:PORT]": "hosts"}
"""Metavars of options whose values are names, and what kvctl is asked for them."""
LIVE_ARGUMENTS = {
    **dict.fromkeys(("describe-topology", "diff", "drain", "export-geometry"), "engines"),
    "agents": "agents",
    "leases": "leases",
}
"""The same for arguments of commands."""


@dataclass(frozen=True)
class Option:
    """An option as completion sees it: its spellings, help, whether it takes a value, and which values it knows."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]
    metavar: str

    @property
    def live(self) -> str:
        """What kvctl is asked for where names are wanted; empty where none are."""
        return LIVE_OPTIONS.get(self.metavar, "")

    @property
    def takes_path(self) -> bool:
        """Whether the value is a file or a directory."""
        return self.metavar in ("FILE", "DIR", "PATH", "ADDRESS")


@dataclass(frozen=True)
class Command:
    """A command as completion sees it; ``arguments`` are the values its first argument may have."""

    name: str
    help: str
    options: tuple[Option, ...]
    arguments: tuple[str, ...] = ()

    @property
    def live(self) -> str:
        """What kvctl is asked for where an argument is wanted; empty where nothing is."""
        return LIVE_ARGUMENTS.get(self.name, "")


def script(shell: str, group: LazyGroup, words: Mapping[str, tuple[str, ...]]) -> str:
    """The completion script of one of `SHELLS`; ``words`` are what commands take that do not say so themselves."""
    root, commands = describe(group, words)
    commands = tuple(
        replace(one, options=tuple(_worded(o, one.name, words) for o in one.options)) for one in commands
    )
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](root, commands)


def describe(group: LazyGroup, words: Mapping[str, tuple[str, ...]]) -> tuple[Command, tuple[Command, ...]]:
    """The command line itself and its commands, all imported for it.

    A command whose module is not installed is completed by its name alone. A group takes the options of all commands
    below it.
    """

    def loaded(row: Row) -> Command:
        if row.rows:
            below = [loaded(child) for child in row.rows]
            whole = (_command(load(row), row.name, row.summary), *below)
            options = {option.names: option for command in whole for option in command.options}
            return Command(row.name, row.summary, tuple(options.values()), tuple(c.name for c in row.rows))
        try:
            return _command(load(row), row.name, row.summary, words.get(row.name, ()))
        except KvctlError:
            return Command(row.name, row.summary, ())

    return _command(group, "kvctl", ""), tuple(loaded(row) for row in group.rows)


def _worded(option: Option, command: str, words: Mapping[str, tuple[str, ...]]) -> Option:
    """An option with the values that ``words`` has for ``COMMAND --OPTION``."""
    found = next((words[f"{command} {name}"] for name in option.names if f"{command} {name}" in words), ())
    return replace(option, choices=option.choices or found)


def _command(command: Any, name: str, summary: str, words: tuple[str, ...] = ()) -> Command:
    options = [_option(p) for p in command.params if p.param_type_name == "option" and not p.hidden]
    options.append(
        Option(("-h", "--help"), "Show this message and exit.", takes_value=False, choices=(), metavar="")
    )
    arguments = (_choices(p.metavar) for p in command.params if p.param_type_name == "argument")
    return Command(name, summary, tuple(options), words or next(arguments, ()))


def _option(parameter: Any) -> Option:
    metavar = parameter.metavar or ""
    names = (*parameter.opts, *parameter.secondary_opts)
    return Option(
        names, (parameter.help or "").split(" [")[0], not parameter.is_flag, _choices(metavar), metavar
    )


def _choices(metavar: str | None) -> tuple[str, ...]:
    return tuple(metavar.split("|")) if metavar and "|" in metavar else ()


def _bash(root: Command, commands: tuple[Command, ...]) -> str:
    values = "|".join(name for option in root.options if option.takes_value for name in option.names)
    lines = [
        "# bash completion for kvctl; made by `make completions`, not by hand.",
        "_kvctl_names() {",
        "    # Compared here: compgen -W would have bash read the names.",
        "    local name",
        "    while IFS= read -r name; do",
        '        [[ $name == "$2"* ]] && COMPREPLY+=("$name")',
        f"    done < <({PROGRAM} $1 2>/dev/null)",
        "}",
        "_kvctl() {",
        "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command= i",
        "    # bash makes --output=json three words.",
        "    [[ $current == = ]] && current=",
        "    [[ $previous == = ]] && previous=${COMP_WORDS[COMP_CWORD-2]}",
        "    for ((i = 1; i < COMP_CWORD; i++)); do",
        "        case ${COMP_WORDS[i]} in",
        f"            {values}) [[ ${{COMP_WORDS[i+1]}} == = ]] && ((i++)); ((i++)) ;;",
        "            -*) ;;",
        "            *) command=${COMP_WORDS[i]}; break ;;",
        "        esac",
        "    done",
        "    case $command:$previous in",
        *(
            _bash_case(o, c.name)
            for c in commands
            for o in c.options
            if o.takes_value and o not in root.options
        ),
        *(_bash_case(o, "*") for o in root.options if o.takes_value),
        "    esac",
        "    local options= words= live=",
        "    case $command in",
    ]
    for command in (root, *commands):
        name = "''" if command is root else command.name
        options = " ".join(
            name for option in command.options for name in option.names if name.startswith("--")
        )
        words = " ".join(c.name for c in commands) if command is root else " ".join(command.arguments)
        live = [f"            live={command.live}"] * bool(command.live)
        lines += [
            f"        {name})",
            f"            options='{options}'",
            *live,
            f"            words='{words}' ;;",
        ]
    lines += [
        "    esac",
        "    [[ $current == -* ]] && words=$options",
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        '    [[ $live && $current != -* ]] && _kvctl_names $live "$current"',
        "}",
        "complete -F _kvctl kvctl",
    ]
    return "\n".join(lines) + "\n"


def _bash_case(option: Option, command: str) -> str:
    pattern = "|".join(f"{command}:{name}" for name in option.names)
    values = 'COMPREPLY=($(compgen -f -- "$current"))' if option.takes_path else "COMPREPLY=()"
    if option.choices:
        values = f'COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$current"))'
    elif option.live:
        values += f'; _kvctl_names {option.live} "$current"'
    return f"        {pattern}) {values}; return ;;"


def _zsh(root: Command, commands: tuple[Command, ...]) -> str:
    lines = [
        "#compdef kvctl",
        "# zsh completion for kvctl; made by `make completions`, not by hand.",
        "_kvctl_names() {",
        "    local -a names",
        f'    names=(${{(f)"$({PROGRAM} $1 2>/dev/null)"}})',
        "    compadd -a names",
        "}",
        "_kvctl() {",
        "    local context state state_descr line",
        "    typeset -A opt_args",
        "    _arguments -C \\",
        *(f"        {spec} \\" for option in root.options for spec in _zsh_specs(option)),
        "        '1:command:->command' '*::argument:->argument'",
        "    case $state in",
        "        command)",
        "            local -a commands",
        "            commands=(",
        *(f"                {_quoted(f'{c.name}:{c.help}')}" for c in commands),
        "            )",
        "            _describe command commands ;;",
        "        argument)",
        "            case $line[1] in",
    ]
    for command in commands:
        specs = [spec for option in command.options for spec in _zsh_specs(option)]
        if command.arguments:
            specs.append(_quoted(f"1:argument:({' '.join(command.arguments)})"))
        if command.live:
            specs.append(_quoted(f"*:name:_kvctl_names {command.live}"))
        if not specs:
            continue
        lines.append(f"                {command.name}) _arguments \\")
        lines += [f"                    {spec} \\" for spec in specs[:-1]]
        lines.append(f"                    {specs[-1]} ;;")
    lines += ["            esac ;;", "    esac", "}", '_kvctl "$@"']
    return "\n".join(lines) + "\n"


def _zsh_specs(option: Option) -> list[str]:
    text = option.help.replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    exclusive = f"({' '.join(option.names)})" if len(option.names) > 1 else ""
    if not option.takes_value:
        value = ""
    elif option.choices:
        value = f":value:({' '.join(option.choices)})"
    elif option.live:
        value = f":{option.live}:_kvctl_names {option.live}"
    else:
        value = ":path:_files" if option.takes_path else f":{option.metavar.lower()}:"
    joined = {True: "=", False: "+"} if value else {True: "", False: ""}
    return [
        _quoted(f"{exclusive}{name}{joined[name.startswith('--')]}[{text}]{value}") for name in option.names
    ]


def _fish(root: Command, commands: tuple[Command, ...]) -> str:
    lines = [
        "# fish completion for kvctl; made by `make completions`, not by hand.",
        "complete -c kvctl -f",
        f"set -l kvctl_commands {' '.join(c.name for c in commands)}",
    ]
    bare = '-n "not __fish_seen_subcommand_from $kvctl_commands"'
    lines += [f"complete -c kvctl {bare} -a {c.name} -d {_quoted(c.help)}" for c in commands]
    lines += [f"complete -c kvctl {bare} {_fish_option(option)}" for option in root.options]
    for command in commands:
        inside = f'-n "__fish_seen_subcommand_from {command.name}"'
        if command.live:
            lines.append(f"complete -c kvctl {inside} -a {_quoted(_asked(command.live))}")
        if command.arguments:
            lines.append(f"complete -c kvctl {inside} -a {_quoted(' '.join(command.arguments))}")
        lines += [f"complete -c kvctl {inside} {_fish_option(option)}" for option in command.options]
    return "\n".join(lines) + "\n"


def _fish_option(option: Option) -> str:
    parts = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.takes_value:
        parts.append("-r -F" if option.takes_path else "-x")
    if option.choices:
        parts.append(f"-a {_quoted(' '.join(option.choices))}")
    elif option.live:
        parts.append(f"-a {_quoted(_asked(option.live))}")
    return " ".join([*parts, f"-d {_quoted(option.help)}"])


def _asked(live: str) -> str:
    return f"({PROGRAM} {live} 2>/dev/null)"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
