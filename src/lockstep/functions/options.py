"""The options of `lockstep run` for the arguments of a function that starts a job."""

from collections.abc import Mapping

from lockstep.errors import ConfigError


def command_options(caller: str, values: Mapping[str, object]) -> list[str]:
    """Return options by their names without dashes; None and False values are omitted, True is a flag.

    Args:
        caller: the public function whose arguments they are, for messages.
        values: the values of the options.

    Raises:
        ConfigError: a value has a null character, which a command line cannot contain.
    """
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    options = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
    for option in options:
        if "\0" in option:
            raise ConfigError(f"{caller}, {option!r}: it contains a null character")
    return options
