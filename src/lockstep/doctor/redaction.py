"""Removes secrets, and names that identify persons and machines, from a text that will be published. Pure.

It removes too much rather than too little: a name of five letters or more is removed even within other words.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from lockstep.system.prose import printable

SECRET = "<secret>"
_USER, _HOST, _HOME, _ADDRESS = "<user>", "<host>", "<home>", "<address>"

_HARMLESS = frozenset(
    (
        *(
            "root",
            "user",
            "users",
            "home",
            "host",
            "hosts",
            "localhost",
            "secret",
            "address",
            "email",
            "test",
        ),
        *("debian", "ubuntu", "fedora", "centos", "linux", "python", "lockstep", "keras", "ray", "jax"),
        *("tensorflow", "torch", "pytorch", "numpy", "true", "false", "none", "yes", "no", "on", "off"),
        *("cluster", "task", "type", "index", "environment", "cloud", "worker", "chief", "master", "ps"),
        "evaluator",
    )
)
"""Words that occur in reports: as a user or host name they identify no person, and as a value no secret."""

_NOTHING = "(?!)"
_CUT = "..."
_LEAST_CUT = 4
"""The number of characters from which on the beginning of a secret is removed."""
_LONG = 5
_NAMES_SECRET = re.compile(
    "TOKEN|SECRET|PASSW|PASSPHRASE|KEY|CRED|AUTH|COOKIE|SESSION|SIGNATURE|DSN", re.IGNORECASE
)
_NAMES_HOST = re.compile("HOST|ADDR|NODE|PROXY|SERVER|ENDPOINT|UR[LI]|DOMAIN|DISPLAY", re.IGNORECASE)
_NAMES_USER = re.compile("USER|LOGNAME", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")
_TOKEN = re.compile(
    r"\b(?:(?:hf|gh[oprsu]|github_pat|glpat|sk|xox[abprs]|npm|pypi)[-_][\w-]{12,}|(?:AKIA|ASIA)[0-9A-Z]{12,}"
    r"|eyJ[\w-]+\.[\w-]+\.[\w-]*)"
)
_ASSIGNED = re.compile(r"((?:token|secret|passw\w*|api_?key)\s*[=:]\s*)[^\s,;]+", re.IGNORECASE)
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_HOMES = re.compile(r"(?<=/)(home|Users)/[^/\s:;,'\"()]+")
_IPV4 = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)")
_IN_NAME = re.compile(r"\bip-\d+(?:-\d+){3}[\w.-]*")
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F:]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(?:%\w+)?(?![\w:])")
_MAC = re.compile(r"(?<![\w:])[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}(?![\w:])")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


@dataclass(frozen=True)
class Identity:
    """The names that identify a person and a machine, besides those in the environment.

    Attributes:
        users: names of the user.
        homes: home folders.
        hosts: names of the machine.
    """

    users: tuple[str, ...]
    homes: tuple[str, ...]
    hosts: tuple[str, ...]


def is_secret(name: str) -> bool:
    """Whether a variable of this name may contain a secret."""
    return _NAMES_SECRET.search(name) is not None


class Redaction:
    """Replaces secrets, names, home folders and addresses with placeholders such as `<secret>` and `<user>`.

    Args:
        environ: the variables of the process, which name secrets, users and hosts.
        identity: further names.
    """

    def __init__(self, environ: Mapping[str, str], identity: Identity) -> None:
        values = {value.strip() for name, value in environ.items() if is_secret(name)}
        users = {*identity.users, *(value for name, value in environ.items() if _NAMES_USER.search(name))}
        hosts = {*identity.hosts, *(host for item in environ.items() for host in _hosts(*item))}
        homes = {environ.get("HOME", "").rstrip("/"), *(home.rstrip("/") for home in identity.homes)}
        # Findings show values without control characters.
        self._secrets = _secretive({*values, *map(printable, values)}, 3)
        secrets = [
            re.escape(text) if len(text) >= _LONG else rf"\b{re.escape(text)}\b" for text in self._secrets
        ]
        self._rules = (
            (re.compile("|".join(secrets) or _NOTHING), SECRET),
            (_CREDENTIALS, f"{SECRET}@"),
            (_TOKEN, SECRET),
            (_ASSIGNED, rf"\1{SECRET}"),
            (_EMAIL, "<email>"),
            (_paths(_secretive(homes, 2)), _HOME),
            (_names(_secretive(_with_domains(hosts), 2)), _HOST),
            (_names(_secretive(_with_words(users), 2)), _USER),
            (_HOMES, rf"\1/{_USER}"),
            (_IN_NAME, _HOST),
            (_MAC, _ADDRESS),
            (_UUID, "<id>"),
        )

    def clean(self, text: str) -> str:
        """Return `text` without secrets and names that identify persons and machines."""
        for pattern, placeholder in self._rules:
            text = pattern.sub(placeholder, text)
        text = self._without_beginnings(text)
        for addresses in (_IPV4, _IPV6):
            text = addresses.sub(_address, text)
        return text

    def _without_beginnings(self, text: str) -> str:
        """Remove secrets that were cut to shorten a value."""
        *parts, last = text.split(_CUT)
        return _CUT.join([*map(self._without_beginning, parts), last])

    def _without_beginning(self, text: str) -> str:
        for secret in self._secrets:
            for size in range(min(len(secret), len(text)), _LEAST_CUT - 1, -1):
                if text.endswith(secret[:size]):
                    return text[:-size] + SECRET
        return text


def _secretive(texts: Iterable[str], least: int) -> list[str]:
    """Return the texts that identify something, the longest first, because one may contain another."""
    names = {text for text in texts if len(text) >= least and text.lower() not in _HARMLESS}
    return sorted(names, key=len, reverse=True)


def _names(names: Iterable[str]) -> re.Pattern[str]:
    patterns = [
        re.escape(name) if len(name) >= _LONG else rf"(?<![A-Za-z]){re.escape(name)}(?![A-Za-z])"
        for name in names
    ]
    return re.compile("|".join(patterns) or _NOTHING, re.IGNORECASE)


def _paths(paths: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(rf"{re.escape(path)}(?![\w.-])" for path in paths) or _NOTHING)


def _hosts(name: str, value: str) -> Iterator[str]:
    """Yield the names of hosts in a variable; a separate rule handles IP addresses."""
    if name == "TF_CONFIG":
        # It may be invalid JSON.
        parts = re.findall(r'"([^"]*)"', value) or re.split(r"[\s,;]+", value)
    elif _NAMES_HOST.search(name):
        parts = re.split(r"[\s,;]+", value)
    else:
        return
    for part in parts:
        host = re.sub(r"^[a-zA-Z][\w+.-]*://", "", part)
        host = host.partition("/")[0].rpartition("@")[2].lstrip("*.")
        host = re.sub(r":[^:]*$", "", host)
        if re.search("[a-zA-Z]", host) and ":" not in host:
            yield host


def _with_domains(hosts: Iterable[str]) -> Iterator[str]:
    """Yield each name, and the names of the machine and of the domain in it."""
    for host in hosts:
        name, _, domain = host.partition(".")
        yield host
        if not name.isdigit():
            yield name
        if "." in domain:
            yield domain


def _with_words(users: Iterable[str]) -> Iterator[str]:
    """Yield each name, and the words of a full name."""
    for user in users:
        yield user
        yield from user.split()


def _address(match: re.Match[str]) -> str:
    # A colon or a full stop may follow.
    text = match[0] if match[0].endswith("::") else match[0].rstrip(":.")
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return match[0]
    is_common = address.is_loopback or address.is_unspecified
    return match[0] if is_common else _ADDRESS + match[0][len(text) :]
