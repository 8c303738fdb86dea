import signal

from host_network import Host


def test_hosts_are_apart(hosts: tuple[Host, ...]) -> None:
    """Each host has its own folders at equal paths, and `ssh` gets there with the environment of the host."""
    here, there = hosts[:2]
    (here.work / "only").write_text("here")
    (there.work / "other").write_text("there")
    show = "pwd; ls; echo $HOME $TMPDIR"
    own = here.start("sh", "-c", show)
    over = here.start("ssh", there.name, f"cd {here.here}/work; {show}")
    assert (own.end(), over.end()) == (0, 0), over.err
    work = f"{here.here}/work"
    assert own.out.split() == [work, "only", f"{here.here}/home", f"{here.here}/tmp"]
    assert over.out.split() == [work, "other", f"{here.here}/home", f"{here.here}/tmp"]


def test_ending_and_cutting(hosts: tuple[Host, ...]) -> None:
    here, there = hosts[:2]
    there.accept_key(GIVEN="this")
    running = here.start("ssh", "-o", "ServerAliveInterval=1", there.name, "echo $GIVEN; sleep 1000")
    running.wait_until(lambda: "this" in running.out and len(there.matching("sleep 1000")) == 1)
    there.cut()
    assert running.end() == 255
    there.reset()
    assert there.left() == []
    there.refuse_key()
    refused = here.start("ssh", "-o", "BatchMode=yes", there.name, "true")
    assert refused.end() == 255
    assert "Permission denied" in refused.err
    running = here.start("sleep", "1000")
    running.wait_until(lambda: here.matching("sleep 1000"))
    here.signal_all(signal.SIGKILL)
    assert running.end() == -signal.SIGKILL
