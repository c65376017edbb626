"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

SECONDS = 60  # for an answer on a busy machine
NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium_path() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One page of a headless browser. Collects the errors of the page's console in `errors`."""

    def __init__(self, profile: Path) -> None:
        program = chromium_path()
        assert program is not None
        options = [
            "--headless",
            "--disable-gpu",
            "--no-first-run",
            "--disable-extensions",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-quic",
        ]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium refuses to start as root otherwise
        self._process = subprocess.Popen(
            [program, *options, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.errors: list[str] = []
        self._number = 0
        try:
            self._socket = self._connect(profile / "DevToolsActivePort")
        except BaseException:
            self._end()
            raise
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _connect(self, port_file: Path) -> Any:
        from websockets.sync.client import connect

        port = self._port(port_file)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=SECONDS) as answer:
            page = next(target for target in json.load(answer) if target["type"] == "page")
        return connect(page["webSocketDebuggerUrl"], max_size=None, open_timeout=SECONDS)

    def _port(self, file: Path) -> int:
        for _ in range(1200):
            if file.exists() and (lines := file.read_text().splitlines()):
                return int(lines[0])
            assert self._process.poll() is None, "Chromium ended at its start"
            time.sleep(0.05)
        raise TimeoutError("Chromium did not open its port in 60 s")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=2 * SECONDS))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif message["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            entry = parameters["entry"]
            self.errors.append(f"{entry['text']} ({entry.get('url', '')})")
        elif message["method"] == "Page.javascriptDialogOpening":
            self.errors.append(f"a dialog opened: {parameters['message']}")

    def set_screen(self, width: int, height: int, *, dark: bool = False) -> None:
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression of the page's JavaScript, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60.0) -> float:
        """Wait until a JavaScript expression is true. Returns the seconds that it took."""
        began = time.monotonic()
        while not self.evaluate(f"Boolean({condition})"):
            waited = time.monotonic() - began
            assert waited < seconds, f"{condition} is false after {seconds:g} s; errors: {self.errors}"
            time.sleep(0.02)
        return time.monotonic() - began

    def screenshot(self, path: Path) -> None:
        answer = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        self._socket.close()
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(SECONDS)
