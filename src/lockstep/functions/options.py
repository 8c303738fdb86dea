"""The options of `lockstep run` for the arguments of a function that starts a job."""

from collections.abc import Mapping, Sequence

from lockstep.errors import ConfigError
from lockstep.system.environment import parse_variables, require_variables


def command_options(caller: str, values: Mapping[str, object]) -> list[str]:
    """Return options by their names without dashes.

    None and False are omitted, True is a flag, and a tuple repeats its option.

    Args:
        caller: the public function whose arguments they are, for messages.
        values: the values of the options.

    Raises:
        ConfigError: a value has a null character, which a command line cannot contain; or the run folder is a
            URL, where the results of the function cannot be read.
    """
    if "://" in str(values.get("run-dir", "")):
        raise ConfigError(f"{caller}, run_dir={values['run-dir']!r}: give a folder of this machine")
    options: list[str] = []
    for name, value in values.items():
        if value is True:
            options.append(f"--{name}")
        elif value is not None and value is not False:
            options += [f"--{name}={item}" for item in (value if isinstance(value, tuple) else (value,))]
    for option in options:
        if "\0" in option:
            raise ConfigError(f"{caller}, {option!r}: it contains a null character")
    return options


def tag_values(caller: str, tags: Sequence[str]) -> tuple[str, ...]:
    """Return the values of `--tag` for the argument `tags`.

    Raises:
        ConfigError: `tags` is a string, or an element is not a string.
    """
    if isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags):
        raise ConfigError(f"{caller}, tags={tags!r}: give a list of strings")
    return tuple(tags)


def env_values(caller: str, env: Mapping[str, str | None] | None) -> tuple[str, ...]:
    """Return the values of `--env` for the argument `env`, in which None means the caller's value.

    Raises:
        ConfigError: a name or a value is not valid, a value is a secret that would be recorded, or the caller
            does not have the variable. The message does not contain a value.
    """
    values = []
    for name, value in (env or {}).items():
        if not isinstance(name, str) or "=" in name:
            raise ConfigError(f"{caller}, env: {name!r} is not the name of a variable")
        if not isinstance(value, str | None):
            raise ConfigError(
                f"{caller}, env: the value of {name} is of type {type(value).__name__}; give a string, or "
                "None for the variable's value here, which is not recorded"
            )
        values.append(name if value is None else f"{name}={value}")
    require_variables(parse_variables(values))
    return tuple(values)
