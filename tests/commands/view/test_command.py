"""`megarl view` as a process: addresses, ports, errors, the end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from megarl.commands.view.command import PORT, listen, start_text, view
from megarl.errors import InputError
from megarl.observe.page.viewed_run import ViewedRun
from tests.support.viewed_runs import make_run

ROOT = Path(__file__).parents[3]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    make_run(tmp_path / "run", 1)
    command = [sys.executable, "-m", "megarl", "view", str(tmp_path / "run"), "--port", "0", "--follow"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    yield started
    started.kill()
    started.wait()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_serves_until_it_is_stopped(process: subprocess.Popen[str], number: int, status: int) -> None:
    assert process.stdout is not None and process.stderr is not None
    address = re.fullmatch(r"run: (http://127\.0\.0\.1:(\d+)/\?token=([\w-]{32}))\n", process.stdout.readline())
    assert address, "the first line is the address"
    with httpx.Client(follow_redirects=True) as client:
        page = client.get(address[1])
        assert page.status_code == 200 and page.url.query == b"" and "megarl view" in page.text
        assert client.get(f"http://127.0.0.1:{address[2]}/api/runs").json()["follow"] is True
    assert httpx.get(f"http://127.0.0.1:{address[2]}/api/runs").status_code == 403
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert process.returncode == status
    assert address[3] not in out + error, "the token is printed once"
    assert "Traceback" not in error


def test_a_taken_port_is_refused_if_it_was_asked_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupant:
        port = occupant.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port}: Address already in use. Choose another --port"):
            listen("127.0.0.1", port)


def test_without_a_port_the_next_free_one_is_used() -> None:
    with listen("127.0.0.1", None) as first, listen("127.0.0.1", None) as second:
        ports = [first.getsockname()[1], second.getsockname()[1]]
        assert first.getsockname()[0] == "127.0.0.1"
    assert ports[0] >= PORT and ports[1] > ports[0]


def test_an_unknown_host_is_refused() -> None:
    with pytest.raises(InputError, match=r"--host no\.such\.name\.invalid: "):
        listen("no.such.name.invalid", 0)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 1)
    for path, words in [
        (tmp_path / "none", "does not exist.*megarl view runs/my-run"),
        (tmp_path, "Runs inside it: run"),
    ]:
        with pytest.raises(InputError, match=words):
            view([path], follow=False, host="127.0.0.1", port=0)


def test_the_text_names_the_risk_of_an_open_page(tmp_path: Path) -> None:
    runs = [ViewedRun(0, tmp_path, "run")]
    assert "ssh -L 8421:localhost:8421" in start_text(runs, "127.0.0.1", 8421, "t")
    opened = start_text(runs, "0.0.0.0", 8421, "t")
    assert "not encrypted" in opened and f"http://{socket.gethostname()}:8421/?token=t" in opened
    assert "http://[::2]:1/" in start_text(runs, "::2", 1, "t")
