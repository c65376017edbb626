"""Alerts: events reach a real webhook once and in order, faults of the webhook do not reach the run, and its URL stays secret."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import NotHereError
from megarl.observe import alerts as module
from megarl.observe import webhook as webhook_module
from megarl.observe.alerts import Alerts
from megarl.observe.json_lines import read_lines
from megarl.observe.log import RunLog
from megarl.observe.restarts import AFTER, REPORT
from megarl.observe.webhook import unencrypted_notice, webhook_url, without_secrets
from megarl.preflight.recipe.observe import alerts_errors
from megarl.recipe import RecipeError
from megarl.recipe.observe import EVENTS, AlertsConfig, Event
from tests.support.log_recipe import make_recipe
from tests.support.webhook_receiver import TOKEN, Receiver

VARIABLE = "TEST_ALERT_URL"
ALL = AlertsConfig(url=VARIABLE, events=list(EVENTS))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BETWEEN", 0.0)
    monkeypatch.setattr(module, "FIRST_WAIT", 0.01)
    for name in (REPORT, AFTER):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as server:
        monkeypatch.setenv(VARIABLE, server.url)
        yield server


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def send(config: AlertsConfig = ALL, *events: Event) -> list[str]:
    """Send `events` and return the warnings."""
    warnings: list[str] = []
    with Alerts(config, "mine", warnings.append) as alerts:
        for number, event in enumerate(events):
            alerts.send(event, f"cause {number}", number)
    return warnings


# ---- delivery


def test_selected_events_arrive_once_and_in_order(receiver: Receiver) -> None:
    assert send(ALL, *EVENTS, *EVENTS) == []
    assert receiver.events == [*EVENTS, *EVENTS]
    assert [message["step"] for message in receiver.messages] == list(range(2 * len(EVENTS)))
    receiver.messages.clear()
    assert send(AlertsConfig(url=VARIABLE), *EVENTS) == []
    assert receiver.events == ["death", "given_up", "restart", "rollback", "outage", "failure", "end"]


def test_a_message_has_the_fields_and_only_the_first_line_of_the_cause(receiver: Receiver) -> None:
    with Alerts(ALL, "mine", print) as alerts:
        alerts.send("death", "service engine3 died: killed\nits output: a secret", 12)
        alerts.send("failure", "RecipeError: \n  key    data.x\n  what   no rows", 12)
        alerts.send("failure", "x" * 2000, 12)
    first, second, third = receiver.messages
    host = socket.gethostname()
    assert time.time() - time.mktime(time.strptime(first.pop("time")[:19], "%Y-%m-%dT%H:%M:%S")) < 60
    text = f"megarl: mine: a process failed, the run goes on at step 12 on {host}: service engine3 died: killed"
    cause = "service engine3 died: killed"
    assert first == {"text": text, "run": "mine", "host": host, "event": "death", "step": 12, "cause": cause}
    assert second["cause"] == "RecipeError: key data.x what no rows"
    assert len(third["cause"]) == 501 and third["cause"].endswith("…")


@pytest.mark.parametrize(
    ("form", "text_of"),
    [
        ("json", lambda body: body["text"]),
        ("slack", lambda body: body.pop("text") if set(body) == {"text"} else None),
        ("feishu", lambda body: body["content"]["text"] if body["msg_type"] == "text" else None),
        ("dingtalk", lambda body: body["text"]["content"] if body["msgtype"] == "text" else None),
        ("wecom", lambda body: body["text"]["content"] if body["msgtype"] == "text" else None),
    ],
)
def test_each_service_gets_its_body(receiver: Receiver, form: Any, text_of: Any) -> None:
    receiver.answers = [(200, json.dumps({"code": 0, "errcode": 0, "msg": "success"}))]
    warnings: list[str] = []
    with Alerts(AlertsConfig(url=VARIABLE, format=form), "运行", warnings.append) as alerts:
        alerts.send("failure", "a & <!everyone>", 3)
    assert warnings == []
    text = text_of(receiver.messages[0])
    assert text.startswith("megarl: 运行: failed at step 3 on ")
    shown = {"json": "a & <!everyone>", "slack": "a &amp; &lt;!everyone&gt;"}.get(form, "a & ‹!everyone>")
    assert text.endswith(shown), "text of a sample must not mention all members of a chat"


def test_a_message_is_repeated_after_a_passing_failure(receiver: Receiver) -> None:
    receiver.answers = [(503, "busy"), (429, "slow down"), (200, "ok"), (200, "ok")]
    assert send(ALL, "death", "end") == []
    assert receiver.events == ["death", "death", "death", "end"]


def test_messages_keep_a_distance_until_the_end(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats refuse messages above a rate; the last ones must not wait for that."""
    monkeypatch.setattr(module, "_BETWEEN", 60.0)
    with Alerts(ALL, "mine", print) as alerts:
        for number in range(3):
            alerts.send("death", "x", number)
        receiver.wait_for(1)
        time.sleep(0.3)
        assert len(receiver.messages) == 1
    assert len(receiver.messages) == 3


# ---- faults of the webhook


def test_a_dead_webhook_is_one_warning_and_no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{closed_port()}/hook/{TOKEN}")
    warnings: list[str] = []
    alerts = Alerts(ALL, "mine", warnings.append)
    began = time.monotonic()
    for number in range(20):
        alerts.send("death", "x", number)
    assert time.monotonic() - began < 0.5
    deadline = time.monotonic() + 30
    while alerts._waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (warning,) = warnings
    assert "did not receive the event 'death': no connection: ConnectError" in warning and TOKEN not in warning
    assert alerts.close() == "19 alerts of observe.alerts were not sent" and len(warnings) == 1


def test_a_webhook_that_hangs_does_not_keep_the_run(receiver: Receiver) -> None:
    receiver.delay = 3.0
    warnings: list[str] = []
    alerts = Alerts(ALL, "mine", warnings.append)
    alerts.send("death", "x", 1)
    alerts.send("end", "finished", 2)
    began = time.monotonic()
    assert alerts.close(seconds=0.2) == "2 alerts of observe.alerts were not sent"
    assert 0.2 <= time.monotonic() - began < 2.5 and warnings == []


def test_a_full_queue_drops_the_oldest(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    released = threading.Event()
    post = webhook_module.Webhook.post

    def wait(webhook: Any, message: dict[str, Any]) -> None:
        released.wait(20)
        post(webhook, message)

    monkeypatch.setattr(webhook_module.Webhook, "post", wait)
    warnings: list[str] = []
    with Alerts(ALL, "mine", warnings.append) as alerts:
        for number in range(10):
            alerts.send("death", "x", number)
        released.set()
    assert [message["step"] for message in receiver.messages] == [0, 8, 9]
    assert warnings == ["7 alerts of observe.alerts were not sent"]


@pytest.mark.parametrize(
    ("form", "answer", "words"),
    [
        ("feishu", (200, '{"code": 19024, "msg": "Key Words Not Found"}'), "Key Words Not Found"),
        ("dingtalk", (200, '{"errcode": 310000, "errmsg": "keywords not in content"}'), "keywords not in content"),
        ("wecom", (200, '{"errcode": 93000, "errmsg": "invalid webhook url"}'), "invalid webhook url"),
        ("dingtalk", (200, "<html>portal</html>"), "portal"),
        ("slack", (404, f"no_service at /hook/{TOKEN}"), "404: 'no_service at /hook/***'"),
    ],
)
def test_a_refused_message_is_not_repeated(receiver: Receiver, form: Any, answer: tuple[int, str], words: str) -> None:
    receiver.answers = [answer]
    (warning,) = send(AlertsConfig(url=VARIABLE, format=form), "failure")
    assert words in warning and TOKEN not in warning and len(receiver.messages) == 1


def test_redirects_are_not_followed(receiver: Receiver) -> None:
    with Receiver() as other:
        receiver.answers, receiver.headers = [(307, "")], {"location": other.url}
        (warning,) = send(ALL, "failure")
        assert other.messages == [] and "it answered 307, and redirects are not followed" in warning


def test_a_certificate_that_no_authority_signed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("key.pem", "certificate.pem")]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "1", "-nodes"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", files[0], "-out", files[1], *subject]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files[1], files[0])
    with Receiver() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        monkeypatch.setenv(VARIABLE, f"https://localhost:{server.server_port}/hook/{TOKEN}")
        (warning,) = send(ALL, "failure")
        assert server.messages == [] and "CERTIFICATE_VERIFY_FAILED" in warning and TOKEN not in warning


def test_a_client_that_cannot_be_made_is_a_warning(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "nonsense://proxy")
    (warning,) = send(ALL, "failure")
    assert "nonsense" in warning and receiver.messages == []


# ---- the URL


def test_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(NotHereError, match=f"{VARIABLE}"):
        webhook_url(ALL)
    for wrong in (
        f"hooks.example.com/{TOKEN}",
        f"https://name:{TOKEN}@host/",
        f"https://host/{TOKEN} x",
        f"ftp://h/{TOKEN}",
    ):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(RecipeError, match="not an http or https URL") as caught:
            webhook_url(ALL)
        assert TOKEN not in str(caught.value)
    monkeypatch.setenv(VARIABLE, f"http://chat.example.com/{TOKEN}\n")
    assert webhook_url(ALL) == f"http://chat.example.com/{TOKEN}"
    assert "plain http" in str(unencrypted_notice(ALL)) and TOKEN not in str(unencrypted_notice(ALL))
    for unremarkable in ("http://127.0.0.1:80/x", "https://chat.example.com/x"):
        monkeypatch.setenv(VARIABLE, unremarkable)
        assert unencrypted_notice(ALL) is None
    assert unencrypted_notice(AlertsConfig()) is None


def test_a_url_in_the_recipe_is_refused_and_not_repeated() -> None:
    (error,) = alerts_errors(AlertsConfig(url=f"https://host/{TOKEN}"))
    assert "names an environment variable" in str(error) and TOKEN not in str(error)
    (error,) = alerts_errors(AlertsConfig(url="ALERT_URL", events=["death", "deth"]))
    assert "unknown event 'deth'" in str(error) and "choose from start, death" in str(error)
    assert not list(alerts_errors(ALL))


def test_parts_of_the_url_are_hidden_in_texts() -> None:
    url = "https://host/services/T000/abc%2Fdef?key=0123456789&v=1#fragment"
    assert (
        without_secrets("POST /services/T000/abc/def 0123456789 v=1 at host", url)
        == "POST /***/T000/*** *** v=1 at host"
    )


# ---- the log of a run


def notices(path: Path) -> list[dict[str, Any]]:
    return read_lines(path / "notices.jsonl")[0]


def test_the_url_is_in_no_file_and_no_output_of_a_run(
    receiver: Receiver, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    receiver.answers = [(500, f"cannot POST {receiver.url}")] * 4
    with RunLog(make_recipe(alerts=ALL, report=True), tmp_path, 1, 1) as log:
        log.begin()
        log.warn("a warning")
        log.step(1)
    output = capfd.readouterr()
    assert receiver.events[-2:] == ["warning", "end"] and "did not receive the event 'start'" in output.out
    for text in (output.out, output.err, caplog.text):
        assert TOKEN not in text
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 5 and VARIABLE in (tmp_path / "recipe.resolved.yaml").read_text()
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_other_threads_keep_the_log_of_their_requests(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Alerts(ALL, "mine", print) as alerts:
        alerts.send("death", "x", 1)
        receiver.wait_for(1)
        logging.getLogger("httpx").info("a request of another thread")
    assert caplog.messages == ["a request of another thread"]


@pytest.mark.parametrize(
    ("error", "event", "cause"),
    [
        (None, "end", "finished"),
        (RuntimeError("engine 3 is gone\nits output"), "failure", "RuntimeError: engine 3 is gone"),
        (KeyboardInterrupt(), "end", "stopped: interrupted from the keyboard"),
        (SystemExit(), "end", "stopped: terminated from outside"),
    ],
)
def test_the_end_of_a_run_is_sent_before_its_process_ends(
    receiver: Receiver, tmp_path: Path, error: BaseException | None, event: str, cause: str
) -> None:
    raised = pytest.raises(type(error)) if error is not None else contextlib.nullcontext()
    with raised, RunLog(make_recipe(alerts=AlertsConfig(url=VARIABLE)), tmp_path, 1, 3) as log:
        log.begin()
        log.step(1)
        if error is not None:
            raise error
    (message,) = receiver.messages
    assert (message["event"], message["cause"], message["step"]) == (event, cause, 2)


def test_the_command_that_restarts_a_run_reports_its_failures(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPORT, str(tmp_path / "end.json"))
    with pytest.raises(RuntimeError), RunLog(make_recipe(alerts=ALL), tmp_path, 1, 3) as log:
        log.begin()
        raise RuntimeError
    assert receiver.events == ["start"]


def test_notices_have_their_event(receiver: Receiver, tmp_path: Path) -> None:
    with RunLog(make_recipe(alerts=ALL), tmp_path, 1, 9) as log:
        log.notice("plain")
        log.notice("engine1 died", "death")
        log.notice("engine1 does not restart", "given_up")
        log.notice("engine1 waits for a machine", "warning")
        log.warn("careful")
    assert [(note["level"], note.get("event")) for note in notices(tmp_path)] == [
        ("notice", None),
        ("warning", "death"),
        ("warning", "given_up"),
        ("warning", None),
        ("warning", None),
    ]
    assert receiver.events == ["death", "given_up", "warning", "warning", "end"]


def test_without_alerts_nothing_is_started(tmp_path: Path) -> None:
    with RunLog(make_recipe(), tmp_path, 1, 1) as log:
        log.warn("careful")
        assert log._alerts._thread is None
