"""A headless Chromium, driven over its debugging pipe."""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 600.0
"""Seconds that the browser has for an answer or a condition, also on a machine under load."""


class Browser:
    """A browser with one tab."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self._process, self._write, self._read = process, write, read
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to the tab, and return its result."""
        return self._ask(method, parameters, self._session)

    def _ask(self, method: str, parameters: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {} if session is None else {"sessionId": session}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            found = self._receive()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]
            if "method" in found:
                self.events.append(found)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], PATIENCE)[0]:
                raise AssertionError(f"the browser does not answer within {PATIENCE:g} s")
            data = os.read(self._read, 1024 * 1024)
            if not data:
                raise RuntimeError("the browser has ended")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, address: str) -> None:
        """Open an address, and wait until its document is loaded."""
        self.events.clear()
        self.ask("Page.navigate", url=address)
        self._until_loaded()

    def reload(self) -> None:
        """Load the page again."""
        self.events.clear()
        self.ask("Page.reload")
        self._until_loaded()

    def _until_loaded(self) -> None:
        # A question to a document that is about to be replaced may remain without an answer.
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait(self, condition: str, patience: float = PATIENCE) -> None:
        """Wait until an expression in the page is true."""
        deadline = time.monotonic() + patience
        # Each try is an animation frame of the page.
        script = f"new Promise((done) => requestAnimationFrame(() => done(!!({condition}))))"
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):
                if self.run(script):
                    return
        state = self.run("document.body.innerText")
        raise AssertionError(f"not within {patience:g} s: {condition}\n{state[:3000]}")

    def text(self, selector: str) -> str:
        """Return the visible text of an element."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def key(self, name: str, shift: bool = False) -> None:
        """Press and release a key."""
        more = {"text": name} if len(name) == 1 else {}
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, " ": 32}.get(name, 0)
        common = {"key": name, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **common, **more)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **common)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send an event of the mouse."""
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        """Set the size of the page."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def scheme(self, name: str) -> None:
        """Prefer `light` or `dark` colors."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write a picture of the page."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def complaints(self) -> list[str]:
        """Return the errors that the page has logged, among them violations of its policy."""
        self.run("0")
        found = []
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"]))
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Return the addresses that the page has requested."""
        self.run("0")
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Start a browser whose profile is in a folder."""
    assert CHROMIUM is not None
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    # The browser reads descriptor 3 and writes 4.
    script = (
        "import fcntl, os, sys;"
        f"read, write = (fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in ({to_browser}, {from_browser}));"
        "os.dup2(read, 3); os.dup2(write, 4); os.execv(sys.argv[1], sys.argv[1:])"
    )
    flags = (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--disable-extensions", "--hide-scrollbars", "--mute-audio", "--remote-debugging-pipe"),
        f"--user-data-dir={folder}",
    )
    process = subprocess.Popen(
        [sys.executable, "-IS", "-c", script, CHROMIUM, *flags, "about:blank"],
        pass_fds=(to_browser, from_browser),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(process, write, read)
    finally:
        os.close(write)
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
