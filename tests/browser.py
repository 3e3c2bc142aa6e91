"""Chromium driven over WebDriver, which is JSON over HTTP: no package is needed for it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SWITCHES = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
# Past any proxy: the driver is on this machine.
OPEN = build_opener(ProxyHandler({})).open


class Browser:
    """One tab."""

    def __init__(self, session: str) -> None:
        self.session = session

    def ask(self, path: str, **content: Any) -> Any:
        return _ask("POST", f"{self.session}/{path}", content)

    def script(self, code: str, *arguments: Any) -> Any:
        return self.ask("execute/sync", script=code, args=arguments)

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.ask("goog/cdp/execute", cmd=command, params=parameters)

    def show(self, path: Path, width: int, height: int = 844, *, dark: bool = False, phone: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", features=scheme)
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.devtools("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.ask("url", url=path.resolve().as_uri())

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.ask("se/log", type="browser")]

    def hover(self, x: float, y: float) -> None:
        self._point("mouse", [{"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0}])

    def tap(self, x: float, y: float) -> None:
        move = {"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0}
        self._point("touch", [move, {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}])

    def _point(self, kind: str, actions: list[dict[str, Any]]) -> None:
        self.ask("actions", actions=[{"type": "pointer", "id": kind, "parameters": {"pointerType": kind}, "actions": actions}])

    def press(self, *keys: str) -> None:
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.ask("actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def picture(self, path: Path, whole: bool = False) -> None:
        path.write_bytes(base64.b64decode(self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    assert CHROMIUM and DRIVER
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        with log.open("w") as output:
            driver = subprocess.Popen([DRIVER, "--port=0"], stdout=output, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{_port(log)}/session"
            options = {"binary": CHROMIUM, "args": [*SWITCHES, f"--user-data-dir={folder}/profile"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = _ask("POST", address, {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            try:
                yield Browser(f"{address}/{session}")
            finally:
                _ask("DELETE", f"{address}/{session}")
        finally:
            driver.terminate()
            driver.wait(10)


def _port(log: Path) -> int:
    for _ in range(100):
        for word in reversed(log.read_text().split()):
            number = word.rstrip(".")
            if "started successfully" in log.read_text() and number.isdecimal():
                return int(number)
        time.sleep(0.1)
    raise TimeoutError(f"chromedriver did not start: {log.read_text()}")


def _ask(method: str, address: str, content: dict[str, Any] | None = None) -> Any:
    data = None if content is None else json.dumps(content).encode()
    with OPEN(Request(address, data, {"Content-Type": "application/json"}, method=method), timeout=60) as response:
        return json.load(response)["value"]
