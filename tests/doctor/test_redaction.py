"""Names and secrets leave no trace in a text, and what identifies no person stays."""

import pytest

from lockstep.doctor.redaction import Identity, Redaction

IDENTITY = Identity(
    ("alice", "Alice Liddell"), ("/home/alice", "/data/homes/al"), ("Wonder-7.corp.example.org",)
)
ENVIRON = {
    "HOME": "/srv/people/al",
    "USER": "al",
    "HF_TOKEN": "plain-looking-value",
    "WANDB_API_KEY": "a1b2",
    "DB_PASSWORD": "rabbit hole\n2nd line",
    "TOKENIZERS_PARALLELISM": "false",
    "MASTER_ADDR": "tea-party.corp.example.org",
    "https_proxy": "http://hatter:mad@gate.example.net:3128",
    "no_proxy": "localhost,127.0.0.1,.dodo.lan",
    "TF_CONFIG": '{"cluster": {"worker": ["duchess:2222", "10.1.2.3:2222"]}, "task": {"type": "worker"',
    "XDG_SESSION_TYPE": "tty",
}


def clean(text: str) -> str:
    return Redaction(ENVIRON, IDENTITY).clean(text)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("/home/alice/venv/bin/python", "<home>/venv/bin/python"),
        ("/srv/people/al", "<home>"),
        ("/data/homes/al/x and /data/homes/al2", "<home>/x and /data/homes/<user>2"),
        ("/home/bob/lib, /Users/bob/lib", "/home/<user>/lib, /Users/<user>/lib"),
        ("ALICE alice2 malice_x by liddell", "<user> <user>2 m<user>_x by <user>"),
        ("al wrote: all is also normal", "<user> wrote: all is also normal"),
        ("on wonder-7: WONDER-7.corp.example.org", "on <host>: <host>"),
        ("wonder-8.corp.example.org", "wonder-8.<host>"),
        ("duchess:2222 and 10.1.2.3:2222", "<host>:2222 and <address>:2222"),
        ("tea-party, gate.example.net, x.dodo.lan", "<host>, <host>, x.<host>"),
        ("proxy http://u:p@gate:1", "proxy http://<secret>@<host>:1"),
        ("is plain-looking-value.", "is <secret>."),
        ("is plain-loo... or plai... or pla...", "is <secret>... or <secret>... or pla..."),
        ("a1b2 a1b2c rabbit hole\n2nd line, rabbit hole?2nd line", "<secret> a1b2c <secret>, <secret>"),
        ("hf_abcdefghijklmnopqrst ghp_0123456789abcdefghij", "<secret> <secret>"),
        ("--token=abc, api_key: xyz", "--token=<secret>, api_key: <secret>"),
        ("write to bob@example.com", "write to <email>"),
        ("fe80::1: refused [2001:db8::1]:22 fe80::2%eth0.", "<address>: refused [<address>]:22 <address>."),
        ("ip-10-0-0-12.ec2.internal, 02:42:ac:11:00:02", "<host>, <address>"),
        ("GPU-8f3c1d2e-0a1b-2c3d-4e5f-60718293a4b5", "GPU-<id>"),
    ],
)
def test_what_identifies_is_replaced(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        "root@localhost: 127.0.0.1:80, ::1, 0.0.0.0:1, false",
        "keras 3.15.1, driver 535.104.05, cuDNN 9.10.2, 12:30:45, std::bad_alloc, 00000000:3B:00.0",
        "3f786850e387550fdab836ed7e6dc881de23001b3f786850e387550fdab836ed",
        "/usr/lib/python3.11/site-packages/jax/_src/core.py, line 7: worker 1 is the chief",
        "",
    ],
)
def test_what_identifies_nobody_stays(text: str) -> None:
    assert clean(text) == text


def test_without_names_and_secrets_nothing_is_replaced() -> None:
    text = "lockstep 0.1 on Debian, /usr/bin/python: ..."
    assert Redaction({}, Identity((), (), ())).clean(text) == text
